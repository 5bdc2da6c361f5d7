"""Server side of secure aggregation: the cohorts of a round, and the sums of its masked replies.

`fedhet.wire.masking` defines the vectors, and `fedhet.client_runtime.masking` defines the checks
with which clients protect themselves. The server selects the cohorts, adds up the masked vectors,
and requests the shares that unmask the sum. Cohorts and survivors are written to disk before they
are sent. Clients reject a changed request for the same round, so a resumed server must repeat its
earlier requests.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import Code, GetPropertiesIns, Scalar

from fedhet.algorithms.shamir import SECRET_BYTES, SHARE_BYTES, has_spare, join
from fedhet.base.arrays import Array
from fedhet.base.disk import read_json, write_text
from fedhet.base.errors import StateError, error_text, one_line
from fedhet.config.resolve import MIN_SUMMED, Config
from fedhet.config.secure import threshold
from fedhet.runs.measures import Measured
from fedhet.runs.storage import KEPT_STATES
from fedhet.runs.units import plural
from fedhet.server.members import Member
from fedhet.server.nodes import may_restart
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.settings.schema import invalid_setting
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge
from fedhet.wire.masking import (
    BOX_BYTES,
    COMMITMENT,
    COMMITMENT_BYTES,
    FAULT,
    MASKED,
    REQUEST,
    REVEAL,
    SEEDS,
    SHARES,
    Layout,
    commitment,
)  # fmt: skip

STATE = "secure-aggregation.json"
"""File in the run's directory that stores the requests of the last rounds."""
ALL = "+all"
"""Name of the sum over all clients. Names of sums start with "+", unlike names of clients."""
SizesOf = Callable[[ClientInfo], Sizes]
"""Function that returns the required sizes of the fields in a client's reply."""
Answer = tuple[dict[int, tuple[bytes, bytes]], str]
"""Shares and secrets that a client reveals for each lane, and the client's error message or ""."""

Faults = dict[str, set[str]]
"""Owners of the masks of which a client revealed wrong shares, by client."""


@dataclass(frozen=True)
class Group:
    """One sum of a round: a lane of the replies, and the clients whose vectors are summed."""

    number: int
    """Index of the lane among the sums that the method declares."""
    architecture: str
    """Architecture of the clients, or "" for clients of all architectures."""
    cohort: tuple[str, ...]
    survivors: tuple[str, ...] = ()
    """Clients whose masked vectors are summed; empty until the shares are requested."""
    is_lost: bool = False
    """Whether the other shares of the round were requested without this sum, because too few
    clients replied."""


@dataclass
class RoundRequest:
    """The groups of a round, and the nonce of its requests."""

    nonce: str
    groups: list[Group]

    def groups_of(self, client: str) -> list[Group]:
        """Return the groups of a client."""
        return [group for group in self.groups if client in group.cohort]


