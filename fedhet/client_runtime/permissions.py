"""What a site allows a run to load: code that it imports, and folders that it reads.

The settings of a run come from the server. By default a site imports only code of this package and
reads only its own data; `allow-models` and `allow-paths` allow more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedhet.base.disk import expanded
from fedhet.base.errors import SettingsError
from fedhet.client_runtime.node import NodeSettings
from fedhet.config.sources import DATASETS, code_named, is_named
from fedhet.data.sources import SOURCES
from fedhet.data.spec import Place
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import Scalar, build

ALLOW_MODELS_VARIABLE = "FEDHET_ALLOW_MODELS"
ALLOW_PATHS_VARIABLE = "FEDHET_ALLOW_PATHS"
PRIVATE = ("privacy.epsilon", "privacy.noise-multiplier")
"""The settings that make a run private."""
POOL, DATA_DIR = "models.pool", "data.data-dir"
SIMULATED = ("pace.clock", "pace.drop-outs", "pace.stragglers", "pace.slowdown")
"""Settings for simulations only, which a site ignores."""


def permitted(
    node_config: Mapping[str, object], run_config: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Return a run's settings as this site uses them: with its own model, if it has one.

    Raises SettingsError, before anything is imported or read, if the site does not allow them.
    No setting of a private run may name the site's own data, which would become public data.
    """
    site = build(NodeSettings, node_config, prefix="node-config ")
    private = bool(site.privacy or any(run_config.get(name) for name in PRIVATE))
    taken = {name: value for name, value in run_config.items() if name not in SIMULATED}
    if site.model:
        taken[POOL] = site.model
    for setting, name in code_named(taken):
        _check_import(setting, name, site)
    for setting, place in _places(taken):
        if place.path and private and site.data and _overlaps(place.path, site.data):
            raise SettingsError(
                f"this site does not let a private run read its own data by name: '{setting}' must "
                "be a directory apart from node-config 'data'"
            )
        if not (_may_read(place.path, site) if place.path else _may_fetch(place.hub, site)):
            deed = f"read {place.path or place.hub!r}"
            raise _refused("allow-paths", _allowed_paths(site), deed, setting)
    return taken


def _check_import(setting: str, name: str, site: NodeSettings) -> None:
    if name not in ("", site.model) and not _may_import(name, site):
        raise _refused("allow-models", _allowed_models(site), f"import {name!r}", setting)


def _places(settings: Mapping[str, object]) -> Iterator[tuple[str, Place]]:
    """Yield every setting that names a path or a hub's dataset, with what it names."""
    for setting in DATASETS:
        source, colon, place = str(settings.get(setting, "")).partition(":")
        if source not in SOURCES and colon:
            yield setting, Place(place)
        elif colon and not SOURCES[source].imports:
            yield setting, SOURCES[source].parse(place)
    default = RunSettings().data.data_dir
    if (folder := str(settings.get(DATA_DIR, default))) != default:
        yield DATA_DIR, Place(folder)


def _may_import(name: str, site: NodeSettings) -> bool:
    return is_named(name, _allowed_models(site))


def _may_fetch(name: str, site: NodeSettings) -> bool:
    """Return whether a site allows a dataset of the Hugging Face Hub, by its name alone."""
    return f"hf:{name}" in [each.strip() for each in _allowed_paths(site).split(",")]


def _may_read(path: str, site: NodeSettings) -> bool:
    if ".." in Path(path).parts:
        return False
    allowed = [site.data, *_allowed_paths(site).split(",")]
    folders = [_resolved(each.strip()) for each in allowed if each.strip()]
    return any(_resolved(path).is_relative_to(folder) for folder in folders)


def _overlaps(path: str, folder: str) -> bool:
    """Return whether one of the two is, or lies in, the other."""
    one, other = _resolved(path), _resolved(folder)
    return one.is_relative_to(other) or other.is_relative_to(one)


def _resolved(path: str) -> Path:
    return expanded(path).resolve()


def _allowed_models(site: NodeSettings) -> str:
    return site.allow_models or os.environ.get(ALLOW_MODELS_VARIABLE, "")


def _allowed_paths(site: NodeSettings) -> str:
    return site.allow_paths or os.environ.get(ALLOW_PATHS_VARIABLE, "")


def _refused(rule: str, given: str, deed: str, setting: str) -> SettingsError:
    return SettingsError(
        f"this site does not let a run {deed}, as the run's '{setting}' asks: "
        f"node-config '{rule}' = {given!r}"
    )
