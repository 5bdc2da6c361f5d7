"""Dropout masks: the rate p, independent elements, and any memory layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedhet.models import build
from fedhet.models.base import Dropout

LAYOUTS = (torch.contiguous_format, torch.channels_last)


def dropped(p: float, shape: tuple[int, ...], seed: int = 0, layout=torch.contiguous_format):
    torch.manual_seed(seed)
    x = torch.ones(shape).to(memory_format=layout)
    return Dropout(p)(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [1 / 256, 0.25, 0.5, 255 / 256, 0.3, 1.0, 0.0])
def test_fraction_p_is_zero_and_the_rest_is_scaled(p, layout):
    found = dropped(p, (64, 8, 21, 9), layout=layout)
    assert found.stride() == torch.ones(found.shape).to(memory_format=layout).stride()
    zero, count = (found == 0).double().mean().item(), found.numel()
    assert abs(zero - p) <= 5 * math.sqrt(p * (1 - p) / count)
    if p < 1:
        kept = found[found != 0]
        assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)))


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_elements_are_dropped_independently(p):
    masks = (dropped(p, (4000, 32)) == 0).double()
    bound = 5 * math.sqrt(p * (1 - p) / len(masks))
    assert (masks.mean(0) - p).abs().max() < bound  # each of the eight bytes of a number alike
    correlation = torch.corrcoef(masks.T) - torch.eye(32)
    assert correlation.abs().max() < 6 / math.sqrt(len(masks))


def test_masks_depend_on_seed_and_call():
    assert torch.equal(dropped(0.25, (9, 7), seed=1), dropped(0.25, (9, 7), seed=1))
    assert not torch.equal(dropped(0.25, (9, 7), seed=1), dropped(0.25, (9, 7), seed=2))
    torch.manual_seed(0)
    layer, x = Dropout(0.25), torch.ones(9, 7)
    assert not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_rounding_does_not_move_the_threshold(dtype):
    torch.manual_seed(3)
    found = Dropout(0.5)(torch.ones(300, 300, dtype=dtype))
    assert found.dtype == dtype
    torch.manual_seed(3)
    assert torch.equal(found == 0, Dropout(0.5)(torch.ones(300, 300)) == 0)


def test_gradient_flows_where_the_output_is_kept():
    torch.manual_seed(0)
    x = torch.ones(50, 50, requires_grad=True)
    found = Dropout(0.25)(x)
    found.sum().backward()
    assert torch.equal(x.grad, found.detach())


def test_evaluation_drops_no_element():
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    torch.manual_seed(0)
    found = Dropout(0.5)(x[:, ::2])
    assert all(a in (0, 2 * b) for a, b in zip(found.ravel(), x[:, ::2].ravel(), strict=True))


def test_networks_use_seeded_dropout():
    for name in ("cnn2-dropout", "cnn3-dropout", "resnet9"):
        layers = [
            m for m in build(name, (1, 28, 28), 10, seed=0).modules() if isinstance(m, nn.Dropout)
        ]
        assert layers
        assert all(isinstance(layer, Dropout) for layer in layers)
