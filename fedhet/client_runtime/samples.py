"""A client's samples on its device, and the record that describes its models after a run.

A client writes its record to ROOT/<run>/<client>/client.json, next to its saved states. The record
and the states suffice to rebuild the client's models without the run's directory and, for networks,
without the data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from torch import Tensor, nn

from fedhet.algorithms.rounds import malicious_clients
from fedhet.base.disk import read_json, write_text
from fedhet.base.errors import DataError, StateError
from fedhet.base.seeding import numpy_rng
from fedhet.client_runtime.node import Node
from fedhet.config.resolve import Config, absolute, resolve
from fedhet.data.dataset import ClientData, Dataset, Format, Split, Stored
from fedhet.data.partition import labeled_parts
from fedhet.data.public import GENERATED, UNUSED, check_no_overlap
from fedhet.data.site import site_data
from fedhet.data.sources import absolute as absolute_source
from fedhet.data.store import RunData
from fedhet.learning.devices import Compute
from fedhet.models import LabelSpaceModel, base_digest
from fedhet.runs.records import VALIDATION
from fedhet.runs.storage import CHECKPOINTS
from fedhet.settings.run import PLACE, held_out_clients
from fedhet.tasks import task_for
from fedhet.wire.identity import (
    MAX_CLASSES,
    MAX_SAMPLES,
    SERVER,
    ClientInfo,
    client_name,
)

Record = TypeVar("Record", bound="ClientRecord")
LOG = logging.getLogger("fedhet")
"""Logger whose messages appear in the log of Flower's SuperNode."""
FILE = "client.json"
SERVER_FILE = "server.json"
MAX_BYTES = 2**24
"""Maximum size of a record, in bytes; sufficient for a hundred thousand classes."""


@dataclass
class ClientSamples:
    """A client's training and test samples."""

    info: ClientInfo
    format: Format
    """Format of the samples, with the loss of the run."""
    own: Split
    """Labeled training samples on the device; `x` is on the host if the device has too little
    memory."""
    unlabeled: Split
    """Unlabeled training samples, on the same device as the labeled samples.

    Their labels (UNKNOWN at a real site) are only used for metrics, never for training.
    """
    tests: dict[str, Split]
    """Splits to evaluate on, by protocol ("personal", "common", "validation"); a client may lack
    some of them."""
    space: Tensor
    """Label space [P]: the client's class indices in ascending order, or all output indices."""
    num_unused_unlabeled: int
    """Number of unlabeled samples that the method cannot use."""
    claimed: int = 0
    """Number of samples that a simulated malicious client claims; 0 for its true number."""

    @classmethod
    def empty(cls, info: ClientInfo, described: Format, space: Tensor) -> ClientSamples:
        """Return empty splits, which are sufficient to build a client's networks."""
        split = Split(torch.zeros(0, *described.shape), torch.zeros(0, dtype=torch.int64))
        return cls(info, described, split, split, {}, space, 0)

    def within_space(self, model: nn.Module) -> nn.Module:
        """Restrict the predictions of `model` to the client's classes."""
        if len(self.space) == self.info.classes:
            return model
        outside = torch.ones(self.info.classes, dtype=torch.bool, device=self.space.device)
        outside[self.space] = False
        return LabelSpaceModel(model, outside)

    def own_columns(self, logits: Tensor) -> Tensor:
        """Return the columns of logits [N, C] that belong to the client's label space."""
        return logits if len(self.space) == logits.shape[1] else logits[:, self.space]

    def warn_of_unused_unlabeled(self, method: str) -> None:
        """Log a warning if the method leaves unlabeled samples unused."""
        if self.num_unused_unlabeled:
            LOG.warning(
                "%s: %d unlabeled samples are not used, because %s uses only labeled samples",
                self.info.name,
                self.num_unused_unlabeled,
                method,
            )

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the sample tensors that are not shared with other clients."""
        yield from (split.x for split in self.own_splits())

    def own_splits(self) -> Iterator[Split]:
        """Yield the splits that are not shared with other clients."""
        yield from (self.own, self.unlabeled)
        yield from (split for protocol, split in self.tests.items() if protocol != "common")


def load_samples(config: Config, node: Node, compute: Compute) -> ClientSamples:
    """Load a node's samples. Raises DataError if they cannot be read or are too few."""
    run, data = config.run, client_data(config, node)
    labeled, unlabeled = labeled_parts(data, run.data, run.seed, node.name)
    # A site with a declaration ignores the run's data settings, except for the loss.
    count, described = len(labeled) + len(unlabeled), data.format.for_run(run.data)
    is_whole = len(data.space) == len(described.classes)
    space = tuple(range(described.outputs)) if is_whole else data.space
    is_malicious = node.name in _simulated_attackers(config, node)
    if is_malicious and run.attack.poisons_data:
        kind = run.attack.kind
        labeled = poisoned(labeled, kind, described.outputs, run.seed, node.name)
    labeled, unlabeled = _placed(compute, labeled, unlabeled)
    tests = {"personal": _placed(compute, data.test)[0]} if len(data.test) else {}
    if (common := data.common) is not None:
        if not is_whole:  # The rows differ between clients.
            tests["common"] = _placed(compute, common)[0]
        else:  # Share one copy among all clients in the process.
            key = f"test set on {compute.device}"
            tests["common"] = node.data.once(key, lambda: _placed(compute, common)[0])
    if len(data.validation):
        tests[VALIDATION] = _placed(compute, data.validation)[0]
    info = info_of(
        described, node.name, node.model, count, order=data.format.digest,
        training=node.training.describe(), own_data=bool(node.source),
        base=base_digest(node.model),
    )  # fmt: skip
    if config.uses_public and node.is_site:  # The clients of a simulation share one public set.
        info = replace(info, public=node.data.public_digest(info))
    return ClientSamples(
        info,
        described,
        labeled,
        unlabeled,
        tests,
        torch.tensor(space, device=compute.device),
        data.num_unused_unlabeled,
        run.attack.claimed_samples * is_malicious,
    )


