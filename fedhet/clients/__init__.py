"""The client halves of the methods, one per file."""
