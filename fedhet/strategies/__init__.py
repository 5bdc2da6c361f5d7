"""The server halves of the methods, one per file."""
