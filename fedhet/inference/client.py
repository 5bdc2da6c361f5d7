"""A client as a run left it: where its states are, its models, and what they predict of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.base.errors import DataError, ModelError, StateError, nearest, words_of
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.samples import FILE, ClientRecord, read_record
from fedhet.config.resolve import Config, resolve
from fedhet.config.sources import DATASETS, check_trusted, read_toml
from fedhet.data.cells import read_table
from fedhet.data.class_folders import Files, Scan
from fedhet.data.images import IMAGES, MODES, Form, decoded
from fedhet.data.sources.files import read_arrays
from fedhet.data.spec import DataSpec, check_max_bytes
from fedhet.data.tables import encode
from fedhet.data.texts import TEXTS, tokenized
from fedhet.kinds import IMAGE, KINDS, TEXT
from fedhet.learning.devices import scaled
from fedhet.learning.training import evaluate, logits_of
from fedhet.models import AllocationLimit, Refitted
from fedhet.runs.directory import read_records, read_run_name
from fedhet.runs.measures import best_round
from fedhet.runs.records import MAX_ROUNDS
from fedhet.runs.storage import ClientStore
from fedhet.runs.units import natural
from fedhet.wire.identity import client_name

TIMES_ITS_STATE = 8
"""How many times the bytes of a client's state its models may take while they are built."""
STATE = "state"
"""The folder of the private states in the directory of a simulated run."""
ROUNDING = 1e-3
"""By how much a scaled pixel may be outside -1 to 1."""
MAX_BYTES = 2**29
"""Bytes of samples, as the model takes them, that are read at once."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts for N samples."""

    labels: NDArray[np.int64]
    """The number [N] of each sample's most probable class."""
    probabilities: NDArray[np.float32]
    """The probability [N, C] of each class; 0 for a class outside the client's label space."""
    classes: tuple[str, ...]
    """The names of the classes."""

    def __len__(self) -> int:
        """Return N."""
        return len(self.labels)

    @property
    def names(self) -> list[str]:
        """Return the name of each sample's most probable class."""
        return [self.classes[label] for label in self.labels]

    def to_frame(self, index: Sequence[str] | None = None) -> pd.DataFrame:
        """Return a row a sample: its class, that class's probability, and those of all classes."""
        top = self.probabilities[np.arange(len(self)), self.labels]
        first = pd.DataFrame({"class": self.names, "probability": top}, index=index)
        every = pd.DataFrame(self.probabilities, columns=list(self.classes), index=first.index)
        return pd.concat([first, every], axis=1)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=20, float_format="{:.4f}".format))


@dataclass(frozen=True, eq=False)
class TrainedClient:
    """A client of a run, its models restored."""

    record: ClientRecord
    config: Config
    round: int
    """The round whose state was restored."""
    participations: int
    """The number of rounds in which the client has trained."""
    _half: Any
    """The client half of the run's method."""
    _trust: str = ""
    """The modules that its settings may import."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of model that the client keeps: `private`, with some methods also others."""
        return tuple(self._half.models)

    def model(self, kind: str = "private") -> nn.Module:
        """Return a model in evaluation mode: x [N, *shape], scaled, to logits [N, C].

        The logits of classes outside the client's label space are minus infinity. Raises StateError
        for a kind that the client does not keep.
        """
        if kind not in self.kinds:
            raise StateError(
                f"{self.record.client} keeps no model of kind '{kind}', but "
                f"{', '.join(self.kinds) or 'none'}{nearest(kind, self.kinds)}; models that all "
                "clients share are the server's"
            )
        model: nn.Module = self._half.models[kind]
        if not isinstance(model, Refitted):
            model = self._half.samples.within_space(model)
        return model.eval()

    def network(self, kind: str = "private") -> nn.Module:
        """Return a network as it was trained, without the restriction to the label space."""
        self.model(kind)
        network: nn.Module = self._half.models[kind]
        return network

    def predict(self, x: Tensor, kind: str = "private") -> Predictions:
        """Predict samples x [N, *shape], scaled as in training (`samples_for` scales them)."""
        model, compute = self.model(kind), self._half.compute
        with torch.no_grad():
            if isinstance(model, Refitted):
                found = model.probabilities(x)
                labels = model.predict(x)
            else:
                found = logits_of(model, x, compute).softmax(1)
                labels = found.argmax(1)
        names = tuple(self.record.classes)
        return Predictions(labels.cpu().numpy(), found.cpu().numpy(), names)

    def accuracy(self, kind: str = "private") -> dict[str, float]:
        """Return the model's accuracy on the client's own test split and the common test set.

        It is measured on the data that the run names. Raises DataError if that is not there, and
        SettingsError if it is a function of a module that is not trusted.
        """
        check_trusted(self.record.settings, self._trust, Path(self.record.client))
        kept = self._half.node
        node = self.record.node(self.config, kept.state_dir, data=kept.data)
        tested = self._half.config.method.client(self.config, node)
        if tuple(tested.info.shape) != tuple(self.record.shape):
            raise DataError(f"{self.record.client}: its data differs from what it was trained on")
        model = self.model(kind)
        return {
            protocol: evaluate(model, split.x, split.y, self._half.compute).accuracy
            for protocol, split in tested.tests.items()
        }


