"""Nothing that a site sends depends on its samples, whatever the server requests.

Two datasets of a site differ: in one sample at a site with differential privacy, and also in the
number of rows at a site with peers. A server that chooses settings and instructions must see no
difference other than noise and masks: the same refusals, messages, metrics, and shapes.
"""

import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from federation import LONG, Server, permitted
from flwr.common import Context, EvaluateRes, FitRes, GetPropertiesIns, RecordDict
from PIL import Image
from rounds import reply_of

from fedhet.base.errors import DataError, SettingsError
from fedhet.client_runtime.app import client_fn, within_limits
from fedhet.client_runtime.node import NodeSettings, close_clients
from fedhet.config import secure
from fedhet.config.resolve import resolve, resolve_flower
from fedhet.data.declaration import Declaration
from fedhet.learning.devices import CPU
from fedhet.learning.training import optimization_for
from fedhet.methods.registry import all_methods, find_method, shipped_names
from fedhet.models import build as build_model
from fedhet.privacy.accounting import Noise, Release, epsilon_of
from fedhet.privacy.ledger import Ledger
from fedhet.privacy.sgd import dp_sgd
from fedhet.server.calls import DirectProxy
from fedhet.settings.run import RunSettings, TrainingSettings
from fedhet.settings.schema import build, kebab
from fedhet.wire.knowledge import Envelope, Knowledge, encode
from fedhet.wire.masking import REQUEST

DECLARED = "num-classes = 10\nshape = [1, 8, 8]\n"
FEW_TESTS = f"{DECLARED}test-fraction = 0.05\nrows = 60\n"
"""Declaration whose random test split cannot contain all samples of a listed class."""
ROWS = 60
READ_FAULT = ("StateError", "DataError at a private client; see the client's log for details")
READ_FAULT_OF_DELTA = ("StateError", READ_FAULT[1].replace("DataError", "PrivacyError"))
NOT_OF_DATA = {"engine.threads", "rounds"}
"""Settings whose values cost time and do not reach data: threads are the whole process's."""
SITES = ("site-a", "site-b", "site-c")
LISTED = ("0", "1", "2", "3", "4")
"""Classes that the peers file lists for each site."""


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FEDHET_CACHE_DIR", str(tmp_path / "cache"))
    yield
    close_clients()


def arrays(change=lambda x, y: None):
    rng = np.random.default_rng(0)
    x, y = rng.random((ROWS, 8, 8), dtype=np.float32), np.arange(ROWS) % 9
    return change(x, y) or (x, y)


def site(folder, change=lambda x, y: None, declared=FEW_TESTS):
    """Write a site's directory of arrays, and return its path."""
    folder.mkdir(parents=True)
    x, y = arrays(change)
    np.savez(folder / "train.npz", x=x, y=y)
    (folder / "site.toml").write_text(declared)
    return folder


def other_class(x, y):
    y[0] = 9


def outlier(x, y):
    x[0] = 3e38


def blank(x, y):
    x[0] = 0


def class_of_one_sample(x, y):
    y[y == 8] = 7
    y[8] = 8


def not_a_number(x, y):
    x[0, 0, 0] = np.nan


def label_out_of_range(x, y):
    y[0] = 10


def more_rows(x, y):
    """Return more rows than the other datasets, some of a further class."""
    return np.concatenate([x, x[:17] / 2]), np.concatenate([y, y[:16], [9]])


def fewer_rows(x, y):
    """Return fewer rows, in another type, so that their size in bytes also differs."""
    return (255 * x[:41]).astype(np.uint8), y[:41]


@cache
def keys(folder):
    """Write the peers file and the keys of all sites; return the peers file."""
    peers, private = secure.simulated_peers(SITES, classes=dict.fromkeys(SITES, LISTED))
    secure.write_simulated(folder, peers, private)
    return peers


def peers_node(folder, name="site-a"):
    """Return the node settings of a site with peers, whose keys are next to its directory."""
    keys(folder.parent)
    peers, key = secure.simulated_files(folder.parent, name)
    return {"peers": peers, "peers-key": key}


@dataclass(frozen=True)
class Kind:
    """Kind of protection: its setting of the run, and the datasets that it must not tell apart."""

    name: str
    run: dict[str, object]
    valid: tuple
    broken: tuple
    few: tuple

    def node(self, folder):
        if self.name == "peers":
            return peers_node(folder)
        return {"privacy": "epsilon=80 delta=1e-5"}

    def methods(self):
        """Yield the methods that support the kind, with the settings that they require."""
        for name in sorted(shipped_names()):
            spec = find_method(name).spec
            support = spec.sums if self.name == "peers" else spec.privacy
            if not support.unsupported:
                table = find_method(name).table
                yield name, {f"{table}.{kebab(k)}": v[0] for k, v in support.needs.items()}


PRIVATE = Kind(
    "privacy",
    {"privacy.epsilon": 8.0},
    (blank, other_class, outlier, class_of_one_sample),
    (not_a_number, label_out_of_range),
    (blank, other_class),
)
PEERS = Kind(
    "peers",
    {"privacy.secure-aggregation": True, "clients": 3, "models.num-classes": 10},
    (blank, other_class, more_rows, fewer_rows, class_of_one_sample),
    (not_a_number, label_out_of_range),
    (blank, more_rows, fewer_rows),
)
KINDS = [pytest.param(kind, id=kind.name) for kind in (PRIVATE, PEERS)]


