"""Settings: what a table of them is, and every one that all runs have, declared once."""
