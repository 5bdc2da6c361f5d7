"""Export of trained models with a model card, so that they can be used without fedhet."""

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

from fedhet.algorithms import LORA_A, LORA_B
from fedhet.base import __version__
from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import DataError, FedhetError, ModelError, SettingsError, one_line
from fedhet.client_runtime.samples import ServerRecord
from fedhet.data.dataset import Stored
from fedhet.data.schemas import TableSchema
from fedhet.data.texts import WORDS, configuration
from fedhet.data.words import MISSING
from fedhet.inference.client import TrainedClient
from fedhet.kinds import IMAGE, PADDING, TEXT
from fedhet.learning.devices import scaled
from fedhet.models import HetModel, Refitted
from fedhet.models.adapted import Adapted, merged_base, peft_config
from fedhet.runs.records import OWN_DATA
from fedhet.runs.storage import unshared
from fedhet.tasks import CLASSIFICATION, Regression, Task, stored_task
from fedhet.wire.identity import SERVER

FORMATS = ("safetensors", "pt2", "onnx", "peft", "merged")
"""Export formats: weights only, a torch.export program, ONNX and, for models with adapters,
adapters for the PEFT library or the base model with merged adapters."""
DIRECTORIES = ("peft", "merged")
"""Export formats that consist of several files in a directory."""
HEAD = "head.safetensors"
"""Name of the file in an exported directory that contains the layers after the base model."""
NEEDED = ("onnx", "onnxscript")
"""Packages that PyTorch requires to write ONNX."""
_NUMBER, _CODE, _MISSING = range(3)
"""Kinds of table features: scaled number, one-hot category, and missing-value indicator."""