def joined(folder, node=None, kind=PRIVATE, form="npz", **run):
    """Return the client that a server sees for the settings of a run."""
    settings = {"method": "fedavg", "models.pool": "mlp", **kind.run, **run}
    own = {"data": f"{form}:{folder}", "name": "site-a", **kind.node(folder), **(node or {})}
    return client_fn(Context(0, 0, own, RecordDict(), settings)).numpy_client


def outcome(folder, node=None, kind=PRIVATE, form="npz", **run):
    """Return what a server receives when the site joins: its description, or the error."""
    try:
        return joined(folder, node, kind, form, **run).get_properties({})
    except Exception as error:
        return type(error).__name__, str(error)


def malicious_values(name, info):
    """Yield valid and invalid values of a setting, from its declaration."""
    kinds = [info.annotation, *get_args(info.annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            yield from get_args(kind)
    default = info.default
    if isinstance(default, bool):
        yield not default
    elif isinstance(default, int):
        yield from (0, 1, 9, 100, 10**6)
    elif isinstance(default, float):
        yield from (0.0, 0.03, 0.9, 3.0)
    else:
        yield from ("9", "x", "generated", "digits")


SETTINGS = {
    name: sorted(set(malicious_values(name, info)), key=str)
    for name, info in RunSettings.fields().items()
    if name not in NOT_OF_DATA
}
OF_METHODS = {
    method: {
        name: sorted(set(malicious_values(name, info)), key=str)
        for name, info in find_method(method).settings().items()
    }
    for method in sorted(shipped_names())
}


def test_every_setting_is_covered():
    assert {"data.max-bytes", "data.labeled-alpha", "models.num-classes", "seed"} <= set(SETTINGS)
    assert {*SETTINGS} == {*RunSettings.fields()} - NOT_OF_DATA
    assert all(SETTINGS.values())
    assert {*OF_METHODS} == {*all_methods()[0]} & shipped_names()
    assert all(all(each.values()) for each in OF_METHODS.values())


OF_DATA = ("data", "models", "seed", "clients", "engine.min-samples-per-class")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([n for n in SETTINGS if n.startswith(OF_DATA)], id="of data"),
        pytest.param(list(SETTINGS), id="all", marks=pytest.mark.slow),
    ],
)
def test_no_run_setting_makes_joining_depend_on_one_sample(names, kind, tmp_path):
    few = len(names) < len(SETTINGS)
    seen = check_outcomes(kind, {name: SETTINGS[name] for name in names}, tmp_path, few=few)
    assert seen == {"joined", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_method_setting_makes_joining_depend_on_one_sample(kind, tmp_path):
    seen = set()
    for k, (method, needs) in enumerate(kind.methods()):
        needs = {"method": method, **needs}
        (folder := tmp_path / str(k)).mkdir()
        seen |= check_outcomes(kind, OF_METHODS[method], folder, few=True, **needs)
    assert seen == {"joined", "refused"}


def check_outcomes(kind, values, directory, *, few, **run):
    """Compare what a server receives from sites with different data, for values of settings.

    Returns the kinds of outcomes.
    """
    valid, broken = (kind.few, kind.broken[:1]) if few else (kind.valid, kind.broken)
    sites = {each: site(directory / each.__name__, each) for each in (*valid, *broken)}
    seen = set()
    for name in values:
        for value in values[name]:
            chosen = {**run, name: value}
            found = {each: outcome(at, None, kind, **chosen) for each, at in sites.items()}
            first, last = found[valid[0]], found[broken[0]]
            assert all(found[each] == first for each in valid), (name, value, found)
            assert all(found[each] == last for each in broken), (name, value, found)
            assert last in (first, READ_FAULT), (name, value, found)
            seen.add("joined" if isinstance(first, dict) else "refused")
    return seen


def reply(folder, node=None, **run):
    """Return a round's visible parts: kind of the reply, names, shapes, and exact scalars."""
    client = joined(folder, node, **run)
    inner = client._client
    model = inner.build_model().state_dict()
    weights = {f"weights/{name}": value.numpy() for name, value in model.items()}
    told = weights if inner.run.method == "fedavg" else {"asked": np.arange(20, dtype=np.uint8)}
    message = encode(Envelope("run", inner.run.method, 1, "server"), Knowledge(told))
    tensors, count, said = client.fit(message, {"evaluate": True})
    _, tested, scores = client.evaluate(message, {})
    shapes = [(each.dtype, each.size if each.dtype == np.uint8 else each.shape) for each in tensors]
    return shapes, count, said, tested, scores


ROUNDS = (
    {"metrics": "auc,macro-f1,test-loss,recall", "training.batch-size": 1000},
    {"privacy.delta": 0.03, "data.labeled-alpha": 0.5, "data.min-labeled": 30},
)


@pytest.mark.parametrize("run", ROUNDS)
def test_round_reveals_no_sample(run, tmp_path):
    shown = []
    for each in (blank, other_class, outlier):
        folder = site(tmp_path / each.__name__, each)
        shown.append(reply(folder, {"state-dir": str(tmp_path / f"s-{each.__name__}")}, **run))
    assert "error" not in shown[0][2]
    assert shown[0][1] == 2
    assert all(each == shown[0] for each in shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SETTINGS if not n.startswith(("engine.", "wire."))])
def test_no_setting_reveals_a_sample_in_a_round(name, tmp_path):
    sites = {each: site(tmp_path / each.__name__, each) for each in PRIVATE.valid}
    for k, value in enumerate(SETTINGS[name]):
        if not isinstance(outcome(sites[blank], **{name: value}), dict):
            continue
        shown = []
        for each, folder in sites.items():
            node = {"state-dir": str(tmp_path / f"s-{k}-{each.__name__}")}
            try:
                shown.append(reply(folder, node, **{name: value}))
            except Exception as error:
                shown.append((type(error), str(error)))
        assert all(each == shown[0] for each in shown), (name, value)


