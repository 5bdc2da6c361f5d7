"""Membership: nodes join, leave, return, and may make false claims."""

import json
import resource
from dataclasses import replace

import numpy as np
import pytest
from federation import Server, records, run, small
from flwr.common import GetPropertiesIns, GetPropertiesRes, Status
from flwr.common.typing import Code
from flwr.server.client_manager import SimpleClientManager

from fedhet.base.errors import FedhetError, KnowledgeError, StateError, safe_repr
from fedhet.client_runtime.node import open_client, read_node
from fedhet.engines import simulate as simulation
from fedhet.engines.simulate import InlineProxy
from fedhet.runs.log import RunLog
from fedhet.server.calls import RoundResults
from fedhet.server.federation import MethodStrategy
from fedhet.server.members import Admission, Member, Members, first_of_pool, most_common_task
from fedhet.settings.engine import EngineSettings
from fedhet.wire.identity import ClientInfo, capped, class_names_digest, read_properties

GOOD = {"name": "a", "model": "mlp", "samples": 10, "classes": 3, "kind": "image", "shape": "1,8,8"}


class Node:
    """A fake node with a description only."""

    def __init__(self, cid, **changes):
        self.cid = cid
        self.says = {**GOOD, "name": cid, **changes}
        self.meanwhile = lambda: None

    def get_properties(self, ins, timeout, group_id):
        self.meanwhile()
        if isinstance(self.says, Exception):
            raise self.says
        return GetPropertiesRes(Status(Code.OK, ""), self.says)


class Manager:
    """Flower's manager returns its internal dict, which one of its threads changes."""

    def __init__(self, *nodes):
        self.nodes = {node.cid: node for node in nodes}

    def all(self):
        return self.nodes


@pytest.fixture
def notices():
    return []


@pytest.fixture
def members(notices):
    return Members(1.0, ["mymodels:tiny"], notices.append)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../a"), ("name", "server"), ("name", 3), ("name", "a\nb"), ("model", 5),
        ("model", "m" * 300), ("model", "[red]a"), ("model", ""), ("samples", 1), ("samples", True),
        ("samples", 2.5), ("classes", 1), ("classes", 10**9), ("shape", "1,8,"), ("shape", "0"),
        ("shape", "1,2,3,4,5"), ("shape", 8), ("order", "cat,dog"), ("order", 3),
        ("samples", 10**12), ("samples", 10**5000), ("shape", 10**5000), ("model", "m\u202elp"),
        ("shape", "65000,65000,65000"), ("shape", "\u0663,3"), ("classes", 10**5000),
        ("name", 10**5000), ("name", "a\x1b[2J"), ("order", "a" * 16 + "\n"),
    ],
    ids=lambda value: safe_repr(value)[:30],
)  # fmt: skip
def test_description_of_a_client_is_checked(field, value):
    with pytest.raises(KnowledgeError) as caught:
        read_properties({**GOOD, field: value}, "node 1")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("samples", "most", "counted"),
    [
        ([100, 120, 10**9], 10, [100, 120, 1200]),
        ([100, 10**9], 10, [100, 1000]),  # of two, the lower one is the median
        ([10**9, 10**9, 100], 10, [10**9, 10**9, 100]),  # a majority is believed
        ([5, 7, 9, 90], 10, [5, 7, 9, 70]),
        ([100, 120, 10**9], 0, [100, 120, 10**9]),
        ([10, 15], 1.5, [10, 15]),
        ([7], 10, [7]),
        ([], 10, []),
    ],
)
def test_client_weight_is_limited_by_the_median(samples, most, counted):
    infos = [ClientInfo(f"c{k}", "mlp", count, 3, "table", (4,)) for k, count in enumerate(samples)]
    assert list(capped(infos, most).values()) == counted


