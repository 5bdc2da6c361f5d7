"""A method's declaration: what it is, its settings, and the messages that its halves exchange.

A declaration imports neither PyTorch nor Flower, so that commands read it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedhet.kinds import Kind
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import MethodSettings
from fedhet.wire.contract import Contract, Sizes
from fedhet.wire.identity import ClientInfo

NOTHING = Contract()
"""The contract of empty messages."""
TABLE_POOL = "mlp,mlp2,mlp3"
"""The default pool of models where the data is a table."""
TABLE_MODEL = "mlp"
"""The same for a method whose clients must have one architecture."""
TABLE_POOL_OF_ANY = "sk-tree,sk-svm,sk-gam,sk-mlp"
"""The same for a method whose models need no gradients: CoFED's four kinds, Section 5.7."""
TEXT_POOL = "text-bag,text-cnn,text-gru,text-lstm,text-transformer"
"""The default pool of models of texts."""
TEXT_MODEL = "text-cnn"
"""The same for a method whose clients must have one architecture."""
SIGNAL_POOL = "signal-cnn2,signal-cnn3,signal-gru,signal-resnet,mlp"
"""The default pool of models of signals."""
SIGNAL_MODEL = "signal-cnn2"
"""The same for a method whose clients must have one architecture."""


def plain_sizes(settings: Any, client: ClientInfo) -> Sizes:
    """Return the sizes of messages without features or weights: C, the number of classes."""
    return Sizes({"C": client.classes})


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
    kinds: tuple[str, ...] = ("private",)
    """The kinds of model that the method's clients evaluate."""
    needs_public: bool = False
    """Whether the method needs public data."""
    needs_unlabelled: bool = False
    """Whether the method needs unlabelled samples of the clients' own."""
    semi: bool = True
    """Whether its clients may learn from unlabelled samples as `training.semi` says."""
    one_model: bool = False
    """Whether all clients must have the same architecture."""
    default_model: str = ""
    """The default model of all clients; empty: the usual pool."""
    table_model: str = ""
    """The default model of all clients where the data is a table; empty: as for other methods."""
    table_settings: Mapping[str, str] = field(default_factory=dict)
    """Defaults of the method's own settings where the data is a table, by name: its models."""
    text_model: str = ""
    """As `table_model`, where the data is text."""
    text_settings: Mapping[str, str] = field(default_factory=dict)
    """As `table_settings`, where the data is text."""
    signal_model: str = ""
    """As `table_model`, where the data is signals."""
    signal_settings: Mapping[str, str] = field(default_factory=dict)
    """As `table_settings`, where the data is signals."""
    any_model: bool = False
    """Whether only `fit_private` trains a client's model, so that it needs no gradients."""
    large_messages: bool = False
    """Whether each client's messages are large and its own, such as models.

    If so, an instruction is made just before it is sent, and replies are stored on disk.
    """
    simulation_only: bool = False
    """Whether the method runs in a simulation alone, as it needs all clients' data in one place."""

    def pool(self, kind: Kind) -> str:
        """Return the default pool of models for a kind of data."""
        if kind == "image":
            return self.default_model or RunSettings().models.pool
        own, model, pool = {
            "table": (self.table_model, TABLE_MODEL, TABLE_POOL),
            "text": (self.text_model, TEXT_MODEL, TEXT_POOL),
            "signal": (self.signal_model, SIGNAL_MODEL, SIGNAL_POOL),
        }[kind]
        usual = TABLE_POOL_OF_ANY if kind == "table" and self.any_model else pool
        return own or (model if self.one_model else usual)

    def own_models(self, kind: Kind) -> Mapping[str, str]:
        """Return the defaults of the method's own settings that name models, for a kind of data."""
        own = {
            "table": self.table_settings,
            "text": self.text_settings,
            "signal": self.signal_settings,
        }
        return own.get(kind, {})
