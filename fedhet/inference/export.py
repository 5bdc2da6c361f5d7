"""Exports a client's model for use without fedhet: safetensors, torch.export, or ONNX."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import FedhetError, ModelError, SettingsError, one_line
from fedhet.data.schema import TableSchema
from fedhet.inference.card import card
from fedhet.inference.client import TrainedClient
from fedhet.kinds import TEXT
from fedhet.learning.devices import scaled
from fedhet.models import Refitted
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
        self.place: Tensor
        self.of: Tensor
        self.mean: Tensor
        self.deviation: Tensor
        self.code: Tensor
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
        _require_onnx()
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
            _save(program, form, path, text)
    except FedhetError:
        raise
    except Exception as error:  # torch's tracer and its ONNX converter have many of their own
        raise ModelError(
            f"{record.client}'s model '{record.model}' cannot be exported as {form}: "
            f"{one_line(' '.join(str(error).split()))}"
        ) from error


def _save(program: Any, form: str, path: Path, text: str) -> None:
    if form == "pt2":
        with path.open("wb") as file:
            torch.export.save(program, file, extra_files={"card.json": text})
        return
    made: Any = torch.onnx.export(
        program, (), dynamo=True, input_names=["x"], output_names=["probabilities"], verbose=False
    )
    made.model.metadata_props["card"] = text
    made.save(str(path), external_data=False)


def _require_onnx() -> None:
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ModelError(
                f"ONNX needs the package '{name}': pip install 'fedhet[onnx]'"
            ) from None


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
