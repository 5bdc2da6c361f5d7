"""Types shared in this package: splits, datasets, data settings, and data sources.

PyTorch is imported lazily, because `fedhet schema` does not need it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError, error_reason
from fedhet.kinds import IMAGE, KINDS, Kind, Shape, kind_of_arrays
from fedhet.settings.run import DataSettings, RunSettings, draw_held_out
from fedhet.settings.schema import Count, CountOrNone
from fedhet.tasks import CLASSIFICATION, Task

if TYPE_CHECKING:
    from torch import Tensor

    from fedhet.data.schemas import TableSchema

Index = npt.NDArray[np.int64]

Stored = Literal["bytes", "scaled", "given"]
"""Storage format of samples: uint8 images ("bytes"), float32 images in [-1, 1] ("scaled"), or other
float32 values that models use unchanged ("given")."""
UNKNOWN = -1
"""Label of a sample whose class is unknown."""
FIXED_SEED = 0
"""Seed for draws that must not depend on the run's seed, such as the common test set."""


@dataclass(frozen=True, eq=False)
class Split:
    """Samples `x` [N, ...] with labels `y`: classes [N] int64, or the targets of another task.

    `x` is uint8 (images) or float32 of shape [N, *shape], or int64 tokens [N, L].
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        """Return the number N of samples."""
        return len(self.y)

    def take(self, index: Index | Tensor) -> Split:
        """Return a copy of the rows `index` [M], in the given order."""
        import torch

        rows = torch.as_tensor(index, dtype=torch.int64)
        return Split(self.x.index_select(0, rows), self.y.index_select(0, rows))

    def scaled(self) -> Split:
        """Return the split with uint8 images scaled to [-1, 1]."""
        from fedhet.learning.devices import scaled

        return Split(scaled(self.x), self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Dataset with a training set to partition among clients and, optionally, a common test set."""

    name: str
    train: Split
    """Training set."""
    test: Split | None
    """Common test set."""
    classes: tuple[str, ...]
    """Class names, in the order of the labels, or the names of the target columns."""
    parts: tuple[tuple[int, int], ...] | None = None
    """Numbers of training and test rows of each client, if the dataset is already partitioned. The
    rows of a client are contiguous in `train`."""
    public: Split | None = None
    """Public samples, which have been removed from the training set."""
    columns: tuple[int, ...] = ()
    """Number of features for each column of a table, in order; () = one feature for each column."""
    subclasses: Index | None = None
    """Original labels [N] of the training set, if `data.superclasses` replaced them."""
    kind: str = ""
    """Sample kind, as a name in `fedhet.kinds.KINDS`; "" = table rows if samples have one
    dimension, or images otherwise."""
    shape: Shape = ()
    """Shape of one sample; () = the shape of a row of `train.x`."""
    groups: Index | None = None
    """Index [N] of the person or site of each training sample, where 0 is the first name in sorted
    order. None if the dataset has no natural clients and `data.by` is not set."""
    group_names: tuple[str, ...] = ()
    """Names of the persons or sites in `groups`; () = unknown."""
    scaled_images: bool = False
    """Whether `x` contains float32 images that are already scaled to [-1, 1]."""
    schema: TableSchema | None = None
    """Schema of a user's table."""
    notes: tuple[str, ...] = ()
    """Log lines with the type of each table column and the evidence for this type."""
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        """Infer the shape if it is not set, and check the sample kind."""
        shape = self.shape or tuple(self.train.x.shape[1:])
        kind = KINDS.get(self.kind) if self.kind else kind_of_arrays(shape)
        if kind is None or not kind.fits(shape):
            known = ", ".join(KINDS)
            raise DataError(
                f"{self.name}: kind must match samples of shape {list(shape)}, expected one of "
                f"{known}, got {self.kind!r}"
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "kind", kind.name)

    @property
    def outputs(self) -> int:
        """Number of outputs of a model."""
        return self.task.outputs(len(self.classes))

    @property
    def stored(self) -> Stored:
        """Storage format, which determines how new samples are scaled."""
        import torch

        if self.scaled_images:
            return "scaled"
        return "bytes" if self.train.x.dtype == torch.uint8 else "given"

    def strata(self, split: Split) -> Index:
        """Return the strata [N] of a split's samples, such as their classes."""
        return self.task.strata(split.y, self.classes)[1]

    def subset(self, split: Split, size: int, rng: np.random.Generator) -> Split:
        """Return a stratified sample of `size` rows, or the split itself if `size` is 0 or >= N."""
        if not 0 < size < len(split):
            return split
        return split.take(stratified(self.strata(split), size, rng))

    def with_train_rows(self, rows: Index) -> Dataset:
        """Return a copy with only the given rows of the training set."""
        subclasses, groups = self.subclasses, self.groups
        return replace(
            self,
            train=self.train.take(rows),
            subclasses=subclasses[rows] if subclasses is not None else None,
            groups=groups[rows] if groups is not None else None,
        )