def test_client_with_too_many_claimed_samples_is_named_once(notices):
    members = Members(1.0, None, notices.append, samples_cap=10.0)
    manager = Manager(Node("a", samples=100), Node("b", samples=120), Node("c", samples=10**9))
    for _ in range(2):
        found = members.present(manager)
        assert {name: each.info.samples for name, each in found.items()} == {
            "a": 100, "b": 120, "c": 1200,
        }  # fmt: skip
    assert notices == [
        "client c reported 1000000000 samples, but only 1200 count: 'engine.samples-cap' is "
        "10 times the median"
    ]
    del manager.nodes["a"]  # it counts with the median of those who are there
    assert members.present(manager)["c"].info.samples == 1200


def test_failure_of_a_node_is_one_line(members, notices):
    node = Node("a")
    node.get_properties = lambda *_, **__: GetPropertiesRes(
        Status(
            Code.GET_PROPERTIES_NOT_IMPLEMENTED, "\x1b[2J\rround 9 accuracy 1.0\nnote: all well"
        ),
        {},
    )
    members.present(Manager(node))
    assert notices == [r"node a is excluded: \x1b[2J\rround 9 accuracy 1.0\nnote: all well"]


def test_identity_round_trip():
    for classes in (("cat", "dog", "elk"), ("0", "1", "2")):
        info = ClientInfo(
            "site-a", "cnn2", 12, 3, "image", (3, 32, 32), class_names_digest(classes)
        )
        assert read_properties(info.properties(), "node") == info


def test_site_with_another_public_set_is_excluded_and_both_sites_are_named(members, notices):
    """The public set of most sites counts; a site of a simulation reports none."""
    one, other = "0" * 16, "1" * 16
    nodes = [Node("a", public=other), Node("b", public=one), Node("c", public=one), Node("d")]
    manager = Manager(*nodes)
    assert list(members.present(manager)) == ["b", "c", "d"]
    manager.nodes["e"] = Node("e", public=other)
    assert list(members.present(manager)) == ["b", "c", "d"]
    assert notices == [
        f"client {name} is excluded: its public set differs from the public set of client b. Copy "
        "the same files to both sites ('data.public-dataset', 'data.data-dir')."
        for name in "ae"
    ]
    with pytest.raises(KnowledgeError, match="public: "):
        read_properties({**GOOD, "public": "x"}, "node a")


def test_order_of_classes_changes_the_digest():
    orders = [("a", "b"), ("b", "a"), ("a", "c"), ("ab", ""), ("1", "0"), ("a", "b", "c")]
    assert len({class_names_digest(names) for names in orders}) == len(orders)
    assert class_names_digest(("a", "b")) == class_names_digest(["a", "b"])
    assert class_names_digest(tuple("0123")) == ""


def test_site_with_another_class_order_is_excluded(members, notices):
    """The most frequent order counts; sites without names fit any, and late sites are checked."""
    right, wrong = (
        class_names_digest(("cat", "dog", "elk")),
        class_names_digest(("dog", "cat", "elk")),
    )
    manager = Manager(
        Node("a", order=wrong), Node("b", order=right), Node("c", order=right), Node("d")
    )
    assert list(members.present(manager)) == ["b", "c", "d"]
    assert "a is excluded: its classes differ" in notices[0]
    manager.nodes |= {"e": Node("e", order=wrong), "f": Node("f", order=right)}
    assert list(members.present(manager)) == ["b", "c", "d", "f"]


def test_first_to_name_the_classes_fixes_their_order(members):
    manager = Manager(Node("a"))
    members.present(manager)
    manager.nodes |= {"b": Node("b", order="0" * 16), "c": Node("c", order="1" * 16)}
    assert list(members.present(manager)) == ["a", "b"]


def test_sites_send_their_class_order(tmp_path):
    config = small("local", models="mlp", num_classes=3)
    said = []
    for site, names in (("a", "cat dog elk"), ("b", "dog cat elk"), ("c", "")):
        folder = tmp_path / site
        folder.mkdir()
        np.savez(folder / "train.npz", x=np.ones((9, 2), np.float32), y=np.arange(9) % 3)
        if names:
            (folder / "classes.txt").write_text(names.replace(" ", "\n"))
        given = {"name": site, "data": f"npz:{folder}"}
        proxy = InlineProxy(config, read_node(given, config.run, str(tmp_path)))
        said.append(proxy.get_properties(GetPropertiesIns({}), None, 0).properties["order"])
    assert said == [
        class_names_digest(("cat", "dog", "elk")),
        class_names_digest(("dog", "cat", "elk")),
        "",
    ]


