"""Resolves a run's settings: adds the method's defaults, and checks what settings mean together.

`completed` checks every rule between settings of several tables that takes the run's method, its
models or its data. The rules of one table are its validators, in fedhet/settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tomli_w

from fedhet import models
from fedhet.algorithms.robust import withstood
from fedhet.algorithms.rounds import closing, honest_majority, wanted
from fedhet.base.disk import expanded
from fedhet.base.errors import FedhetError, ModelError, SettingsError
from fedhet.config.sources import Given, from_flower, validated
from fedhet.data import sources
from fedhet.data.spec import Dataset
from fedhet.data.store import GENERATED, NO_DATASET, RunData
from fedhet.kinds import KINDS, augmentation
from fedhet.learning.devices import compute_for
from fedhet.methods.registry import Method, all_methods
from fedhet.privacy.sgd import refuse_unfit
from fedhet.settings.engine import SIMULATED_ONLY
from fedhet.settings.run import PLACE, RunSettings
from fedhet.settings.schema import A_MODEL, MethodSettings, Scalar, kebab, nest, refused
from fedhet.wire.contract import floating, poisonable
from fedhet.wire.identity import ClientInfo

PUBLIC_FRACTION = 0.2
"""Default share of the training set that is public, if the method needs public data."""
LABELED_ALPHA = 0.5
"""Default if the method needs unlabeled data (UM-pFSSL, section VI-A)."""
PRIVATE: Mapping[str, tuple[object, ...]] = {
    "training.clip": (0.0,),
    "training.semi": ("none",),
    "training.schedule": ("constant", "cosine", "step"),
    "engine.precision": ("float32",),
    "pace.select": ("random",),
}
"""The settings that a private run restricts, and what it allows. Each other value uses samples in a
way that is neither bounded nor noised, or chooses by losses, which a private client does not send.
"""


@dataclass(frozen=True)
class Config:
    """The settings of one run: those shared by all methods, and its method's own."""

    run: RunSettings
    method: Method
    own: MethodSettings

    @property
    def uses_unlabeled(self) -> bool:
        """Return whether the clients learn from unlabeled samples of their own."""
        return self.method.spec.needs_unlabeled or self.run.training.semi != "none"

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
    return completed(validated(values))


def resolve_flower(values: Mapping[str, object]) -> Config:
    """Return the settings of Flower's run config, which lists them all: a default is no choice."""
    return completed(replace(validated(from_flower(values)), chosen=frozenset()))


@lru_cache(maxsize=8)
def resolve_items(items: tuple[tuple[str, Scalar], ...]) -> Config:
    """Return the settings of Flower's run config, resolved once a process for the same items."""
    return resolve_flower(dict(items))


def completed(given: Given) -> Config:
    """Fill in the method's defaults for what is unset, and check the rules. Raises SettingsError.

    A shared setting that has its default counts as unset, since Flower's run config lists every
    setting; so does one of the method's own, unless it is among the `chosen` ones.
    """
    run, method, own, is_private = given.run, given.method, given.own, given.run.privacy.is_on
    spec, kind = method.spec, sources.sample_kind(run.data)
    usual, default = spec.defaults(kind), type(own)()
    usual = {k: v for k, v in usual.items() if f"{method.table}.{kebab(k)}" not in given.chosen}
    if is_private:
        clients = spec.privacy.models
        usual |= {k: models.group_norm_name(v) for k, v in usual.items() if k in clients}
    unset = {k: v for k, v in usual.items() if getattr(own, k) == getattr(default, k)}
    own = own.model_copy(update=unset)

    changes: dict[str, Any] = {}
    fixed = own.fixed_rounds()
    if fixed is not None and run.rounds != fixed:
        if run.rounds != RunSettings().rounds:
            rule = f"{fixed}, which follows from the settings of {run.method}"
            raise refused("rounds", run.rounds, rule)
        changes["rounds"] = fixed
    data: dict[str, Any] = {}
    needs_public = spec.needs_public or own.uses_public()
    if needs_public and not (run.data.public_fraction or run.data.public_dataset):
        data["public_fraction"] = PUBLIC_FRACTION
    if (spec.needs_unlabeled or run.training.semi != "none") and not run.data.labeled_alpha:
        data["labeled_alpha"] = LABELED_ALPHA
    changes["data"] = run.data.model_copy(update=data)
    if run.models.pool == RunSettings().models.pool:
        pool = models.private_pool(spec.pool(kind)) if is_private else spec.pool(kind)
        changes["models"] = run.models.model_copy(update={"pool": pool})
    if is_private and run.engine.precision == "auto":
        changes["engine"] = run.engine.model_copy(update={"precision": "float32"})

    config = Config(run.model_copy(update=changes), method, own)
    _check_models_and_data(config)
    _check_against_malice(config)
    _check_privacy(config)
    _check_training_and_pool(config)
    return config


