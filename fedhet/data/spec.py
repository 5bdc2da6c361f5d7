"""The types that this package shares: samples, datasets, data settings, and sources of data.

PyTorch is imported by the functions that need it: `fedhet schema` does without.
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

if TYPE_CHECKING:
    from torch import Tensor

    from fedhet.data.tables import TableSchema

Index = npt.NDArray[np.int64]

Stored = Literal["bytes", "scaled", "given"]
"""How samples are stored: images as bytes; images that are in [-1, 1] already, to which bytes may
be scaled; or float32 that models take as it is, whatever its range."""
UNKNOWN = -1
"""The label of a sample of unknown class."""
FIXED_SEED = 0
"""The seed of what must not depend on the run's: the common test sets."""


@dataclass(frozen=True, eq=False)
class Split:
    """Labeled samples: `x` [N, ...] and `y` [N] int64.

    `x` is uint8 (images as stored) or float32, [N, *shape]; or int64 tokens [N, L].
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        """Return N."""
        return len(self.y)

    def take(self, index: Index | Tensor) -> Split:
        """Return a copy of the rows in `index` [M], in its order."""
        import torch

        rows = torch.as_tensor(index, dtype=torch.int64)
        return Split(self.x.index_select(0, rows), self.y.index_select(0, rows))

    def subset(self, size: int, rng: np.random.Generator) -> Split:
        """Return `size` rows, stratified by class; all if `size` is 0 or not smaller than N."""
        if not 0 < size < len(self):
            return self
        return self.take(stratified(self.y.numpy(), size, rng))

    def scaled(self) -> Split:
        """Return the split with `x` as models expect it (see `fedhet.learning.devices.scaled`)."""
        from fedhet.learning.devices import scaled

        return Split(scaled(self.x), self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set to partition among clients and, if there is one, the common test set.

    `parts` is set only for data that comes already partitioned: (training rows, test rows) of each
    client, which are contiguous in `train`.
    """

    name: str
    train: Split
    test: Split | None
    classes: tuple[str, ...]
    parts: tuple[tuple[int, int], ...] | None = None
    public: Split | None = None
    """The share of the training set that was taken out as public data, if any."""
    columns: tuple[int, ...] = ()
    """For tables: the number of features of each column, in order; (): one each."""
    subclasses: Index | None = None
    """The training set's original labels [N], if `superclasses` replaced them."""
    kind: str = ""
    """The kind of the samples, a name in `fedhet.kinds.KINDS`; "": rows of a table [F], or images,
    as the arrays of .npz files are."""
    shape: Shape = ()
    """The shape of one sample, as its kind has it; (): that of the rows of `train.x`."""
    groups: Index | None = None
    """The number [N] of the person or site that each training sample is of, if `data.by` says so;
    numbers are in the order of the names."""
    scaled_images: bool = False
    """Whether `x` holds images as float32 that are in [-1, 1] already, as bytes become."""
    schema: TableSchema | None = None
    """Of a table of the user's own: what its columns became."""
    notes: tuple[str, ...] = ()
    """What each column of a table was taken for, and why: lines for the run's log."""

    def __post_init__(self) -> None:
        """Take the shape of the samples from `train`, unless it is given. Check the kind."""
        shape = self.shape or tuple(self.train.x.shape[1:])
        kind = KINDS.get(self.kind) if self.kind else kind_of_arrays(shape)
        if kind is None or not kind.fits(shape):
            known = ", ".join(KINDS)
            raise DataError(
                f"{self.name}: kind = {self.kind!r}: must be the kind of samples of shape "
                f"{list(shape)}, one of {known}"
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "kind", kind.name)

    @property
    def stored(self) -> Stored:
        """How samples are stored, which says how new ones are scaled."""
        import torch

        if self.scaled_images:
            return "scaled"
        return "bytes" if self.train.x.dtype == torch.uint8 else "given"

    def with_train_rows(self, rows: Index) -> Dataset:
        """Return the dataset with these rows of its training set."""
        subclasses, groups = self.subclasses, self.groups
        return replace(
            self,
            train=self.train.take(rows),
            subclasses=subclasses[rows] if subclasses is not None else None,
            groups=groups[rows] if groups is not None else None,
        )


@dataclass(frozen=True, eq=False)
class ClientData:
    """A client's data: x as it is stored (bytes become images in [-1, 1] batch by batch).

    `test` is the client's own test split (protocol "personal"; empty if the run has none), `common`
    the rows of the common test set, if any, in the client's label space. `space` is that label
    space: classes, ascending. `kind` is the kind of the samples, a name in `fedhet.kinds.KINDS`,
    and `shape` the shape of a sample.
    """

    name: str
    train: Split
    test: Split
    common: Split | None
    classes: tuple[str, ...]
    space: tuple[int, ...]
    kind: str
    shape: Shape
    unlabeled: Split | None = None
    """Samples without a label, of class UNKNOWN; None if the client has no separate ones."""
    num_unused_unlabeled: int = 0
    """Number of unlabeled samples that were not requested; `unlabeled` is then empty."""
    stored: Stored = "given"
    """How its samples are stored, which says how new ones are scaled."""
    schema: TableSchema | None = None
    """Of a table of its owner's: what its columns became."""


