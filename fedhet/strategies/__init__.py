"""Server-side strategies, one file per method."""