# Rounds with sites that have peers


class SiteProxy(DirectProxy):
    """Proxy for a deployed site in this process, which records what the site sends."""

    def __init__(self, folder, name, run, state):
        super().__init__(name)
        own = {"data": f"npz:{folder}", "name": name, "max-model-bytes": 10**8, "max-epochs": 10}
        own["state-dir"] = str(state / name)
        self._own, self._run, self.sent = {**own, **peers_node(folder, name)}, run, []

    def call(self, name, instruction, timeout):
        client = client_fn(Context(0, 0, self._own, RecordDict(), self._run))
        result = getattr(client, name)(instruction)
        self.sent.append((name, visible(result)))
        return result


def visible(result):
    """Return all parts of a message, but only the sizes of masked vectors and of shares."""
    if isinstance(result, EvaluateRes):
        return result.status, result.loss, result.num_examples, result.metrics
    if isinstance(result, FitRes):
        knowledge = reply_of(result) if result.parameters.tensors else Knowledge()
        shapes = {name: (v.shape, v.dtype) for name, v in knowledge.tensors.items()}
        return result.status, result.num_examples, result.metrics, shapes, knowledge.scalars
    said = result.properties.items()
    return result.status, {k: len(v) if isinstance(v, bytes) else v for k, v in said}


def transcript(folders, state, rounds=2, /, **run):
    """Return everything that the first of three sites sends in some rounds, and its reveals.

    If the server or a site refuses the run, also returns the error. The server waits neither for
    further clients nor for less than a minute, whatever it tells the sites.
    """
    run = {"method": "fedavg", "models.pool": "mlp", **PEERS.run, **run}
    patient = {"clients": 3, "engine.join-timeout": 60.0, "engine.min-clients": 0}
    pairs = zip(folders, SITES, strict=True)
    proxies = [SiteProxy(folder, name, run, state) for folder, name in pairs]
    try:
        config = resolve_flower({**run, **patient})
        for proxy in proxies:  # Otherwise, the server would wait for a site that refuses the run.
            proxy.call("get_properties", GetPropertiesIns({}), None)
        (state / "server").mkdir(parents=True)
        server = Server(config, state / "server", proxies=proxies)
        for round in range(1, rounds + 1):
            server.play(round)
            server.close(round)
    except Exception as error:
        return proxies[0].sent, f"{type(error).__name__}: {error}".replace(str(state), "")
    return proxies[0].sent, ""


def transcripts(directory, changes, rounds=2, **run):
    """Return the first site's transcript for each dataset; the other sites' data is the same."""
    others = [site(directory / name, fewer_rows) for name in SITES[1:]]
    shown = []
    for change in changes:
        first = site(directory / change.__name__, change)
        state = directory / f"state-{change.__name__}"
        shown.append(transcript([first, *others], state, rounds, **run))
        close_clients()
    return shown


def test_tested_sites_complete_a_sum(tmp_path):
    ((sent, error),) = transcripts(tmp_path, [blank], method="felo")
    assert not error
    assert Counter(name for name, _ in sent) == {"get_properties": 4, "fit": 2, "evaluate": 2}
    replies = [each for name, each in sent if name == "fit"]
    assert all(len(shapes) == 6 for *_, shapes, _ in replies), "three tensors for two lanes"


PLAIN_METHODS = ("fedavg", "felo", "fedmd")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in PLAIN_METHODS else [pytest.mark.slow])
        for name, _ in PEERS.methods()
    ],
)
def test_no_message_of_a_site_with_peers_depends_on_its_samples(method, tmp_path):
    needs = dict(PEERS.methods())[method]
    first, *others = transcripts(tmp_path, PEERS.few, method=method, **needs)
    assert all(each == first for each in others)
    if method != "fedsa":  # It needs a pretrained encoder.
        assert {name for name, _ in first[0]} == {"get_properties", "fit", "evaluate"}
        assert "error" not in str(first[0])
        assert not first[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(("fedavg", name) for name in SETTINGS if not name.startswith("engine.track")),
        *((method, name) for method, _ in PEERS.methods() for name in OF_METHODS[method]),
    ],
)
def test_no_setting_makes_a_message_of_a_site_with_peers_depend_on_its_samples(
    method, name, tmp_path
):
    values = OF_METHODS[method] if name in OF_METHODS[method] else SETTINGS
    tried = values[name]
    if name.endswith(LONG):  # Larger values only take longer.
        tried = [value for value in tried if not isinstance(value, int) or value < 10]
    for k, value in enumerate(tried):
        (directory := tmp_path / str(k)).mkdir()
        run = {"method": method, **dict(PEERS.methods())[method], name: value}
        first, *others = transcripts(directory, PEERS.few, 1, **run)
        assert all(each == first for each in others), (name, value)


# The attacks


@pytest.mark.parametrize(
    "run",
    [
        {"data.test-fraction": 0.9999},
        {"data.labeled-alpha": 0.5, "data.min-labeled": 1000},
        {"data.max-bytes": 1},
        {"models.num-classes": 5},
        {"models.num-classes": 9},
    ],
    ids=lambda run: next(iter(run)),
)
def test_errors_of_a_site_with_peers_reveal_no_size_or_classes(run, tmp_path):
    changes = (blank, other_class, more_rows, fewer_rows)
    folders = [site(tmp_path / each.__name__, each) for each in changes]
    seen = [outcome(folder, None, PEERS, **run) for folder in folders]
    assert all(each == seen[0] for each in seen)
    if "models.num-classes" in run:
        assert "expected 10 as declared by this site" in seen[0][1]
    else:
        assert seen[0]["samples"] == 2
        assert seen[0]["classes"] == 10