@dataclass(frozen=True, eq=False)
class ClientData:
    """Data of one client in storage format.

    Images are stored as uint8 and scaled to floats batch by batch.
    """

    name: str
    train: Split
    test: Split
    """Personal test split (protocol "personal"), which is empty if the run has none."""
    common: Split | None
    """Rows of the common test set in the client's label space."""
    classes: tuple[str, ...]
    """Names of all classes in the run, or of the target columns."""
    space: tuple[int, ...]
    """Label space of the client, i.e. its classes, ascending."""
    kind: str
    """Sample kind, as a name in `fedhet.kinds.KINDS`."""
    shape: Shape
    """Shape of one sample."""
    unlabeled: Split | None = None
    """Separate samples with the label UNKNOWN, or None if the client has no such samples."""
    num_unused_unlabeled: int = 0
    """Number of unlabeled samples that were not read, because they were not requested. If it is
    above 0, `unlabeled` is empty."""
    stored: Stored = "given"
    """Storage format, which determines how new samples are scaled."""
    schema: TableSchema | None = None
    """Schema of a user's table."""
    task: Task = CLASSIFICATION
    validation: Split | None = None
    """Samples held out from the training samples for validation (protocol "validation"), or None if
    the client has no such samples."""


class DataSpec(DataSettings):
    """Data settings, number of clients, and seed of a run."""

    clients: Count = 10
    seed: CountOrNone = 0

    @classmethod
    def of(cls, run: RunSettings) -> DataSpec:
        """Return the data settings of a run."""
        return cls.model_construct(**dict(run.data), clients=run.clients, seed=run.seed)

    @property
    def training_clients(self) -> list[int]:
        """Indices of the clients that train, i.e. of all clients that are not held out."""
        held_out = draw_held_out(self.held_out_clients, self.clients, self.seed)
        return [index for index in range(self.clients) if index not in held_out]

    def replace(self, **changes: object) -> DataSpec:
        """Return a copy with changed settings."""
        return self.model_copy(update=changes)


@contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Restore the global state of `random` and NumPy on exit, because some imports draw from it."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextmanager
def reading(
    path: object,
    what: str,
    absent: str | None = None,
    describe: Callable[[Exception], str] = error_reason,
) -> Iterator[None]:
    """Convert exceptions raised in the block to DataError with the text "not a readable `what`".

    This also covers the many exception types of third-party libraries. If `absent` is not None, a
    missing file is reported as "file not found", followed by `absent`.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if absent is not None and isinstance(error, FileNotFoundError):
            raise DataError(f"{path}: file not found{absent}") from error
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


def concatenate(*parts: Tensor) -> Tensor:
    """Concatenate samples, and scale them first if their storage formats differ."""
    import torch

    from fedhet.base.transfer import to_device
    from fedhet.learning.devices import scaled

    same, device = len({part.dtype for part in parts}) == 1, parts[0].device
    return torch.cat([to_device(part if same else scaled(part), device) for part in parts])


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


def encode_labels(names: Sequence[str] | npt.NDArray[Any]) -> Index:
    """Encode names or numbers [N] as indices into their sorted distinct values."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)


def encode_owners(owners: Sequence[str] | npt.NDArray[Any]) -> dict[str, Any]:
    """Return the `Dataset` fields `groups` and `group_names`, given the owner of each sample."""
    names, groups = np.unique(np.asarray(owners), return_inverse=True)
    return {"groups": groups.astype(np.int64), "group_names": tuple(map(str, names))}


def no_path(path: str, table: DataSettings) -> None:
    """Return None, because the source reads no user files."""


@dataclass(frozen=True)
class Location:
    """Location of a dataset, i.e. a local path or a name on a hub, with an optional suffix."""

    path: str = ""
    hub: str = ""
    suffix: str = ""


@dataclass(frozen=True)
class Source:
    """A named dataset (`NAME`), or a data format with a location (`NAME:PLACE`)."""

    name: str
    line: str
    """One-line description."""
    read: Callable[[str, DataSpec], Dataset]
    """Function that takes a location and the data settings, and returns the decoded dataset. Raises
    DataError if the data is invalid."""
    place: str = ""
    """Placeholder of the location, such as DIR; "" = the source has no location."""
    kind: Kind = IMAGE
    """Kind of the samples."""
    infer_kind: Callable[[str], Kind] | None = None
    """Function that returns the sample kind of a location's data, or IMAGE if the data is
    unreadable; None = the kind does not depend on the data."""
    parse: Callable[[str], Location] = Location
    """Function that parses a location, given as text. All code that permits, reads, or copies data
    uses this function."""
    files: Callable[[str, DataSettings], Path | None] = lambda path, table: Path(path)
    """Function that takes a location's path and the data settings, and returns the file or
    directory to read, or None if there is none."""
    imports: bool = False
    """Whether the location names Python code to import instead of a path."""
    whole_clients: bool = False
    """Whether a file may contain all samples of a client, so that 'data.max-samples' must be 0."""
    is_mapped: bool = False
    """Whether the decoded samples are cached on disk and mapped by all processes."""
    owners: str = ""
    """Description of the locations that support 'data.by', or "" if no location does."""

    @property
    def form(self) -> str:
        """Syntax of the source in `data.dataset`, such as `npz:DIR`."""
        return f"{self.name}:{self.place}" if self.place else self.name
