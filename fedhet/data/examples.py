"""Small example data to try a run with: texts and signals, made from a seed.

They are no benchmark: sentences of words that go with a topic, and waves of several forms.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from fedhet.errors import DataError
from fedhet.seeding import numpy_rng

OWNERS = 10
"""The sites of the texts, and the persons of the signals."""
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


def write_texts(folder: Path) -> None:
    """Write train.csv and test.csv with the columns text, label and site; some words mislead."""
    for part, count in (("train", TRAIN), ("test", TEST)):
        rng = numpy_rng(0, "example", "text", part)
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("text", "label", BY))
            rows.writerows(_text(rng) for _ in range(count))


def write_signals(folder: Path) -> None:
    """Write train.npz and test.npz with x [N, 3, 96], y [N] and site [N]."""
    for part, count in (("train", TRAIN), ("test", TEST)):
        rng = numpy_rng(0, "example", "signal", part)
        y, site = rng.integers(len(FORMS), size=count), rng.integers(OWNERS, size=count)
        x = np.stack([_signal(rng, int(kind), int(own)) for kind, own in zip(y, site, strict=True)])
        np.savez_compressed(folder / f"{part}.npz", x=x.astype(np.float32), y=y, site=site)


WRITERS: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {"text": write_texts, "signal": write_signals}
)


def write_example(kind: str, folder: Path) -> None:
    """Write the example data of a kind of WRITERS into a new folder. Raises DataError."""
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    WRITERS[kind](folder)


def _text(rng: np.random.Generator) -> tuple[str, str, str]:
    """Return a text of 6 to 20 words, of which a quarter are of its topic, its topic and site."""
    topics, own = list(TOPICS), int(rng.integers(len(TOPICS)))
    words = []
    for _ in range(int(rng.integers(6, 21))):
        chance = rng.random()
        topic = own if chance < 0.25 else int(rng.integers(len(TOPICS)))
        words.append(str(rng.choice(TOPICS[topics[topic]].split() if chance < 0.35 else COMMON)))
    return " ".join(words), topics[own], f"site-{int(rng.integers(OWNERS))}"


def _signal(rng: np.random.Generator, kind: int, owner: int) -> npt.NDArray[np.float64]:
    """Return channels of one form, at a speed that is its owner's, with noise, [3, 96]."""
    wave = list(FORMS.values())[kind]
    time = np.linspace(0, 2 * np.pi * (2 + 0.3 * owner), STEPS)
    starts = rng.uniform(0, 2 * np.pi, (CHANNELS, 1))
    noise: npt.NDArray[np.float64] = rng.normal(0, 0.7, (CHANNELS, STEPS))
    return wave(time + starts) + noise
