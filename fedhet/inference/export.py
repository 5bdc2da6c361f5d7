"""Exports a client's model, with a card, for use without fedhet: safetensors, pt2, or ONNX."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedhet.base import __version__
from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import DataError, FedhetError, ModelError, SettingsError, one_line
from fedhet.data.spec import Stored
from fedhet.data.tables import TableSchema
from fedhet.data.texts import WORDS
from fedhet.data.values import MISSING, MISSING_NUMBER
from fedhet.inference.client import TrainedClient
from fedhet.kinds import IMAGE, PADDING, TEXT
from fedhet.learning.devices import scaled
from fedhet.models import HetModel, Refitted
from fedhet.runs.storage import apart

FORMATS = ("safetensors", "pt2", "onnx")
"""Weights alone; torch.export's program; ONNX."""
NEEDED = ("onnx", "onnxscript")
"""What torch needs to write ONNX."""
_NUMBER, _CODE, _MISSING = range(3)
"""The features of a table: a scaled number, one of several categories, or a missing value."""


class Encoder(nn.Module):
    """The features of a table's rows, as `TableSchema.encode` makes them.

    Computes in float64 like the schema: float32 has too few digits for dates.
    """

    place: Tensor
    of: Tensor
    mean: Tensor
    deviation: Tensor
    code: Tensor

    def __init__(self, schema: TableSchema) -> None:
        super().__init__()
        rows: list[tuple[int, int, float, float, int]] = []
        for place, column in enumerate(schema.columns):
            if column.kind == "category":
                rows += [(place, _CODE, 0.0, 1.0, code) for code in range(len(column.categories))]
            else:
                rows.append((place, _NUMBER, column.mean, column.deviation, 0))
            if column.missing:
                rows.append((place, _MISSING, 0.0, 1.0, 0))
        places, of, *scales = zip(*rows, strict=True)
        self.register_buffer("place", torch.tensor(places))
        self.register_buffer("of", torch.tensor(of))
        for name, values in zip(("mean", "deviation", "code"), scales, strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features [N, F] float32 of x [N, columns] float64.

        A category is its place in the schema, and a missing value is NaN.
        """
        x = x[:, self.place]
        absent = x.isnan()
        numbers = ((x - self.mean) / self.deviation).float()
        numbers = torch.where(absent, 0.0, numbers)
        codes = torch.where(self.of.eq(_CODE), x.eq(self.code).float(), absent.float())
        return torch.where(self.of.eq(_NUMBER), numbers, codes)


class Packaged(nn.Module):
    """A model from samples, as the client's files store them, to probabilities."""

    def __init__(self, model: nn.Module, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.before = model, before

    def forward(self, x: Tensor) -> Tensor:
        """Return the probabilities [N, C] of samples, which `before` prepares for the model."""
        probabilities: Tensor = self.model(self.before(x)).softmax(1)
        return probabilities


def export(trained: TrainedClient, form: str, path: Path, kind: str = "private") -> Path:
    """Write a client's model to `path` and its card to `path`.json; return the card's path.

    The card is stored in the file, too, so that the file can be used alone. The formats pt2 and
    onnx take a batch of any size. Raises SettingsError for another format,
    ModelError for a model that the format cannot hold, StateError if the file cannot be written.
    """
    if form not in FORMATS:
        raise SettingsError(f"'--format {form}' is not allowed: it takes {', '.join(FORMATS)}")
    model = trained.model(kind)
    if isinstance(model, Refitted):
        raise ModelError(
            f"{trained.record.client}'s model '{model.name}' has no weights to export: it is not "
            "stored but fitted again on the client's data; use it where these are, by "
            "`fedhet predict` or `fedhet.load(DIR).model(CLIENT)`"
        )
    text = card(trained, kind, form, scales_itself=form != "safetensors")
    with Folder(path.parent).replacing(path.name) as temporary:
        if form == "safetensors":
            weights = apart(trained.network(kind).state_dict())
            save_file(weights, temporary, metadata={"format": "pt", "card": text})
        else:
            _write_program(trained, model, form, temporary, text)
    return write_text(path.with_name(path.name + ".json"), text)


def _write_program(
    trained: TrainedClient, model: nn.Module, form: str, path: Path, text: str
) -> None:
    """Write a program whose metadata holds `text`, the card."""
    record = trained.record
    if form == "onnx":
        for name in NEEDED:
            try:
                importlib.import_module(name)
            except ImportError:
                rule = f"ONNX needs the package '{name}': pip install 'fedhet[onnx]'"
                raise ModelError(rule) from None
    if record.table is not None:
        columns = len(record.table.columns)
        example = torch.zeros(2, columns, dtype=torch.float64)
        packaged = Packaged(model, Encoder(record.table)).eval()
    else:
        shape = tuple(record.shape)
        if record.kind == TEXT.name:  # of full length, which is fixed in the program
            example = torch.ones(2, shape[1], dtype=torch.int64)
        else:
            example = torch.zeros(2, *shape)
            example = example.to(torch.uint8) if record.stored == "bytes" else example
        packaged = Packaged(model, scaled).eval()
    batch = {0: torch.export.Dim("batch", min=1)}
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(packaged, (example,), dynamic_shapes=(batch,))
            if form == "pt2":
                with path.open("wb") as file:
                    torch.export.save(program, file, extra_files={"card.json": text})
                return
            made: Any = torch.onnx.export(
                program, (), dynamo=True, input_names=["x"], output_names=["probabilities"],
                verbose=False,
            )  # fmt: skip
            made.model.metadata_props["card"] = text
            made.save(str(path), external_data=False)
    except FedhetError:
        raise
    except Exception as error:  # torch's tracer and its ONNX converter have many of their own
        raise ModelError(
            f"{record.client}'s model '{record.model}' cannot be exported as {form}: "
            f"{one_line(' '.join(str(error).split()))}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's progress lines and warnings about its own internals from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --- the card of an exported model, as JSON: its inputs, outputs, training, and accuracy

_FROM_BYTES = "x / 127.5 - 1, from bytes (0 to 255) to float32 in -1 to 1"
SCALING: dict[Stored, str] = {
    "bytes": _FROM_BYTES,
    "scaled": _FROM_BYTES,
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
        "output": {
            "name": "probabilities" if scales_itself else "logits",
            "of": "classes",
            "outside_label_space": 0 if scales_itself else "to be left out",
        },
        "accuracy": accuracy,
        **({"accuracy_unknown": why} if why else {}),
        "versions": {"fedhet": __version__, "torch": str(torch.__version__)},
    }
    return json.dumps(content, indent=1) + "\n"


def _input(trained: TrainedClient, scales_itself: bool) -> dict[str, Any]:
    """Return the description of the inputs, from which raw samples can be prepared."""
    record = trained.record
    if schema := record.table:
        return {
            "name": "x",
            "shape": ["N", len(schema.columns) if scales_itself else sum(schema.widths)],
            "type": "float64" if scales_itself else "float32",
            "values": VALUES,
            "scaling": "in the file" if scales_itself else FEATURES,
            "target": schema.target,
            "columns": [column.model_dump(mode="json") for column in schema.columns],
            "missing": sorted(MISSING | set(schema.missing)),
            "missing_numbers": sorted(MISSING_NUMBER),
        }
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
        found["channels"] = {1: ["gray"], 3: ["red", "green", "blue"]}.get(shape[0], shape[0])
        found["size"] = resized if trained.config.run.data.image_size else size
    return found
