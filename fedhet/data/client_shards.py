"""The clients' own samples: copies of their rows, or parts of a file in which they lie in turn.

A simulation writes the file once. Its workers map it, so that a machine has one copy of the samples
however many workers it has, and whichever clients each of them trains.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.datasets import load
from fedhet.data.partition import partition, split_rows
from fedhet.data.spec import DataSpec, Split
from fedhet.errors import StateError

_taken: dict[DataSpec, Path] = {}
"""The file of the clients' samples, by spec; empty but in a simulation's workers."""


def own_samples(spec: DataSpec, index: int) -> tuple[Split, Split]:
    """Return the training and the test samples of client `index`. Raises StateError."""
    train, rows = load(spec).train, split_rows(spec, index)
    if spec not in _taken:
        return train.take(rows[0]), train.take(rows[1])
    x, start = _mapped(_taken[spec]), _starts(spec)[index]
    middle = start + len(rows[0])
    end = middle + len(rows[1])
    return (
        Split(x[start:middle], train.y[torch.from_numpy(rows[0])]),
        Split(x[middle:end], train.y[torch.from_numpy(rows[1])]),
    )


def write_arranged(spec: DataSpec, path: Path) -> None:
    """Write all clients' samples, each client's training samples and then its test samples."""
    x = load(spec).train.x
    count = sum(map(len, partition(spec)))
    header = {
        "descr": np.lib.format.dtype_to_descr(x[:0].numpy().dtype),
        "fortran_order": False,
        "shape": (count, *x.shape[1:]),
    }
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for index in range(spec.clients):
            for rows in split_rows(spec, index):
                file.write(x[torch.from_numpy(rows)].numpy().tobytes())


def take_arranged(spec: DataSpec, path: Path) -> None:
    """Let this process map the clients' samples of a spec from what `write_arranged` wrote."""
    _taken[spec] = path


@lru_cache(maxsize=4)
def _starts(spec: DataSpec) -> tuple[int, ...]:
    """Return the place of each client's first sample in the file."""
    return tuple(accumulate((len(rows) for rows in partition(spec)), initial=0))


@lru_cache(maxsize=4)
def _mapped(path: Path) -> Tensor:
    try:
        # "c": a change would stay in this process, and torch takes no read-only arrays.
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    except (OSError, ValueError, EOFError) as error:
        raise StateError(f"cannot read the clients' samples in {path}: {error}") from None
