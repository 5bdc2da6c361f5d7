"""Inputs of users that must be right or refused: models, settings, paths, and process state."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Features
from datasets import Dataset as Rows
from datasets import Image as HubImage
from federation import SMALL, small, without_figures
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import fedhet
from fedhet.base.disk import expanded, read_toml_tables
from fedhet.base.errors import DataError, ModelError, SettingsError, StateError
from fedhet.base.seeding import isolated, seeded
from fedhet.cli import app
from fedhet.config.resolve import resolve
from fedhet.data.columns import Column, infer_column
from fedhet.data.dataset import Dataset, Format, Split
from fedhet.data.rows import Values, read_table
from fedhet.data.site import site_data
from fedhet.data.sources.hub import read_hub
from fedhet.data.sources.python import _checked, _read_mapping, _read_samples
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load, read_source
from fedhet.data.tables import infer_schema
from fedhet.data.words import encode_owners, find_categories, find_words
from fedhet.inference.api import _resolve
from fedhet.inference.objects import dataset_name
from fedhet.kinds import IMAGE, images_or_rows
from fedhet.learning.devices import CPU
from fedhet.learning.training import evaluate, logits_of
from fedhet.models import Refitted
from fedhet.models.user_model import check_use
from fedhet.runs.log import Watcher
from fedhet.settings.run import EFFECTIVE_IF, RunSettings, without_effect
from fedhet.settings.schema import plain

SHAPE = (1, 4, 4)


class Notices(Watcher):
    """Watcher that keeps the notices of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


class Shift(nn.Module):
    """Model that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.sub_(0.5).flatten(1))


class TestModelsThatWriteIntoTheirInput:
    """A model receives a copy of the stored samples, and a user's model must not change it."""

    @pytest.mark.parametrize("size", [3, 40])
    def test_evaluation_leaves_the_samples_unchanged(self, size):
        model, x = Shift(), torch.randn(size, *SHAPE)
        y, before = torch.randint(3, (size,)), x.clone()
        first = logits_of(model, x, CPU)
        score = evaluate(model, x, y, CPU)
        assert torch.equal(x, before)
        assert torch.equal(logits_of(model, x, CPU), first)
        assert score.accuracy == pytest.approx((first.argmax(1) == y).double().mean().item())

    def test_an_estimator_receives_a_copy(self):
        class Careless:
            def fit(self, x, y):
                x -= 1.0
                y[:] = 0

            def predict(self, x):
                x[:] = 0.0
                return np.zeros(len(x), np.int64)

        x, y = torch.randn(8, 5), torch.arange(8) % 2
        before = x.clone(), y.clone()
        model = Refitted("careless", Careless, 2, 0)
        model.fit(x, y)
        model(x)
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])

    @pytest.mark.parametrize(
        "first",
        [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Hardtanh(inplace=True), Shift()],
    )
    def test_a_model_that_changes_its_input_is_refused(self, first):
        layers = [first] if isinstance(first, Shift) else [first, nn.Flatten(), nn.Linear(16, 3)]
        with pytest.raises(ModelError, match=r"'mine': a training step changes the input"):
            check_use("mine", nn.Sequential(*layers), nn.Sequential(nn.Linear(1, 1)), SHAPE, IMAGE)

    def test_a_model_that_copies_its_input_is_accepted(self):
        def make() -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(inplace=True))

        check_use("mine", make(), make(), SHAPE, IMAGE)


class TestBatchNorm:
    """A batch norm that needs two samples is refused before the run."""

    def test_without_running_statistics(self):
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, track_running_stats=False))
        with pytest.raises(ModelError, match=r"'mine': 1: batch norm without running statistics"):
            check_use("mine", model, model, SHAPE, IMAGE)

    def test_a_function_that_needs_two_samples(self):
        class Normalized(nn.Linear):
            def forward(self, x):
                return super().forward(
                    nn.functional.batch_norm(x.flatten(1), None, None, training=True)
                )

        with pytest.raises(ModelError, match=r"'mine': the prediction of a single sample failed"):
            check_use("mine", Normalized(16, 3), Normalized(16, 3), SHAPE, IMAGE)


class TestSettingsWithoutEffect:
    """A run notes each changed setting that has no effect."""

    VALUES = {
        "fraction": 0.5, "early-stopping": 4, "keep-best": True, "data.partition": "iid",
        "models.assignment": "shuffle", "engine.cpus-per-client": 2.0,
        "engine.gpus-per-client": 0.5, "training.schedule": "cosine",
        "training.keep-optimizer": True,
        "data.alpha": 0.1, "data.shards": 3, "data.classes-per-client": 3,
        "data.label-space": [2, 3], "data.subclasses": [1, 2], "data.samples-per-class": 9,
        "data.public-samples": 9, "data.min-labeled": 3, "training.momentum": 0.5,
        "training.milestones": [1], "training.decay": 0.5, "training.patience": 3,
        "training.semi-threshold": 0.5, "training.semi-weight": 2.0, "pace.over-selection": 0.5,
        "pace.grace": 1.0, "pace.max-age": 3, "pace.spread": 2.0, "pace.sample-ms": 2.0,
        "pace.mbit": 5.0, "pace.slowdown": 2.0, "attack.scale": 2.0, "attack.direction": "run",
        "defense.malicious-fraction": 0.1, "privacy.delta": 1e-4, "privacy.max-grad-norm": 2.0,
        "privacy.class-clip": 2.0, "wire.keep": 0.2,
    }  # fmt: skip
    EFFECTIVE = {
        "fraction": {"clients": 4}, "early-stopping": {"rounds": 5}, "keep-best": {"rounds": 2},
        "models.assignment": {"models.pool": ["mlp", "cnn2"]},
        "engine.cpus-per-client": {"engine.backend": "ray"},
        "engine.gpus-per-client": {"engine.backend": "ray"},
        "training.schedule": {"rounds": 2}, "training.keep-optimizer": {"rounds": 2},
        "data.partition": {"data.by": ""}, "data.alpha": {"data.by": ""},
        "data.shards": {"data.partition": "shards", "data.by": ""},
        "data.classes-per-client": {"data.partition": "classes", "data.by": ""},
        "data.label-space": {"data.partition": "superclasses", "data.by": ""},
        "data.subclasses": {"data.partition": "superclasses", "data.by": ""},
        "data.samples-per-class": {"data.partition": "superclasses", "data.by": ""},
        "data.public-samples": {"data.public-dataset": "digits"},
        "data.min-labeled": {"data.labeled-alpha": 0.5},
        "training.momentum": {"training.optimizer": "sgd"},
        "training.milestones": {"training.schedule": "step"},
        "training.decay": {"training.schedule": "step"},
        "training.patience": {"training.schedule": "plateau"},
        "training.semi-threshold": {"training.semi": "fixmatch"},
        "training.semi-weight": {"training.semi": "fixmatch"},
        "pace.over-selection": {"fraction": 0.5, "clients": 4},
        "pace.grace": {"pace.min-replies": 2},
        "pace.max-age": {"pace.timeout": "3x"}, "pace.spread": {"pace.clock": "log-normal"},
        "pace.sample-ms": {"pace.clock": "log-normal"}, "pace.mbit": {"pace.clock": "log-normal"},
        "pace.slowdown": {"pace.stragglers": 0.5},
        "attack.scale": {"attack.kind": "paf", "clients": 3},
        "attack.direction": {"attack.kind": "paf", "clients": 3},
        "defense.malicious-fraction": {"defense.average": "median"},
        "privacy.delta": {"privacy.epsilon": 1.0},
        "privacy.max-grad-norm": {"privacy.epsilon": 1.0},
        "privacy.class-clip": {"privacy.epsilon": 1.0}, "wire.keep": {"wire.encoding": "top-k"},
    }  # fmt: skip
    IDLE = {
        "clients": 1, "rounds": 1, "models.pool": ["mlp"], "engine.backend": "inline",
        "data.by": "ward", "data.dataset": "table:x.csv",
    }  # fmt: skip

    @staticmethod
    def noted(values: dict[str, object]) -> list[str]:
        tables: dict[str, object] = {}
        for name, value in values.items():
            table, _, field = name.rpartition(".")
            (tables.setdefault(table, {}) if table else tables)[field] = value
        run = RunSettings.model_validate(tables)
        return [text.split("'")[1] for text in without_effect(run, has_scores=True)]

    def test_every_row_has_an_example(self):
        assert {*EFFECTIVE_IF} == {*self.VALUES} == {*self.EFFECTIVE} <= {*RunSettings.fields()}

    @pytest.mark.parametrize("name", sorted(EFFECTIVE_IF))
    def test_a_changed_setting_is_noted_only_if_it_has_no_effect(self, name):
        value = self.VALUES[name]
        assert value != plain(RunSettings.fields()[name].default)
        assert name in self.noted(self.IDLE | {name: value})
        assert name not in self.noted(self.IDLE | self.EFFECTIVE[name] | {name: value})

    def test_defaults_are_not_noted(self):
        assert without_effect(RunSettings(), has_scores=False) == []

    def test_selection_without_scores(self):
        values = {"early-stopping": 1, "keep-best": True, "evaluate-every": 2, "evaluate-from": 3}
        run = RunSettings(**values)
        assert without_effect(run, has_scores=True) == []
        noted = without_effect(run, has_scores=False)
        assert [text.split("'")[1] for text in noted] == list(values)


