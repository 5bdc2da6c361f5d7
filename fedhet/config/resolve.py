"""Resolution of a run's settings: defaults of the method, and rules across tables.

`complete` checks every rule that involves several tables together with the method, the models or
the data. Rules within one table are validators of the table's class in `fedhet.settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tomli_w

from fedhet import models
from fedhet.algorithms.robust import max_malicious, min_replies
from fedhet.algorithms.rounds import clients_per_round, clients_to_sample, replies_to_close
from fedhet.base.disk import expanded
from fedhet.base.errors import FedhetError, ModelError, SettingsError
from fedhet.base.metrics import METRICS
from fedhet.config.sources import CLIENTS, FOLLOW, GivenSettings, validate
from fedhet.data import sources
from fedhet.data.dataset import Format
from fedhet.data.public import DERIVED, GENERATED
from fedhet.data.store import RunData
from fedhet.kinds import IMAGE, KINDS, augmentation
from fedhet.learning.devices import compute_for
from fedhet.methods.registry import Method, all_methods
from fedhet.privacy.sgd import check_supports_dp
from fedhet.settings.addresses import AUTO
from fedhet.settings.engine import SIMULATED_ONLY
from fedhet.settings.run import PLACE, RunSettings
from fedhet.settings.schema import A_MODEL, MethodSettings, invalid_setting, kebab, nest
from fedhet.tasks import CLASSIFICATION, find_task, task_for
from fedhet.wire.contract import floating, poisonable
from fedhet.wire.identity import ClientInfo

PUBLIC_FRACTION = 0.2
"""Default fraction of public training samples for methods that need public data."""
VALIDATION_FRACTION = 0.1
"""Value of `data.validation-fraction` = auto for runs in which scores select something."""
LABELED_ALPHA = 0.5
"""Default of `data.labeled-alpha` for methods that need unlabeled data (UM-pFSSL, Section VI-A)."""
SUMMED: Mapping[str, tuple[object, ...]] = {
    "fraction": (1.0,),
    "data.held-out-clients": (0,),
    "training.schedule": ("constant", "cosine", "step"),
    "training.keep-optimizer": (False,),
    "wire.encoding": ("float32", "float16", "int8"),
    "attack.kind": ("none",),
    "defense.average": ("mean",),
    "pace.mode": ("synchronous",),
    "pace.over-selection": (0.0,),
    "pace.min-replies": (1.0,),
    "pace.timeout": ("",),
    "pace.select": ("random",),
}
"""Settings restricted by secure aggregation, with their allowed values.

Other values need the replies of individual clients, late replies, or cohorts that change every
round. With some values, a reply depends on earlier rounds, in which a malicious server may have
sent other instructions to some of the clients.
"""
MIN_SUMMED = 3
"""Minimum number of clients in a sum. In a sum of two replies, each client could learn the other
client's reply by subtracting its own reply."""
PRIVATE: Mapping[str, tuple[object, ...]] = {
    "training.clip": (0.0,),
    "training.semi": ("none",),
    "training.schedule": ("constant", "cosine", "step"),
    "engine.precision": ("float32",),
    "pace.select": ("random",),
}
"""Settings restricted by differential privacy, with their allowed values.

Other values would use samples without clipping and noise, or need client losses, which private
clients do not send.
"""


@dataclass(frozen=True)
class Config:
    """Complete settings of one run: the shared tables, and the table of its method."""

    run: RunSettings
    method: Method
    method_settings: MethodSettings

    @property
    def uses_public(self) -> bool:
        """Whether the clients use public data."""
        return self.method.spec.needs_public or self.method_settings.uses_public()

    @property
    def uses_unlabeled(self) -> bool:
        """Whether the clients also learn from local unlabeled samples."""
        return self.method.spec.needs_unlabeled or self.run.training.semi != "none"

    def flat(self) -> dict[str, Any]:
        """Return all settings by full name (inverse of `resolve`)."""
        table = self.method.table
        own = {f"{table}.{name}": value for name, value in self.method_settings.flat().items()}
        return {**self.run.flat(), **own}

    def to_toml(self) -> str:
        """Serialize the settings to TOML for `--config`, without `out` and `resume`."""
        return tomli_w.dumps(nest({k: v for k, v in self.flat().items() if k not in PLACE}))

    def replacing(self, **changes: Any) -> Config:
        """Return a copy with the given fields of `run` replaced."""
        return replace(self, run=self.run.model_copy(update=changes))


