"""An interrupted run continues after its last complete round, as if uninterrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import SMALL, each, fast, records, run, small
from interruption import (
    CutError,
    CutOff,
    Notices,
    cut_and_resumed,
    resumed,
    same_but_for_the_name,
    until,
)

from fedhet.base.errors import StateError
from fedhet.config.resolve import resolve
from fedhet.config.sources import read_toml
from fedhet.data.spec import DataSpec
from fedhet.data.store import dataset_digest
from fedhet.data.store import load as load_digits
from fedhet.inference.api import load
from fedhet.inference.client import open_models
from fedhet.methods.registry import method_names
from fedhet.methods.spec import COMMON_METRICS
from fedhet.report import load_run
from fedhet.runs.directory import delete_models, read_run_name
from fedhet.runs.log import RunLog
from fedhet.runs.storage import Checkpoints, save
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import as_text

PYTHON = [sys.executable, "-m", "fedhet"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, in which some clients skip rounds."""
    config = small("felo", rounds=4, fraction=0.75)
    directory = tmp_path_factory.mktemp("felo") / "whole"
    run(config, directory)
    assert_metrics_are_declared(config, directory)
    return config, directory


def assert_metrics_are_declared(config, directory):
    """Check that a method with declared metrics has a title for each metric in its records."""
    if not config.method.spec.metrics:
        return
    found = {name for record in records(directory) for name in record["method"]}
    by_class = {name for name in found if name.startswith("class_") and name[6:].isdecimal()}
    assert found
    assert found - by_class <= {*config.method.spec.metrics, *COMMON_METRICS}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("round", [1, 2, 4])
