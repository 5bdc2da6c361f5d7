"""A run's settings, from where they are given to what the run gets; and methods, found by name."""