def resolve(values: Mapping[str, object]) -> Config:
    """Validate settings given by full name, and add the defaults of the method.

    Settings of other methods must have their default values, because Flower's run config contains
    the settings of every method. Raises SettingsError if a value is invalid or a rule is violated.
    """
    return complete(validate(values))


def resolve_flower(run_config: Mapping[str, object]) -> Config:
    """Resolve Flower's run config, which contains the settings of all methods.

    All defaults and `clients = 0` count as unset, because no value is missing.
    """
    values = {k: v for k, v in run_config.items() if (k, v) != (CLIENTS, FOLLOW)}
    return complete(replace(validate(values), explicit=frozenset()))


def complete(given: GivenSettings, *, selects: bool = False) -> Config:
    """Fill in the method's defaults for unset settings, and check the rules across tables.

    A shared setting with its default value counts as unset, because Flower's run config contains
    every setting. A method's setting with its default value counts as unset unless it is in
    `given.explicit`. Set `selects` if the run's score is compared to select settings, as in a
    sweep. Raises SettingsError if a rule is violated.
    """
    run, method, settings = given.run, given.method, given.method_settings
    spec, is_private, kind = method.spec, run.privacy.is_on, sources.sample_kind(run.data)
    defaults, initial = spec.defaults(kind), type(settings)()
    has_classes = find_task(run.data.task).has_distribution
    suitable = spec.with_classes if has_classes else spec.without_classes
    unsuitable = {k: v for k, v in suitable.items() if getattr(initial, k) not in v}
    defaults |= {k: v[0] for k, v in unsuitable.items()}
    defaults = {
        k: v for k, v in defaults.items() if f"{method.table}.{kebab(k)}" not in given.explicit
    }
    if is_private:
        clients = spec.privacy.models
        defaults |= {k: models.group_norm_name(v) for k, v in defaults.items() if k in clients}
    unset = {k: v for k, v in defaults.items() if getattr(settings, k) == getattr(initial, k)}
    settings = settings.model_copy(update=unset)
    problem = f"the task is {find_task(run.data.task).name}"
    for name, allowed in suitable.items():
        setting = f"{method.table}.{kebab(name)}"
        _check_allowed(setting, getattr(settings, name), allowed, problem=problem)

    plain = RunSettings().training
    training = {
        k: v
        for k, v in spec.training.items()
        if f"training.{kebab(k)}" not in given.explicit
        and getattr(run.training, k) == getattr(plain, k)
    }
    run = run.model_copy(update={"training": run.training.model_copy(update=training)})
    spec.check_training(run.training)

    changes: dict[str, Any] = {}
    fixed = settings.fixed_rounds()
    if fixed is not None and run.rounds != fixed:
        if run.rounds != RunSettings().rounds:
            problem = f"the number of rounds follows from the settings of {run.method}"
            raise invalid_setting("rounds", run.rounds, str(fixed), problem)
        changes["rounds"] = fixed
        epochs, name = run.training.local_epochs, "training.local-epochs"
        if epochs == RunSettings().training.local_epochs and name not in given.explicit:
            # As many epochs as other methods have by default.
            total = run.rounds * epochs // fixed
            changes["training"] = run.training.model_copy(update={"local_epochs": max(1, total)})
    data: dict[str, Any] = {}
    needs_public = spec.needs_public or settings.uses_public()
    if needs_public and not (run.data.public_fraction or run.data.public_dataset):
        data["public_fraction"] = PUBLIC_FRACTION
    if (spec.needs_unlabeled or run.training.semi != "none") and not run.data.labeled_alpha:
        data["labeled_alpha"] = LABELED_ALPHA
    for name in data:
        if (setting := f"data.{kebab(name)}") in given.explicit:
            problem = f"{run.method} needs {'public' if 'public' in name else 'unlabeled'} data"
            raise invalid_setting(setting, 0, "a number above 0", problem)
    if run.data.validation_fraction == AUTO:
        # Clients with [privacy] send no scores on their own samples, so nothing could use them.
        selects = bool(selects or run.early_stopping or run.keep_best)
        holds_out = selects and not run.privacy.hides_samples
        data["validation_fraction"] = VALIDATION_FRACTION if holds_out else 0.0
    changes["data"] = run.data.model_copy(update=data)
    if run.models.pool == RunSettings().models.pool:
        pool = find_task(run.data.task)().default_pool(run.data) or spec.pool(kind)
        pool = models.private_pool(pool) if is_private else pool
        changes["models"] = run.models.model_copy(update={"pool": pool})
    # With secure aggregation, the precision must not depend on the machines of the sites.
    if (is_private or run.privacy.secure_aggregation) and run.engine.precision == "auto":
        changes["engine"] = run.engine.model_copy(update={"precision": "float32"})

    changes["metrics"] = _metrics_of_task(run, method)
    config = Config(run.model_copy(update=changes), method, settings)
    _check_models_and_data(config)
    _check_against_malice(config)
    _check_privacy(config)
    _check_training_and_pool(config)
    _check_secure_aggregation(config)
    return config


