"""Flower's entry point for clients: what a site lets a run do, and what it tells the server.

The settings of a run come from the server. By default a site imports only code of this package and
reads only its own data; `allow-models` and `allow-paths` allow more. What exceeds a limit of the
node is answered by one line before it is allocated; a round that takes too long is ended. An error
is sent without the paths of the site.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context, NDArrays, Scalar

from fedhet.base.disk import expanded
from fedhet.base.errors import FedhetError, KnowledgeError, SettingsError, StateError, words_of
from fedhet.client_runtime.node import (
    ALLOW_MODELS_VARIABLE,
    ALLOW_PATHS_VARIABLE,
    NodeSettings,
    open_client,
    read_node,
)
from fedhet.client_runtime.privacy import redact_errors
from fedhet.config.resolve import Config, resolve_items
from fedhet.config.sources import CLIENTS, DATASETS, FOLLOW, code_named, is_listed
from fedhet.data.sources import SOURCES
from fedhet.data.spec import DataSpec, Location
from fedhet.data.store import RunData
from fedhet.runs.units import configure_logs
from fedhet.settings import schema
from fedhet.settings.run import RunSettings

LOG = logging.getLogger("fedhet")
_PART = r"[^\s'\",;:()\[\]]"
_PATH = re.compile(rf"(?<![\w/])[~.]*/{_PART}+")
_HIDDEN = "(a path of this site)"
AGAIN = 30.0
"""Seconds after which what was not ended by its time limit is interrupted again."""
PRIVATE = ("privacy.epsilon", "privacy.noise-multiplier")
"""The settings that make a run private."""
POOL, DATA_DIR = "models.pool", "data.data-dir"
SIMULATED = ("pace.clock", "pace.drop-outs", "pace.stragglers", "pace.slowdown")
"""Settings for simulations only, which a site ignores."""


def client_fn(context: Context) -> Client:
    """Return this node's client in a deployed run, as far as the site allows what it asks."""
    site = schema.build(NodeSettings, context.node_config, prefix="node-config ")
    with redact_paths(site):
        configure_logs()
        settings = permitted(context.node_config, context.run_config)
        if settings.get(CLIENTS) == FOLLOW and site.num_partitions:
            settings[CLIENTS] = site.num_partitions
        config = within_limits(resolve_items(tuple(settings.items())), site)
        data = data_of(DataSpec.of(config.run))
        node = read_node(context.node_config, config.run, data=data)
    # From here on, samples are read: what the server is told must not depend on them.
    with redact_errors() if config.run.privacy.is_on else redact_paths(site):
        return SiteClient(open_client(config, node), site).to_client()


@lru_cache(maxsize=1)
def data_of(spec: DataSpec) -> RunData:
    """Return the store of a run's data: one for all clients that Flower calls in this process."""
    return RunData(spec)


app = ClientApp(client_fn=client_fn)


def permitted(
    node_config: Mapping[str, object], run_config: Mapping[str, schema.Scalar]
) -> dict[str, schema.Scalar]:
    """Return a run's settings as this site uses them: with its own model, if it has one.

    Raises SettingsError, before anything is imported or read, if the site does not allow them.
    No setting of a private run may name the site's own data, which would become public data.
    """
    site = schema.build(NodeSettings, node_config, prefix="node-config ")
    models = site.allow_models or os.environ.get(ALLOW_MODELS_VARIABLE, "")
    paths = site.allow_paths or os.environ.get(ALLOW_PATHS_VARIABLE, "")
    private = bool(site.privacy or any(run_config.get(name) for name in PRIVATE))
    taken = {name: value for name, value in run_config.items() if name not in SIMULATED}
    if site.model:
        taken[POOL] = site.model
    for setting, name in code_named(taken):
        if name not in ("", site.model) and not is_listed(name, models):
            raise _not_allowed("allow-models", models, f"import {name!r}", setting)
    for setting, place in _places(taken):
        if place.path and private and site.data:
            one, other = _resolved(place.path), _resolved(site.data)
            if one.is_relative_to(other) or other.is_relative_to(one):
                raise SettingsError(
                    "this site does not let a private run read its own data by name: "
                    f"'{setting}' must be a directory apart from node-config 'data'"
                )
        listed = [each.strip() for each in paths.split(",")]
        if place.path:
            roots = filter(None, (site.data.strip(), *listed))
            allowed = ".." not in Path(place.path).parts and any(
                _resolved(place.path).is_relative_to(_resolved(root)) for root in roots
            )
        else:  # a dataset of the Hugging Face Hub, by its name alone
            allowed = f"hf:{place.hub}" in listed
        if not allowed:
            raise _not_allowed("allow-paths", paths, f"read {place.path or place.hub!r}", setting)
    return taken


