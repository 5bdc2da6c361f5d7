"""Generators of the project's pages from the code and the measured tables (`make reference`)."""
