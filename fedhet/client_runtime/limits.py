"""What a site does at most for a run, and what it tells the server of a fault: no path of its own.

The settings of a run come from the server. What exceeds a limit of the node is answered by one line
before it is allocated; a round that takes too long is ended.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flwr.client import NumPyClient
from flwr.common import NDArrays, Scalar

from fedhet.base.errors import FedhetError, KnowledgeError, SettingsError, StateError, words_of
from fedhet.client_runtime.node import NodeSettings
from fedhet.config.resolve import Config

LOG = logging.getLogger("fedhet")
_PART = r"[^\s'\",;:()\[\]]"
_PATH = re.compile(rf"(?<![\w/])[~.]*/{_PART}+")
_HIDDEN = "(a path of this site)"
AGAIN = 30.0
"""Seconds after which what was not ended by its time limit is interrupted again."""


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
        if name.endswith("epochs") and max(asked) > site.most_epochs:
            raise _refused("most-epochs", site.most_epochs, name, max(asked))
    classes = config.run.models.num_classes
    if 4 * classes**2 > site.most_model_bytes:  # the class means of logits are [C, C]
        raise _refused("most-model-bytes", site.most_model_bytes, "models.num-classes", classes)
    data = config.run.data
    allowed = {
        "max_bytes": min(data.max_bytes, site.most_data_bytes),
        "download": data.download and site.allow_downloads,
    }
    engine = config.run.engine
    least = max(engine.least_per_class, site.least_per_class)
    return config.replacing(
        data=data.model_copy(update=allowed),
        engine=engine.model_copy(update={"least_per_class": least}),
    )


def _refused(rule: str, limit: int, setting: str, value: int) -> SettingsError:
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
        raise StateError(f"the round takes longer than this site's 'most-seconds', {seconds}")

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
def told_without_paths(site: NodeSettings) -> Iterator[None]:
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
        with told_without_paths(self._site), time_limit(self._site.most_seconds):
            return function(*given)

    def _said(self, measured: dict[str, Scalar]) -> dict[str, Scalar]:
        if not (said := measured.get("error")):
            return measured
        LOG.warning("%s", said)
        return {**measured, "error": without_paths(str(said), self._site)}
