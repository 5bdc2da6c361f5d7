"""Pretrained encoders of texts with some linear layers: `encoder-2:NAME`, `encoder-2-frozen:NAME`.

The number is that of the linear layers, 1 to 5, of which the last is the classifier. NAME is a
folder in $FEDHET_ENCODERS with `config.json` and `model.safetensors`, as the library `transformers`
saves an encoder. A frozen one does not belong to the model's weights: it is neither trained nor
sent, and a process keeps one copy.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.base.errors import ModelError, reason_of
from fedhet.data.texts import configuration, encoder_folder, encoder_parts
from fedhet.kinds import PADDING, TEXT, Kind, Shape
from fedhet.models.het import HetModel, join
from fedhet.models.texts import mean_of, present, trimmed

HIDDEN = 128
"""The width of linear layers before the last."""


def check_encoder(name: str) -> None:
    """Raise a FedhetError unless the encoder's folder is there."""
    configuration(encoder_parts(name)[2])


def assemble_encoder(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Return the encoder with its linear layers. Raises ModelError if texts do not fit it."""
    layers, frozen, folder = encoder_parts(name)
    if kind not in (None, TEXT) or not TEXT.fits(shape):
        raise ModelError(f"model '{name}' takes {TEXT.wanted}, not shape {shape}")
    encoder = _Encoder(folder, frozen)
    if shape[2] > encoder.vocabulary or shape[1] > encoder.longest:
        raise ModelError(
            f"model '{name}' takes texts of up to {encoder.longest} tokens below "
            f"{encoder.vocabulary}, not of {shape[1]} below {shape[2]}: 'data.tokenizer' = "
            f"{folder!r} gives it its own, and 'data.max-tokens' cuts them"
        )
    widths = [encoder.width] + [HIDDEN] * (layers - 1)
    hidden: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        hidden += [nn.Linear(inputs, outputs), nn.ReLU()]
    return join(nn.Sequential(encoder, *hidden), widths[-1], classes, feature_dim)


class _Encoder(nn.Module):
    """Tokens [N, L] -> the mean of the encoder's last states over the text, [N, D]."""

    def __init__(self, name: str, frozen: bool) -> None:
        super().__init__()
        config = configuration(name)
        self.width = _size(config, name, "hidden_size", "dim", "d_model")
        self.vocabulary = _size(config, name, "vocab_size")
        self.longest = _size(config, name, "max_position_embeddings")
        self.padding = int(config.get("pad_token_id") or 0)
        if self.padding:  # positions then begin after the padding's number
            self.longest -= self.padding + 1
        self.name = name
        self.network = None if frozen else _loaded(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a text, without those of its padding."""
        x = trimmed(x)
        there = present(x)
        network = self.network
        if network is not None:
            return mean_of(self._states(network, x, there), there)
        with torch.no_grad():
            return mean_of(self._states(_frozen(self.name, x.device), x, there), there)

    def _states(self, network: nn.Module, x: Tensor, there: Tensor) -> Tensor:
        # As `fedhet.data.texts` swaps them.
        ids = torch.where(x == PADDING, self.padding, x.where(x != self.padding, PADDING))
        found: Tensor = network(input_ids=ids, attention_mask=there.long()).last_hidden_state
        return found


def _size(config: dict[str, Any], name: str, *keys: str) -> int:
    """Return the first of `keys` in an encoder's configuration. Raises ModelError if none is."""
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise ModelError(f"encoder {name!r}: its config.json has no {' or '.join(keys)}")


@lru_cache(maxsize=2)
def _frozen(name: str, device: torch.device) -> nn.Module:
    return _loaded(name).to(device).eval()


def _loaded(name: str) -> nn.Module:
    """Return the encoder with its pretrained weights, from safetensors; no code is loaded."""
    try:
        from transformers import AutoModel
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise ModelError(
            f"encoder {name!r}: needs the package 'transformers': pip install 'fedhet[encoders]'"
        ) from None
    folder = encoder_folder(name)
    disable_progress_bar()
    try:
        network: nn.Module = AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # the library's own, for each fault of the folder
        raise ModelError(
            f"encoder {name!r}: {folder} cannot be loaded ({reason_of(error)})"
        ) from error
    return network.float()  # its file may hold half precision, which is not trained here