class Encoder(nn.Module):
    """Module that encodes table rows like `fedhet.data.tables.encode`.

    It computes in float64, because float32 has too few digits for dates.
    """

    column: Tensor
    kind: Tensor
    mean: Tensor
    deviation: Tensor
    code: Tensor

    def __init__(self, schema: TableSchema) -> None:
        super().__init__()
        rows: list[tuple[int, int, float, float, int]] = []
        for index, column in enumerate(schema.columns):
            if column.type == "category":
                rows += [(index, _CODE, 0.0, 1.0, code) for code in range(len(column.values))]
            else:
                rows.append((index, _NUMBER, *column.scale, 0))
            if column.optional:
                rows.append((index, _MISSING, 0.0, 1.0, 0))
        columns, kinds, *scales = zip(*rows, strict=True)
        self.register_buffer("column", torch.tensor(columns))
        self.register_buffer("kind", torch.tensor(kinds))
        for name, values in zip(("mean", "deviation", "code"), scales, strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Encode float64 rows x [N, columns] as float32 features [N, F].

        In `x`, a category is its index in the schema, and a missing value is NaN.
        """
        x = x[:, self.column]
        missing = x.isnan()
        numbers = ((x - self.mean) / self.deviation).float()
        numbers = torch.where(missing, 0.0, numbers)
        codes = torch.where(self.kind.eq(_CODE), x.eq(self.code).float(), missing.float())
        return torch.where(self.kind.eq(_NUMBER), numbers, codes)


class ExportedModel(nn.Module):
    """Model that maps unscaled samples, as stored in the client's files, to predictions."""

    def __init__(
        self, model: nn.Module, preprocess: Callable[[Tensor], Tensor], task: Task = CLASSIFICATION
    ) -> None:
        super().__init__()
        self.model, self.preprocess, self._decode = model, preprocess, task.decode

    def forward(self, x: Tensor) -> Tensor:
        """Return the class probabilities [N, C], or the predictions of another task [N, ...]."""
        return self._decode(self.model(self.preprocess(x)))


def export(trained: TrainedClient, form: str, path: Path, kind: str = "") -> Path:
    """Export a model of a client or of the server to `path` and its model card to `path`.json.

    The formats peft and merged are written as a directory. Files in all other formats also contain
    the card. Programs in the formats pt2 and onnx support any batch size.

    Returns:
        Path of the model card.

    Raises:
        SettingsError: If the format is unknown.
        ModelError: If the format does not support the model.
        StateError: If the file cannot be written.
    """
    if form not in FORMATS:
        raise SettingsError(f"--format: expected one of {', '.join(FORMATS)}, got '{form}'")
    kind = kind or trained.default_kind
    model = trained.model(kind)
    if isinstance(model, Refitted):
        raise ModelError(
            f"{trained.record.client}: cannot export model '{model.name}', because it is not "
            "stored, but refitted on the client's data. Use `fedhet predict`, or "
            "`fedhet.load(DIR).model(CLIENT)`."
        )
    text = card(trained, kind, form, is_scaling=form in ("pt2", "onnx"))
    if form in DIRECTORIES:
        _write_directory(trained, kind, form, path)
        return write_text(path.with_name(path.name + ".json"), text)
    with Folder(path.parent).replacing(path.name) as temporary:
        if form == "safetensors":
            weights = unshared(trained.network(kind).state_dict())
            save_file(weights, temporary, metadata={"format": "pt", "card": text})
        else:
            _write_program(trained, model, form, temporary, text)
    return write_text(path.with_name(path.name + ".json"), text)


def _write_directory(trained: TrainedClient, kind: str, form: str, path: Path) -> None:
    """Write adapters or a merged base model, and the layers after it.

    `PeftModel.from_pretrained` loads the adapters, and `AutoModel.from_pretrained` loads the merged
    model. Raises ModelError if the model has no adapters.
    """
    network = trained.network(kind)
    encoder = next((each for each in network.modules() if isinstance(each, Adapted)), None)
    if encoder is None:
        raise ModelError(
            f"{trained.record.client}: format {form} requires a model with adapters, such as "
            f"encoder-1-lora8:NAME, got '{trained.architecture(kind)}'"
        )
    prefix = next(name for name, each in network.named_modules() if each is encoder) + "."
    head = {k: v for k, v in network.state_dict().items() if not k.startswith(prefix)}
    if form == "peft":
        config, file = peft_config(encoder), "adapter_config.json"
        weights: dict[str, Tensor] = {}
        for layer, (b, a) in encoder.changes().items():
            name = f"base_model.model.{layer}"
            weights |= {name + LORA_A: a, name + LORA_B: b}
        weights_file = "adapter_model.safetensors"
    else:
        config, file = configuration(encoder.name.base), "config.json"
        weights, weights_file = merged_base(encoder).state_dict(), "model.safetensors"
    directory = Folder(path)
    for name, tensors in ((weights_file, weights), (HEAD, head)):
        with directory.replacing(name) as temporary:
            save_file(unshared(tensors), temporary, metadata={"format": "pt"})
    write_text(path / file, json.dumps(config, indent=1) + "\n")


def _write_program(
    trained: TrainedClient, model: nn.Module, form: str, path: Path, text: str
) -> None:
    """Write a pt2 or ONNX program with the card `text` in its metadata."""
    record = trained.record
    if form == "onnx":
        for name in NEEDED:
            try:
                importlib.import_module(name)
            except ImportError:
                raise ModelError(
                    f"ONNX export requires the package '{name}'. Run: pip install 'fedhet[onnx]'"
                ) from None
    if record.format.schema is not None and record.format.schema.columns:
        columns = len(record.format.schema.columns)
        example = torch.zeros(2, columns, dtype=torch.float64)
        exported = ExportedModel(model, Encoder(record.format.schema), record.format.task).eval()
    else:
        shape = tuple(record.format.shape)
        if record.format.kind == TEXT.name:  # The program has a fixed text length.
            example = torch.ones(2, shape[1], dtype=torch.int64)
        else:
            example = torch.zeros(2, *shape)
            example = example.to(torch.uint8) if record.format.stored == "bytes" else example
        exported = ExportedModel(model, scaled, record.format.task).eval()
    batch = {0: torch.export.Dim("batch", min=1)}
    try:
        with _quiet(), torch.no_grad():
            exported(example)  # Load frozen weights before tracing, which would replace them.
            program = torch.export.export(exported, (example,), dynamic_shapes=(batch,))
            if form == "pt2":
                with path.open("wb") as file:
                    torch.export.save(program, file, extra_files={"card.json": text})
                return
            onnx: Any = torch.onnx.export(
                program, (), dynamo=True, input_names=["x"],
                output_names=[_output(trained, True)["name"]], verbose=False,
            )  # fmt: skip
            onnx.model.metadata_props["card"] = text
            onnx.save(str(path), external_data=False)
    except FedhetError:
        raise
    except Exception as error:  # PyTorch's tracer and ONNX converter raise many exception types.
        raise ModelError(
            f"{record.client}: cannot export model '{record.model}' as {form}: "
            f"{one_line(' '.join(str(error).split()))}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress output and internal warnings from PyTorch's exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --- model card: JSON with the inputs, outputs, training and scores of a model

_FROM_BYTES = "x / 127.5 - 1, from bytes (0 to 255) to float32 (-1 to 1)"
SCALING: dict[Stored, str] = {
    "bytes": _FROM_BYTES,
    "scaled": _FROM_BYTES,
    "given": "none: float32 in the range of the client's training samples",
}
"""Description of the scaling of model inputs, by the storage format of the client's samples."""
VALUES = {
    "number": "the number, without its unit",
    "date": "days since 1970-01-01, with the time of day as a fraction; UTC if no zone is given",
    "category": "the index in values, from 0; -1 for any other word",
    "missing": "NaN for an empty value, and for the texts in missing and in the column's missing",
}
"""Description of the encoding of table values as numbers, by the type of the column."""
FEATURES = (
    "number, date: (value - mean) / deviation, or 0 if missing; category: one-hot over the "
    "values; a column with optional = true adds a feature that is 1 for a missing value and 0 "
    "otherwise"
)
"""Description of the conversion of table values to features."""
HASHED = (
    "words and punctuation marks (regular expression \\w+|[^\\w\\s]) of the text in Unicode NFKC "
    "form, case-folded; the token of a word is 1 + h mod (vocabulary - 1), where h is the 8-byte "
    "BLAKE2b hash of its UTF-8 form as a big-endian number; an empty text consists of the word ''; "
    "longer texts are truncated, shorter texts are padded at the end"
)
"""Description of the tokenization if `data.tokenizer` is words."""
ORDER = (
    "the quantiles of the first target, then of the second target, and so on; sort the quantiles "
    "of each target"
)
"""Description of the output order of a network that was trained with the quantile loss."""
ENCODED = (
    "tokens of the encoder's tokenizer.json, including the special tokens that it adds; token 0 is "
    "written as vocabulary - 1, because 0 is padding; longer texts are truncated, shorter texts "
    "are padded at the end"
)
"""Description of the tokenization with an encoder's tokenizer."""


def card(trained: TrainedClient, kind: str, form: str, is_scaling: bool) -> str:
    """Build the card of an exported model as JSON, without paths on this machine.

    `is_scaling` states whether the exported program scales its inputs and encodes table columns.
    The accuracy, or `scores` for another task, is null if the test data is unavailable.
    """
    record, run = trained.record, trained.config.run
    is_classification = record.format.task.name == CLASSIFICATION.name
    name, reason, scores = "accuracy" if is_classification else "scores", "", None
    try:
        scores = trained.accuracy(kind) if is_classification else trained.scores(kind)
    except (DataError, SettingsError):  # Omit the message, because it may contain local paths.
        reason = "there is no common test set, or the test data is unavailable on this machine"
    network = trained.network(kind)
    width = network.feature_dim if isinstance(network, HetModel) else None
    content = {
        "format": form,
        "method": run.method,
        "dataset": _dataset(trained),
        "client": record.client,
        "kind": kind,
        "model": trained.architecture(kind),
        "features": width,
        "run": record.run,
        "seed": run.seed,
        "round": trained.round,
        "participations": trained.participations,
        "training": run.training.describe(),
        # Averaged models have learned from the samples of several clients.
        **(
            {"training_samples": record.samples}
            if record.client != SERVER and kind != "global"
            else {}
        ),
        **(
            {
                "classes": record.format.classes,
                "label_space": [record.format.classes[number] for number in record.space],
            }
            if is_classification
            else {"task": stored_task(record.format.task), "targets": record.format.classes}
        ),
        "input": _input(trained, is_scaling),
        "output": _output(trained, is_scaling),
        name: scores,
        **({f"{name}_unknown": reason} if reason else {}),
        "versions": {"fedhet": __version__, "torch": str(torch.__version__)},
    }
    return json.dumps(content, indent=1) + "\n"


def _dataset(trained: TrainedClient) -> str:
    """Return the name of the training data, without paths on this machine."""
    record = trained.record
    if isinstance(record, ServerRecord) and record.own_data:
        return OWN_DATA
    if record.source:
        return "local data of a site"
    return trained.config.run.data.dataset.partition(":")[0]


def _output(trained: TrainedClient, is_scaling: bool) -> dict[str, Any]:
    """Describe the model outputs."""
    task = trained.record.format.task
    if task.name == CLASSIFICATION.name:
        return {
            "name": "probabilities" if is_scaling else "logits",
            "of": "classes",
            "outside_label_space": 0 if is_scaling else "to be excluded",
        }
    scaling = "in the file" if is_scaling else task.rule
    output: dict[str, Any] = {"name": "predictions", "of": "targets", "scaling": scaling}
    if isinstance(task, Regression) and task.quantiles:
        output["of"] = "quantiles of the targets"
        shape = ["N", len(trained.record.format.classes), len(task.quantiles)]
        output |= {"shape": shape} if is_scaling else {"order": ORDER}
    return output


def _input(trained: TrainedClient, is_scaling: bool) -> dict[str, Any]:
    """Describe the model inputs, so that users can prepare raw samples."""
    record = trained.record
    if (schema := record.format.schema) and schema.columns:
        return {
            "name": "x",
            "shape": ["N", len(schema.columns) if is_scaling else sum(schema.widths)],
            "type": "float64" if is_scaling else "float32",
            "values": VALUES,
            "scaling": "in the file" if is_scaling else FEATURES,
            "target": schema.target,
            "columns": [column.model_dump(mode="json") for column in schema.columns],
            "missing": sorted(MISSING),
        }
    shape = tuple(record.format.shape)
    if record.format.kind == TEXT.name:
        settings = trained.config.run.data
        is_hashed = settings.tokenizer == WORDS
        return {
            "name": "x",
            "shape": ["N", settings.max_tokens],
            "type": "int64",
            "tokenizer": WORDS if is_hashed else Path(settings.tokenizer).name,
            "vocabulary": shape[-1],
            "padding": PADDING,
            "tokens": HASHED if is_hashed else ENCODED,
        }
    takes_bytes = is_scaling and record.format.stored == "bytes"
    description: dict[str, Any] = {
        "name": "x",
        "shape": ["N", *shape],
        "type": "uint8" if takes_bytes else "float32",
        "scaling": "in the file" if takes_bytes else SCALING[record.format.stored],
    }
    if trained.config.run.data.dataset == "digits":
        description["values"] = "pixels of scikit-learn's digits (0 to 16) times 255 / 16"
    if record.format.kind == IMAGE.name:
        size = f"{shape[2]} x {shape[1]} pixels"
        resized = f"resized to {size} with bicubic interpolation in Pillow"
        description["axes"] = ["N", "channel", "row", "column"]
        channels = {1: ["gray"], 3: ["red", "green", "blue"]}.get(shape[0], shape[0])
        description["channels"] = channels
        description["size"] = resized if trained.config.run.data.image_size else size
    return description
