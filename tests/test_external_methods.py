"""Custom methods: the examples of docs/own-method.md and examples/mymethods, as a package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from federation import SMALL, Server, client_of, settings
from rounds import reply_of, state_of

from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.methods.registry import find_method

ROOT = Path(__file__).parent.parent
QUICK = ["--clients", "2", "--rounds", "2", "--models", "mlp,cnn2", "--set", "local-epochs=1"]
QUICK += ["--set", "max-samples=200", "--set", "min-samples=20", "--set", "prototypes.pull=0.5"]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A directory with the package `mymethods`, as if its author had pasted the page."""
    page = (ROOT / "docs" / "own-method.md").read_text()
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "mymethods").mkdir()
    code = re.search(r"```python\n(# mymethods/heads\.py\n.*?)```", page, re.DOTALL)
    assert code, "docs/own-method.md shows no mymethods/heads.py"
    (folder / "mymethods" / "heads.py").write_text(code[1])
    shutil.copy(ROOT / "examples" / "mymethods" / "prototypes.py", folder / "mymethods")
    return folder


def fedhet(folder, *words):
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "fedhet", *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def summary_of(folder, name, *words):
    status, said = fedhet(folder, *words, *QUICK, "--out", str(folder / name))
    assert status == 0, said
    return json.loads((folder / name / "summary.json").read_text())


@pytest.fixture(scope="module")
def inline(elsewhere):
    return summary_of(elsewhere, "inline", "run", "mymethods.prototypes", "--backend", "inline")


def test_external_method_runs_and_evaluates_its_kind(inline):
    assert inline["method"] == "mymethods.prototypes"
    assert inline["headline"] == "personal"
    kinds = inline["accuracy"]["personal"]
    assert kinds.keys() == {"private", "prototype"}
    assert all(0 < scores["mean"] <= 1 for scores in kinds.values())
    # Class means of two clients with 32 features; no model is sent.
    assert 2 * 2 * 2 * 32 * 4 < inline["bytes_up"] < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("command", [("run", "--backend", "ray"), ("deploy-local",)])
def test_ray_and_deployment_give_identical_metrics(elsewhere, inline, command):
    name = command[0] if command[0] != "run" else "ray"
    found = summary_of(elsewhere, name, command[0], "mymethods.prototypes", *command[1:])
    for part in ("accuracy", "bytes_up", "bytes_down", "models", "rounds"):
        assert found[part] == inline[part]


def test_example_that_sends_weights_averages_classifiers_and_keeps_extractors(
    elsewhere, tmp_path, monkeypatch
):
    """Clients with different models train for two rounds; NumPy averages their weights."""
    monkeypatch.syspath_prepend(str(elsewhere))
    method = "mymethods.heads"
    config = resolve({**SMALL, **settings("local", models=["mlp", "cnn2"], clients=2),
                      "method": method, "heads.feature-dim": 8})  # fmt: skip
    server, names = Server(config, tmp_path), ["classifier.bias", "classifier.weight"]
    for number in (1, 2):
        sent = {key: np.copy(value) for key, value in server.strategy.head.items()}
        assert sorted(sent) == ([] if number == 1 else names)
        instructions, replies = server.play(number)
        assert [proxy.name for proxy, _ in instructions] == ["client-0", "client-1"]
        heads, samples = [], []
        for proxy, result in replies:
            client = client_of(proxy)
            state = state_of(client.network)
            reply = reply_of(result).tensors
            assert sorted(reply) == [f"head/{name}" for name in names]
            assert all(np.array_equal(reply[f"head/{name}"], state[name]) for name in names)
            heads.append({name: state[name].astype(np.float64) for name in names})
            samples.append(len(client.y))
        for name in names:
            mean = np.average([head[name] for head in heads], axis=0, weights=samples)
            np.testing.assert_allclose(server.strategy.head[name], mean, rtol=1e-5, atol=1e-7)
            assert not np.array_equal(heads[0][name], heads[1][name])
    copy = server.strategy.state_dict()
    server.strategy.init()
    server.strategy.load_state_dict(copy)
    assert sorted(server.strategy.head) == names


