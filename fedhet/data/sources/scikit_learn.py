"""The datasets that come with scikit-learn: 1,797 handwritten digits, 569 rows on breast cancer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedhet.base.errors import DataError
from fedhet.data.sources.base import Source, nowhere
from fedhet.data.spec import Dataset, DataSpec, Split, held_out
from fedhet.kinds import IMAGE, TABLE

_TEST_FRACTION = 0.2


def read_digits(place: str, spec: DataSpec) -> Dataset:
    """Return the digits, [N, 1, 8, 8] float32 in [-1, 1]; a fixed fifth is the test set."""
    rows = np.loadtxt(_digits_file(), delimiter=",")  # 64 pixels from 0 to 16, and the label
    x = torch.from_numpy(rows[:, :-1]).to(torch.float32).div_(8.0).sub_(1.0).view(-1, 1, 8, 8)
    y = torch.from_numpy(rows[:, -1]).to(torch.int64)
    train, test = held_out(y.numpy(), _TEST_FRACTION, "digits")
    every, classes = Split(x, y), tuple(map(str, range(10)))
    return Dataset("digits", every.take(train), every.take(test), classes, scaled_images=True)


def _digits_file() -> Path:
    """Return scikit-learn's file of the digits, found without its import, which takes a second.

    Raises DataError.
    """
    found = find_spec("sklearn")
    file = Path((found and found.origin) or "").parent / "datasets" / "data" / "digits.csv.gz"
    if found is None or not file.is_file():
        raise DataError("the digits come with scikit-learn, which is not installed as a whole")
    return file


def read_breast_cancer(place: str, spec: DataSpec) -> Dataset:
    """Return the rows of 30 numbers, centred and scaled; a fixed fifth is the test set."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import StandardScaler

    bunch = load_breast_cancer()
    labels = np.asarray(bunch.target, np.int64)
    train, test = held_out(labels, _TEST_FRACTION, "breast-cancer")
    scaler = StandardScaler().fit(bunch.data[train])
    x = torch.from_numpy(scaler.transform(bunch.data).astype(np.float32))
    every, classes = Split(x, torch.from_numpy(labels)), tuple(map(str, bunch.target_names))
    widths = (1,) * x.shape[1]
    return Dataset(spec.dataset, every.take(train), every.take(test), classes, columns=widths)


SOURCES = (
    Source("digits", "scikit-learn's digits, included", read_digits, "", IMAGE, files=nowhere),
    Source(
        "breast-cancer",
        "scikit-learn's rows on breast cancer, included",
        read_breast_cancer,
        "",
        TABLE,
        files=nowhere,
    ),
)
