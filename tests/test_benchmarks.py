"""Check that benchmarks that are rarely run still work."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from bases import make_bases

from benchmarks import conformal_step, conformance, same_numbers, tasks
from benchmarks.gpu import PIECES
from benchmarks.timing import write_images
from fedhet.config.resolve import resolve
from fedhet.config.sources import parse_pairs


@pytest.mark.parametrize("name", same_numbers.RUNS)
def test_settings_of_a_compared_run_are_valid(name):
    method, *words = same_numbers.RUNS[name].format(data="data").split()
    pairs = [word for option, word in zip(words[::2], words[1::2], strict=True)
             if option == "--set"]  # fmt: skip
    pool = words[words.index("--models") + 1].split(",") if "--models" in words else []
    values = {"models.pool": pool} if pool else {}
    config = resolve({"method": method, **values, **parse_pairs(pairs, method)})
    assert config.run.method == method


def test_tasks_compares_each_method_with_local_training_on_the_same_models(tmp_path, monkeypatch):
    make_bases(tmp_path)
    (tmp_path / "vit").rename(tmp_path / "disks")
    monkeypatch.setenv("FEDHET_ENCODERS", str(tmp_path))
    methods = ["fedavg", "fedmd", "fedbn", "fedlora", "pfedbayes"]
    runs = tasks.runs(["diabetes", "image", "digits"], methods, [1])
    for method, pool, task, seed in runs:
        assert ("local", pool, task, seed) in runs
        config = tasks.config_of(method, pool, task, seed)
        assert config.run.data.task == ("multi-label" if task == "digits" else "regression")
    given = {"rounds": 40, "pfedbayes.steps": 2}
    for method, steps in (("local", None), ("pfedbayes", 2)):
        config = tasks.config_of(method, "one", "diabetes", 1, given)
        assert config.run.rounds == 40
        assert config.method_settings.flat().get("steps") == steps
    assert {task for method, _, task, _ in runs if method == "fedlora"} == {"image", "digits"}
    assert {task for method, _, task, _ in runs if method == "pfedbayes"} == {"diabetes", "image"}


def test_improvement_is_the_mean_of_paired_differences_with_its_standard_error(tmp_path):
    scores = {"local": [4.0, 5.0, 2.0], "fedmd": [3.0, 4.0, 2.0]}
    for method, values in scores.items():
        for seed, value in enumerate(values):
            folder = tmp_path / f"{method}-three-diabetes-{seed}"
            folder.mkdir()
            (folder / "summary.json").write_text("{}")
            score = {"mean": value, "std": 0.0, "worst": value, "per_client": {"client-0": value}}
            kinds = {"private": score, "server": {**score, "mean": value / 2}}
            record = {"round": 1, "metrics": {"rmse": {"common": kinds}}}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    gains = np.array([25.0, 20.0, 0.0])
    expected = f"+{gains.mean():.1f} ± {gains.std(ddof=1) / np.sqrt(3):.1f}"
    assert tasks.cell(tmp_path, "fedmd", "diabetes", [0, 1, 2]) == expected
    assert tasks.cell(tmp_path, "fedmd", "diabetes", [0, 1, 2, 3]) == "–"
    half = (1 - np.array([1.5 / 4, 2 / 5, 1 / 2])) * 100
    of_server = f"+{half.mean():.1f} ± {half.std(ddof=1) / np.sqrt(3):.1f}"
    assert tasks.cell(tmp_path, "fedmd", "diabetes", [0, 1, 2], "server") == of_server
    lines = list(tasks.table(tmp_path, ["diabetes"], ["fedmd"], [0, 1, 2]))
    assert lines[2:] == ["| `local`, three | common | 3.67 |", f"| `fedmd` | common | {expected} |"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_piece_for_an_accelerator_runs_on_a_processor():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("equal to the last bit\n") == 2
    assert "DIFFERENT" not in ended.stdout
    for piece in PIECES:
        assert f"\n{piece}: " in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "felo", "fedtype"])
def test_memory_of_a_server_is_measured_with_weights_that_arrive(method):
    command = [sys.executable, "-m", "benchmarks.server_memory", "--mb", "4", "--clients", "3"]
    ended = subprocess.run(
        [*command, "--methods", method], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(rf"{method}, 3 clients: ([\d.]+) MB, peak ([\d.]+) x that\n", ended.stdout)
    assert found
    assert 3.8 < float(found[1]) < 4.8  # what a client sent is the model


def test_rows_of_table_9_train_one_model_each(tmp_path, monkeypatch):
    """Each function changes only the weights of its model, and the printed ratios are the rows'."""
    small = {"models.pool": "mlp", "fedtype.proxy": "mlp"}
    resolve = conformal_step.resolve
    monkeypatch.setattr(conformal_step, "resolve", lambda values: resolve({**values, **small}))
    write_images(tmp_path / "images", 1, 40, (3, 8, 8))
    clients = [
        conformal_step.fedtype_client(tmp_path / "images", 16, backward, "cpu", "alternating")
        for backward in ("conformal", "symmetric")
    ]

    def copied(model):
        return [parameter.detach().clone() for parameter in model.parameters()]

    def weights():
        return [{kind: copied(model) for kind, model in c.models.items()} for c in clients]

    for model, both in conformal_step.epochs_of_each_model(*clients).items():
        kind = model.partition(" ")[0]
        for number, work in enumerate(both):
            before, _, after = weights(), work(), weights()
            trained = {
                (place, name)
                for place, models in enumerate(before)
                for name, old in models.items()
                if any(not a.equal(b) for a, b in zip(old, after[place][name], strict=True))
            }
            assert trained == {(number if kind == "private" else 0, kind)}


def test_every_difference_from_another_library_is_explained():
    records = conformance.read_records()
    assert [*records] == [case.method for case in conformance.CASES]
    for case in conformance.CASES:
        record = records[case.method]
        has_changes = "changed" in record
        assert has_changes == bool(case.changes)
        gap = record["changed" if has_changes else "unchanged"]
        assert (gap < 1e-10) != bool(case.remark), case.method
        assert not has_changes or record["unchanged"] > 1e-6, case.method
