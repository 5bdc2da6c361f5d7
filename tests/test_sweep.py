"""`fedhet sweep`: the values, the runs, the table and the figure."""

import json

import pytest
from federation import small as small_run
from matplotlib.figure import Figure
from synthetic import make
from typer.testing import CliRunner

from fedhet import report
from fedhet.base.errors import SettingsError
from fedhet.cli import app
from fedhet.cli.options import point_name
from fedhet.cli.run import read_grid, read_sweep
from fedhet.cli.training import jobs_that_fit
from fedhet.report.sweep import _panel, is_log_spaced


def test_range_has_both_ends_and_exact_decimals():
    name, values = read_sweep("cofed.threshold=0:0.9:0.1", "cofed")
    assert name == "cofed.threshold"
    assert values == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert read_sweep("rounds=2:7:2", "felo")[1] == [2, 4, 6]


def test_list_is_of_the_settings_type():
    assert read_sweep("data.partition=iid,shards", "felo")[1] == ["iid", "shards"]
    assert read_sweep("felo.share-weights=true,false", "felo")[1] == [True, False]


def test_setting_may_be_named_by_its_last_part():
    assert read_sweep("partition=iid,shards", "felo") == ("data.partition", ["iid", "shards"])
    assert read_sweep("threshold=0:0.2:0.1", "cofed") == ("cofed.threshold", [0.0, 0.1, 0.2])
    assert read_sweep(" lr =0.1,1", "local") == ("training.lr", [0.1, 1])
    assert read_sweep("alpha=1,2", "cofed")[0] == "data.alpha"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("alpha=1,2", "'alpha' is ambiguous, expected data.alpha or felo.alpha"),
        (
            "attack=paf,lie",
            "'attack' is a table, expected a setting: attack.kind, attack.attackers",
        ),
        ("cofed.threshold=0,1", "'cofed.threshold': unsupported by method 'felo'"),
        ("threshold=0,1", "unknown setting 'threshold'; use its full name, 'cofed.threshold'"),
        ("rounds", "expected KEY="),
        ("rounds=", "expected KEY="),
        ("round=1,2", "unknown setting 'round'.*did you mean 'rounds'"),
        ("rounds=1:2", "expected numbers for START:STOP:STEP"),
        ("rounds=1:x:1", "expected numbers for START:STOP:STEP"),
        ("rounds=3:1:1", "expected START <= STOP, STEP > 0 and at most 1000 values"),
        ("data.alpha=0:1:0", "expected START <= STOP, STEP > 0 and at most 1000 values"),
        ("data.alpha=0:1:0.0001", "expected START <= STOP, STEP > 0 and at most 1000 values"),
        ("data.alpha=nan:1:1", "expected numbers for START:STOP:STEP"),
        ("data.alpha=0:inf:1", "expected numbers for START:STOP:STEP"),
        ("rounds=2,2", "duplicate value"),
        ("seed=0,1", "use --seeds"),
        ("out=a,b", "use --out"),
        ("resume=true,false", "interrupted runs always resume"),
    ],
)
def test_invalid_sweep_raises(text, fault):
    with pytest.raises(SettingsError, match=fault):
        read_sweep(text, "felo")


def test_values_name_directories():
    assert [point_name((v,)) for v in (0.1, "npz:/a b", "")] == ["0.1", "npz--a-b", "empty"]


SMALL = [
    "--set", "dataset=breast-cancer", "--set", "clients=2", "--models", "sk-tree,sk-svm",
    "--set", "partition=iid", "--set", "max-samples=80", "--set", "public-dataset=generated",
    "--set", "public-samples=60", "--backend", "inline",
]  # fmt: skip


def test_sweep_ends_with_a_table_and_a_figure(tmp_path):
    out = tmp_path / "sweep"
    command = ["sweep", "cofed", "cofed.threshold=0,1", "--seeds", "0,1", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, *SMALL, "--figures", "pseudolabels,conflicts"])
    assert result.exit_code == 0, result.output
    found = json.loads((out / "sweep.json").read_text())
    assert found["setting"] == "cofed.threshold"
    assert found["values"] == [0, 1]
    for place, value in enumerate(("0", "1")):
        for number in (0, 1):
            summary = json.loads((out / value / f"seed-{number}" / "summary.json").read_text())
            ratio = summary["relative"]["common"]["mean"]
            assert found["quantities"]["relative accuracy, common, mean"][place][number] == ratio
            assert summary["seed"] == number
            common = summary["accuracy"]["common"]["private"]
            for name, statistic in (("", "mean"), (", tail", "tail")):
                numbers = found["quantities"][f"accuracy, common, private{name}"]
                assert numbers[place][number] == common[statistic]
    kept = found["quantities"]["pseudolabels"]
    assert kept[1] == [0.0, 0.0]
    assert all(number > 0 for number in kept[0])
    # With no pseudolabels the fitted models are those of before.
    assert found["quantities"]["relative accuracy, common, mean"][1] == [1.0, 1.0]
    page = (out / "sweep.html").read_text()
    assert "Sweep of cofed.threshold" in page
    assert page.count("seed-") == 4
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "sweep.md").read_text()
    assert text.count("\n") == 6
    assert "\n\nBest point, selected on validation, 10 % of each client's training samples" in text
    for words in ("relative accuracy", "accuracy, common, private,", "pseudolabels"):
        assert words in text
    assert "selected on validation" in " ".join(result.output.split())