# --- rules between settings of several tables; each function raises SettingsError


def _check_models_and_data(config: Config) -> None:
    run, pool = config.run, config.run.models.pool
    try:
        models.assign(pool, run.clients, run.seed, run.models.assignment)
    except FedhetError as error:
        raise SettingsError(f"setting 'models.pool' = {list(pool)!r}: {error}") from None
    values = config.own.flat()
    for own, info in config.own.fields().items():
        if A_MODEL in info.metadata and values[own] != info.default:
            _check_own_model(config, own, lambda model: models.check_name(str(model)))
    sources.find_source(run.data.dataset)
    if run.data.public_dataset not in ("", *NO_DATASET):
        sources.find_source(run.data.public_dataset, "data.public-dataset")


def _check_against_malice(config: Config) -> None:
    """Check attack, defense, and pace.

    Malicious clients could be the majority by replying or joining first, where a round may close,
    or a run may start, with too few of the honest clients.
    """
    run, name, spec = config.run, config.method.name, config.method.spec
    kind, average, share = run.attack.kind, run.defense.average, run.defense.malicious_fraction
    struck = poisonable if kind in ("paf", "lie", "ofom") else floating
    if kind != "none" and not struck(spec.replies):
        rule = f"none with {name}, whose clients send neither logits nor weights"
        raise refused("attack.kind", kind, rule)
    if average not in ("mean", *spec.defenses):
        resists = f": {spec.robustness}" if spec.robustness else ""
        able = ", ".join(("mean", *spec.defenses))
        raise refused("defense.average", average, f"{able} with {name}{resists}")
    if average != "mean":
        malicious, count, least = honest_majority(run)
        closes = closing(run.pace, wanted(run.clients, run.fraction), count).min_replies
        rule = f"with 'defense.average' = '{average}', 'defense.malicious-fraction' = {share:g}"
        if malicious and closes < least:
            raise SettingsError(
                f"setting 'pace.min-replies' = {run.pace.min_replies:g} closes a round with "
                f"{closes} replies: {rule}, {malicious} of {count} clients may be malicious and "
                f"the fastest, expected at least {least}. Set 'pace.min-replies' to {least}, or "
                "lower 'defense.malicious-fraction'."
            )
        malicious, start = withstood(run.clients, share), run.engine.min_clients
        if 0 < start < min(2 * malicious + 1, run.clients):
            raise SettingsError(
                f"setting 'engine.min-clients' = {start}: {rule}, {malicious} of {run.clients} "
                "clients may be malicious and the first to join, expected 0 or at least "
                f"{2 * malicious + 1}."
            )
    if run.pace.is_asynchronous and spec.late != "averaged":
        able = ", ".join(n for n, each in all_methods()[0].items() if each.spec.late == "averaged")
        rule = f"synchronous with {run.method}; {able} may be asynchronous"
        raise refused("pace.mode", run.pace.mode, rule)


def _check_privacy(config: Config) -> None:
    """What cannot be private is refused, naming what would do."""
    run, method, own = config.run, config.method, config.own
    if not run.privacy.is_on:
        return
    switch, epsilon = "privacy.noise-multiplier", run.privacy.noise_multiplier
    if run.privacy.epsilon:
        switch, epsilon = "privacy.epsilon", run.privacy.epsilon

    def check(setting: str, value: object, allowed: Sequence[object], rest: str = "") -> None:
        if value not in allowed:
            able = " or ".join(
                f"{each:g}" if isinstance(each, float) else str(each).lower() for each in allowed
            )
            raise refused(setting, value, f"{able}{rest} with '{switch}'")

    if run.data.held_out_clients:
        rule = "0 with '[privacy]': the local epoch of those clients is not protected"
        raise refused("data.held-out-clients", run.data.held_out_clients, rule)
    if method.spec.privacy.unsupported:
        raise refused(switch, epsilon, f"0 with {method.name}: {method.spec.privacy.unsupported}")
    for name, needed in method.spec.privacy.needs.items():
        check(f"{method.table}.{kebab(name)}", getattr(own, name), needed)
    if run.data.public_dataset == GENERATED:
        rest = "samples of a dataset of their own, or 'data.public-fraction'"
        why = "generated samples are made of the values of the clients' samples"
        raise refused("data.public-dataset", GENERATED, f"{rest}, with '{switch}': {why}")
    values = run.flat()
    for setting, needed in PRIVATE.items():
        check(setting, values[setting], needed)
    for setting, model in _models_of_clients(config):
        fit = models.group_norm_name(model)
        if fit != model:
            rest = f"in place of {model}, whose batch norms mix the samples of a batch"
            check(setting, model, (fit,), f" {rest},")
        elif model in models.WITHOUT_GRADIENTS:
            check(setting, model, ("a network",))


