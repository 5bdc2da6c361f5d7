"""Resolves a run's settings: validates them together and adds the method's defaults."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tomli_w

from fedhet import models
from fedhet.algorithms.robust import withstood
from fedhet.base.disk import expanded
from fedhet.base.errors import FedhetError, ModelError, SettingsError
from fedhet.config.sources import Given, from_flower, validated
from fedhet.data import sources
from fedhet.data.spec import Dataset
from fedhet.data.store import GENERATED, MADE_HERE, RunData
from fedhet.kinds import KINDS, augmentation
from fedhet.learning.devices import compute_for
from fedhet.methods.registry import Method, all_methods
from fedhet.pace.closing import closing, honest_majority, wanted
from fedhet.privacy.sgd import refuse_unfit
from fedhet.settings.engine import SIMULATED_ONLY
from fedhet.settings.run import PLACE, RunSettings
from fedhet.settings.schema import A_MODEL, MethodSettings, Scalar, kebab, nest, refused
from fedhet.wire.contract import floating, poisonable
from fedhet.wire.identity import ClientInfo

PUBLIC_FRACTION = 0.2
"""Default share of the training set that is public, if the method needs public data."""
LABELLED_ALPHA = 0.5
"""Default if the method needs unlabelled data (UM-pFSSL, section VI-A)."""
PRIVATE_TRAINING = {
    "clip": (0.0,),
    "semi": ("none",),
    "schedule": ("constant", "cosine", "step"),
}
"""The settings of training that a private run restricts, and what it allows: each other value uses
samples in a way that is neither bounded nor noised."""
PRIVATE_PRECISION = ("float32",)
PRIVATE_SELECT = ("random",)
"""The others choose by the clients' losses, which a private client does not send."""


@dataclass(frozen=True)
class Config:
    """The settings of one run: those shared by all methods, and its method's own."""

    run: RunSettings
    method: Method
    own: MethodSettings

    @property
    def uses_unlabelled(self) -> bool:
        """Return whether the clients learn from unlabelled samples of their own."""
        return self.method.spec.needs_unlabelled or self.run.training.semi != "none"

    def flat(self) -> dict[str, Any]:
        """Return every setting of the run by its full name; the inverse of `resolve`."""
        own = {f"{self.method.table}.{name}": value for name, value in self.own.flat().items()}
        return {**self.run.flat(), **own}

    def to_toml(self) -> str:
        """Return the settings as TOML for `--config`, without `out` and `resume`."""
        return tomli_w.dumps(nest({k: v for k, v in self.flat().items() if k not in PLACE}))

    def replacing(self, **changes: Any) -> Config:
        """Return this config with some of the shared settings, or tables, replaced."""
        return replace(self, run=self.run.model_copy(update=changes))


def resolve(values: Mapping[str, object]) -> Config:
    """Validate settings by their full names. Raises SettingsError with a one-line message.

    A setting of another method is allowed only at its default, because Flower's run config lists
    the settings of every method.
    """
    return _resolved(values, chosen=values.keys())


def resolve_flower(values: Mapping[str, object]) -> Config:
    """Return the settings of Flower's run config, which lists them all: a default is no choice."""
    return _resolved(from_flower(values), chosen=())


def _resolved(values: Mapping[str, object], chosen: Container[str]) -> Config:
    """`chosen`: the settings whose values stay even if they are the defaults."""
    given = validated(values)
    own = _completed_own(given, chosen)
    config = Config(_completed(given.run, given.method, own), given.method, own)
    _check_names(config)
    return config


@lru_cache(maxsize=8)
def resolve_items(items: tuple[tuple[str, Scalar], ...]) -> Config:
    """Return the settings of Flower's run config, resolved once a process for the same items."""
    return resolve_flower(dict(items))


