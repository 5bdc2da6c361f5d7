"""The members of a federation: who they are, how they fare, and who is held out.

Flower's random node ids are mapped to the clients' own names. A client's description is a claim. It
is bounded, checked against what the server knows, and put to the vote of all descriptions, so that
one odd client neither ends a run nor decides its task.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from flwr.common import Code, GetPropertiesIns
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import FedhetError, KnowledgeError, ModelError, error_text, one_line
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.methods.spec import MethodSpec
from fedhet.models import is_registered, shapes
from fedhet.runs.records import HELD_OUT, HELD_OUT_EPOCH
from fedhet.server.calls import UserCodeFaults
from fedhet.server.nodes import display_name, registered_name, retrying
from fedhet.settings.engine import EngineSettings
from fedhet.settings.run import RunSettings, held_out_clients
from fedhet.wire.identity import ClientInfo, capped, client_name, read_properties
from fedhet.wire.knowledge import Knowledge

Task = tuple[int, str, tuple[int, ...]]
"""The number of classes, and the kind and the shape of a sample."""
MAX_VALUES = 2**24
"""The most values of one sample."""
Outcome = Literal["silent", "error", "refused"]
"""No reply; a reply with an error of the client's own; a reply that the server refuses."""
LONGEST_PAUSE = 16
"""The most rounds between two attempts to reach a client or a node that does not reply."""


@dataclass(frozen=True)
class Admission:
    """What a run demands of its clients' descriptions."""

    classes: int = 0
    """The number of classes that the run has; 0: any."""
    one_model: bool = False
    """Whether all clients must have the same architecture."""
    max_bytes: float = math.inf
    """The largest model that may travel."""
    servers_task: Callable[[], Task | None] = lambda: None
    """Returns the task of the dataset that the server can read, which decides between equals."""

    def fault_of(self, info: ClientInfo, pool: Collection[str] | None) -> str:
        """Return what is wrong with a description by itself, or "".

        `pool`: the run's models, or None if the server need not know the clients' models.
        """
        if math.prod(info.shape) > MAX_VALUES:
            return f"it claims samples of shape {info.shape}, at most {MAX_VALUES} values may be"
        if self.classes and info.classes != self.classes:
            return f"its data has {info.classes} classes, 'models.num-classes' is {self.classes}"
        if pool is None:
            return ""
        if not (info.model in pool or is_registered(info.model)):
            # Only models in the run's own pool are imported here, never others that a client names.
            return f"its model {info.model!r} is neither registered nor in the run's pool"
        if not is_registered(info.model):
            return ""
        try:  # a registered model is measured for the claimed task, not built
            tensors = shapes(info.model, info.shape, info.classes, kind=info.kind).values()
        except ModelError as error:
            return str(error)
        size = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in tensors)
        if size > self.max_bytes:
            limit = f"{self.max_bytes / 1e6:g} MB ('engine.max-payload-mb')"
            return f"its model {info.model!r} would have {size / 1e6:.0f} MB, more than {limit}"
        return ""


def commonest_task(
    infos: Sequence[ClientInfo], servers_task: Callable[[], Task | None] = lambda: None
) -> Task:
    """Return the most common task.

    Among equally common ones the server's own is taken, or else the smallest: an invented size must
    not decide what the server allocates.
    """
    counts = Counter(map(task_of, infos))
    most = max(counts.values())
    tied = [task for task, count in counts.items() if count == most]
    own = servers_task() if len(tied) > 1 else None
    return own if own in tied else min(tied, key=lambda t: (math.prod(t[2]), t[0], t[2], t[1]))


def commonest(names: Sequence[str]) -> str:
    """Return the most common of the names that are not empty; of equals, the first; or ""."""
    named = [name for name in names if name]
    return Counter(named).most_common(1)[0][0] if named else ""


def task_of(info: ClientInfo) -> Task:
    """Return a client's task."""
    return info.classes, info.kind, info.shape


@dataclass(frozen=True)
class Member:
    """A client's description and its Flower proxy."""

    info: ClientInfo
    proxy: ClientProxy


