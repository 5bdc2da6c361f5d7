"""Pretrained encoders on this machine: folders in $FEDHET_ENCODERS, as `transformers` saves them.

A run names an encoder, never a path: each machine has its own folder of encoders. Weights are read
from safetensors files alone, and no code is loaded.
"""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, ModelError, SettingsError, reason_of

VARIABLE = "FEDHET_ENCODERS"
_MODEL = re.compile(r"encoder-([1-5])(-frozen)?:(.+)")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,100}", re.ASCII)


def is_encoder(model: str) -> bool:
    """Return whether the name of a model is an encoder's, `encoder-2:NAME` or the like."""
    return _MODEL.fullmatch(model) is not None


def encoder_parts(model: str) -> tuple[int, bool, str]:
    """Return the linear layers of such a model, whether it is frozen, and its encoder's name."""
    found = _MODEL.fullmatch(model)
    if found is None:
        raise ModelError(f"model '{model}' is not of the form 'encoder-2:NAME'")
    return int(found[1]), bool(found[2]), found[3]


def encoder_folder(name: str) -> str:
    """Return the folder of an encoder. Raises SettingsError, or DataError if it is absent."""
    if not _NAME.fullmatch(name):
        raise SettingsError(f"encoder {name!r}: a name has letters, digits, '.', '_' and '-'")
    home = os.environ.get(VARIABLE)
    if not home:
        raise SettingsError(
            f"encoder {name!r}: the environment variable {VARIABLE} must name the folder that "
            "holds the encoders' folders"
        )
    folder = expanded(home) / name
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder (the encoder {name!r})")
    return str(folder)


def configuration(name: str) -> dict[str, Any]:
    """Return the content of an encoder's config.json. Raises DataError if it is not readable."""
    return _read(encoder_folder(name))


@lru_cache(maxsize=16)
def _read(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable configuration ({reason_of(error)})") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: not a readable configuration (it is not an object)")
    return found
