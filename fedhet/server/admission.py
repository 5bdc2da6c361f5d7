"""What a client's description must satisfy for the client to take part in a run.

A description is a claim. It is bounded, checked against what the server knows, and put to the vote
of all descriptions, so that one odd client neither ends a run nor decides its task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fedhet.base.errors import FedhetError, ModelError
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.models import is_registered, shapes
from fedhet.wire.identity import ClientInfo

Task = tuple[int, str, tuple[int, ...]]
"""The number of classes, and the kind and the shape of a sample."""
MOST_VALUES = 2**24
"""The most values of one sample."""


def unknown_task() -> Task | None:
    """Return None: the server has no data of its own to compare with."""
    return None


@dataclass(frozen=True)
class Admission:
    """What a run demands of its clients' descriptions."""

    classes: int = 0
    """The number of classes that the run has; 0: any."""
    one_model: bool = False
    """Whether all clients must have the same architecture."""
    most_bytes: float = math.inf
    """The largest model that may travel."""
    servers_task: Callable[[], Task | None] = unknown_task
    """Returns the task of the dataset that the server can read, which decides between equals."""

    def fault_of(self, info: ClientInfo, pool: Collection[str] | None) -> str:
        """Return what is wrong with a description by itself, or "".

        `pool`: the run's models, or None if the server need not know the clients' models.
        """
        if math.prod(info.shape) > MOST_VALUES:
            return f"it claims samples of shape {info.shape}, at most {MOST_VALUES} values may be"
        if self.classes and info.classes != self.classes:
            return f"its data has {info.classes} classes, 'models.num-classes' is {self.classes}"
        if pool is None:
            return ""
        if not (info.model in pool or is_registered(info.model)):
            # Only models in the run's own pool are imported here, never others that a client names.
            return f"its model {info.model!r} is neither registered nor in the run's pool"
        return self._model_fault(info) if is_registered(info.model) else ""

    def _model_fault(self, info: ClientInfo) -> str:
        """Return what is wrong with a registered model for the claimed task; it is not built."""
        try:
            tensors = shapes(info.model, info.shape, info.classes, kind=info.kind).values()
        except ModelError as error:
            return str(error)
        size = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in tensors)
        if size > self.most_bytes:
            limit = f"{self.most_bytes / 1e6:g} MB ('engine.max-payload-mb')"
            return f"its model {info.model!r} would have {size / 1e6:.0f} MB, more than {limit}"
        return ""


def admission_of(config: Config, data: RunData) -> Admission:
    """Return what a run demands of its clients' descriptions."""

    def task() -> Task | None:
        try:
            dataset = data.dataset
        except FedhetError:  # the sites' own data; the server lacks 'dataset'
            return None
        return len(dataset.classes), dataset.kind, dataset.shape

    return Admission(
        classes=config.run.models.num_classes,
        one_model=config.method.spec.one_model,
        most_bytes=config.run.engine.max_payload_mb * 1e6,
        servers_task=task,
    )


def commonest_task(
    infos: Sequence[ClientInfo], servers_task: Callable[[], Task | None] = unknown_task
) -> Task:
    """Return the most common task.

    Among equally common ones the server's own is taken, or else the smallest: an invented size must
    not decide what the server allocates.
    """
    counts = Counter(map(task_of, infos))
    most = max(counts.values())
    tied = sorted((task for task, n in counts.items() if n == most), key=_size)
    own = servers_task() if len(tied) > 1 else None
    return own if own in tied else tied[0]


def commonest(names: Sequence[str]) -> str:
    """Return the most common of the names that are not empty; of equals, the first; or ""."""
    named = [name for name in names if name]
    return Counter(named).most_common(1)[0][0] if named else ""


def task_of(info: ClientInfo) -> Task:
    """Return a client's task."""
    return info.classes, info.kind, info.shape


def _size(task: Task) -> tuple[int, int, tuple[int, ...], str]:
    classes, kind, shape = task
    return math.prod(shape), classes, shape, kind
