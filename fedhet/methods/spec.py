"""A method's declaration: what it is, its settings, and the messages that its halves exchange.

A declaration imports neither PyTorch nor Flower, so that commands read it at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fedhet.algorithms import Part
from fedhet.base.arrays import Shapes
from fedhet.kinds import Kind
from fedhet.settings.defense import Average
from fedhet.settings.run import TrainingSettings
from fedhet.settings.schema import MethodSettings
from fedhet.wire.contract import Contract, Sizes, require
from fedhet.wire.identity import ClientInfo

NOTHING = Contract()
"""The contract of empty messages."""

FIGURES = {
    "poisoned": "hostile clients among those asked",
    "pseudo_labels": "share of the unlabeled samples with a pseudo-label",
    "pseudo_error": "share of the pseudo-labels that are wrong",
}
"""What any method's run may measure: under attack, and of unlabeled samples."""


def title_of(figure: str, declared: Mapping[str, str]) -> str:
    """Return a figure's title; of one that is not declared, its name in words."""
    plain = figure.replace("_", " ").replace(".", ", ")
    return (FIGURES | dict(declared)).get(figure, plain)


def plain_sizes(settings: Any, client: ClientInfo) -> Sizes:
    """Return the sizes of messages without weights: C classes, D features if a setting says so."""
    width = getattr(settings, "feature_dim", None)
    return Sizes({"C": client.classes} | ({} if width is None else {"D": width}))


def every_model(settings: Any, client: ClientInfo) -> None:
    """Ask nothing of a model."""


def model_shapes(
    client: ClientInfo, model: str = "", *, part: Part = "all", feature_dim: int | None = None
) -> Shapes:
    """Return the shape and dtype of each tensor of a client's model, or of a part of it.

    `model` names another model for the client's samples. `feature_dim` is the width of the features
    before the head; None: the model's own. Imports the models, and so PyTorch.
    """
    from fedhet.models import shapes

    name = model or client.model
    return shapes(name, client.shape, client.classes, feature_dim, client.kind, part)


@dataclass(frozen=True)
class Passes:
    """`epochs` over a client's own samples in each of `rounds`."""

    rounds: int
    batch_size: int
    epochs: int


def local_epochs(own: Any, training: TrainingSettings, rounds: int) -> tuple[Passes, ...]:
    """Return the passes of a method that trains for the local epochs in each round."""
    return (Passes(rounds, training.batch_size, training.local_epochs),)


@dataclass(frozen=True)
class Protection:
    """Whether a method can protect the clients' samples by differential privacy, and how."""

    how: str = ""
    """What is noised, and why all that is sent follows from it."""
    refused: str = ""
    """Why the method cannot; empty: it can."""
    vectors: int = 0
    """Sums per class that a client releases in a round: features, logits."""
    norm: float = math.inf
    """L2 norm that no summed vector exceeds by itself, if that is below 'class-clip'."""
    passes: Callable[[Any, TrainingSettings, int], tuple[Passes, ...]] = local_epochs
    """(own settings, a client's training, rounds) -> how often it passes over its samples."""
    models: tuple[str, ...] = ()
    """The method's own settings, by field, that name another model which clients train."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The method's own settings, by field, and the values that it allows with privacy."""
    reason: str = ""
    """Why it allows these alone."""


Late = Literal["averaged", "kept", "refused"]
UNDECLARED = Protection(refused="it does not declare that all it sends could be noised")
DP_SGD = Protection("DP-SGD; the weights that are sent are its result")
BOTH_MODELS = Protection("DP-SGD of both models, whose joint gradient is scaled down")
CLASS_SUMS = "DP-SGD, and sums and counts by class, noised in a pass of their own"
ANSWERS = Protection("DP-SGD; answers on public data are post-processing")


