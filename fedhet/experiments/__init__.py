"""Experiments: papers' tables and the table of all methods, created by `fedhet table`."""