def _places(settings: Mapping[str, object]) -> Iterator[tuple[str, Location]]:
    """Yield every setting that names a path or a hub's dataset, with what it names."""
    for setting in DATASETS:
        source, colon, place = str(settings.get(setting, "")).partition(":")
        if source not in SOURCES and colon:
            yield setting, Location(place)
        elif colon and not SOURCES[source].imports:
            yield setting, SOURCES[source].parse(place)
    default = RunSettings().data.data_dir
    if (folder := str(settings.get(DATA_DIR, default))) != default:
        yield DATA_DIR, Location(folder)


def _resolved(path: str) -> Path:
    return expanded(path).resolve()


def _not_allowed(rule: str, given: str, deed: str, setting: str) -> SettingsError:
    return SettingsError(
        f"this site does not let a run {deed}, as the run's '{setting}' asks: "
        f"node-config '{rule}' = {given!r}"
    )


def within_limits(config: Config, site: NodeSettings) -> Config:
    """Return a run's settings as a site carries them out.

    Data, downloads and means of small classes are what both allow. Raises SettingsError for more
    epochs or classes than it allows, for a run without the privacy that it asks for, and for a
    private site whose samples the run would choose.
    """
    if site.budget() and not config.run.privacy.is_on:
        rule = "the run has none ('privacy.epsilon')"
        raise SettingsError(f"this site asks for privacy, {site.privacy!r}: {rule}")
    if site.budget() and not site.data:
        raise SettingsError(
            f"node-config 'privacy' = {site.privacy!r}: expected a site with a data directory of "
            "its own, got a partition, whose samples the run chooses. Set 'data' and 'name'."
        )
    for name, value in config.flat().items():
        asked = value if isinstance(value, list) else [value]
        if name.endswith("epochs") and max(asked) > site.max_epochs:
            raise _over_limit("max-epochs", site.max_epochs, name, max(asked))
    classes = config.run.models.num_classes
    if 4 * classes**2 > site.max_model_bytes:  # the class means of logits are [C, C]
        raise _over_limit("max-model-bytes", site.max_model_bytes, "models.num-classes", classes)
    data = config.run.data
    allowed = {
        "max_bytes": min(data.max_bytes, site.max_data_bytes),
        "download": data.download and site.allow_downloads,
    }
    engine = config.run.engine
    least = max(engine.min_samples_per_class, site.min_samples_per_class)
    return config.replacing(
        data=data.model_copy(update=allowed),
        engine=engine.model_copy(update={"min_samples_per_class": least}),
    )


def _over_limit(rule: str, limit: int, setting: str, value: int) -> SettingsError:
    return SettingsError(f"this site's limit '{rule}' is {limit}: the run's '{setting}' is {value}")


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise StateError in the block after so many seconds; in the main thread alone.

    There Flower calls a site's client. Code that catches the error is interrupted again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise StateError(f"the round takes longer than this site's 'max-seconds', {seconds}")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def without_paths(text: str, site: NodeSettings) -> str:
    """Return a message for the server: without the site's folders, and whatever looks like one."""
    for folder in sorted(filter(None, (site.data, site.state_dir)), key=len, reverse=True):
        text = re.sub(f"{re.escape(folder)}{_PART}*", _HIDDEN, text)
    return _PATH.sub(_HIDDEN, text)


@contextlib.contextmanager
def redact_paths(site: NodeSettings) -> Iterator[None]:
    """Replace an error of the block by one without paths; the whole one is in the site's log."""
    try:
        yield
    except Exception as error:
        LOG.warning("%s: %s", type(error).__name__, error)
        ours = isinstance(error, FedhetError)
        kind = type(error) if ours and not isinstance(error, KnowledgeError) else StateError
        fault = words_of(error) if ours else f"{type(error).__name__}: {words_of(error)}"
        raise kind(without_paths(fault, site)) from None


class SiteClient(NumPyClient):
    """A method's client half within the limits of a site."""

    def __init__(self, client: Any, site: NodeSettings) -> None:
        self._client, self._site = client, site

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return the client's name, model and task."""
        return self._bounded(self._client.get_properties, config)  # type: ignore[no-any-return]

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train as the server's instruction says, within the site's limits."""
        arrays, samples, said = self._bounded(self._client.fit, parameters, config)
        return arrays, samples, self._said(said)

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate the current models, within the site's limits."""
        loss, samples, said = self._bounded(self._client.evaluate, parameters, config)
        return loss, samples, self._said(said)

    def _bounded(self, function: Callable[..., Any], *given: Any) -> Any:
        with redact_paths(self._site), time_limit(self._site.max_seconds):
            return function(*given)

    def _said(self, measured: dict[str, Scalar]) -> dict[str, Scalar]:
        if not (said := measured.get("error")):
            return measured
        LOG.warning("%s", said)
        return {**measured, "error": without_paths(str(said), self._site)}