def test_departing_node_does_not_end_the_run(members):
    first, second = Node("a"), Node("b")
    manager = Manager(first)
    members.present(manager)
    manager.nodes["b"] = second
    second.meanwhile = lambda: manager.nodes.pop("a", None)
    assert "b" in members.present(manager)
    assert list(members.present(manager)) == ["b"]


def test_restarted_node_joins_after_its_former_session_ends(members, notices):
    manager = Manager(Node("old", name="site-a"))
    members.present(manager)
    manager.nodes["new"] = Node("new", name="site-a")
    assert members.present(manager)["site-a"].proxy.cid == "old"
    assert "another node uses this name" in notices[-1]
    del manager.nodes["old"]
    assert members.present(manager)["site-a"].proxy.cid == "new"


def test_most_common_task_is_used(members, notices):
    odd = Node("a-odd", classes=7)
    found = members.present(Manager(odd, *(Node(f"site-{k}") for k in range(4))))
    assert list(found) == [f"site-{k}" for k in range(4)]
    assert "a-odd is excluded: its data has 7 classes" in notices[0]


def test_ties_between_tasks_prefer_the_server_then_the_smallest():
    """The tie is not broken by name, because a first client could claim the largest task."""
    infos = [
        ClientInfo("a", "mlp", 5, 2, "signal", (65536, 65536)),
        ClientInfo("b", "mlp", 5, 3, "image", (1, 8, 8)),
        ClientInfo("c", "mlp", 5, 3, "image", (1, 4, 4)),
    ]
    own = (3, "image", (1, 8, 8))
    for order in (infos, infos[::-1]):
        assert most_common_task(order) == (3, "image", (1, 4, 4))
        assert most_common_task(order, lambda: own) == own
        assert most_common_task(order, lambda: (9, "table", (9,))) == (3, "image", (1, 4, 4))
        assert most_common_task([*order, infos[0]], lambda: own)[2] == (65536, 65536)


@pytest.mark.parametrize(
    ("rules", "claims", "fault"),
    [
        (
            Admission(),
            {"kind": "signal", "shape": "65536,65536"},
            "a sample must have at most 268435456 values",
        ),
        (
            Admission(classes=3),
            {"classes": 4},
            "its data has 4 classes, expected 'models.num-classes' = 3",
        ),
        (
            Admission(max_bytes=1e6),
            {"shape": "3,512,512"},
            "more than 1 MB ('engine.max-payload-mb')",
        ),
        (
            Admission(),
            {"model": "resnet10", "kind": "table", "shape": "64"},
            "expected images [C, H, W]",
        ),
        (Admission(), {"model": "no-such-model"}, "neither registered nor in the run's pool"),
    ],
)
def test_impossible_claim_is_excluded_before_the_vote(rules, claims, fault, notices):
    """Of two clients, the other client decides the task of the run."""
    members = Members(1.0, ["mlp"], notices.append, rules)
    assert list(members.present(Manager(Node("a", **claims), Node("b")))) == ["b"]
    assert notices[0].startswith(("client a is excluded: ", "node a is excluded: "))
    assert fault in notices[0]


