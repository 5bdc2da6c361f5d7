"""The use of what was trained: a client's models, their predictions, and files for elsewhere."""
