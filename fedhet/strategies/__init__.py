"""Server-side strategies. A method without a file here uses another method's strategy."""