def test_settings_of_an_external_method_are_checked_and_listed(elsewhere, call, monkeypatch):
    monkeypatch.syspath_prepend(str(elsewhere))
    status, said, _ = call("methods", "mymethods.prototypes")
    said = " ".join(said.split())
    assert status == 0
    assert "class prototypes that attract features" in said
    assert "prototypes.pull 1.0" in said
    assert "mean features of each class" in said
    for pair, fault in (
        ("prototypes.pull=-1", "'prototypes.pull': expected number >= 0"),
        ("pul=1", "did you mean 'prototypes.pull'"),
    ):
        status, _, said = call("run", "mymethods.prototypes", "--set", pair)
        assert (status, fault in " ".join(said.split())) == (2, True), said


def install(where, name, *entries):
    """Create a distribution with these entry points in fedhet's group, like pip."""
    installed = where / f"{name}-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("\n".join(["[fedhet.methods]", *entries, ""]))


def test_installed_method_is_found_by_name(elsewhere):
    install(elsewhere, "mymethods", "prototypes = mymethods.prototypes")
    status, said = fedhet(elsewhere, "methods")
    assert status == 0
    assert "prototypes class prototypes that attract features" in said
    words = ("run", "prototypes", "--backend", "inline")
    assert summary_of(elsewhere, "installed", *words)["method"] == "prototypes"


def test_broken_method_does_not_affect_others(elsewhere):
    entries = ("gone = nothere.method", "data = mymethods.prototypes")
    install(elsewhere, "broken", *entries)
    status, said = fedhet(elsewhere, "methods")
    assert status == 0
    assert "felo class-wise features" in said
    assert "not loaded: setting 'method' = 'gone': cannot import 'nothere.method'" in said
    assert (
        "not loaded: setting 'method': must not be named like the setting or settings table 'data'"
        in said
    )
    status, said = fedhet(elsewhere, "run", "felo", "--set", "nope=1")
    assert "unknown setting 'nope'" in said


@pytest.mark.usefixtures("inline", "pages_alone")
def test_baseline_uses_settings_of_an_external_method(elsewhere, call, monkeypatch):
    monkeypatch.syspath_prepend(str(elsewhere))
    config = elsewhere / "inline" / "config.toml"
    status, said, fault = call("run", "local", "--config", config, "--out", elsewhere / "baseline")
    assert status == 0, fault
    assert "local on digits: 2 clients" in said


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (
            "import nothing_like_it",
            r"cannot import 'broken0\.mine' \(.*mine\.py, line 1\): .*nothing_like_it",
        ),
        ("", "expected exactly one subclass of .*HetStrategy in broken1.mine, got none"),
        (
            "from fedhet.strategies.local import LocalStrategy",
            "expected exactly one subclass of .*HetClient in broken2.mine, got none",
        ),
        (
            "from fedhet.strategies.local import LocalStrategy\n"
            "from fedhet.strategies.felo import FeloStrategy",
            "HetStrategy in broken3.mine, got FeloStrategy, LocalStrategy",
        ),
        (
            "from fedhet.clients.local import LocalClient\n"
            "from fedhet.strategies.base import HetStrategy\n"
            "class Mine(HetStrategy):\n    pass",
            "Mine.spec must be an instance of fedhet.methods.spec.MethodSpec, got None",
        ),
    ],
)
def test_invalid_method_raises(tmp_path, monkeypatch, code, fault, request):
    package = f"broken{request.node.callspec.indices['code']}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match=fault):
        find_method(f"{package}.mine")


