"""Signals [N, channels, time] in .npz files, a file a client or one for all: `signal:DIR`."""

from __future__ import annotations

from fedhet.base.disk import expanded
from fedhet.base.errors import SettingsError
from fedhet.data.npz import read_npz, read_owners, same_form
from fedhet.data.sources.base import Source
from fedhet.data.sources.npz import read_clients
from fedhet.data.spec import Dataset, DataSpec
from fedhet.kinds import SIGNAL


def read_signals(folder: str, spec: DataSpec) -> Dataset:
    """Read DIR/train.npz and, if there is one, DIR/test.npz; or a file a client, as `npz:DIR` has.

    `Dataset.groups` is set if `data.by` names an array of train.npz.
    """
    root = expanded(folder)
    path = root / "train.npz"
    if not path.exists():
        if spec.by:
            raise SettingsError(
                f"data.by = {spec.by!r}: takes {path}, and {root} holds a file for each client"
            )
        return read_clients(folder, spec, SIGNAL)
    train = read_npz(path, spec, SIGNAL)
    test = None
    if (root / "test.npz").exists():
        test = read_npz(root / "test.npz", spec, SIGNAL)
        same_form(train, test, "train.npz", root / "test.npz")
    highest = max(int(split.y.max()) for split in (train, test) if split is not None and len(split))
    return Dataset(
        spec.dataset,
        train,
        test,
        tuple(map(str, range(highest + 1))),
        groups=read_owners(path, spec.by, spec) if spec.by else None,
    )


SOURCES = (
    Source(
        "signal",
        "signals, one file to partition or one for each client",
        read_signals,
        "DIR",
        SIGNAL,
        whole_clients=True,
        owners="signal:DIR with train.npz",
    ),
)