def _completed(run: RunSettings, method: Method, own: MethodSettings) -> RunSettings:
    """Fill in the method's defaults for settings that the user has not changed.

    A value equal to the default counts as unset, since Flower's run config lists every setting.
    """
    spec, default = method.spec, RunSettings()
    changes: dict[str, Any] = {"rounds": _rounds(run, own.fixed_rounds())}
    data_table: dict[str, Any] = {}
    needs_public = spec.needs_public or own.uses_public()
    if needs_public and not (run.data.public_fraction or run.data.public_dataset):
        data_table["public_fraction"] = PUBLIC_FRACTION
    if (spec.needs_unlabelled or run.training.semi != "none") and not run.data.labelled_alpha:
        data_table["labelled_alpha"] = LABELLED_ALPHA
    changes["data"] = run.data.model_copy(update=data_table)
    if run.models.pool == default.models.pool:
        pool = spec.pool(sources.sample_kind(run.data))
        if run.privacy.is_on:
            pool = models.private_pool(pool)
        changes["models"] = run.models.model_copy(update={"pool": pool})
    if run.privacy.is_on and run.engine.precision == "auto":
        changes["engine"] = run.engine.model_copy(update={"precision": "float32"})
    return run.model_copy(update=changes)


def _completed_own(given: Given, chosen: Container[str]) -> MethodSettings:
    """Fill in the method's default models for the kind of data, where none is chosen."""
    run, method, own = given.run, given.method, given.own
    default, found = type(own)(), method.spec.defaults(sources.sample_kind(run.data))
    found = {k: v for k, v in found.items() if f"{method.table}.{kebab(k)}" not in chosen}
    if run.privacy.is_on:
        clients = method.spec.privacy.models
        found |= {k: models.without_batch_norms(v) for k, v in found.items() if k in clients}
    unset = {k: v for k, v in found.items() if getattr(own, k) == getattr(default, k)}
    return own.model_copy(update=unset)


def _rounds(run: RunSettings, fixed: int | None) -> int:
    """Return the number of rounds. Raises SettingsError if the method requires another number."""
    if fixed is None or run.rounds == fixed:
        return run.rounds
    if run.rounds != RunSettings().rounds:
        rule = f"{fixed}, which follows from the settings of {run.method}"
        raise refused("rounds", run.rounds, rule)
    return fixed


def _check_names(config: Config) -> None:
    """Raise SettingsError for a model, dataset or attack that the method does not support."""
    run, method, own = config.run, config.method, config.own
    try:
        models.assign(run.models.pool, run.clients, run.seed, run.models.assignment)
    except FedhetError as error:
        pool = list(run.models.pool)
        raise SettingsError(f"setting 'models.pool' = {pool!r}: {error}") from None
    _check_own_models(config)
    sources.find_source(run.data.dataset)
    if run.data.public_dataset not in ("", *MADE_HERE):
        sources.find_source(run.data.public_dataset, "data.public-dataset")
    _check_attack_and_defence(run, method)
    if run.pace.is_asynchronous and method.spec.late != "averaged":
        methods, _ = all_methods()
        able = ", ".join(name for name, each in methods.items() if each.spec.late == "averaged")
        rule = f"synchronous with {run.method}; {able} may be asynchronous"
        raise refused("pace.mode", run.pace.mode, rule)
    if run.privacy.is_on:
        if run.data.unseen:
            rule = "0 with '[privacy]': the local epoch of those clients is not protected"
            raise refused("data.unseen", run.data.unseen, rule)
        check_private(run, method, own)
    if run.training.semi != "none":
        _check_semi(run, method)
    several = len(set(run.models.pool)) > 1 or not models.DRAWN.keys().isdisjoint(run.models.pool)
    if several and (method.spec.one_model or method.spec.pool_of_one):
        how = "exchanges their weights" if method.spec.one_model else "cuts theirs from it"
        rule = f"one model for all clients with {method.name}, which {how}"
        raise refused("models.pool", run.models.pool, rule)
    for name in run.models.pool:
        if name in models.WITHOUT_GRADIENTS and not method.spec.any_model:
            able = ", ".join(m for m, found in all_methods()[0].items() if found.spec.any_model)
            rule = (
                f"{name} has no gradients, which {method.name} trains by; methods for models of "
                f"any kind: {able}"
            )
            raise SettingsError(
                f"setting 'models.pool' = {list(run.models.pool)!r} is not allowed: {rule}"
            )


def _check_attack_and_defence(run: RunSettings, method: Method) -> None:
    """Raise SettingsError for an attack or a defence that does not fit what the clients send."""
    kind, average, spec = run.attack.kind, run.defence.average, method.spec
    struck = poisonable if kind in ("paf", "lie", "ofom") else floating
    if kind != "none" and not struck(spec.replies):
        rule = f"none with {method.name}, whose clients send neither logits nor weights"
        raise refused("attack.kind", kind, rule)
    if average not in ("mean", *spec.defences):
        resists = f": {spec.resists}" if spec.resists else ""
        able = ", ".join(("mean", *spec.defences))
        raise refused("defence.average", average, f"{able} with {method.name}{resists}")
    if average != "mean":
        _check_majority(run)


