"""Nodes in a deployment: registered names, sessions, and messages that survive a restart.

If a node is killed and reconnects within a minute, it has a new session, but Flower does not
consider it disconnected. A message that its former session had received would never get a reply, so
this module sends the message again. It also does so if a node could not send its whole reply, for
example because the SuperLink's database was locked: Flower's nodes do not try a second time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from flwr.app import Message
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes
from flwr.common.constant import ErrorCode
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fedhet.base.errors import FedhetError, one_line
from fedhet.wire.knowledge import join

CACHE_SECONDS = 10.0
"""Seconds for which Flower's list of online nodes is cached."""
POLL_SECONDS = 3.0
"""Maximum number of seconds between two polls for a reply, as in Flower's own grid."""
POLL_FRACTION = 0.1
"""Time until the next poll for a reply, as a fraction of the time waited so far."""
PULL_SECONDS = 0.1
"""Seconds after which an array that has not arrived is requested again. The time then doubles."""
POLL_SECONDS_PER_NODE = 0.02
"""Minimum number of seconds between two polls for a reply, per online node."""
MAX_TRANSFERS = 2
"""Maximum number of messages that are sent or received, and thus in memory, at the same time."""
TRANSFER_SECONDS = 60.0
"""Seconds after which a transfer no longer blocks other transfers, because its node may have been
killed."""
UNSIGNED = (
    "the site runs only apps that a publisher in its --trusted-entities signed. Sign the run with "
    "the key of such a publisher (`fedhet submit --sign FILE`)."
)
MAX_SENDS = 3
"""Maximum number of times that the transfer of a message to the SuperLink is attempted."""
MAX_LOST_REPLIES = 3
"""Maximum number of times that a message is sent again because its reply was lost."""


def retry_pulls_soon() -> None:
    """Let Flower in this process pull an object again after PULL_SECONDS instead of a second.

    A recipient that polls often sees a message before the sender has sent all of its arrays, and
    the process of the message starts before the node has received them.
    """
    for function in (
        inflatable_utils.pull_objects,
        inflatable_utils.pull_and_inflate_object_from_tree,
    ):
        defaults = function.__kwdefaults__ or {}
        defaults |= {"initial_backoff": PULL_SECONDS} if "initial_backoff" in defaults else {}


class NodeInfo(Protocol):
    """The attributes of an online node that are used in this module."""

    node_id: int
    name: str
    last_activated_at: str


class Nodes:
    """Online nodes, as listed by Flower's grid."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._lock = threading.Lock()
        self._nodes: dict[int, NodeInfo] = {}
        self._listed_at = -CACHE_SECONDS

    def name(self, node_id: int) -> str:
        """Return the registered name of a node's key, or "" if the key has no name.

        Raises LookupError if the node is not online, because its name is then unknown.
        """
        node = self._online(CACHE_SECONDS).get(node_id) or self._online(0.0).get(node_id)
        if node is None:
            raise LookupError(f"node {node_id} is no longer online")
        return str(node.name or "")

    def session(self, node_id: int, *, use_cache: bool = True) -> str:
        """Return an identifier of a node's current session, or "" if the node is not online.

        A cached session may be up to CACHE_SECONDS old.
        """
        node = self._online(CACHE_SECONDS if use_cache else 0.0).get(node_id)
        return str(node.last_activated_at) if node is not None else ""

    def poll_interval(self, waited: float) -> float:
        """Return the seconds until the next poll for a reply, after `waited` seconds.

        A SuperNode requests messages every 3 s. If the server receives a quick reply before the
        node's next request, it can send the next message 3 s earlier.
        """
        min_seconds = max(0.2, POLL_SECONDS_PER_NODE * len(self._nodes))
        return min(POLL_SECONDS, max(min_seconds, POLL_FRACTION * waited))

    def _online(self, max_age: float) -> dict[int, NodeInfo]:
        with self._lock:
            if time.monotonic() - self._listed_at >= max_age:
                self._nodes = {node.node_id: node for node in self._grid.get_nodes()}
                self._listed_at = time.monotonic()
            return self._nodes


class TransferLimiter:
    """Limiter for the number of messages that are sent or received at the same time.

    A message needs several times its size in memory while it is transferred.
    """

    def __init__(
        self, max_transfers: int = MAX_TRANSFERS, max_seconds: float = TRANSFER_SECONDS
    ) -> None:
        self._max_transfers, self._max_seconds = max_transfers, max_seconds
        self._started: dict[object, float] = {}
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a free slot, and hold the slot during the `with` block.

        A transfer that exceeds the maximum time no longer occupies a slot.
        """
        transfer = object()
        with self._changed:
            while self._num_active() >= self._max_transfers:
                self._changed.wait(min(1.0, self._max_seconds))
            self._started[transfer] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._started[transfer]
                self._changed.notify()

    def _num_active(self) -> int:
        now = time.monotonic()
        return sum(now - started < self._max_seconds for started in self._started.values())