def test_size_of_a_class_is_not_revealed_by_bisection(tmp_path):
    """At first, the site has 7 samples of class 0, and its own limit is 1."""
    shown = []
    for k, limit in enumerate((1, 7, 8, 10_000)):
        (folder := tmp_path / str(k)).mkdir()
        run = {"method": "fedproto", "engine.min-samples-per-class": limit}
        shown += transcripts(folder, [blank, more_rows], 1, **run)
    assert all(each == shown[0] for each in shown)
    (reply,) = [each for name, each in shown[0][0] if name == "fit"]
    assert "error" not in reply[2]
    assert set(reply[3]) == {"masked/0", "shares/0", "commitment/0"}, (
        "the site does not refuse the sum"
    )


def test_site_without_enough_samples_of_a_class_that_it_lists_joins_no_run(tmp_path, caplog):
    """Which class it is, and which method and settings the run has, makes no difference."""

    def without(label):
        return lambda x, y: np.put(y, np.flatnonzero(y == label)[1:], 8)

    folders = [site(tmp_path / str(label), without(label)) for label in (0, 3)]
    plenty = site(tmp_path / "plenty", other_class)
    node = {"min-samples-per-class": 3}
    for run in ({}, {"method": "felo"}, {"engine.min-samples-per-class": 2}, {"seed": 7}):
        assert isinstance(outcome(plenty, node, PEERS, **run), dict)
        assert [outcome(each, node, PEERS, **run) for each in folders] == [READ_FAULT] * 2
    for label in (0, 3):
        assert re.search(f"lists for site-a, got [01] of class {label}. List only", caplog.text)


def test_noise_hides_classes_without_samples_so_a_site_with_a_budget_may_list_them(tmp_path):
    """Without a budget of the site, a server could choose a noise that hides nothing."""
    folder = site(tmp_path / "site", lambda x, y: np.put(y, np.flatnonzero(y == 0), 8))
    assert outcome(folder, None, PEERS) == READ_FAULT
    noisy = {"privacy.epsilon": 8.0}
    assert outcome(folder, None, PEERS, **noisy) == READ_FAULT
    budget = {"privacy": "epsilon=80 delta=1e-5"}
    assert isinstance(outcome(folder, budget, PEERS, **noisy), dict)


@pytest.mark.parametrize(("lr", "scale"), [(1e-44, 1.7e10), (0.1, 1e12)])
def test_site_with_peers_replies_even_if_training_diverges(lr, scale, tmp_path, caplog):
    """Otherwise, a server could choose weights that diverge if a class has many samples.

    With the first setting, the loss overflows, but the weights do not change.
    """
    folder = site(tmp_path / "site", more_rows)
    run = {"training.lr": lr, "training.optimizer": "sgd", "models.pool": "mlp2"}
    client = joined(folder, None, PEERS, **run)
    before = client._client.build_model().state_dict()
    weights = {f"weights/{k}": np.full(v.shape, scale, np.float32) for k, v in before.items()}
    weights["weights/classifier.weight"][::2] *= -1
    cohort = {"nonce": bytes(16).hex(), "cohorts": {"0": list(SITES)}}
    for number in (1, 2):
        message = encode(Envelope("run", "fedavg", number, "server"), Knowledge(weights))
        told = {"evaluate": False, REQUEST: json.dumps(cohort)}
        tensors, count, said = client.fit(message, told)
        assert "error" not in said
        assert count == 2
        assert tensors
    assert "training loss inf" in caplog.text or "diverged" in caplog.text
    client._client.state.restore("run", before=3)
    for value in client._client.state.models["private"].state_dict().values():
        assert value.isfinite().all()


def test_epsilon_and_delta_do_not_reveal_the_rows_of_a_site_with_peers(tmp_path, caplog):
    """The epsilon of a run depends on the sampling rate, and delta has a limit of 1 / rows."""
    run = {"privacy.epsilon": 8.0, "privacy.delta": 1 / 61}
    shown = transcripts(tmp_path, PEERS.few, 1, **run)
    assert all(each == shown[0] for each in shown)
    (reply,) = [each for name, each in shown[0][0] if name == "fit"]
    steps = [
        Release(joined(tmp_path / "blank", None, PEERS, **run)._client.privacy.noise.gradients)
    ]
    assert 0 < epsilon_of(steps, 1 / 61) < reply[2]["epsilon"] <= 8.0
    folders = [tmp_path / each.__name__ for each in PEERS.few]
    seen = [outcome(each, None, PEERS, **{**run, "privacy.delta": 1 / 59}) for each in folders]
    assert seen == [READ_FAULT_OF_DELTA] * len(folders)
    assert "'privacy.delta' must be below 1 / samples = 0.017 for 60 samples" in caplog.text


def few_or_many(count):
    """Return a change of a dataset that repeats or removes rows, until it has `count` rows."""

    def change(x, y):
        rows = np.arange(count) % ROWS
        return x[rows], y[rows]

    change.__name__ = f"rows-{count}"
    return change