@dataclass(frozen=True)
class MethodSpec:
    """A method's declaration."""

    title: str
    """One line on what the method does."""
    paper: str
    headline: Literal["personal", "common"]
    """The protocol of the method's headline number."""
    settings: type[MethodSettings] = MethodSettings
    """The method's settings; both halves read them."""
    instructions: Contract = NOTHING
    """What the server half sends: the instructions that its `instruct` returns."""
    replies: Contract = NOTHING
    """What the client half sends: the replies that its `train` returns."""
    sizes: Callable[[Any, ClientInfo], Sizes] = plain_sizes
    """Returns the sizes of messages that follow from the method's settings and a client."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """What the method measures of itself, with a title in words; besides `FIGURES`."""
    kinds: tuple[str, ...] = ("private",)
    """The kinds of model that the method's clients evaluate."""
    needs_public: bool = False
    """Whether the method needs public data."""
    needs_unlabeled: bool = False
    """Whether the method needs unlabeled samples of the clients' own."""
    semi: bool = True
    """Whether its clients may learn from unlabeled samples as `training.semi` says."""
    one_model: bool = False
    """Whether all clients must have the same architecture."""
    pool_of_one: bool = False
    """Whether the method makes the clients' models from one, which alone is in the pool."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The default models of the clients by kind of data; of other kinds, the kind's own."""
    suits: Callable[[Any, ClientInfo], None] = every_model
    """(own settings, a client's model, the shape of a sample, classes): raises SettingsError where
    the method needs more of the models than that they take such samples."""
    own_models: Mapping[str, Literal["model", "large_model"]] = field(default_factory=dict)
    """The method's own settings that name a model, with the default of the kind that each takes."""
    any_model: bool = False
    """Whether only `fit_private` trains a client's model, so that it needs no gradients."""
    large_messages: bool = False
    """Whether each client's messages are large and its own, such as models.

    If so, an instruction is made just before it is sent, and replies are stored on disk.
    """
    late: Late = "refused"
    """What a reply is worth when its round has closed. averaged: it enters averages with a smaller
    weight, and weights as the change that the client made. kept: it counts like any other, as what
    the client knows of itself. refused: its rows belong to the round."""
    learns_last: bool = False
    """Whether clients train once more, on what the last round has formed, before they evaluate."""
    defenses: tuple[Average, ...] = ()
    """The robust averages that suit the method: all where it takes the mean of what clients send,
    Krum and the filter where replies may only be left out."""
    resists: str = ""
    """What resists hostile clients where no robust average does, for a message."""
    privacy: Protection = UNDECLARED
    """Whether `[privacy]` can protect the samples of the method's clients."""
    warning: str = ""
    """What a user must know before a run starts."""
    simulation_only: bool = False
    """Whether the method runs in a simulation alone, as it needs all clients' data in one place."""

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a declaration that no run could follow."""
        require(self, title=str, paper=str, instructions=Contract, replies=Contract, kinds=tuple)
        require(self, metrics=Mapping, models=Mapping, own_models=Mapping, defenses=tuple)
        require(self, resists=str, warning=str, privacy=Protection)
        if not (isinstance(self.settings, type) and issubclass(self.settings, MethodSettings)):
            raise TypeError(
                f"MethodSpec: 'settings' must be a subclass of MethodSettings, got {self.settings}"
            )
        for name in ("sizes", "suits"):
            if not callable(value := getattr(self, name)):
                raise TypeError(f"MethodSpec: '{name}' must be a function, got {value!r}")
        for name, choices in (("headline", ("personal", "common")), ("late", get_args(Late))):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"MethodSpec: '{name}' must be one of {', '.join(choices)}, got {value!r}"
                )

    @property
    def offers(self) -> str:
        """The kind of model that a client gets with which nobody has trained; "": none.

        It is the one that the server sends for all. A method without it sends only what teaches the
        clients' own models, and these a new client would have to train first.
        """
        return "global" if "global" in self.kinds else ""

    def pool(self, kind: Kind) -> tuple[str, ...]:
        """Return the default pool of models for a kind of data."""
        if one := self.models.get(kind.name) or (kind.model if self.one_model else ""):
            return (one,)
        return (kind.pool_of_any if self.any_model else ()) or kind.pool

    def defaults(self, kind: Kind) -> dict[str, str]:
        """Return the defaults of `own_models` for a kind of data."""
        return {setting: getattr(kind, name) for setting, name in self.own_models.items()}
