"""Validation samples: the split, the scores on them, and what is selected with these scores."""

import json
import logging

import numpy as np
import pytest
import torch
from federation import records, resolve, run, small, without_times
from synthetic import make, rewrite
from typer.testing import CliRunner

from fedhet import report
from fedhet.base.errors import DataError
from fedhet.base.seeding import numpy_rng
from fedhet.cli import app
from fedhet.clients.base import HetClient
from fedhet.config.resolve import complete, resolve_flower
from fedhet.config.sources import to_flower, validate
from fedhet.data.declaration import Declaration
from fedhet.data.partition import hold_out_validation
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.inference.client import open_client
from fedhet.learning.training import Evaluation
from fedhet.runs.directory import last_round
from fedhet.runs.log import Watcher
from fedhet.runs.measures import Measured, best_round, selection_means, spread
from fedhet.runs.records import Headline, RoundRecord
from fedhet.server.round import RoundState, Selection

FRACTION = "data.validation-fraction"
BASIS = "validation, 10 % of each client's training samples"


# --- the split


def table(folder, kind):
    """Write a table of 240 rows in four groups, and return the settings that read it."""
    rng = np.random.default_rng(0)
    groups = [f"g{number}" for number in rng.integers(0, 4, 240)]
    labels = {
        "classes": rng.choice(["a", "b", "c"], 240, p=[0.6, 0.3, 0.1]),
        "regression": rng.normal(5, 2, 240).round(6),
        "multi-label": rng.choice(["a", "b", "a;b", "c"], 240),
    }[kind]
    lines = [f"{x:.6f},{label},{group}" for x, label, group in zip(
        rng.random(240), labels, groups, strict=True)]  # fmt: skip
    path = folder / "rows.csv"
    path.write_text("\n".join(["x,y,group", *lines]) + "\n")
    task = {} if kind == "classes" else {"task": kind}
    return {"dataset": f"table:{path}", "target": "y", "by": "group", "clients": 4, **task}


def texts(folder):
    """Write a directory with one file of texts for each of two clients."""
    rng = np.random.default_rng(1)
    path = folder / "texts.csv"
    rows = [f"word{rng.integers(9)} word{rng.integers(9)},{'ab'[n % 2]},{'uv'[n % 3 > 0]}"
            for n in range(120)]  # fmt: skip
    path.write_text("\n".join(["text,label,person", *rows]) + "\n")
    return {"dataset": f"text:{path}", "by": "person", "clients": 2}


