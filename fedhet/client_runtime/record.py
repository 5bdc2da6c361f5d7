"""The record in a client's folder of a run, by which its models can be used after the run.

A client writes ROOT/<run>/<client>/client.json by its states. Together they suffice to build its
models and to use them as in training, without the run's directory and, for networks, without
the data.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)
from torch import Tensor

from fedhet.base.disk import expanded, read_json, write_text
from fedhet.base.errors import StateError
from fedhet.client_runtime.node import Node
from fedhet.client_runtime.samples import ClientSamples
from fedhet.config.resolve import Config, absolute, resolve
from fedhet.data.schema import TableSchema
from fedhet.data.spec import Split, Stored
from fedhet.data.store import RunData
from fedhet.kinds import KINDS
from fedhet.settings.run import PLACE
from fedhet.wire.identity import MAX_CLASSES, MAX_SAMPLES, MAX_SIDE, ClientInfo, order_of

FILE = "client.json"
MOST_BYTES = 2**24
"""A longer record is refused: one of a hundred thousand classes is shorter."""


class ClientRecord(BaseModel):
    """A client of one run: its settings, its model, and the model's inputs and classes."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    run: str
    client: str
    model: str
    partition: int = Field(ge=-1, le=MAX_SAMPLES)
    folder: str
    """The site's own data folder; "" for a partition of the run's dataset."""
    settings: dict[str, JsonValue]
    """The settings with which the client trained, by their full names."""
    classes: list[str] = Field(min_length=2, max_length=MAX_CLASSES)
    """The names of all classes of the run, in order."""
    space: list[int] = Field(min_length=1)
    """The client's label space: its classes, ascending."""
    kind: str
    """The kind of its samples."""
    shape: list[int] = Field(min_length=1, max_length=4)
    """The shape of one sample."""
    stored: Stored
    samples: int = Field(ge=0, le=MAX_SAMPLES)
    """The number of training samples."""
    table: TableSchema | None = Field(None, strict=False)
    """What the columns of a table of its owner's became."""

    @model_validator(mode="after")
    def _space_is_of_the_classes(self) -> ClientRecord:
        if self.space != sorted(set(self.space) & set(range(len(self.classes)))):
            raise ValueError("space must be numbers of classes, ascending")
        return self

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, kind: str) -> str:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}")
        return kind

    @model_validator(mode="after")
    def _shape_is_of_a_sample(self) -> ClientRecord:
        shape = tuple(self.shape)
        kind = KINDS[self.kind]
        if not kind.fits(shape) or not all(1 <= size <= MAX_SIDE for size in kind.sizes(shape)):
            raise ValueError(f"shape must be a {kind.name}'s, of sizes from 1 to {MAX_SIDE}")
        return self

    @classmethod
    def of(cls, run: str, config: Config, node: Node, samples: ClientSamples) -> ClientRecord:
        """Return the record of an open client; `config` has the client's own training."""
        values = absolute(config).flat() | (node.declared.settings if node.declared else {})
        return cls(
            run=run,
            client=node.name,
            model=node.model,
            partition=node.partition,
            folder=str(expanded(node.folder).resolve()) if node.folder else "",
            settings={name: value for name, value in values.items() if name not in PLACE},
            classes=list(samples.classes) or list(map(str, range(samples.info.classes))),
            space=samples.space.tolist(),
            kind=samples.info.kind,
            shape=list(samples.info.shape),
            stored=samples.stored,
            samples=samples.info.samples,
            table=samples.schema,
        )

    def config(self) -> Config:
        """Return the client's settings, in a precision that a CPU supports.

        The kind of samples is known, so that a dataset of the user's is not imported for it.
        """
        config = resolve({**self.settings, "data.sample-kind": self.kind})
        if config.run.engine.precision != "float16":
            return config
        return config.replacing(engine=config.run.engine.model_copy(update={"precision": "auto"}))

    def node(
        self, config: Config, state_dir: Path, device: str = "cpu", data: RunData | None = None
    ) -> Node:
        """Return the client's node, with its states in `state_dir`; as `read_node` does."""
        training = config.run.training
        return Node(
            self.client,
            self.partition,
            self.folder,
            self.model,
            training,
            device,
            state_dir,
            data or RunData.of(config.run),
        )

    def without_data(self, config: Config) -> ClientSamples:
        """Return the client's task without any samples, which is enough to build its networks."""
        nothing = Split(torch.zeros(0, *self.shape), torch.zeros(0, dtype=torch.int64))
        info = ClientInfo(
            self.client,
            self.model,
            self.samples,
            len(self.classes),
            self.kind,
            tuple(self.shape),
            order_of(self.classes),
            config.run.training.describe(),
        )
        space: Tensor = torch.tensor(self.space)
        names = tuple(self.classes)
        return ClientSamples(info, nothing, nothing, {}, space, 0, names, self.stored)


class Recorder:
    """Writes an open client's record into its folder, once in a run."""

    def __init__(self, config: Config, node: Node, samples: ClientSamples) -> None:
        """`config` has the client's own training."""
        self._config, self._node, self._samples = config, node, samples
        self._left_in = ""

    def record(self, run: str) -> ClientRecord:
        """Return the client's record."""
        return ClientRecord.of(run, self._config, self._node, self._samples)

    def leave(self, folder: Path, run: str) -> None:
        """Write the record into the client's folder of the run, atomically. Raises StateError."""
        if self._left_in != run:
            root = folder.parents[1]  # of the states of all runs
            text = self.record(run).model_dump_json(indent=1)
            write_text(folder / FILE, text, within=root, private=True)
            self._left_in = run


def read_record(folder: Path) -> ClientRecord | None:
    """Return the record in a client's folder; None if it has none. Raises StateError."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return ClientRecord.model_validate(read_json(path, MOST_BYTES))
    except (OSError, ValueError, StateError) as error:
        raise StateError(f"{path} is not a client's record: {_fault(error)}") from None


def _fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
