"""The 569 rows on breast cancer that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Split, held_out
from fedhet.kinds import TABLE

_TEST_FRACTION = 0.2


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
    Source(
        "breast-cancer",
        "scikit-learn's rows on breast cancer, included",
        read_breast_cancer,
        kind=TABLE,
        files=lambda path, table: None,
    ),
)
