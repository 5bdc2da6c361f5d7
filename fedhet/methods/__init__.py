"""Method declarations, and a registry that finds methods by name."""