NEARLY_NONE = {"privacy.delta": 1e-9, "privacy.epsilon": 0.0125047, "rounds": 20}
"""Budget for 50 steps with the maximum noise; one step consumes 0.01250467546."""
NOISY = [
    {"privacy.epsilon": 8.0},
    NEARLY_NONE,
    {**NEARLY_NONE, "rounds": 1000},
    {**NEARLY_NONE, "privacy.epsilon": 0.0125046},
]


def answers(directory, count, declared, run):
    """Return what a server receives in a round from a site with `count` rows.

    The result contains the error with which the site does not join the run, or its messages.
    """
    changes = [few_or_many(count), fewer_rows, fewer_rows]
    folders = [
        site(directory / f"{count}" / name, change, f"{DECLARED}test-fraction = 0.05\n{rows}")
        for name, change, rows in zip(SITES, changes, (declared, "rows = 60\n", "rows = 60\n"),
                                      strict=True)
    ]  # fmt: skip
    try:
        run = {"training.batch-size": 32, "training.local-epochs": 1, **run}
        return transcript(folders, directory / f"state-{count}", 1, **run)
    finally:
        close_clients()


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param("", id="undeclared"),
        pytest.param("rows = 60\n", id="declared", marks=pytest.mark.slow),
    ],
)
def test_number_of_rows_does_not_change_accepted_settings(declared, tmp_path):
    """A server could otherwise find out the number of rows by bisection over settings."""
    accepted, refused = [], []
    for k, run in enumerate(NOISY):
        (directory := tmp_path / str(k)).mkdir()
        few, many = (answers(directory, count, declared, run) for count in (43, 4300))
        assert few == many, run
        fits = [each for name, each in few[0] if name == "fit"]
        is_accepted = not few[1] and "error" not in fits[0][2]
        (accepted if is_accepted else refused).append(few[1])
    assert refused
    if declared:
        assert accepted
    else:
        text = "site): rows: not found, expected the public approximate number of training samples"
        assert not accepted
        assert all(text in error for error in refused)


@pytest.fixture
def public(tmp_path):
    """A public set that the site allows runs to read, with a chosen first row."""

    def written(first):
        folder = tmp_path / "public"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "train").mkdir(parents=True)
        rng = np.random.default_rng(5)
        x = rng.random((20, 8, 8), dtype=np.float32)
        x[0] = first
        for part in ("train", "test"):
            (folder / part).mkdir(exist_ok=True)
            np.savez(folder / part / "0.npz", x=x, y=np.arange(20) % 10)
        return folder

    return written


def test_presence_of_an_image_is_not_revealed(tmp_path, public, caplog):
    folder, seen = site(tmp_path / "site"), []
    for first in (arrays()[0][3], np.full((8, 8), 0.5)):
        place = public(first)
        close_clients()
        run = {"method": "fedmd", "data.public-dataset": f"npz:{place}"}
        node = {"allow-paths": str(place), "state-dir": str(tmp_path / f"state-{len(seen)}")}
        seen.append(reply(folder, node, **run))
    assert seen[0] == seen[1]
    assert "error" not in seen[0][2]
    assert "1 of" in caplog.text
    assert "samples of site-a" in caplog.text, "the site's own log says so"


def test_server_cannot_show_two_sites_different_public_sets_unnoticed(tmp_path):
    """A site may permit several directories, and runs with other `data.data-dir` have one key."""
    sites = [site(tmp_path / name, change) for name, change in (("a", blank), ("b", more_rows))]
    places = [tmp_path / "data-1", tmp_path / "data-2"]
    rng, seen = np.random.default_rng(5), []
    for place in places:
        for part in ("train", "test"):
            (place / part).mkdir(parents=True)
            x = rng.random((20, 8, 8), dtype=np.float32)
            np.savez(place / part / "0.npz", x=x, y=np.arange(20) % 10)
    node = {"allow-paths": ",".join(map(str, places))}
    for place in places:
        run = {"method": "fedmd", "data.public-dataset": f"npz:{place}"}
        first, second = (outcome(folder, node, **run)["public"] for folder in sites)
        assert first == second, "the digest does not depend on the site's samples"
        seen.append(first)
        close_clients()
    assert len(seen[0]) == len(seen[1]) == 16
    assert seen[0] != seen[1]
    assert outcome(sites[0], node)["public"] == "", "fedavg has no public set"


def test_presence_of_a_class_is_not_revealed(tmp_path):
    without, has = site(tmp_path / "a", blank), site(tmp_path / "b", other_class)
    for number in (2, 8, 9, 10, 11):
        run = {"models.num-classes": number}
        assert outcome(without, **run) == outcome(has, **run)
    kind, text = outcome(has, **{"models.num-classes": 9})
    assert kind == "SettingsError"
    assert "'models.num-classes': expected 10 as declared by this site, got 9" in text


def test_size_is_not_revealed_by_bisection(tmp_path):
    folder = site(tmp_path / "site")
    size = ROWS * 8 * 8 * 4 + ROWS * 8
    sizes = (1, size // 2, size - 1, size, size + 1, 2 * size)
    seen = [outcome(folder, **{"data.max-bytes": each}) for each in sizes]
    assert all(each == seen[0] for each in seen)
    assert isinstance(seen[0], dict)
    small = outcome(folder, {"max-data-bytes": size - 1}, **{"data.max-bytes": 2 * size})
    assert small == READ_FAULT, "the site's own limit holds"


# Other layouts


def tree(folder, extra=""):
    """Write a tree of gray images of two classes; `extra` changes one file."""
    for name in ("cat", "dog"):
        (folder / "train" / name).mkdir(parents=True)
        for k in range(10):
            pixels = np.random.default_rng(k).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "train" / name / f"{k}.png")
    target = folder / "train" / "cat" / "0.png"
    if extra == "color":
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(target)
    if extra == "class":
        (folder / "train" / "cow").mkdir()
        target.rename(folder / "train" / "cow" / "0.png")
    if extra == "size":
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(target)
    (folder / "classes.txt").write_text("cat\ncow\ndog\n")
    (folder / "site.toml").write_text("shape = [1, 8, 8]\n")
    return folder