def first_of_pool(members: Iterable[Member], pool: Collection[str]) -> ClientInfo:
    """Return the first client with a model of the pool, or the first one if there is none.

    A server that builds this model may be unable to build others that clients name.
    """
    infos = [member.info for member in members]
    return next((info for info in infos if info.model in pool), infos[0])


class Members:
    """The members of a federation, kept up to date as nodes come and go."""

    def __init__(
        self,
        timeout: float,
        pool: Collection[str] | None,
        notice: Callable[[str], None],
        rules: Admission | None = None,
        samples_cap: float = 0.0,
        failed: Callable[[Iterable[object]], None] | None = None,
    ) -> None:
        """`timeout`: seconds that a node has to describe itself.

        `pool`: the run's models, or None if the server need not know the clients' models.

        `samples_cap`: the most that a member counts, in medians of samples; 0: no limit.

        `failed` is called with the errors of nodes that did not describe themselves.
        """
        self._failed = failed or (lambda errors: None)
        self._timeout = timeout
        self._samples_cap = samples_cap
        self._counted: dict[str, int] = {}
        """The samples with which each client counts that claims more."""
        self._pool = pool
        self._notice = notice
        self._rules = rules or Admission()
        self._members: dict[str, Member] = {}
        """By node: the members that are connected."""
        self._names: dict[str, str] = {}
        """The name that each node has had as a member, also after it has left."""
        self._left: set[str] = set()
        """The names of members that have ever been disconnected."""
        self._refused: set[str] = set()
        self._silent: dict[str, tuple[int, int]] = {}
        """How often a node has not described itself, and when it was last asked."""
        self._late = False
        """Whether a node has not replied in time when new nodes were last asked."""
        self._asked = 0
        """How often new nodes were asked for their description: once a round."""
        self._task: Task | None = None
        self._order = ""
        """The classes' names and order, as `ClientInfo.order`; empty until a client names them."""
        self._model = ""
        """The model that all members must have, once it is known; empty: any."""

    @classmethod
    def of(
        cls, config: Config, data: RunData, notice: Callable[[str], None], faults: UserCodeFaults
    ) -> Members:
        """Return the members that a run demands, of which there are none yet."""

        def task() -> Task | None:
            try:
                dataset = data.dataset
            except FedhetError:  # the sites' own data; the server lacks 'dataset'
                return None
            return len(dataset.classes), dataset.kind, dataset.shape

        engine, spec, models = config.run.engine, config.method.spec, config.run.models
        pool = models.pool if spec.instructions.weights or spec.replies.weights else None
        max_bytes = engine.max_payload_mb * 1e6
        rules = Admission(models.num_classes, spec.one_model, max_bytes, task)
        return cls(engine.join_timeout, pool, notice, rules, engine.samples_cap, faults.report)

    def first(
        self, manager: ClientManager, wanted: int, engine: EngineSettings
    ) -> dict[str, Member]:
        """Return the members that a run starts with: `wanted` ones if they join in time.

        If nodes that are late are needed, they are asked again until the round's timeout: a slow
        machine may take longer to load its data. Raises FedhetError if there are too few.
        """
        least = engine.min_clients or wanted
        if manager.num_available() < wanted:
            count = manager.num_available()
            self._notice(f"waiting for {wanted} clients; {count} are connected")
            if not manager.wait_for(wanted, int(engine.join_timeout)):
                count, seconds = manager.num_available(), engine.join_timeout
                there = f"{count} of {wanted} clients are connected after {seconds:g} s"
                if count < least:
                    raise FedhetError(
                        f"{there}: start the others, or change 'clients', 'engine.join-timeout' or "
                        "'engine.min-clients'"
                    )
                self._notice(f"{there}; the run starts with them")
        end = time.monotonic() + engine.round_timeout
        members = self.present(manager)
        while len(members) < least and self._late and time.monotonic() < end:
            self._notice(f"{len(members)} of {least} clients have registered; asking again")
            self._silent.clear()
            members = self.present(manager)
        if len(members) < least:
            raise FedhetError(
                f"{len(members)} clients can take part, but at least {least} are needed: see the "
                "notices; 'engine.min-clients' lets a run start with fewer"
            )
        return members

    def present(self, manager: ClientManager) -> dict[str, Member]:
        """Return the connected clients by name, sorted; new nodes are asked for their description.

        The first clients' most common task (classes and shape, the classes' names and order, and
        the model where all must have one) is the run's. A node with another one, a taken name, or a
        model that the server does not know is left out with a notice. A node that does not reply
        is asked again after 1, 2, 4, ... rounds.
        """
        # A copy, since Flower's thread changes the original as nodes come and go.
        proxies: dict[str, ClientProxy] = dict(manager.all())
        for gone in sorted(self._members.keys() - proxies.keys()):
            self._left.add(name := self._members.pop(gone).info.name)
            self._notice(f"client {name} is no longer connected")
        self._refused &= proxies.keys()
        self._silent = {node: pair for node, pair in self._silent.items() if node in proxies}
        self._asked += 1
        due: list[ClientProxy] = []
        for node in sorted(proxies.keys() - self._members.keys() - self._refused):
            count, last = self._silent.get(node, (0, 0))
            if self._asked - last >= pause_after(max(count - 1, 0)):
                due.append(proxies[node])
        self._welcome(due)
        counted = capped([each.info for each in self._members.values()], self._samples_cap)
        present: dict[str, Member] = {}
        for member in sorted(self._members.values(), key=lambda each: each.info.name):
            info, name, most = member.info, member.info.name, counted[member.info.name]
            if most < info.samples and self._counted.get(name) != most:
                self._counted[name] = most
                self._notice(
                    f"client {name} claims {info.samples} samples and counts with {most}: 'engine."
                    f"samples-cap' allows {self._samples_cap:g} times the median client's"
                )
            present[name] = replace(member, info=replace(info, samples=most))
        return present

    def _welcome(self, proxies: list[ClientProxy]) -> None:
        self._late = False
        if not proxies:
            return
        with ThreadPoolExecutor(max_workers=len(proxies)) as pool:
            told = list(pool.map(self._ask, proxies))
        known = [each for each in told if isinstance(each, Member)]
        sound = [
            member
            for member in sorted(known, key=lambda each: each.info.name)
            if not self._left_out(member, self._rules.fault_of(member.info, self._pool))
        ]
        if self._task is None and sound:  # the first clients decide
            infos = [member.info for member in sound]
            self._task = commonest_task(infos, self._rules.servers_task)
            of_task = [info for info in infos if task_of(info) == self._task]
            self._order = commonest([info.order for info in of_task])
            if self._rules.one_model:
                self._model = commonest([info.model for info in of_task])
        taken = {member.info.name for member in self._members.values()}
        for member in sound:
            name, node = member.info.name, member.proxy.cid
            if name in taken:
                # Perhaps the same client, whose old node Flower still lists: asked again later.
                self._notice(f"client {name} is left out: another node has that name")
            elif not self._left_out(member, self._fault(member.info)):
                taken.add(name)
                self._members[node], self._names[node] = member, name
                if name in self._left:
                    self._notice(f"client {name} is connected again")
                self._order = self._order or member.info.order
        for fault in told:
            if isinstance(fault, str):
                self._notice(fault)

    def _left_out(self, member: Member, fault: str) -> bool:
        """Leave a client out, with a notice, if there is a fault; return whether there is."""
        if fault:
            self._refused.add(member.proxy.cid)
            self._notice(f"client {member.info.name} is left out: {fault}")
        return bool(fault)

    def _ask(self, proxy: ClientProxy) -> Member | str:
        """Ask for a client's description; return an error message if it cannot be used."""
        started = time.monotonic()
        try:
            asked = retrying(proxy)
            found = asked.get_properties(GetPropertiesIns({}), self._timeout, group_id=0)
            self._silent.pop(proxy.cid, None)
            if found.status.code != Code.OK:
                return f"{display_name(proxy)} is left out: {one_line(found.status.message)[:300]}"
            info = read_properties(found.properties, display_name(proxy))
            # A name belongs to the key that was registered with it; a node keeps the name it had.
            claim, registered = f"it claims the name {info.name!r}", registered_name(proxy)
            had = self._names.get(proxy.cid, info.name)
            if registered and registered != info.name:
                raise FedhetError(f"{claim}, its key was registered as {registered!r}")
            if had != info.name:
                raise FedhetError(f"{claim}, and was client {had} before")
            return Member(info, asked)
        except FedhetError as error:
            self._refused.add(proxy.cid)
            fault = error.reason if isinstance(error, KnowledgeError) else str(error)
            return f"{display_name(proxy)} is left out: {fault}"
        except Exception as error:
            # Any error of the transport: the node may be available again by a later round.
            self._failed([error])
            count, _ = self._silent.get(proxy.cid, (0, 0))
            self._silent[proxy.cid] = (count + 1, self._asked)
            self._late = self._late or time.monotonic() - started >= self._timeout
            return f"{display_name(proxy)} did not register: {error_text(error)[:300]}"

    def _fault(self, info: ClientInfo) -> str:
        if task_of(info) != self._task:
            classes, kind, shape = self._task or (0, "", ())
            kinds = (f"{info.kind} ", f"{kind} ") if kind != info.kind else ("", "")
            return (
                f"its data has {info.classes} classes of {kinds[0]}shape {info.shape}, "
                f"the others' {classes} of {kinds[1]}shape {shape}"
            )
        if info.order and self._order and info.order != self._order:
            return "its classes have other names than the others', or another order (classes.txt)"
        if self._model and info.model != self._model:
            return f"its model is {info.model!r}, all others' {self._model!r}"
        return ""


