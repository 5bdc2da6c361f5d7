"""The server halves of the methods, one a file."""
