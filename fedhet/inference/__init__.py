"""Python API, and use of trained models for predictions and export."""