class TestRunsWithoutScores:
    """A run that keeps all scores at the clients ends as planned, and says so at its start."""

    @pytest.fixture
    def wards(self, tmp_path) -> Path:
        path = tmp_path / "wards.csv"
        draws = np.random.default_rng(0)
        rows = [
            f"{'abc'[i % 3]},{draws.normal():.3f},{draws.normal():.3f},{i // 3 % 2}"
            for i in range(180)
        ]
        path.write_text("\n".join(["ward,x,z,outcome", *rows]))
        return path

    @pytest.mark.parametrize(
        "privacy",
        [
            {"privacy.epsilon": 8.0, "privacy.delta": 1e-3},
            {"privacy.secure-aggregation": True},
            {
                "privacy.noise-multiplier": 1.0,
                "privacy.delta": 1e-3,
                "privacy.secure-aggregation": True,
            },
        ],
    )
    def test_a_private_run_ends_as_planned(self, wards, tmp_path, privacy):
        notices = Notices()
        result = fedhet.run(
            "fedavg", dataset=f"table:{wards}", clients=3, rounds=2, models="mlp", backend="inline",
            out=tmp_path / "run", progress=False, watchers=[notices],
            settings={"data.target": "outcome", "data.by": "ward", "early-stopping": 1, **privacy},
        )  # fmt: skip
        assert json.loads((tmp_path / "run/summary.json").read_text())["rounds"] == 2
        assert np.isnan(result.score)
        assert any("the run reports no scores" in text for text in notices.texts)
        assert any("'early-stopping' = 1 has no effect" in text for text in notices.texts)


class TestProcessState:
    """A run neither depends on the state of the process nor changes it."""

    SETTINGS = {k: v for k, v in SMALL.items() if k not in ("clients", "rounds", "models.pool")}

    def accuracy(self, out: Path) -> float:
        result = fedhet.run(
            "fedavg", clients=2, rounds=1, models="mlp", progress=False, out=out,
            settings=self.SETTINGS | {"data.max-samples": 120},
        )  # fmt: skip
        predicted = result.predict("client-0", result.test()[0], kind="global")
        return result.score + float(predicted.probabilities.sum())

    def state(self) -> tuple[object, ...]:
        return (
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
            torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision(),
            torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(),
            torch.random.get_rng_state().tolist(), random.getstate(),
            np.random.get_state()[1].tolist(), np.geterr(), list(warnings.filters),
        )  # fmt: skip

    def test_a_run_in_an_unusual_process(self, tmp_path):
        expected = self.accuracy(tmp_path / "usual")
        with isolated(), torch.device("meta"), torch.autocast("cpu"), torch.no_grad():
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(2)
            torch.set_deterministic_debug_mode("error")
            warnings.simplefilter("error")
            with np.errstate(all="raise"):
                before = self.state()
                assert self.accuracy(tmp_path / "unusual") == expected
                assert self.state() == before

    def test_two_runs_at_once(self, tmp_path):
        expected, results = self.accuracy(tmp_path / "alone"), dict[int, float]()

        def run(number: int) -> None:
            results[number] = self.accuracy(tmp_path / f"run-{number}")

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {0: expected, 1: expected}

    def test_seeded_user_code_draws_the_same_numbers(self):
        def draw() -> tuple[float, ...]:
            with seeded(3, "client-0"):
                return random.random(), np.random.rand(), torch.rand(()).item()

        first, before = draw(), self.state()
        random.random(), np.random.rand(), torch.rand(())
        changed = self.state()
        assert draw() == first
        assert self.state() == changed != before


class TestPaths:
    """A path starts in the home directory if it starts with `~`, wherever a user writes it."""

    RUN = ("--backend", "inline", "--clients", "2", "--models", "mlp", "--rounds", "1",
           "--set", "max-samples=100")  # fmt: skip

    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        return tmp_path

    def test_out_of_a_run(self, home):
        (home / "run.toml").write_text('method = "local"\nout = "~/by-config"\n')
        for options in (
            ("local", "--out=~/by-flag"),
            ("--config", "~/run.toml"),
            ("local", "--set", "out=~/by-set"),
        ):
            result = CliRunner().invoke(app, ["run", *options, *self.RUN])
            assert result.exit_code == 0, result.output
        made = [
            (home / name / "summary.json").exists() for name in ("by-flag", "by-config", "by-set")
        ]
        assert all(made)
        assert not any(Path().iterdir())
        result = fedhet.load("~/by-flag")
        assert result.summary is not None
        fedhet.compare(["~/by-flag", "~/by-config"], out="~/compared")
        result.export("client-0", "~/my model.safetensors")
        assert (home / "compared").is_dir()
        assert (home / "my model.safetensors").exists()
        for command in (["report", "~/by-flag"], ["status", "~/by-set"]):
            assert CliRunner().invoke(app, command).exit_code == 0

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
    def test_a_toml_file_in_the_encodings_of_windows(self, home, encoding):
        path = home / "run file.toml"
        path.write_bytes('out = "é"\r\n[data]\r\nby = "ward"\r\n'.encode(encoding))
        assert read_toml_tables(path) == {"out": "é", "data": {"by": "ward"}}

    def test_a_toml_file_in_another_encoding(self, home):
        path = home / "run.toml"
        path.write_bytes('out = "é"'.encode("latin-1"))
        with pytest.raises(StateError, match=r"run\.toml: not valid UTF-8.*Save the file in UTF-8"):
            read_toml_tables(path)


def test_small_settings_have_an_effect():
    assert without_effect(resolve(small().flat()).run, has_scores=True) == []


