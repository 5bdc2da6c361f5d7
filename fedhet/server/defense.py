"""Step that applies robust aggregation rules, to limit the influence of a minority of replies.

The contract of the replies determines which values are comparable. Weights are compared between
clients with the same architecture. Rows of classes or public samples are matched by id, and values
for the clients' own samples are compared through the first two moments of each class. Methods
therefore need no code for robust aggregation; their `MethodSpec` declares the rules that they
support.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedhet.algorithms.robust import (
    COMBINATIONS,
    SELECTIONS,
    complete_distances,
    max_malicious,
    mean_squares,
    min_replies,
    relative_distances,
)
from fedhet.algorithms.weights import as_type
from fedhet.base.arrays import Array
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.settings.defense import RULES, DefenseSettings
from fedhet.wire.contract import (
    VARIANCES,
    Contract,
    Field,
    TensorField,
    WeightsField,
    floating,
    ids_of,
    labels_of,
)
from fedhet.wire.encodings import STATISTICS
from fedhet.wire.knowledge import Knowledge

LOG = logging.getLogger("fedhet")
MIN_CLIENTS = 3
"""Minimum number of clients with comparable values, because fewer clients have no majority."""


class Defense:
    """Step that changes a round's replies so that their mean is a robust aggregate.

    A rule either excludes outliers, or replaces the clients' comparable values with one robust
    value, so that their mean equals this value. All replies that pass have the same weight in every
    method, because a malicious client could otherwise claim many samples.
    """

    def __init__(self, settings: DefenseSettings, contract: Contract, state: RoundState) -> None:
        self.settings, self.contract, self._state = settings, contract, state
        self._fraction = settings.malicious_fraction

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies to aggregate, with robust values.

        If a round closes early, all missing clients may be honest. The rule must therefore tolerate
        as many malicious clients as there may be among all clients that were called.
        """
        replies, record = list(replies), self._state.record
        called = len({*record.asked, *record.late})
        self._fraction = self.settings.malicious_fraction
        if 0 < len(replies) < called:
            malicious = max_malicious(called, self.settings.malicious_fraction)
            self._fraction = min(max(self._fraction, malicious / len(replies)), 0.5)
            required = min(min_replies(self.settings.average, malicious), called)
            if malicious and len(replies) < required:
                LOG.warning(
                    "round %d: %d of %d replies are too few for defense.average = %r: if %d "
                    "clients are malicious (defense.malicious-fraction = %g), at least %d replies "
                    "are required",
                    record.round, len(replies), called, self.settings.average, malicious,
                    self.settings.malicious_fraction, required,
                )  # fmt: skip
        if RULES[self.settings.average].selects:
            included = self.included([reply.knowledge for reply in replies])
            for reply, is_included in zip(replies, included, strict=True):
                if is_included:
                    yield reply.with_equal_weight(self.contract.counts)
                else:
                    self._state.record_measured(reply.client.name, reply.measured)
                    self._state.exclude_outlier(reply.client.name, self.settings.average)
        else:
            values = self.combined([reply.knowledge for reply in replies])
            for reply, tensors in zip(replies, values, strict=True):
                combined = reply.with_knowledge(reply.knowledge.replacing(tensors))
                yield combined.with_equal_weight(self.contract.counts)

    def included(self, replies: Sequence[Knowledge]) -> Array:
        """Return a Boolean array of shape [K] that marks which of the K replies to aggregate."""
        squared = distances(self.contract, replies, self._fraction)
        if squared is None:
            return np.ones(len(replies), bool)
        return SELECTIONS[self.settings.average](squared, self._fraction)

    def combined(self, replies: Sequence[Knowledge]) -> list[dict[str, Array]]:
        """Return the robust values that replace the tensors of each reply."""
        combined: list[dict[str, Array]] = [{} for _ in replies]
        combine = COMBINATIONS[self.settings.average]
        for field in floating(self.contract):
            for group in groups(self.contract, field, replies):
                if len(group.clients) < MIN_CLIENTS:
                    continue
                robust = combine(group.stack, group.names, self._fraction, bool(group.rows))
                for name, value in zip(group.names, robust, strict=True):
                    if isinstance(field, TensorField) and field.distribution:
                        # The medians of all classes are 0 if each client predicts another class.
                        sums = value.sum(-1, keepdims=True)
                        value = np.where(sums > 0, value, 1) / np.where(
                            sums > 0, sums, value.shape[-1]
                        )
                    for client in group.clients:
                        combined[client][name] = group.part(value, name, client)
        return combined


def distances(contract: Contract, replies: Sequence[Knowledge], fraction: float) -> Array | None:
    """Return the squared distances [K, K] between K replies, or None if K < MIN_CLIENTS.

    All fields have the same weight. Fields and layers differ in scale, so distances are relative to
    the typical distance between two clients (`robust.relative_distances`). In fields of weights,
    clients with different architectures are not comparable. Their distance results from their
    distances to comparable clients (`robust.complete_distances`). A pair without comparable values
    in any field has the typical distance, 1. The result is also None if no two replies are
    comparable.

    Args:
        contract: Contract of the replies.
        replies: Content of the replies.
        fraction: Fraction of malicious clients.
    """
    clients = len(replies)
    if clients < MIN_CLIENTS:
        return None
    total, count = np.zeros((clients, clients)), np.zeros((clients, clients))
    for field in floating(contract):
        relative = np.full((clients, clients), np.nan)
        for group in groups(contract, field, replies):
            if len(group.clients) >= MIN_CLIENTS:
                pairs = np.ix_(group.clients, group.clients)
                relative[pairs] = relative_distances(group.tensors(), fraction)
        relative = complete_distances(relative)
        total += np.nan_to_num(relative)
        count += ~np.isnan(relative)
    if not np.triu(count, 1).any():
        return None
    squared = np.divide(total, count, out=np.ones_like(total), where=count > 0)
    np.fill_diagonal(squared, 0.0)
    return squared