def open_client(
    directory: Path | str, client: str, *, best: bool = False, trust: str = ""
) -> TrainedClient:
    """Restore a client's models from a run's directory, or from a site's state folder.

    `best`: as they were after the best round, which takes a run's directory. `trust`: the modules
    that the settings may import (`check_trusted`). A network takes no data. A model without
    gradients is never stored: it is fitted again on what it was fitted on, which must still be
    there. Raises StateError, DataError, or SettingsError for what is not trusted.
    """
    root = Path(directory)
    store = find_store(root, client)
    record = read_record(store.folder) or _record_of(root, store, trust)
    if (record.run, record.client) != (store.run, store.client):
        raise StateError(f"{store.folder} holds the record of {record.client} of {record.run}")
    settings = {k: v for k, v in record.settings.items() if k not in DATASETS}
    check_trusted(settings, trust, store.folder / FILE)
    config = record.config()
    node = record.node(config, store.root)
    round = best_round_of(root, trust) if best else MAX_ROUNDS
    largest = max(store.path(each).stat().st_size for each in store.rounds())
    try:
        # A record may name any shape; its models cannot be larger than what was saved of them.
        with AllocationLimit(TIMES_ITS_STATE * largest + 2**26):
            half = config.method.client(config, node, samples=record.without_data(config))
            half.state.restore(store.run, before=round + 1)
    except (ModelError, RuntimeError) as error:
        fault = words_of(error)
        raise StateError(
            f"{store.folder / FILE} does not fit the client's states: {fault}"
        ) from None
    if any(isinstance(model, Refitted) for model in half.models.values()):
        check_trusted(record.settings, trust, store.folder / FILE)
        half = config.method.client(config, node)
        half.state.restore(store.run, before=round + 1)
    if best and not half.state.round:
        raise StateError(
            f"{store.folder} no longer has the models of round {round}, the best one: a run keeps "
            "them with --set keep-best=true"
        )
    return TrainedClient(record, config, half.state.round, half.state.participations, half, trust)


def _record_of(directory: Path, store: ClientStore, trust: str) -> ClientRecord:
    """Return the record of a client of a run that left none, from the run's settings and data.

    Raises StateError outside a run's directory.
    """
    if not (directory / "config.toml").exists():
        raise StateError(
            f"{store.folder} has no record of the client, as runs of older versions: name the "
            "run's directory instead"
        )
    config = _config_of(directory, trust)
    clients = config.run.clients
    names = [client_name(index, clients) for index in range(clients)]
    if store.client not in names:
        raise StateError(f"{directory / 'config.toml'} names no client '{store.client}'")
    place = {"partition-id": names.index(store.client), "num-partitions": clients}
    node = read_node({**place, "device": "cpu"}, config.run, str(store.root))
    half = config.method.client(config, node)
    record: ClientRecord = half.record(store.run)
    return record


