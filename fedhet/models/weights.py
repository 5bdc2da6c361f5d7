"""Conversion between models and named arrays of their weights, for messages and storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.base.arrays import Array, Arrays
from fedhet.base.transfer import HOST, all_to_device

Model = TypeVar("Model", bound=nn.Module)


def to_arrays(model: nn.Module) -> dict[str, Array]:
    """Return a model's state dict as numpy arrays by name."""
    return on_host(model.state_dict())


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return tensors as numpy arrays by name: those of an accelerator are copied in one piece."""
    return {name: tensor.numpy() for name, tensor in all_to_device(tensors, HOST).items()}


def load_weights(model: Model, weights: Arrays) -> Model:
    """Load `weights`, by state-dict names, into `model` on any device, and return it."""
    state = {
        name: torch.from_numpy(np.require(value, requirements="W"))  # copied only if read-only
        for name, value in weights.items()
    }
    device = next((each.device for each in model.state_dict().values()), HOST)
    model.load_state_dict(all_to_device(state, device))
    return model