def test_nothing_is_allocated_for_a_claim(members, notices):
    """The size of a 2 TB model is computed without building the model."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Members(1.0, ["mlp"], notices.append, Admission(max_bytes=2e9)).present(
        Manager(Node("a", kind="signal", shape="4096,4096", classes=100_000))
    )
    assert "would have" in notices[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_most_common_model_is_used_if_all_must_agree(notices):
    members = Members(1.0, ["mlp"], notices.append, Admission(one_model=True))
    nodes = [Node("a", model="cnn2"), *(Node(name, model="cnn3") for name in "bc")]
    assert list(members.present(Manager(*nodes))) == ["b", "c"]
    assert notices == [
        "client a is excluded: its model must be 'cnn3' as on all clients, got 'cnn2'"
    ]


def test_corrected_node_may_return(members):
    manager = Manager(Node("a"), Node("b"), Node("c", classes=7))
    assert list(members.present(manager)) == ["a", "b"]
    mended = Node("c")
    manager.nodes["c"] = mended
    assert list(members.present(manager)) == ["a", "b"], "while it is connected it is not asked"
    del manager.nodes["c"]
    members.present(manager)
    manager.nodes["c"] = mended
    assert list(members.present(manager)) == ["a", "b", "c"]


def test_undescribed_node_is_called_occasionally(members):
    silent, turns, sampled = Node("b"), [], []
    silent.says = TimeoutError("no answer")
    silent.meanwhile = lambda: sampled.append(len(turns))
    manager = Manager(Node("a"), silent)
    for turn in range(1, 60):
        turns.append(turn)
        members.present(manager)
    assert sampled == [1, 2, 4, 8, 16, 32, 48]


class Slow(Node):
    """Replies to the third request."""

    asked = 0

    def get_properties(self, ins, timeout, group_id):
        self.asked += 1
        if self.asked < 3:
            self.meanwhile()
            raise TimeoutError("no answer")
        return super().get_properties(ins, timeout, group_id)


@pytest.mark.parametrize(
    ("takes", "least", "expected"), [(150.0, 0, "ab"), (150.0, 1, "a"), (0.1, 0, ""), (9e9, 0, "")]
)
def test_slow_node_is_called_again_if_needed(takes, least, expected, notices, monkeypatch):
    """A slow machine is not called again if enough clients replied, if it fails, or forever."""
    clock = [0.0]
    monkeypatch.setattr("fedhet.server.members.time.monotonic", lambda: clock[0])
    slow = Slow("b")
    slow.meanwhile = lambda: clock.__setitem__(0, clock[0] + takes)
    manager = Manager(Node("a"), slow)
    manager.num_available = lambda: 2
    engine = EngineSettings(join_timeout=120.0, round_timeout=3600.0, min_clients=least)
    members = Members(engine.join_timeout, None, notices.append)
    if not expected:
        with pytest.raises(FedhetError, match="1"):
            members.wait_for_first(manager, 2, engine)
        assert slow.asked == 1
        return
    assert "".join(members.wait_for_first(manager, 2, engine)) == expected
    assert slow.asked == {"ab": 3, "a": 1}[expected]


def test_description_has_its_own_timeout(tmp_path):
    """A short round-timeout does not immediately end a run with slow machines."""
    config = small("local", round_timeout=0.5, join_timeout=77.0)
    strategy = MethodStrategy(config, RunLog(config, tmp_path / "run", workers=1))
    waited = []

    class Asked(Node):
        def get_properties(self, ins, timeout, group_id):
            waited.append(timeout)
            return super().get_properties(ins, timeout, group_id)

    strategy._members.present(Manager(Asked("a")))
    assert waited == [77.0]


def test_model_that_a_client_names_is_not_imported_by_the_server(members, notices):
    found = members.present(
        Manager(Node("a"), Node("b", model="os:abort"), Node("c", model="mymodels:tiny"))
    )
    assert list(found) == ["a", "c"]
    assert "b is excluded: its model 'os:abort' is neither registered" in notices[0]


SITES_OWN = """
from torch import nn

