"""Experiments: papers' tables and the table of all methods, which `fedhet table` makes."""