DECLARED = """from fedhet.clients.base import HetClient
from fedhet.methods.spec import MethodSpec
from fedhet.strategies.base import HetStrategy
from fedhet.wire.contract import Contract, ScalarField, TensorField, WeightsField
FIELD = ScalarField("steps", int, "steps")
def declared(**changes):
    return MethodSpec(**{"title": "x", "paper": "y", "headline": "personal", **changes})
class Mine(HetStrategy):
    spec = declared(replies=Contract((FIELD,)))
class MyClient(HetClient):
    pass
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('ScalarField("steps", "int")', "missing 1 required positional argument: 'help'"),
        (
            'ScalarField("steps", "int", "steps")',
            "ScalarField 'steps': 'type' must be bool, int, float, or str, got 'int'",
        ),
        ('ScalarField("steps", int, "steps", low="0")', "'low' must be int or float or None"),
        ('TensorField("a", "float23", ("P",), "a")', "'uint' or a NumPy dtype"),
        ('TensorField("a", "float32", ("P"), "a")', "TensorField 'a': 'axes' must be tuple"),
        ('WeightsField("a", True)', "WeightsField 'a': 'help' must be str, got True"),
        ("Contract((FIELD))", "Contract: 'fields' must be tuple, got ScalarField"),
        ('Contract(("steps",))', "Contract: 'fields' must be a tuple of fields, got"),
        ("Contract((FIELD, FIELD))", "Contract: duplicate field 'steps'"),
        ("declared(kinds=('private'))", "MethodSpec: 'kinds' must be tuple, got 'private'"),
        ("declared(headline='own')", "'headline' must be one of personal, common, got 'own'"),
        (
            "declared(client_model='mlp')",
            "'client_model' must be one of model, large_model, dropout_model, got 'mlp'",
        ),
        (
            "declared(model_settings={'proxy': 'cnn2'})",
            "'model_settings' must be one of model, large_model, dropout_model, got 'cnn2'",
        ),
        ("declared(replies=(FIELD,))", "MethodSpec: 'replies' must be Contract, got"),
        (
            "from pydantic import Field\n"
            "from fedhet.settings.schema import MethodSettings\n"
            "class Pull(MethodSettings):\n"
            "    pull: float = Field(1.9, lt=1, description='pull')\n"
            "declared(settings=Pull)",
            "'settings': invalid default: setting 'pull': expected number < 1, got 1.9",
        ),
        ("declared(settings=dict)", "'settings' must be a subclass of MethodSettings, got"),
        ("declared(sizes={})", "MethodSpec: 'sizes' must be a function, got {}"),
        ("declared(", "SyntaxError"),
    ],
)
def test_invalid_declaration_raises_with_its_location(tmp_path, monkeypatch, fault, said, request):
    package = f"declared{request.node.callspec.indices['fault']}"
    (tmp_path / package).mkdir()
    file = tmp_path / package / "mine.py"
    file.write_text(DECLARED)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_method(f"{package}.mine").spec.title == "x"
    (tmp_path / package / "faulty.py").write_text(f"{DECLARED}{fault}\n")
    with pytest.raises(SettingsError) as caught:
        find_method(f"{package}.faulty")
    text, line = str(caught.value), DECLARED.count("\n") + 1
    line += fault.count("\n")
    assert said in text
    assert "\n" not in text
    place = f"cannot import '{package}.faulty' ({file.with_name('faulty.py')}, line "
    assert text.startswith(f"setting 'method' = '{package}.faulty': {place}")
    number = int(re.search(r", line (\d+)\)", text)[1])
    # In a call that a function of the module makes, that function's line is the last one.
    assert number in (line, 7 if "declared(" in fault else line)


FAILING = """
from fedhet.clients.fedavg import FedAvgClient as Base
from fedhet.strategies.fedavg import FedAvgStrategy as Average

class Mine(Average):
    def aggregate(self, round, replies):
        measured = super().aggregate(round, replies)
        if round == 2:
            return RESULT
        return measured

class MyClient(Base):
    pass
"""


@pytest.fixture
def run_failing(tmp_path, monkeypatch, request, call):
    """Run a custom method whose aggregate returns an expression in round 2."""

    def run(result):
        package = f"failing_{request.node.name.rpartition('_')[2]}"
        file = tmp_path / package / "mine.py"
        file.parent.mkdir()
        file.write_text(FAILING.replace("RESULT", result))
        monkeypatch.syspath_prepend(str(tmp_path))
        words = [*QUICK[:-2], "--models=mlp", "--backend=inline", f"--out={tmp_path / 'run'}"]
        status, said, fault = call("run", f"{package}.mine", *words)
        return status, " ".join((said + fault).split()), file

    return run


def test_error_in_a_custom_strategy_has_its_location(run_failing, tmp_path):
    status, said, file = run_failing("replies[7].nothing")
    assert status == 2, said
    line = FAILING.splitlines().index("            return RESULT") + 1
    method = f"{file.parent.name}.mine"
    told = (
        f"method '{method}' failed on the server: IndexError: list index out of range ({file}, "
        f"line {line}). The run's flower.log contains the full traceback."
    )
    assert f"fedhet: {told}" in said
    assert "return replies[7].nothing" in said
    assert "fedhet/server/federation.py" not in said  # not one's own
    assert "fedhet/server/federation.py" in (tmp_path / "run" / "flower.log").read_text()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["fault"] == told


def test_aggregate_must_return_a_mapping(run_failing):
    status, said, _ = run_failing("None")
    assert status == 2
    assert "on the server: TypeError: aggregate must return a mapping, got None." in said


SLIPS = """
import torch
from fedhet.clients.base import HetClient
from fedhet.methods.spec import MethodSpec
from fedhet.strategies.base import HetStrategy
from fedhet.wire.contract import Contract, TensorField
from fedhet.wire.knowledge import Knowledge

