"""Data settings of a run, and the errors, limits, and draws that readers of data share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import InstanceOf

from fedhet.base.disk import is_special
from fedhet.base.errors import DataError, StateError, error_reason
from fedhet.base.seeding import numpy_rng
from fedhet.kinds import Shape
from fedhet.settings.run import DataSettings, RunSettings, draw_held_out
from fedhet.settings.schema import Count, CountOrNone

Index = npt.NDArray[np.int64]

FIXED_SEED = 0
"""Seed for draws that must not depend on the run's seed, such as the common test set."""


@dataclass(frozen=True)
class Expected:
    """What the data of a site must match, because all sites of a run share it."""

    outputs: int = 0
    """Number of classes or target columns; 0 = any number."""
    classes: tuple[str, ...] = ()
    """Class names, in the order of the labels; () = as in the data. A site may lack samples of some
    classes."""
    shape: Shape = ()
    """Shape of one sample; () = as in the data."""
    reads_unlabeled: bool = False
    """Whether to read the samples without a label."""

    def check_outputs(self, count: int, where: object, root: Path) -> None:
        """Compare the number of classes or targets with the expected number.

        Raises DataError, prefixed with `where`, if it differs. `root` is the directory of the data.
        """
        if count != (self.outputs or count):
            raise DataError(
                f"{where}: expected {self.outputs} classes or targets, as in the run, got {count}. "
                "If some classes have no samples, list all classes of the run in "
                f"{root / 'classes.txt'}, in the order that the run uses."
            )


class DataSpec(DataSettings):
    """Data settings, number of clients, and seed of a run."""

    clients: Count = 10
    seed: CountOrNone = 0
    expected: InstanceOf[Expected] | None = None
    """What the data must match; None in a simulation, whose data defines its classes."""

    @classmethod
    def for_run(cls, run: RunSettings) -> DataSpec:
        """Return the data settings of a run."""
        return cls.model_construct(**dict(run.data), clients=run.clients, seed=run.seed)

    @property
    def training_clients(self) -> list[int]:
        """Indices of the clients that train, i.e. of all clients that are not held out."""
        held_out = draw_held_out(self.held_out_clients, self.clients, self.seed)
        return [index for index in range(self.clients) if index not in held_out]

    def draw_samples(self, strata: Index) -> Index:
        """Draw the rows of `data.max-samples`, given the stratum [N] of each training sample."""
        return subset_rows(strata, self.max_samples, numpy_rng(self.seed, "max-samples"))

    def replace(self, **changes: object) -> DataSpec:
        """Return a copy with changed settings."""
        return self.model_copy(update=changes)


@contextmanager
def reading(
    path: object,
    what: str,
    absent: str = "",
    describe: Callable[[Exception], str] = error_reason,
) -> Iterator[None]:
    """Convert exceptions raised in the block to DataError with the text "not a readable `what`".

    This also covers the many exception types of third-party libraries. A missing file is reported
    as "file not found", followed by `absent`. A pipe or a device is reported without reading it.
    """
    if is_special(path):
        raise DataError(f"{path}: expected a regular file")
    try:
        yield
    except DataError:
        raise
    except StateError as error:  # The error names the file.
        raise DataError(str(error)) from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: file not found{absent}") from error
    except Exception as error:
        hint = ". Save the file in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{path}: not a readable {what} ({describe(error)}){hint}") from error


def check_max_bytes(size: int, spec: DataSettings, where: object) -> None:
    """Raise DataError if the `size` of data from `where` exceeds `data.max-bytes`."""
    if size > spec.max_bytes:
        raise DataError(
            f"{where}: expected at most data.max-bytes = {spec.max_bytes} bytes in memory, got "
            f"{size}"
        )


def no_test_error(owner: str, spec: DataSpec) -> DataError:
    """Return the error for a client without any test samples."""
    return DataError(
        f"{owner}: no test samples found. Without a common test set, data.test-fraction must be "
        f"above 0, got {spec.test_fraction:g}"
    )


def stratified(labels: Index, size: int, rng: np.random.Generator) -> Index:
    """Return `size` sorted row numbers, sampled in proportion to the classes in `labels` [N].

    The number of rows of each class differs from the exact proportion by at most one. The shuffled
    rows of each class get evenly spaced positions in (0, 1), and the rows with the `size` lowest
    positions are selected.
    """
    rows = rng.permutation(len(labels))
    _, codes, counts = np.unique(labels[rows], return_inverse=True, return_counts=True)
    by_class = np.argsort(codes, kind="stable")
    place = np.empty(len(labels))
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    place[by_class] = (rank + 0.5) / np.repeat(counts, counts)
    return np.sort(rows[np.argsort(place, kind="stable")[:size]])


def subset_rows(labels: Index, size: int, rng: np.random.Generator) -> Index:
    """Sample `size` row numbers with `stratified`, or return all rows if `size` is 0 or >= N."""
    return stratified(labels, size, rng) if 0 < size < len(labels) else np.arange(len(labels))
