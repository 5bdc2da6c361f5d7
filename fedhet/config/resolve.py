"""A run's settings, resolved: from a preset, a TOML file, a command line or Flower's run config."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path

import tomli_w
from pydantic.fields import FieldInfo

from fedhet import data, models
from fedhet.config.methods import Method, find_method, method_names
from fedhet.config.schema import (
    MethodSettings,
    Scalar,
    Settings,
    build,
    parse_text,
    refused,
    span,
    unknown,
)
from fedhet.data import DataSpec
from fedhet.devices import compute_for
from fedhet.errors import FedhetError, SettingsError, nearest
from fedhet.server.attacks import poisonable

PRESETS = resources.files("fedhet") / "presets"
PLACE = frozenset({"out", "resume"})
"""Settings that say where a run lies, not what it is: its config.toml is without them."""
PUBLIC_FRACTION = 0.2
"""Of the training set, for a method that needs public data and is told nothing of it."""
LABELLED_ALPHA = 0.5
"""For a method that needs unlabelled data and is told nothing of it (UM-pFSSL, section VI-A)."""


@dataclass(frozen=True)
class Config:
    """The settings of one run: what every run has, and the two halves of its method."""

    run: Settings
    method: Method
    server: MethodSettings
    client: MethodSettings

    def flat(self) -> dict[str, Scalar]:
        """Return every setting that the run reads by its full name; `resolve` takes it back."""
        own = {**self.server.flat(), **self.client.flat()}
        return {**self.run.flat(), **{f"{self.method.name}.{k}": v for k, v in own.items()}}

    def to_toml(self) -> str:
        """Return the settings as a TOML file that `--config` takes: all but the run's place."""
        own = {**self.server.flat(), **self.client.flat()}
        tables = {self.method.name: own} if own else {}
        shared = {name: value for name, value in self.run.flat().items() if name not in PLACE}
        return tomli_w.dumps({**shared, **tables})


def resolve(values: Mapping[str, object]) -> Config:
    """Validate settings by their full names. Raises SettingsError: one line that helps.

    A setting of another method may be present only at its default, as in Flower's run config,
    where every setting of every method is listed.
    """
    method = find_method(_text("method", values.get("method", Settings().method)))
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    for name, value in values.items():
        if name.startswith(f"{method.name}."):
            own[name.partition(".")[2]] = value
        elif "." in name:
            _refuse_unless_default(name, value, method)
        else:
            shared[name] = value
    for name in own:
        if f"{method.name}.{name}" not in method.settings():
            raise unknown(f"{method.name}.{name}", all_settings())
    for name in shared:
        if name not in Settings.fields():
            raise unknown(name, all_settings())
    run = build(Settings, shared)
    _check_names(run)
    if run.attack != "none" and not poisonable(method.client_sends):
        rule = f"none with {method.name}, whose clients send neither logits nor weights"
        raise refused("attack", run.attack, rule)
    _check_gradients(run, method)
    prefix = f"{method.name}."
    server = build(method.server_settings, _of(method.server_settings, own), prefix)
    client = build(method.client_settings, _of(method.client_settings, own), prefix)
    return Config(_with_rounds(run, method.fixed_rounds(server)), method, server, client)


def _with_rounds(run: Settings, fixed: int | None) -> Settings:
    """Return the settings with the rounds that the method takes, if it fixes them.

    Raises SettingsError where 'rounds' says otherwise; its default says nothing, since Flower's
    run config lists every setting.
    """
    if fixed is None or run.rounds == fixed:
        return run
    if run.rounds != Settings().rounds:
        rule = f"{fixed}, which follows from the settings of {run.method}"
        raise refused("rounds", run.rounds, rule)
    return run.model_copy(update={"rounds": fixed})


@lru_cache(maxsize=8)
def resolve_items(items: tuple[tuple[str, Scalar], ...]) -> Config:
    """Return `resolve(dict(items))`, once a process for the same items."""
    return resolve(dict(items))


def check(config: Config) -> None:
    """Raise FedhetError if this machine cannot run `config`: its data, models or device."""
    compute_for(config.run)
    spec = data_spec(config.run)
    data.validate(spec)
    dataset = data.load(spec)
    if config.run.num_classes not in (0, len(dataset.classes)):
        rule = f"0, or the {len(dataset.classes)} classes of {config.run.dataset}"
        raise refused("num-classes", config.run.num_classes, rule)
    for name in dict.fromkeys(pool(config.run)):
        any_model = config.method.any_model
        models.check(name, dataset.shape, len(dataset.classes), any_model=any_model)


def absolute(config: Config) -> Config:
    """Return `config` with the paths of its data absolute, for workers that start elsewhere."""
    changes = {
        "data_dir": str(Path(config.run.data_dir).expanduser().resolve()),
        "dataset": _absolute(config.run.dataset),
        "public_dataset": _absolute(config.run.public_dataset),
    }
    return replace(config, run=config.run.model_copy(update=changes))


def _absolute(dataset: str) -> str:
    kind, colon, path = dataset.partition(":")
    return f"{kind}:{Path(path).expanduser().resolve()}" if colon else kind


