"""The card of an exported model, as JSON: its inputs, outputs, training, and accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedhet.base.errors import DataError, SettingsError
from fedhet.base.version import __version__
from fedhet.data.schema import TableSchema
from fedhet.data.spec import Stored
from fedhet.data.texts import WORDS
from fedhet.data.values import MISSING, MISSING_NUMBER
from fedhet.inference.client import TrainedClient
from fedhet.kinds import IMAGE, PADDING, TEXT
from fedhet.models import HetModel

SCALING: dict[Stored, str] = {
    "bytes": "x / 127.5 - 1, from bytes (0 to 255) to float32 in -1 to 1",
    "scaled": "x / 127.5 - 1, from bytes (0 to 255) to float32 in -1 to 1",
    "given": "none: float32 in the range of the client's own samples",
}
"""How samples are scaled before a model takes them, by how the client's own were stored."""
VALUES = {
    "number": "the number, without its unit",
    "date": "days since 1970-01-01, with the time of day as a fraction; UTC if no zone is given",
    "category": "the position in categories, from 0; -1 for any other word",
    "missing": "NaN, for an empty value and for the words in missing (in any case); of numbers and "
    "dates, also for those in missing_numbers",
}
"""What the values of a table's columns stand for, by the kind of the column."""
FEATURES = (
    "number, date: (value - mean) / deviation, or 0 if it is missing; category: a feature for each "
    "of the categories, 1 for the value and 0 for the others; if a column has missing = true, a "
    "further feature follows, 1 for a missing value and 0 otherwise"
)
"""How the values of a table's columns become features."""
HASHED = (
    "the words and punctuation marks (regular expression \\w+|[^\\w\\s]) of the text, in Unicode's "
    "NFKC form and case-folded; the token of a word is 1 + h mod (vocabulary - 1), where h is the "
    "BLAKE2b hash of 8 bytes of its UTF-8 form, as a big-endian number; a text without words has "
    "the word ''; longer texts are cut, shorter ones are padded at the end"
)
"""How texts become tokens with `data.tokenizer` = words."""
ENCODED = (
    "the tokens of the encoder's tokenizer.json without its padding token, in which the numbers 0 "
    "and pad_token_id (of config.json) are exchanged; longer texts are cut, shorter ones are "
    "padded at the end"
)
"""How texts become tokens with the tokenizer of an encoder."""


def card(trained: TrainedClient, kind: str, form: str, scales_itself: bool) -> str:
    """Return the card of a client's model of a kind, exported in a format, as JSON.

    `scales_itself`: the file scales its inputs, and encodes the columns of a table. The accuracy is
    null if the data on which it is measured cannot be read. A card contains no path of this
    machine.
    """
    record, run = trained.record, trained.config.run
    try:
        accuracy: dict[str, float] | None = trained.accuracy(kind)
        why = ""
    except (DataError, SettingsError):  # their words name folders, which are nobody else's business
        accuracy, why = None, "the data on which it is measured cannot be read here"
    network = trained.network(kind)
    width = network.feature_dim if isinstance(network, HetModel) else None
    content = {
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
    return json.dumps(content, indent=1) + "\n"


def _input(trained: TrainedClient, scales_itself: bool) -> dict[str, Any]:
    """Return the description of the inputs, from which raw samples can be prepared."""
    record = trained.record
    if record.table is not None:
        return _columns(record.table, scales_itself)
    shape = tuple(record.shape)
    if record.kind == TEXT.name:
        settings = trained.config.run.data
        hashed = settings.tokenizer == WORDS
        return {
            "name": "x",
            "shape": ["N", settings.max_tokens],
            "type": "int64",
            "tokenizer": WORDS if hashed else Path(settings.tokenizer).name,
            "vocabulary": shape[-1],
            "padding": PADDING,
            "tokens": HASHED if hashed else ENCODED,
        }
    takes_bytes = scales_itself and record.stored == "bytes"
    found: dict[str, Any] = {
        "name": "x",
        "shape": ["N", *shape],
        "type": "uint8" if takes_bytes else "float32",
        "scaling": "in the file" if takes_bytes else SCALING[record.stored],
    }
    if record.kind == IMAGE.name:
        size = f"{shape[2]} x {shape[1]} pixels"
        resized = f"resized to {size} by bicubic interpolation of Pillow"
        found["axes"] = ["N", "channel", "row", "column"]
        found["channels"] = {1: ["grey"], 3: ["red", "green", "blue"]}.get(shape[0], shape[0])
        found["size"] = resized if trained.config.run.data.image_size else size
    return found


def _columns(schema: TableSchema, encodes_itself: bool) -> dict[str, Any]:
    """Return the description of a table's columns: a value a column, or the features of all."""
    return {
        "name": "x",
        "shape": ["N", len(schema.columns) if encodes_itself else sum(schema.widths)],
        "type": "float64" if encodes_itself else "float32",
        "values": VALUES,
        "scaling": "in the file" if encodes_itself else FEATURES,
        "target": schema.target,
        "columns": [column.model_dump(mode="json") for column in schema.columns],
        "missing": sorted(MISSING | set(schema.missing)),
        "missing_numbers": sorted(MISSING_NUMBER),
    }


def _output(scales_itself: bool) -> dict[str, Any]:
    if scales_itself:
        return {"name": "probabilities", "of": "classes", "outside_label_space": 0}
    return {"name": "logits", "of": "classes", "outside_label_space": "to be left out"}