@pytest.mark.parametrize("run", [{}, {"data.image-size": 16}, {"data.max-bytes": 1280}])
def test_errors_about_images_reveal_no_file(run, tmp_path):
    seen = [
        outcome(tree(tmp_path / (e or "plain"), e), form="imagefolder", **run)
        for e in ("", "color", "class", "size")
    ]
    assert seen[0]["classes"] == 3
    assert seen[0]["shape"] == "1,8,8"
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("run", [{}, {"data.label-column": "9"}, {"data.vocabulary": 64}])
def test_errors_about_texts_reveal_no_row(run, tmp_path):
    seen = []
    for last in ("a word,a", "one more,b", f"{'long ' * 400},c"):
        folder = tmp_path / last[:3]
        folder.mkdir()
        rows = [*(f"some words,{'ab'[k % 2]}" for k in range(30)), last]
        (folder / "train.csv").write_text("\n".join(["text,label", *rows]))
        (folder / "classes.txt").write_text("a\nb\nc\n")
        (folder / "site.toml").write_text("num-classes = 3\n")
        seen.append(outcome(folder, form="text", **{"models.pool": "text-bag", **run}))
    assert all(each == seen[0] for each in seen)
    if "data.vocabulary" in run:
        assert "expected 8192 as declared by this site" in seen[0][1]
    else:
        assert seen[0]["classes"] == 3


# What a site declares


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "site.toml: num-classes: expected an integer from 2 to 65536, got 0"),
        ("num-classes = 10", "site.toml: shape: expected the shape of a sample, such as"),
        ("num-classes = 10\nshape = [-1]", r"site.toml: shape': expected .* got \[-1\]"),
        ("num-classes = true\nshape = [8]", "num-classes': expected integer .* got True"),
        ("classes = 10", "site.toml: classes: unknown setting, expected one of num-classes, shape"),
        ("test-fraction = 2", "site.toml: data.test-fraction': expected number"),
        ("num-classes =", "site.toml: not valid TOML"),
    ],
)
def test_invalid_declaration_raises(text, message, tmp_path):
    site(tmp_path / "site", declared=text)
    with pytest.raises((DataError, SettingsError)) as caught:
        Declaration.from_files(f"npz:{tmp_path / 'site'}", 10**6)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_declaration_raises_with_an_example(kind, tmp_path, caplog):
    folder = site(tmp_path / "site")
    (folder / "site.toml").unlink()
    fault, text = outcome(folder, None, kind)
    assert fault == "DataError"
    assert text == (
        "(a path of this site): file not found. A site with 'peers' or 'privacy' declares its data "
        "in site.toml, for example with the lines 'num-classes = 10' and 'shape = [3, 32, 32]' "
        "(Privacy, 'Declaration of a private site')."
    )
    assert f"{folder / 'site.toml'}: file not found. A site with" in caplog.text


def test_declared_shape_must_match_the_data(tmp_path, caplog):
    folder = site(tmp_path / "site", declared=DECLARED.replace("[1, 8, 8]", "[1, 4, 4]"))
    assert outcome(folder) == READ_FAULT
    assert (
        "site.toml: shape: expected the shape of the data, [1, 8, 8], got [1, 4, 4]" in caplog.text
    )


def test_settings_of_a_run_do_not_choose_the_test_split(tmp_path):
    folder = site(tmp_path / "site", declared=f"{DECLARED}test-fraction = 0.5\n")
    for run in ({}, {"seed": 7}, {"data.test-fraction": 0.1}):
        inner = joined(folder, **run)._client
        assert len(inner.y) == ROWS // 2
        assert len(inner.unlabeled) == 0
        rows = inner.samples.own.x[:, 0].numpy()
        if not run:
            first = rows
        assert np.array_equal(rows, first)


def test_log_of_a_site_lists_differing_settings(tmp_path, caplog):
    folder = site(tmp_path / "site", declared=f"{DECLARED}test-fraction = 0.5\n")
    run = {"data.image-size": 16, "data.test-fraction": 0.1, "data.vocabulary": 64}
    with caplog.at_level("INFO", "fedhet"):
        joined(folder, **run)
    said = [each for each in caplog.messages if " is ignored, " in each]
    assert len(said) == 3
    for name, value in run.items():
        reason = f"because {folder / 'site.toml'} declares another value"
        assert f"the run's {name} = {value!r} is ignored, {reason}" in said


@pytest.mark.parametrize("kind", ["table", "text", "signal"])
def test_run_for_another_kind_of_samples_raises(kind, tmp_path):
    kinds = {"data.sample-kind": kind, "models.pool": "text-bag" if kind == "text" else "mlp"}
    fault, text = outcome(site(tmp_path / "site"), **kinds)
    assert fault == "SettingsError"
    assert f"'data.sample-kind': expected 'image' as declared by this site, got '{kind}'" in text


SCHEMA = """
target = "label"
classes = ["a", "b", "c"]
max_unknown = 0.2
[columns.size]
type = "number"
mean = 3.0
deviation = 2.0
optional = false
"""


