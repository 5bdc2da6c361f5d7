"""Training: the batch loop, objectives, devices, and the transfer of tensors to them."""
