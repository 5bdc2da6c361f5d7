"""Use of trained models: the Python API, predictions, and export."""
