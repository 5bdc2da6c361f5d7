"""Settings of a run: base classes, and the tables of settings that every run has."""