def test_resumed_run_equals_uninterrupted_run(whole, tmp_path, round, moment):
    config, directory = whole
    with pytest.raises(CutError):
        run(config, tmp_path / "cut", [CutOff(round, moment)])
    assert not (tmp_path / "cut" / "summary.json").exists()
    run(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    same_but_for_the_name(directory, tmp_path / "cut")


def test_resumed_run_keeps_its_settings(tmp_path, monkeypatch):
    """config.toml contains the resolved value of `auto`, which applies on every machine."""
    config = small("fedavg", rounds=3, clients=2, max_samples=100, precision="auto")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    run(config, tmp_path / "whole")
    with pytest.raises(CutError):
        run(config, tmp_path / "cut", [CutOff(2, "after")])
    kept = read_toml(tmp_path / "cut" / "config.toml")
    assert (kept["engine.precision"], kept["engine.channels-last"]) == ("float32", "true")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    run(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    assert read_toml(tmp_path / "cut" / "config.toml") == kept
    same_but_for_the_name(tmp_path / "whole", tmp_path / "cut")
    run(config, tmp_path / "elsewhere")
    assert read_toml(tmp_path / "elsewhere" / "config.toml")["engine.precision"] == "bfloat16"
    losses = [records(tmp_path / name)[-1]["loss"] for name in ("whole", "elsewhere")]
    assert losses[0] != losses[1]


GEMS = {"fedgems.server-model": "mlp", "attack.kind": "ofom"}
VELO = {"velo.interval": 2, "velo.samples-per-class": 2, "velo.memory": 3, "velo.epochs": 3}


TYPE = {"fedtype.proxy": "mlp3"}


@pytest.mark.parametrize(
    ("method", "changes"), [("velo", VELO), ("fedgems", GEMS), ("fedtype", TYPE)]
)
@pytest.mark.parametrize(("round", "moment"), [(2, "after"), (4, "before")])
def test_server_that_keeps_more_resumes_too(tmp_path, method, changes, round, moment):
    """The states are the CVAE and its features, server models, the pool, logits, and accuracies."""
    config = small(method, rounds=4, fraction=0.75, models="mlp", max_samples=200, **changes)
    cut_and_resumed(config, tmp_path, round, moment)


def test_last_two_checkpoints_are_kept(whole):
    _, directory = whole
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert kept == ["round-000003.safetensors", "round-000004.safetensors", "server.json"]


def cut_short(whole, directory, after=3):
    """Write the directory of a run that ended after `after` of four rounds; return its settings."""
    config, trained = whole
    kept = trained.parent / f"cut-{after}"
    if not kept.exists():
        with pytest.raises(CutError):
            run(config, kept, [CutOff(after + 1, "before")])
    shutil.copytree(kept, directory)
    return config


def checkpoints_of(config, directory):
    """Return a run's checkpoints in the way the run opens them."""
    run_name = json.loads((directory / "run.json").read_text())["run"]
    return Checkpoints(directory, {"run": run_name, "method": config.method.name})


@pytest.mark.parametrize("change", ["NaN", "run", "method", "round", "no run"])
def test_foreign_or_nonfinite_checkpoint_is_skipped(tmp_path, change):
    ours = Checkpoints(tmp_path, {"run": "run-1", "method": "felo"})
    ours.write_checkpoint(1, {"w": np.ones(2, np.float32)}, {"state": "1"})
    ours.write_checkpoint(2, {"w": np.full(2, 2, np.float32)}, {"state": "2"})
    last = tmp_path / "checkpoints" / "round-000002.safetensors"
    theirs = {
        "NaN": ({"w": torch.tensor([1, torch.nan])}, {}),
        "run": ({"w": torch.ones(2)}, {"run": "run-2"}),
        "method": ({"w": torch.ones(2)}, {"method": "fedtype"}),
        "round": ({"w": torch.ones(2)}, {"round": 1}),
        "no run": ({"w": torch.ones(2)}, {"run": None}),
    }
    tensors, facts = theirs[change]
    sound = {"run": "run-1", "method": "felo", "round": 2, "state": "2", **facts}
    save(last, tensors, {name: value for name, value in sound.items() if value is not None})
    notices = []
    found = ours.newest(notices.append, 2)
    assert (found.round, found.metadata["state"]) == (1, "1")
    assert found.tensors["w"].tolist() == [1, 1]
    assert "round-000002" in notices[0]
    assert "trying the previous checkpoint" in notices[0]
    save(last, {"w": torch.ones(2)}, {**sound, "run": "run-1", "method": "felo", "round": 2})
    assert ours.newest(notices.append, 2).round == 2


def test_truncated_checkpoint_costs_one_round(whole, tmp_path):
    config = cut_short(whole, tmp_path / "cut")
    last = tmp_path / "cut" / "checkpoints" / "round-000003.safetensors"
    last.write_bytes(last.read_bytes()[:-7])
    notices = Notices()
    run(resumed(config, tmp_path / "cut"), tmp_path / "cut", [notices])
    same_but_for_the_name(whole[1], tmp_path / "cut")
    assert any("round-000003" in text and "trying the previous" in text for text in notices.texts)
    assert "resuming after round 2 of 4" in notices.texts
    assert last.with_suffix(".unreadable").exists(), "what could not be read is kept aside"


def test_run_without_a_valid_checkpoint_raises(whole, tmp_path):
    config = cut_short(whole, tmp_path / "cut")
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        path.write_bytes(b"")
    before = (tmp_path / "cut" / "metrics.jsonl").read_bytes()
    with pytest.raises(StateError, match="2 checkpoints"):
        run(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == before


def test_truncated_record_is_rewritten(whole, tmp_path):
    config = cut_short(whole, tmp_path / "cut")
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "asked": ["cli')
    run(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    same_but_for_the_name(whole[1], tmp_path / "cut")


@pytest.mark.parametrize("end", [b"", b"\0" * 40, b"\xff\xc3"])
@pytest.mark.parametrize("after", [1, 3])
def test_truncated_record_of_a_checkpointed_round_repeats_the_round(whole, tmp_path, after, end):
    config = cut_short(whole, tmp_path / "cut", after)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    *before, last = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(before) + last[: len(last) // 2] + end)
    notices = Notices()
    run(resumed(config, tmp_path / "cut"), tmp_path / "cut", [notices])
    same_but_for_the_name(whole[1], tmp_path / "cut")
    assert f"resuming after round {after - 1} of 4" in notices.texts


def test_record_is_synced_before_its_checkpoint(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def watched(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_checkpoint = path.parent.name == "checkpoints" and "round-" in path.name
        synced.append("a checkpoint" if is_checkpoint else path.name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    run(small("fedavg", rounds=1, clients=2), tmp_path / "run")
    assert synced.index("metrics.jsonl") < synced.index("a checkpoint")


def test_missing_records_raise(whole, tmp_path):
    config = cut_short(whole, tmp_path / "cut")
    metrics = tmp_path / "cut" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    with pytest.raises(StateError, match="round 3"):
        run(resumed(config, tmp_path / "cut"), tmp_path / "cut")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "local"}, "contains a run with 'method' = 'felo', got 'local'"),
        ({"training.lr": 0.5}, r"contains a run with 'training\.lr' = 0.001, got 0.5"),
        ({"rounds": 3}, "'rounds' must be at least 4 to resume this run, got 3"),
    ],
)
def test_resuming_with_other_settings_raises(whole, tmp_path, change, message):
    config = cut_short(whole, tmp_path / "cut", after=1)
    before = contents(tmp_path / "cut")
    settings = {**config.flat(), **change, "out": str(tmp_path / "cut"), "resume": True}
    if "method" in change:
        settings = {k: v for k, v in settings.items() if k in RunSettings.fields()}
    with pytest.raises(StateError, match=message):
        run(resolve(settings), tmp_path / "cut")
    assert contents(tmp_path / "cut") == before


def contents(folder):
    """Return the files of a run, except files that TensorBoard may still be writing."""
    files = [p for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts]
    return {path: path.read_bytes() for path in files}


def test_checkpoint_of_another_method_raises(whole, tmp_path):
    config = cut_short(whole, tmp_path / "cut")
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        path.unlink()
    odd = {"odd": np.zeros(3)}
    checkpoints_of(config, tmp_path / "cut").write_checkpoint(3, odd, {"no": "books"})
    with pytest.raises(StateError, match=config.method.name):
        run(resumed(config, tmp_path / "cut"), tmp_path / "cut")


def test_run_without_models_raises(tmp_path):
    """Only its metrics remain."""
    whole = tmp_path / "whole"
    run(small("local", rounds=2, clients=2), whole)
    (whole / "late").mkdir()  # replies that no round has used hold weights as well
    (whole / "late" / "client-0.safetensors").write_bytes(b"weights")
    delete_models(whole)
    assert not list(whole.rglob("*.safetensors"))
    numbers = (whole / "metrics.jsonl").read_bytes()
    longer = resumed(small("local", rounds=3, clients=2), whole)
    with pytest.raises(StateError, match="2 complete rounds"):
        run(longer, whole)
    assert (whole / "metrics.jsonl").read_bytes() == numbers
    assert (whole / "summary.json").is_file()


def test_checkpoint_of_integers_raises(tmp_path):
    config = small("fedavg", rounds=3, clients=2)
    with pytest.raises(CutError):
        run(config, tmp_path / "cut", [CutOff(3, "before")])
    checkpoints = checkpoints_of(config, tmp_path / "cut")
    last = checkpoints.newest(print, 9)
    whole = {name: np.asarray(value).astype(np.int64) for name, value in last.tensors.items()}
    checkpoints.write_checkpoint(last.round, whole, last.metadata)
    with pytest.raises(StateError, match=r"fedavg.*float32.*int64"):
        run(resumed(config, tmp_path / "cut"), tmp_path / "cut")


@pytest.mark.parametrize("missing", ["center", "spread", "encoder.0.weight"])
def test_checkpoint_without_a_part_of_the_cvae_raises(tmp_path, missing):
    config = small("velo", rounds=2, models="mlp", max_samples=200, **VELO)
    with pytest.raises(CutError):
        run(config, tmp_path / "cut", [CutOff(2, "before")])
    checkpoints = checkpoints_of(config, tmp_path / "cut")
    last = checkpoints.newest(print, 9)
    kept = {name: value for name, value in last.tensors.items() if name != f"cvae/{missing}"}
    checkpoints.write_checkpoint(last.round, kept, last.metadata)
    with pytest.raises(StateError, match=rf"velo.*{missing}"):
        run(resumed(config, tmp_path / "cut"), tmp_path / "cut")


def test_resumed_run_ends_with_any_sum_of_records(tmp_path):
    config = small("fedavg", clients=2, rounds=3)
    with pytest.raises(CutError):
        run(config, tmp_path, [CutOff(3, "before")])
    rows = records(tmp_path)
    for row in rows:  # each may be as large, and is read
        row["bytes_up"], row["seconds"]["total"], row["seconds"]["train"] = 2**63 - 1, 1e18, 1e18
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(resumed(config, tmp_path), tmp_path)
    assert (summary["bytes_up"], summary["seconds"]["train"]) == (2**63 - 1, 1e18)
    assert load_run(tmp_path).finished


def test_complete_run_is_not_resumed(whole, tmp_path):
    config, directory = whole
    shutil.copytree(directory, tmp_path / "copy")
    with pytest.raises(StateError, match="is already complete"):
        run(resumed(config, tmp_path / "copy"), tmp_path / "copy")


def test_resume_without_a_run_starts_one(tmp_path):
    config = resumed(small(rounds=1), tmp_path / "new")
    assert run(config, tmp_path / "new")["rounds"] == 1


@pytest.mark.parametrize("method", each(sorted({*method_names()} - {"felo"})))
def test_every_method_restores_its_checkpoint(method, tmp_path):
    """The tests above cover the excluded method."""
    config = small(method, **fast(method), clients=3, max_samples=240)
    cut_and_resumed(config, tmp_path, 2)
    assert_metrics_are_declared(config, tmp_path / "whole")


# --- processes that are killed ----------------------------------------------------------------


def command(*arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*PYTHON, "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def begin(directory: Path, rounds: int = 6) -> subprocess.Popen:
    chosen = {**SMALL, "rounds": rounds, "data.max-samples": 1000}
    pairs = [f"{k}={as_text(v)}" for k, v in chosen.items()]
    arguments = [word for pair in pairs for word in ("--set", pair)]
    return command("felo", *arguments, "--out", str(directory))


@pytest.mark.parametrize("resume", [False, True])  # a sweep resumes its runs
def test_run_without_settings_starts_again(tmp_path, resume):
    """The disk was full, or the process was killed."""
    for name in ("run.lock", "run.json", ".run.json.0a1b2c3d4e5f", ".config.toml.0a1b2c3d4e5f"):
        (tmp_path / name).write_text("{")
    config = small(resume=resume, out=str(tmp_path))
    log = RunLog(config, tmp_path, workers=1)
    assert read_run_name(tmp_path) == log.run_name
    assert resolve(read_toml(tmp_path / "config.toml")) == small()


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_process_killed_within_a_round_is_resumed_bit_for_bit(tmp_path, rounds):
    killed = begin(tmp_path / "cut")
    metrics = tmp_path / "cut" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= rounds)
    trained = tmp_path / "cut" / "state"
    mark = f"round-{rounds + 1:06d}.safetensors"
    until(lambda: list(trained.rglob(mark)))  # a client is through the next round
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert not (tmp_path / "cut" / "summary.json").exists()

    again = command("--resume", str(tmp_path / "cut"))
    run(resolve({**read_toml(tmp_path / "cut" / "config.toml"), "out": ""}), tmp_path / "whole")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    same_but_for_the_name(tmp_path / "whole", tmp_path / "cut")


def test_running_run_is_not_resumed(tmp_path, call):
    going = begin(tmp_path / "run", rounds=10_000)
    try:
        until(lambda: (tmp_path / "run" / "config.toml").exists())
        status, _, fault = call("run", "--resume", tmp_path / "run")
        assert status == 2
        assert "still running in another process" in " ".join(fault.split())
    finally:
        going.kill()
        going.communicate()


def test_options_that_contradict_resume_raise(tmp_path, call):
    status, _, fault = call("run", "--resume", tmp_path)
    assert (status, "config.toml not found" in " ".join(fault.split())) == (2, True), fault
    (tmp_path / "config.toml").write_text('method = "felo"')
    status, _, fault = call("run", "felo", "--resume", tmp_path, "--out", "x")
    assert (status, "cannot be combined with" in " ".join(fault.split())) == (2, True), fault


# --- data that changes, or is read from another directory -------------------------------------


def table(path, rows, seed=0):
    """Write a table with the classes "no" and "yes"."""
    draws = np.random.default_rng(seed).normal(size=(rows, 3))
    lines = [f"{a:.4f},{b:.4f},{'yes' if a + c / 5 > 0 else 'no'}" for a, b, c in draws]
    path.write_text("\n".join(["a,b,outcome", *lines]) + "\n")
    return path


def on_table(place, **changes):
    """Return settings of a run on a table."""
    own = {"data.dataset": f"table:{place}", "data.target": "outcome", "models.pool": "mlp"}
    return small("fedavg", **{**own, "clients": 2, "rounds": 3, "data.max-samples": 0, **changes})


def readers(directory, config):
    """Return functions that read the data of a run again."""
    result = load(directory)
    return {
        "resume": lambda: run(resumed(config, directory), directory),
        "test": lambda: result.test("client-0"),
        "common": lambda: result.test(),
        "confusion": lambda: result.confusion("client-1"),
        "scores": lambda: open_models(directory, "client-0").scores(),
        "state": lambda: open_models(directory / "state", "client-0").scores(),
        "server": lambda: open_models(directory, "server").confusion(protocol="common"),
    }


@pytest.mark.parametrize("change", ["more", "fewer", "value", "order"])
def test_changed_data_of_a_run_is_not_read_again(tmp_path, change):
    (tmp_path / "data").mkdir()
    table(tmp_path / "data" / "test.csv", 30, seed=1)
    path = table(tmp_path / "data" / "train.csv", 80)
    config = on_table(tmp_path / "data")
    with pytest.raises(CutError):
        run(config, tmp_path / "run", [CutOff(2, "after")])
    head, *rows = path.read_text().splitlines()
    changed = {
        "more": [*rows, rows[0]],
        "fewer": rows[:-1],
        "value": [*rows[:-1], f"1{rows[-1].lstrip('-')}"],
        "order": rows[::-1],
    }
    path.write_text("\n".join([head, *changed[change]]) + "\n")
    calls = readers(tmp_path / "run", config)
    for call in calls.values():
        with pytest.raises(
            StateError, match=r"data\.dataset = 'table:.*/data': .*Restore the data, or start a new"
        ):
            call()
    path.write_text("\n".join([head, *rows]) + "\n")
    for call in calls.values():
        call()


def test_a_run_without_a_digest_reads_its_data_as_before(tmp_path):
    path = table(tmp_path / "t.csv", 80)
    config = on_table(path)
    run(config, tmp_path / "run")
    recorded = tmp_path / "run" / "partition.json"
    content = json.loads(recorded.read_text())
    del content["digest"], content["places"]
    recorded.write_text(json.dumps(content))
    table(path, 90)
    assert len(load(tmp_path / "run").test("client-0").y)


def test_the_digest_covers_every_sample_label_and_owner():
    dataset = load_digits(DataSpec(max_samples=60, max_test_samples=20))
    digest = dataset_digest(dataset)
    assert dataset_digest(load_digits(DataSpec(max_samples=60, max_test_samples=20))) == digest
    for part in ("train", "test"):
        split = getattr(dataset, part)
        for name in "xy":
            values = getattr(split, name).clone()
            values[-1] = values[-1] + 1
            other = replace(dataset, **{part: replace(split, **{name: values})})
            assert dataset_digest(other) != digest, (part, name)
    assert dataset_digest(replace(dataset, test=None)) != digest
    owners = [np.arange(len(dataset.train)) % 3, np.arange(len(dataset.train)) % 2]
    digests = {dataset_digest(replace(dataset, groups=each)) for each in owners}
    assert len(digests | {digest}) == 3


def test_a_run_reads_its_own_data_from_any_directory(tmp_path, monkeypatch):
    """A file of the same name is in the other directory."""
    for name, rows in {"first": 80, "second": 60}.items():
        (tmp_path / name).mkdir()
        table(tmp_path / name / "t.csv", rows, seed=rows)
    monkeypatch.chdir(tmp_path / "first")
    config = on_table("t.csv")
    with pytest.raises(CutError):
        run(config, tmp_path / "run", [CutOff(2, "after")])
    wanted = {name: load(tmp_path / "run").test(name) for name in ("client-0", "client-1")}
    (tmp_path / "none").mkdir()
    for other in ("second", "none"):
        monkeypatch.chdir(tmp_path / other)
        for name, split in wanted.items():
            found = load(tmp_path / "run").test(name)
            assert (found.x == split.x).all()
            assert (found.y == split.y).all()
        assert load(tmp_path / "run").confusion("client-0").to_numpy().sum() == len(
            wanted["client-0"].y
        )
    saved = (tmp_path / "run" / "config.toml").read_text()
    run(resumed(config, tmp_path / "run"), tmp_path / "run")
    assert len(records(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "config.toml").read_text() == saved
    with pytest.raises(StateError, match="already complete"):
        run(resumed(on_table(tmp_path / "first" / "t.csv"), tmp_path / "run"), tmp_path / "run")
    monkeypatch.chdir(tmp_path / "second")
    with pytest.raises(StateError, match=r"'data\.dataset'"):
        run(resumed(on_table(tmp_path / "second" / "t.csv"), tmp_path / "run"), tmp_path / "run")


def test_the_name_of_an_owner_leads_to_its_client(tmp_path):
    path = table(tmp_path / "t.csv", 90)
    head, *rows = path.read_text().splitlines()
    owned = [f"{row},{('st-mary', 'north')[k % 2]}" for k, row in enumerate(rows)]
    path.write_text("\n".join([f"{head},site", *owned]) + "\n")
    run(on_table(path, **{"data.by": "site"}), tmp_path / "run")
    named = json.loads((tmp_path / "run" / "partition.json").read_text())["owners"]
    client = next(name for name, owner in named.items() if owner == "st-mary")
    result = load(tmp_path / "run")
    for call in (result.model, result.test):
        with pytest.raises(StateError, match=f"'st-mary' is the owner of {client}"):
            call("st-mary")
