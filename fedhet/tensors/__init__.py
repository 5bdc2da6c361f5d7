"""Tensors: how they move between devices, and what is computed of them as one module."""
