"""Members of a federation: their admission, their health, and the held-out clients.

Flower's random node ids are mapped to client names. A client's description is an untrusted claim.
Its size is bounded, and it is checked against the server's settings and compared with the other
clients' descriptions. A single client can therefore neither end a run nor determine its task.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from flwr.common import Code, GetPropertiesIns
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import FedhetError, KnowledgeError, ModelError, error_text, one_line
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.methods.spec import MethodSpec
from fedhet.models import base_of, is_registered, shapes
from fedhet.runs.records import HELD_OUT, HELD_OUT_EPOCH
from fedhet.runs.units import plural
from fedhet.server.calls import Failure, UserCodeError, UserCodeFault, UserCodeFaults
from fedhet.server.nodes import display_name, registered_name, retrying
from fedhet.settings.engine import EngineSettings
from fedhet.settings.run import RunSettings, held_out_clients
from fedhet.tasks import CLASSIFICATION, task_for
from fedhet.wire.identity import ClientInfo, capped, client_name, read_properties
from fedhet.wire.knowledge import Knowledge

Task = tuple[int, str, tuple[int, ...]]
"""Task of a client: number of classes, sample kind, and sample shape."""
MAX_VALUES = 2**24
"""Maximum number of values in one sample."""
MAX_BACKOFF = 16
"""Maximum number of rounds between two calls to a client or a node that does not reply."""


@dataclass(frozen=True)
class Admission:
    """Requirements that a client's description must satisfy."""

    classes: int = 0
    """Number of classes; 0 accepts any number."""
    one_model: bool = False
    """Whether all clients must have the same architecture."""
    max_bytes: float = math.inf
    """Maximum size of a model, in bytes."""
    server_task: Callable[[], Task | None] = lambda: None
    """Function that returns the task of the server's dataset, or None if the server has no dataset.
    This task is preferred in a tie."""

    def fault_of(self, info: ClientInfo, pool: Collection[str] | None) -> str:
        """Check a client's description, and return an error message, or "" if it is valid.

        Args:
            info: The client's description.
            pool: The models of the run, or None if the server does not use the clients' models.
        """
        if math.prod(info.shape) > MAX_VALUES:
            return f"samples must have at most {MAX_VALUES} values, got shape {info.shape}"
        if self.classes and info.classes != self.classes:
            return (
                f"its data has {info.classes} classes, expected 'models.num-classes' = "
                f"{self.classes}"
            )
        if pool is None:
            return ""
        if not (info.model in pool or is_registered(info.model)):
            # The server imports only models of the pool, never a model that a client names.
            return f"its model {info.model!r} is neither registered nor in the run's pool"
        if not is_registered(info.model):
            return ""
        try:  # Compute the sizes of a registered model for the claimed task without building it.
            tensors = shapes(info.model, info.shape, info.classes, kind=info.kind).values()
        except ModelError as error:
            return str(error)
        size = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in tensors)
        if size > self.max_bytes:
            limit = f"{self.max_bytes / 1e6:g} MB ('engine.max-payload-mb')"
            return f"its model {info.model!r} would have {size / 1e6:.0f} MB, more than {limit}"
        return ""


def most_common_task(
    infos: Sequence[ClientInfo], server_task: Callable[[], Task | None] = lambda: None
) -> Task:
    """Return the most common task among several clients.

    If several tasks are equally common, the result is the server's task if it is among them, or
    else the task whose samples have the fewest elements. A single client therefore cannot increase
    the server's memory use by reporting a false shape.
    """
    counts = Counter(map(task_of, infos))
    max_count = max(counts.values())
    tied = [task for task, count in counts.items() if count == max_count]
    preferred = server_task() if len(tied) > 1 else None
    if preferred in tied:
        return preferred
    return min(tied, key=lambda t: (math.prod(t[2]), t[0], t[2], t[1]))


def most_common_name(names: Sequence[str]) -> str:
    """Return the most common non-empty name (the first in a tie), or "" if all are empty."""
    counts = Counter(name for name in names if name)
    return counts.most_common(1)[0][0] if counts else ""


