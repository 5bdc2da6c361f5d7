"""Declaration of a method: its settings, its messages, and its requirements.

This module imports neither PyTorch nor Flower, so that commands can list the methods quickly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fedhet.algorithms import Part
from fedhet.base.arrays import Shapes
from fedhet.base.errors import SettingsError
from fedhet.kinds import DefaultModel, Kind
from fedhet.settings.defense import Average
from fedhet.settings.run import DataSettings, TrainingSettings
from fedhet.settings.schema import MethodSettings, build, invalid_setting, kebab
from fedhet.tasks import AUTO, CLASSES, LOSSES, TASKS, Task, find_task
from fedhet.wire.contract import Contract, Sizes, Sum, require
from fedhet.wire.identity import ClientInfo

EMPTY = Contract()
"""Contract for empty messages."""

COMMON_METRICS = {
    "poisoned": "malicious clients among the sampled clients",
    "pseudo_labels": "fraction of the unlabeled samples with a pseudo-label",
    "pseudo_error": "fraction of the pseudo-labels that are wrong",
}
"""Titles of metrics that runs of any method may record."""


def metric_title(name: str, declared: Mapping[str, str]) -> str:
    """Return the declared title of a metric, or its name in words if it has no title."""
    plain = name.replace("_", " ").replace(".", ", ")
    return (COMMON_METRICS | dict(declared)).get(name, plain)


def default_sizes(settings: Any, client: ClientInfo) -> Sizes:
    """Return the sizes of axis C (classes) and, if the settings have a `feature_dim`, axis D."""
    width = getattr(settings, "feature_dim", None)
    return Sizes({"C": client.classes} | ({} if width is None else {"D": width}))


def accept_model(settings: Any, client: ClientInfo) -> None:
    """Accept any model, as the default of `MethodSpec.check_model`."""


def model_shapes(
    client: ClientInfo, model: str = "", *, part: Part = "all", feature_dim: int | None = None
) -> Shapes:
    """Return the shape and dtype of each tensor in a model or in a part of it.

    Imports PyTorch.

    Args:
        client: Client, with its model, sample shape, number of classes, and sample kind.
        model: Name of another model for the client's samples, or "" for the client's model.
        part: Part of the model.
        feature_dim: Width of the features before the head, or None for the model's default.
    """
    from fedhet.models import shapes

    name = model or client.model
    return shapes(name, client.shape, client.classes, feature_dim, client.kind, part)


@dataclass(frozen=True)
class Passes:
    """Passes over a client's samples: `epochs` epochs per round, in batches of `batch_size`."""

    rounds: int
    batch_size: int
    epochs: int


def local_passes(settings: Any, training: TrainingSettings, rounds: int) -> tuple[Passes, ...]:
    """Return the passes over the samples of a method that trains for `local-epochs` per round."""
    return (Passes(rounds, training.batch_size, training.local_epochs),)


@dataclass(frozen=True)
class Protection:
    """A method's support for differential privacy of the clients' samples."""

    mechanism: str = ""
    """Mechanism that adds the noise, as shown to users."""
    unsupported: str = ""
    """Reason why the method does not support differential privacy, or "" if it does."""
    vectors: int = 0
    """Number of class sums that a client releases per round, e.g. 2 for features and logits."""
    norm: float = math.inf
    """Upper bound of the L2 norm of each summed vector. Vectors are clipped to this bound or to
    `class-clip`, whichever is lower."""
    passes: Callable[[Any, TrainingSettings, int], tuple[Passes, ...]] = local_passes
    """Called with the method's settings, the client's training settings and the number of rounds.
    Returns the passes over the client's samples that privacy accounting must count."""
    models: tuple[str, ...] = ()
    """Fields of the method's settings that name additional models trained by the clients."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values required with differential privacy, by field of the method's settings."""
    reason: str = ""
    """Reason for the required values in `needs`, as shown to users."""