def files(folder):
    """Write a table for each of two clients, which is already partitioned."""
    rng = np.random.default_rng(2)
    for name in ("east", "west"):
        rows = [f"{rng.random():.6f},{'ab'[n % 2]}" for n in range(60)]
        (folder / f"{name}.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    return {"dataset": f"table:{folder}", "target": "y", "clients": 2}


BUILDERS = {
    "images": lambda folder: {"dataset": "digits", "clients": 4},
    "few classes": lambda folder: {"dataset": "digits", "clients": 4, "partition": "classes"},
    "table": lambda folder: table(folder, "classes"),
    "regression": lambda folder: table(folder, "regression"),
    "multi-label": lambda folder: table(folder, "multi-label"),
    "texts": texts,
    "files": files,
}


def strata_of(kind, y):
    """Return the stratum of each target [N], by an independent rule."""
    values = y.numpy()
    if kind == "regression":  # tenths by value
        ranks = np.argsort(np.argsort(values[:, 0], kind="stable"), kind="stable")
        sizes = [len(part) for part in np.array_split(np.arange(len(values)), 10)]
        return np.repeat(np.arange(10), sizes)[ranks]
    if kind == "multi-label":  # the client's rarest label of the row
        counts = (values == 1).sum(0)
        return np.array([min(np.flatnonzero(row == 1), key=lambda k: counts[k]) for row in values])
    return values


@pytest.mark.parametrize("kind", BUILDERS)
def test_validation_samples_are_a_stratified_part_of_the_training_samples(kind, tmp_path):
    settings = BUILDERS[kind](tmp_path)
    plain = RunData(DataSpec(**settings, validation_fraction=0.0))
    data = RunData(DataSpec(**settings, validation_fraction=0.25))
    for index in range(settings["clients"]):
        before, test, none = plain.split_rows(index)
        train, same_test, validation = data.split_rows(index)
        assert len(none) == 0
        assert np.array_equal(test, same_test)
        assert not set(train) & set(validation)
        assert np.array_equal(np.sort(np.concatenate([train, validation])), before)
        assert len(validation) == round(0.25 * len(before)) > 0
        strata = strata_of(kind, data.dataset.train.y[torch.from_numpy(before)])
        held = strata[np.isin(before, validation)]
        for stratum in np.unique(strata):
            expected = 0.25 * (strata == stratum).sum()
            assert abs((held == stratum).sum() - expected) <= 1
        client = data.client(index)
        assert torch.equal(client.validation.x, data.dataset.train.x[torch.from_numpy(validation)])
        assert torch.equal(client.train.y, data.dataset.train.y[torch.from_numpy(train)])
    assert not len(plain.client(0).validation)
    sizes = sum(len(data.split_rows(k)[2]) for k in range(settings["clients"]))
    assert data.test_samples()["validation"] == sizes
    assert "validation" not in plain.test_samples()


def test_split_depends_only_on_seed_and_client():
    strata = np.arange(200) % 5
    spec = DataSpec(validation_fraction=0.2, seed=3)

    def drawn(name="client-0", **changes):
        return hold_out_validation(strata, spec.replace(**changes), name)[1].tolist()

    first = drawn()
    np.random.seed(9)
    assert drawn() == first
    assert drawn(test_fraction=0.5, alpha=2.0) == first
    assert drawn("client-1") != first
    assert drawn(seed=4) != first
    # The literal rule: shuffle, give the rows of each class evenly spaced places, take the first.
    order = numpy_rng(3, "validation", "client-0").permutation(200)
    places = {}
    for label in range(5):
        rows = [row for row in order if strata[row] == label]
        places |= {row: (rank + 0.5) / len(rows) for rank, row in enumerate(rows)}
    assert first == sorted(sorted(order, key=places.__getitem__)[:40])


@pytest.mark.parametrize(
    ("rows", "fraction", "held"),
    [(100, 0.1, 10), (5, 0.1, 0), (6, 0.1, 1), (4, 0.9, 2), (3, 0.9, 1), (2, 0.9, 0), (1, 0.9, 0)],
)
def test_client_rounds_the_number_of_validation_samples(rows, fraction, held):
    spec = DataSpec(validation_fraction=fraction)
    train, validation = hold_out_validation(np.zeros(rows, np.int64), spec, "a")
    assert (len(train), len(validation)) == (rows - held, held)


def test_clients_without_validation_samples_raise(caplog):
    spec = DataSpec(
        dataset="digits", clients=40, partition="dirichlet", alpha=0.3, min_samples=3,
        max_samples=400, validation_fraction=0.1,
    )  # fmt: skip
    data = RunData(spec)
    without = [k for k in range(40) if not len(data.split_rows(k)[2])]
    assert 0 < len(without) < 40
    with caplog.at_level("WARNING", "fedhet"):
        data.validate()
    assert f"{len(without)} of 40 clients have no validation samples" in caplog.text
    assert f"client-{without[0]:02}" in caplog.text
    assert not len(data.client(without[0]).validation)
    with pytest.raises(DataError, match=r"validation-fraction = 0\.01"):
        RunData(spec.replace(validation_fraction=0.01)).validate()


def test_mapped_samples_are_the_samples_of_the_client(tmp_path):
    spec = DataSpec(dataset="digits", clients=3, validation_fraction=0.2)
    plain = RunData(spec)
    plain.share(tmp_path / "shared")
    mapped = RunData(spec, tmp_path / "shared")
    for index in range(3):
        own, other = plain.client(index), mapped.client(index)
        for name in ("train", "test", "validation"):
            assert torch.equal(getattr(own, name).x, getattr(other, name).x)
            assert torch.equal(getattr(own, name).y, getattr(other, name).y)


# --- sites


def site(folder, rows=80, declared=""):
    folder.mkdir()
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, 8, 8), dtype=np.uint8)
    np.savez(folder / "train.npz", x=x, y=np.arange(rows) % 4)
    (folder / "site.toml").write_text(f"num-classes = 4\nshape = [1, 8, 8]\n{declared}")
    return folder


def test_site_holds_out_validation_samples_like_a_client(tmp_path):
    folder = site(tmp_path / "a")
    spec = DataSpec(validation_fraction=0.25, test_fraction=0.2)
    data, plain = (
        site_data(f"npz:{folder}", spec=each, classes=4, name="a")
        for each in (spec, spec.replace(validation_fraction=0.0))
    )
    assert (len(data.train), len(data.test), len(data.validation)) == (48, 16, 16)
    assert torch.equal(data.test.x, plain.test.x)
    assert not len(plain.validation)
    rows = [row.numpy().tobytes() for part in (data.train, data.validation) for row in part.x]
    assert sorted(rows) == sorted(row.numpy().tobytes() for row in plain.train.x)
    _, places = hold_out_validation(plain.train.y.numpy(), spec, "a")
    assert torch.equal(data.validation.x, plain.train.x[torch.from_numpy(places)])