class TestPredictTheTrainingData:
    """Every form of data from which a run is trained can be predicted, with one row per sample."""

    @staticmethod
    def make(form: str, root: Path) -> tuple[str, dict[str, object]]:
        """Write 24 samples of two classes in a form, and return the dataset and its settings."""
        root.mkdir()
        draws, labels = np.random.default_rng(0), np.arange(24) % 2
        images = draws.integers(0, 255, (24, 8, 8), np.uint8)
        rows = [f"{draws.normal():.3f},{draws.normal():.3f},{'ab'[k]}" for k in labels]
        words = [f"{('good', 'bad')[k]} film,number {n},{'ab'[k]}" for n, k in enumerate(labels)]
        source, _, layout = form.partition("-")
        names = ("train", "test") if layout == "parts" else ("one", "two")
        parts = dict(zip(names, (slice(0, 16), slice(16, 24)), strict=True))
        settings: dict[str, object] = {"data.target": "y"} if source == "table" else {}
        if form in ("table-one", "text-one", "text-columns"):
            lines = ["x,z,y", *rows] if source == "table" else ["text,more,label", *words]
            (root / "all.csv").write_text("\n".join(lines))
            if form == "text-columns":
                settings["data.text-column"] = ["text", "more"]
            return f"{source}:{root}/all.csv", settings
        if source == "table":
            for name, part in parts.items():
                (root / f"{name}.csv").write_text("\n".join(["x,z,y", *rows[part]]))
        elif source == "npz":
            if layout == "clients":
                ends = {
                    "train/0": (0, 8),
                    "test/0": (8, 12),
                    "train/1": (12, 20),
                    "test/1": (20, 24),
                }
                parts = {name: slice(*each) for name, each in ends.items()}
            for name, part in parts.items():
                path = root / f"{name}.npz"
                path.parent.mkdir(exist_ok=True)
                np.savez(path, x=images[part], y=labels[part])
        else:
            for row, label in enumerate(labels):
                path = root / "ab"[label] / str(row)
                path.parent.mkdir(exist_ok=True)
                if source == "text":
                    path.with_suffix(".txt").write_text(words[row])
                else:
                    Image.fromarray(images[row]).save(path.with_suffix(".png"))
        return f"{source}:{root}", settings

    @pytest.mark.parametrize(
        "form",
        ["table-one", "table-parts", "table-clients", "text-one", "text-columns", "text-folder",
         "imagefolder-folder", "npz-parts", "npz-clients"],
    )  # fmt: skip
    def test_form(self, form, tmp_path):
        dataset, changes = self.make(form, tmp_path / "data")
        result = fedhet.run(
            "local", dataset=dataset, clients=2, rounds=1, progress=False, out=tmp_path / "run",
            models="text-cnn" if form.startswith("text") else "mlp", backend="inline",
            settings={"data.min-samples": 2, "data.max-tokens": 8, **changes},
        )  # fmt: skip
        place = Path(dataset.partition(":")[2])
        predicted = result.predict("client-0", place)
        assert len(predicted) == 24
        command = ["predict", str(tmp_path / "run"), "client-0", str(place), "--csv"]
        printed = CliRunner().invoke(app, command)
        assert printed.exit_code == 0, printed.output
        lines = [line for line in printed.output.splitlines() if line.count(",") >= 3]
        names, classes, *_ = zip(*(line.split(",") for line in lines[1:]), strict=True)
        assert list(classes) == predicted.names
        assert len({*names}) == 24

    def test_tables_with_other_files(self, tmp_path):
        dataset, changes = self.make("table-one", tmp_path / "data")
        result = fedhet.run(
            "local", dataset=dataset, clients=2, rounds=1, progress=False, out=tmp_path / "run",
            models="mlp", backend="inline", settings={"data.min-samples": 2, **changes},
        )  # fmt: skip
        notes, table = tmp_path / "notes.txt", tmp_path / "data/all.csv"
        notes.write_text("x")
        for paths in ([notes], [table, notes]):
            with pytest.raises(DataError, match=r"notes\.txt: expected tables"):
                result.predict("client-0", paths)


def written(path: Path, *rows: object) -> str:
    """Write the rows of a table, and return the dataset `table:PATH`."""
    path.write_text("\n".join(map(str, rows)) + "\n", encoding="utf-8")
    return f"table:{path}"