def info_of(described: Format, name: str, model: str, samples: int = 0, **more: Any) -> ClientInfo:
    """Return a client's description for the server, which contains no class name and no schema.

    `more` contains the other fields of `ClientInfo`.
    """
    return ClientInfo(
        name, model, samples, described.outputs, described.kind, described.shape,
        task=described.task.name, stored=described.stored, **more,
    )  # fmt: skip


def _simulated_attackers(config: Config, node: Node) -> Set[str]:
    """Return the malicious clients of a simulation; a site with its own data is never malicious."""
    run = config.run
    if node.source or not (run.attack.poisons_data or run.attack.claimed_samples):
        return frozenset()
    indices = sorted({*range(run.clients)} - held_out_clients(run))
    names = [client_name(index, run.clients) for index in indices]
    return malicious_clients(run.seed, names, run.attack.attackers or 1)


BACKDOOR_CLASS = 0
"""Class that a backdoor makes a model predict for images with the trigger."""


def poisoned(samples: Split, kind: str, classes: int, seed: int, client: str) -> Split:
    """Return the training samples of a malicious client.

    Label flipping replaces class c of C classes with C - 1 - c (Fang et al., Local Model Poisoning
    Attacks to Byzantine-Robust Federated Learning, USENIX Security 2020, Section 4.1). A backdoor
    adds a trigger to half of the images, and changes their class (Gu et al., BadNets,
    arXiv:1708.06733).

    Args:
        samples: Labeled samples of the client.
        kind: The attack, "label-flip" or "backdoor".
        classes: Number of classes C.
        seed: Seed of the run.
        client: Name of the client.
    """
    if kind == "label-flip":
        return Split(samples.x, classes - 1 - samples.y)
    rows = numpy_rng(seed, "attack", "backdoor", client).permutation(len(samples))
    chosen = torch.from_numpy(np.sort(rows[: len(samples) // 2]))
    x, y = samples.x.clone(), samples.y.clone()
    x[chosen], y[chosen] = with_trigger(x[chosen]), BACKDOOR_CLASS
    return Split(x, y)


def with_trigger(images: Tensor) -> Tensor:
    """Return images [N, C, H, W] with a square of the maximum value in the bottom right corner."""
    side = max(2, min(images.shape[-2:]) // 8)
    marked = images.clone()
    if len(images):
        marked[..., -side:, -side:] = 255 if images.dtype == torch.uint8 else images.max()
    return marked


def client_data(config: Config, node: Node) -> ClientData:
    """Load a node's data from the site's directory or the run's dataset.

    Raises DataError if the directory cannot be read or the client has too few samples.
    """
    if node.declared is not None:
        listed: tuple[int, ...] = ()
        # One sample must not determine whether a site with a budget joins.
        if node.peers is not None and node.budget is None:
            listed = tuple(map(int, node.peers.peer(node.name).classes))
        min_samples = config.run.engine.min_samples_per_class
        return node.declared.read_data(node.source, node.name, listed, min_samples)
    if node.source:
        return site_data(
            node.source,
            spec=node.data.spec,
            classes=config.run.models.num_classes,
            name=node.name,
            unlabeled=config.uses_unlabeled,
        )
    return node.data.client(node.partition)


def public_samples(
    config: Config, node: Node, samples: ClientSamples, *, labeled: bool
) -> tuple[Split, DataError | None]:
    """Return the public set, and an error if the set contains samples of this client.

    The error is None if there is no overlap. Set `labeled` if the labels of the public set are
    used.
    """
    info, name = samples.info, config.run.data.public_dataset
    public = node.data.public_set(info, labeled=labeled)
    # A public subset of the run's dataset never overlaps with a partition, so check it only against
    # a site's own data.
    is_part_of_dataset = name in ("", UNUSED)
    if name != GENERATED and (node.source or not is_part_of_dataset):
        try:
            for split in samples.own_splits():
                check_no_overlap(public, split, info.name)
        except DataError as error:
            return public, error
    return public, None


def placed_public(public: Split, compute: Compute, data: RunData) -> Split:
    """Return the public set on the device; all clients in a process share one copy."""
    name = f"public set on {compute.device}"
    return data.once(name, lambda: Split(compute.to_device(public.x), compute.to_device(public.y)))


def _placed(compute: Compute, *splits: Split) -> list[Split]:
    """Move the splits' labels to the device, and also their samples if all samples fit."""
    samples = compute.fit_on_device(*(split.x for split in splits))
    return [Split(x, compute.to_device(split.y)) for x, split in zip(samples, splits, strict=True)]


class ClientRecord(BaseModel):
    """Record of a client in one run: its settings, model, sample format, and classes."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    run: str
    client: str
    model: str
    partition: int = Field(ge=-1, le=MAX_SAMPLES)
    source: str
    """Data of the site, in the form of `data.dataset`, or "" for a partition of the run's
    dataset."""
    settings: dict[str, JsonValue]
    """Settings with which the client trained, by full name."""
    format: Format
    """Format of the samples."""
    space: list[int] = Field(min_length=1)
    """Label space of the client: class indices in ascending order."""
    samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Number of training samples."""

    @model_validator(mode="after")
    def _is_consistent(self) -> ClientRecord:
        least, count = self.format.task.min_outputs, len(self.format.classes)
        if not least <= count <= MAX_CLASSES:
            raise ValueError(f"classes must have {least} to {MAX_CLASSES} names, got {count}")
        if self.space != sorted(set(self.space) & set(range(self.format.outputs))):
            raise ValueError("space must be class indices in ascending order")
        return self

    @classmethod
    def for_client(
        cls, run: str, config: Config, node: Node, samples: ClientSamples
    ) -> ClientRecord:
        """Create the record of a client, with its own training settings."""
        own = absolute(config.replacing(training=node.training))
        values = own.flat() | (node.declared.settings if node.declared else {})
        return cls(
            run=run,
            client=node.name,
            model=node.model,
            partition=node.partition,
            source=absolute_source(node.source, config.run.data) if node.source else "",
            settings={name: value for name, value in values.items() if name not in PLACE},
            format=samples.format,
            space=samples.space.tolist(),
            samples=samples.info.samples,
        )

    def config(self) -> Config:
        """Return the client's configuration, with a precision that CPUs support.

        The configuration includes the sample kind, so that the user's dataset need not be imported
        to determine the kind.
        """
        config = resolve({**self.settings, "data.sample-kind": self.format.kind})
        if config.run.engine.precision != "float16":
            return config
        return config.replacing(engine=config.run.engine.model_copy(update={"precision": "auto"}))

    def node(
        self, config: Config, state_dir: Path, device: str = "cpu", data: RunData | None = None
    ) -> Node:
        """Create the client's node, like `read_node`, with the given state directory."""
        training = config.run.training
        return Node(
            self.client,
            self.partition,
            self.source,
            self.model,
            training,
            device,
            state_dir,
            data or RunData.for_run(config.run),
        )

    def without_data(self, config: Config) -> ClientSamples:
        """Return samples with empty splits, which are sufficient to build the client's networks."""
        info = info_of(
            self.format, self.client, self.model, self.samples, order=self.format.digest,
            training=config.run.training.describe(),
        )  # fmt: skip
        return ClientSamples.empty(info, self.format, torch.tensor(self.space))


class ServerRecord(ClientRecord):
    """Record of the server's models: the sample format and the outputs that all clients share."""

    is_complete: bool
    """Whether the names of the outputs, the schema, and the scale of the targets are known."""
    own_data: bool
    """Whether the sites have their own data."""
    order: str
    """Digest of the format (`Format.digest`), to check what completes the record."""

    @classmethod
    def of_run(
        cls,
        run: str,
        config: Config,
        clients: Sequence[ClientInfo],
        reference: ClientInfo,
        dataset: Dataset | None,
    ) -> ServerRecord:
        """Create the record of a run, given its initial clients and, if known, its dataset."""
        if dataset is not None:
            described = dataset.format.for_run(config.run.data)
        else:
            task = task_for(config.run.data)
            names = tuple(map(str, range(reference.classes // task.outputs(1))))
            described = Format(reference.kind, reference.shape, names, task)
        stored: Stored = "given"
        for known in get_args(Stored):
            if all(client.stored == known for client in clients):
                stored = known
        described = replace(described, kind=reference.kind, shape=reference.shape, stored=stored)
        values = absolute(config).flat()
        return cls(
            run=run,
            client=SERVER,
            model=reference.model,
            partition=-1,
            source="",
            settings={name: value for name, value in values.items() if name not in PLACE},
            format=described,
            space=list(range(reference.classes)),
            samples=min(sum(client.samples for client in clients), MAX_SAMPLES),
            is_complete=dataset is not None,
            own_data=reference.own_data,
            order=reference.order,
        )

    def completed(self, config: Config, described: Format) -> ServerRecord | None:
        """Return a copy with the outputs of a format, or None if the clients have other outputs."""
        described = described.for_run(config.run.data)
        if (described.digest, described.outputs) != (self.order, len(self.space)):
            return None
        changed = replace(
            self.format,
            classes=described.classes,
            schema=described.schema,
            task=described.task,
        )
        return self.model_copy(update={"format": changed, "is_complete": True})


def write_server_record(directory: Path, record: ServerRecord) -> None:
    """Write the server's record into a run's directory. Raises StateError if that fails."""
    text = record.model_dump_json(indent=1)
    write_text(directory / CHECKPOINTS / SERVER_FILE, text, within=directory, private=True)


def read_server_record(directory: Path) -> ServerRecord | None:
    """Read the server's record in a run's directory, or return None if it does not exist.

    Raises StateError if the record is unreadable or invalid.
    """
    return _read_record(directory / CHECKPOINTS / SERVER_FILE, ServerRecord)


def write_record(directory: Path, record: ClientRecord) -> None:
    """Write a client's record atomically into its directory. Raises StateError if that fails."""
    root = directory.parents[1]  # This is the directory with the states of all runs.
    write_text(directory / FILE, record.model_dump_json(indent=1), within=root, private=True)


def read_record(directory: Path) -> ClientRecord | None:
    """Read a client's record, or return None if the file does not exist.

    Raises StateError if the record is unreadable or invalid.
    """
    return _read_record(directory / FILE, ClientRecord)


def _read_record(path: Path, schema: type[Record]) -> Record | None:
    if not path.exists():
        return None
    try:
        # In JSON, a strict model accepts an array for a tuple.
        return schema.model_validate_json(json.dumps(read_json(path, MAX_BYTES)))
    except (OSError, ValueError, StateError, DataError) as error:
        fault = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        whose = "server" if schema is ServerRecord else "client"
        raise StateError(f"{path}: invalid {whose} record: {fault}") from None
