"""Command `example-data`: writes synthetic texts, signals or tables for first trials.

Texts consist of random words, some of which are typical of a topic. Signals are noisy waves of
four shapes. Tables describe patients. The data is not suitable as a benchmark.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import typer

from fedhet.base.errors import DataError
from fedhet.base.seeding import numpy_rng
from fedhet.cli.options import say

OWNERS = 10
"""Number of sites that own samples."""
TRAIN, TEST = 1200, 300
TOPICS: Mapping[str, str] = MappingProxyType(
    {
        "garden": "rose soil seed water bloom hedge spade root leaf compost",
        "kitchen": "pan onion oven salt boil butter knife dough taste plate",
        "journey": "train ticket map station luggage coast hotel border ferry guide",
        "workshop": "hammer nail plank glue drill bench screw saw paint ruler",
    }
)
COMMON = "the a today we they found good old new near with and then more little always".split()
FORMS: Mapping[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = (
    MappingProxyType(
        {
            "sine": np.sin,
            "square": lambda t: np.sign(np.sin(t)),
            "sawtooth": lambda t: (t / np.pi) % 2 - 1,
            "pulses": lambda t: np.maximum(np.sin(t), 0) ** 8,
        }
    )
)
CHANNELS, STEPS = 3, 96
BY = "site"
"""Column or array with the site of each sample."""
HOSPITALS = {"north": (62.0, 1.0, 1.0), "east": (45.0, 2.2046, 1.0), "south": (75.0, 1.0, 88.42)}
"""Mean age, and unit conversion factors for weight and creatinine, for each hospital in
`regression`. North uses kg and mg/dL, east uses pounds, and south uses µmol/L."""
SETTINGS = {
    "table": "felo --dataset table:{} --set target=outcome --set by=site",
    "regression": "fml --dataset table:{} --set task=regression --set target=days --set by=site "
    "--clients 3",
}
"""Method and options of a run, by kind of example dataset; {} stands for the directory."""


def write_example(kind: str, directory: Path) -> None:
    """Write training and test data of the given kind to a new directory.

    Texts are CSV files with the columns text, label and site. Tables are CSV files of patients,
    with missing values and the label column outcome. Tables of the kind `regression` have the
    target column days (length of stay) instead. Signals are .npz files with x [N, 3, 96], y [N]
    and site [N]. Raises DataError if the directory is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise DataError(f"{directory}: expected a new or empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", TRAIN), ("test", TEST)):
        rng = numpy_rng(0, "example", kind, part)
        if kind == "signal":
            y, site = rng.integers(len(FORMS), size=count), rng.integers(OWNERS, size=count)
            waves = [_signal(rng, int(f), int(owner)) for f, owner in zip(y, site, strict=True)]
            x = np.stack(waves).astype(np.float32)
            np.savez_compressed(directory / f"{part}.npz", x=x, y=y, site=site)
            continue
        header: tuple[str, ...] = ("text", "label", BY)
        row: Callable[[np.random.Generator], tuple[str, ...]] = _text
        if kind == "table":
            header = ("age", "sex", "admitted", "pressure", "ward", BY, "outcome")
            row = _patient
        elif kind == "regression":
            header = ("age", "weight", "creatinine", "crp", "admission", BY, "days")
            row = _stay
        with (directory / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(header)
            rows.writerows(row(rng) for _ in range(count))


def _text(rng: np.random.Generator) -> tuple[str, str, str]:
    """Return a text of 6 to 20 words, its topic, and its site.

    About a quarter of the words are typical of the topic.
    """
    topics, label = list(TOPICS), int(rng.integers(len(TOPICS)))
    words = []
    for _ in range(int(rng.integers(6, 21))):
        chance = rng.random()
        topic = label if chance < 0.25 else int(rng.integers(len(TOPICS)))
        words.append(str(rng.choice(TOPICS[topics[topic]].split() if chance < 0.35 else COMMON)))
    return " ".join(words), topics[label], f"site-{int(rng.integers(OWNERS))}"


def _patient(rng: np.random.Generator) -> tuple[str, ...]:
    """Return a patient's row. The risk of readmission depends on age, blood pressure and ward."""
    site, age = int(rng.integers(OWNERS)), int(rng.integers(20, 90))
    ward = str(rng.choice(["cardiology", "surgery", "emergency"]))
    pressure = rng.normal(110 + age / 3 + site, 10)
    risk = (age - 60) / 10 + (pressure - 135) / 15 + (ward == "emergency")
    outcome = "readmitted" if rng.random() < 1 / (1 + np.exp(-risk)) else "well"
    day = np.datetime64("2024-01-01") + int(rng.integers(365))
    row = [str(age), str(rng.choice(["f", "m"])), str(day), f"{pressure:.0f}", ward]
    is_missing = rng.random(len(row)) < 0.05
    values = ["" if missing else value for value, missing in zip(row, is_missing, strict=True)]
    return (*values, f"site-{site}", outcome)


def _stay(rng: np.random.Generator) -> tuple[str, ...]:
    """Return a patient's row. The length of stay increases with age, creatinine and CRP."""
    site = str(rng.choice(list(HOSPITALS), p=[0.5, 0.25, 0.25]))
    mean_age, weight_scale, creatinine_scale = HOSPITALS[site]
    age, weight = float(np.clip(rng.normal(mean_age, 14), 18, 99)), rng.normal(75, 14)
    creatinine, crp = rng.lognormal(0.1, 0.35), rng.lognormal(3, 0.8)
    is_emergency = rng.random() < 0.4
    log_days = 0.4 + age / 70 + 0.5 * creatinine + crp / 150 + 0.4 * is_emergency
    log_days += 0.8 * ((weight - 75) / 40) ** 2
    days = np.clip(np.exp(log_days - 0.6) * rng.lognormal(0, 0.25), 0.5, 90)
    row = [f"{age:.0f}", f"{weight * weight_scale:.1f}", f"{creatinine * creatinine_scale:.2f}"]
    row += [f"{crp:.0f}", "emergency" if is_emergency else "planned"]
    is_missing = rng.random(len(row)) < 0.05
    values = ["" if missing else value for value, missing in zip(row, is_missing, strict=True)]
    return (*values, site, f"{days:.1f}")


def _signal(rng: np.random.Generator, form: int, owner: int) -> npt.NDArray[np.float64]:
    """Return a noisy wave [3, 96] of the given form. Its frequency depends on the owner."""
    wave = list(FORMS.values())[form]
    time = np.linspace(0, 2 * np.pi * (2 + 0.3 * owner), STEPS)
    starts = rng.uniform(0, 2 * np.pi, (CHANNELS, 1))
    noise: npt.NDArray[np.float64] = rng.normal(0, 0.7, (CHANNELS, STEPS))
    return wave(time + starts) + noise


def example_command(
    kind: Annotated[
        Literal["text", "signal", "table", "regression"],
        typer.Argument(help="Kind of the samples; regression = a table with a numeric target."),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Output directory; must be new or empty.")
    ],
) -> None:
    """Write a small synthetic dataset of texts, signals, or table rows."""
    write_example(kind, directory)
    run = SETTINGS.get(kind, f"felo --dataset {kind}:{{}}")
    say(f"fedhet run {run.format(directory)}")
