"""What data sources return: splits, the format of samples, datasets, and a client's data.

PyTorch is imported lazily, because `fedhet schema` does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError
from fedhet.data.schemas import TableSchema
from fedhet.data.spec import DataSpec, Index, stratified
from fedhet.kinds import IMAGE, KINDS, Kind, Shape, kind_of_arrays
from fedhet.settings.run import DataSettings
from fedhet.tasks import CLASSIFICATION, AnyTask, Classification, Task, stored_task
from fedhet.wire.identity import MAX_SIDE, class_names_digest

if TYPE_CHECKING:
    from torch import Tensor

Stored = Literal["bytes", "scaled", "given"]
"""Storage format of samples: uint8 images ("bytes"), float32 images in [-1, 1] ("scaled"), or other
float32 values that models use unchanged ("given")."""
UNKNOWN = -1
"""Label of a sample whose class is unknown."""


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


@dataclass(frozen=True)
class Format:
    """Description of samples and their targets.

    A dataset, a client's data, its samples, and its record on disk each hold one format. Raises
    DataError if the kind does not exist or does not have the shape.
    """

    kind: str
    """Sample kind, as a name in `fedhet.kinds.KINDS`."""
    shape: Shape
    """Shape of one sample, in the form of its kind."""
    classes: tuple[str, ...]
    """Class names, in the order of the labels, or the names of the target columns."""
    task: AnyTask = CLASSIFICATION
    """Task, with the scale of its targets."""
    schema: TableSchema | None = None
    """Schema of a table or, for samples other than rows, of the targets."""
    stored: Stored = "given"
    """Storage format, which determines how new samples are scaled."""

    def __post_init__(self) -> None:
        """Check the kind and the shape."""
        kind = KINDS.get(self.kind)
        if kind is None or not kind.fits(self.shape):
            raise DataError(
                f"kind must match samples of shape {list(self.shape)}, expected one of "
                f"{', '.join(KINDS)}, got {self.kind!r}"
            )
        if not all(1 <= size <= MAX_SIDE for size in kind.sizes(self.shape)):
            raise DataError(f"shape must have sizes from 1 to {MAX_SIDE}, got {list(self.shape)}")

    @classmethod
    def from_samples(
        cls,
        x: Tensor,
        classes: Sequence[str] = (),
        kind: Kind | None = None,
        *,
        shape: Shape = (),
        schema: TableSchema | None = None,
        task: Task = CLASSIFICATION,
        scaled: bool = False,
    ) -> Format:
        """Return the format of samples.

        Args:
            x: Samples [N, ...].
            classes: Class names; () = as in the schema.
            kind: Kind of the samples; None = table rows if a sample has one dimension, or images.
            shape: Shape of a sample in the form of its kind; () = the shape of a row of `x`.
            schema: Schema of the table or the targets, which also states the task. If it contains
                only classes, the format has no schema.
            task: Task without a schema, with the scale of its targets.
            scaled: Whether `x` contains float32 images that are already scaled to [-1, 1].

        Raises:
            DataError: If the kind does not have the shape.
        """
        import torch

        shape = shape or tuple(x.shape[1:])
        if schema is not None:
            classes, task = classes or schema.outputs, schema.task_object
            schema = schema if schema.columns or task != CLASSIFICATION else None
        stored: Stored = "bytes" if x.dtype == torch.uint8 else "given"
        name, stored = (kind or kind_of_arrays(shape)).name, "scaled" if scaled else stored
        return cls(name, shape, tuple(classes), task, schema, stored)

    @property
    def outputs(self) -> int:
        """Number of outputs of a model."""
        return self.task.outputs(len(self.classes))

    @property
    def digest(self) -> str:
        """Digest of the ordered class names, the schema, and the scale of the targets.

        Clients with equal digests assign the same labels to the same classes.
        """
        names = [*self.classes, self.schema.digest] if self.schema else list(self.classes)
        if self.schema is None and not isinstance(self.task, Classification):
            names.append(json.dumps(stored_task(self.task), sort_keys=True))
        return class_names_digest(names)

    def strata(self, y: Tensor) -> Index:
        """Return the strata [N] of samples with targets `y` [N, ...], such as their classes."""
        return self.task.strata(y, self.classes)[1]

    def for_run(self, settings: DataSettings) -> Format:
        """Return a copy whose task has the loss of a run."""
        return replace(self, task=self.task.with_settings(settings))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Dataset with a training set to partition among clients and, optionally, a test set."""

    name: str
    train: Split
    """Training set."""
    test: Split | None
    """Test set, which all clients of a simulation have in common."""
    format: Format
    """Format of all samples."""
    parts: tuple[tuple[int, int], ...] | None = None
    """Numbers of training and test rows of each client, if the dataset is already partitioned. The
    rows of a client are contiguous in `train`."""
    public: Split | None = None
    """Public samples, which have been removed from the training set."""
    unlabeled: Split | None = None
    """Samples with the label UNKNOWN, or None if they were not requested."""
    num_unlabeled: int = 0
    """Number of samples without a class that were not read, because they were not requested."""
    columns: tuple[int, ...] = ()
    """Number of features for each column of a table, in order; () = one feature for each column."""
    subclasses: Index | None = None
    """Original labels [N] of the training set, if `data.superclasses` replaced them."""
    groups: Index | None = None
    """Index [N] of the person or site of each training sample, where 0 is the first name in sorted
    order. None if the dataset has no natural clients and `data.by` is not set."""
    group_names: tuple[str, ...] = ()
    """Names of the persons or sites in `groups`; () = unknown."""
    notes: tuple[str, ...] = ()
    """Log lines with the type of each table column and the evidence for this type."""

    def subset(self, split: Split, size: int, rng: np.random.Generator) -> Split:
        """Return a stratified sample of `size` rows, or the split itself if `size` is 0 or >= N."""
        if not 0 < size < len(split):
            return split
        return split.take(stratified(self.format.strata(split.y), size, rng))

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
    format: Format
    train: Split
    test: Split
    """Personal test split (protocol "personal"), which is empty if the run has none."""
    common: Split | None
    """Rows of the common test set in the client's label space."""
    space: tuple[int, ...]
    """Label space of the client, i.e. its classes, ascending."""
    validation: Split
    """Samples held out from the training samples for validation (protocol "validation"), which are
    empty if the client has too few samples or the run needs none."""
    unlabeled: Split | None = None
    """Separate samples with the label UNKNOWN, or None if the client has no such samples."""
    num_unused_unlabeled: int = 0
    """Number of unlabeled samples that were not read, because they were not requested. If it is
    above 0, `unlabeled` is empty."""


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
    placeholder: str = ""
    """Placeholder of the location, such as DIR; "" = the source has no location."""
    kind: Kind = IMAGE
    """Kind of the samples."""
    shape: Callable[[DataSpec], Shape] = lambda spec: ()
    """Function that returns the shape of a sample for given settings; () = as in the data."""
    infer_kind: Callable[[str], Kind] | None = None
    """Function that returns the sample kind of a location's data, or IMAGE if the data is
    unreadable; None = the kind does not depend on the data."""
    parse: Callable[[str], Location] = Location
    """Function that parses a location, given as text. All code that permits, reads, or copies data
    uses this function."""
    files: Callable[[str, DataSettings], Path | None] = lambda path, settings: Path(path)
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
        return f"{self.name}:{self.placeholder}" if self.placeholder else self.name


def no_path(path: str, settings: DataSettings) -> None:
    """Return None, because the source reads no user files."""


def concatenate(*parts: Tensor) -> Tensor:
    """Concatenate samples, and scale them first if their storage formats differ."""
    import torch

    from fedhet.base.transfer import to_device
    from fedhet.learning.devices import scaled

    same, device = len({part.dtype for part in parts}) == 1, parts[0].device
    return torch.cat([to_device(part if same else scaled(part), device) for part in parts])


def encode_labels(names: Sequence[str] | npt.NDArray[Any]) -> Index:
    """Encode names or numbers [N] as indices into their sorted distinct values."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)