# --- where a client's states are: in a run's directory, or in a site's own state folder


def find_store(directory: Path, client: str) -> ClientStore:
    """Return the states of `client`.

    `directory` is a run's, or a folder of states: one that holds runs, that of one run, or that of
    one client. Raises StateError, with the clients that are there, if there is not exactly one.
    """
    stores = list(_stores(directory))
    found = [store for store in stores if store.client == client]
    if len(found) == 1:
        return found[0]
    if found:
        runs = ", ".join(sorted(store.run for store in found))
        raise StateError(
            f"{directory} holds {client} of several runs: {runs}; name one of them, as in "
            f"{directory / found[0].run}"
        )
    names = sorted({store.client for store in stores}, key=natural)
    if not names:
        if not directory.is_dir():
            raise StateError(f"{directory}: no such folder")
        if (directory / "run.json").exists():
            raise StateError(
                f"{directory} holds no states of clients: those of a deployed run are at its "
                "sites, in their own state folders"
            )
        raise StateError(f"{directory} holds no clients' states and is not a run's directory")
    raise StateError(
        f"{directory} holds no client '{client}', but {', '.join(names)}{nearest(client, names)}"
    )


def clients_in(directory: Path) -> list[str]:
    """Return the names of the clients whose states are in a run's directory, or state folder."""
    return sorted({store.client for store in _stores(directory)}, key=natural)


def best_round_of(directory: Path, trust: str = "") -> int:
    """Return the round with the best headline accuracy of a run.

    Raises StateError, and SettingsError if the method is in a module that `trust` does not name.
    """
    if not (directory / "metrics.jsonl").exists():
        raise StateError(f"{directory} is not a run's directory, which names the best round")
    headline = _config_of(directory, trust).method.spec.headline
    found = best_round(read_records(directory / "metrics.jsonl")[0], headline)
    if not found:
        raise StateError(f"{directory}: no round was evaluated, so there is no best one")
    return found


def _config_of(directory: Path, trust: str) -> Config:
    """Return the settings of a run, if they import no module that `trust` does not name."""
    settings = read_toml(directory / "config.toml")
    check_trusted(settings, trust, directory / "config.toml")
    return resolve(settings)


def _stores(directory: Path) -> Iterator[ClientStore]:
    """Yield the clients that have a state, in a folder of any of the four kinds."""
    here = directory.resolve()
    if (directory / "run.json").exists():
        folders = sorted((directory / STATE / read_run_name(directory)).glob("*"))
    elif any(directory.glob("round-*.safetensors")):
        folders = [here]
    else:
        folders = [*sorted(here.glob("*")), *sorted(here.glob("*/*"))]
    for folder in filter(Path.is_dir, folders):
        try:
            store = ClientStore(folder.parents[1], folder.parent.name, folder.name)
        except (StateError, IndexError):  # a folder whose name no run or client can have
            continue
        if store.rounds():
            yield store


# --- samples to predict: files of images or texts, folders of them, tables, npz files and arrays