def test_private_site_follows_its_declaration(tmp_path, caplog):
    folder = site(tmp_path / "a", declared="validation-fraction = 0.25\n")
    declaration = Declaration.from_files(f"npz:{folder}", 10**9)
    assert len(declaration.read_data(f"npz:{folder}", "a").validation) == 16
    with caplog.at_level("INFO", "fedhet"):
        declaration.check(resolve({FRACTION: 0.1, "models.num-classes": 4}).run)
    assert "the run's data.validation-fraction = 0.1 is ignored" in caplog.text
    undeclared = Declaration.from_files(f"npz:{site(tmp_path / 'b')}", 10**9)
    assert undeclared.settings[FRACTION] == 0.0
    assert not len(undeclared.read_data(f"npz:{tmp_path / 'b'}", "b").validation)


def test_site_with_too_few_samples_warns(tmp_path, caplog):
    folder = site(tmp_path / "a", rows=5)
    spec = DataSpec(validation_fraction=0.1)
    assert not len(site_data(f"npz:{folder}", spec=spec, classes=4, name="a").validation)
    assert "a: no validation samples, because data.validation-fraction = 0.1 of 4" in caplog.text


# --- the setting


@pytest.mark.parametrize(
    ("changes", "selects", "fraction"),
    [
        ({}, False, 0.0),
        ({}, True, 0.1),
        ({"early-stopping": 2}, False, 0.1),
        ({"keep-best": True}, False, 0.1),
        ({"keep-best": True, FRACTION: 0.0}, False, 0.0),
        ({FRACTION: 0.0}, True, 0.0),
        ({FRACTION: 0.3}, False, 0.3),
        ({FRACTION: "auto", "keep-best": True}, False, 0.1),
        ({"early-stopping": 2, "privacy.epsilon": 4.0}, False, 0.0),
        ({"keep-best": True, "privacy.secure-aggregation": True}, True, 0.0),
        ({"keep-best": True, "privacy.epsilon": 4.0, FRACTION: 0.2}, False, 0.2),
    ],
)
def test_auto_is_a_tenth_if_scores_select(changes, selects, fraction):
    config = complete(validate({"method": "fedavg", **changes}), selects=selects)
    assert config.run.data.validation_fraction == fraction
    assert config.flat()[FRACTION] == fraction
    assert resolve(config.flat()) == config
    assert resolve_flower(to_flower(config.flat())).run.data.validation_fraction == fraction


# --- the scores


class Notices(Watcher):
    def __init__(self):
        self.texts = []

    def notice(self, text):
        self.texts.append(text)


@pytest.mark.parametrize("method", ["fedavg", "felo", "fedproto", "central", "um-pfssl"])
def test_every_kind_of_model_is_evaluated_on_validation_samples(method, tmp_path):
    config = small(method, validation_fraction=0.2)
    summary = run(config, tmp_path / "run")
    data = RunData.for_run(config.run)
    for each in records(tmp_path / "run"):
        scores, tests = each["accuracy"]["validation"], each["accuracy"]["personal"]
        assert scores.keys() == tests.keys()
        counts = {f"client-{k}": len(data.split_rows(k)[2]) for k in range(4)}
        assert each["tested"]["validation"] == counts
        for score in scores.values():
            for name, value in score["per_client"].items():
                assert (value * counts[name]) == pytest.approx(round(value * counts[name]))
    assert summary["accuracy"]["validation"].keys() == scores.keys()
    assert summary["headline"] != "validation"
    assert summary["headline_kinds"]["validation"] == summary["headline_kinds"][summary["headline"]]
    assert summary["test_samples"]["validation"] == sum(counts.values())


def test_validation_samples_are_never_trained_on(tmp_path):
    config = small("local", clients=2, validation_fraction=0.3)
    seen = []

    def watched(self, *args, **kwargs):
        data = RunData.for_run(config.run).client(self.node.partition)
        held = {row.numpy().tobytes() for row in data.validation.x}
        assert not held & {row.cpu().numpy().tobytes() for row in self.samples.own.x}
        assert self.info.samples == len(data.train) == len(self.x)
        seen.append(self.info.name)
        return original(self, *args, **kwargs)

    original = HetClient.fit_private
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HetClient, "fit_private", watched)
        run(config, tmp_path / "run")
    assert set(seen) == {"client-0", "client-1"}


