"""Declarations of the methods, and a registry that finds methods by name."""
