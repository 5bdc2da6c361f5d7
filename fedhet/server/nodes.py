"""What Flower knows of the nodes of a deployment: their registered names, and their sessions.

A node that is killed and let in again within a minute has a new session, but Flower does not count
it as gone. A message that its former session has taken never has a reply; it is sent again here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Protocol

from flwr.app import Message
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy

from fedhet.base.errors import one_line

FRESH_SECONDS = 10.0
"""Seconds for which Flower's list of the nodes is used again."""
POLL_SECONDS = 3.0
"""Maximum time between two looks for a reply, as in Flower's own grid."""
POLL_FRACTION = 0.1
"""The time to the next look for a reply, as a fraction of the time waited so far."""
POLL_SECONDS_PER_NODE = 0.02
"""Minimum time between two looks for a reply, for each node that is online."""
TRANSFERS = 2
"""Messages that are in the server's memory at once while they are sent or received."""
TRANSFER_SECONDS = 60.0
"""A transfer that takes longer keeps no other waiting: its node may have been killed."""


class NodeInfo(Protocol):
    """A node that is online, as far as it matters here."""

    node_id: int
    name: str
    last_activated_at: str


class Nodes:
    """The nodes that are online, as Flower's grid lists them."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._lock = threading.Lock()
        self._known: dict[int, NodeInfo] = {}
        self._asked = -FRESH_SECONDS

    def name(self, node_id: int) -> str:
        """Return the name with which a node's key was registered; empty if it has none.

        Raises LookupError if the node is not online: nothing may be concluded then.
        """
        known = self._online(FRESH_SECONDS)
        node = known.get(node_id) or self._online(0.0).get(node_id)
        if node is None:
            raise LookupError(f"node {node_id} is not online any more")
        return str(node.name or "")

    def session(self, node_id: int, *, fresh: bool = False) -> str:
        """Return what distinguishes a node's sessions; empty if the node is not online.

        Unless it must be fresh, the session may be some seconds old.
        """
        node = self._online(0.0 if fresh else FRESH_SECONDS).get(node_id)
        return str(node.last_activated_at) if node is not None else ""

    def pause(self, waited: float) -> float:
        """Return the seconds until the next look for a reply that was awaited for `waited` s.

        A SuperNode asks for messages every 3 s. If a quick reply is found before its node asks
        again, the node has the next message 3 s earlier.
        """
        least = max(0.2, POLL_SECONDS_PER_NODE * len(self._known))
        return min(POLL_SECONDS, max(least, POLL_FRACTION * waited))

    def _online(self, max_seconds: float) -> dict[int, NodeInfo]:
        with self._lock:
            if time.monotonic() - self._asked >= max_seconds:
                self._known = {node.node_id: node for node in self._grid.get_nodes()}
                self._asked = time.monotonic()
            return self._known


class TransferLimiter:
    """Lets a few messages at a time be sent or received: each takes several times its size."""

    def __init__(self, most: int = TRANSFERS, seconds: float = TRANSFER_SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._begun: dict[object, float] = {}
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until fewer than the most are under way that are not overdue; then do the block."""
        own = object()
        with self._changed:
            while (
                sum(time.monotonic() - begun < self._seconds for begun in self._begun.values())
                >= self._most
            ):
                self._changed.wait(min(1.0, self._seconds))
            self._begun[own] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._begun[own]
                self._changed.notify()


class RetryingGrid:
    """Flower's grid for messages to one node: a node that restarts meanwhile is asked again."""

    def __init__(self, grid: Any, nodes: Nodes, transfers: TransferLimiter | None = None) -> None:
        self._grid, self._nodes = grid, nodes
        self._transfers = transfers or TransferLimiter()

    def send_and_receive(self, messages: Iterable[Message]) -> list[Message]:
        """Send the one message; return its reply, or Flower's error once its time is over.

        An error counts only if no other message is under way: Flower may give up the first.
        """
        (message,) = messages
        node, begun = message.metadata.dst_node_id, time.monotonic()
        end = begun + message.metadata.ttl
        session = self._nodes.session(node, fresh=True)
        pending = self._send(message)
        while True:
            for look in list(pending):
                if (reply := look.reply()) is not None:
                    pending.remove(look)
                    if not (reply.has_error() and pending):
                        return [reply]
            time.sleep(self._nodes.pause(time.monotonic() - begun))
            now, left = self._nodes.session(node), end - time.monotonic()
            if now not in ("", session) and left > 0:
                session, to = now, message.metadata
                pending += self._send(
                    Message(
                        message.content,
                        dst_node_id=to.dst_node_id,
                        message_type=to.message_type,
                        group_id=to.group_id,
                        ttl=left,
                    )
                )

    def _send(self, message: Message) -> list[ReplyPoller]:
        with self._transfers.turn():
            numbers = list(self._grid.push_messages([message]))
        return [ReplyPoller(self._grid, number, self._transfers) for number in numbers]


class ReplyPoller:
    """Looks for the reply to one message, in a thread of its own.

    Of a node that was killed while it sent its reply, Flower waits minutes for the rest.
    """

    def __init__(self, grid: Any, number: str, transfers: TransferLimiter) -> None:
        self._grid, self._number, self._transfers = grid, number, transfers
        self._found: list[Message] = []
        self._fault: Exception | None = None
        self._thread: threading.Thread | None = None

    def reply(self) -> Message | None:
        """Return the reply, or None if it has not come. Raises what the look has raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        self._thread.join(POLL_SECONDS)
        if self._thread.is_alive():
            return None
        self._thread = None
        if self._fault is not None:
            raise self._fault
        return self._found[0] if self._found else None

    def _look(self) -> None:
        try:
            with self._transfers.turn():
                self._found = list(self._grid.pull_messages([self._number]))
        except Exception as error:  # it is raised where the reply is waited for
            self._fault = error


def registered_name(proxy: ClientProxy) -> str:
    """Return the name with which a node's key was registered; empty if it has none.

    In a simulation, and where nodes have no keys, none has.
    """
    grid = _grid_of(proxy)
    if grid is None:
        return ""
    assert isinstance(proxy, GridClientProxy)
    return _shared_by(grid)[0].name(proxy.node_id)


def display_name(proxy: ClientProxy) -> str:
    """Return a node's name in messages: `node NAME`, or its number if it has no registered name."""
    with contextlib.suppress(Exception):  # of the transport: the node may be gone, or the server
        return f"node {one_line(registered_name(proxy)) or proxy.cid}"
    return f"node {proxy.cid}"


def retrying(proxy: ClientProxy) -> ClientProxy:
    """Return a node's proxy, which in a deployment asks it again when it has restarted."""
    grid = _grid_of(proxy)
    if grid is None:
        return proxy
    assert isinstance(proxy, GridClientProxy)
    asking: Any = RetryingGrid(grid, *_shared_by(grid))
    return GridClientProxy(proxy.node_id, asking, proxy.run_id)


@lru_cache(maxsize=1)
def _shared_by(grid: Any) -> tuple[Nodes, TransferLimiter]:
    """Return the nodes of a grid, and the turns of its messages: one object for all its proxies."""
    return Nodes(grid), TransferLimiter()


def _grid_of(proxy: ClientProxy) -> Any:
    """Return Flower's grid of a deployment; None in a simulation, whose nodes do not restart."""
    if not isinstance(proxy, GridClientProxy):
        return None
    # Imported here, because with it comes what a SuperLink needs, such as SQLAlchemy: a second.
    from flwr.superlink.grid import InMemoryGrid

    return None if isinstance(proxy.grid, InMemoryGrid) else proxy.grid