# --- rules across tables; each function raises SettingsError if a rule is violated


def _metrics_of_task(run: RunSettings, method: Method) -> tuple[str, ...]:
    """Return the run's metrics, with the task's headline metric first.

    Checks that the method supports the task, and that the metrics belong to the task.
    """
    task, spec = task_for(run.data), method.spec
    if spec.needs_task not in task.properties:
        problem = f"unsupported by {method.name}, because {spec.only_tasks}"
        if losses := spec.losses(task):
            raise invalid_setting("data.loss", run.data.loss, " or ".join(losses), problem)
        every = all_methods()[0].items()
        able = ", ".join(n for n, each in every if each.spec.needs_task in task.properties)
        supported = " or ".join(spec.tasks)
        expected = f"{supported and f'{supported}, or '}another method ({able})"
        raise invalid_setting("data.task", run.data.task, expected, problem)
    if run.metrics == RunSettings().metrics:
        return tuple(filter(task.defines, task.metrics))
    of_task = [name for name, metric in METRICS.items() if metric.task in task.properties]
    known = list(filter(task.defines, of_task))
    if odd := [name for name in run.metrics if name not in known]:
        expected, problem = f"names from {', '.join(known)}", f"the task is {task.name}"
        problem += f" with 'data.loss' = {run.data.loss!r}" if odd[-1] in of_task else ""
        raise invalid_setting("metrics", odd[-1], expected, problem)
    return tuple(dict.fromkeys([task.metrics[0], *run.metrics]))


def _check_allowed(
    name: str, value: object, allowed: Sequence[object], switch: str = "", problem: str = ""
) -> None:
    """Check that the value of a setting is in `allowed`, as the setting `switch` requires."""
    if value not in allowed:
        texts = (f"{v:g}" if isinstance(v, float) else f"{v}".lower() or "empty" for v in allowed)
        given = f" with '{switch}'" if switch else ""
        raise invalid_setting(name, value, " or ".join(dict.fromkeys(texts)) + given, problem)


def _check_models_and_data(config: Config) -> None:
    run, pool = config.run, config.run.models.pool
    try:
        models.assign(pool, run.clients, run.seed, run.models.assignment)
    except FedhetError as error:
        raise SettingsError(f"setting 'models.pool' = {list(pool)!r}: {error}") from None
    values = config.method_settings.flat()
    for name, info in config.method_settings.fields().items():
        if A_MODEL in info.metadata and values[name] != info.default:
            _check_method_model(config, name, lambda model: models.check_name(str(model)))
    sources.find_source(run.data.dataset)
    if run.data.public_dataset not in ("", *DERIVED):
        sources.find_source(run.data.public_dataset, "data.public-dataset")