ENSEMBLE = "ensemble"
"""Kind of the model that averages the predictions of several models of a client."""
OWN_MODEL = {"personal": "private", "common": "private"}
"""Value of `MethodSpec.deployed` for a method whose result is each client's own model."""
AVERAGED_MODEL = {"personal": "global", "common": "global"}
"""Value of `MethodSpec.deployed` for a method whose result is an averaged model."""
Protocol = Literal["personal", "common"]
"""Test set of a score: each client's own test split, or the test set common to all clients."""
Late = Literal["averaged", "kept", "refused"]
UNDECLARED = Protection(unsupported="the method does not declare how noise would be added")
DP_SGD = Protection("DP-SGD; clients send the resulting weights")
BOTH_MODELS = Protection("DP-SGD on both models, with clipping of their joint gradient")
CLASS_SUMS = "DP-SGD, plus a separate pass that adds noise to class sums and counts"
PUBLIC_PREDICTIONS = Protection("DP-SGD; predictions on public data are post-processing")


def weight_decay_per_step(settings: Any, training: TrainingSettings) -> float:
    """Return the fraction of a weight that weight decay removes in each step."""
    first = training.first()
    return float(first.lr * first.weight_decay)


@dataclass(frozen=True)
class Sums:
    """Support of a method for secure aggregation, in which the server receives only sums."""

    lanes: tuple[Sum, ...] = ()
    """Sums of reply fields other than scalars. A field that is in no sum is not sent."""
    unsupported: str = ""
    """Reason why the method does not support secure aggregation, or "" if it does."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values required with secure aggregation, by field of the method's settings."""
    damping: Callable[[Any, TrainingSettings], float] = weight_decay_per_step
    """Called with the method's settings and the training settings. Returns the fraction of a weight
    that regularization removes in each step, at most 1 with secure aggregation."""

    def for_run(self, settings: Any, task: str = AUTO) -> tuple[Sum, ...]:
        """Return the sums that a run needs, given the settings of the method and the task."""
        known = (None, find_task(task).has_distribution)
        return tuple(
            lane
            for lane in self.lanes
            if lane.distribution in known
            and (lane.only_if is None or getattr(settings, lane.only_if[0]) == lane.only_if[1])
        )


UNDECLARED_SUMS = Sums(unsupported="the method does not declare which fields the server sums")
SUM_OF_WEIGHTS = Sums((Sum(("weights",)),))
"""Sum of weights, if clients also keep weights that they do not send."""
SUM_OF_ALL_WEIGHTS = Sums((Sum(("weights",), server="malicious"),))
"""Sum of weights, if clients start each round only from the server's weights."""