def _check_training_and_pool(config: Config) -> None:
    run, semi, name, spec = (
        config.run,
        config.run.training.semi,
        config.method.name,
        config.method.spec,
    )
    pool = run.models.pool
    if semi != "none":
        if not spec.semi:
            raise refused("training.semi", semi, f"none with {name}, which trains in its own way")
        if not sources.sample_kind(run.data).changeable:
            able = " or ".join(kind.plural for kind in KINDS.values() if kind.changeable)
            rule = f"{able} with 'training.semi' = '{semi}', which augments them"
            raise refused("data.dataset", run.data.dataset, rule)
        if run.training.augment != "none":
            rule = f"none with 'training.semi' = '{semi}', which augments by its own rules"
            raise refused("training.augment", run.training.augment, rule)
        if unable := [each for each in pool if each in models.WITHOUT_GRADIENTS]:
            rule = f"networks with 'training.semi' = '{semi}', not {unable[0]}"
            raise refused("models.pool", pool, rule)
    several = len(set(pool)) > 1 or not models.DRAWN.keys().isdisjoint(pool)
    if several and (spec.one_model or spec.submodels):
        how = "exchanges their weights" if spec.one_model else "cuts theirs from it"
        raise refused("models.pool", pool, f"one model for all clients with {name}, which {how}")
    for model in pool:
        if model in models.WITHOUT_GRADIENTS and not spec.any_model:
            able = ", ".join(m for m, found in all_methods()[0].items() if found.spec.any_model)
            raise SettingsError(
                f"setting 'models.pool' = {list(pool)!r} is not allowed: {model} has no gradients, "
                f"which {name} trains by; methods for models of any kind: {able}"
            )


def _check_own_model(config: Config, name: str, check: Callable[[Any], object]) -> None:
    """Check the model that one of the method's own settings names, and name it in the error."""
    value = config.own.flat()[name]
    try:
        check(value)
    except FedhetError as error:
        setting = f"setting '{config.method.table}.{name}' = {value!r} is not allowed"
        raise SettingsError(f"{setting}: {error}") from None


def _models_of_clients(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the models that clients train, each with the setting that names it."""
    for model in dict.fromkeys(config.run.models.pool):
        yield "models.pool", model
    for name in config.method.spec.privacy.models:
        yield f"{config.method.table}.{kebab(name)}", getattr(config.own, name)


# --- what a machine or a deployment can run


def check(config: Config, store: RunData | None = None) -> None:
    """Raise FedhetError if this machine cannot run `config`: its data, models or device."""
    run, store, spec = config.run, store or RunData.of(config.run), config.method.spec
    compute_for(run.engine)
    store.validate()
    dataset = store.dataset
    kind, shape, classes = dataset.kind, dataset.shape, len(dataset.classes)
    if run.models.num_classes not in (0, classes):
        rule = f"0, or the {classes} classes of {run.data.dataset}"
        raise refused("models.num-classes", run.models.num_classes, rule)
    augmentation(run.training.augment, KINDS[kind], shape)
    for name in dict.fromkeys(run.models.pool):
        models.check(name, kind, shape, classes, any_model=spec.any_model)
        spec.check_model(config.own, ClientInfo("", name, 0, classes, kind, shape))
    for field in spec.model_settings:
        _check_own_model(
            config,
            kebab(field),
            lambda model: models.check(model, kind, shape, classes, any_model=False),
        )
    if run.privacy.is_on:
        check_trainable(config, dataset)


def check_trainable(config: Config, dataset: Dataset) -> None:
    """Raise SettingsError for a private run's model with a layer that cannot tell samples apart."""
    for setting, model in _models_of_clients(config):
        if model not in models.DRAWN:
            try:
                kind, shape, classes = dataset.kind, dataset.shape, len(dataset.classes)
                built = models.build(model, shape, classes, seed=config.run.seed, kind=kind)
                refuse_unfit(built, kind, shape, model)
            except ModelError as error:
                raise refused(setting, model, f"another model: {error}") from None


def check_deployable(config: Config) -> None:
    """Raise SettingsError for a method or for injected faults that can only be simulated."""
    if config.method.spec.simulation_only:
        rule = (
            "another method in a deployment: it trains on all clients' data in one place, which "
            "would have to leave the sites; `fedhet run` simulates it"
        )
        raise refused("method", config.method.name, rule)
    if config.run.data.held_out_clients:
        rule = "0 in a deployment, whose sites are there to train"
        raise refused("data.held-out-clients", config.run.data.held_out_clients, rule)
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
