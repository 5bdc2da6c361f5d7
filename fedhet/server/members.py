"""The members of a federation: maps Flower's random node ids to the clients' own names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from flwr.common import Code, GetPropertiesIns
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.errors import FedhetError, one_line, words_of
from fedhet.models import is_registered
from fedhet.settings.tables import EngineSettings
from fedhet.wire.identity import ClientInfo, capped, read_properties

Task = tuple[int, tuple[int, ...]]
"""The number of classes, and the shape of a sample."""


@dataclass(frozen=True)
class Member:
    """A client's description and its Flower proxy."""

    info: ClientInfo
    proxy: ClientProxy


class Members:
    """The members of a federation, kept up to date as nodes come and go."""

    def __init__(
        self,
        timeout: float,
        pool: Collection[str] | None,
        notice: Callable[[str], None],
        samples_cap: float = 0.0,
    ) -> None:
        """`pool`: the run's models, or None if the server need not know the clients' models.

        `samples_cap`: a member counts for at most so many times the median's samples; 0: no limit.
        """
        self._timeout = timeout
        self._samples_cap = samples_cap
        self._counted: dict[str, int] = {}
        """The samples with which each client counts that claims more."""
        self._pool = pool
        self._notice = notice
        self.one_model = ""
        """The model that all members must have, once it is known; empty: any."""
        self._infos: dict[str, ClientInfo] = {}
        self._refused: set[str] = set()
        self._task: Task | None = None
        self._order = ""
        """The classes' names and order, as `ClientInfo.order`; empty until a client names them."""

    def first(
        self, manager: ClientManager, wanted: int, engine: EngineSettings
    ) -> dict[str, Member]:
        """Return the members that a run starts with: `wanted` ones if they join in time.

        Raises FedhetError if there are too few.
        """
        self._wait(manager, wanted, engine)
        members, least = self.present(manager), engine.min_clients or wanted
        if len(members) < least:
            raise FedhetError(
                f"{len(members)} clients can take part, at least {least} must: see the notices; "
                "'engine.min-clients' lets a run start with fewer"
            )
        return members

    def _wait(self, manager: ClientManager, wanted: int, engine: EngineSettings) -> None:
        """Wait until `wanted` clients have joined. Raises FedhetError if too few join in time."""
        if manager.num_available() >= wanted:
            return
        self._notice(f"waiting for {wanted} clients, {manager.num_available()} are there")
        if manager.wait_for(wanted, int(engine.join_timeout)):
            return
        count, seconds = manager.num_available(), engine.join_timeout
        there = f"{count} of {wanted} clients are there after {seconds:g} s"
        if count < (engine.min_clients or wanted):
            raise FedhetError(
                f"{there}: start the others, or change 'clients', 'engine.join-timeout' or "
                "'engine.min-clients'"
            )
        self._notice(f"{there}; the run starts with them")

    def present(self, manager: ClientManager) -> dict[str, Member]:
        """Return the connected clients by name, sorted; new nodes are asked for their description.

        The first clients' most common task (classes and shape, the classes' names and order) is the
        run's. A node with another task, a taken name, or a model that the server does not know is
        left out with a notice.
        """
        # A copy, since Flower's thread changes the original as nodes come and go.
        proxies: dict[str, ClientProxy] = dict(manager.all())
        for gone in self._infos.keys() - proxies.keys():
            del self._infos[gone]
        new = [
            proxies[node] for node in sorted(proxies.keys() - self._infos.keys() - self._refused)
        ]
        self._welcome(new)
        members = {info.name: Member(info, proxies[node]) for node, info in self._infos.items()}
        return self._capped(dict(sorted(members.items())))

    def _capped(self, members: dict[str, Member]) -> dict[str, Member]:
        """Return the members with the samples they count with; a notice names a new limit."""
        counted = capped([member.info for member in members.values()], self._samples_cap)
        for name, member in members.items():
            most, claimed = counted[name], member.info.samples
            if most < claimed and self._counted.get(name) != most:
                self._counted[name] = most
                self._notice(
                    f"client {name} claims {claimed} samples and counts with {most}: 'engine."
                    f"samples-cap' allows {self._samples_cap:g} times the median client's"
                )
        return {
            name: replace(member, info=replace(member.info, samples=counted[name]))
            for name, member in members.items()
        }

    def _welcome(self, proxies: list[ClientProxy]) -> None:
        if not proxies:
            return
        with ThreadPoolExecutor(max_workers=len(proxies)) as pool:
            answers = list(pool.map(self._ask, proxies))
        known = [(p, a) for p, a in zip(proxies, answers, strict=True) if isinstance(a, ClientInfo)]
        if self._task is None and known:
            self._task = commonest_task([info for _, info in known])
            self._order = _commonest_order([i for _, i in known if _task_of(i) == self._task])
        for proxy, info in sorted(known, key=lambda pair: pair[1].name):
            if any(other.name == info.name for other in self._infos.values()):
                # Perhaps the same client, whose old node Flower still lists: asked again later.
                self._notice(f"client {info.name} is left out: another node has that name")
            elif fault := self._fault(info):
                self._refused.add(proxy.cid)
                self._notice(f"client {info.name} is left out: {fault}")
            else:
                self._infos[proxy.cid] = info
                self._order = self._order or info.order
        for answer in answers:
            if isinstance(answer, str):
                self._notice(answer)

    def _ask(self, proxy: ClientProxy) -> ClientInfo | str:
        """Return the client's description, or an error message if it could not be asked."""
        try:
            answer = proxy.get_properties(GetPropertiesIns({}), self._timeout, group_id=0)
            if answer.status.code != Code.OK:
                return f"node {proxy.cid} is left out: {one_line(answer.status.message)[:300]}"
            return read_properties(answer.properties, f"node {proxy.cid}")
        except FedhetError as error:
            self._refused.add(proxy.cid)
            return f"node {proxy.cid} is left out: {error}"
        except Exception as error:
            # Any error of the transport: the node may be available again by the next round.
            return f"node {proxy.cid} does not say who it is: {words_of(error)[:300]}"

    def _fault(self, info: ClientInfo) -> str:
        if _task_of(info) != self._task:
            classes, shape = self._task or (0, ())
            return (
                f"its data has {info.classes} classes of shape {info.shape}, "
                f"the others' {classes} of shape {shape}"
            )
        if info.order and self._order and info.order != self._order:
            return "its classes have other names than the others', or another order (classes.txt)"
        if self.one_model and info.model != self.one_model:
            return f"its model is {info.model!r}, all others' {self.one_model!r}"
        if self._pool is not None and not (info.model in self._pool or is_registered(info.model)):
            # Only models in the run's own pool are imported here, never others that a client names.
            return f"its model {info.model!r} is neither registered nor in the run's pool"
        return ""


def commonest_task(infos: Sequence[ClientInfo]) -> Task:
    """Return the most common task; among equally common ones, that of the first client by name."""
    tasks = [_task_of(info) for info in sorted(infos, key=lambda info: info.name)]
    return Counter(tasks).most_common(1)[0][0]


def _task_of(info: ClientInfo) -> Task:
    return info.classes, info.shape


def _commonest_order(infos: Sequence[ClientInfo]) -> str:
    """Return the most common class order among clients that name it; empty if none does."""
    orders = [i.order for i in sorted(infos, key=lambda info: info.name) if i.order]
    return Counter(orders).most_common(1)[0][0] if orders else ""
