"""The methods' algorithms: pure functions on tensors and arrays, and their loss functions."""