def read_inputs(
    paths: Sequence[Path], record: ClientRecord, *, resize: bool = False, max_bytes: int = MAX_BYTES
) -> tuple[list[str], Tensor]:
    """Return a name for each sample, and the samples [N, *shape], scaled as in training.

    `paths` are image files and directories of them, or one .npz file with an array `x`; for a
    client with texts, text files and directories of them. Images get the client's channels; those
    of another size are resized if `resize` is set, or if the client's own were
    (`data.image-size`). Raises DataError, which names the file, also if the samples take more than
    `most` bytes. The settings of the run may be somebody else's, so their `data.max-bytes` does
    not count.
    """
    bounds = DataSpec.of(record.config().run).replace(max_bytes=max_bytes)
    if record.kind == TEXT.name:
        texts = _files_in(paths, TEXTS)
        return texts, TEXTS.read(texts, bounds, None)
    arrays = [path for path in paths if path.suffix == ".npz"]
    if record.table is not None and not arrays:
        if len(paths) > 1:
            raise DataError(f"{paths[1]}: give one table alone")
        _refuse_irregular(paths[0])
        cells = read_table(paths[0], bounds)
        return [f"line {line}" for line in cells.lines], encode(record.table, cells)
    if arrays and len(paths) > 1:
        raise DataError(f"{arrays[0]}: is one file of all samples; give it alone")
    if arrays:
        _refuse_irregular(arrays[0])
        found = read_arrays(arrays[0], ("x",), bounds, scaled=True)["x"]
        x = samples_for(record, found, str(arrays[0]))
        return [str(row) for row in range(len(x))], x
    files = _files_in(paths, IMAGES)
    if record.kind != IMAGE.name or record.shape[0] not in MODES:
        raise DataError(
            f"{files[0]}: {record.client}'s model takes samples of shape {record.shape}, which "
            "images cannot give; give an .npz file with an array x"
        )
    channels, height, width = record.shape
    resize = resize or bool(record.settings.get("data.image-size"))
    rule = f"{record.client}'s model takes"
    form = Form(MODES[channels], (width, height), resize, rule, "--resize resizes it")
    check_max_bytes(4 * len(files) * prod(form.shape), bounds, f"{files[0]} and the others")
    return files, samples_for(record, np.concatenate(list(decoded(files, form))), files[0])


def samples_for(record: ClientRecord, x: Any, where: str = "x") -> Tensor:
    """Return samples as the client's models take them: float32 [N, *shape], or tokens of texts.

    Bytes (uint8) are scaled as the client's own images were; floats are taken as scaled already;
    texts are a sequence of str. Raises DataError, which names `where`, for another shape, or a
    range that cannot be meant.
    """
    if record.kind == TEXT.name:
        if isinstance(x, str) or not all(isinstance(text, str) for text in x):
            raise DataError(f"{where}: {record.client}'s model takes texts, a sequence of str")
        return tokenized(list(x), DataSpec.of(record.config().run), where)
    shape = tuple(record.shape)
    kind = KINDS[record.kind]
    values, wanted = kind.checked(np.asarray(x), where), kind.blank(1, shape).shape[1:]
    if values.shape[1:] != wanted:
        raise DataError(
            f"{where}: has samples of shape {list(values.shape[1:])}, {record.client}'s model "
            f"takes {list(wanted)}"
        )
    as_bytes = values.dtype == np.uint8
    if as_bytes and record.stored == "given":
        raise DataError(
            f"{where}: holds bytes, but {record.client} was trained on numbers as they were given: "
            "give float32 in the range of its own samples"
        )
    if not as_bytes and record.stored != "given" and np.abs(values).max(initial=0) > 1 + ROUNDING:
        raise DataError(
            f"{where}: holds {values.flat[np.abs(values).argmax()]:g}, but images are bytes "
            "(uint8), or floats already scaled to -1 to 1"
        )
    return scaled(torch.from_numpy(values))


def _files_in(paths: Sequence[Path], files: Files) -> list[str]:
    """Return files, and the samples anywhere in directories, in natural order.

    Files of directories that are not used are counted in one line of the log; symlinks to
    directories are not followed. Raises DataError if there are no samples.
    """
    found: list[str] = []
    for path in paths:
        if not path.is_dir():
            found.append(str(path))
            continue
        folder = Scan(files, follow=False).read(path)
        found += sorted(folder.samples(), key=natural)
        folder.all_unused().report(path, files)
    for file in found:
        _refuse_irregular(Path(file))
    if not found:
        given = ", ".join(map(str, paths)) or "nothing given"
        raise DataError(f"{given}: holds no {files.noun}")
    return found


def _refuse_irregular(path: Path) -> None:
    """Raise DataError for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file")
