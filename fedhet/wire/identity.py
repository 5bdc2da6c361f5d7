"""A client's description before a run: its name, model and task."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from fedhet.base.errors import KnowledgeError, shown
from fedhet.kinds import KINDS, Kind

SERVER = "server"
"""The sender's name in the server's messages; no client may have it."""
MAX_CLASSES = 100_000
MAX_SIDE = 65_536
MAX_VALUES = 2**28
"""Values in one sample."""
MIN_SAMPLES, MAX_SAMPLES = 2, 10**9
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHAPE = re.compile(r"[0-9]{1,5}(,[0-9]{1,5}){0,3}")
_ORDER = re.compile(r"([0-9a-f]{16})?")
_MODEL = re.compile(r"[\w.:-]{1,200}", re.ASCII)
_WORDS = re.compile(r"[\w ,.+-]{0,200}", re.ASCII)


@dataclass(frozen=True)
class ClientInfo:
    """A client's description of itself, without samples or label counts."""

    name: str
    model: str
    samples: int
    """Number of training samples."""
    classes: int
    kind: str
    """The kind of its samples, a name in `fedhet.kinds.KINDS`."""
    shape: tuple[int, ...]
    """The shape of one sample, as its kind has it."""
    order: str = ""
    """A digest of the class names in their order (`order_of`)."""
    training: str = ""
    """Its optimizer, rate, epochs and batch size, as text for the run's records."""
    own_data: bool = False
    """Whether its samples are its own, and not a part of the run's data set."""

    def properties(self) -> dict[str, int | str | bool]:
        """Return the description as flat properties; `read_properties` is the inverse."""
        return {**vars(self), "shape": ",".join(map(str, self.shape))}


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of a run or a client, which is also a folder's name."""
    return _NAME.fullmatch(text) is not None


def client_name(index: int, clients: int) -> str:
    """Return "client-07": the index, zero-padded to the width of the last client's."""
    return f"client-{index:0{len(str(clients - 1))}d}"


def order_of(classes: Sequence[str]) -> str:
    """Return a digest of the ordered class names; "" for plain numbers 0, 1, ... or no names.

    It shows whether two clients' numbers refer to the same classes.
    """
    if list(classes) == [str(number) for number in range(len(classes))]:
        return ""
    return hashlib.blake2b("\0".join(classes).encode(), digest_size=8).hexdigest()


def read_properties(properties: Mapping[str, object], node: str) -> ClientInfo:
    """Return a client's description. Raises KnowledgeError naming the node and the field."""
    if "error" in properties:
        raise KnowledgeError(node, "properties", str(properties["error"])[:300])
    name = properties.get("name")
    if not isinstance(name, str) or not is_name(name) or name == SERVER:
        raise KnowledgeError(
            node, "name", f"is {shown(name)}, must be letters, digits, '.', '_', '-'"
        )
    model = _text(name, "model", properties.get("model"), _MODEL, "a model's name")
    kind = properties.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise KnowledgeError(name, "kind", f"is {shown(kind)}, must be one of {', '.join(KINDS)}")
    shape = _shape(name, KINDS[kind], properties.get("shape"))
    samples = _whole(name, "samples", properties.get("samples"), MIN_SAMPLES, MAX_SAMPLES)
    classes = _whole(name, "classes", properties.get("classes"), 2, MAX_CLASSES)
    rule = "16 hexadecimal digits, or empty"
    order = _text(name, "order", properties.get("order", ""), _ORDER, rule)
    rule = "at most 200 letters, digits and ' ,.+-'"
    training = _text(name, "training", properties.get("training", ""), _WORDS, rule)
    own_data = properties.get("own_data", False)
    if not isinstance(own_data, bool):
        raise KnowledgeError(name, "own_data", f"is {shown(own_data)}, must be true or false")
    return ClientInfo(name, model, samples, classes, kind, shape, order, training, own_data)


def _text(sender: str, field: str, value: object, pattern: re.Pattern[str], rule: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise KnowledgeError(sender, field, f"must be {rule}")
    return value


def _whole(sender: str, field: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        fault = f"is {shown(value)}, must be an integer from {low} to {high}"
        raise KnowledgeError(sender, field, fault)
    return value


def _shape(sender: str, kind: Kind, text: object) -> tuple[int, ...]:
    if not isinstance(text, str) or not _SHAPE.fullmatch(text):
        fault = f"is {shown(text)}, must be 1 to 4 sizes like '3,32,32'"
        raise KnowledgeError(sender, "shape", fault)
    shape = tuple(map(int, text.split(",")))
    if not kind.fits(shape):
        raise KnowledgeError(sender, "shape", f"is {text}, which no {kind.name} has")
    for size in kind.sizes(shape):
        _whole(sender, "shape", size, 1, MAX_SIDE)
    if kind.is_numeric and math.prod(shape) > MAX_VALUES:
        fault = f"is {text}, one sample must have at most {MAX_VALUES} values"
        raise KnowledgeError(sender, "shape", fault)
    return shape


def capped(infos: Iterable[ClientInfo], most: float) -> dict[str, int]:
    """Return the number of samples with which each client is weighted, by name.

    It is what the client reports, but no more than `most` times the median client's (of an even
    number of clients, the lower median); 0: no limit. A server cannot verify what they report.
    """
    reported = {info.name: info.samples for info in infos}
    limit = int(most * median_low(reported.values())) if reported and most else MAX_SAMPLES
    return {name: min(samples, limit) for name, samples in reported.items()}
