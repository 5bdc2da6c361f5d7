"""The mathematics, on tensors: pure functions, each loss beside what it belongs to."""