def test_table_with_a_schema_needs_no_other_declaration(tmp_path, caplog):
    """Valid rows reveal nothing; a wrong column is refused with the same message as arrays."""
    seen = []
    for last in ("3,a", "-1e9,b", "other,a"):
        folder = tmp_path / last[:2]
        folder.mkdir()
        rows = [*(f"{k % 7},{'ab'[k % 2]}" for k in range(30)), last]
        (folder / "train.csv").write_text("\n".join(["size,label", *rows]))
        (folder / "schema.toml").write_text(SCHEMA)
        seen.append(outcome(folder, form="table", **{"models.pool": "mlp"}))
    assert (seen[0]["classes"], seen[0]["shape"]) == (3, "1")
    assert seen[1] == seen[0]
    assert seen[2] == READ_FAULT
    assert "size" in caplog.text


def test_class_names_never_come_from_directories(tmp_path, caplog):
    folder = tree(tmp_path / "site")
    (folder / "classes.txt").unlink()
    (folder / "site.toml").write_text("num-classes = 2\nshape = [1, 8, 8]\n")
    assert outcome(folder, form="imagefolder") == READ_FAULT
    assert "cat" in caplog.text


def test_site_that_is_not_private_is_read_as_the_run_says(tmp_path):
    folder = site(tmp_path / "site")
    run = {"privacy.epsilon": 0.0, "models.num-classes": 9, "data.test-fraction": 0.5}
    inner = joined(folder, {"privacy": ""}, **run)._client
    assert inner.info.classes == 9
    assert len(inner.y) == ROWS // 2


@pytest.mark.parametrize("kind", KINDS)
def test_private_run_naming_the_site_data_raises(kind, tmp_path):
    """If private samples became public data, predictions on them would be sent."""
    folder = site(tmp_path / "site")
    for place in (folder, folder / "train", tmp_path):
        for setting in ("data.public-dataset", "data.dataset"):
            node = {"data": f"npz:{folder}", "name": "a", "allow-paths": str(tmp_path)}
            run = {"method": "fedmd", setting: f"npz:{place}"}
            permitted(node, run)
            for own, switch in ((node, kind.run), ({**node, **kind.node(folder)}, {})):
                with pytest.raises(SettingsError, match="node-config"):
                    permitted(own, {**run, **switch})


def test_site_warns_of_runs_without_privacy_that_split_its_data_otherwise(tmp_path, caplog):
    folder = site(tmp_path / "site")
    run = {"privacy.epsilon": 0.0, "models.num-classes": 10, "seed": 3, "data.test-fraction": 0.5}
    joined(folder, {"privacy": ""}, **run)._client.privacy.begin("open", 1)
    joined(folder)._client.privacy.begin("private", 1)
    said = [each for each in caplog.messages if "no privacy guarantee" in each]
    assert len(said) == 1
    assert "site-a: run private has no privacy guarantee" in said[0]
    assert "used this site's data: open." in said[0]


@pytest.mark.parametrize("method", ["fedmd", "cofed"])
def test_generated_public_samples_would_publish_private_values(method):
    run = {"method": method, "data.public-dataset": "generated", "data.public-samples": 10}
    resolve({**run, "models.pool": ["mlp"], "data.dataset": "adult:/x"})
    with pytest.raises(SettingsError, match="generated"):
        resolve({**run, "models.pool": ["mlp"], "data.dataset": "adult:/x", "privacy.epsilon": 8.0})


def test_budget_needs_data_that_the_run_does_not_choose():
    node = build(NodeSettings, {"partition-id": 0, "privacy": "epsilon=8"}, prefix="node-config ")
    run = resolve({"method": "fedavg", "models.pool": "mlp", "privacy.epsilon": 8.0})
    with pytest.raises(SettingsError):
        within_limits(run, node)


# The number of rows


def observed(folder, state, rows, rounds=2, declared="", **run):
    """Return all values that a server and the ledger see of a site with `rows` rows.

    The result contains the metrics of each round, including the round in which the budget is
    exhausted, and the releases. The shapes of all tensors are also part of the result.
    """
    folder.mkdir()
    rng = np.random.default_rng(rows)
    np.savez(
        folder / "train.npz", x=rng.random((rows, 8, 8), dtype=np.float32), y=np.arange(rows) % 9
    )
    (folder / "site.toml").write_text(f"{DECLARED}test-fraction = 0.1\n{declared}")
    node = {"state-dir": str(state), **run.pop("node", {})}
    settings = {"method": "felo", "training.batch-size": 16, "rounds": 2, **run}
    client = joined(folder, node, **settings)
    seen: list = [client.get_properties({})]
    for number in range(1, rounds + 1):
        envelope = Envelope("run", settings["method"], number, "server")
        arrays, count, metrics = client.fit(encode(envelope, Knowledge()), {})
        seen.append((len(arrays) > 0, count, dict(metrics)))
    releases = [entry.release for entry in Ledger(state, "site-a").entries()]
    assert len(releases) >= 2
    close_clients()
    return seen, releases


def without_scores(seen):
    """Return what a server sees except for scores on public samples, which noised models give."""
    described, *rounds = seen
    kept = [
        (replied, count, {k: v for k, v in metrics.items() if ".common." not in k})
        for replied, count, metrics in rounds
    ]
    return described, kept


