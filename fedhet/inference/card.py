"""The card of an exported model: what a person must know to use it, as JSON next to its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedhet.data.spec import Stored
from fedhet.disk.folder import write_text
from fedhet.errors import DataError, SettingsError
from fedhet.inference.client import TrainedClient
from fedhet.models import HetModel
from fedhet.version import __version__

SCALING: dict[Stored, str] = {
    "bytes": "x / 127.5 - 1, from bytes (0 to 255) to float32 in -1 to 1",
    "scaled": "x / 127.5 - 1, from bytes (0 to 255) to float32 in -1 to 1",
    "given": "none: float32 in the range of the client's own samples",
}
"""How samples are scaled before a model takes them, by how the client's own were stored."""


def card(trained: TrainedClient, kind: str, form: str, scales_itself: bool) -> dict[str, Any]:
    """Return the card of a client's model of a kind, exported in a format.

    `scales_itself`: the file scales its inputs. The accuracy is None if the data on which it is
    measured is not there. No path of this machine is in a card.
    """
    record, run = trained.record, trained.config.run
    try:
        accuracy: dict[str, float] | None = trained.accuracy(kind)
        why = ""
    except (DataError, SettingsError):  # their words name folders, which are nobody else's business
        accuracy, why = None, "the data on which it is measured cannot be read here"
    network = trained.network(kind)
    width = network.feature_dim if isinstance(network, HetModel) else None
    return {
        "format": form,
        "method": run.method,
        "dataset": "a site's own data" if record.folder else run.data.dataset.partition(":")[0],
        "client": record.client,
        "kind": kind,
        "model": record.model if kind == "private" else "",
        "features": width,
        "run": record.run,
        "seed": run.seed,
        "round": trained.round,
        "participations": trained.participations,
        "training": run.training.describe(),
        "training_samples": record.samples,
        "classes": record.classes,
        "label_space": [record.classes[number] for number in record.space],
        "input": _input(trained, scales_itself),
        "output": _output(scales_itself),
        "accuracy": accuracy,
        **({"accuracy_unknown": why} if why else {}),
        "versions": {"fedhet": __version__, "torch": str(torch.__version__)},
    }


def write_card(path: Path, content: dict[str, Any]) -> Path:
    """Write a card next to the exported file `path`; return the card's path. Raises StateError."""
    text = json.dumps(content, indent=1) + "\n"
    return write_text(path.with_name(path.name + ".json"), text)


def _input(trained: TrainedClient, scales_itself: bool) -> dict[str, Any]:
    stored = trained.record.stored
    takes_bytes = scales_itself and stored == "bytes"
    return {
        "name": "x",
        "shape": ["N", *trained.record.shape],
        "type": "uint8" if takes_bytes else "float32",
        "scaling": "in the file" if takes_bytes else SCALING[stored],
    }


def _output(scales_itself: bool) -> dict[str, Any]:
    if scales_itself:
        return {"name": "probabilities", "of": "classes", "outside_label_space": 0}
    return {"name": "logits", "of": "classes", "outside_label_space": "to be left out"}
