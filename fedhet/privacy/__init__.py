"""Differential privacy of a client's samples: the noise, what it costs, and what was spent."""
