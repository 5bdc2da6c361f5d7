"""A run's settings, resolved: validated together, with what follows from the method filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from fedhet import data, models
from fedhet.config.methods import Method, find_method, method_names
from fedhet.config.sources import all_settings
from fedhet.devices import compute_for
from fedhet.errors import FedhetError, SettingsError, nearest
from fedhet.settings.schema import MethodSettings, Scalar, build, nest, refused, unknown
from fedhet.settings.tables import PLACE, RENAMED, RunSettings
from fedhet.wire.contract import poisonable

PUBLIC_FRACTION = 0.2
"""Of the training set, for a method that needs public data where the user names none."""
LABELLED_ALPHA = 0.5
"""For a method that needs unlabelled data where the user says nothing (UM-pFSSL, section VI-A)."""


@dataclass(frozen=True)
class Config:
    """The settings of one run: what every run has, and its method's own."""

    run: RunSettings
    method: Method
    own: MethodSettings

    def flat(self) -> dict[str, Scalar]:
        """Return every setting that the run reads by its full name; `resolve` takes it back."""
        own = {f"{self.method.table}.{name}": value for name, value in self.own.flat().items()}
        return {**self.run.flat(), **own}

    def to_toml(self) -> str:
        """Return the settings as a TOML file that `--config` takes: all but the run's place."""
        return tomli_w.dumps(nest({k: v for k, v in self.flat().items() if k not in PLACE}))

    def replacing(self, **changes: Any) -> Config:
        """Return this config with other values, or tables, of what every run has."""
        return replace(self, run=self.run.model_copy(update=changes))


def resolve(values: Mapping[str, object]) -> Config:
    """Validate settings by their full names. Raises SettingsError: one line that helps.

    A setting of another method may be present only at its default, as in Flower's run config,
    where every setting of every method is listed.
    """
    method = find_method(_text("method", values.get("method", RunSettings().method)))
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    for name, value in values.items():
        if name in method.settings():
            own[name.partition(".")[2]] = value
        elif name in RunSettings.fields():
            shared[name] = value
        else:
            _refuse_unless_default(name, value, method)
    run = build(RunSettings, shared)
    chosen = build(method.spec.settings, own, f"{method.table}.")
    config = Config(_completed(run, method, chosen), method, chosen)
    _check_names(config)
    return config


@lru_cache(maxsize=8)
def resolve_items(items: tuple[tuple[str, Scalar], ...]) -> Config:
    """Return `resolve(dict(items))`, once a process for the same items."""
    return resolve(dict(items))


def _completed(run: RunSettings, method: Method, own: MethodSettings) -> RunSettings:
    """Return the settings with what follows from the method, where the user says nothing of it.

    A default says nothing, since Flower's run config lists every setting.
    """
    spec, default = method.spec, RunSettings()
    changes: dict[str, Any] = {"rounds": _rounds(run, own.fixed_rounds())}
    data_table: dict[str, Any] = {}
    if spec.needs_public and not (run.data.public_fraction or run.data.public_dataset):
        data_table["public_fraction"] = PUBLIC_FRACTION
    if spec.needs_unlabelled and not run.data.labelled_alpha:
        data_table["labelled_alpha"] = LABELLED_ALPHA
    changes["data"] = run.data.model_copy(update=data_table)
    if spec.default_model and run.models.pool == default.models.pool:
        changes["models"] = run.models.model_copy(update={"pool": spec.default_model})
    return run.model_copy(update=changes)


def _rounds(run: RunSettings, fixed: int | None) -> int:
    """Return the run's rounds. Raises SettingsError where the method fixes another number."""
    if fixed is None or run.rounds == fixed:
        return run.rounds
    if run.rounds != RunSettings().rounds:
        rule = f"{fixed}, which follows from the settings of {run.method}"
        raise refused("rounds", run.rounds, rule)
    return fixed


def _refuse_unless_default(name: str, value: object, method: Method) -> None:
    known = all_settings()
    if name in RENAMED:
        raise SettingsError(f"unknown setting '{name}': it is '{RENAMED[name]}'")
    if name not in known:
        shared = RunSettings.fields()
        in_a_table = any(full.endswith(f".{name}") for full in shared)
        raise unknown(name, shared if in_a_table else known)
    if value != known[name].default or isinstance(value, bool) != (known[name].annotation is bool):
        raise SettingsError(
            f"setting '{name}' = {value!r} is not of this run's method, which is {method.name}"
        )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "text in quotes")
    return value


def _check_names(config: Config) -> None:
    """Raise SettingsError for a model, a dataset or an attack that the method cannot have."""
    run, method = config.run, config.method
    try:
        models.deal(run.models.names, run.clients, run.seed, run.models.deal)
    except FedhetError as error:
        raise SettingsError(f"setting 'models.pool' = {run.models.pool!r}: {error}") from None
    _check_dataset("data.dataset", run.data.dataset)
    if run.data.public_dataset not in ("", data.GENERATED):
        _check_dataset("data.public-dataset", run.data.public_dataset)
    if run.attack.kind != "none" and not poisonable(method.client.sends):
        rule = f"none with {method.name}, whose clients send neither logits nor weights"
        raise refused("attack.kind", run.attack.kind, rule)
    for name in run.models.names:
        if name in models.WITHOUT_GRADIENTS and not method.spec.any_model:
            able = ", ".join(m for m in method_names() if find_method(m).spec.any_model)
            rule = (
                f"{name} has no gradients, which {method.name} trains by; methods for models of "
                f"any kind: {able}"
            )
            raise SettingsError(
                f"setting 'models.pool' = {run.models.pool!r} is not allowed: {rule}"
            )


def _check_dataset(setting: str, dataset: str) -> None:
    kind = dataset.partition(":")[0]
    names = [name.partition(":")[0] for name in data.dataset_names()]
    if kind not in names:
        raise SettingsError(
            f"setting '{setting}' = '{dataset}' does not exist: "
            f"it takes one of {', '.join(data.dataset_names())}{nearest(kind, names)}"
        )


def check(config: Config) -> None:
    """Raise FedhetError if this machine cannot run `config`: its data, models or device."""
    run = config.run
    compute_for(run.engine)
    spec = data.DataSpec.of(run)
    data.validate(spec)
    dataset = data.load(spec)
    if run.models.num_classes not in (0, len(dataset.classes)):
        rule = f"0, or the {len(dataset.classes)} classes of {run.data.dataset}"
        raise refused("models.num-classes", run.models.num_classes, rule)
    for name in dict.fromkeys(run.models.names):
        any_model = config.method.spec.any_model
        models.check(name, dataset.shape, len(dataset.classes), any_model=any_model)


def absolute(config: Config) -> Config:
    """Return `config` with the paths of its data absolute, for workers that start elsewhere."""
    table = config.run.data
    changes = {
        "data_dir": str(Path(table.data_dir).expanduser().resolve()),
        "dataset": _absolute(table.dataset),
        "public_dataset": _absolute(table.public_dataset),
    }
    return config.replacing(data=table.model_copy(update=changes))


def _absolute(dataset: str) -> str:
    kind, colon, path = dataset.partition(":")
    return f"{kind}:{Path(path).expanduser().resolve()}" if colon else kind
