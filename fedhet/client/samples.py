"""A client's samples on its device, and the public ones that it may use beside them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhet.client.node import Node
from fedhet.config.resolve import Config
from fedhet.data import GENERATED, DataSpec, Split, labelled_parts, public_set, refuse_overlap
from fedhet.devices import Compute
from fedhet.models import Within
from fedhet.wire.identity import ClientInfo, order_of

LOG = logging.getLogger("fedhet")
"""Of a node: what it logs stands in the log of Flower's node."""


@dataclass
class ClientSamples:
    """What a client trains and is tested on."""

    info: ClientInfo
    own: Split
    """The labelled training samples, on the device."""
    unlabelled: Split
    """Samples, on the device, whose labels, UNKNOWN at a real site, are there to measure by, never
    to train on; often none."""
    tests: dict[str, Split]
    """The test splits by protocol: "personal", and "common" where there is one."""
    space: Tensor
    """The classes [P], ascending, that this client tells apart."""
    left_aside: int
    """Samples without a label that the method has no use for."""

    def within_space(self, model: nn.Module) -> nn.Module:
        """Return `model` as it tells the client's own classes apart, and no others."""
        if len(self.space) == self.info.classes:
            return model
        outside = torch.ones(self.info.classes, dtype=torch.bool, device=self.space.device)
        outside[self.space] = False
        return Within(model, outside)

    def warn_of_left_aside(self, method: str) -> None:
        """Log how many samples without a label a method leaves aside, if there are any."""
        if self.left_aside:
            LOG.warning(
                "%s: %d images without a class are left aside: %s learns from labelled ones alone",
                self.info.name,
                self.left_aside,
                method,
            )

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the samples that are this client's alone."""
        yield from (self.own.x, self.unlabelled.x, self.tests["personal"].x)


def load_samples(config: Config, node: Node, compute: Compute) -> ClientSamples:
    """Return a node's samples. Raises DataError where they cannot be read, or are too few."""
    run, data = config.run, node.load_data(config)
    own, rest = labelled_parts(data, run.data.labelled_alpha, run.seed, node.name)
    count, order = len(own) + len(rest), order_of(data.classes)
    tests = {"personal": data.test} | ({} if data.common is None else {"common": data.common})
    return ClientSamples(
        ClientInfo(node.name, node.model, count, len(data.classes), data.shape, order),
        _placed(own, compute),
        _placed(rest, compute),
        tests,
        torch.tensor(data.space, device=compute.device),
        data.left_aside,
    )


def public_samples(config: Config, node: Node, samples: ClientSamples, *, labelled: bool) -> Split:
    """Return the data that no client owns, scaled; `labelled` if its labels are to be used.

    Raises DataError if any sample of this client is in it.
    """
    info, named = samples.info, config.run.data.public_dataset
    classes = info.classes if labelled else None
    public = public_set(DataSpec.of(config.run), info.shape, classes)
    # A share of the run's dataset is apart from the others' by its rows, not from a site's own.
    if named != GENERATED and (named or node.folder):
        for split in (samples.own, samples.unlabelled, samples.tests["personal"]):
            refuse_overlap(public, split, info.name)
    return public


def _placed(split: Split, compute: Compute) -> Split:
    return Split(compute.images(split.x), split.y.to(compute.device))
