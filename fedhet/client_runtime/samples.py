"""A client's samples on its device, and the record by which its models can be used after a run.

A client writes ROOT/<run>/<client>/client.json by its states. Together they suffice to build its
models and to use them as in training, without the run's directory and, for networks, without
the data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from torch import Tensor, nn

from fedhet.base.disk import expanded, read_json, write_text
from fedhet.base.errors import DataError, StateError
from fedhet.client_runtime.node import Node
from fedhet.config.resolve import Config, absolute, resolve
from fedhet.data.partition import labeled_parts
from fedhet.data.spec import Split, Stored
from fedhet.data.store import GENERATED, UNUSED, RunData, check_no_overlap
from fedhet.data.tables import TableSchema
from fedhet.kinds import KINDS
from fedhet.learning.devices import Compute
from fedhet.models import LabelSpaceModel
from fedhet.settings.run import PLACE
from fedhet.wire.identity import MAX_CLASSES, MAX_SAMPLES, MAX_SIDE, ClientInfo, order_of

LOG = logging.getLogger("fedhet")
"""The node's logger: its messages appear in the log of Flower's node."""
FILE = "client.json"
MAX_BYTES = 2**24
"""A longer record is refused: one of a hundred thousand classes is shorter."""


@dataclass
class ClientSamples:
    """A client's training and test data."""

    info: ClientInfo
    own: Split
    """The labeled training samples: on the device, but `x` on the host where it has no room."""
    unlabeled: Split
    """Unlabeled samples, where the labeled ones are; often none. Their labels (UNKNOWN at a real
    site) are used for measurements only, never for training."""
    tests: dict[str, Split]
    """The test splits by protocol: "personal" and "common", or the one of them that exists."""
    space: Tensor
    """The client's label space: its classes [P], ascending."""
    num_unused_unlabeled: int
    """Number of samples without a label that the method cannot use."""
    classes: tuple[str, ...] = ()
    """The names of all classes of the run, in order."""
    stored: Stored = "given"
    """How the samples are stored, which says how new ones are scaled."""
    schema: TableSchema | None = None
    """Of a table of its owner's: what its columns became."""

    def within_space(self, model: nn.Module) -> nn.Module:
        """Return `model` with its predictions restricted to the client's own classes."""
        if len(self.space) == self.info.classes:
            return model
        outside = torch.ones(self.info.classes, dtype=torch.bool, device=self.space.device)
        outside[self.space] = False
        return LabelSpaceModel(model, outside)

    def own_columns(self, logits: Tensor) -> Tensor:
        """Return the columns of logits [N, C] that belong to the client's label space."""
        return logits if len(self.space) == logits.shape[1] else logits[:, self.space]

    def warn_of_left_aside(self, method: str) -> None:
        """Log the number of unlabeled samples that the method does not use, if any."""
        if self.num_unused_unlabeled:
            LOG.warning(
                "%s: %d samples without a class are left aside: %s learns from labeled ones alone",
                self.info.name,
                self.num_unused_unlabeled,
                method,
            )

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of samples that only this client holds."""
        yield from (split.x for split in self.own_splits())

    def own_splits(self) -> Iterator[Split]:
        """Yield the splits of samples that belong to this client."""
        yield from (self.own, self.unlabeled)
        if "personal" in self.tests:
            yield self.tests["personal"]


def load_samples(config: Config, node: Node, compute: Compute) -> ClientSamples:
    """Return a node's samples. Raises DataError if they cannot be read or are too few."""
    run, data = config.run, node.load_data(config)
    own, rest = labeled_parts(data, run.data, run.seed, node.name)
    count, order = len(own) + len(rest), order_of(data.classes)
    if data.schema is not None:  # the same features, besides the same classes
        order = order_of([*data.classes, data.schema.digest])
    own, rest = _placed(compute, own, rest)
    tests = {"personal": _placed(compute, data.test)[0]} if len(data.test) else {}
    if (common := data.common) is not None:
        if len(data.space) < len(data.classes):  # its rows are this client's alone
            tests["common"] = _placed(compute, common)[0]
        else:  # the clients of a process have one copy
            key = f"test set on {compute.device}"
            tests["common"] = node.data.once(key, lambda: _placed(compute, common)[0])
    return ClientSamples(
        ClientInfo(
            node.name,
            node.model,
            count,
            len(data.classes),
            data.kind,
            data.shape,
            order,
            node.training.describe(),
            bool(node.folder),
        ),
        own,
        rest,
        tests,
        torch.tensor(data.space, device=compute.device),
        data.num_unused_unlabeled,
        data.classes,
        data.stored,
        data.schema,
    )


def public_samples(
    config: Config, node: Node, samples: ClientSamples, *, labeled: bool
) -> tuple[Split, DataError | None]:
    """Return the public set, and an error if it contains any sample of this client.

    Set `labeled` if the labels of the public set are used.
    """
    info, named = samples.info, config.run.data.public_dataset
    classes = info.classes if labeled else None
    public = node.data.public_set(info.kind, info.shape, classes)
    # A public part of the run's dataset cannot overlap its partitions, only a site's own data.
    cut_here = named in ("", UNUSED)
    if named != GENERATED and (node.folder or not cut_here):
        try:
            for split in samples.own_splits():
                check_no_overlap(public, split, info.name)
        except DataError as error:
            return public, error
    return public, None


def placed_public(public: Split, compute: Compute, data: RunData) -> Split:
    """Return the public set on the device; the clients of a process have one copy."""
    name = f"public set on {compute.device}"
    return data.once(name, lambda: Split(compute.to_device(public.x), compute.to_device(public.y)))


def _placed(compute: Compute, *splits: Split) -> list[Split]:
    """Return splits with their classes on the device, and their samples too if all have room."""
    samples = compute.fit_on_device(*(split.x for split in splits))
    return [Split(x, compute.to_device(split.y)) for x, split in zip(samples, splits, strict=True)]


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
    def _is_consistent(self) -> ClientRecord:
        if self.space != sorted(set(self.space) & set(range(len(self.classes)))):
            raise ValueError("space must be numbers of classes, ascending")
        if (kind := KINDS.get(self.kind)) is None:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}")
        shape = tuple(self.shape)
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


def write_record(folder: Path, record: ClientRecord) -> None:
    """Write the record into the client's folder of the run, atomically. Raises StateError."""
    root = folder.parents[1]  # of the states of all runs
    write_text(folder / FILE, record.model_dump_json(indent=1), within=root, private=True)


def read_record(folder: Path) -> ClientRecord | None:
    """Return the record in a client's folder; None if it has none. Raises StateError."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return ClientRecord.model_validate(read_json(path, MAX_BYTES))
    except (OSError, ValueError, StateError) as error:
        fault = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise StateError(f"{path} is not a client's record: {fault}") from None
