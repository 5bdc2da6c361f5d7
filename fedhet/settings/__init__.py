"""Settings of a run: base classes, and the tables that every run has."""