class DataSpec(DataSettings):
    """A run's data settings, with its number of clients and its seed."""

    clients: Count = 10
    seed: CountOrNone = 0

    @classmethod
    def of(cls, run: RunSettings) -> DataSpec:
        """Return the data settings of a run."""
        return cls.model_construct(**dict(run.data), clients=run.clients, seed=run.seed)

    @property
    def training_clients(self) -> list[int]:
        """The numbers of the clients that train: all but those of `unseen`."""
        unseen = draw_held_out(self.held_out_clients, self.clients, self.seed)
        return [index for index in range(self.clients) if index not in unseen]

    def replace(self, **changes: object) -> DataSpec:
        """Return a copy with other values."""
        return self.model_copy(update=changes)


@contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Restore the global state of `random` and numpy afterwards: some imports draw from it."""
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
    """Raise DataError for any fault while `path` is read in the block: "not a readable `what`".

    Each library has errors of its own, and many. With `absent`, a missing file is named as such,
    with these words.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if absent is not None and isinstance(error, FileNotFoundError):
            raise DataError(f"{path}: no such file{absent}") from error
        hint = ". Save it in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{path}: not a readable {what} ({describe(error)}){hint}") from error


def check_max_bytes(size: int, spec: DataSettings, where: object) -> None:
    """Raise DataError if what is read from `where` takes more than `data.max-bytes`."""
    if size > spec.max_bytes:
        raise DataError(
            f"{where}: takes {size} bytes once it is read, 'data.max-bytes' allows {spec.max_bytes}"
        )


def no_test_error(owner: str, spec: DataSpec) -> DataError:
    """Return the error for a client without test samples, where there is no common test set."""
    return DataError(
        f"{owner}: has no test samples: data.test-fraction = {spec.test_fraction:g} must be more "
        "than 0 where there is no common test set"
    )


def concatenated(*parts: Tensor) -> Tensor:
    """Return samples one after the other: as they are stored, or scaled if that differs."""
    import torch

    from fedhet.base.transfer import to_device
    from fedhet.learning.devices import scaled

    alike, place = len({part.dtype for part in parts}) == 1, parts[0].device
    return torch.cat([to_device(part if alike else scaled(part), place) for part in parts])


def stratified(labels: Index, size: int, rng: np.random.Generator) -> Index:
    """Return `size` sorted row numbers, stratified by `labels` [N] (up to one row per class).

    Every class's shuffled rows are spread evenly over (0, 1); the `size` lowest are selected.
    """
    rows = rng.permutation(len(labels))
    _, codes, counts = np.unique(labels[rows], return_inverse=True, return_counts=True)
    by_class = np.argsort(codes, kind="stable")
    place = np.empty(len(labels))
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    place[by_class] = (rank + 0.5) / np.repeat(counts, counts)
    return np.sort(rows[np.argsort(place, kind="stable")[:size]])


def subset_rows(labels: Index, size: int, rng: np.random.Generator) -> Index:
    """Return `size` row numbers as `stratified` does; all if it is 0 or not smaller than N."""
    return stratified(labels, size, rng) if 0 < size < len(labels) else np.arange(len(labels))


def encode_labels(names: Sequence[str] | npt.NDArray[Any]) -> Index:
    """Return the place [N] of each name, or number, among the sorted ones."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)


def no_path(path: str, table: DataSettings) -> None:
    """Return None: the data is not read from files of the user's."""


@dataclass(frozen=True)
class Location:
    """What a place names: a path of this machine, or a name of a hub; and what follows either."""

    path: str = ""
    hub: str = ""
    rest: str = ""


@dataclass(frozen=True)
class Source:
    """A dataset by its name, or a format of data that lies somewhere: `NAME` or `NAME:PLACE`."""

    name: str
    line: str
    """What it is, in a line."""
    read: Callable[[str, DataSpec], Dataset]
    """(place, settings) -> the dataset, decoded. Raises DataError for any fault of what is read."""
    place: str = ""
    """What follows the name and a colon, such as DIR; empty: nothing does."""
    kind: Kind = IMAGE
    """The kind of its samples."""
    infer_kind: Callable[[str], Kind] | None = None
    """(place) -> the kind, where only the data says it. What cannot be read has any."""
    parse: Callable[[str], Location] = Location
    """(place) -> what it names: whoever permits, reads or moves the data asks this alone."""
    files: Callable[[str, DataSettings], Path | None] = lambda path, table: Path(path)
    """(path of the place, settings) -> the file or folder that is read, if there is one."""
    imports: bool = False
    """Whether the place names code to import, not a path."""
    whole_clients: bool = False
    """Whether its files may be whole clients, of which 'data.max-samples' leaves nothing out."""
    is_mapped: bool = False
    """Whether decoded samples lie in a cache of their own, from which all processes map them."""
    owners: str = ""
    """Where 'data.by' says whose a sample is, in words; empty: no_path."""

    @property
    def form(self) -> str:
        """How `data.dataset` names it, such as `npz:DIR`."""
        return f"{self.name}:{self.place}" if self.place else self.name
