"""Settings: declared once, resolved once; and the methods, found by name."""
