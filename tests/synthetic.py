"""Directories of synthetic runs, and helpers that read their reports."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

UNSAFE = "<script>alert('x')</script>"


@dataclass
class Spec:
    """Specification of a synthetic run."""

    method: str = "felo"
    dataset: str = "digits"
    clients: int = 4
    rounds: int = 5
    seed: int = 0
    protocols: tuple[str, ...] = ("common",)
    kinds: tuple[str, ...] = ("private",)
    headline: str = "common"
    top: float = 0.8
    names: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)
    finished: bool = True
    partition: bool = True
    confusion: int = 0
    """Number of classes of the confusion matrix, or 0 for no matrix."""
    noise: int = 0
    """Runs of one seed that differ in it have other numbers."""
    failed: dict[int, dict[str, str]] = field(default_factory=dict)


def scores(values: np.ndarray, names: list[str]) -> dict[str, Any]:
    each = dict(zip(names, values.tolist(), strict=True))
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "worst": float(values.min()),
        "per_client": each,
    }


def record(number: int, spec: Spec, names: list[str], rng: np.random.Generator) -> dict[str, Any]:
    failed = spec.failed.get(number, {})
    losses = {name: float(rng.uniform(0.1, 2)) for name in names if name not in failed}
    base = spec.top * (1 - math.exp(-2.5 * number / spec.rounds))
    return {
        "round": number,
        "asked": names,
        "answered": [name for name in names if name not in failed],
        "failed": failed,
        "accuracy": {
            protocol: {
                kind: scores(np.clip(base + rng.normal(0, 0.03, len(names)), 0, 1), names)
                for kind in spec.kinds
            }
            for protocol in spec.protocols
        },
        "loss": {"mean": float(np.mean([*losses.values()])), "per_client": losses},
        "bytes_up": int(rng.integers(1_000, 2_000)),
        "bytes_down": int(rng.integers(3_000, 9_000)),
        "seconds": {"total": 2.0, "train": 3.0, "evaluate": 0.5, "server": 0.2, "overhead": 0.1},
        "method": {"classes_covered": float(number), "odd": math.nan},
        "tested": {"common": dict.fromkeys(names, 359)} if spec.dataset == "digits" else {},
    }


def summary(spec: Spec, names: list[str], records: list[dict[str, Any]]) -> dict[str, Any]:
    stages = ("total", "train", "evaluate", "server", "overhead")
    return {
        "method": spec.method,
        "dataset": spec.dataset,
        "seed": spec.seed,
        "rounds": spec.rounds,
        "clients": len(names),
        "models": {name: ("cnn2", "mlp")[n % 2] for n, name in enumerate(names)},
        "headline": spec.headline,
        "accuracy": records[-1]["accuracy"],
        "history": [
            {
                "round": each["round"],
                "accuracy": {
                    protocol: {kind: found["mean"] for kind, found in kinds.items()}
                    for protocol, kinds in each["accuracy"].items()
                },
                "bytes_up": each["bytes_up"],
                "bytes_down": each["bytes_down"],
                "seconds": each["seconds"]["total"],
            }
            for each in records
        ],
        "bytes_up": sum(each["bytes_up"] for each in records),
        "bytes_down": sum(each["bytes_down"] for each in records),
        "seconds": {key: sum(each["seconds"][key] for each in records) for key in stages},
        "peak_memory_mb": 512.0,
        "versions": {"fedhet": "0.1.0", "flwr": "1.39.0"},
    }


def confusion(spec: Spec, names: list[str]) -> dict[str, Any]:
    """Return the matrices of two architectures; most predictions are right or off by one class."""
    size, rng = spec.confusion, np.random.default_rng(spec.confusion)
    matrices = []
    for model in ("cnn2", "mlp"):
        counts = np.diag(rng.integers(5, 40, size))
        for row in range(size):
            counts[row, (row + 1) % size] += rng.integers(0, 6)
        matrices.append(
            {
                "model": model, "clients": names[model == "mlp" :: 2],
                "samples": int(counts.sum()), "counts": counts.tolist(),
            }
        )  # fmt: skip
    classes = [f"class {number}" for number in range(size)]
    return {"kind": spec.kinds[0], "classes": classes, "matrices": matrices}


def config(spec: Spec) -> str:
    settings = {
        "method": spec.method,
        "rounds": spec.rounds,
        "seed": spec.seed,
        "data.dataset": spec.dataset,
        "data.alpha": 0.5,
        "models.pool": ["cnn2", "mlp"],
        **spec.settings,
        **{f"{spec.method}.{key}": value for key, value in spec.table.items()},
    }
    tables: dict[str, list[str]] = {"": []}
    for name, value in settings.items():
        table, _, key = name.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {json.dumps(value)}")
    head = tables.pop("")
    return "\n".join([*head, *(f"[{name}]\n" + "\n".join(own) for name, own in tables.items())])


def make(root: Path, **changes: Any) -> Path:
    """Write the directory of a run like a real run."""
    spec = Spec(**changes)
    root.mkdir(parents=True)
    names = list(spec.names) or [f"client-{n}" for n in range(spec.clients)]
    rng = np.random.default_rng([spec.seed, len(names), spec.rounds, spec.noise])
    records = [record(number, spec, names, rng) for number in range(1, spec.rounds + 1)]
    (root / "config.toml").write_text(config(spec), "utf-8")
    text = "".join(json.dumps(each) + "\n" for each in records)
    (root / "metrics.jsonl").write_text(text, "utf-8")
    if spec.finished:
        (root / "summary.json").write_text(json.dumps(summary(spec, names, records)), "utf-8")
    if spec.confusion:
        content = confusion(spec, names)
        (root / "confusion.json").write_text(json.dumps(content), "utf-8")
    if spec.partition:
        counts = {name: rng.integers(0, 30, 10).tolist() for name in names}
        content = {"classes": [str(n) for n in range(10)], "counts": counts}
        (root / "partition.json").write_text(json.dumps(content), "utf-8")
    return root


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def shown(table: Table) -> str:
    file = io.StringIO()
    Console(width=240, file=file).print(table)
    return file.getvalue()


class Page(HTMLParser):
    """Collects a page's tags, their attributes and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.source = path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def assert_self_contained(self) -> None:
        """Check that the page loads no other file, and runs only its own script."""
        source = self.source.replace("http://www.w3.org/", "")  # the namespaces of inline SVG
        assert "http://" not in source
        assert "https://" not in source
        assert self.tags.count("script") == 1
        assert not {"link", "iframe", "object", "img"} & set(self.tags)
        for name, value in self.attributes:
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("#", "data:image/png"))