def _check_majority(run: RunSettings) -> None:
    """Raise SettingsError if malicious clients can be the majority by replying or joining first.

    This is so where a round may close, or a run may start, with too few of the honest clients.
    """
    pace, defence, members = run.pace, run.defence, run.clients
    malicious, count, least = honest_majority(run)
    closes = closing(pace, wanted(members, run.fraction), count).enough
    rule = f"with 'defence.average' = '{defence.average}', 'defence.share' = {defence.share:g}"
    if malicious and closes < least:
        raise SettingsError(
            f"setting 'pace.enough' = {pace.enough:g} closes a round with {closes} replies: "
            f"{rule}, {malicious} of {count} clients may be malicious and the fastest, expected at "
            f"least {least}. Set 'pace.enough' to {least}, or lower 'defence.share'."
        )
    malicious, start = withstood(members, defence.share), run.engine.min_clients
    if 0 < start < min(2 * malicious + 1, members):
        raise SettingsError(
            f"setting 'engine.min-clients' = {start}: {rule}, {malicious} of {members} clients may "
            f"be malicious and the first to join, expected 0 or at least {2 * malicious + 1}."
        )


def _check_own_models(config: Config) -> None:
    """Raise SettingsError if one of the method's own settings names a model that does not exist."""
    values = config.own.flat()
    for name, info in config.own.fields().items():
        value = values[name]
        if A_MODEL in info.metadata and value != info.default:
            try:
                models.check_name(str(value))
            except FedhetError as error:
                setting = f"setting '{config.method.table}.{name}' = {value!r} is not allowed"
                raise SettingsError(f"{setting}: {error}") from None


def _check_semi(run: RunSettings, method: Method) -> None:
    """Raise SettingsError unless clients can learn from unlabelled samples by FixMatch."""
    if not method.spec.semi:
        rule = f"none with {method.name}, which trains in its own way"
        raise refused("training.semi", run.training.semi, rule)
    if not sources.sample_kind(run.data).changeable:
        able = " or ".join(kind.plural for kind in KINDS.values() if kind.changeable)
        rule = f"{able} with 'training.semi' = '{run.training.semi}', which augments them"
        raise refused("data.dataset", run.data.dataset, rule)
    if run.training.augment != "none":
        rule = f"none with 'training.semi' = '{run.training.semi}', which augments by its own rules"
        raise refused("training.augment", run.training.augment, rule)
    if unable := [name for name in run.models.pool if name in models.WITHOUT_GRADIENTS]:
        rule = f"networks with 'training.semi' = '{run.training.semi}', not {unable[0]}"
        raise refused("models.pool", run.models.pool, rule)


def check(config: Config, store: RunData | None = None) -> None:
    """Raise FedhetError if this machine cannot run `config`: its data, models or device."""
    run, store = config.run, store or RunData.of(config.run)
    compute_for(run.engine)
    store.validate()
    dataset = store.dataset
    if run.models.num_classes not in (0, len(dataset.classes)):
        rule = f"0, or the {len(dataset.classes)} classes of {run.data.dataset}"
        raise refused("models.num-classes", run.models.num_classes, rule)
    kind, shape, classes = dataset.kind, dataset.shape, len(dataset.classes)
    augmentation(run.training.augment, KINDS[kind], shape)
    for name in dict.fromkeys(run.models.pool):
        any_model = config.method.spec.any_model
        models.check(name, kind, shape, classes, any_model=any_model)
        config.method.spec.suits(config.own, ClientInfo("", name, 0, classes, kind, shape))
    for field in config.method.spec.own_models:
        _check_fits(config, field, dataset)
    if run.privacy.is_on:
        check_trainable(config.run, config.method, config.own, dataset)


def _check_fits(config: Config, field: str, dataset: Dataset) -> None:
    """Raise SettingsError if the model that one of the method's own settings names cannot be."""
    name = getattr(config.own, field)
    try:
        models.check(name, dataset.kind, dataset.shape, len(dataset.classes), any_model=False)
    except FedhetError as error:
        setting = f"setting '{config.method.table}.{kebab(field)}' = {name!r} is not allowed"
        raise SettingsError(f"{setting}: {error}") from None


