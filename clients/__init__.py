"""The client halves of the methods, one a file."""
