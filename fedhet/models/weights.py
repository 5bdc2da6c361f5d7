"""Models <-> the named arrays in which their weights travel and are kept."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedhet.arrays import Array, Arrays


def to_arrays(model: nn.Module) -> dict[str, Array]:
    """Return the tensors of a model: name in the state dict -> numpy array."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def load_weights(model: nn.Module, weights: Arrays) -> None:
    """Give `model` the `weights` of its names, wherever it is placed."""
    state = {name: torch.tensor(np.asarray(value)) for name, value in weights.items()}
    model.load_state_dict(state)