class TestTables:
    """No column becomes a feature by mistake, and dates do not depend on the clock."""

    def test_now_and_today_are_words(self, tmp_path):
        rows = [f"{k},{('now', 'today')[k % 2]},{k % 2}" for k in range(20)]
        place = written(tmp_path / "a.csv", "a,since,y", *rows)
        table = read_table(Path(place[6:]), DataSpec(target="y"))
        assert infer_column("since", table).type == "category"

    @pytest.mark.parametrize("form", ["", "%Y-%m-%d"])
    def test_now_and_today_are_no_dates(self, form):
        days = Column(name="since", type="date", format=form).numbers(
            Values.from_texts(["1970-01-03", "today", "NOW"])
        )
        assert days[0] == 2
        assert np.isnan(days[1:]).all()

    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_the_index_of_selected_rows_is_no_feature(self, tmp_path, ending):
        frame = pd.DataFrame({"a": np.linspace(0, 1, 60), "y": np.repeat([0, 1], 30)})
        selected, path = frame.sample(frac=0.5, random_state=0), tmp_path / f"a.{ending}"
        selected.to_csv(path) if ending == "csv" else selected.to_parquet(path)
        table = read_table(path, DataSpec(target="y"))
        index = next(name for name in table.columns if name not in ("a", "y"))
        assert infer_column(index, table).type == "ignore"

    @pytest.mark.parametrize("values", [[k // 2 for k in range(20)], [k / 4 for k in range(20)]])
    def test_other_numbers_without_a_name_are_a_feature(self, tmp_path, values):
        place = written(tmp_path / "a.csv", ",y", *(f"{v},{k % 2}" for k, v in enumerate(values)))
        table = read_table(Path(place[6:]), DataSpec(target="y"))
        assert infer_column("Unnamed: 0", table).type == "number"

    @pytest.mark.parametrize(("first", "second"), [("North", "north"), ("é", "e\u0301")])
    def test_owners_that_may_be_the_same_are_named(self, tmp_path, caplog, first, second):
        rows = [f"{k / 7},{(first, second)[k % 2]},{k // 2 % 2}" for k in range(60)]
        place = written(tmp_path / "a.csv", "a,who,y", *rows)
        spec = DataSpec(dataset=place, target="y", by="who", clients=2)
        RunData(spec).validate()
        assert "are different clients" in caplog.text


class TestImages:
    """Images of one class, or of one pixel value, are the same wherever they are read."""

    @staticmethod
    def images(*modes: str) -> list[tuple[Image.Image, int]]:
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (len(modes), 6, 6, 3), dtype=np.uint8)
        return [
            (Image.fromarray(each).convert(mode), k % 2)
            for k, (each, mode) in enumerate(zip(pixels, modes, strict=True))
        ]

    @pytest.mark.parametrize("modes", [("P",) * 4, ("L", "RGB") * 2, ("RGBA",) * 4, ("1",) * 4])
    def test_a_dataset_of_images_is_read_as_files_are(self, tmp_path, modes):
        pairs = self.images(*modes)
        for k, (image, label) in enumerate(pairs):
            (tmp_path / str(label)).mkdir(exist_ok=True)
            image.save(tmp_path / str(label) / f"{k}.png")
        files = read_source(DataSpec(dataset=f"imagefolder:{tmp_path}")).train
        given = _read_samples(Pairs(pairs), "data")[0]
        order = [k for label in (0, 1) for k in range(len(pairs)) if pairs[k][1] == label]
        read = files.x.numpy()
        assert given.dtype == np.uint8
        assert np.array_equal(np.broadcast_to(given[order], read.shape), read)

    @pytest.mark.parametrize("dtype", ["int64", "uint16"])
    def test_integers_of_an_unknown_range_are_refused(self, dtype):
        with pytest.raises(DataError, match=f"must be uint8, got {dtype}. Convert the images"):
            images_or_rows(np.ones((2, 1, 4, 4), dtype), "x")
        assert images_or_rows(np.ones((2, 4), dtype), "x").dtype == np.float32

    @pytest.mark.parametrize("form", ["NFC", "NFD"])
    def test_a_class_has_one_name_in_all_forms_of_unicode(self, tmp_path, form):
        for part, name in (("train", "é"), ("test", unicodedata.normalize(form, "é"))):
            for folder in (name, "b"):
                (tmp_path / part / folder).mkdir(parents=True)
                Image.new("L", (4, 4)).save(tmp_path / part / folder / "1.png")
        found = read_source(DataSpec(dataset=f"imagefolder:{tmp_path}"))
        assert found.format.classes == ("b", "é")
        assert found.test is not None
        assert found.test.y.tolist() == [0, 1]

    @pytest.mark.parametrize("form", ["NFC", "NFD"])
    def test_a_label_table_finds_files_in_all_forms_of_unicode(self, tmp_path, form):
        for name in ("é", "b"):
            Image.new("L", (4, 4)).save(tmp_path / f"{unicodedata.normalize(form, name)}.png")
        written(tmp_path / "labels.csv", "file,y", "é.png,0", "b.png,1")
        assert len(read_source(DataSpec(dataset=f"imagefolder:{tmp_path}")).train) == 2

    def test_classes_that_may_be_the_same_are_refused(self, tmp_path):
        for place in ("east/Benign", "east/other", "west/benign", "west/other"):
            (tmp_path / place).mkdir(parents=True)
            Image.new("L", (4, 4)).save(tmp_path / place / "1.png")
        with pytest.raises(DataError, match=r"east/Benign: unexpected .* Merge it with 'benign'"):
            read_source(DataSpec(dataset=f"imagefolder:{tmp_path}", by="folder"))


class Pairs(torch.utils.data.Dataset):
    """Dataset whose items are those of a list; an item that is an exception is raised."""

    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int):
        if isinstance(self.items[row], Exception):
            raise self.items[row]
        return self.items[row]


ROWS, LABELS = np.eye(8, 4, dtype=np.float32), np.arange(8) % 2


class TestDataFromPython:
    """Data of a user's function are right, or the sample or the field at fault is named."""

    @pytest.mark.parametrize(
        ("item", "fault"),
        [
            (OSError("img3.png is truncated"), "sample 3: OSError: img3.png is truncated"),
            ({"image": 1, "label": 0}, r"sample 3: expected a pair \(x, y\), got dict"),
            ((1, 2, 3), r"sample 3: expected a pair \(x, y\), got tuple"),
        ],
    )
    def test_the_sample_at_fault_is_named(self, item, fault):
        with pytest.raises(DataError, match=f"^data: {fault}"):
            _read_samples(Pairs([(0.0, 1), (1.0, 0), (2.0, 1), item]), "data")

    @pytest.mark.parametrize("classes", [{"a", "b"}, {"a": 1, "b": 0}, 2, "ab"])
    def test_class_names_need_an_order(self, classes):
        with pytest.raises(DataError, match="classes: expected a list of names in the order"):
            _read_mapping({"train": (ROWS, LABELS), "classes": classes}, "data")

    def test_class_names_in_an_array_are_read(self):
        names = np.array(["a", "b"])
        read = _read_mapping({"train": (ROWS, LABELS), "classes": names}, "data")
        assert read.classes == ("a", "b")

    def test_the_number_of_classes_is_not_their_names(self):
        data = Pairs(list(zip(ROWS, LABELS.tolist(), strict=True)))
        data.classes = 2
        assert _read_mapping(data, "data").classes == ()

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({"y": LABELS * 5}, r"train.y must be int64 \[8\], labels from 0 to 1"),
            ({"y": LABELS - 1}, r"train.y must be int64 \[8\], labels from 0 to 1"),
            ({"y": LABELS.astype(np.int32)}, r"train.y must be int64 \[8\]"),
            ({"y": LABELS[:, None]}, r"train.y must be int64 \[8\]"),
            ({"y": LABELS[:-1]}, r"train.y must be int64 \[8\]"),
            ({"x": ROWS.astype(np.float64)}, r"train.x must be finite .* got torch.float64"),
            ({"x": ROWS * np.nan}, "train.x must be finite"),
            ({"x": ROWS[:, :3]}, r"train.x must be .*\['N', 4\], got torch.float32 \[8, 3\]"),
            ({"classes": ("a", "a")}, "expected different class names"),
        ],
    )
    def test_a_dataset_must_match_its_format(self, change, fault):
        given = {"x": ROWS, "y": LABELS, "classes": ("a", "b")} | change
        split = Split(torch.from_numpy(given["x"]), torch.from_numpy(given["y"]))
        data = Dataset("own", split, None, Format("table", (4,), given["classes"]))
        with pytest.raises(DataError, match=f"^own: {fault}"):
            _checked(data, "own")

    def test_a_dataset_of_arrays_is_converted(self):
        split = Split(ROWS, torch.from_numpy(LABELS))
        x = torch.from_numpy(ROWS).requires_grad_()
        data = Dataset("own", split, Split(x, LABELS), Format("table", (4,), ("a", "b")))
        read = _checked(data, "own")
        assert all(isinstance(each, torch.Tensor) for each in (read.train.x, read.test.y))
        assert not read.test.x.requires_grad

    def test_a_label_of_the_test_set_alone_is_refused(self, tmp_path):
        np.savez(tmp_path / "train.npz", x=ROWS, y=LABELS)
        np.savez(tmp_path / "test.npz", x=ROWS, y=np.full(8, 2))
        with pytest.raises(DataError, match="label 2 has test samples, but no training samples"):
            read_source(DataSpec(dataset=f"npz:{tmp_path}"))

    def test_classes_without_samples_are_noted(self, tmp_path, caplog):
        np.savez(tmp_path / "train.npz", x=ROWS, y=LABELS)
        read_source(DataSpec(dataset=f"npz:{tmp_path}"))
        assert not caplog.text
        np.savez(tmp_path / "train.npz", x=ROWS, y=LABELS * 2 + 1)
        read_source(DataSpec(dataset=f"npz:{tmp_path}"))
        assert "2 of the classes 0 to 3 have no samples" in caplog.text

    def test_each_run_reads_the_data_and_the_model_anew(self, tmp_path):
        size = {"samples": 60, "width": 4}

        def load():
            x = np.random.default_rng(0).normal(size=(size["samples"], 4)).astype(np.float32)
            return x, (x[:, 0] > 0).astype(int)

        def model(shape, classes):
            layers = nn.Flatten(), nn.Linear(4, size["width"]), nn.ReLU()
            return nn.Sequential(*layers), nn.Linear(size["width"], classes)

        for place in ("first", "second"):
            with without_figures():
                result = fedhet.run(
                    "fedavg", models=model, dataset=load, clients=2, rounds=1, backend="inline",
                    progress=False, out=tmp_path / place,
                )  # fmt: skip
            assert result.clients["samples"].sum() == size["samples"]
            assert result.model("client-0").classifier.in_features == size["width"]
            size |= {"samples": 40, "width": 8}

    def test_scalars_of_numpy_are_numbers(self):
        given = [("rounds", np.int64(3)), ("keep-best", np.bool_(True)), ("seed", np.uint8(2))]
        run = _resolve("fedavg", [*given, ("training.lr", [np.float32(0.5), 0.25])]).run
        assert (run.rounds, run.keep_best, run.seed) == (3, True, 2)
        assert run.training.lr == (0.5, 0.25)

    def test_a_null_character_in_a_path_is_refused(self):
        with pytest.raises(SettingsError, match="a path must not contain a null character"):
            expanded("a\0b")


