"""What a run with `[privacy]` may be: its method, its models and its training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedhet import models
from fedhet.base.errors import ModelError
from fedhet.data.store import GENERATED
from fedhet.kinds import Shape
from fedhet.methods.registry import Method
from fedhet.privacy.sgd import refuse_unfit
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import MethodSettings, kebab, refused

TRAINING = {
    "clip": (0.0,),
    "semi": ("none",),
    "schedule": ("constant", "cosine", "step"),
}
"""The settings of training that a private run restricts, and what it allows: each other value uses
samples in a way that is neither bounded nor noised."""
PRECISION = ("float32",)
SELECT = ("random",)
"""The others choose by the clients' losses, which a private client does not send."""


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
    for name, allowed in TRAINING.items():
        _check(run, f"training.{name}", getattr(run.training, name), allowed)
    _check(run, "engine.precision", run.engine.precision, PRECISION)
    _check(run, "pace.select", run.pace.select, SELECT)
    for setting, model in _of_clients(run, method, own):
        fit = models.without_batch_norms(model)
        if fit != model:
            rest = f"in place of {model}, whose batch norms mix the samples of a batch"
            _check(run, setting, model, (fit,), f" {rest},")
        elif model in models.WITHOUT_GRADIENTS:
            _check(run, setting, model, ("a network",))


def check_trainable(
    run: RunSettings, method: Method, own: MethodSettings, shape: Shape, classes: int
) -> None:
    """Raise SettingsError for a model with a layer that cannot tell samples apart."""
    for setting, model in _of_clients(run, method, own):
        if model not in models.DRAWN:
            try:
                built = models.build(model, shape, classes, seed=run.seed)
                refuse_unfit(built, shape, model)
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