def task_of(info: ClientInfo) -> Task:
    """Return the task of a client."""
    return info.classes, info.kind, info.shape


@dataclass(frozen=True)
class Member:
    """A connected client: its description and its Flower proxy."""

    info: ClientInfo
    proxy: ClientProxy


def first_of_pool(members: Iterable[Member], pool: Collection[str]) -> ClientInfo:
    """Return the first client whose model is in the pool, or else the first client.

    The server can build the models of the pool, but may be unable to build other models.
    """
    infos = [member.info for member in members]
    return next((info for info in infos if info.model in pool), infos[0])


class Members:
    """Members of a federation, updated as nodes connect and disconnect."""

    def __init__(
        self,
        timeout: float,
        pool: Collection[str] | None,
        notice: Callable[[str], None],
        rules: Admission | None = None,
        samples_cap: float = 0.0,
        on_faults: Callable[[Iterable[UserCodeFault]], None] | None = None,
        task_name: str = CLASSIFICATION.name,
    ) -> None:
        """Create an empty federation.

        Args:
            timeout: Time limit for a node's description, in seconds.
            pool: The models of the run, or None if the server does not use the clients' models.
            notice: Function that shows a message to the user.
            rules: Requirements for descriptions.
            samples_cap: Maximum number of samples with which a member is weighted, as a multiple of
                the median over all members; 0 means no limit.
            on_faults: Called with errors in the code of clients that failed to send a description.
            task_name: Name of the run's task.
        """
        self._on_faults = on_faults or (lambda faults: None)
        self._timeout = timeout
        self._samples_cap = samples_cap
        self._capped: dict[str, int] = {}
        """Sample limit shown in the last notice about each capped client, by client."""
        self._pool = pool
        self._notice = notice
        self._rules = rules or Admission()
        self._by_node: dict[str, Member] = {}
        """Connected members, by node."""
        self._names: dict[str, str] = {}
        """Name of each node that is or has been a member."""
        self._disconnected: set[str] = set()
        """Names of members that have disconnected at least once."""
        self._refused: set[str] = set()
        """Connected nodes that are excluded from the run."""
        self._silent: dict[str, tuple[int, int]] = {}
        """For each node, the number of requests without a reply, and the value of `_num_requests`
        at the last of these requests."""
        self._any_timeout = False
        """Whether any node exceeded the time limit in the last request."""
        self._num_requests = 0
        """Number of calls of `present`, usually one call per round."""
        self._task: Task | None = None
        self._name_of_task = task_name
        self._order = ""
        """Order of the class names (`ClientInfo.order`); empty until a client reports one."""
        self._model = ""
        """Model that all members must have; empty if it is unknown or if models may differ."""
        self._bases: dict[str, str] = {}
        """Digest of each frozen base model (`ClientInfo.base`), by model name."""
        self._public, self._public_site = "", ""
        """Digest of the sites' public set, and the first site that has it; empty if unknown."""

    @classmethod
    def for_run(
        cls, config: Config, data: RunData, notice: Callable[[str], None], faults: UserCodeFaults
    ) -> Members:
        """Create an empty federation for a run."""

        def server_task() -> Task | None:
            try:
                dataset = data.dataset
            except FedhetError:  # The server cannot read the sites' data.
                return None
            return dataset.format.outputs, dataset.format.kind, dataset.format.shape

        engine, spec, models = config.run.engine, config.method.spec, config.run.models
        pool = models.pool if spec.instructions.weights or spec.replies.weights else None
        max_bytes = engine.max_payload_mb * 1e6
        task = task_for(config.run.data)
        outputs = task.outputs(models.num_classes)
        rules = Admission(outputs, spec.one_model, max_bytes, server_task)
        cap, report = engine.samples_cap, faults.report
        return cls(engine.join_timeout, pool, notice, rules, cap, report, task.name)

    def wait_for_first(
        self, manager: ClientManager, wanted: int, engine: EngineSettings
    ) -> dict[str, Member]:
        """Wait for the first members of a run, and return them by name.

        If too few nodes reply in time, nodes that exceeded the time limit are called again until
        the round times out, because a slow machine may take long to load its data.

        Args:
            manager: Flower's registry of connected nodes.
            wanted: Number of clients in the run.
            engine: Settings of the engine.

        Raises:
            FedhetError: If fewer clients than 'engine.min-clients' have joined.
        """
        required = engine.min_clients or wanted
        if manager.num_available() < wanted:
            count = manager.num_available()
            self._notice(f"waiting for {plural(wanted, 'client')}, {count} connected")
            if not manager.wait_for(wanted, int(engine.join_timeout)):
                count, seconds = manager.num_available(), engine.join_timeout
                connected = f"{count} of {wanted} clients are connected after {seconds:g} s"
                if count < required:
                    raise FedhetError(
                        f"{connected}. Start the missing clients, or change 'clients', "
                        "'engine.join-timeout' or 'engine.min-clients'."
                    )
                self._notice(f"{connected}; the run starts with these clients")
        end = time.monotonic() + engine.round_timeout
        members = self.present(manager)
        while len(members) < required and self._any_timeout and time.monotonic() < end:
            self._notice(f"{len(members)} of {required} clients have registered; trying again")
            self._silent.clear()
            members = self.present(manager)
        if len(members) < required:
            raise FedhetError(
                f"expected at least {required} clients that can take part, got {len(members)}. "
                "See the notices above, or set 'engine.min-clients' to start with fewer clients."
            )
        return members

    def present(self, manager: ClientManager) -> dict[str, Member]:
        """Return the connected members sorted by name, after admitting new nodes.

        The first clients determine the task of the run: the most common number of classes, sample
        shape and order of class names, and the most common model if models must not differ. A
        new node is excluded, with a notice, if its task differs, if its name is taken, or if its
        model is unknown to the server. A node that does not reply is called again after 1, 2, 4,
        ... rounds.
        """
        # Copy the dictionary, because Flower's thread changes it when nodes come and go.
        proxies: dict[str, ClientProxy] = dict(manager.all())
        for node in sorted(self._by_node.keys() - proxies.keys()):
            self._disconnected.add(name := self._by_node.pop(node).info.name)
            self._notice(f"client {name} is no longer connected")
        self._refused &= proxies.keys()
        self._silent = {node: counts for node, counts in self._silent.items() if node in proxies}
        self._num_requests += 1
        due: list[ClientProxy] = []
        for node in sorted(proxies.keys() - self._by_node.keys() - self._refused):
            count, last = self._silent.get(node, (0, 0))
            if self._num_requests - last >= backoff_rounds(max(count - 1, 0)):
                due.append(proxies[node])
        self._admit(due)
        limits = capped([member.info for member in self._by_node.values()], self._samples_cap)
        present: dict[str, Member] = {}
        for member in sorted(self._by_node.values(), key=lambda member: member.info.name):
            info, name, limit = member.info, member.info.name, limits[member.info.name]
            if limit < info.samples and self._capped.get(name) != limit:
                self._capped[name] = limit
                self._notice(
                    f"client {name} reported {info.samples} samples, but only {limit} count: "
                    f"'engine.samples-cap' is {self._samples_cap:g} times the median"
                )
            present[name] = replace(member, info=replace(info, samples=limit))
        return present

    def wait_for(self, manager: ClientManager, needed: int) -> dict[str, Member]:
        """Wait for `needed` members until the time limit, and return all present members."""
        end, present = time.monotonic() + self._timeout, self.present(manager)
        if len(present) < needed:
            self._notice(f"waiting for {plural(needed, 'client')}, {len(present)} connected")
        while len(present) < needed and time.monotonic() < end:
            time.sleep(min(1.0, self._timeout / 10))
            present = self.present(manager)
        return present

    def _admit(self, proxies: list[ClientProxy]) -> None:
        self._any_timeout = False
        if not proxies:
            return
        with ThreadPoolExecutor(max_workers=len(proxies)) as pool:
            replies = list(pool.map(self._request_description, proxies))
        described = [reply for reply in replies if isinstance(reply, Member)]
        valid = [
            member
            for member in sorted(described, key=lambda member: member.info.name)
            if not self._exclude(member, self._rules.fault_of(member.info, self._pool))
        ]
        if self._task is None and valid:  # The first clients determine the task.
            infos = [member.info for member in valid]
            self._task = most_common_task(infos, self._rules.server_task)
            of_task = [info for info in infos if task_of(info) == self._task]
            self._order = most_common_name([info.order for info in of_task])
            if self._rules.one_model:
                self._model = most_common_name([info.model for info in of_task])
            for base in {base_of(info.model) for info in of_task}:
                digests = [info.base for info in of_task if base_of(info.model) == base]
                self._bases[base] = most_common_name(digests)
            self._set_public(of_task)
        taken = {member.info.name for member in self._by_node.values()}
        for member in valid:
            name, node = member.info.name, member.proxy.cid
            if name in taken:
                # Do not refuse the node, because Flower may still list the client's old node.
                self._notice(f"client {name} is excluded: another node uses this name")
            elif not self._exclude(member, self._mismatch(member.info)):
                taken.add(name)
                self._by_node[node], self._names[node] = member, name
                if name in self._disconnected:
                    self._notice(f"client {name} is connected again")
                self._order = self._order or member.info.order
                self._bases.setdefault(base_of(member.info.model), member.info.base)
                self._set_public([member.info])
        for reply in replies:
            if isinstance(reply, str):
                self._notice(reply)

    def _set_public(self, infos: Sequence[ClientInfo]) -> None:
        """Store the most common public set of several clients, unless it is already known."""
        if not self._public and (digest := most_common_name([info.public for info in infos])):
            self._public = digest
            self._public_site = next(info.name for info in infos if info.public == digest)

    def _exclude(self, member: Member, fault: str) -> bool:
        """Exclude a client, with a notice, if it has a `fault`. Return whether it is excluded."""
        if fault:
            self._refused.add(member.proxy.cid)
            self._notice(f"client {member.info.name} is excluded: {fault}")
        return bool(fault)

    def _request_description(self, proxy: ClientProxy) -> Member | str:
        """Request a node's description, and return the member or an error message."""
        started = time.monotonic()
        try:
            node = retrying(proxy)
            reply = node.get_properties(GetPropertiesIns({}), self._timeout, group_id=0)
            self._silent.pop(proxy.cid, None)
            if reply.status.code != Code.OK:
                return f"{display_name(proxy)} is excluded: {one_line(reply.status.message)[:300]}"
            info = read_properties(reply.properties, display_name(proxy))
            # A registered key can use only its registered name, and a node cannot change its name.
            claim, registered = f"it claims the name {info.name!r}", registered_name(proxy)
            former = self._names.get(proxy.cid, info.name)
            if registered and registered != info.name:
                raise FedhetError(f"{claim}, but its key was registered as {registered!r}")
            if former != info.name:
                raise FedhetError(f"{claim}, but it was client {former} before")
            return Member(info, node)
        except FedhetError as error:
            self._refused.add(proxy.cid)
            fault = error.reason if isinstance(error, KnowledgeError) else str(error)
            return f"{display_name(proxy)} is excluded: {fault}"
        except Exception as error:
            # After any transport error, the node may be available again in a later round.
            if isinstance(error, UserCodeError):
                self._on_faults([error.fault])
            count, _ = self._silent.get(proxy.cid, (0, 0))
            self._silent[proxy.cid] = (count + 1, self._num_requests)
            self._any_timeout |= time.monotonic() - started >= self._timeout
            return f"{display_name(proxy)} did not register: {error_text(error)[:300]}"

    def _mismatch(self, info: ClientInfo) -> str:
        """Compare a description with the task; return an error message, or "" if they match."""
        if task_of(info) != self._task:
            classes, kind, shape = self._task or (0, "", ())
            kinds = (f"{info.kind} ", f"{kind} ") if kind != info.kind else ("", "")
            noun = "classes" if info.task == CLASSIFICATION.name else "outputs"
            return (
                f"its data has {info.classes} {noun} and {kinds[0]}shape {info.shape}, expected "
                f"{classes} {noun} and {kinds[1]}shape {shape}"
            )
        if info.task != self._name_of_task:
            return f"its task is {info.task!r}, expected {self._name_of_task!r} ('data.task')"
        if info.order and self._order and info.order != self._order:
            if info.task != CLASSIFICATION.name:
                return (
                    "its targets differ from other clients' targets in name or scale (schema.toml)"
                )
            return "its classes differ from other clients' classes in name or order (classes.txt)"
        if self._model and info.model != self._model:
            return f"its model must be {self._model!r} as on all clients, got {info.model!r}"
        base = base_of(info.model)
        if info.base != (self._bases.get(base) or info.base):
            return f"its base model {base!r} differs from the base model of other clients"
        if info.public != self._public and info.public and self._public:
            return (
                f"its public set differs from the public set of client {self._public_site}. Copy "
                "the same files to both sites ('data.public-dataset', 'data.data-dir')."
            )
        return ""