class TestHub:
    """Missing samples and texts of another type are refused, and not read as words."""

    @pytest.mark.parametrize("value", [None, ["a", "b"], {"en": "a"}, " "])
    def test_a_value_that_is_no_text(self, tmp_path, value):
        other = "word" if value in (None, " ") else value  # A column has one type.
        rows = [{"text": other if k else value, "label": k % 2} for k in range(6)]
        Rows.from_list(rows).save_to_disk(tmp_path / "a")
        with pytest.raises(DataError, match="row 0, column 'text': expected a text, got "):
            read_hub(str(tmp_path / "a"), DataSpec(sample_kind="text"))

    def test_one_of_several_texts_may_be_missing(self, tmp_path):
        rows = [{"title": None, "body": "word", "label": k % 2} for k in range(6)]
        rows[0]["title"] = "title"
        Rows.from_list(rows).save_to_disk(tmp_path / "a")
        spec = DataSpec(sample_kind="text", text_column=("title", "body"))
        x = read_hub(str(tmp_path / "a"), spec).train.x
        assert (x[:, :3] > 0).sum(1).tolist() == [2, 1, 1, 1, 1, 1]

    def test_a_missing_image(self, tmp_path):
        features = Features({"image": HubImage(), "label": ClassLabel(names=["a", "b"])})
        image = Image.new("L", (4, 4))
        rows = {"image": [image, None, image, image], "label": [0, 1, 0, 1]}
        Rows.from_dict(rows, features=features).save_to_disk(tmp_path / "a")
        with pytest.raises(DataError, match="image 1: the image is missing"):
            read_hub(str(tmp_path / "a"), DataSpec())


class TestOutputsOfModels:
    """A custom model returns logits, and all its state is in its state dict."""

    @staticmethod
    def made(function):
        with seeded(0, "a"):
            model = function()
        with seeded(0, "a"):
            another = function()
        check_use("mine", model, another, SHAPE, IMAGE)

    @pytest.mark.parametrize("in_training", [True, False])
    def test_probabilities_are_refused(self, in_training):
        class Head(nn.Linear):
            def forward(self, x):
                logits = super().forward(x)
                return logits if self.training and not in_training else logits.softmax(1)

        with pytest.raises(ModelError, match="'mine': expected logits, got probabilities"):
            self.made(lambda: nn.Sequential(nn.Flatten(), Head(16, 3)))

    def test_log_probabilities_are_logits(self):
        self.made(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.LogSoftmax(1)))

    @pytest.mark.parametrize("persistent", [True, False])
    def test_random_constants(self, persistent):
        class Projection(nn.Module):
            def __init__(self, constant):
                super().__init__()
                self.register_buffer("constant", constant.float(), persistent=persistent)
                self.linear = nn.Linear(5, 3)

            def forward(self, x):
                return self.linear(x.flatten(1) @ self.constant)

        self.made(lambda: Projection(torch.randn(16, 5)))
        self.made(lambda: Projection(torch.from_numpy(np.random.normal(size=(16, 5)))))

        def unseeded():
            return Projection(torch.from_numpy(np.random.default_rng().normal(size=(16, 5))))

        if persistent:
            self.made(unseeded)
        else:
            with pytest.raises(ModelError, match="with the same state dict differ"):
                self.made(unseeded)

    def test_dropout_in_evaluation_is_accepted(self):
        class Noisy(nn.Linear):
            def forward(self, x):
                return super().forward(x) + torch.randn(3)

        self.made(lambda: nn.Sequential(nn.Flatten(), Noisy(16, 3)))


def test_columns_of_a_frame_are_no_samples(tmp_path):
    with without_figures():
        result = fedhet.run(
            "local", models="mlp", dataset=(np.tile(ROWS, (8, 1)), np.tile(LABELS, 8)), clients=2,
            rounds=1, backend="inline", progress=False, out=tmp_path / "run",
        )  # fmt: skip
    frame = pd.DataFrame(ROWS, columns=list("abcd"))
    with pytest.raises(DataError, match="expected an array, got columns, whose names are unknown"):
        result.predict("client-0", frame[["d", "c", "b", "a"]])
    assert len(result.predict("client-0", frame.to_numpy()).labels) == len(ROWS)


def test_a_program_without_a_stream_keeps_its_descriptor():
    code = (
        "import os, sys\nfrom fedhet.runs.units import make_output_lenient\nout = sys.stdout\n"
        "sys.stdout = None\nmake_output_lenient()\nprint('lost')\nprint('kept', file=out)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "kept\n"


def read(data, **settings):
    """Read a dataset of a simulation, given as a name or as a Python object."""
    return load(DataSpec(dataset=dataset_name(data, inline=True), **settings))


def table(root: Path, columns: dict[str, list[object]], name: str = "train.csv") -> Path:
    """Write a CSV file, with one column `x` of numbers."""
    import pandas as pd

    rows = len(next(iter(columns.values())))
    path = root / name
    path.parent.mkdir(exist_ok=True, parents=True)
    numbers = np.random.default_rng(rows).normal(size=rows).round(3)
    pd.DataFrame({"x": numbers, **columns}).to_csv(path, index=False)
    return path


class TestClassesOfTheTrainingData:
    """The training samples define the classes; a class that only test samples have is refused."""

    ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)

    def npz(self, root: Path, **labels: list[int]) -> Path:
        for name, y in labels.items():
            path = root / f"{name.replace('_', '/')}.npz"
            path.parent.mkdir(exist_ok=True, parents=True)
            np.savez(path, x=self.ROWS[: len(y)], y=np.array(y))
        return root

    @pytest.mark.parametrize(("train", "label"), [([0, 1, 0], 2), ([0, 2, 0], 1)])
    @pytest.mark.parametrize(
        ("first", "second", "file"),
        [
            ("train", "test", "test.npz: sample 1"),
            ("train_0", "test_0", "test/0.npz: sample 1"),
            ("train_0", "common", "common.npz: sample 1"),
        ],
    )
    @pytest.mark.parametrize("source", ["npz", "signal"])
    def test_arrays(self, tmp_path, source, train, label, first, second, file):
        rest = {"test_0": [0, 0]} if second == "common" else {}
        self.npz(tmp_path, **{first: train, **rest, second: [0, label]})
        with pytest.raises(DataError, match=f"{file}: label {label} has test samples, but no"):
            read(f"{source}:{tmp_path}")

    @pytest.mark.parametrize("form", ["pairs", "tensors", "clients"])
    def test_python_objects(self, form):
        def made(y: list[int]):
            x = self.ROWS[: len(y)]
            if form == "tensors":
                return torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
            return x, np.array(y)

        for test, fault in (
            ([0, 1, 2], "sample 2: label 2 has test samples, but no"),
            ([1, -1], "labels in y .*got -1 in sample 1. Remove samples"),
        ):
            data = {"train": made([0, 1, 1]), "test": made(test)}
            clients = [{"train": made([0, 1]), "test": made([0])}, data]
            with pytest.raises(DataError, match=f"test: {fault}"):
                read(clients if form == "clients" else data)

    def test_stated_classes_may_lack_training_samples(self, caplog):
        pairs = [(self.ROWS[:4], np.array([0, 1, 0, 1])), (self.ROWS[:2], np.array([0, 2]))]
        data = dict(zip(("train", "test"), pairs, strict=True)) | {"classes": ["a", "b", "c"]}
        assert read(data).format.classes == ("a", "b", "c")
        assert "1 classes have test samples but no training samples" in caplog.text
        caplog.clear()
        read({**data, "test": pairs[0]})
        assert not caplog.text

    def test_a_dataset_states_its_classes(self):
        x = torch.from_numpy(self.ROWS[:4])
        split, bad = (fedhet.Split(x, torch.tensor(y)) for y in ([0, 1, 0, 1], [0, 1, -1, 0]))
        format = read((self.ROWS, np.arange(12) % 2)).format
        rule = r"test\.y must be int64 \[4\], labels from 0 to 1"
        with pytest.raises(DataError, match=rule):
            read(fedhet.Dataset("mine", split, bad, format))

    def test_all_training_samples_in_one_class(self, tmp_path):
        self.npz(tmp_path, train=[1, 1, 1])
        with pytest.raises(DataError, match="expected at least 2 classes, got 1 in the training"):
            read(f"npz:{tmp_path}")

    def test_tables_and_texts(self, tmp_path):
        table(tmp_path, {"y": ["a", "b"] * 6, "text": ["good film"] * 12})
        table(tmp_path, {"y": ["a", "c"], "text": ["good film"] * 2}, "test.csv")
        for source, changes in (("table", {"exclude": ("text",)}), ("text", {})):
            with pytest.raises(
                DataError, match=r"test.csv: row 2, column 'y': unknown class 'c'.*Correct"
            ):
                read(f"{source}:{tmp_path}", target="y", **changes)

    @pytest.fixture
    def hub(self, tmp_path, monkeypatch):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

        def write(form: str, names=None, **splits: list[object]) -> str:
            from datasets import ClassLabel, Dataset, DatasetDict

            root, made = tmp_path / form, {}
            root.mkdir()
            for part, labels in splits.items():
                rows = {"text": [f"film {n}" for n in range(len(labels))]}
                rows |= {"label": labels} if labels[0] != "absent" else {}
                made[part] = Dataset.from_dict(rows)
                if names:
                    made[part] = made[part].cast_column("label", ClassLabel(names=names))
                elif form == "csv":
                    made[part].to_csv(root / f"{part}.csv")
            if form != "csv":
                DatasetDict(made).save_to_disk(root)
            return f"hf:{root}"

        return write

    @pytest.mark.parametrize("form", ["csv", "saved"])
    @pytest.mark.parametrize("unlabeled", [[-1, -1, -1], [None, None, None], ["absent"] * 3])
    @pytest.mark.parametrize("has_validation", [True, False])
    def test_an_unlabeled_split_of_the_hub(self, hub, caplog, form, unlabeled, has_validation):
        splits = {"train": [0, 1] * 4, "test": unlabeled}
        splits |= {"validation": [1, 1]} if has_validation else {}
        name = hub(form, **splits)
        if has_validation:
            data = read(name, sample_kind="text", max_tokens=4)
            assert data.format.classes == ("0", "1")
            assert data.test.y.tolist() == [1, 1]
            assert "split 'test' has a label. The common test set is 'validation'" in caplog.text
        else:
            with pytest.raises(DataError, match=r"no row of the split 'test' has a label\. Label"):
                read(name, sample_kind="text", max_tokens=4)

    def test_numbers_one_and_minus_one_are_classes(self, hub):
        name = hub("saved", train=[-1, 1] * 4, test=[-1, -1])
        assert read(name, sample_kind="text", max_tokens=4).format.classes == ("-1", "1")

    @pytest.mark.parametrize(
        ("names", "train", "test", "fault"),
        [
            (None, ["a", "b"], ["a", "c"], "its class 'c'"),
            (None, [0, 1], [0, -1], "its class '-1'"),
            (None, [0, 1], [0, None], "it has no label"),
            (None, [0.0, 1.0], [0.0, 2.0], "its class '2'"),
            (["a", "b", "c"], [0, 1], [1, 2], "its class 'c'"),
            (["a", "b"], [0, 1], [1, -1], "it has no label"),
        ],
    )
    def test_a_class_of_a_test_split_of_the_hub(self, hub, names, train, test, fault):
        name = hub("saved", names, train=train * 4, test=test)
        with pytest.raises(
            DataError, match=f"split 'test', row 2, column 'label': .*{fault}.*Corr"
        ):
            read(name, sample_kind="text", max_tokens=4)

    def test_medmnist(self, tmp_path):
        arrays = {}
        for part, y in (("train", [0, 1]), ("val", [1, 0]), ("test", [0, 3])):
            arrays[f"{part}_images"] = np.zeros((2, 4, 4), np.uint8)
            arrays[f"{part}_labels"] = np.array(y)[:, None]
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError, match=r"test_labels: sample 1: label 3 has test samples"):
            read(f"medmnist:{tmp_path / 'a.npz'}")