@pytest.mark.parametrize(("protocol", "weighted"), [("common", True), ("personal", False)])
def test_mean_is_weighted_like_the_headline(protocol, weighted):
    """On the common test set, each sample counts equally; on own test splits, each client."""
    values, counts = {"a": 0.9, "b": 0.2, "c": 0.4}, {"a": 30, "b": 6, "c": 4}
    state = RoundState(1, print, None, Headline(protocol=protocol))
    state.start(1)
    state.record_selection(Selection(("a", "b", "c")))
    for name, value in values.items():
        scores = {("accuracy", p, "private"): value for p in ("common", "personal", "validation")}
        state.record_measured(name, Measured(scores, tested={"validation": counts[name]}))
    record = state.finish(evaluated=True)
    plain = np.mean([*values.values()])
    by_samples = sum(values[n] * counts[n] for n in values) / sum(counts.values())
    found = record.accuracy["validation"]["private"]
    assert found.mean == pytest.approx(by_samples if weighted else plain)
    assert found.std == pytest.approx(np.std([*values.values()]))
    assert record.accuracy["common"]["private"].mean == pytest.approx(plain)
    again = RoundState(1, print, None, Headline(protocol=protocol))
    again.load_json(state.to_json())
    again.start(2)
    assert again.finish(evaluated=True).accuracy["validation"]["private"].mean == found.mean


def test_private_clients_keep_their_validation_scores(tmp_path, caplog):
    config = small("fedavg", secure_aggregation=True, validation_fraction=0.2, keep_best=True)
    notices = Notices()
    with caplog.at_level(logging.INFO, "fedhet"):
        run(config, tmp_path / "run", [notices])
    for each in records(tmp_path / "run"):
        assert each["accuracy"].keys() == {"common"}
        assert each["tested"].keys() == {"common"}
    assert "accuracy of the private model, validation split" in caplog.text
    assert any("select rounds on test data" in text for text in notices.texts)


# --- what selects


def planted(number, test, validation=None):
    found = RoundRecord(number, tested={"validation": {"a": 5}})
    found.accuracy = {"common": {"private": spread({"a": test})}}
    if validation is not None:
        found.accuracy["validation"] = {"private": spread({"a": validation})}
    return found


def test_rounds_are_selected_on_validation():
    # The test accuracy rises, but the validation accuracy falls after round 2.
    found = [planted(n, 0.1 * n, v) for n, v in enumerate([0.5, 0.6, 0.4, 0.3, 0.2], 1)]
    assert best_round(found, Headline()) == 2
    assert selection_means(found, Headline()) == dict(enumerate([0.5, 0.6, 0.4, 0.3, 0.2], 1))
    config = resolve({"method": "local", "rounds": 20, "early-stopping": 2})
    assert last_round(found, config) == 5
    tests = [planted(n, 0.1 * n) for n in range(1, 6)]
    assert best_round(tests, Headline()) == 5
    assert last_round(tests, config) == 20


def test_deployed_kind_selects_or_the_next_kind():
    headline = Headline(protocol="common", kinds={"common": "server", "personal": "private"})
    evaluated = {"common": ["server"], "validation": ["proxy", "private", "server"]}
    assert headline.selection(evaluated) == ("validation", "server")
    assert headline.selection({**evaluated, "validation": ["proxy", "private"]}) == (
        "validation", "private",
    )  # fmt: skip
    assert headline.selection({"common": ["server"], "validation": []}) == ("common", "server")
    assert headline.column(evaluated) == ("common", "server")
    assert headline.column({"validation": ["private"]}) is None


@pytest.fixture
def overfitting(monkeypatch):
    """Make the test accuracy of all models rise with the rounds, and their validation fall."""

    def evaluation(self, knowledge):
        number = self.privacy._round
        scores = {"common": 0.05 * number, "personal": 0.05 * number, "validation": 0.9 / number}
        return {
            (protocol, "private"): Evaluation(scores[protocol], 1.0, samples=len(split))
            for protocol, split in self.tests.items()
        }

    monkeypatch.setattr(HetClient, "evaluation", evaluation)


def test_run_ends_and_keeps_models_by_validation(tmp_path, overfitting):
    config = small("local", rounds=9, clients=2, early_stopping=3, keep_best=True)
    notices = Notices()
    summary = run(config, tmp_path / "run", [notices], report=True)
    assert summary["rounds"] == 5  # best in round 1, three evaluations, and one more round
    assert any(f"('early-stopping' on {BASIS})" in text for text in notices.texts)
    assert open_client(tmp_path / "run", "client-0", best=True).round == 1
    page = (tmp_path / "run" / "report.html").read_text().replace("&#39;", "'")
    assert f"0.0500 in round 1, selected on {BASIS}" in page
    assert f"early-stopping and keep-best: rounds are selected on {BASIS}" in page
    compared = report.compare([tmp_path / "run"])
    assert any(BASIS in note for note in compared.notes)

    on_tests = small("local", rounds=9, clients=2, early_stopping=3, keep_best=True,
                     validation_fraction=0.0)  # fmt: skip
    notices = Notices()
    assert run(on_tests, tmp_path / "tests", [notices])["rounds"] == 9
    assert any("select rounds on test data" in text for text in notices.texts)
    assert open_client(tmp_path / "tests", "client-0", best=True).round == 9


