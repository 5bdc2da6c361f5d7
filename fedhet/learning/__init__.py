"""Training: the batch loop, losses, and devices."""