class TestListsOfLabels:
    """A list of labels is split if its form is known, and refused otherwise."""

    SETS = [["cat"], ["cat", "dog"], ["dog"], ["fox"], ["cat", "fox"]] * 4
    FORMS = {
        "comma": ", ".join, "space": " ".join, "bar": "|".join, "slash": "/".join, "tab": "\t".join,
        "plus": "+".join, "list": str, "tuple": lambda row: str(tuple(row)),
        "set": lambda row: str({*row}), "numpy": lambda row: str(np.array(row)),
        "array": lambda row: repr(np.array(row)), "frozenset": lambda row: str(frozenset(row)),
        "postgres": lambda row: "{" + ",".join(row) + "}",
        "bare": lambda row: f"[{', '.join(row)}]",
        "r": lambda row: "c(" + ", ".join(f'"{word}"' for word in row) + ")",
        "tags": lambda row: "".join(f"<{word}>" for word in row),
        "object": lambda row: json.dumps(dict.fromkeys(row, 1)), "lines": "\n".join,
    }  # fmt: skip

    @pytest.mark.parametrize("task", ["auto", "multi-label"])
    @pytest.mark.parametrize("form", FORMS)
    def test_another_form_is_refused(self, tmp_path, form, task):
        path = table(tmp_path, {"seen": [*map(self.FORMS[form], self.SETS)]})
        rule = "expected one class in each row" if task == "auto" else 'a;b or \\["a", "b"\\]'
        with pytest.raises(DataError, match=rf"column 'seen': .*{rule}"):
            read(f"table:{path}", target="seen", task=task)

    @pytest.mark.parametrize("form", [";".join, "; ".join, json.dumps])
    def test_known_forms(self, tmp_path, form):
        path = table(tmp_path, {"seen": [*map(form, self.SETS)]})
        data = read(f"table:{path}", target="seen", task="multi-label")
        assert data.format.classes == ("cat", "dog", "fox")
        assert data.train.y[:2].tolist() == [[1, 0, 0], [1, 1, 0]]
        with pytest.raises(DataError, match="expected one class in each row"):
            read(f"table:{path}", target="seen")

    def test_names_with_commas_and_spaces_in_lists(self, tmp_path):
        rows = ["sepsis, acute;left lung", "left lung", "right lung;fever, mild"] * 4
        path = table(tmp_path, {"seen": rows})
        data = read(f"table:{path}", target="seen", task="multi-label")
        assert data.format.classes == ("fever, mild", "left lung", "right lung", "sepsis, acute")

    @pytest.mark.parametrize("task", ["classification", "multi-label"])
    def test_declared_names(self, tmp_path, task):
        path = table(tmp_path, {"city": ["Paris, Texas", "Rome", "(none)"] * 5})
        schema = f'task = "{task}"\ntarget = "city"\nclasses = ["(none)", "Paris, Texas", "Rome"]\n'
        (tmp_path / "schema.toml").write_text(schema)
        data = read(f"table:{path}", task=task)
        assert data.format.classes == ("(none)", "Paris, Texas", "Rome")
        expected = np.tile(np.array([1, 2, 0]), 5)
        y = data.train.y if task == "classification" else data.train.y.argmax(1)
        assert y.tolist() == expected.tolist()

    def test_classes_that_are_no_lists(self, tmp_path):
        for words in (["New York", "Rome", "New Delhi"], ["A", "A+", "B"], [">50K", "<=50K", "x"]):
            path = table(tmp_path, {"y": words * 4})
            assert len(read(f"table:{path}", target="y").format.classes) == 3
        path = table(tmp_path, {"y": ["Paris, Texas", "Rome"] * 4})
        assert len(read(f"table:{path}", target="y", task="classification").format.classes) == 2


SPELLINGS = {
    "decimal": "{:.1f}", "exponent": "{:e}", "plus": "{:+d}", "zeros": "{:03d}", "plain": "{:d}",
    "full width": "{:d}", "minus": "{:d}", "no-break space": "\N{NO-BREAK SPACE}{:d}",
    "numeric(10,3)": "{:.3f}", "dot": "{:d}.",
}  # fmt: skip