REPLIES = Contract((TensorField("vector", "float32", (2,), "vector"),))

class MyStrategy(HetStrategy):
    spec = MethodSpec(title="mine", paper="none", headline="personal", replies=REPLIES)

    def instruct(self, round, client):
        return INSTRUCTION

    def aggregate(self, round, replies):
        return {}

class MyClient(HetClient):
    def TRAIN(self, round, knowledge):
        return REPLY
"""


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("INSTRUCTION", "None", "TypeError: instruct must return Knowledge, got None"),
        ("TRAIN", "trains", "NotImplementedError: MyClient must implement train"),
        ("REPLY", "None", "TypeError: train must return Knowledge, got None"),
        ("REPLY", "Knowledge({'vector': torch.zeros(2)})", "expected a NumPy array, got Tensor"),
    ],
    ids=["instruct", "train", "reply", "tensor"],
)
def test_error_in_a_hook_names_the_hook(
    tmp_path, monkeypatch, request, call, name, value, expected
):
    package = f"slip_{request.node.callspec.id}"
    (tmp_path / package).mkdir()
    code = SLIPS.replace(name, value)
    for other, right in (("INSTRUCTION", "Knowledge()"), ("TRAIN", "train"), ("REPLY", "None")):
        code = code.replace(f" {other}", f" {right}")
    (tmp_path / package / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*QUICK[:-2], "--models=mlp", "--backend=inline", f"--out={tmp_path / 'run'}"]
    status, said, fault = call("run", f"{package}.mine", *words)
    assert status == 2
    assert expected in " ".join((said + fault).split())


def test_undeclared_or_nonnumeric_metrics_raise(run_failing, tmp_path):
    status, said, _ = run_failing("{'gap': 0.25, 'lost': float('nan')}")
    assert status == 0, said
    assert "the metric 'gap' of the method is not declared in MethodSpec.metrics" in said
    assert "the metric 'lost' of the method is nan in round 2 and is not recorded" in said
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["method"] == {"gap": 0.25}


def test_method_named_like_a_table_raises(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "training.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="'training'"):
        find_method("taken.training")


# Methods whose messages violate their own contracts

AVERAGING = """
import numpy as np
from fedhet.base.arrays import grouped
from fedhet.clients.base import HetClient
from fedhet.methods.spec import MethodSpec, model_shapes
from fedhet.models import load_weights, to_arrays
from fedhet.strategies.base import HetStrategy
from fedhet.wire.contract import Contract, ScalarField, Sizes, WeightsField
from fedhet.wire.knowledge import Knowledge

LARGE = False
WEIGHTS = WeightsField("weights", "weights of the model", required=False)


def sizes(settings, client):
    return Sizes({}, {"weights": model_shapes(client)})


class OwnStrategy(HetStrategy):
    spec = MethodSpec(
        title="average with momentum", paper="no paper", headline="common", sizes=sizes,
        one_model=True, large_messages=LARGE, instructions=Contract((WEIGHTS,)),
        replies=Contract((WEIGHTS, ScalarField("steps", int, "steps", required=False))),
    )

    def aggregate(self, round, replies):
        models = [reply.knowledge.group("weights") for reply in replies]
        mean = {n: np.mean([each[n] for each in models], 0).astype(v.dtype)
                for n, v in models[0].items()}
        self.instruction = Knowledge(grouped("weights", self.changed(mean)))
        return {}

    def changed(self, mean):
        return mean


class OwnClient(HetClient):
    def train(self, round, knowledge):
        if weights := knowledge.group("weights"):
            load_weights(self.network, weights)
        self.fit_private(self.generator(round, "train"))
        return Knowledge(grouped("weights", to_arrays(self.network)))
"""
NETS = """
from torch import nn

def normed(shape, classes):
    features = nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.BatchNorm1d(4))
    return features, nn.Linear(4, classes)
