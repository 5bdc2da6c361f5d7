"""Training loop, losses, evaluation, and devices."""