def test_sweep_is_resumed(tmp_path):
    out = tmp_path / "sweep"
    command = ["sweep", "local", "lr=0.1,0.01", "--rounds", "1", "--out", str(out), *SMALL[:10]]
    command += ["--models", "mlp", "--backend", "inline"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert "already complete" not in first.output
    summaries = [out / value / "seed-0" / "summary.json" for value in ("0.1", "0.01")]
    before = [path.read_bytes() for path in summaries]
    summaries[1].unlink()  # as of a run that was cut off at its end
    (out / "sweep.html").unlink()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert "training.lr=0.1: already complete" in again.output
    assert "training.lr=0.01: complete" not in again.output
    assert summaries[0].read_bytes() == before[0]
    scores = [json.loads(text)["accuracy"] for text in (before[1], summaries[1].read_bytes())]
    assert scores[0] == scores[1]
    assert (out / "sweep.html").exists()
    other = CliRunner().invoke(app, [*command, "--set", "batch-size=7"])
    assert other.exit_code == 1
    assert "'training.batch-size' = 32, got 7" in str(other.exception)


def test_several_settings_make_a_grid():
    grid = read_grid(["lr=0.1,1", "partition=iid,shards", "rounds=2:3:1"], "local")
    assert grid == {
        "training.lr": [0.1, 1], "data.partition": ["iid", "shards"], "rounds": [2, 3],
    }  # fmt: skip
    assert point_name((0.1, "iid", 2)) == "0.1_iid_2"


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        (["lr=0.1,1", "training.lr=2,3"], "duplicate setting 'training.lr'"),
        (["rounds=1:100:1", "clients=2:100:1"], "expected at most 1000 combinations, got 9900"),
    ],
)
def test_invalid_grid_raises(texts, fault):
    with pytest.raises(SettingsError, match=fault):
        read_grid(texts, "local")


def test_points_with_equal_directories_raise(call):
    status, _, fault = call("sweep", "local", "data.by=a b,a-b")
    assert (status, fault) == (2, "fedhet: sweep: two values map to the same directory name\n")


def test_grid_has_a_curve_for_each_value_of_the_others(tmp_path):
    tops = {(lr, kind): 0.3 + 20 * lr + 0.1 * (kind == "b") for lr in (0.01, 0.02) for kind in "ab"}
    runs = {
        point: [make(tmp_path / f"{number}", top=top, seed=0)]
        for number, (point, top) in enumerate(tops.items())
    }
    found = report.sweep(("training.lr", "x.kind"), runs)
    page = report.write_sweep(found, tmp_path / "out").read_text()
    means = {point: run.last("common", "private").mean for point, (run,) in found.runs.items()}
    assert f"{max(means.values()):.4g}" in page
    ax = Figure().subplots()
    _panel(ax, found, "accuracy, common, private")
    drawn = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines
    }
    for kind in "ab":
        x, y = drawn[f"kind={kind}"]
        assert x == [0.01, 0.02]
        assert y == pytest.approx([means[lr, kind] for lr in (0.01, 0.02)])
    content = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert content["points"] == [list(point) for point in tops]
    assert content["quantities"]["accuracy, common, private"] == [[v] for v in means.values()]