class RetryingGrid:
    """Grid that sends a message again if the receiving node restarts or its reply is lost."""

    def __init__(self, grid: Any, nodes: Nodes, transfers: TransferLimiter | None = None) -> None:
        self._grid, self._nodes = grid, nodes
        self._transfers = transfers or TransferLimiter()

    def send_and_receive(self, messages: Iterable[Message]) -> list[Message]:
        """Send one message, and return the reply, or Flower's error reply after the time limit.

        An error is ignored while another copy of the message is in progress, because Flower may
        give up on the first copy. Raises FedhetError if the node refuses the run's signature.
        """
        (message,) = messages
        node, started = message.metadata.dst_node_id, time.monotonic()
        deadline = started + message.metadata.ttl
        session = self._nodes.session(node, use_cache=False)
        pollers, num_lost = self._send(message), 0
        while True:
            for poller in list(pollers):
                if (reply := poller.poll()) is None:
                    continue
                pollers.remove(poller)
                if not reply.has_error():
                    return [reply]
                if pollers:
                    continue
                if reply.error.code == ErrorCode.INVALID_FAB:
                    raise FedhetError(UNSIGNED)
                remaining = deadline - time.monotonic()
                is_lost = reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
                num_lost += is_lost
                is_online = bool(self._nodes.session(node, use_cache=False))
                if not is_lost or not is_online or num_lost > MAX_LOST_REPLIES or remaining <= 0:
                    return [reply]
                pollers += self._send(_copy(message, remaining))
            time.sleep(self._nodes.poll_interval(time.monotonic() - started))
            current, remaining = self._nodes.session(node), deadline - time.monotonic()
            if current not in ("", session) and remaining > 0:
                session = current
                pollers += self._send(_copy(message, remaining))

    def _send(self, message: Message) -> list[ReplyPoller]:
        """Send a message, and a copy of it if Flower cannot transfer all of its objects.

        On a busy machine, a request to store an object may be repeated after it has succeeded, and
        the SuperLink rejects the second request.
        """
        for attempt in range(1, MAX_SENDS + 1):
            try:
                with self._transfers.turn():
                    message_ids = list(self._grid.push_messages([message]))
                return [ReplyPoller(self._grid, each, self._transfers) for each in message_ids]
            except ObjectPushError:
                if attempt == MAX_SENDS:
                    raise
                message = _copy(message, message.metadata.ttl)
        raise AssertionError("unreachable")


def _copy(message: Message, ttl: float) -> Message:
    """Return a new message with the same content and destination."""
    metadata = message.metadata
    return Message(
        message.content,
        dst_node_id=metadata.dst_node_id,
        message_type=metadata.message_type,
        group_id=metadata.group_id,
        ttl=ttl,
    )


class ReplyPoller:
    """Thread that polls for the reply to one message.

    The thread is needed because Flower waits minutes for the remaining data if a node is killed
    while it sends its reply.
    """

    def __init__(self, grid: Any, message_id: str, transfers: TransferLimiter) -> None:
        self._grid, self._message_id, self._transfers = grid, message_id, transfers
        self._replies: list[Message] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def poll(self) -> Message | None:
        """Return the reply, or None if it has not arrived.

        Re-raises errors from the polling thread.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._pull, daemon=True)
            self._thread.start()
        self._thread.join(POLL_SECONDS)
        if self._thread.is_alive():
            return None
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._replies[0] if self._replies else None

    def _pull(self) -> None:
        try:
            with self._transfers.turn():
                self._replies = list(self._grid.pull_messages([self._message_id]))
        # The error is raised again in the thread that waits for the reply.
        except Exception as error:
            self._error = error


def registered_name(proxy: ClientProxy) -> str:
    """Return the registered name of a node's key, or "" if there is no registered name.

    In a simulation or in a deployment without keys, nodes have no registered names.
    """
    grid = _deployment_grid(proxy)
    if grid is None:
        return ""
    assert isinstance(proxy, GridClientProxy)
    return _shared_by(grid)[0].name(proxy.node_id)


def display_name(proxy: ClientProxy) -> str:
    """Return a node's name for messages: `node NAME`, or `node ID` if it has no registered name."""
    with contextlib.suppress(Exception):  # The node or the server may be unreachable.
        return f"node {one_line(registered_name(proxy)) or proxy.cid}"
    return f"node {proxy.cid}"


class RetryingProxy(GridClientProxy):
    """Proxy that joins the arrays of a message, and sends it again if the node restarts."""

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Request training from the client."""
        return super().fit(replace(ins, parameters=join(ins.parameters)), timeout, group_id)

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        """Request an evaluation from the client."""
        return super().evaluate(replace(ins, parameters=join(ins.parameters)), timeout, group_id)


def retrying(proxy: ClientProxy) -> ClientProxy:
    """Return a proxy that, in a deployment, sends messages again if the node restarts."""
    grid = _deployment_grid(proxy)
    if grid is None:
        return proxy
    assert isinstance(proxy, GridClientProxy)
    retrying_grid: Any = RetryingGrid(grid, *_shared_by(grid))
    return RetryingProxy(proxy.node_id, retrying_grid, proxy.run_id)


def may_restart(proxy: ClientProxy) -> bool:
    """Return whether a proxy, as returned by `retrying`, calls a node that may restart."""
    return isinstance(getattr(proxy, "grid", None), RetryingGrid)


@lru_cache(maxsize=1)
def _shared_by(grid: Any) -> tuple[Nodes, TransferLimiter]:
    """Return the objects that all proxies of a grid share."""
    return Nodes(grid), TransferLimiter()


def _deployment_grid(proxy: ClientProxy) -> Any:
    """Return the grid of a deployment, or None in a simulation, where nodes do not restart."""
    if not isinstance(proxy, GridClientProxy):
        return None
    # Import lazily, because flwr.superlink loads SQLAlchemy (about 1 s).
    from flwr.superlink.grid import InMemoryGrid

    return None if isinstance(proxy.grid, InMemoryGrid) else proxy.grid