class Unmasking:
    """Step that replaces the masked replies of a round with their sums."""

    def __init__(
        self, config: Config, run: str, state: RoundState, directory: Path, timeout: float
    ) -> None:
        """Create the step for the run named `run`.

        Requests for shares time out after `timeout` seconds. If the run resumes, loads the requests
        saved by the earlier process. Raises StateError if the file with these requests is damaged.
        """
        spec = config.method.spec
        self._sums = spec.sums.for_run(config.method_settings, config.run.data.task)
        self._contract = spec.replies
        self._settings, self._state = config.method_settings, state
        self._run, self._directory, self._timeout = run, directory, timeout
        self.min_clients = max(MIN_SUMMED, config.run.clients // 2 + 1)
        """Minimum number of clients in a round. Peers files require at least this number."""
        self._members: Mapping[str, Member] = {}
        self._requests: dict[int, RoundRequest] = {}
        self._round, self._request = 0, RoundRequest("", [])
        self._max_spoiled, self._spoiled = config.run.engine.max_divergences, 0
        """Maximum and current number of consecutive rounds in which a client spoiled a sum."""
        if config.run.resume and (path := directory / STATE).exists():
            try:
                for number, (nonce, groups) in read_json(path).items():
                    parsed = [Group(n, a, tuple(c), tuple(s), lost) for n, a, c, s, lost in groups]
                    self._requests[int(number)] = RoundRequest(str(nonce), parsed)
            except (ValueError, TypeError, AttributeError) as error:
                raise StateError(f"{path}: damaged ({error_text(error)})") from None

    def check(self, clients: Iterable[ClientInfo]) -> None:
        """Raise SettingsError before the first round if a client would not be in any sum."""
        if any(lane.within == "all" for lane in self._sums):
            return
        counts = Counter(client.model for client in clients)
        for model, count in sorted(counts.items()):
            if count < MIN_SUMMED:
                raise invalid_setting(
                    "privacy.secure-aggregation",
                    f"{plural(count, 'client')} with model {model}",
                    f"at least {MIN_SUMMED} clients with each model",
                    "the weights of a model are summed over the clients with this model",
                )

    def start(self, round: int, members: Mapping[str, Member], selected: Sequence[str]) -> set[str]:
        """Form the cohorts of a round, or reuse saved cohorts, and return their clients."""
        self._members, self._round = members, round
        if round not in self._requests:
            groups: list[Group] = []
            for number, lane in enumerate(self._sums):
                by_architecture: dict[str, list[str]] = {}
                for name in sorted(selected):
                    model = members[name].info.model if lane.within == "architecture" else ""
                    by_architecture.setdefault(model, []).append(name)
                for model, names in sorted(by_architecture.items()):
                    if len(names) >= MIN_SUMMED:
                        groups.append(Group(number, model, tuple(names)))
                    else:
                        self._state.notice(
                            f"round {round}: {', '.join(lane.fields)} of {', '.join(names)} are "
                            f"not summed: expected at least {MIN_SUMMED} clients"
                            f"{f' with model {model}' if model else ''}, got {len(names)}"
                        )
            self._requests[round] = RoundRequest(secrets.token_hex(16), groups)
            for old in [number for number in self._requests if number <= round - KEPT_STATES]:
                del self._requests[old]
            self._save_requests()
        self._request = self._requests[round]
        return {name for name in selected if self._request.groups_of(name)}

    def config(self, client: str) -> dict[str, Scalar]:
        """Return the config entry that requests a masked reply from a client."""
        cohorts = {str(group.number): group.cohort for group in self._request.groups_of(client)}
        return {REQUEST: json.dumps({"nonce": self._request.nonce, "cohorts": cohorts})}

    def masked_sizes(self, client: ClientInfo, sizes: SizesOf) -> Sizes:
        """Return the shapes of a client's masked vectors and encrypted shares.

        `sizes` returns the axis sizes and weight shapes of the client's unmasked reply.
        """
        vectors, shares, commitments = {}, {}, {}
        for group in self._request.groups_of(client.name):
            sites = len(group.cohort)
            vectors[str(group.number)] = (self._layout(group, client, sizes).size,), "uint32"
            shares[str(group.number)] = (sites, BOX_BYTES), "uint8"
            commitments[str(group.number)] = (1 + sites, COMMITMENT_BYTES), "uint8"
        return Sizes({}, {MASKED: vectors, SHARES: shares, COMMITMENT: commitments})

    def __call__(self, replies: Iterable[Reply], sizes: SizesOf) -> Iterator[Reply]:
        """Yield each sum of the masked replies, in the form of a client's reply.

        Raises StateError if a client has spoiled sums in too many consecutive rounds.
        """
        by_name: dict[str, Reply] = {}
        for reply in replies:
            if reply.age:
                self._state.notice(
                    f"client {reply.client.name}: the late reply is discarded, because the sum of "
                    "its round is already complete"
                )
            else:
                by_name[reply.client.name] = reply
                if fault := reply.knowledge.scalars.get(FAULT):
                    fault = one_line(str(fault))[:300]
                    self._state.notice(f"client {reply.client.name} refuses a sum: {fault}")
                self._state.record_measured(reply.client.name, reply.measured)
        if not by_name:
            return
        groups: list[Group] = []
        for position, group in enumerate(self._request.groups):
            fields = {f"{field}/{group.number}" for field in (MASKED, SHARES, COMMITMENT)}
            replied = tuple(
                name
                for name in group.cohort
                if name in by_name and fields <= {*by_name[name].knowledge.tensors}
            )
            survivors = group.survivors or replied
            if group.is_lost:
                # Clients reject a changed request, so a resumed server must omit the sum again.
                self._lost(group, "it was lost before the run was resumed")
            elif {*survivors} <= {*replied} and len(survivors) >= MIN_SUMMED:
                self._request.groups[position] = replace(group, survivors=survivors)
                groups.append(self._request.groups[position])
            else:
                self._request.groups[position] = replace(group, is_lost=not group.survivors)
                self._lost(group, f"{len(replied)} of {len(group.cohort)} clients replied")
        self._save_requests()
        sums: dict[str, Reply] = {}
        seeds_of, is_spoiled = self._ask(groups, by_name)
        for group, seeds in seeds_of.items():
            try:
                info, knowledge = self._sum(group, by_name, seeds, sizes)
            except ValueError as error:
                self._lost(group, str(error))
                is_spoiled = True
                continue
            clients = {*group.survivors}
            if (before := sums.get(info.name)) is not None:
                knowledge = before.knowledge.replacing(knowledge.tensors)
                clients |= {*before.clients}
            sums[info.name] = Reply(info, knowledge, Measured({}), clients=tuple(sorted(clients)))
        self._spoiled = self._spoiled + 1 if is_spoiled else 0
        if self._spoiled >= self._max_spoiled > 0:
            raise StateError(
                f"sums were spoiled in {self._spoiled} consecutive rounds ('engine.max-divergences'"
                "), so the run ends. A malicious client can do so without being identified. If all "
                "clients are honest, their peers files, settings, or instructions differ."
            )
        for _, reply in sorted(sums.items()):
            # If a sum has no class rows, add empty tensors, as in a client's reply.
            tensors: dict[str, Array] = {}
            for number, lane in enumerate(self._sums):
                layout = self._layout(Group(number, "", reply.clients), reply.client, sizes)
                if layout.ids and lane.fields[0] not in reply.knowledge.tensors:
                    tensors |= layout.empty()
            yield reply.with_knowledge(reply.knowledge.replacing(tensors))

    def _lost(self, group: Group, reason: str) -> None:
        fields = ", ".join(self._sums[group.number].fields)
        of = f" of {group.architecture}" if group.architecture else ""
        self._state.notice(f"round {self._round}: the sum of {fields}{of} is lost: {reason}")

    def _ask(
        self, groups: Sequence[Group], replies: Mapping[str, Reply]
    ) -> tuple[dict[Group, list[tuple[bytes, int]]], bool]:
        """Request the shares of all survivors.

        Returns the seeds of the masks in each sum, and whether an unknown client spoiled a sum,
        i.e. whether a sum is lost although all of its survivors revealed shares.

        A node that cannot be reached, e.g. because it restarts, is called again until the time
        limit. The round continues when all sums can be unmasked, without waiting for other nodes.
        """
        end, is_over = time.monotonic() + self._timeout, threading.Event()
        arrived: queue.SimpleQueue[tuple[str, Answer]] = queue.SimpleQueue()

        def attempt(name: str) -> None:
            while True:
                try:
                    answer = self._shares_of(name, groups, replies, end)
                    break
                except Exception as error:  # Catch any error of the transport or of the client.
                    answer = {}, error_text(error)
                    can_repeat = may_restart(self._members[name].proxy) and time.monotonic() < end
                    if not can_repeat or is_over.wait(min(3.0, self._timeout / 10)):
                        break
            arrived.put((name, answer))

        names = sorted({name for group in groups for name in group.survivors})
        answers: dict[str, Answer] = {}
        seeds: dict[Group, list[tuple[bytes, int]]] = {}
        wrong: dict[Group, Faults] = {}
        known: dict[Group, dict[str, bytes]] = {}
        dealers: set[str] = set()
        reasons: dict[Group, str] = {}
        for name in names:  # Use daemon threads, so that a hanging node does not block the exit.
            threading.Thread(target=attempt, args=(name,), daemon=True).start()
        while len(answers) < len(names):
            sender, answer = arrived.get()
            answers[sender] = answer
            # Stop waiting early only if all pending clients are deployed nodes. In a simulation,
            # wait for all clients, so that the counted messages do not depend on timing.
            if not all(may_restart(self._members[n].proxy) for n in names if n not in answers):
                continue
            if len(answers) == len(names):
                known.clear()  # Check the shares of all clients, to report all faults.
            for group in (each for each in groups if each not in seeds):
                faults, secrets_of = wrong.setdefault(group, {}), known.setdefault(group, {})
                try:
                    seeds[group] = self._seeds(group, answers, replies, faults, dealers, secrets_of)
                except ValueError as error:
                    reasons[group] = str(error)
            if len(seeds) == len(groups):
                break
        is_over.set()
        is_explained = self._report_faults(answers, wrong, dealers)
        for group in (each for each in groups if each not in seeds):
            self._lost(group, reasons[group])
        is_spoiled = not is_explained and any(
            group not in seeds and all(group.number in answers[name][0] for name in group.survivors)
            for group in groups
        )
        return {group: seeds[group] for group in groups if group in seeds}, is_spoiled

    def _shares_of(
        self, name: str, groups: Sequence[Group], replies: Mapping[str, Reply], end: float
    ) -> Answer:
        """Send a survivor its encrypted shares, and return the shares and secrets that it reveals.

        The request times out at `end`, as returned by `time.monotonic`.
        """
        mine = [group for group in groups if name in group.survivors]
        request: dict[str, Any] = {"run": self._run, "round": self._round}
        request["survivors"] = {str(group.number): group.survivors for group in mine}
        config: dict[str, Scalar] = {REVEAL: json.dumps(request)}
        for group in mine:
            field, position = f"{SHARES}/{group.number}", group.cohort.index(name)
            boxes = (replies[peer].knowledge.tensors[field] for peer in group.survivors)
            config[field] = b"".join(each[position].tobytes() for each in boxes)
        self._state.count_sent(sum(map(len, config.values())))  # type: ignore[arg-type]
        seconds = max(end - time.monotonic(), 1.0)
        result = self._members[name].proxy.get_properties(
            GetPropertiesIns(config), seconds, self._round
        )
        answer = result.properties
        if result.status.code is not Code.OK or "error" in answer:
            return {}, str(answer.get("error", result.status.message))
        revealed, fault = {}, str(answer.get(FAULT, ""))
        for group in mine:
            lost = len(group.cohort) - len(group.survivors)
            sizes = SHARE_BYTES * len(group.survivors), SECRET_BYTES * lost
            values = [answer.get(f"{kind}/{group.number}") for kind in (SHARES, SEEDS)]
            shares, seeds = (v if isinstance(v, bytes) else b"" for v in values)
            if (len(shares), len(seeds)) == sizes:
                revealed[group.number] = shares, seeds
                self._state.count_received(sum(sizes))
            elif values != [None, None]:
                fault = f"{SHARES}/{group.number}: expected {sizes[0]} and {sizes[1]} bytes"
        return revealed, fault

    def _report_faults(
        self, answers: Mapping[str, Answer], wrong: Mapping[Group, Faults], dealers: set[str]
    ) -> bool:
        """Show a notice for each error message, and for each client that sent wrong shares.

        If a client is certainly at fault, its reply counts as rejected. Returns whether this
        applies to any client. `wrong` contains the wrong shares of each group, and `dealers` the
        clients whose seed does not match its commitment.
        """
        faults: dict[str, list[str]] = {}
        for name, (_, fault) in sorted(answers.items()):
            if fault:
                faults.setdefault(one_line(fault)[:300], []).append(name)
        for fault, clients in faults.items():
            self._state.notice(f"shares not revealed by {', '.join(clients)}: {fault}")
        accused: dict[str, set[str]] = {}
        accusers: dict[str, set[str]] = {}
        senders, revealers = set[str](), set[str]()
        for group, faults_of in wrong.items():
            owners: dict[str, set[str]] = {}
            for name, makers in faults_of.items():
                accused.setdefault(name, set()).update(makers)
                for maker in makers:
                    owners.setdefault(maker, set()).add(name)
                    accusers.setdefault(maker, set()).add(name)
            # Honest clients are the majority of the cohort, so a majority of it is right. Malicious
            # clients can be the majority of the clients that answered.
            majority = len(group.cohort) // 2 + 1
            senders |= {owner for owner, names in owners.items() if len(names) >= majority}
            revealers |= {name for name, makers in faults_of.items() if len(makers) >= majority}
        guilty = {*dealers, *senders, *revealers}
        for name in sorted(guilty):
            fault = "sent shares of a seed that does not match its commitment"
            if name in senders & revealers:
                fault = (
                    "derived other keys than most clients, because its instruction, settings, "
                    "cohort, or peers file differs"
                )
            elif name in senders:
                fault = f"sent wrong shares of its mask to {', '.join(sorted(accusers[name]))}"
            elif name in revealers:
                fault = f"revealed wrong shares of the masks of {', '.join(sorted(accused[name]))}"
            self._state.record_misconduct(name, fault)
        for name in sorted(accused.keys() - guilty):
            if suspects := sorted(accused[name] - guilty):
                self._state.notice(
                    f"round {self._round}: {name} revealed wrong shares of the masks of "
                    f"{', '.join(suspects)}, or these clients sent wrong shares to {name}"
                )
        return bool(guilty)

    def _seeds(
        self,
        group: Group,
        answers: Mapping[str, Answer],
        replies: Mapping[str, Reply],
        wrong: Faults,
        dealers: set[str],
        known: dict[str, bytes],
    ) -> list[tuple[bytes, int]]:
        """Return the seeds of the masks in a sum, with the signs that remove the masks.

        A share is wrong if it does not match its owner's commitment. If a client revealed wrong
        shares, adds their owners to its entry in `wrong`. If a client's seed certainly does not
        match its commitment, adds the client to `dealers`. Raises ValueError if a seed is unknown.

        `known` contains the secrets of the masks that an earlier call has determined, by client.
        With each reply that arrives later, only the other secrets are computed again, and only from
        at least `threshold` shares.
        """
        survivors, number = group.survivors, group.number
        min_shares = threshold(len(group.cohort))
        lost = [name for name in group.cohort if name not in survivors]
        revealed = {
            name: lanes[number]
            for name, (lanes, _) in answers.items()
            if name in survivors and number in lanes
        }
        missing = [name for name in survivors if name not in revealed]
        if lost and missing:
            raise ValueError(
                f"no reply from {', '.join(lost)}, and no shares of their secrets from "
                f"{', '.join(missing)}"
            )
        seeds: list[tuple[bytes, int]] = []
        unknown: list[str] = []
        for position, name in enumerate(survivors):
            start = position * SHARE_BYTES
            committed = replies[name].knowledge.tensors[f"{COMMITMENT}/{number}"]
            shares: dict[int, bytes] = {}
            for other, (value, _) in sorted(revealed.items()):
                share = value[start : start + SHARE_BYTES]
                point = group.cohort.index(other) + 1
                if np.array_equal(commitment("share", share), committed[point]):
                    shares[point] = share
                else:
                    wrong.setdefault(other, set()).add(name)
            if name not in known:
                secret = b""
                if len(shares) >= min_shares:
                    with contextlib.suppress(ValueError):
                        secret = join(shares)
                if not np.array_equal(commitment("seed", secret), committed[0]):
                    # The client committed to these shares. It is at fault if they determine another
                    # secret, but not if there are too few of them.
                    is_certain = len(shares) == len(group.cohort) or has_spare(shares)
                    if len(shares) >= min_shares and is_certain:
                        dealers.add(name)
                    unknown.append(
                        f"the mask of {name} is unknown: {len(shares)} shares do not determine the "
                        "secret"
                    )
                    continue
                known[name] = secret
            seeds.append((known[name], -1))
            for position_lost, other in enumerate(lost):
                start = position_lost * SECRET_BYTES
                seed = revealed[name][1][start : start + SECRET_BYTES]
                seeds.append((seed, -1 if name < other else 1))
        if unknown:  # Raise only now, because `wrong` must contain the faults of all clients.
            raise ValueError(unknown[0])
        return seeds

    def _sum(
        self,
        group: Group,
        replies: Mapping[str, Reply],
        seeds: Sequence[tuple[bytes, int]],
        sizes: SizesOf,
    ) -> tuple[ClientInfo, Knowledge]:
        """Return the unmasked sum of a group. Raises ValueError if the sum is invalid."""
        survivors = group.survivors
        info = replies[survivors[0]].client
        layout = self._layout(group, info, sizes)
        total = np.zeros(layout.size, np.uint32)
        for name in survivors:
            layout.add(total, replies[name].knowledge.tensors[f"{MASKED}/{group.number}"])
        for seed, sign in seeds:
            layout.add_mask(total, seed, sign)
        tensors, weight = layout.decode(total, len(survivors))
        name = f"+{group.architecture}" if group.architecture else ALL
        return replace(info, name=name, samples=weight), Knowledge(tensors)

    def _layout(self, group: Group, client: ClientInfo, sizes: SizesOf) -> Layout:
        lane, sites = self._sums[group.number], len(group.cohort)
        return Layout.for_reply(lane, self._contract, sizes(client), sites, self._settings)

    def _save_requests(self) -> None:
        """Write the requests of the last rounds to disk. Raises StateError if writing fails."""
        saved = {
            number: [
                request.nonce,
                [
                    [g.number, g.architecture, g.cohort, g.survivors, g.is_lost]
                    for g in request.groups
                ],
            ]
            for number, request in self._requests.items()
        }
        path = self._directory / STATE
        write_text(path, json.dumps(saved), within=self._directory, private=True)
