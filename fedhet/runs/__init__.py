"""A run's directory: its records and log, and the display of a run's progress."""