def _check_against_malice(config: Config) -> None:
    """Check that the method supports the attack and the defense, and that the defense can work.

    If a round can close or a run can start with too few honest clients, malicious clients could
    form a majority by replying or joining first.
    """
    run, name, spec = config.run, config.method.name, config.method.spec
    kind, average, fraction = run.attack.kind, run.defense.average, run.defense.malicious_fraction
    if run.attack.poisons_data:
        problem, classes = f"the task is {find_task(run.data.task).name}", CLASSIFICATION.name
        if not find_task(run.data.task).has_distribution:
            raise invalid_setting("attack.kind", kind, f"none without the task {classes}", problem)
        if kind == "backdoor" and sources.sample_kind(run.data) is not IMAGE:
            problem = "the trigger is a square in an image"
            raise invalid_setting("data.dataset", run.data.dataset, "images", problem)
    can_poison = poisonable if kind in ("paf", "lie", "ofom") else floating
    if run.attack.poisons_data:
        problem = f"clients of {name} send nothing that they train"
        is_possible = bool(spec.replies.fields) and not spec.simulation_only
    else:
        problem = f"clients of {name} send neither logits nor weights"
        is_possible = kind == "none" or bool(can_poison(spec.replies))
    if not is_possible:
        raise invalid_setting("attack.kind", kind, "none", problem)
    if average not in ("mean", *spec.defenses):
        problem = f"unsupported by {name}{f' ({spec.robustness})' if spec.robustness else ''}"
        supported = ("mean", *spec.defenses)
        expected = f"{'one of ' if len(supported) > 1 else ''}{', '.join(supported)}"
        raise invalid_setting("defense.average", average, expected, problem)
    if average != "mean":
        malicious, count, required = honest_majority(run)
        needed = clients_per_round(run.clients, run.fraction)
        closes = replies_to_close(run.pace.min_replies, needed, count)
        if malicious and closes < required:
            raise SettingsError(
                f"setting 'pace.min-replies': because the fastest {malicious} of {count} clients "
                f"may be malicious ('defense.malicious-fraction' = {fraction:g}), '{average}' "
                f"requires at least {required} replies per round, got {closes}. Set "
                f"'pace.min-replies' to {required}, or lower 'defense.malicious-fraction'."
            )
        malicious, start = max_malicious(run.clients, fraction), run.engine.min_clients
        if 0 < start < min(2 * malicious + 1, run.clients):
            problem = (
                f"because the first {malicious} of {run.clients} clients to join may be malicious "
                f"('defense.malicious-fraction' = {fraction:g})"
            )
            expected = f"0 or at least {2 * malicious + 1} for '{average}'"
            raise invalid_setting("engine.min-clients", start, expected, problem)
    if run.pace.is_asynchronous and spec.late != "averaged":
        able = ", ".join(n for n, each in all_methods()[0].items() if each.spec.late == "averaged")
        problem = f"unsupported by {run.method} (supported by {able})"
        raise invalid_setting("pace.mode", run.pace.mode, "synchronous", problem)


def honest_majority(run: RunSettings) -> tuple[int, int, int]:
    """Return a round's numbers of malicious clients, sampled clients, and required replies.

    A round with robust aggregation must not close before the required replies have arrived, because
    all malicious clients may reply before the honest clients. Without robust aggregation, the
    numbers of malicious clients and required replies are 0 and 1.
    """
    defense, members = run.defense, run.clients
    needed = clients_per_round(members, run.fraction)
    count = min(clients_to_sample(needed, run.pace.over_selection), members)
    if defense.average == "mean":
        return 0, count, 1
    # Unless clients are selected at random, malicious clients can influence the selection, so that
    # all of them may be in the round.
    among = count if run.pace.select == "random" else members
    malicious = min(max_malicious(among, defense.malicious_fraction), count)
    required = min(min_replies(defense.average, malicious), count) if malicious else 1
    return malicious, count, required


def _check_privacy(config: Config) -> None:
    """Reject settings that differential privacy does not support. Errors name supported values."""
    run, method = config.run, config.method
    if not run.privacy.is_on:
        return
    switch, epsilon = "privacy.noise-multiplier", run.privacy.noise_multiplier
    if run.privacy.epsilon:
        switch, epsilon = "privacy.epsilon", run.privacy.epsilon
    problem = "the local epoch of held-out clients is not protected"
    _check_allowed("data.held-out-clients", run.data.held_out_clients, (0.0,), switch, problem)
    if method.spec.privacy.unsupported:
        problem = f"unsupported by {method.name} ({method.spec.privacy.unsupported})"
        raise invalid_setting(switch, epsilon, "0", problem)
    for name, needed in method.spec.privacy.needs.items():
        setting = f"{method.table}.{kebab(name)}"
        _check_allowed(setting, getattr(config.method_settings, name), needed, switch)
    if run.data.public_dataset == GENERATED:
        problem = "generated samples reveal values of the clients' samples"
        expected = f"another dataset, or 'data.public-fraction', with '{switch}'"
        raise invalid_setting("data.public-dataset", GENERATED, expected, problem)
    values = run.flat()
    for setting, needed in PRIVATE.items():
        _check_allowed(setting, values[setting], needed, switch)
    for setting, model in _models_of_clients(config):
        suitable = models.group_norm_name(model)
        if suitable != model:
            problem = f"the batch norm layers of {model} mix the samples of a batch"
            _check_allowed(setting, model, (suitable,), switch, problem)
        elif model in models.WITHOUT_GRADIENTS:
            _check_allowed(setting, model, ("a neural network",), switch)


