"""Finds a client's private states: in a run's directory, or in a site's own state folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedhet.base.errors import StateError, nearest
from fedhet.config.resolve import resolve
from fedhet.config.sources import check_trusted, read_toml
from fedhet.runs.directory import read_records, read_run_name
from fedhet.runs.measures import best_round
from fedhet.runs.storage import ClientStore
from fedhet.runs.units import natural

STATE = "state"
"""The folder of the private states in the directory of a simulated run."""


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
        raise StateError(_empty(directory))
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
    settings = read_toml(directory / "config.toml")
    check_trusted(settings, trust, directory / "config.toml")
    config = resolve(settings)
    records, _ = read_records(directory / "metrics.jsonl")
    found = best_round(records, config.method.spec.headline)
    if not found:
        raise StateError(f"{directory}: no round was evaluated, so there is no best one")
    return found


def _empty(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such folder"
    if (directory / "run.json").exists():
        return (
            f"{directory} holds no states of clients: those of a deployed run are at its sites, in "
            "their own state folders"
        )
    return f"{directory} holds no clients' states and is not a run's directory"


def _stores(directory: Path) -> Iterator[ClientStore]:
    """Yield the clients that have a state, in a folder of any of the four kinds."""
    if (directory / "run.json").exists():
        run = read_run_name(directory)
        yield from _of_run(directory / STATE / run)
        return
    here = directory.resolve()
    if any(directory.glob("round-*.safetensors")):
        yield from _trained([here])
        return
    yield from _of_run(here)
    for run_folder in _folders(here):
        yield from _of_run(run_folder)


def _of_run(folder: Path) -> Iterator[ClientStore]:
    yield from _trained(_folders(folder))


def _trained(folders: list[Path]) -> Iterator[ClientStore]:
    for folder in folders:
        try:
            store = ClientStore(folder.parents[1], folder.parent.name, folder.name)
        except (StateError, IndexError):  # a folder whose name no run or client can have
            continue
        if store.rounds():
            yield store


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_dir())
