"""Records of a run, written and read, against JSON that is written here by hand."""

import json
import math

import pytest

from fedhet.base.errors import StateError
from fedhet.runs.directory import (
    read_if_exists,
    read_records,
    read_run_name,
    record_line,
    summary_text,
)
from fedhet.runs.measures import Tail, final_scores, relative, spread, summarize, tail_of
from fedhet.runs.records import (
    Partition,
    PastRound,
    RoundRecord,
    RunSeconds,
    Score,
    Seconds,
    Summary,
)

SCORE = {"mean": 0.5, "std": 0.25, "worst": 0.25, "per_client": {"a": 0.25, "b": 0.75}}
TIMES = {"total": 2.0, "train": 1.0, "evaluate": 0.5, "server": 0.25, "overhead": 0.125}
RECORD = {
    "round": 3, "asked": ["a", "b", "c"], "answered": ["a", "b"], "failed": {"c": "gone"},
    "accuracy": {"common": {"private": SCORE}}, "relative": {"common": {**SCORE, "best": 0.75}},
    "majority": {"common": {"a": 0.5, "b": 0.25}},
    "loss": SCORE, "bytes_up": 10, "bytes_down": 20, "bytes_evaluation": 30,
    "seconds": TIMES, "method": {"kept": 7.0},
    "peak_memory_mb": 12.5,
}  # fmt: skip
BARE = {
    "round": 1, "asked": [], "answered": [], "failed": {}, "accuracy": {}, "relative": {},
    "loss": {}, "bytes_up": 0, "bytes_down": 0, "bytes_evaluation": 0,
    "seconds": dict.fromkeys(TIMES, 0.0), "method": {},
    "peak_memory_mb": 0.0,
}  # fmt: skip


def filled() -> RoundRecord:
    """Return RECORD with the values of a round."""
    record = RoundRecord(3)
    record.asked, record.answered = ["a", "b", "c"], ["a", "b"]
    record.failed["c"] = "gone"
    record.accuracy = summarize({"common": {"private": {"a": 0.25, "b": 0.75, "c": 0.0}}}, ["c"])
    kinds = {"private": {"a": 0.125, "b": 0.75}, "local": {"a": 0.5, "b": 1.0}}
    record.relative = relative({"common": kinds})
    record.majority = {"common": {"a": 0.5, "b": 0.25}}
    record.loss = spread({"b": 0.75, "a": 0.25})
    record.bytes_up, record.bytes_down, record.bytes_evaluation = 10, 20, 30
    record.seconds.add(Seconds(total=2, train=1, evaluate=0.5, server=0.25, overhead=0.125))
    record.method |= {"kept": 7.0}
    record.peak_memory_mb = 12.5
    return record


def test_record_is_written_field_by_field():
    assert json.loads(record_line(filled())) == RECORD
    assert json.loads(record_line(RoundRecord(round=1))) == BARE


def test_records_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(record_line(RoundRecord(1)) + record_line(filled()))
    records, notes = read_records(path)
    assert notes == []
    assert records == [RoundRecord(1), filled()]
    assert records[0].loss is None
    assert "".join(map(record_line, records)) == path.read_text()


def test_records_of_other_versions_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    score = {**SCORE, "std": None, "median": 1, "per_client": {"a": None, "b": 1}}
    record = {"round": 1, "accuracy": {"own": {"x": score}}, "method": {"n": 1, "why": "?"}, "y": 0}
    path.write_text(json.dumps(record) + '\n{"round": 2, "asked')
    (found,), notes = read_records(path)
    scores = found.accuracy["own"]["x"]
    assert scores.mean == 0.5
    assert math.isnan(scores.std)
    assert math.isnan(scores.per_client["a"])
    assert found.method == {"n": 1.0}
    assert "truncated" in notes[0]


def test_nonfinite_values_are_written_as_null(tmp_path):
    """A value that is not finite must not end a run."""
    record = RoundRecord(1)
    record.method |= {"share": math.nan, "most": math.inf, "kept": 7.0}
    record.accuracy = {"common": {"private": Score(mean=-math.inf, per_client={"a": 0.5})}}
    (tmp_path / "metrics.jsonl").write_text(record_line(record))
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written["method"] == {"share": None, "most": None, "kept": 7.0}
    assert written["accuracy"]["common"]["private"] == {
        "mean": None, "std": None, "worst": None, "per_client": {"a": 0.5},
    }  # fmt: skip
    (found,), _ = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(found.method["share"])