@pytest.mark.slow
def test_grid_runs_in_parallel(tmp_path):
    out = tmp_path / "sweep"
    command = ["sweep", "local", "models.pool=sk-tree,sk-svm", "max-samples=60,80", "--rounds", "1"]
    small = [
        "--dataset", "breast-cancer", "--clients", "2", "--set", "partition=iid", "--backend",
        "inline", "--set", "metrics=auc", "--jobs", "2", "--out", str(out),
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*command, *small])
    assert result.exit_code == 0, result.output
    assert "4 of 4  " in result.output
    found = json.loads((out / "sweep.json").read_text())
    assert found["settings"] == ["models.pool", "data.max-samples"]
    assert found["points"] == [
        [model, samples] for model in ("sk-tree", "sk-svm") for samples in (60, 80)
    ]
    for place, (model, samples) in enumerate(found["points"]):
        path = out / f"{model}_{samples}" / "seed-0" / "summary.json"
        summary = json.loads(path.read_text())
        assert set(summary["models"].values()) == {model}
        accuracy = found["quantities"]["accuracy, common, private"]
        assert accuracy[place] == [summary["accuracy"]["common"]["private"]["mean"]]
        auc = found["quantities"]["AUC, common, private"]
        assert auc[place] == [summary["metrics"]["auc"]["common"]["private"]["mean"]]
    page = (out / "sweep.html").read_text()
    best = max(accuracy, key=lambda each: each[0])[0]
    assert f"{best:.4g}" in page
    assert "max-samples=60" in page  # a curve for each of its values


def test_number_of_parallel_runs(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert jobs_that_fit(small_run(backend="inline", threads=3)) == 2
    assert jobs_that_fit(small_run(backend="inline", threads=16)) == 1
    assert jobs_that_fit(small_run(backend="ray")) == 1


def test_every_value_is_checked_before_the_first_runs(tmp_path):
    out = tmp_path / "sweep"
    result = CliRunner().invoke(
        app, ["sweep", "cofed", "cofed.threshold=0.5,2", "--out", str(out), *SMALL]
    )
    assert isinstance(result.exception, SettingsError)
    assert "'cofed.threshold': expected number >= 0 and <= 1, got 2" in str(result.exception)
    assert not out.exists()


def test_sweep_has_its_seed_and_directory(tmp_path):
    words = ["sweep", "local", "lr=0.001", "--out", str(tmp_path / "sweep"), *SMALL]
    words += ["--models", "mlp", "--set", "rounds=1"]
    result = CliRunner().invoke(app, [*words, "--set", "seed=7"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "sweep" / "0.001" / "seed-7").is_dir()
    result = CliRunner().invoke(app, [*words, "--set", f"out={tmp_path / 'other'}"])
    assert "'out': cannot be swept, because this command sets it for each run; use --out" in str(
        result.exception
    )


def test_unknown_figure_raises(tmp_path):
    command = ["sweep", "cofed", "cofed.threshold=0.5", "--out", str(tmp_path / "s"), *SMALL]
    result = CliRunner().invoke(app, [*command, "--figures", "pseudolabel"])
    assert isinstance(result.exception, SettingsError)
    assert "did you mean 'pseudolabels'" in str(result.exception)


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        ([0.001, 0.01, 0.1], True),
        ([0.001, 0.003, 0.01, 0.03], True),
        ([0.01, 0.1], True),
        ([0.1, 0.2], False),
        ([10, 20, 30, 40, 50, 60, 70, 80, 90, 100], False),
        ([0, 0.1, 1], False),
        ([5], False),
    ],
)
def test_values_spaced_by_factors_have_a_logarithmic_axis(tmp_path, values, is_log):
    assert is_log_spaced(values) is is_log
    runs = {(v,): [make(tmp_path / f"{n}", seed=0)] for n, v in enumerate(values)}
    ax = Figure().subplots()
    _panel(ax, report.sweep(("training.lr",), runs), "accuracy, common, private")
    assert ax.get_xscale() == ("log" if is_log else "linear")


def test_best_point_is_compared_with_the_others_by_seed(tmp_path):
    """Of 359 images, 0.8 and 0.801 differ by less than one, and 0.3 by far more."""
    runs = {
        (lr,): [make(tmp_path / "out" / f"{lr}" / f"seed-{s}", top=top, seed=s) for s in range(3)]
        for lr, top in ((0.01, 0.8), (0.1, 0.801), (1.0, 0.3))
    }
    found = report.sweep(("training.lr",), runs)
    assert found.unclear("accuracy, common, private", 1) == (1, 2)
    assert found.unclear("classes_covered", 1) == (2, 2), "the same in all runs"
    page = report.write_sweep(found, tmp_path / "out").read_text()
    assert "private, 1 of 2 other points differs from this point only within noise" in page
    assert "359 test samples" in page
    assert '<td class="wrap code">0.01/seed-0</td>' in page
    assert str(tmp_path) not in page
    one = report.sweep(("training.lr",), {point: paths[:1] for point, paths in runs.items()})
    assert "With one seed, no error" in report.write_sweep(one, tmp_path / "out").read_text()