def flat(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Linear(8, classes)
"""


@pytest.mark.parametrize("method", ["cofed", "local", "fedgems", "felo"])
def test_sites_own_model_matters_only_where_weights_are_sent(method, tmp_path, monkeypatch):
    """Otherwise, the server need not have or import a site's model."""
    (tmp_path / f"at_site_{method}.py").write_text(SITES_OWN)
    name = f"at_site_{method}:flat"
    monkeypatch.syspath_prepend(str(tmp_path))
    config = small(method, models="mlp")
    log = RunLog(config, tmp_path / "run", workers=1)
    strategy = MethodStrategy(config, log)
    manager = SimpleClientManager()
    for k in range(4):
        given = {"partition-id": k, "num-partitions": 4, **({"model": name} if k == 1 else {})}
        manager.register(InlineProxy(config, read_node(given, config.run, str(tmp_path))))
    if method == "felo":
        with pytest.raises(FedhetError, match="3"):
            strategy.begin(manager)
        return
    strategy.begin(manager)
    assert strategy.method.members["client-1"].info.model == name
    instructions = strategy.configure_fit(1, manager)
    outcomes = [proxy.send(ins, None, 1) for proxy, ins in instructions]
    strategy.aggregate_fit(1, RoundResults(outcomes))
    assert "client-1" in strategy.state.record.answered


def test_failing_node_is_called_again(members, notices):
    node = Node("a")
    node.says = RuntimeError("not up yet")
    manager = Manager(node)
    assert members.present(manager) == {}
    assert "not up yet" in notices[0]
    node.says = {**GOOD}
    assert list(members.present(manager)) == ["a"]


def test_error_at_a_node_comes_without_flowers_wrapping(members, notices):
    node = Node("a")
    # As flwr.server.compat.grid_client_proxy has it.
    told = "Message contains an Error (reason: {}). It originated during client-side execution."
    for said, noticed in [
        (
            "<class 'fedhet.base.errors.DataError'>:<'/srv: no 'train'>'\n>'>",
            "register: /srv: no 'train'>' >",
        ),
        (
            "<class 'OSError'>:<'gone'>",
            "register: Message contains an Error (reason: <class 'OSError'>",
        ),
    ]:
        node.says = RuntimeError(told.format(said))
        members.present(Manager(node))
        assert noticed in notices.pop()


@pytest.mark.parametrize("method", ["um-pfssl", "fedavg"])
def test_late_client_with_another_model_is_excluded(method, tmp_path):
    config = small(method, min_clients=3, join_timeout=0.2, fraction=1.0, rounds=3)
    server = Server(config, tmp_path / "run", clients=3)
    node = {"partition-id": 3, "num-partitions": 4, "model": "resnet9", "name": "aaa"}
    late = InlineProxy(config, read_node(node, config.run, str(tmp_path / "late")))
    for number in range(1, 4):
        server.play(number)
        record = server.flower.state.record
        assert record.answered == ["client-0", "client-1", "client-2"]
        assert record.failed == {}
        server.close(number)
        server.manager.register(late)
    assert server.strategy.reference_client.model == config.run.models.pool[0]


def test_too_few_clients_do_not_start(tmp_path):
    config = small(join_timeout=0.5)
    with pytest.raises(FedhetError, match=r"0 of 4 .*0\.5 s"):
        _start(config, tmp_path / "run", clients=0)


MODELS = ["resnet18-pretrained", "cnn2", "mlp"]


def test_run_may_start_with_fewer(tmp_path):
    config = small(join_timeout=0.5, min_clients=2)
    assert len(_start(config, tmp_path / "run", clients=2)) == 2


def test_model_that_the_server_cannot_build_is_not_the_one_that_it_builds():
    """A client's model name decides nothing if others have a model of the run's pool."""
    infos = [ClientInfo(n, m, 9, 3, "image", (1, 8, 8)) for n, m in zip("abc", MODELS, strict=True)]
    every = [Member(info, None) for info in infos]
    assert first_of_pool(every, ["mlp", "cnn2"]) is infos[1]
    assert first_of_pool(every, ["lenet5"]) is infos[0]


def _start(config, directory, clients):
    log = RunLog(config, directory, workers=1)
    strategy = MethodStrategy(config, log)
    manager = SimpleClientManager()
    for k in range(clients):
        node = read_node({"partition-id": k, "num-partitions": 4}, config.run, str(directory))
        manager.register(InlineProxy(config, node))
    strategy.begin(manager)
    return strategy.method.members


class Diverging(InlineProxy):
    """A client whose learning rate is absurd only in round 2."""

    def fit(self, ins, timeout, group_id):
        client = open_client(self._config, self._node)
        rate = 1e30 if (self.cid, group_id) == ("client-1", 2) else 1e-3
        client.node = replace(client.node, training=client.training.model_copy(update={"lr": rate}))
        return super().fit(ins, timeout, group_id)


def test_diverging_client_keeps_and_evaluates_its_model(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineProxy", Diverging)
    run(small("local", rounds=3, optimizer="sgd"), tmp_path / "run")
    first, second, third = records(tmp_path / "run")
    assert second["failed"].keys() == {"client-1"}
    assert "training diverged" in second["failed"]["client-1"]
    both = [r["accuracy"]["common"]["private"]["per_client"]["client-1"] for r in (first, second)]
    assert both[0] == both[1]
    assert third["failed"] == {}


class Silent(InlineProxy):
    """A client that replies only in round 1."""

    def fit(self, ins, timeout, group_id):
        if self.cid == "client-2" and group_id > 1:
            raise TimeoutError("no answer")
        return super().fit(ins, timeout, group_id)


def test_silent_client_is_in_no_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineProxy", Silent)
    summary = run(small(), tmp_path / "run")
    kept = summary["accuracy"]["common"]["private"]
    assert set(kept["per_client"]) == {"client-0", "client-1", "client-3"}
    assert kept["mean"] == pytest.approx(np.mean(list(kept["per_client"].values())))


def test_late_reply_does_not_overwrite_newer_state(tmp_path):
    server = Server(small("local"), tmp_path / "run")
    proxy, ins = server.instruct(1)[0]
    late = server.log.config.method.client(server.log.config, proxy._proxy._node)
    late.state.restore(server.log.run_name, before=1)
    proxy.request(ins, None, 1)
    proxy.request(server.instruct(2)[0][1], None, 2)
    states = {path: path.read_bytes() for path in late.state.folder.glob("round-*")}
    assert len(states) == 2
    with pytest.raises(StateError, match="newer"):
        late.state.save(1)
    assert {path: path.read_bytes() for path in late.state.folder.glob("round-*")} == states


def test_departures_and_returns_are_recorded(tmp_path):
    config = small("local", rounds=3, fraction=1.0)
    server = Server(config, tmp_path / "run")
    said = []
    server.flower._members._notice = said.append
    absent = []
    for number in (1, 2, 3):
        gone = server.manager.clients.pop("client-2", None) if number == 2 else None
        server.play(number)
        absent.append(server.flower.state.record.absent)
        server.close(number)
        if gone is not None:
            server.manager.register(gone)
    assert absent == [[], ["client-2"], []]
    assert said == ["client client-2 is no longer connected", "client client-2 is connected again"]
    assert [record.get("absent") for record in records(tmp_path / "run")] == [
        None, ["client-2"], None,
    ]  # fmt: skip


def test_client_reports_its_own_data():
    info = read_properties({**GOOD, "own_data": True}, "node a")
    assert info.own_data
    assert read_properties(info.properties(), "node a") == info
    with pytest.raises(KnowledgeError, match=r"own_data: .*'yes'"):
        read_properties({**GOOD, "own_data": "yes"}, "node a")


def test_run_of_sites_notes_own_data(tmp_path):
    config, rng = small("local", num_classes=3, clients=1, min_clients=1), np.random.default_rng(0)
    for name in ("train", "test"):
        x, y = rng.random((30, 1, 8, 8), np.float32), np.arange(30) % 3
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    log, manager = RunLog(config, tmp_path / "run", workers=1), SimpleClientManager()
    node = read_node(
        {"name": "north", "data": f"npz:{tmp_path}"}, config.run, str(tmp_path / "state")
    )
    manager.register(InlineProxy(config, node))
    MethodStrategy(config, log).begin(manager)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["own_data"] is True
    assert log.finish().dataset == "the sites' own data"
