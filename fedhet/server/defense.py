"""Robust averages: a step that lets no minority of a round's replies move their average far.

What is averaged, and between whom, follows from the contract of the replies: weights within an
architecture, rows of classes or public samples with their number, and what clients send of their
own samples by its class means. So a method needs no code of its own for it; its `MethodSpec` says
which averages suit it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedhet.algorithms.robust import (
    filter_clients,
    geometric_weights,
    krum,
    max_malicious,
    mean_squares,
    min_replies,
    relative_distances,
    trimmed_mean,
    weighted_mean,
)
from fedhet.algorithms.weights import as_type
from fedhet.base.arrays import Array
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.settings.defense import CHOOSING, DefenseSettings
from fedhet.wire.contract import (
    Contract,
    Field,
    TensorField,
    WeightsField,
    floating,
    ids_of,
    labels_of,
)
from fedhet.wire.knowledge import Knowledge

LOG = logging.getLogger("fedhet")
LEAST = 3
"""Clients with something in common, without which there is no majority among them."""


class Defense:
    """Makes the mean of a round's replies a robust average: a step that the replies pass.

    Krum and the filter leave out the replies that stand out. The medians and the trimmed mean
    replace what the replies have in common by one value, so that any mean of them is that value.
    """

    def __init__(self, settings: DefenseSettings, contract: Contract, state: RoundState) -> None:
        """`contract` is that of the replies."""
        self.settings, self.contract, self._state = settings, contract, state
        self._share = settings.malicious_fraction

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies whose mean is the robust average.

        If a round closes early, the missing clients may all be honest. The average must then
        withstand as many malicious clients as there may be among those that were asked.
        """
        found, record = list(replies), self._state.record
        asked, self._share = len({*record.asked, *record.late}), self.settings.malicious_fraction
        if 0 < len(found) < asked:
            malicious = max_malicious(asked, self.settings.malicious_fraction)
            self._share = min(max(self._share, malicious / len(found)), 0.5)
            least = min(min_replies(self.settings.average, malicious), asked)
            if malicious and len(found) < least:
                LOG.warning(
                    "round %d: %d of %d replies: too few for defense.average = %r if %d clients "
                    "are malicious (defense.malicious_fraction = %g); at least %d are needed",
                    record.round, len(found), asked, self.settings.average, malicious,
                    self.settings.malicious_fraction, least,
                )  # fmt: skip
        if self.settings.average in CHOOSING:
            for reply, kept in zip(found, self.kept([r.knowledge for r in found]), strict=True):
                if kept:
                    yield reply
                else:
                    self._state.record_measured(reply.client.name, reply.measured)
                    self._state.exclude_outlier(reply.client.name, self.settings.average)
        else:
            values = self.combined([reply.knowledge for reply in found])
            for reply, tensors in zip(found, values, strict=True):
                yield reply.with_knowledge(reply.knowledge.replacing(tensors))

    def kept(self, replies: Sequence[Knowledge]) -> Array:
        """Return which replies the average is made of, bool [K]."""
        squared = distances(self.contract, replies, self._share)
        if squared is None:
            return np.ones(len(replies), bool)
        choose = krum if self.settings.average == "krum" else filter_clients
        return choose(squared, self._share)

    def combined(self, replies: Sequence[Knowledge]) -> list[dict[str, Array]]:
        """Return what replaces each reply's tensors: the robust value of those with the same."""
        found: list[dict[str, Array]] = [{} for _ in replies]
        share = 0.5 if self.settings.average == "median" else self._share
        for field in floating(self.contract):
            for group in groups(self.contract, field, replies):
                if len(group.clients) < LEAST:
                    continue
                weights = None
                if self.settings.average == "geometric-median":  # of a field as a whole
                    stacks = map(group.stack, group.names)
                    squares = [np.nan_to_num(mean_squares(flat(s))) * s[0].size for s in stacks]
                    weights = geometric_weights(np.asarray(sum(squares)))
                for name in group.names:
                    stack = group.stack(name)
                    if weights is None:
                        value = trimmed_mean(stack, share)
                    else:
                        value = weighted_mean(stack, weights)
                    if isinstance(field, TensorField) and field.distribution:
                        value = value / value.sum(-1, keepdims=True)
                    for client in group.clients:
                        found[client][name] = group.part(value, name, client)
        return found