def check_deployable(config: Config) -> None:
    """Raise SettingsError for a method or for injected faults that can only be simulated."""
    if config.method.spec.simulation_only:
        rule = (
            "another method in a deployment: it trains on all clients' data in one place, which "
            "would have to leave the sites; `fedhet run` simulates it"
        )
        raise refused("method", config.method.name, rule)
    if config.run.data.unseen:
        rule = "0 in a deployment, whose sites are there to train"
        raise refused("data.unseen", config.run.data.unseen, rule)
    for name, value in SIMULATED_ONLY.items():
        if (found := getattr(config.run.pace, name)) != value:
            rule = f"{value} in a deployment, whose sites are slow and fail by themselves"
            raise refused(f"pace.{kebab(name)}", found, rule)


def absolute(config: Config) -> Config:
    """Return `config` with absolute data paths, for workers with another working directory."""
    table = config.run.data
    changes = {
        "data_dir": str(expanded(table.data_dir).resolve()),
        "dataset": sources.absolute(table.dataset, table),
        "public_dataset": sources.absolute(table.public_dataset, table),
    }
    return config.replacing(data=table.model_copy(update=changes))


# --- privacy


def check_private(run: RunSettings, method: Method, own: MethodSettings) -> None:
    """Raise SettingsError, which names what would do, for what cannot be private."""
    rule = method.spec.privacy
    if rule.refused:
        raise refused(*_switch(run), f"0 with {method.name}: {rule.refused}")
    for name, allowed in rule.needs.items():
        _check(run, f"{method.table}.{kebab(name)}", getattr(own, name), allowed)
    if run.data.public_dataset == GENERATED:
        rest = "samples of a dataset of their own, or 'data.public-fraction'"
        why = "generated samples are made of the values of the clients' samples"
        raise refused("data.public-dataset", GENERATED, f"{rest}, with '{_switch(run)[0]}': {why}")
    for name, allowed in PRIVATE_TRAINING.items():
        _check(run, f"training.{name}", getattr(run.training, name), allowed)
    _check(run, "engine.precision", run.engine.precision, PRIVATE_PRECISION)
    _check(run, "pace.select", run.pace.select, PRIVATE_SELECT)
    for setting, model in _of_clients(run, method, own):
        fit = models.without_batch_norms(model)
        if fit != model:
            rest = f"in place of {model}, whose batch norms mix the samples of a batch"
            _check(run, setting, model, (fit,), f" {rest},")
        elif model in models.WITHOUT_GRADIENTS:
            _check(run, setting, model, ("a network",))


def check_trainable(
    run: RunSettings, method: Method, own: MethodSettings, dataset: Dataset
) -> None:
    """Raise SettingsError for a model with a layer that cannot tell samples apart."""
    for setting, model in _of_clients(run, method, own):
        if model not in models.DRAWN:
            try:
                kind, shape, classes = dataset.kind, dataset.shape, len(dataset.classes)
                built = models.build(model, shape, classes, seed=run.seed, kind=kind)
                refuse_unfit(built, kind, shape, model)
            except ModelError as error:
                raise refused(setting, model, f"another model: {error}") from None


def _of_clients(run: RunSettings, method: Method, own: MethodSettings) -> Iterator[tuple[str, str]]:
    """Yield the models that clients train, each with the setting that names it."""
    for model in dict.fromkeys(run.models.pool):
        yield "models.pool", model
    for name in method.spec.privacy.models:
        yield f"{method.table}.{kebab(name)}", getattr(own, name)


def _check(
    run: RunSettings, setting: str, value: object, allowed: Sequence[object], rest: str = ""
) -> None:
    if value not in allowed:
        able = " or ".join(
            f"{each:g}" if isinstance(each, float) else str(each).lower() for each in allowed
        )
        raise refused(setting, value, f"{able}{rest} with '{_switch(run)[0]}'")


def _switch(run: RunSettings) -> tuple[str, float]:
    """Return the setting that makes the run private, and its value."""
    if run.privacy.epsilon:
        return "privacy.epsilon", run.privacy.epsilon
    return "privacy.noise-multiplier", run.privacy.noise_multiplier
