"""The command that writes example data, `example-data`: texts, signals and tables, from a seed.

The texts are sentences of words that go with a topic, the signals waves of several forms. They are
not a benchmark.
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
"""The number of sites that the texts and signals are of."""
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
"""The column, and the array, that says whose a sample is."""


SETTINGS = {"table": " --set target=outcome"}
"""What a run on an example needs besides its place."""


def write_example(kind: str, folder: Path) -> None:
    """Write example data of a kind of samples into a new folder. Raises DataError.

    Texts: train.csv and test.csv with the columns text, label and site. Tables: the same of
    patients, with gaps; the class is in the column outcome. Signals: train.npz and test.npz with x
    [N, 3, 96], y [N] and site [N].
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", TRAIN), ("test", TEST)):
        rng = numpy_rng(0, "example", kind, part)
        if kind == "signal":
            y, site = rng.integers(len(FORMS), size=count), rng.integers(OWNERS, size=count)
            waves = [_signal(rng, int(f), int(own)) for f, own in zip(y, site, strict=True)]
            x = np.stack(waves).astype(np.float32)
            np.savez_compressed(folder / f"{part}.npz", x=x, y=y, site=site)
            continue
        head: tuple[str, ...] = ("text", "label", BY)
        row: Callable[[np.random.Generator], tuple[str, ...]] = _text
        if kind == "table":
            head = ("age", "sex", "admitted", "pressure", "ward", BY, "outcome")
            row = _patient
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(head)
            rows.writerows(row(rng) for _ in range(count))


def _text(rng: np.random.Generator) -> tuple[str, str, str]:
    """Return a text of 6 to 20 words, its topic (that of a quarter of them), and its site."""
    topics, own = list(TOPICS), int(rng.integers(len(TOPICS)))
    words = []
    for _ in range(int(rng.integers(6, 21))):
        chance = rng.random()
        topic = own if chance < 0.25 else int(rng.integers(len(TOPICS)))
        words.append(str(rng.choice(TOPICS[topics[topic]].split() if chance < 0.35 else COMMON)))
    return " ".join(words), topics[own], f"site-{int(rng.integers(OWNERS))}"


def _patient(rng: np.random.Generator) -> tuple[str, ...]:
    """Return a row: the older a patient and the higher the pressure, the worse the outcome is."""
    site, age = int(rng.integers(OWNERS)), int(rng.integers(20, 90))
    ward = str(rng.choice(["cardiology", "surgery", "emergency"]))
    pressure = rng.normal(110 + age / 3 + site, 10)
    risk = (age - 60) / 10 + (pressure - 135) / 15 + (ward == "emergency")
    outcome = "readmitted" if rng.random() < 1 / (1 + np.exp(-risk)) else "well"
    day = np.datetime64("2024-01-01") + int(rng.integers(365))
    row = [str(age), str(rng.choice(["f", "m"])), str(day), f"{pressure:.0f}", ward]
    gone = rng.random(len(row)) < 0.05
    values = ["" if absent else value for value, absent in zip(row, gone, strict=True)]
    return (*values, f"site-{site}", outcome)


def _signal(rng: np.random.Generator, form: int, owner: int) -> npt.NDArray[np.float64]:
    """Return a noisy wave [3, 96] of one form, at a speed that depends on the owner."""
    wave = list(FORMS.values())[form]
    time = np.linspace(0, 2 * np.pi * (2 + 0.3 * owner), STEPS)
    starts = rng.uniform(0, 2 * np.pi, (CHANNELS, 1))
    noise: npt.NDArray[np.float64] = rng.normal(0, 0.7, (CHANNELS, STEPS))
    return wave(time + starts) + noise


def example_command(
    kind: Annotated[
        Literal["text", "signal", "table"], typer.Argument(help="The kind of samples.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Write a small dataset of texts, of signals or of a table, to try a run with."""
    write_example(kind, folder)
    say(f"fedhet run felo --dataset {kind}:{folder}{SETTINGS.get(kind, '')}")
