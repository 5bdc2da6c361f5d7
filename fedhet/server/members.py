"""Who takes part: Flower's nodes, whose ids are random, by the names that their clients give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flwr.common import Code, GetPropertiesIns
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.errors import FedhetError, words_of
from fedhet.models import is_registered
from fedhet.settings.tables import EngineSettings
from fedhet.wire.identity import ClientInfo, read_properties

Task = tuple[int, tuple[int, ...]]
"""Classes, and the shape of a sample."""


@dataclass(frozen=True)
class Member:
    """A client and the way to it."""

    info: ClientInfo
    proxy: ClientProxy


class Members:
    """The members of a federation, kept up to date as nodes come and go."""

    def __init__(
        self, timeout: float, pool: Collection[str] | None, notice: Callable[[str], None]
    ) -> None:
        """`pool`: the run's models; None where it does not matter to the server who has which."""
        self._timeout = timeout
        self._pool = pool
        self._notice = notice
        self._infos: dict[str, ClientInfo] = {}
        self._refused: set[str] = set()
        self._task: Task | None = None
        self._order = ""
        """The classes' names and order, as `ClientInfo.order`; empty while none has named them."""

    def first(
        self, manager: ClientManager, wanted: int, engine: EngineSettings
    ) -> dict[str, Member]:
        """Return the members that a run starts with, `wanted` if they come in time.

        Raises FedhetError where there are too few.
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
        """Wait until `wanted` clients are there. Raises FedhetError where too few come in time."""
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
        """Return the clients there now by name, sorted; a node not seen before is asked who it is.

        The first clients fix the task (classes and shape, the classes' names and order), the
        commonest of theirs. A node of another task, of a name that is taken, or with a model that
        the server does not know is left out with a notice.
        """
        # A copy: Flower's thread changes its own as nodes come and go.
        proxies: dict[str, ClientProxy] = dict(manager.all())
        for gone in self._infos.keys() - proxies.keys():
            del self._infos[gone]
        new = [
            proxies[node] for node in sorted(proxies.keys() - self._infos.keys() - self._refused)
        ]
        self._welcome(new)
        members = {info.name: Member(info, proxies[node]) for node, info in self._infos.items()}
        return dict(sorted(members.items()))

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
                # Perhaps its own former self, which Flower has not missed yet: asked again later.
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
        """Return what the client says of itself, or why it could not be asked."""
        try:
            answer = proxy.get_properties(GetPropertiesIns({}), self._timeout, group_id=0)
            if answer.status.code != Code.OK:
                return f"node {proxy.cid} is left out: {answer.status.message[:300]}"
            return read_properties(answer.properties, f"node {proxy.cid}")
        except FedhetError as error:
            self._refused.add(proxy.cid)
            return f"node {proxy.cid} is left out: {error}"
        except Exception as error:
            # Whatever a transport raises: the node may be well by the next round.
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
        if self._pool is not None and not (info.model in self._pool or is_registered(info.model)):
            # What a client names is never imported here, unless the run's own pool names it too.
            return f"its model {info.model!r} is neither registered nor in the run's pool"
        return ""


def commonest_task(infos: Sequence[ClientInfo]) -> Task:
    """Return the task that most clients have; of equally common ones the first client's by name."""
    tasks = [_task_of(info) for info in sorted(infos, key=lambda info: info.name)]
    return Counter(tasks).most_common(1)[0][0]


def _task_of(info: ClientInfo) -> Task:
    return info.classes, info.shape


def _commonest_order(infos: Sequence[ClientInfo]) -> str:
    """Return the order of the classes that most have who name them; empty: nobody does."""
    orders = [i.order for i in sorted(infos, key=lambda info: info.name) if i.order]
    return Counter(orders).most_common(1)[0][0] if orders else ""