def data_spec(settings: Settings) -> DataSpec:
    """Return what data the settings name."""
    return DataSpec(
        dataset=settings.dataset,
        data_dir=settings.data_dir,
        download=settings.download,
        clients=settings.clients,
        partition=settings.partition,
        alpha=settings.alpha,
        shards=settings.shards,
        classes_per_client=settings.classes_per_client,
        min_samples=settings.min_samples,
        test_fraction=settings.test_fraction,
        seed=settings.seed,
        image_size=settings.image_size,
        max_samples=settings.max_samples,
        max_test_samples=settings.max_test_samples,
        public_dataset=settings.public_dataset,
        public_fraction=_public_fraction(settings),
        public_samples=settings.public_samples,
        superclasses=settings.superclasses,
        label_space=span(settings.label_space),
        subclasses=span(settings.subclasses),
        samples_per_class=settings.samples_per_class,
    )


def _public_fraction(settings: Settings) -> float:
    """Return the share of the training set that is public; a method that needs one has one."""
    if settings.public_fraction or settings.public_dataset:
        return settings.public_fraction
    return PUBLIC_FRACTION if find_method(settings.method).needs_public else 0.0


def labelled_alpha(settings: Settings) -> float:
    """Return Dirichlet's concentration of the labelled share; 0 where everything is labelled."""
    needed = find_method(settings.method).needs_unlabelled
    return settings.labelled_alpha or (LABELLED_ALPHA if needed else 0.0)


def pool(settings: Settings) -> list[str]:
    """Return the names in the pool of models; a method may have one for where none is chosen."""
    chosen = settings.models
    if chosen == Settings.model_fields["models"].default:
        chosen = find_method(settings.method).default_model or chosen
    return [name.strip() for name in chosen.split(",") if name.strip()]


def all_settings() -> dict[str, FieldInfo]:
    """Return every setting there is, of every method, by its full name."""
    found = dict(Settings.fields())
    for name in method_names():
        found |= find_method(name).settings()
    return found


def defaults_toml() -> str:
    """Return every setting of every method at its default, as TOML: Flower's run config."""
    tree: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {}
    for name, info in all_settings().items():
        method, dot, own = name.rpartition(".")
        (tables.setdefault(method, {}) if dot else tree)[own] = info.default
    return tomli_w.dumps({**tree, **tables})


def parse_pairs(pairs: Iterable[str]) -> dict[str, object]:
    """Return settings from `KEY=VALUE` texts. Raises SettingsError."""
    known = all_settings()
    values: dict[str, object] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise SettingsError(f"'{pair}' is no setting: write KEY=VALUE")
        name = name.strip()
        if name in values:
            raise SettingsError(f"setting '{name}' is given twice, the second time as {text!r}")
        values[name] = parse_text(known.get(name), text.strip())
    return values


def read_toml(path: Path) -> dict[str, object]:
    """Return the settings in a TOML file, by their full names. Raises SettingsError."""
    try:
        return _flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"cannot read settings from {path}: {error}") from None


def preset_names() -> dict[str, str]:
    """Return the presets by name, each with the first line of its file."""
    files = sorted((f for f in PRESETS.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): f.read_text().splitlines()[0].lstrip("# ") for f in files}


def read_preset(name: str) -> dict[str, object]:
    """Return the settings of a preset. Raises SettingsError naming the nearest that exists."""
    if name not in preset_names():
        raise SettingsError(
            f"preset '{name}' does not exist; `fedhet presets` lists all"
            f"{nearest(name, preset_names())}"
        )
    return _flatten(tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8")))


def _flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _of(schema: type[MethodSettings], values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name in schema.fields()}


def _refuse_unless_default(name: str, value: object, method: Method) -> None:
    known = all_settings()
    if name not in known:
        raise unknown(name, known)
    if value != known[name].default or isinstance(value, bool) != (known[name].annotation is bool):
        raise SettingsError(
            f"setting '{name}' = {value!r} is not of this run's method, which is {method.name}"
        )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "text in quotes")
    return value


def _check_gradients(settings: Settings, method: Method) -> None:
    for name in pool(settings):
        if name in models.WITHOUT_GRADIENTS and not method.any_model:
            able = ", ".join(m for m in method_names() if find_method(m).any_model)
            raise SettingsError(
                f"setting 'models' = {settings.models!r} is not allowed: {name} has no gradients, "
                f"which {method.name} trains by; methods for models of any kind: {able}"
            )


def _check_names(settings: Settings) -> None:
    try:
        models.deal(pool(settings), settings.clients, settings.seed, settings.deal)
    except FedhetError as error:
        raise SettingsError(f"setting 'models' = {settings.models!r}: {error}") from None
    _check_dataset("dataset", settings.dataset)
    if settings.public_dataset not in ("", data.GENERATED):
        _check_dataset("public-dataset", settings.public_dataset)


def _check_dataset(setting: str, dataset: str) -> None:
    kind = dataset.partition(":")[0]
    names = [name.partition(":")[0] for name in data.dataset_names()]
    if kind not in names:
        raise SettingsError(
            f"setting '{setting}' = '{dataset}' does not exist: "
            f"it takes one of {', '.join(data.dataset_names())}{nearest(kind, names)}"
        )
