"""Strategies of the methods, one per file."""