@pytest.mark.parametrize(
    ("declared", "numbers"),
    [("rows = 100\n", (40, 100, 260)), ("", (72, 85, 140))],
    ids=["declared", "power of two"],
)
def test_no_reply_reveals_the_number_of_rows(declared, numbers, tmp_path):
    """Without `rows` in site.toml, 64 to 127 training rows give the same noise and epsilon.

    A tenth of the rows are test samples. The third round exceeds the budget of the run.
    """
    found = [
        observed(tmp_path / f"site-{rows}", tmp_path / f"state-{rows}", rows, 3, declared)
        for rows in numbers
    ]
    seen, releases = without_scores(found[0][0]), found[0][1]
    assert [replied for replied, _, _ in seen[1]] == [True, True, False]
    epsilons = [metrics["epsilon"] for replied, _, metrics in seen[1] if replied]
    assert 0 < epsilons[0] < epsilons[1] <= 8
    assert seen[1][2][2]["spent"] is True
    for other, its_releases in found[1:]:
        assert without_scores(other) == seen
        assert its_releases == releases


def test_budget_of_a_site_is_exhausted_in_the_same_round_for_each_number_of_rows(tmp_path):
    """The noise is fixed, so only the budget determines the number of rounds."""
    fixed = {"privacy.epsilon": 0.0, "privacy.noise-multiplier": 1.0, "privacy.class-noise": 8.0}
    found = [
        observed(
            tmp_path / f"site-{rows}", tmp_path / f"state-{rows}", rows, 5,
            node={"privacy": "epsilon=6 delta=1e-5"}, **fixed,
        )
        for rows in (72, 100, 140)
    ]  # fmt: skip
    rounds = [[replied for replied, _, _ in without_scores(seen)[1]] for seen, _ in found]
    assert True in rounds[0]
    assert False in rounds[0]
    assert rounds[0] == rounds[1] == rounds[2]
    messages = [[metrics.get("error") for _, _, metrics in seen[1:]] for seen, _ in found]
    assert messages[0] == messages[1] == messages[2]


def test_settings_of_a_run_do_not_test_the_number_of_rows(tmp_path):
    """A server could otherwise search for the delta at which a site with 1 / delta rows fails."""
    for rows, declared in ((72, ""), (140, ""), (30, "rows = 90\n"), (300, "rows = 90\n")):
        folder = tmp_path / f"{rows}"
        folder.mkdir()
        x = np.random.default_rng(0).random((rows, 8, 8), dtype=np.float32)
        np.savez(folder / "train.npz", x=x, y=np.arange(rows) % 9)
        (folder / "site.toml").write_text(f"{DECLARED}test-fraction = 0.1\n{declared}")
        low = outcome(folder, {"privacy": ""}, **{"privacy.delta": 1 / 60 if declared else 1 / 63})
        high = outcome(folder, {"privacy": ""}, **{"privacy.delta": 1 / 129})
        expected = 90 if declared else 64
        assert low[0] in ("PrivacyError", "StateError"), low
        assert "samples = " not in str(low) or f"for {expected} samples" in low[1]
        assert high["samples"] == 2


def test_no_fraction_that_a_run_holds_out_changes_the_accounted_rows(tmp_path):
    """A server could otherwise search for the fraction at which the power of two changes."""
    folder = tmp_path / "site"
    folder.mkdir()
    x = np.random.default_rng(0).random((80, 8, 8), dtype=np.float32)
    np.savez(folder / "train.npz", x=x, y=np.arange(80) % 9)
    (folder / "site.toml").write_text(f"{DECLARED}test-fraction = 0.1\n")
    run = {"method": "fedtype", "fedtype.backward": "symmetric", "fedtype.labels": "all"}
    client = joined(folder, {"privacy": ""}, **run)._client
    before = client.privacy.plan
    client.samples.own = client.samples.own.take(torch.arange(40))
    assert client.privacy.plan == before
    held = outcome(folder, {"privacy": ""}, **run, **{"fedtype.calibrate-on": "held"})
    assert "expected training with 'privacy.epsilon'" in held[1]


def test_batches_of_a_site_have_the_declared_rate_and_number(tmp_path):
    """The accounting uses the rate with which rows are drawn, so it holds for any declaration."""
    noise = Noise(1.0)
    for rows in (50, 400):
        model = build_model("mlp", (1, 8, 8), 3, seed=0).train()
        plain = optimization_for(model.parameters(), TrainingSettings(), CPU)
        with dp_sgd(plain, [model], noise.gradients, 1.0, 20, rows=100) as private:
            batches = [
                each
                for _ in range(60)
                for each in private.batches(rows, 20, torch.Generator(), CPU.device)
            ]
        assert len(batches) == 60 * 5
        mean = np.mean([len(each) for each in batches])
        assert mean == pytest.approx(rows * 0.2, abs=4 * (rows * 0.16 / 300) ** 0.5)
        assert max(int(each.max()) for each in batches if len(each)) == rows - 1


@pytest.mark.parametrize("value", ["1", "0", "-5", "2.5", "true", '"many"', "10000000000000"])
def test_declared_number_of_rows_is_an_integer(value, tmp_path):
    folder = site(tmp_path / "site", declared=f"{DECLARED}rows = {value}\n")
    with pytest.raises(SettingsError, match=r"site\.toml: rows.*2 and <= 1000"):
        Declaration.from_files(f"npz:{folder}", 10**9)


def test_site_warns_in_its_own_log_if_the_declared_number_is_far_from_the_data(tmp_path, caplog):
    for number, warns in ((40, False), (80, False), (10, True), (500, True)):
        folder = site(tmp_path / f"{number}", declared=f"{DECLARED}rows = {number}\n")
        caplog.clear()
        assert outcome(folder)["samples"] == 2
        close_clients()
        said = [each for each in caplog.messages if "training samples. Batches contain" in each]
        assert len(said) == warns
