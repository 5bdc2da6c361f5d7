"""A client's samples on its device, and the public samples that it may use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhet.base.errors import DataError
from fedhet.client_runtime.node import Node
from fedhet.config.resolve import Config
from fedhet.data.partition import labelled_parts
from fedhet.data.schema import TableSchema
from fedhet.data.spec import ClientData, Split, Stored
from fedhet.data.store import GENERATED, UNUSED, RunData, refuse_overlap
from fedhet.learning.devices import Compute
from fedhet.models import Within
from fedhet.wire.identity import ClientInfo, order_of

LOG = logging.getLogger("fedhet")
"""The node's logger: its messages appear in the log of Flower's node."""


@dataclass
class ClientSamples:
    """A client's training and test data."""

    info: ClientInfo
    own: Split
    """The labelled training samples: on the device, but `x` on the host where it has no room."""
    unlabelled: Split
    """Unlabelled samples, where the labelled ones are; often none. Their labels (UNKNOWN at a real
    site) are used for measurements only, never for training."""
    tests: dict[str, Split]
    """The test splits by protocol: "personal" and "common", or the one of them that exists."""
    space: Tensor
    """The client's label space: its classes [P], ascending."""
    left_aside: int
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
        return Within(model, outside)

    def own_columns(self, logits: Tensor) -> Tensor:
        """Return the columns of logits [N, C] that belong to the client's label space."""
        return logits if len(self.space) == logits.shape[1] else logits[:, self.space]

    def warn_of_left_aside(self, method: str) -> None:
        """Log the number of unlabelled samples that the method does not use, if any."""
        if self.left_aside:
            LOG.warning(
                "%s: %d samples without a class are left aside: %s learns from labelled ones alone",
                self.info.name,
                self.left_aside,
                method,
            )

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of samples that only this client holds."""
        yield from (split.x for split in self.own_splits())

    def own_splits(self) -> Iterator[Split]:
        """Yield the splits of samples that belong to this client."""
        yield from (self.own, self.unlabelled)
        if "personal" in self.tests:
            yield self.tests["personal"]


def load_samples(config: Config, node: Node, compute: Compute) -> ClientSamples:
    """Return a node's samples. Raises DataError if they cannot be read or are too few."""
    run, data = config.run, node.load_data(config)
    own, rest = labelled_parts(data, run.data, run.seed, node.name)
    count, order = len(own) + len(rest), order_of(data.classes)
    if data.schema is not None:  # the same features, besides the same classes
        order = order_of([*data.classes, data.schema.digest])
    own, rest = _placed(compute, own, rest)
    tests = {"personal": _placed(compute, data.test)[0]} if len(data.test) else {}
    if data.common is not None:
        tests["common"] = _common(data, node, compute)
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
        data.left_aside,
        data.classes,
        data.stored,
        data.schema,
    )


def _common(data: ClientData, node: Node, compute: Compute) -> Split:
    """Return the common test set on the device; the clients of a process have one copy."""
    common = data.common
    assert common is not None
    if len(data.space) < len(data.classes):  # its rows are this client's alone
        return _placed(compute, common)[0]
    return node.data.once(f"test set on {compute.device}", lambda: _placed(compute, common)[0])


def public_samples(
    config: Config, node: Node, samples: ClientSamples, *, labelled: bool
) -> tuple[Split, DataError | None]:
    """Return the public set, and an error if it contains any sample of this client.

    Set `labelled` if the labels of the public set are used.
    """
    info, named = samples.info, config.run.data.public_dataset
    classes = info.classes if labelled else None
    public = node.data.public_set(info.kind, info.shape, classes)
    # A public part of the run's dataset cannot overlap its partitions, only a site's own data.
    cut_here = named in ("", UNUSED)
    if named != GENERATED and (node.folder or not cut_here):
        try:
            for split in samples.own_splits():
                refuse_overlap(public, split, info.name)
        except DataError as error:
            return public, error
    return public, None


def placed_public(public: Split, compute: Compute, data: RunData) -> Split:
    """Return the public set on the device; the clients of a process have one copy."""
    name = f"public set on {compute.device}"
    return data.once(name, lambda: Split(compute.held(public.x), compute.held(public.y)))


def _placed(compute: Compute, *splits: Split) -> list[Split]:
    """Return splits with their classes on the device, and their samples too if all have room."""
    samples = compute.kept(*(split.x for split in splits))
    return [Split(x, compute.held(split.y)) for x, split in zip(samples, splits, strict=True)]
