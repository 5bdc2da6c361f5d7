"""Flower's ClientApp, restricted by the permissions and limits of a site.

The settings of a run come from the server and are untrusted. By default, a site imports only code
from this package and reads only its own data; `allow-models` and `allow-paths` permit more. A
request that exceeds a limit of the node is rejected before memory is allocated, and a round that
takes too long is interrupted. Error messages are sent without the site's paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from fedhet.base.errors import (
    FedhetError,
    KnowledgeError,
    SettingsError,
    StateError,
    error_text,
    one_line,
)
from fedhet.client_runtime.node import (
    ALLOW_MODELS_VARIABLE,
    ALLOW_PATHS_VARIABLE,
    NodeSettings,
    create_node,
    open_client,
)
from fedhet.client_runtime.privacy import redact_errors
from fedhet.client_runtime.state import MessageClient
from fedhet.config.resolve import Config, resolve_flower
from fedhet.config.sources import CLIENTS, DATASETS, FOLLOW, check_imports, is_listed
from fedhet.data.dataset import Location
from fedhet.data.sources import SOURCES, find_source
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.runs.units import configure_logs
from fedhet.settings import schema
from fedhet.settings.run import RunSettings

LOG = logging.getLogger("fedhet")
_REST = r"(?:(?!: |'|\"|$).)*"
"""Rest of a path. It ends only at a colon before a space, at a quotation mark, or at the end of the
line, because file names may contain spaces and most other characters."""
_PATH = re.compile(rf"(?<![\w/])[~.]*/(?=\S){_REST}|[^\s'\"(]+/[^\s'\":]*\.\w+", re.MULTILINE)
_HIDDEN = "(a path of this site)"
INTERRUPT_INTERVAL = 30.0
"""Seconds between repeated interrupts of code that ignores its time limit."""
HIDING_SETTINGS = ("privacy.epsilon", "privacy.noise-multiplier", "privacy.secure-aggregation")
"""Settings that make a run hide the samples (`PrivacySettings.hides_samples`)."""
POOL, DATA_DIR = "models.pool", "data.data-dir"
SIMULATED = ("pace.clock", "pace.drop-outs", "pace.stragglers", "pace.slowdown")
"""Settings that only apply to simulations; a site ignores them."""


def client_fn(context: Context) -> Client:
    """Create this node's client in a deployed run, if the site permits the run's settings."""
    site = schema.build(NodeSettings, context.node_config, prefix="node-config ")
    with redact_paths(site):
        configure_logs()
        settings = permitted(site, context.run_config)
        if context.run_config.get(CLIENTS) == FOLLOW and site.num_partitions:
            settings[CLIENTS] = site.num_partitions
        config = within_limits(resolve_flower(settings), site)
        node = create_node(site, config.run, data=data_of(DataSpec.for_run(config.run)))
        node = dataclasses.replace(node, pool=str(context.run_config.get(POOL, "")))
    # The following code reads samples, and error messages must not depend on the samples.
    with redact_errors() if config.run.privacy.hides_samples else redact_paths(site):
        return SiteClient(open_client(config, node), site).to_client()


@lru_cache(maxsize=1)
def data_of(spec: DataSpec) -> RunData:
    """Return a run's data, shared by all clients that Flower calls in this process."""
    return RunData(spec)


app = ClientApp(client_fn=client_fn)


def permitted(site: NodeSettings, run_config: Mapping[str, object]) -> dict[str, object]:
    """Return the run's settings for this site, including the site's model if it has one.

    If the site does not permit the settings, raises SettingsError before anything is imported or
    read. The settings of a run that hides the samples must not name the site's own data, because
    the run would use it as public data.
    """
    models = site.allow_models or os.environ.get(ALLOW_MODELS_VARIABLE, "")
    paths = site.allow_paths or os.environ.get(ALLOW_PATHS_VARIABLE, "")
    hiding = any(map(bool, (site.privacy, site.peers, *map(run_config.get, HIDING_SETTINGS))))
    values = {name: value for name, value in run_config.items() if name not in SIMULATED}
    if site.model:
        values[POOL] = site.model

    def check(setting: str, name: str) -> None:
        if name not in ("", site.model) and not is_listed(name, models):
            raise _not_permitted("allow-models", models, f"import {name!r}", setting)

    check_imports(values, check)
    own = _location(site.data, "node-config 'data'").path if site.data else ""
    for setting, place in _places(values):
        if place.path and hiding and own:
            path, site_path = _resolved(place.path), _resolved(own)
            if path.is_relative_to(site_path) or site_path.is_relative_to(path):
                raise SettingsError(
                    f"'{setting}' must not overlap with node-config 'data': a run with privacy or "
                    "secure aggregation is not permitted to use the site's own data as public data"
                )
        listed = [each.strip() for each in paths.split(",")]
        if place.path:
            roots = filter(None, (own, *listed))
            allowed = ".." not in Path(place.path).parts and any(
                _resolved(place.path).is_relative_to(_resolved(root)) for root in roots
            )
        else:  # This is a dataset on the Hugging Face Hub, identified by its name.
            allowed = f"hf:{place.hub}" in listed
        if not allowed:
            raise _not_permitted("allow-paths", paths, f"read {place.path or place.hub!r}", setting)
    return values


def _places(settings: Mapping[str, object]) -> Iterator[tuple[str, Location]]:
    """Yield each setting that names a path or a Hugging Face dataset, and its location."""
    for setting in DATASETS:
        source, colon, place = str(settings.get(setting, "")).partition(":")
        if source not in SOURCES and colon:
            yield setting, Location(place)
        elif colon and not SOURCES[source].imports:
            yield setting, SOURCES[source].parse(place)
    default = RunSettings().data.data_dir
    if (directory := str(settings.get(DATA_DIR, default))) != default:
        yield DATA_DIR, Location(directory)


