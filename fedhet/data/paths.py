"""Where a run's data lies: the files and folders that its processes read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedhet.data.encoders import encoder_folder
from fedhet.data.hub import KIND as HUB
from fedhet.data.user_dataset import KIND as OWN
from fedhet.settings.run import DataSettings

_IN_DATA_DIR = {
    "mnist": "MNIST/raw",
    "fashion-mnist": "FashionMNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}
"""Where torchvision keeps a dataset in `data-dir`."""


def paths_of(table: DataSettings) -> list[Path]:
    """Return the files and folders from which a dataset, public data and a tokenizer are read.

    Data that comes with a package, from Python or from a cache of the Hub has none. Raises
    SettingsError or DataError if the tokenizer's encoder is not there.
    """
    names = filter(None, (table.dataset, table.public_dataset))
    found = [path for name in names for path in _paths(name, table.data_dir)]
    if table.tokenizer != "words":
        found.append(Path(encoder_folder(table.tokenizer)))
    return [path.expanduser().resolve() for path in found]


def _paths(dataset: str, data_dir: str) -> Iterator[Path]:
    kind, colon, place = dataset.partition(":")
    if kind in _IN_DATA_DIR:
        yield Path(data_dir).expanduser() / _IN_DATA_DIR[kind]
    elif kind == HUB:
        folder = Path(place.partition("@")[0]).expanduser()
        if folder.is_dir():
            yield folder
    elif colon and kind != OWN:
        yield Path(place)