"""


@pytest.fixture
def run_own(tmp_path, monkeypatch, call):
    """A function that runs a changed copy of `AVERAGING` as PACKAGE.mine.

    Returns the status, the output, the number of finished rounds, and the module's lines.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "normed_nets.py").write_text(NETS)

    def run(package, *changes, words=()):
        code = AVERAGING
        for old, new in changes:
            assert code.count(old) == 1
            code = code.replace(old, new)
        (tmp_path / package).mkdir()
        (tmp_path / package / "mine.py").write_text(code)
        small = ("max-samples=200", "min-samples=20", "local-epochs=1")
        common = ["--rounds=4", "--clients=2", "--models=normed_nets:normed", "--backend=inline"]
        options = [*(f"--set={each}" for each in small), *common, f"--out={tmp_path / 'run'}"]
        status, said, fault = call("run", f"{package}.mine", *options, *words)
        rounds = tmp_path / "run" / "metrics.jsonl"
        finished = len(rounds.read_text().splitlines()) if rounds.exists() else 0
        return status, " ".join((said + fault).split()), finished, code.splitlines()

    return run


INVALID = {
    "variances": (
        "{n: v - 9 if n.endswith('running_var') else v for n, v in mean.items()}",
        r"running_var: must be at least 0.0, got -\d",
    ),
    "nan": (
        "{n: v * np.nan if v.dtype == 'float32' else v for n, v in mean.items()}",
        "contains NaN or infinity",
    ),
    "shape": ("{n: v[..., None] for n, v in mean.items()}", r"expected float32 \[4, 64\], got"),
    "dtype": ("{n: v.astype(float) for n, v in mean.items()}", "got float64"),
    "name": ("{n + '_': v for n, v in mean.items()}", r"not a tensor of|: missing"),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", INVALID)
def test_invalid_instruction_ends_the_run_and_names_the_function(kind, large, run_own):
    value, fault = INVALID[kind]
    package = f"invalid_{kind}_{large}"
    changes = ("return mean", f"return {value}"), ("LARGE = False", f"LARGE = {large}")
    status, said, finished, lines = run_own(package, *changes)
    assert status == 2, said
    assert finished == 1, "the run ends before a client receives the instruction"
    assert re.search(rf"method '{package}\.mine': the instruction for client-[01] in round 2", said)
    assert "violates MethodSpec.instructions (weights = weights): weights/" in said
    assert re.search(fault, said)
    line = lines.index("    def aggregate(self, round, replies):") + 1
    assert f"Correct OwnStrategy.aggregate (mine.py, line {line})" in said
    assert "dropped" not in said


def test_invalid_instruction_for_the_evaluation_ends_the_run_in_its_round(run_own):
    hook = (
        "    def changed(self, mean):",
        "    def eval_instruction(self, round, client):\n"
        "        return Knowledge({'weight/bias': np.zeros(4, 'float32')})\n\n"
        "    def changed(self, mean):",
    )
    status, said, finished, lines = run_own("invalid_evaluation", hook)
    line = lines.index("    def eval_instruction(self, round, client):") + 1
    assert (status, finished) == (2, 0)
    assert "weight/bias: unknown field, expected one of weights; did you mean 'weights'?" in said
    assert f"OwnStrategy.eval_instruction (mine.py, line {line})" in said


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ('grouped("weightz", to_arrays(self.network))', "weightz/"),
        ('{}, {"stpes": 3}', "stpes: unknown field, expected one of steps; did you mean 'steps'?"),
    ],
)
def test_misspelled_field_of_a_reply_ends_the_run_in_round_1(fields, fault, run_own, request):
    package = f"misspelled{request.node.callspec.indices['fields']}"
    old = 'grouped("weights", to_arrays(self.network))'
    status, said, finished, lines = run_own(package, (old, fields))
    line = lines.index("    def train(self, round, knowledge):") + 1
    assert (status, finished) == (2, 0)
    assert (
        f"the reply of OwnClient.train (mine.py, line {line}) violates MethodSpec.replies" in said
    )
    assert f"of the method '{package}.mine': {fault}" in said
    assert "unknown field, expected one of " in said


@pytest.mark.parametrize(
    ("old", "new", "side"),
    [
        (
            '[reply.knowledge.group("weights") for',
            '[reply.knowledge.group("weightz") for',
            "aggreg",
        ),
        ('if weights := knowledge.group("weights")', 'if weights := knowledge.group("wigts")', "w"),
    ],
)
def test_reading_a_misspelled_field_is_an_error(old, new, side, run_own, request):
    package = f"misread{request.node.callspec.indices['old']}"
    status, said, finished, lines = run_own(package, (old, new))
    (line,) = (number for number, text in enumerate(lines, 1) if new in text)
    assert (status, finished) == (2, 0)
    assert re.search(r"unknown field, expected one of (steps, )?weights; did you mean 'w", said)
    assert f"line {line}" in said