def _check_secure_aggregation(config: Config) -> None:
    """Reject methods and settings that secure aggregation does not support."""
    run, method, setting = config.run, config.method, "privacy.secure-aggregation"
    if not run.privacy.secure_aggregation:
        return
    sums, settings = method.spec.sums, config.method_settings
    if sums.unsupported:
        problem = f"unsupported by {method.name} ({sums.unsupported})"
        raise invalid_setting(setting, True, "false", problem)
    for name, allowed in sums.needs.items():
        own = f"{method.table}.{kebab(name)}"
        _check_allowed(own, getattr(settings, name), allowed, setting)
    values = run.flat()
    for name, allowed in SUMMED.items():
        _check_allowed(name, values[name], allowed, setting)
    if (damping := sums.damping(settings, run.training)) > 1:
        # Each step multiplies the weights by 1 - damping. Below -1, the site with the most steps
        # would send by far the largest values, and a malicious server would know its update.
        problem = f"the regularization multiplies weights by {1 - damping:.3g} in each step"
        expected = "values whose product with the regularization's weight is at most 1"
        raise invalid_setting("training.lr", run.training.first().lr, expected, problem)
    for name, pool in run.training.pools().items():
        if len(pool) > 1:
            # A malicious server could choose values with which it knows all replies but one.
            problem = "secure aggregation requires the same training settings for all clients"
            raise invalid_setting(f"training.{kebab(name)}", list(pool), "one value", problem)
    if run.clients < MIN_SUMMED:
        raise invalid_setting("clients", run.clients, f"at least {MIN_SUMMED} with '{setting}'")


def _check_training_and_pool(config: Config) -> None:
    run, name, spec = config.run, config.method.name, config.method.spec
    semi, pool, task = run.training.semi, run.models.pool, task_for(run.data)
    if not task.has_distribution and run.data.label_noise:
        noise, problem = run.data.label_noise, f"the task is {task.name}"
        raise invalid_setting("data.label-noise", noise, "0", problem)
    if not task.has_distribution and semi != "none":
        raise invalid_setting("training.semi", semi, "none", f"the task is {task.name}")
    if not task.any_model and not models.WITHOUT_GRADIENTS.keys().isdisjoint(pool):
        problem = f"the task is {task.name} with 'data.loss' = {run.data.loss!r}"
        raise invalid_setting("models.pool", pool, "neural networks", problem)
    if semi != "none":
        given = f"with 'training.semi' = '{semi}'"
        if not spec.semi:
            problem = f"unsupported by {name}, because its local training differs"
            raise invalid_setting("training.semi", semi, "none", problem)
        if not sources.sample_kind(run.data).changeable:
            able = " or ".join(kind.plural for kind in KINDS.values() if kind.changeable)
            raise invalid_setting("data.dataset", run.data.dataset, f"{able} {given}")
        if run.training.augment != "none":
            problem = f"{semi} defines the augmentation"
            raise invalid_setting(
                "training.augment", run.training.augment, f"none {given}", problem
            )
        if not models.WITHOUT_GRADIENTS.keys().isdisjoint(pool):
            raise invalid_setting("models.pool", pool, f"neural networks {given}")
    several = len(set(pool)) > 1 or not models.DRAWN.keys().isdisjoint(pool)
    if several and (spec.one_model or spec.submodels):
        how = "exchanges the weights" if spec.one_model else "cuts submodels from one model"
        raise invalid_setting("models.pool", pool, "one model for all clients", f"{name} {how}")
    for model in pool:
        try:
            models.check_task(model, task)
        except ModelError as error:
            raise SettingsError(f"setting 'models.pool': {error}") from None
        if model in models.WITHOUT_GRADIENTS and spec.any_model not in task.properties:
            specs = {m: each.spec for m, each in all_methods()[0].items()}
            able = ", ".join(
                m for m, s in specs.items() if {s.any_model, s.needs_task} <= task.properties
            )
            problem = f"models without gradients, such as {model}, are supported only by {able}"
            raise invalid_setting("models.pool", pool, f"neural networks with {name}", problem)