HELD_OUT_KINDS = (HELD_OUT, HELD_OUT_EPOCH)
"""Kinds of models that held-out clients evaluate."""


class HeldOutClients:
    """Clients that never train (`data.held-out-clients`), but evaluate after the last round."""

    def __init__(self, run: RunSettings, spec: MethodSpec) -> None:
        self.names = frozenset(client_name(k, run.clients) for k in held_out_clients(run))
        self.members: dict[str, Member] = {}
        self._method, self._offered_kind = run.method, spec.offered_kind

    def split_off(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Store the held-out members, and return the members that may train."""
        self.members = {name: member for name, member in members.items() if name in self.names}
        return {name: member for name, member in members.items() if name not in self.names}

    def instructions(
        self, instruction: Callable[[ClientInfo], Knowledge | None]
    ) -> dict[str, Knowledge]:
        """Return an evaluation instruction for each held-out client.

        The result is empty if the method has no model for clients that have not trained.
        """
        if not self._offered_kind:
            return {}
        made = {name: instruction(member.info) for name, member in self.members.items()}
        return {name: knowledge for name, knowledge in made.items() if knowledge is not None}

    @property
    def notice(self) -> str:
        """Message to the user before the first round, or "" if no clients are held out."""
        names = ", ".join(sorted(self.names))
        consequence = (
            "they evaluate the global model after the last round"
            if self._offered_kind
            else f"they are not evaluated, because {self._method} trains no model for all clients"
        )
        if not names:
            return ""
        return f"held out of training ('data.held-out-clients'): {names}; {consequence}"


def backoff_rounds(failures: int) -> int:
    """Return the number of rounds until the next call: 2^failures, but at most MAX_BACKOFF."""
    return min(1 << failures, MAX_BACKOFF)


class ClientHealth:
    """Record of each client's consecutive rounds without a usable reply.

    A client with rejected replies in several consecutive rounds is excluded for the rest of the
    run. A client that is silent or reports errors is called at increasing intervals. In both cases,
    the method drops the client's earlier contributions. The counts are saved in each checkpoint, so
    that a resumed run calls the same clients.
    """

    def __init__(self, max_refusals: int, max_silences: int, notice: Callable[[str], None]) -> None:
        """Create an empty record.

        Args:
            max_refusals: Consecutive rounds with rejected replies until a client is excluded; 0
                means never.
            max_silences: Consecutive rounds without a reply until a client is called less often; 0
                means never.
            notice: Function that shows a message to the user.
        """
        self._max_refusals, self._max_silences = max_refusals, max_silences
        self._notice = notice
        self._refused: dict[str, int] = {}
        self._silent: dict[str, tuple[int, int]] = {}
        """For each client, the number of consecutive rounds without a reply, and the last of these
        rounds."""
        self._gone: dict[str, int] = {}
        """Number of consecutive rounds in which a former member was not connected."""

    def eligible(self, round: int, names: Collection[str]) -> list[str]:
        """Return the clients that may be called in a round, in the given order.

        If all of these clients are backing off, all are eligible, because a round needs clients.
        Raises FedhetError if all clients are excluded.
        """
        included = [name for name in names if not self._is_excluded(name)]
        if not included:
            raise FedhetError(
                f"no client is left to call in round {round}: the replies of all {len(names)} "
                f"clients were rejected in {self._max_refusals} consecutive rounds "
                "('engine.max-refusals')"
            )
        return [name for name in included if not self.exclusion_reason(round, name)] or included

    def exclusion_reason(self, round: int, name: str) -> str:
        """Return "excluded" or "backing off" if a client must not be called, or "" otherwise."""
        if self._is_excluded(name):
            return "excluded"
        if not self._is_silent(name):
            return ""
        count, last = self._silent[name]
        next_call = last + backoff_rounds(count - self._max_silences + 1)
        return "backing off" if round < next_call else ""

    def update(
        self, round: int, outcomes: Mapping[str, Failure | None], members: Collection[str]
    ) -> list[str]:
        """Record the outcomes of a round.

        Args:
            round: The round.
            outcomes: Outcome of each client that was called; None if its reply was usable.
            members: Names of the connected members.

        Returns:
            The clients whose earlier contributions the method must forget.
        """
        before = self._forgettable()
        for name in sorted(outcomes):
            refused, (silent, _) = self._refused.pop(name, 0), self._silent.pop(name, (0, 0))
            if outcomes[name] == "refused":
                self._refused[name] = refused + 1
            elif outcomes[name] is not None:
                self._silent[name] = (silent + 1, round)
                if refused:  # Silence does not reset the count of rejected replies.
                    self._refused[name] = refused
        # If a former member returns, its counts restart at zero.
        self._gone |= dict.fromkeys(members, 0)
        for name in self._gone.keys() - set(members):
            self._gone[name] += 1
            self._silent.pop(name, None)
        forgotten = sorted(self._forgettable() - before)
        for name in forgotten:
            if self._is_excluded(name):
                fault = (
                    f"is excluded: its replies were rejected in {self._refused[name]} consecutive "
                    "rounds ('engine.max-refusals')"
                )
            elif self._is_silent(name):
                fault = (
                    f"has not replied in {self._silent[name][0]} consecutive rounds and is called "
                    "less often ('engine.max-silences')"
                )
            else:
                fault = "has left"
            self._notice(f"client {name} {fault}; its earlier contributions are discarded")
        return forgotten

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the JSON-serializable counts for a checkpoint."""
        silent = {name: count for name, (count, _) in self._silent.items()}
        last = {name: round for name, (_, round) in self._silent.items()}
        return {"refused": self._refused, "silent": silent, "last": last, "gone": self._gone}

    def load_dict(self, saved: Mapping[str, Mapping[str, int]]) -> None:
        """Restore the state returned by `to_dict`.

        Raises ValueError, KeyError or TypeError if the state is invalid.
        """
        self._refused, self._gone = dict(saved["refused"]), dict(saved["gone"])
        self._silent = {name: (n, saved["last"][name]) for name, n in saved["silent"].items()}

    def _is_excluded(self, name: str) -> bool:
        return 0 < self._max_refusals <= self._refused.get(name, 0)

    def _is_silent(self, name: str) -> bool:
        return 0 < self._max_silences <= self._silent.get(name, (0, 0))[0]

    def _forgettable(self) -> set[str]:
        """Return the clients whose earlier contributions must no longer count."""
        failing = {*self._refused, *self._silent}
        gone = {name for name, count in self._gone.items() if 0 < self._max_silences <= count}
        return gone | {n for n in failing if self._is_excluded(n) or self._is_silent(n)}