def _location(dataset: str, setting: str) -> Location:
    source, place = find_source(dataset, setting)
    return Location() if source.imports else source.parse(place)


def _resolved(path: str) -> Path:
    return expanded(path).resolve()


def _not_permitted(rule: str, value: str, action: str, setting: str) -> SettingsError:
    return SettingsError(
        f"'{setting}': this site does not permit a run to {action} "
        f"(node-config '{rule}' = {value!r})"
    )


def within_limits(config: Config, site: NodeSettings) -> Config:
    """Restrict a run's data sizes, downloads, and class means to the site's limits.

    Raises SettingsError if the run needs more epochs or classes than the site permits, if it lacks
    the privacy or the secure aggregation that the site requires, or if a site with a privacy budget
    has no data directory.
    """
    if site.budget() and not config.run.privacy.is_on:
        raise SettingsError(
            f"this site requires differential privacy (node-config 'privacy' = {site.privacy!r}). "
            "Set 'privacy.epsilon' in the run."
        )
    if site.budget() and not site.data:
        raise SettingsError(
            f"node-config 'privacy' = {site.privacy!r}: expected a site with its own data, "
            "got a partition, whose samples are chosen by the run. Set 'data' and "
            "'name'."
        )
    if site.peers and not config.run.privacy.secure_aggregation:
        raise SettingsError(
            "this site takes part only in runs with secure aggregation, because node-config "
            "'peers' is set. Set 'privacy.secure-aggregation' in the run."
        )
    for name, value in config.flat().items():
        values = value if isinstance(value, list) else [value]
        if name.endswith("epochs") and max(values) > site.max_epochs:
            raise _over_limit("max-epochs", site.max_epochs, name, max(values))
    classes = config.run.models.num_classes
    if 4 * classes**2 > site.max_model_bytes:  # Class means of logits have the shape [C, C].
        raise _over_limit("max-model-bytes", site.max_model_bytes, "models.num-classes", classes)
    data, engine = config.run.data, config.run.engine
    allowed = {
        "max_bytes": min(data.max_bytes, site.max_data_bytes),
        "download": data.download and site.allow_downloads,
    }
    min_samples = site.min_samples_per_class
    if not site.peers:
        min_samples = max(engine.min_samples_per_class, min_samples)
    elif engine.min_samples_per_class != min_samples:
        # Otherwise, a server could find out the number of samples of a class by bisection.
        LOG.info(
            "the run's engine.min-samples-per-class = %d is ignored, because this site has 'peers' "
            "and node-config 'min-samples-per-class' = %d",
            engine.min_samples_per_class, min_samples,
        )  # fmt: skip
    return config.replacing(
        data=data.model_copy(update=allowed),
        engine=engine.model_copy(update={"min_samples_per_class": min_samples}),
    )


def _over_limit(rule: str, limit: int, setting: str, value: int) -> SettingsError:
    return SettingsError(
        f"'{setting}' = {value} exceeds this site's limit (node-config '{rule}' = {limit})"
    )


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise StateError if the block runs longer than `seconds`.

    Code that catches the error is interrupted again. The limit has an effect only in the main
    thread, where Flower calls a site's client.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise StateError(f"the round exceeded this site's time limit ('max-seconds' = {seconds})")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, INTERRUPT_INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def without_paths(text: str, site: NodeSettings) -> str:
    """Redact the site's directories and all other text that looks like a path in a message."""
    for directory in sorted(
        filter(None, (site.data.partition(":")[2], site.state_dir)), key=len, reverse=True
    ):
        text = re.sub(f"{re.escape(directory)}{_REST}", _HIDDEN, text)
    return _PATH.sub(_HIDDEN, text)


@contextlib.contextmanager
def redact_paths(site: NodeSettings) -> Iterator[None]:
    """Remove paths from errors raised in the block, and log the original errors at the site."""
    try:
        yield
    except Exception as error:
        LOG.warning("%s: %s", type(error).__name__, error)
        is_ours = isinstance(error, FedhetError)
        kind = type(error) if is_ours and not isinstance(error, KnowledgeError) else StateError
        message = error_text(error) if is_ours else f"{type(error).__name__}: {error_text(error)}"
        raise kind(without_paths(message, site)) from None


class SiteClient(NumPyClient):
    """Client of a method, restricted by the limits of a site."""

    def __init__(self, client: Any, site: NodeSettings) -> None:
        self._client, self._site = client, site

    def to_client(self) -> Client:
        """Return the interface that Flower calls."""
        return MessageClient(self)

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return the client's properties, such as its name, model, and task."""
        return self._limited(self._client.get_properties, config)  # type: ignore[no-any-return]

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train on the server's instruction, within the site's limits."""
        arrays, samples, metrics = self._limited(self._client.fit, parameters, config)
        return arrays, samples, self._redacted(metrics)

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate the current models, within the site's limits."""
        loss, samples, metrics = self._limited(self._client.evaluate, parameters, config)
        return loss, samples, self._redacted(metrics)

    def _limited(self, function: Callable[..., Any], *args: Any) -> Any:
        with redact_paths(self._site), time_limit(self._site.max_seconds):
            return function(*args)

    def _redacted(self, metrics: dict[str, Scalar]) -> dict[str, Scalar]:
        if not (error := metrics.get("error")):
            return metrics
        LOG.warning("%s", error)
        return {**metrics, "error": without_paths(one_line(str(error)), self._site)}
