"""Clients of the methods, one per file."""