HELD_OUT_KINDS = (HELD_OUT, HELD_OUT_EPOCH)
"""The kinds of model that they evaluate."""


class HeldOutClients:
    """The members with which no client trains (`data.held-out-clients`), and what they are sent."""

    def __init__(self, run: RunSettings, spec: MethodSpec) -> None:
        self.names = frozenset(client_name(k, run.clients) for k in held_out_clients(run))
        self.members: dict[str, Member] = {}
        self._method, self._offers = run.method, spec.offers

    def without(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return the members that may train; the others are kept apart."""
        self.members = {name: each for name, each in members.items() if name in self.names}
        return {name: each for name, each in members.items() if name not in self.names}

    def added_to(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return all that may be asked to evaluate: the members, and those held out."""
        return {**members, **self.members}

    def instructions(
        self, instruction: Callable[[ClientInfo], Knowledge | None]
    ) -> dict[str, Knowledge]:
        """Return what each of them is sent to evaluate; nothing if the method offers nothing."""
        if not self._offers:
            return {}
        made = {name: instruction(each.info) for name, each in self.members.items()}
        return {name: knowledge for name, knowledge in made.items() if knowledge is not None}

    @property
    def notice(self) -> str:
        """What the user must know before the first round, if clients are held back; or ""."""
        names = ", ".join(sorted(self.names))
        fate = (
            "they judge the global model after the last round"
            if self._offers
            else f"{self._method} offers them nothing, as it forms no model that all clients share"
        )
        return f"nobody trains with {names} ('data.held-out-clients'): {fate}" if names else ""


def pause_after(failures: int) -> int:
    """Return the rounds to wait before the next attempt: twice as many after each failure."""
    return min(1 << failures, LONGEST_PAUSE)


class ClientHealth:
    """Counts each client's consecutive rounds without a usable reply.

    A client whose replies are refused in several consecutive rounds is excluded for the rest of the
    run. One that is silent, or replies with errors, is called again less and less often. What
    either has contributed is dropped. The counts are part of each checkpoint: a resumed run calls
    the same clients.
    """

    def __init__(self, max_refusals: int, max_silences: int, notice: Callable[[str], None]) -> None:
        """`refusals`, `silences`: consecutive rounds until a client is excluded, or pauses.

        0: never.
        """
        self._max_refusals, self._max_silences = max_refusals, max_silences
        self._notice = notice
        self._refused: dict[str, int] = {}
        self._silent: dict[str, tuple[int, int]] = {}
        """The consecutive rounds without a reply, and the last of them."""
        self._gone: dict[str, int] = {}
        """The consecutive rounds in which a former member was not connected."""

    def eligible(self, round: int, names: Collection[str]) -> list[str]:
        """Return, in their order, the clients that may be asked in a round.

        If all of them pause, all are asked: a round needs clients. Raises FedhetError if all are
        excluded.
        """
        left = [name for name in names if not self._is_aside(name)]
        if not left:
            raise FedhetError(
                f"no client is left to be asked in round {round}: the replies of all "
                f"{len(names)} clients were refused in {self._max_refusals} consecutive rounds "
                "('engine.max-refusals')"
            )
        return [name for name in left if not self.exclusion_reason(round, name)] or left

    def exclusion_reason(self, round: int, name: str) -> str:
        """Return why a client is not asked in a round: "excluded", "backing off", or ""."""
        if self._is_aside(name):
            return "excluded"
        if not self._is_silent(name):
            return ""
        count, last = self._silent[name]
        return "backing off" if round < last + pause_after(count - self._max_silences + 1) else ""

    def update(
        self, round: int, outcomes: Mapping[str, Outcome | None], members: Collection[str]
    ) -> list[str]:
        """Record the asked clients' outcomes (None: usable); return whom the method must forget."""
        before = self._forgettable()
        for name in sorted(outcomes):
            refused, (silent, _) = self._refused.pop(name, 0), self._silent.pop(name, (0, 0))
            if outcomes[name] == "refused":
                self._refused[name] = refused + 1
            elif outcomes[name] is not None:
                self._silent[name] = (silent + 1, round)
                if refused:  # silence does not clear a client whose replies were refused
                    self._refused[name] = refused
        # Former members: one that returns starts from zero.
        self._gone |= dict.fromkeys(members, 0)
        for name in self._gone.keys() - set(members):
            self._gone[name] += 1
            self._silent.pop(name, None)
        forgotten = sorted(self._forgettable() - before)
        for name in forgotten:
            if self._is_aside(name):
                fault = (
                    f"is excluded: its replies were refused in {self._refused[name]} consecutive "
                    "rounds ('engine.max-refusals')"
                )
            elif self._is_silent(name):
                fault = (
                    f"has not answered in {self._silent[name][0]} consecutive rounds: it is asked "
                    "again only now and then ('engine.max-silences')"
                )
            else:
                fault = "has left"
            self._notice(f"client {name} {fault}; what it contributed before is dropped")
        return forgotten

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts, as JSON holds them."""
        silent = {name: count for name, (count, _) in self._silent.items()}
        last = {name: round for name, (_, round) in self._silent.items()}
        return {"refused": self._refused, "silent": silent, "last": last, "gone": self._gone}

    def load_dict(self, known: Mapping[str, Mapping[str, int]]) -> None:
        """Restore what `to_dict` returned. Raises ValueError, KeyError or TypeError."""
        self._refused, self._gone = dict(known["refused"]), dict(known["gone"])
        self._silent = {name: (n, known["last"][name]) for name, n in known["silent"].items()}

    def _is_aside(self, name: str) -> bool:
        return 0 < self._max_refusals <= self._refused.get(name, 0)

    def _is_silent(self, name: str) -> bool:
        return 0 < self._max_silences <= self._silent.get(name, (0, 0))[0]

    def _forgettable(self) -> set[str]:
        """Return the clients whose earlier contributions must not count any longer."""
        known = {*self._refused, *self._silent}
        gone = {name for name, count in self._gone.items() if 0 < self._max_silences <= count}
        return gone | {name for name in known if self._is_aside(name) or self._is_silent(name)}
