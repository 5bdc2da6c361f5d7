"""Experiments: the tables of the papers and the table of all methods, made by `fedhet table`."""