def spelled(number: int, form: str) -> str:
    text = SPELLINGS[form].format(number)
    if form == "full width":
        text = text.translate({ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"})
    return text.replace("-", "\N{MINUS SIGN}") if form == "minus" else text


class TestOneNumberIsOneClass:
    """Two spellings of one number are one class, category, or owner, or they are refused."""

    @given(
        st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=6, unique=True),
        st.sampled_from(sorted(SPELLINGS)),
        st.sampled_from(sorted(SPELLINGS)),
    )
    def test_spellings_of_integers(self, numbers, first, second):
        texts = [spelled(n, form) for n in numbers for form in (first, second)]
        classes, fault = find_categories(texts)
        if "numeric(10,3)" not in (first, second):  # 1.000 is 1, and 1000 in some countries.
            assert (classes, fault) == (tuple(map(str, sorted(numbers))), "")
        assert fault or len(classes) == len(numbers)
        owned = encode_owners(texts, "x")
        assert len(owned["group_names"]) == len(numbers)
        assert (owned["groups"][::2] == owned["groups"][1::2]).all()
        # The test file, or another site, may have the other spelling.
        known = sorted({spelled(n, first) for n in numbers})
        known = find_categories(known)[0]
        places = find_words([spelled(n, second) for n in numbers], known)
        assert [int(known[place]) for place in places] == numbers

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("1000", "1,000"), ("1000", "1 000"), ("1000", "1\N{NARROW NO-BREAK SPACE}000"),
            ("1000", "1'000"), ("1000", "1\N{RIGHT SINGLE QUOTATION MARK}000"), ("1000", "1_000"),
            ("1000", "1.000,0"), ("1234567", "1,234,567"), ("1,0", "1"), ("0.5", "0.50"),
            ("0.5", "5e-1"), ("0.5", ".5"), ("0.1", "0.10000000000000001"), ("0.5", "0,5"),
            ("-0.5", "\N{MINUS SIGN}0.5"), ("-1", "\N{EN DASH}1"), ("-1", "(1)"), ("-1", "1-"),
            ("1", "'1"), ("1", '="1"'), ("1", "TRUE"), ("1.0", "True"), ("0", "FALSE"),
            ("yes", "1"), ("no", "0"), ("true", "yes"), ("TRUE", "True"),
            ("a", "a\N{ZERO WIDTH SPACE}"),
            ("12345678901234567890", "12345678901234567890.0"),
        ],
    )  # fmt: skip
    def test_other_spellings_are_refused_or_unified(self, first, second):
        classes, fault = find_categories([first, second, "other"])
        assert "Correct the file, or list all categories in a schema (values = [" in fault
        assert len(classes) == 3
        classes, fault = find_categories([first, second])
        assert fault or len(classes) == 1

    def test_different_numbers_remain_different(self):
        words = "1 2 1.5 1-2 2-1 1+ A1 A01 1a 1/2 0/1 10 100 1% 2024-01-31 1.2.3".split()
        assert find_categories(words) == (tuple(sorted(words)), "")
        huge = "12345678901234567890", "12345678901234567891"
        assert find_categories(huge) == (huge, "")

    def test_owners(self, tmp_path):
        wards = ["1", "2", "1.0", "02"] * 6
        path = table(tmp_path, {"y": ["a", "b"] * 12, "ward": wards})
        data = RunData(DataSpec(dataset=f"table:{path}", target="y", by="ward", clients=2))
        assert data.dataset.group_names == ("1", "2")
        np.savez(tmp_path / "train.npz", x=np.zeros((24, 3)), y=np.arange(24) % 2, ward=wards)
        assert read(f"npz:{tmp_path}", by="ward").group_names == ("1", "2")
        path = table(tmp_path, {"y": ["a", "b"] * 12, "ward": ["1000", "1,000", "x", "y"] * 6})
        with pytest.raises(DataError, match=r"'1,000' and '1000' may be the same owner"):
            read(f"table:{path}", target="y", by="ward")
        names = ["North", "north", "07", "x7"]
        assert encode_owners(names, "x")["group_names"] == tuple(sorted(names))

    @pytest.mark.parametrize("owner", ["", "None", "nan", "<NA>", "NaT"])
    def test_a_missing_owner(self, tmp_path, owner):
        np.savez(
            tmp_path / "train.npz", x=np.zeros((4, 3)), y=[0, 1] * 2, ward=["a", "b", owner, "a"]
        )
        with pytest.raises(DataError, match=r"train.npz: ward: row 3: values of data.by must not"):
            read(f"npz:{tmp_path}", by="ward")

    def test_test_file_and_sites(self, tmp_path):
        path = table(tmp_path, {"y": ["0", "1"] * 6})
        table(tmp_path, {"y": ["\N{MINUS SIGN}0", "+1", "1e0", "1.0"]}, "test.csv")
        assert read(f"table:{tmp_path}", target="y").test.y.tolist() == [0, 1, 1, 1]
        spec = DataSpec(target="y")
        schema = infer_schema(read_table(path, spec), spec)
        site = table(tmp_path, {"y": ["0.0", "1.00", "01", "-0.0"] * 5}, "site/train.csv")
        (tmp_path / "site" / "schema.toml").write_text(schema.to_toml())
        data = site_data(f"table:{site}", spec=spec, classes=2, name="site")
        assert sorted({*data.train.y.tolist()}) == [0, 1]


def masked(array: np.ndarray) -> np.ma.MaskedArray:
    return np.ma.masked_equal(array, -9999)