def test_valid_custom_average_of_weights_runs(run_own):
    status, said, finished, _ = run_own("valid_average")
    assert (status, finished) == (0, 4), said


# Claims of privacy belong to one client class

CLAIMING = """
import dataclasses
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedavg import SPEC
from fedhet.strategies.fedavg import FedAvgStrategy


class MyStrategy(FedAvgStrategy):
    spec = SPEC


class MyClient(FedAvgClient):
    pass
"""
COPIED = 'dataclasses.replace(SPEC, title="a copy"{})'


@pytest.mark.parametrize(
    ("spec", "claims", "reason"),
    [
        ("SPEC", False, "declared for no client (MethodSpec.claims_for), expected {}.MyClient"),
        (COPIED.format(""), False, "declared for no client"),
        (COPIED.format(', claims_for="fedhet.clients.fedavg.FedAvgClient"'), False,
         "it is declared for the client fedhet.clients.fedavg.FedAvgClient"),
        (COPIED.format(', claims_for=f"{__name__}.MyClient"'), True, ""),
    ],
)  # fmt: skip
def test_copied_declaration_does_not_inherit_claims_of_privacy(
    spec, claims, reason, tmp_path, monkeypatch, call, request
):
    package = f"claiming{request.node.callspec.indices['spec']}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "mine.py").write_text(CLAIMING.replace("spec = SPEC", f"spec = {spec}"))
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"{package}.mine"
    found, built_in = find_method(name).spec, find_method("fedavg").spec
    assert built_in.privacy.mechanism
    assert built_in.sums.lanes[0].server == "malicious"
    status, said, _ = call("methods", name)
    said = " ".join(said.split())
    assert status == 0
    if claims:
        assert (found.privacy, found.sums) == (built_in.privacy, built_in.sums)
        assert "Privacy (`privacy.epsilon`): unsupported" not in said
        return
    assert not found.privacy.mechanism
    assert not found.sums.lanes
    reason = reason.format(name)
    assert reason in found.privacy.unsupported
    assert f"unsupported, because {found.privacy.unsupported}" in said
    for setting, value in (("epsilon", 5.0), ("secure-aggregation", True)):
        with pytest.raises(SettingsError, match="claims_for"):
            resolve({"method": name, f"privacy.{setting}": value})


def test_subclass_elsewhere_does_not_inherit_claims(tmp_path, monkeypatch):
    own = CLAIMING.replace(
        "spec = SPEC", 'spec = dataclasses.replace(SPEC, claims_for="lender.a.MyClient")'
    )
    (tmp_path / "lender").mkdir()
    (tmp_path / "lender" / "a.py").write_text(own)
    borrowing = (
        "from lender.a import MyClient as Theirs, MyStrategy as Server\n"
        "class MyStrategy(Server):\n    pass\n"
        "class MyClient(Theirs):\n    pass\n"
    )
    (tmp_path / "lender" / "b.py").write_text(borrowing)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_method("lender.a").spec.privacy.mechanism
    borrowed = find_method("lender.b").spec
    assert "lender.a.MyClient" in borrowed.privacy.unsupported
    assert "expected lender.b.MyClient" in borrowed.sums.unsupported


@pytest.mark.parametrize("defined", [("state_dict",), ("load_state_dict",), ()])
def test_strategy_must_define_both_state_hooks(defined, tmp_path, monkeypatch):
    """A misspelled method would change the results of resumed runs."""
    package = f"stateful{len(defined)}{len(''.join(defined))}"
    (tmp_path / package).mkdir()
    methods = "".join(f"    def {name}(self, *state):\n        return {{}}\n" for name in defined)
    own = CLAIMING.replace("    spec = SPEC\n", f"    spec = SPEC\n{methods}")
    (tmp_path / package / "mine.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    if not defined:
        assert find_method(f"{package}.mine").strategy.__name__ == "MyStrategy"
        return
    with pytest.raises(SettingsError, match=rf"MyStrategy in .*got only {defined[0]}"):
        find_method(f"{package}.mine")
