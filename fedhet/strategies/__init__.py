"""Server-side strategies, one file per method that does not use another method's strategy."""
