"""Python API, predictions with trained models, and export of trained models."""