def test_resumed_run_selects_as_before(tmp_path, overfitting):
    config = small("local", rounds=9, clients=2, early_stopping=4, keep_best=True)
    whole = run(config, tmp_path / "whole")
    run(config.replacing(rounds=2), tmp_path / "run")
    resumed = config.replacing(out=str(tmp_path / "run"), resume=True)
    assert without_times(run(resumed, tmp_path / "run")) == without_times(whole)
    # The run's own fraction remains, although nothing would select any more.
    command = ["run", "--resume", str(tmp_path / "run"), "--set", "early-stopping=0"]
    result = CliRunner().invoke(app, [*command, "--set", "keep-best=false", "--rounds", "10"])
    assert result.exit_code == 0, result.output
    assert "validation-fraction = 0.1" in (tmp_path / "run" / "config.toml").read_text()
    assert len(records(tmp_path / "run")) == 10


def test_sweep_selects_by_validation(tmp_path):
    """The first point is best on test data, and the second on validation."""
    points = {}
    for value, test, validation in ((0.1, 0.9, 0.3), (0.2, 0.5, 0.8)):
        path = make(
            tmp_path / str(value), protocols=("common", "validation"), method="local",
            settings={FRACTION: 0.1}, clients=2,
        )  # fmt: skip

        def plant(summary, scores=(("common", test), ("validation", validation))):
            for protocol, mean in scores:
                summary["accuracy"][protocol]["private"]["mean"] = mean

        rewrite(path / "summary.json", plant)
        points[(value,)] = [path]
    found = report.sweep(("training.lr",), points)
    assert found.selection == "accuracy, validation, private"
    assert found.best == 1
    report.write_sweep(found, tmp_path / "out")
    page = (tmp_path / "out" / "sweep.html").read_text().replace("&#39;", "'")
    assert f"The point was selected on {BASIS}." in page
    assert "optimistic" not in page
    assert '<div class="number">0.5</div>' in page, "the test score of the selected point"
    assert "<dt>training.lr</dt><dd>0.2</dd>" in page
    content = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert (content["best"], content["selected_on"]) == ([0.2], BASIS)
    sentence = f"Best point, selected on {BASIS}: lr=0.2."
    assert sentence in (tmp_path / "out" / "sweep.md").read_text()
    assert sentence in report.sweep_table(found).caption


def test_sweep_without_validation_selects_on_test_data(tmp_path):
    points = {
        (value,): [make(tmp_path / str(value), method="local", top=value, clients=2)]
        for value in (0.4, 0.9)
    }
    found = report.sweep(("training.lr",), points)
    assert (found.selection, found.best) == ("accuracy, common, private", 1)
    report.write_sweep(found, tmp_path / "out")
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert "The point was selected on test data. This score is optimistic" in page


def test_command_holds_out_validation_samples_in_every_run(tmp_path):
    command = ["sweep", "local", "lr=0.1,0.01", "--rounds", "1", "--clients", "2", "--models",
               "mlp", "--set", "max-samples=100", "--backend", "inline"]  # fmt: skip
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "sweep")])
    assert result.exit_code == 0, result.output
    assert f"selected on {BASIS}" in " ".join(result.output.split())
    for value in ("0.1", "0.01"):
        folder = tmp_path / "sweep" / value / "seed-0"
        assert "validation-fraction = 0.1" in (folder / "config.toml").read_text()
        assert "validation" in records(folder)[0]["accuracy"]
    none = [*command, "--set", "validation-fraction=0", "--out", str(tmp_path / "none")]
    result = CliRunner().invoke(app, none)
    assert result.exit_code == 0, result.output
    assert "selected on test data" in " ".join(result.output.split())


@pytest.mark.slow
def test_ray_workers_hold_out_the_same_samples(tmp_path):
    config = small("fedavg", validation_fraction=0.2, keep_best=True)
    inline = run(config, tmp_path / "inline")
    engine = config.run.engine.model_copy(update={"backend": "ray"})
    distributed = run(config.replacing(engine=engine), tmp_path / "ray")
    assert inline["accuracy"]["validation"]
    assert without_times(inline) == without_times(distributed)