@pytest.mark.parametrize("least", [5e-324, 1e-300, 9e-13])
def test_ratio_to_a_missing_accuracy_is_undefined(least):
    kinds = {"private": {"a": 1.0, "b": 0.5}, "local": {"a": least, "b": 0.25}}
    assert relative({"common": kinds})["common"].per_client == {"b": 2.0}


DEEP = "[" * 100_000
TAMPERED = {
    "a loss beyond all": '{"round": 1, "loss": {"mean": 1e308}}',
    "an accuracy beyond all": '{"round": 1, "accuracy": {"common": {"private": {"mean": -1e300}}}}',
    "a figure beyond all": '{"round": 1, "method": {"kept": 1e308}}',
    "a text beyond all": '{"round": 1, "seconds": {"total": "1e400"}}',
    "an integer beyond all": '{"round": 1, "peak_memory_mb": ' + "9" * 400 + "}",
    "more digits than Python reads": '{"round": 1, "bytes_up": ' + "9" * 5000 + "}",
    "a round of 10^30": '{"round": 1' + "0" * 30 + "}",
    "a round below 0": '{"round": -1}',
    "bytes of 10^30": '{"round": 1, "bytes_up": 1' + "0" * 30 + "}",
    "bytes below 0": '{"round": 1, "bytes_down": -1}',
    "deep": '{"round": 1, "asked": ' + DEEP + "}",
    "only deep": DEEP,
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_record_raises(tmp_path, case):
    path = tmp_path / "metrics.jsonl"
    path.write_text(TAMPERED[case] + '\n{"round": 2}\n')
    with pytest.raises(StateError, match=r"metrics\.jsonl: line 1: ") as caught:
        read_records(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("change", ["deep", "seed", "bytes", "mean"])
def test_tampered_summary_raises(tmp_path, change):
    path = tmp_path / "summary.json"
    sound = {"method": "felo", "dataset": "digits", "seed": 1, "rounds": 3}
    changes = {
        "deep": {},
        "seed": {"seed": 10**30},
        "bytes": {"bytes_up": 10**30},
        "mean": {"accuracy": {"common": {"private": {"mean": 1e308}}}},
    }
    path.write_text(DEEP if change == "deep" else json.dumps({**sound, **changes[change]}))
    with pytest.raises(StateError, match=r"summary\.json: "):
        read_if_exists(path, Summary)


def test_tampered_partition_or_run_name_raises(tmp_path):
    path = tmp_path / "partition.json"
    for text in (DEEP, '{"classes": ["a"], "counts": {"c": [1' + "0" * 30 + "]}}"):
        path.write_text(text)
        with pytest.raises(StateError, match=r"partition\.json: "):
            read_if_exists(path, Partition)
    for text in (DEEP, "9" * 5000, "[]", '{"run": [3]}', '{"run": "../x"}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(StateError, match=r"run\.json"):
            read_run_name(tmp_path)


def test_texts_of_a_runs_files_are_printable(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = "\x1b[2Ja\nb"
    score = {"per_client": {odd: 0.5}}
    path.write_text(
        json.dumps(
            {"round": 1, "asked": [odd], "failed": {odd: odd}, "accuracy": {odd: {odd: score}}}
        )
    )
    (record,), _ = read_records(path)
    shown = [*record.asked, *record.failed, *record.failed.values(), *record.accuracy]
    shown += [*record.accuracy[shown[-1]], *record.accuracy[shown[-1]][shown[-1]].per_client]
    assert shown == [r"\x1b[2Ja\nb"] * 6


def test_summary_is_written_field_by_field(tmp_path):
    record = filled()
    summary = Summary(
        method="felo", dataset="digits", seed=1, rounds=3, clients=3, models={"a": "mlp"},
        headline="common", headline_kinds={"common": "private"},
        accuracy=final_scores([record])["accuracy"],
        history=[PastRound.from_record(record)],
        bytes_up=10, bytes_down=20, bytes_evaluation=30,
        seconds=RunSeconds(total=2.00049, start=0.5).rounded(),
        peak_memory_mb=12.5, versions={"torch": "2"},
    )  # fmt: skip
    brief = {
        "round": 3, "accuracy": {"common": {"private": 0.5}}, "bytes_up": 10, "bytes_down": 20,
        "seconds": 2.0,
    }  # fmt: skip
    assert json.loads(summary_text(summary)) == {
        "method": "felo", "dataset": "digits", "seed": 1, "rounds": 3, "clients": 3,
        "models": {"a": "mlp"}, "headline": "common", "headline_kinds": {"common": "private"},
        "accuracy": {"common": {"private": {**SCORE, "tail": 0.5, "clients": 2}}},
        "history": [brief], "bytes_up": 10, "bytes_down": 20, "bytes_evaluation": 30,
        "seconds": {**dict.fromkeys(TIMES, 0.0), "total": 2.0, "start": 0.5},
        "peak_memory_mb": 12.5, "versions": {"torch": "2"}, "hardware": {},
    }  # fmt: skip
    with_ratios = summary.model_copy(update={"relative": record.relative})
    path = tmp_path / "summary.json"
    path.write_text(summary_text(with_ratios))
    assert json.loads(path.read_text())["relative"] == {
        "common": {
            "best": 0.75, "mean": 0.5, "std": 0.25, "worst": 0.25,
            "per_client": {"a": 0.25, "b": 0.75},
        }
    }  # fmt: skip
    assert read_if_exists(path, Summary) == with_ratios
    assert read_if_exists(tmp_path / "none.json", Summary) is None


def test_invalid_line_raises(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"round": 2, "bytes_up": "many"}\n')
    with pytest.raises(StateError, match=r"metrics\.jsonl: line 2: bytes_up: "):
        read_records(path)


def rounds_of(means):
    """Return a record per round; rounds in `means` have an evaluation with this accuracy."""
    records = []
    for number, mean in means.items():
        record = RoundRecord(number)
        if mean is not None:
            clients = {"a": mean - 0.125, "b": mean + 0.125}
            record.accuracy = summarize({"common": {"private": clients}})
        records.append(record)
    return records


@pytest.mark.parametrize(
    ("rounds", "evaluated", "expected"),
    [
        (1, [1], [1]),
        (4, [1, 2, 3, 4], [4]),
        (5, [1, 2, 3, 4, 5], [5]),
        (6, [1, 2, 3, 4, 5, 6], [5, 6]),
        (10, range(1, 11), [9, 10]),
        (11, range(1, 12), [9, 10, 11]),
        (20, range(2, 21, 2), [18, 20]),
        (12, [4, 8, 12], [12]),
        (9, [2, 4], [4]),
        (100, [79, 80, 81, 100], [81, 100]),
        (3, [], []),
    ],
)
def test_tail_is_the_mean_of_the_last_fifth(rounds, evaluated, expected):
    accuracy = {number: 0.25 + number / 256 for number in evaluated}
    records = rounds_of({number: accuracy.get(number) for number in range(1, rounds + 1)})
    found = tail_of(records, "common", "private")
    assert list(found.rounds) == expected
    if expected:
        assert found.mean == pytest.approx(sum(accuracy[n] for n in expected) / len(expected))
    else:
        assert math.isnan(found.mean)


def test_tail_needs_one_protocol_and_kind_and_numbers():
    records = rounds_of(dict.fromkeys(range(1, 11), 0.5))
    records[8].accuracy["common"]["private"] = spread({"a": math.nan})
    records[8].accuracy["common"]["proxy"] = spread({"a": 0.75})
    records[9].accuracy["personal"] = {"private": spread({"a": 1.0})}
    assert tail_of(records, "common", "private") == Tail(0.5, (10,))
    assert tail_of(records, "common", "proxy") == Tail(0.75, (9,))
    assert tail_of(records, "personal", "private") == Tail(1.0, (10,))
    assert tail_of(records, "personal", "proxy").rounds == ()
    assert tail_of([], "common", "private").rounds == ()


def test_summarys_scores_are_the_last_rounds_with_the_tail_beside():
    records = rounds_of({1: 0.25, 2: 0.375, 3: 0.5, 4: 0.75, 5: 0.5, 6: 0.25})
    found = final_scores(records)["accuracy"]["common"]["private"]
    assert (found.mean, found.std, found.worst) == (0.25, 0.125, 0.125)
    assert found.per_client == {"a": 0.125, "b": 0.375}
    assert found.tail == 0.375
    assert final_scores([]) == final_scores(rounds_of({1: None})) == {}