@dataclass(frozen=True)
class MethodSpec:
    """Declaration of a method.

    A strategy's class attribute `spec` refers to its declaration. Only `title`, `paper` and
    `headline` are required.

    Example:
        >>> spec = MethodSpec(
        ...     title="mean class scores on public data",
        ...     paper="Li and Wang, FedMD",
        ...     headline="common",
        ...     needs_public=True,
        ... )
    """

    title: str
    """One-line description of the method."""
    paper: str
    """Authors and title of the paper, or "no paper"."""
    headline: Protocol
    """Evaluation protocol of the method's headline number."""
    deployed: Mapping[str, str] = field(default_factory=lambda: OWN_MODEL)
    """Kind of the model that a user of the method deploys, by protocol. The scores of this kind
    represent the method (see `fedhet.runs.records.Headline`). The kind "server" may be a model that
    only the server evaluates."""
    paper_model: str = ""
    """Model that the paper evaluates, and the reason if `deployed` differs, as shown to users."""
    settings: type[MethodSettings] = MethodSettings
    """Settings of the method, available as `self.settings` in the strategy and in the client."""
    instructions: Contract = EMPTY
    """Contract for the instructions returned by the strategy's `instruct`."""
    replies: Contract = EMPTY
    """Contract for the replies returned by the client's `train`."""
    sizes: Callable[[Any, ClientInfo], Sizes] = default_sizes
    """Called with the method's settings and a client. Returns the axis sizes and weight shapes of
    the messages."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Titles of the metrics that the method records, in addition to `COMMON_METRICS`."""
    kinds: tuple[str, ...] = ("private",)
    """Kinds of models that the clients evaluate."""
    ensemble: tuple[str, ...] = ()
    """Kinds of the client's models whose predictions are averaged as the kind "ensemble"."""
    needs_task: str = CLASSES
    """Property that a task must have, as in `Task.properties`: "loss" if the method needs only the
    loss of a task, "outputs" if it also needs one vector of outputs per sample, "classes",
    "likelihood", or the name of a task."""
    only_tasks: str = "its losses and messages are defined only for classes"
    """Reason for `needs_task`, as shown to users."""
    with_classes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Supported values of the method's settings in tasks with classes, by field of the settings.
    If a default is not supported, the first supported value replaces it."""
    without_classes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Supported values of the method's settings in tasks without classes, as in `with_classes`."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the method for fields of `training`, which replace the defaults of all runs."""
    fixed_training: tuple[str, ...] = ()
    """Fields in `training` whose values the method requires, because of `why_fixed`."""
    why_fixed: str = ""
    """Reason for `fixed_training`, as shown to users."""
    needs_public: bool = False
    """Whether the method needs public data."""
    needs_unlabeled: bool = False
    """Whether the method needs unlabeled samples on the clients."""
    semi: bool = True
    """Whether the method supports semi-supervised training with `training.semi`."""
    one_model: bool = False
    """Whether all clients must have the same architecture."""
    submodels: bool = False
    """Whether the clients train submodels of the only architecture in the pool."""
    client_model: DefaultModel | Literal[""] = ""
    """Default model of all clients, as an attribute of the data kind: its `model`, `large_model`,
    or `dropout_model`. "" stands for the kind's default pool or, with `one_model`, its `model`."""
    check_model: Callable[[Any, ClientInfo], None] = accept_model
    """Called with the method's settings and a client. Raises SettingsError if the method cannot use
    the client's model."""
    model_settings: Mapping[str, DefaultModel] = field(default_factory=dict)
    """Fields of the method's settings that name a model. The value selects the default model of the
    data kind: its `model`, `large_model`, or `dropout_model`."""
    any_model: str = ""
    """Property that a task must have so that clients may have models without gradients, as in
    `needs_task`; "" if no task permits them. Only `fit_private` trains such models."""
    large_messages: bool = False
    """Whether messages are large and differ between clients, e.g. full models.

    If so, each instruction is created just before the server sends it, and replies are stored on
    disk.
    """
    late: Late = "refused"
    """Treatment of replies that arrive after their round has closed.

    - "averaged": the reply has a reduced weight in averages. If it contains model weights, the
      client's update is applied to the server's current weights.
    - "kept": the reply counts like a reply on time.
    - "refused": the reply is discarded, because it is valid only for its round.
    """
    learns_last: bool = False
    """Whether clients train on the result of the last round before the final evaluation."""
    defenses: tuple[Average, ...] = ()
    """Robust aggregation rules that the method supports: `ROBUST` if it averages the replies,
    `CHOOSING` if replies may only be excluded."""
    robustness: str = ""
    """Reason why the method supports no robust aggregation rule, as shown to users."""
    privacy: Protection = UNDECLARED
    """Support for differential privacy of the clients' samples."""
    sums: Sums = UNDECLARED_SUMS
    """Support for secure aggregation."""
    claims_for: str = ""
    """Client class for which `privacy` and `sums` are declared, e.g. "mymethods.heads.HeadClient".

    Required for custom methods that support either of them. A copied declaration thus loses the
    support, because it describes another client (see `claimed_by`)."""
    warning: str = ""
    """Warning shown before a run starts."""
    simulation_only: bool = False
    """Whether the method runs only in simulation, because it needs all clients' data in one
    place."""

    def __post_init__(self) -> None:
        """Check the fields. Raises TypeError or ValueError if a field is invalid."""
        require(self, title=str, paper=str, instructions=Contract, replies=Contract, kinds=tuple)
        require(self, metrics=Mapping, model_settings=Mapping, defenses=tuple)
        require(self, robustness=str, warning=str, privacy=Protection, sums=Sums, claims_for=str)
        require(self, deployed=Mapping, paper_model=str, ensemble=tuple)
        require(self, needs_task=str, only_tasks=str, any_model=str)
        require(self, with_classes=Mapping, without_classes=Mapping)
        require(self, training=Mapping, fixed_training=tuple, why_fixed=str)
        if not (isinstance(self.settings, type) and issubclass(self.settings, MethodSettings)):
            raise TypeError(
                f"MethodSpec: 'settings' must be a subclass of MethodSettings, got {self.settings}"
            )
        if not any(field.is_required() for field in self.settings.fields().values()):
            try:
                build(self.settings, {})
            except SettingsError as error:
                raise ValueError(f"MethodSpec: 'settings': invalid default: {error}") from None
        for name in ("sizes", "check_model"):
            if not callable(value := getattr(self, name)):
                raise TypeError(f"MethodSpec: '{name}' must be a function, got {value!r}")
        models = [("client_model", self.client_model or "model")]
        models += [("model_settings", value) for value in self.model_settings.values()]
        for name, value, choices in (
            ("headline", self.headline, get_args(Protocol)),
            ("late", self.late, get_args(Late)),
            *((*each, get_args(DefaultModel)) for each in models),
        ):
            if value not in choices:
                raise ValueError(
                    f"MethodSpec: '{name}' must be one of {', '.join(choices)}, got {value!r}"
                )
        if {*self.deployed} != {*get_args(Protocol)}:
            raise ValueError(
                "MethodSpec: 'deployed' must have the keys personal and common, got "
                f"{', '.join(self.deployed) or 'none'}"
            )
        for kind in self.deployed.values():
            if kind not in (known := (*self.kinds, "server")):
                raise ValueError(
                    f"MethodSpec: 'deployed' must contain kinds in {', '.join(known)}, got {kind!r}"
                )
        if bool(self.ensemble) != (ENSEMBLE in self.kinds):
            raise ValueError(
                f"MethodSpec: 'ensemble' and the kind '{ENSEMBLE}' in 'kinds' must be declared "
                "together"
            )

    def check_training(self, training: TrainingSettings, place: str = "training.") -> None:
        """Raise SettingsError if the method does not support the training settings of a client.

        `place` is the start of the names of the settings in the error.
        """
        for name in self.fixed_training:
            value, required = getattr(training, name), self.training[name]
            if {*(value if isinstance(value, tuple) else [value])} != {required}:
                raise invalid_setting(f"{place}{kebab(name)}", value, str(required), self.why_fixed)

    def claimed_by(self, client: str) -> MethodSpec:
        """Return the declaration without the support in `privacy` and `sums` for other clients.

        Args:
            client: Module and name of the method's client class.
        """
        if self.claims_for == client:
            return self
        other = f"the client {self.claims_for}" if self.claims_for else "no client"
        reason = f"it is declared for {other} (MethodSpec.claims_for), expected {client}"
        privacy = self.privacy if self.privacy.unsupported else Protection(unsupported=reason)
        sums = self.sums if self.sums.unsupported else Sums(unsupported=reason)
        return replace(self, privacy=privacy, sums=sums)

    @property
    def offered_kind(self) -> str:
        """Kind of model offered to clients that have never trained, or "" if no kind is suitable.

        Only a global model is suitable. A method without a global model sends knowledge that a new
        client would have to train on first.
        """
        return "global" if "global" in self.kinds else ""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the built-in tasks that the method supports."""
        return tuple(name for name, task in TASKS.items() if self.needs_task in task().properties)

    def losses(self, task: Task) -> tuple[str, ...]:
        """Return the values of `data.loss` that the method and a task support."""
        able = []
        for loss in (AUTO, *LOSSES):
            with suppress(SettingsError):
                trained = task.with_settings(DataSettings().model_copy(update={"loss": loss}))
                able += [loss] if self.needs_task in trained.properties else []
        return tuple(able)

    def pool(self, kind: Kind) -> tuple[str, ...]:
        """Return the default pool of models for a kind of data.

        All methods whose clients can train different models have the same default pool, so that
        runs with default settings differ only in their methods.
        """
        if self.client_model or self.one_model:
            return (getattr(kind, self.client_model or "model"),)
        return kind.pool

    def defaults(self, kind: Kind) -> dict[str, str]:
        """Return the default models of `model_settings` for a kind of data."""
        return {setting: getattr(kind, name) for setting, name in self.model_settings.items()}