def distances(contract: Contract, replies: Sequence[Knowledge], share: float) -> Array | None:
    """Return the squared distances [K, K] between clients; None if there is no majority to find.

    Each field counts once, and within it each tensor by its size, in times of the usual distance of
    two clients, as fields and layers differ in scale. A pair with nothing in common is at the usual
    distance, 1. `share` is that of malicious clients.
    """
    clients = len(replies)
    if clients < LEAST:
        return None
    total, count = np.zeros((clients, clients)), np.zeros((clients, clients))
    for field in floating(contract):
        for group in groups(contract, field, replies):
            if len(group.clients) >= LEAST:
                # The mean over the field's tensors, by size, of their relative squared distances.
                size = len(group.clients)
                sums, sizes = np.zeros((size, size)), np.zeros((size, size))
                for name in group.names:
                    stack = group.stack(name)
                    squared = relative_distances(mean_squares(flat(stack)), share)
                    sums += np.nan_to_num(squared) * stack[0].size
                    sizes += ~np.isnan(squared) * stack[0].size
                mean = np.divide(sums, sizes, out=np.full_like(sums, np.nan), where=sizes > 0)
                here = np.ix_(group.clients, group.clients)
                total[here] += np.nan_to_num(mean)
                count[here] += ~np.isnan(mean)
    if not np.triu(count, 1).any():
        return None
    squared = np.divide(total, count, out=np.ones_like(total), where=count > 0)
    np.fill_diagonal(squared, 0.0)
    return squared


@dataclass(frozen=True)
class Group:
    """The clients whose tensors of a field have places in the same larger ones."""

    clients: tuple[int, ...]
    names: tuple[str, ...]
    """The field's tensors of floating-point numbers."""
    values: Mapping[int, Mapping[str, Array]]
    rows: Mapping[int, Array]
    """By client, the numbers of its rows; empty: the leading ones."""

    def stack(self, name: str) -> Array:
        """Return the clients' tensors [K, ...] in float64, NaN where a client has no value."""
        found = {client: self.values[client][name] for client in self.clients}
        shape = np.max([value.shape for value in found.values()], axis=0).astype(int)
        if self.rows:
            shape[0] = 1 + max(int(rows.max()) for rows in self.rows.values())
        stack = np.full((len(found), *shape), np.nan)
        for place, (client, value) in enumerate(found.items()):
            stack[place][self._region(value, client)] = value
        return stack

    def part(self, whole: Array, name: str, client: int) -> Array:
        """Return a client's part of a tensor, in its own type."""
        own = self.values[client][name]
        return as_type(whole[self._region(own, client)], own.dtype)

    def _region(self, value: Array, client: int) -> tuple[Any, ...]:
        slices = tuple(map(slice, value.shape))
        return (self.rows[client], *slices[1:]) if self.rows else slices


def flat(stack: Array) -> Array:
    """Return a stack [K, ...] as points [K, D]."""
    return stack.reshape(len(stack), -1)


def groups(contract: Contract, field: Field, replies: Sequence[Knowledge]) -> list[Group]:
    """Return the groups of clients whose values of a field can be compared.

    Rows with numbers can always be; weights, if their names and shapes are the same, or those of
    smaller models are parts of those of larger ones.
    """
    ids = ids_of(contract, field)
    labels = "" if ids else labels_of(contract, field)
    alike: dict[object, list[int]] = {}
    values: dict[int, Mapping[str, Array]] = {}
    for client, reply in enumerate(replies):
        names = [n for n in reply.tensors if n == field.name or n.startswith(field.name + "/")]
        own = {n: v for n in names if np.issubdtype((v := reply.tensors[n]).dtype, np.floating)}
        if not own or not all(value.size for value in own.values()):
            continue
        if labels:
            own = {name: class_means(v, reply.tensors[labels]) for name, v in own.items()}
        values[client] = own
        apart = not (ids or labels or (isinstance(field, WeightsField) and field.nested))
        architecture = tuple((name, value.shape) for name, value in own.items())
        alike.setdefault(architecture if apart else tuple(own), []).append(client)
    numbers: dict[int, Array] = {}
    if ids or labels:
        numbers = {
            c: replies[c].tensors[ids] if ids else np.unique(replies[c].tensors[labels])
            for c in values
        }
    return [
        Group(
            tuple(clients),
            tuple(values[clients[0]]),
            values,
            {client: numbers[client] for client in clients} if numbers else {},
        )
        for clients in alike.values()
    ]


def class_means(values: Array, labels: Array) -> Array:
    """Return the means [P, ...] of rows [N, ...] of each class in `labels` [N], ascending."""
    return np.stack([values[labels == c].mean(0, dtype=np.float64) for c in np.unique(labels)])