@dataclass(frozen=True)
class Group:
    """Clients whose values in a field are comparable, i.e. parts of the same larger tensors."""

    clients: tuple[int, ...]
    """Indices of the clients among the replies."""
    names: tuple[str, ...]
    """Names of the field's floating-point tensors."""
    values: Mapping[int, Mapping[str, Array]]
    """Tensors, by client and name."""
    rows: Mapping[int, Array]
    """Row indices of each client's values in the larger tensor; empty if each client's values are
    the leading part of the larger tensor."""

    def stack(self, name: str) -> Array:
        """Stack the tensors of K clients into a float64 array [K, ...]; missing values are NaN."""
        values = {client: self.values[client][name] for client in self.clients}
        shape = np.max([value.shape for value in values.values()], axis=0).astype(int)
        if self.rows:
            shape[0] = 1 + max(int(rows.max()) for rows in self.rows.values())
        stack = np.full((len(values), *shape), np.nan)
        for index, (client, value) in enumerate(values.items()):
            stack[index][self._region(value, client)] = value
        return stack

    def tensors(self) -> Iterator[tuple[Array, int, float]]:
        """Yield each tensor's squared distances, size, and lower bound of the typical distance.

        Honest clients with few batches keep almost the initial statistics of batch norms, which are
        far from the statistics of all other clients. For these statistics, the lower bound is thus
        the median of the clients' mean squares, and at least the initial mean square.
        """
        for name in self.names:
            points = flat(self.stack(name))
            lowest = 0.0
            if name.endswith(STATISTICS):
                sizes = np.nanmean(np.square(points), axis=1)
                lowest = max(float(np.median(sizes)), float(name.endswith(VARIANCES)))
            yield mean_squares(points), points.shape[1], lowest

    def part(self, full: Array, name: str, client: int) -> Array:
        """Return the part of a larger tensor that corresponds to a client's tensor."""
        value = self.values[client][name]
        return as_type(full[self._region(value, client)], value.dtype)

    def _region(self, value: Array, client: int) -> tuple[Any, ...]:
        slices = tuple(map(slice, value.shape))
        return (self.rows[client], *slices[1:]) if self.rows else slices


def flat(stack: Array) -> Array:
    """Reshape a stack [K, ...] to points [K, D]."""
    return stack.reshape(len(stack), -1)


def groups(contract: Contract, field: Field, replies: Sequence[Knowledge]) -> list[Group]:
    """Group the clients with comparable values in a field.

    Rows with ids are always comparable. Weights are comparable if their names and shapes are the
    same, or if smaller models are parts of larger models.
    """
    ids = ids_of(contract, field)
    labels = "" if ids else labels_of(contract, field)
    clients_by_key: dict[object, list[int]] = {}
    values: dict[int, Mapping[str, Array]] = {}
    for client, reply in enumerate(replies):
        # Sorted, because a client that chooses another order must not be in a group of its own.
        names = sorted(
            n for n in reply.tensors if n == field.name or n.startswith(field.name + "/")
        )
        tensors = {n: v for n in names if np.issubdtype((v := reply.tensors[n]).dtype, np.floating)}
        if not tensors or not all(value.size for value in tensors.values()):
            continue
        if labels:
            tensors = class_moments(tensors, reply.tensors[labels])
        values[client] = tensors
        by_shape = not (ids or labels or (isinstance(field, WeightsField) and field.nested))
        architecture = tuple((name, value.shape) for name, value in tensors.items())
        clients_by_key.setdefault(architecture if by_shape else tuple(tensors), []).append(client)
    rows: dict[int, Array] = {}
    if ids or labels:
        rows = {
            c: replies[c].tensors[ids] if ids else np.unique(replies[c].tensors[labels])
            for c in values
        }
    return [
        Group(
            tuple(clients),
            tuple(values[clients[0]]),
            values,
            {client: rows[client] for client in clients} if rows else {},
        )
        for clients in clients_by_key.values()
    ]


def class_moments(tensors: Mapping[str, Array], labels: Array) -> dict[str, Array]:
    """Return the means of each class's rows, and of their squares, in ascending order of classes.

    Without the squares, a client could send class means of usual size and rows of any size.

    Args:
        tensors: Arrays of shape [N, ...].
        labels: Class of each row, of shape [N].
    """
    rows = [labels == c for c in np.unique(labels)]
    moments: dict[str, Array] = {}
    for name, values in tensors.items():
        wide = values.astype(np.float64)
        moments[name] = np.stack([wide[each].mean(0) for each in rows])
        moments[f"{name} squared"] = np.stack([np.square(wide[each]).mean(0) for each in rows])
    return moments