def _check_method_model(config: Config, name: str, check: Callable[[Any], object]) -> None:
    """Check the model in the method's setting `name`, and name the setting in errors."""
    value = config.method_settings.flat()[name]
    try:
        check(value)
    except FedhetError as error:
        setting = f"setting '{config.method.table}.{name}' = {value!r}"
        raise SettingsError(f"{setting}: {error}") from None


def _models_of_clients(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each model that clients train, with the setting that names it."""
    for model in dict.fromkeys(config.run.models.pool):
        yield "models.pool", model
    for name in config.method.spec.privacy.models:
        yield f"{config.method.table}.{kebab(name)}", getattr(config.method_settings, name)


# --- checks for a machine, and for a deployment


def check(config: Config, store: RunData | None = None) -> None:
    """Raise FedhetError if data, a model or the device is unavailable on this machine."""
    run, store, spec = config.run, store or RunData.for_run(config.run), config.method.spec
    compute_for(run.engine)
    store.validate()
    described = store.dataset.format
    kind, shape, classes, task = described.kind, described.shape, described.outputs, described.task
    if run.models.num_classes not in (0, count := len(described.classes)):
        expected = f"0 or {count}, the number of {task.noun} of {run.data.dataset}"
        raise invalid_setting("models.num-classes", run.models.num_classes, expected)
    augmentation(run.training.augment, KINDS[kind], shape)
    any_model = spec.any_model in task.properties and task.any_model
    for name in dict.fromkeys(run.models.pool):
        models.check(name, kind, shape, classes, any_model=any_model)
        info = ClientInfo("", name, 0, classes, kind, shape, task=task.name)
        spec.check_model(config.method_settings, info)
    if getattr(config.method_settings, "part", "") == "head":
        width = getattr(config.method_settings, "width", None)
        heads = {
            name: list(models.shapes(name, shape, classes, width, kind, "head"))
            for name in dict.fromkeys(run.models.pool)
            if name not in models.DRAWN
        }
        first = next(iter(heads), "")
        if other := next((name for name in heads if heads[name] != heads[first]), ""):
            raise SettingsError(
                f"models.pool: all heads must have the same layers with {config.method.name}, "
                f"expected {', '.join(heads[first])} as in '{first}', got "
                f"{', '.join(heads[other])} in '{other}'. Remove one of these models."
            )
    for field in spec.model_settings:
        _check_method_model(
            config,
            kebab(field),
            lambda model: models.check(model, kind, shape, classes, any_model=False),
        )
    if run.privacy.is_on:
        check_trainable(config, described)


def check_trainable(config: Config, described: Format) -> None:
    """Raise SettingsError if a layer in a private run's models has no per-sample gradients."""
    for setting, model in _models_of_clients(config):
        if model not in models.DRAWN:
            try:
                kind, shape, classes = described.kind, described.shape, described.outputs
                built = models.build(model, shape, classes, seed=config.run.seed, kind=kind)
                check_supports_dp(built, kind, shape, model)
            except ModelError as error:
                raise invalid_setting(setting, model, "another model", str(error)) from None


def check_deployable(config: Config) -> None:
    """Raise SettingsError if the settings are supported only in simulations."""
    if config.method.spec.simulation_only:
        problem = "the data of all sites would have to leave the sites"
        expected = "another method in a deployment (or `fedhet run` to simulate)"
        raise invalid_setting("method", config.method.name, expected, problem)
    if (held_out := config.run.data.held_out_clients) != 0:
        raise invalid_setting("data.held-out-clients", held_out, "0 in a deployment")
    attack = config.run.attack
    if attack.poisons_data:
        raise invalid_setting("attack.kind", attack.kind, "another attack in a deployment")
    if attack.claimed_samples:
        claimed = attack.claimed_samples
        raise invalid_setting("attack.claimed-samples", claimed, "0 in a deployment")
    for name, required in SIMULATED_ONLY.items():
        if (value := getattr(config.run.pace, name)) != required:
            raise invalid_setting(f"pace.{kebab(name)}", value, f"{required} in a deployment")


def absolute(config: Config) -> Config:
    """Make the data paths absolute, because workers have a different working directory."""
    table = config.run.data
    changes = {
        "data_dir": str(expanded(table.data_dir).resolve()),
        "dataset": sources.absolute(table.dataset, table),
        "public_dataset": sources.absolute(table.public_dataset, table),
    }
    return config.replacing(data=table.model_copy(update=changes))