class TestMissingValues:
    """What a library marks as missing never becomes a number, a word, or a class."""

    X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    Y = np.arange(12) % 2

    @classmethod
    def with_mark(cls) -> np.ndarray:
        x = cls.X.copy()
        x[4, 1] = -9999
        return x

    def forms(self) -> dict[str, object]:
        import pandas as pd
        import pyarrow as pa

        x = self.with_mark()
        optional = [[None if v == -9999 else float(v) for v in row] for row in x]
        frame = pd.DataFrame(optional, dtype="Float64")
        return {
            "masked": masked(x), "masked bytes": masked(x).astype(np.uint8),
            "list of masked rows": [*masked(x)], "nested lists": [[*row] for row in masked(x)],
            "None": optional, "objects": np.array(optional, object), "nullable frame": frame,
            "frame of objects": frame.astype(object), "NaN": np.where(x == -9999, np.nan, x),
            "arrow": pa.table([pa.array(column) for column in zip(*optional, strict=True)], "abc"),
        }  # fmt: skip

    @pytest.mark.parametrize(
        "form",
        ["masked", "masked bytes", "list of masked rows", "nested lists", "None", "objects",
         "nullable frame", "frame of objects", "NaN", "arrow"],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:Warning. converting a masked element to nan")
    def test_samples_of_python_objects(self, form):
        x = self.forms()[form]
        for data in ((x, self.Y), {"train": (self.X, self.Y), "test": (x, self.Y)}):
            with pytest.raises(DataError, match=r"got NaN or infinite values.*first in sample 4"):
                read(data)

    def test_a_mask_that_hides_nothing(self):
        data = read((np.ma.array(self.X), np.ma.array(self.Y)))
        assert np.array_equal(data.train.x.numpy(), self.X)
        assert data.train.y.tolist() == self.Y.tolist()

    def test_samples_of_torch_datasets(self):
        rows = masked(self.with_mark())

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 12

            def __getitem__(self, row):
                return rows[row], row % 2

        with pytest.raises(DataError, match="first in sample 4"):
            read(Rows())

    @pytest.mark.filterwarnings("ignore:The PyTorch API of")
    def test_tensors_with_masks(self):
        x = torch.from_numpy(self.X)
        hidden = torch.masked.masked_tensor(x, x < 9)
        nested = torch.nested.nested_tensor([*x])
        for each in (hidden, nested):
            with pytest.raises(DataError, match=r"expected a fedhet\.Dataset"):
                read((each, self.Y))
        format, y = read((self.X, self.Y)).format, torch.from_numpy(self.Y)
        for each, fault in (
            (hidden, "train: x and y must be plain tensors"),
            (nested, "train: x and y must be plain tensors"),
            (x / 0 * 0, r"train\.x must be finite"),
        ):  # fmt: skip
            with pytest.raises(DataError, match=fault):
                read(fedhet.Dataset("mine", fedhet.Split(each, y), None, format))

    @pytest.mark.parametrize("task", ["auto", "regression"])
    def test_targets_of_python_objects(self, task):
        import pandas as pd

        y = self.X[:, 0] if task == "regression" else self.Y
        hidden = np.ma.array(y, mask=np.arange(12) == 3)
        optional = [None if row == 3 else value for row, value in enumerate(y.tolist())]
        kind = "Int64" if task == "auto" else "Float64"
        for form in (
            hidden, optional, np.array(optional, object), pd.Series(optional, dtype=kind),
            pd.Series(optional, dtype=object), [np.ma.array(v, mask=m) for v, m in
                                                zip(y, hidden.mask, strict=True)],
        ):  # fmt: skip
            with pytest.raises(DataError, match=r"sample 3.* is missing"):
                read((self.X, form), task=task)

    def test_arrays_in_files(self, tmp_path):
        stamps = np.array(["NaT"] * 12, "datetime64[D]")
        records = np.zeros(12, [("a", float), ("b", float)])
        for x, y in (
            (self.X, np.where(self.Y, 1.0, np.nan)), (stamps[:, None], self.Y), (records, self.Y),
            (self.X, stamps), (np.where(self.X > 1, np.nan, self.X), self.Y),
        ):  # fmt: skip
            np.savez(tmp_path / "train.npz", x=x, y=y)
            with pytest.raises(DataError, match=r"train\.npz"):
                read(f"npz:{tmp_path}")

    def test_columns_of_parquet(self, tmp_path):
        import pyarrow as pa
        from pyarrow import parquet

        words = pa.array(["a", "b", None, None] * 6).dictionary_encode()
        y = pa.array([0, 1] * 12)
        columns = {"word": words, "none": pa.array([1.0, None] * 12), "y": y}
        parquet.write_table(pa.table(columns), tmp_path / "train.parquet")
        data = read(f"table:{tmp_path}", target="y")
        assert data.train.x[:, 2].tolist() == [0, 0, 1, 1] * 6
        assert data.train.x[:, 4].tolist() == [0, 1] * 12
        parquet.write_table(pa.table({"y": words, "x": y}), tmp_path / "train.parquet")
        with pytest.raises(DataError, match="row 3, column 'y': the label is missing"):
            read(f"table:{tmp_path}", target="y")

    def test_a_text_and_a_label_of_the_hub(self, tmp_path, monkeypatch):
        from datasets import Dataset

        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        for number, (text, label, fault) in enumerate(
            [
                (["a", None] * 3, ["x", "y"] * 3, "column 'text': expected a text, got None"),
                (["a", "b"] * 3, ["x", "y", "None"] * 2, "split 'train', row 3.* it has no label"),
                (["a", "b"] * 3, [0.0, 1.0, float("nan")] * 2, "row 3.* it has no label"),
            ]
        ):
            Dataset.from_dict({"text": text, "label": label}).save_to_disk(tmp_path / str(number))
            with pytest.raises(DataError, match=fault):
                read(f"hf:{tmp_path / str(number)}", sample_kind="text", max_tokens=4)

    def test_samples_to_predict(self, tmp_path):
        result = fedhet.run(
            "local", dataset=(self.X, self.Y), clients=1, rounds=1, progress=False, models="mlp",
            backend="inline", out=tmp_path, settings={"data.min-samples": 2},
        )  # fmt: skip
        with pytest.raises(DataError, match=r"got NaN or infinite values.*first in sample 4"):
            result.predict("client-0", masked(self.with_mark()))


class TestTargetsThatNeverVary:
    """A constant number is refused, and a label that never varies is named once."""

    X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)

    @pytest.mark.parametrize("value", [7.5, 0, -3])
    def test_a_constant_number(self, tmp_path, value):
        rule = "the target is .* in all 12 rows, so there is nothing to learn"
        path = table(tmp_path, {"stay": [value] * 12, "dose": [*range(12)]})
        for target in ("stay", "stay,dose"):
            with pytest.raises(DataError, match=f"column 'stay': {rule}"):
                read(f"table:{path}", target=target, task="regression")
        result = CliRunner().invoke(
            app, ["schema", str(path), "--target", "stay", "--task", "regression"]
        )
        assert isinstance(result.exception, DataError) or "nothing to learn" in result.output
        assert not (tmp_path / "schema.toml").exists()
        y = np.full(12, float(value))
        np.savez(tmp_path / "train.npz", x=self.X, y=y)
        for data in (f"npz:{tmp_path}", (self.X, y), {"train": (self.X, y), "test": (self.X, y)}):
            with pytest.raises(DataError, match=f"column 'y': {rule}"):
                read(data, task="regression")
        for name in "ab":
            table(tmp_path / "sites", {"stay": [value] * 6}, f"{name}.csv")
        with pytest.raises(DataError, match=f"column 'stay': {rule}"):
            read(f"table:{tmp_path}/sites", target="stay", task="regression")

    def test_label_tables(self, tmp_path):
        for row in range(12):
            (tmp_path / f"{row}.txt").write_text("good film")
        rows = [f"{row}.txt,7.5" for row in range(12)]
        (tmp_path / "labels.csv").write_text("\n".join(["file,stay", *rows]))
        with pytest.raises(DataError, match=r"column 'stay': the target is 7\.5 in all 12 rows"):
            read(f"text:{tmp_path}", task="regression")

    def test_a_site_with_one_value(self, tmp_path, caplog):
        path, spec = table(tmp_path, {"stay": [7.5] * 12}), DataSpec(target="stay")
        (tmp_path / "schema.toml").write_text(
            'target = "stay"\ntask = "regression"\n[targets.stay]\ntype = "number"\nmean = 5.0\n'
            'deviation = 2.0\noptional = false\n[columns.x]\ntype = "number"\nmean = 0.0\n'
            "deviation = 1.0\noptional = false\n"
        )
        spec = spec.replace(task="regression")
        data = site_data(f"table:{path}", spec=spec, classes=1, name="site")
        assert data.train.y.unique().tolist() == [1.25]
        assert caplog.text.count("1 of 1 targets have one value in all 12 training samples") == 1
        assert "stay (always 7.5)" in caplog.text

    def test_labels_that_never_vary(self, tmp_path, caplog):
        columns = {"mass": [0, 1] * 6, "edema": [0] * 12, "scar": [1] * 12, "gap": [None] * 12}
        path = table(tmp_path, columns)
        spec = {"target": "mass,edema,scar,gap", "task": "multi-label"}
        read(f"table:{path}", **spec)
        line = "3 of 4 targets have one value in all 12 training samples"
        assert caplog.text.count(line) == 1
        assert "edema (always 0), scar (always 1), gap (always missing)" in caplog.text
        command = ["schema", str(path), "--target", spec["target"], "--task", "multi-label"]
        printed = CliRunner().invoke(app, command).output
        assert "edema: label, 0 of 12 rows, so it never varies" in printed
        assert "mass: label, 6 of 12 rows\n" in printed
        caplog.clear()
        y = np.stack([np.arange(12) % 2, np.zeros(12)], 1)
        (tmp_path / "schema.toml").unlink()
        np.savez(tmp_path / "train.npz", x=self.X, y=y)
        read(f"npz:{tmp_path}", task="multi-label")
        assert "1 of 2 targets have one value" in caplog.text
