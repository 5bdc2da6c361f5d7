"""Nodes of a deployment in Flower: the owner of a key, and restarts."""

import threading
from types import SimpleNamespace

import pytest
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesRes,
    Parameters,
    Status,
)
from flwr.common.constant import ErrorCode
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from fedhet.server import nodes
from fedhet.server.members import Members
from fedhet.server.nodes import Nodes, RetryingGrid, TransferLimiter, registered_name, retrying
from fedhet.wire.knowledge import JOINED

GIVEN_UP = SimpleNamespace(reason="its time is over", code=ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
LOST = SimpleNamespace(reason="objects are unavailable", code=ErrorCode.MESSAGE_UNAVAILABLE)
UNVERIFIED = SimpleNamespace(reason="The FAB could not be verified.", code=ErrorCode.INVALID_FAB)
SAYS = {"model": "mlp", "samples": 10, "classes": 3, "kind": "image", "shape": "1,8,8"}


class Grid:
    """A SuperLink with nodes that reply, or receive a message and die."""

    def __init__(self):
        self.online = {}
        self.claims = {}
        self.sent = []
        self.answers = lambda message: True
        self.looks = 0
        self.given_up, self.error = set(), GIVEN_UP
        self.meanwhile = lambda grid: None

    def add(self, node_id, claims, registered=None):
        self.online[node_id] = SimpleNamespace(
            node_id=node_id, name=registered, last_activated_at="2026-11-21T10:00:00"
        )
        self.claims[node_id] = claims

    def get_nodes(self):
        return list(self.online.values())

    def push_messages(self, messages):
        for message in messages:
            number = f"message-{len(self.sent)}"
            self.sent.append((number, message))
            yield number

    def pull_messages(self, numbers):
        self.looks += 1
        assert self.looks < 100, "it waits in vain"
        self.meanwhile(self)
        for number, message in self.sent:
            if number in numbers and number in self.given_up:
                about = SimpleNamespace(reply_to_message_id=number)
                yield SimpleNamespace(metadata=about, has_error=lambda: True, error=self.error)
            elif number in numbers and self.answers(message):
                yield self.reply(message, number)

    def reply(self, message, number=""):
        said = {**SAYS, "name": self.claims[message.metadata.dst_node_id]}
        if message.metadata.message_type == "train":
            response = FitRes(Status(Code.OK, ""), Parameters([], ""), 7, {})
            content = compat.fitres_to_recorddict(response, keep_input=True)
        else:
            content = compat.getpropertiesres_to_recorddict(
                GetPropertiesRes(Status(Code.OK, ""), said)
            )
        about = SimpleNamespace(reply_to_message_id=number)
        return SimpleNamespace(metadata=about, content=content, has_error=lambda: False)


class Manager:
    def __init__(self, grid):
        self.grid, self.known = grid, {}

    def all(self):
        for node in self.grid.online:
            self.known.setdefault(node, GridClientProxy(node, self.grid, 1))
        return {str(node): self.known[node] for node in self.grid.online}


@pytest.fixture
def grid(monkeypatch):
    """A grid with a fake clock that never sleeps."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(nodes.time, "sleep", lambda s: setattr(clock, "now", clock.now + s))
    monkeypatch.setattr(nodes.time, "monotonic", lambda: clock.now)
    for name in ("task_id", "run_id", "node_id"):  # as Flower does where it starts a server
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    found = Grid()
    found.clock = clock
    return found


@pytest.fixture
def joining(grid):
    notices = []
    return Members(1.0, None, notices.append), Manager(grid), notices


def test_name_belongs_to_its_registered_key(grid, joining):
    """In any order, the impostor is rejected, and does not lock out the owner of the name."""
    members, manager, notices = joining
    grid.add(1, claims="site-a", registered="site-b")
    assert list(members.present(manager)) == []
    assert notices == [
        "node site-b is excluded: it claims the name 'site-a', but its key was registered as "
        "'site-b'"
    ]
    grid.add(2, claims="site-a", registered="site-a")
    assert {name: m.proxy.cid for name, m in members.present(manager).items()} == {"site-a": "2"}


@pytest.mark.parametrize("at_once", [False, True])
def test_first_of_two_keys_with_one_name_joins(grid, joining, at_once):
    members, manager, notices = joining
    grid.add(1, claims="site-a", registered="site-a")
    if not at_once:
        members.present(manager)
    grid.add(2, claims="site-a", registered="site-a")
    assert {name: m.proxy.cid for name, m in members.present(manager).items()} == {"site-a": "1"}
    assert notices == ["client site-a is excluded: another node uses this name"]


def test_first_node_gets_the_name_without_keys(grid, joining):
    members, manager, notices = joining
    grid.add(1, claims="site-a")
    members.present(manager)
    grid.add(2, claims="site-a")
    assert {name: m.proxy.cid for name, m in members.present(manager).items()} == {"site-a": "1"}
    assert "client site-a is excluded: another node uses this name" in notices


def test_node_that_comes_back_under_another_name_is_no_new_voter(grid, joining):
    members, manager, notices = joining
    grid.add(1, claims="site-a")
    members.present(manager)
    for number in range(6):
        del grid.online[1]
        assert members.present(manager) == {}
        grid.add(1, claims=f"voter-{number}")
        assert members.present(manager) == {}
    assert "it claims the name 'voter-5', but it was client site-a before" in notices[-1]
    del grid.online[1]
    members.present(manager)
    grid.add(1, claims="site-a")
    assert list(members.present(manager)) == ["site-a"]


def test_node_gone_before_its_key_is_read_is_ignored(grid, joining):
    members, manager, notices = joining
    grid.add(1, claims="site-a", registered="site-b")
    proxies = manager.all()
    manager.all = lambda: proxies
    del grid.online[1]
    assert members.present(manager) == {}
    assert "node 1 did not register: node 1 is no longer online" in notices[0]


def test_node_without_description_is_named_by_its_key(grid, joining):
    members, manager, notices = joining
    grid.add(1, claims="a name with spaces", registered="site-b")
    grid.add(2, claims="another one")
    assert members.present(manager) == {}
    rule = "name: must consist of letters, digits, '.', '_' and '-'"
    assert notices == [
        f"node site-b is excluded: {rule}, got 'a name with spaces'",
        f"node 2 is excluded: {rule}, got 'another one'",
    ]


def test_site_that_refuses_an_unsigned_run_is_excluded_with_the_way_to_sign_it(grid, joining):
    members, manager, notices = joining
    grid.add(1, "a", registered="a")
    grid.error, grid.given_up = UNVERIFIED, {"message-0"}
    assert members.present(manager) == {}
    (notice,) = notices
    assert "a is excluded: the site runs only apps that a publisher" in notice
    assert "fedhet submit --sign" in notice
    assert len(grid.sent) == 1, "the same run has the same signature, so it is not sent again"


def test_node_of_a_simulation_has_no_registered_name():
    assert registered_name(SimpleNamespace(cid="client-0", grid=None)) == ""


def restarts(grid, look):
    """Accept node 1 again within a minute; Flower has never listed it as offline."""
    if grid.looks == look:
        grid.online[1].last_activated_at = "2026-11-21T10:00:57"


def asking(grid, seconds=3600.0):
    grid.add(1, claims="site-a")
    proxy = retrying(GridClientProxy(1, grid, 1))
    return proxy.fit(FitIns(Parameters([b"wei", b"ghts"], ""), {"evaluate": True}), seconds, 3)


def test_node_that_restarts_before_replying_is_called_again(grid):
    grid.meanwhile = lambda grid: restarts(grid, 3)
    grid.answers = lambda message: message is grid.sent[-1][1] and len(grid.sent) == 2
    assert asking(grid).num_examples == 7
    (_, first), (_, second) = grid.sent
    assert grid.clock.now < 60, "seconds until it was asked again and has answered"
    assert second.metadata.group_id == first.metadata.group_id == "3"
    assert second.metadata.message_type == first.metadata.message_type
    assert second.metadata.ttl < first.metadata.ttl == 3600
    sent = compat.recorddict_to_fitins(second.content, True).parameters
    assert sent == Parameters([b"weights"], JOINED)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_message_is_sent_again_if_an_object_is_rejected(grid, failures):
    """The SuperLink rejects an object whose request is repeated."""
    push, rejected = grid.push_messages, []

    def pushed(messages):
        if len(rejected) < failures:
            rejected.append(messages[0])
            raise ObjectPushError("object", 1, "session")
        return push(messages)

    grid.push_messages = pushed
    if failures == 3:
        with pytest.raises(ObjectPushError):
            asking(grid)
        assert grid.sent == []
        return
    assert asking(grid).num_examples == 7
    ((_, sent),) = grid.sent
    assert sent.content == rejected[0].content
    assert sent.metadata.dst_node_id == 1
    assert all(sent is not other for other in rejected)


def test_arrays_of_an_evaluation_are_joined(grid):
    grid.add(1, claims="site-a")
    parameters, sent = Parameters([b"wei", b"ghts"], "numpy.ndarray"), []
    grid.reply = lambda message, number: sent.append(message) or evaluated(number)
    proxy = retrying(GridClientProxy(1, grid, 1))
    assert proxy.evaluate(EvaluateIns(parameters, {"x": 1}), 60.0, 3).num_examples == 5
    came = compat.recorddict_to_evaluateins(sent[0].content, True)
    assert came == EvaluateIns(Parameters([b"weights"], JOINED), {"x": 1})
    assert parameters.tensors == [b"wei", b"ghts"], "other clients receive it too"


def evaluated(number):
    response = EvaluateRes(Status(Code.OK, ""), 0.5, 5, {})
    content = compat.evaluateres_to_recorddict(response)
    about = SimpleNamespace(reply_to_message_id=number)
    return SimpleNamespace(metadata=about, content=content, has_error=lambda: False)


def test_node_that_restarts_while_describing_itself_is_called_again(grid, joining):
    members, manager, notices = joining
    members._timeout = 3600.0
    grid.add(1, claims="site-a")
    grid.meanwhile = lambda grid: restarts(grid, 3)
    grid.answers = lambda message: len(grid.sent) == 2
    assert list(members.present(manager)) == ["site-a"]
    assert not notices
    assert grid.clock.now < 60, "seconds until it was asked again and has answered"


def test_node_is_called_again_after_each_restart(grid):
    def meanwhile(grid):
        if grid.looks % 10 == 0:
            grid.online[1].last_activated_at += "+"

    grid.meanwhile = meanwhile
    grid.answers = lambda message: len(grid.sent) == 4
    assert asking(grid).num_examples == 7
    assert len(grid.sent) == 4
    sent = [message for _, message in grid.sent]
    assert len({each.object_id for each in sent}) == 4, "each is a message of its own"
    assert len({each.metadata.dst_node_id for each in sent}) == 1
    left = [each.metadata.ttl for each in sent]
    assert left == sorted(left, reverse=True)


def test_message_taken_by_the_former_session_may_expire(grid):
    def meanwhile(grid):
        restarts(grid, 3)
        if grid.looks > 10:
            grid.given_up = {"message-0"}

    grid.meanwhile = meanwhile
    grid.answers = lambda message: grid.looks > 20 and message is grid.sent[-1][1]
    assert asking(grid).num_examples == 7
    assert len(grid.sent) == 2


def test_polling_slows_down_for_slow_replies_and_many_nodes(grid):
    known = Nodes(grid)
    assert [known.poll_interval(waited) for waited in (0, 1, 10, 60)] == [0.2, 0.2, 1.0, 3.0]
    for number in range(100):
        grid.add(number + 1, claims=f"site-{number}")
    known.session(1, use_cache=False)
    assert known.poll_interval(0) == pytest.approx(2.0)
    for number in range(100, 1000):
        grid.add(number + 1, claims=f"site-{number}")
    known.session(1, use_cache=False)
    assert known.poll_interval(0) == 3.0


def test_node_killed_while_replying_is_called_again(grid, monkeypatch):
    """Flower waits for the rest of the first reply, which never arrives."""
    monkeypatch.setattr(nodes, "POLL_SECONDS", 0.01)
    over, pull = threading.Event(), grid.pull_messages

    def pull_messages(numbers):
        if list(numbers) == ["message-0"]:
            over.wait(60)
            return []
        return list(pull(numbers))

    grid.pull_messages = pull_messages
    monkeypatch.setattr(nodes, "CACHE_SECONDS", 0.0)
    looks = iter(range(100))
    grid.get_nodes = lambda: [
        SimpleNamespace(node_id=1, name=None, last_activated_at="b" if next(looks) > 3 else "a")
    ]
    assert asking(grid).num_examples == 7
    assert len(grid.sent) == 2
    over.set()


def test_failed_poll_raises(grid):
    def pull_messages(numbers):
        raise ConnectionError("the server is gone")

    grid.pull_messages = pull_messages
    with pytest.raises(ConnectionError, match="gone"):
        asking(grid)


def test_expired_message_fails(grid):
    def meanwhile(grid):
        if grid.looks > 10:
            grid.given_up = {number for number, _ in grid.sent}

    grid.meanwhile = meanwhile
    grid.answers = lambda message: False
    with pytest.raises(ValueError, match="time"):
        asking(grid)


@pytest.mark.parametrize("lost", [1, 3])
def test_node_with_a_lost_reply_is_called_again(grid, lost):
    """The SuperLink has the reply's header, but not all of its arrays."""
    grid.error, grid.given_up = LOST, {f"message-{number}" for number in range(lost)}
    assert asking(grid).num_examples == 7
    assert len(grid.sent) == lost + 1
    ((_, first), *_, (_, last)) = grid.sent
    assert compat.recorddict_to_fitins(last.content, True).parameters.tensors == [b"weights"]
    assert last.metadata.ttl <= first.metadata.ttl


def test_repeatedly_lost_replies_raise(grid):
    grid.error, grid.given_up = LOST, {f"message-{number}" for number in range(100)}
    with pytest.raises(ValueError, match="objects"):
        asking(grid)
    assert len(grid.sent) == 1 + nodes.MAX_LOST_REPLIES


def test_offline_node_with_a_lost_reply_is_not_called_again(grid):
    def meanwhile(grid):
        if grid.looks == 3:
            grid.online.pop(1)
            grid.given_up = {"message-0"}

    grid.error, grid.meanwhile, grid.answers = LOST, meanwhile, lambda message: False
    with pytest.raises(ValueError, match="objects"):
        asking(grid)
    assert len(grid.sent) == 1
    assert grid.clock.now < 60, "seconds until the error"


def test_slow_node_is_called_once(grid):
    grid.answers = lambda message: grid.looks > 50
    asking(grid)
    assert len(grid.sent) == 1


def test_returning_node_is_called_again(grid):
    def meanwhile(grid):
        if grid.looks == 3:
            grid.gone = grid.online.pop(1)
        if grid.looks == 20:
            grid.gone.last_activated_at = "later"
            grid.online[1] = grid.gone

    grid.meanwhile = meanwhile
    grid.answers = lambda message: len(grid.sent) == 2
    assert asking(grid).num_examples == 7


def under_way(transfers, started, done):
    """Acquire a turn, signal this, and keep it until `done` is set."""
    with transfers.turn():
        started.set()
        done.wait(10)


def test_only_a_few_messages_are_in_memory_at_once():
    transfers, done = TransferLimiter(max_transfers=2, max_seconds=60.0), threading.Event()
    started = [threading.Event() for _ in range(3)]
    threads = [
        threading.Thread(target=under_way, args=(transfers, each, done), daemon=True)
        for each in started
    ]
    for thread in threads:
        thread.start()
    for _ in range(200):
        if sum(each.is_set() for each in started) == 2:
            break
        threading.Event().wait(0.01)
    assert not threading.Event().wait(0.1)
    assert sum(each.is_set() for each in started) == 2
    done.set()
    assert all(each.wait(10) for each in started)
    for thread in threads:
        thread.join(10)
    assert not transfers._started


def test_hanging_transfer_blocks_no_other_node():
    transfers, done, started = (
        TransferLimiter(max_transfers=1, max_seconds=0.1),
        threading.Event(),
        threading.Event(),
    )
    hanging = threading.Thread(target=under_way, args=(transfers, started, done), daemon=True)
    hanging.start()
    assert started.wait(10)
    with transfers.turn():
        assert hanging.is_alive()
    done.set()
    hanging.join(10)


def test_error_ends_a_transfer():
    transfers = TransferLimiter(max_transfers=1)
    with pytest.raises(OSError, match="cut"), transfers.turn():
        raise OSError("cut")
    with transfers.turn():
        pass


def test_messages_of_a_deployment_are_limited(grid):
    grid.add(1, claims="site-a", registered="site-a")
    taken = []

    class Noting(TransferLimiter):
        def turn(self):
            taken.append(len(grid.sent))
            return super().turn()

    asking = RetryingGrid(grid, Nodes(grid), Noting())
    proxy = GridClientProxy(1, asking, 1)
    assert proxy.fit(FitIns(Parameters([], ""), {}), 100.0, 1).num_examples == 7
    assert taken == [0, 1]
