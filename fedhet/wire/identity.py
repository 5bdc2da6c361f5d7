"""Description of a client at the start of a run: its name, model and task."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from fedhet.base.errors import KnowledgeError, safe_repr
from fedhet.kinds import KINDS, Kind

SERVER = "server"
"""Reserved sender name of the server, which no client may use."""
MAX_CLASSES = 100_000
MAX_SIDE = 2**20
"""Maximum size of a dimension, e.g. of a vocabulary."""
MAX_VALUES = 2**28
"""Maximum number of values in one sample."""
MIN_SAMPLES, MAX_SAMPLES = 2, 10**9
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHAPE = re.compile(r"[0-9]{1,7}(,[0-9]{1,7}){0,3}")
_DIGEST = re.compile(r"([0-9a-f]{16})?")
_STORED = re.compile(r"(bytes|scaled|given)?")
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
    """Kind of samples, as a name in `fedhet.kinds.KINDS`."""
    shape: tuple[int, ...]
    """Shape of one sample, in the format of its kind."""
    order: str = ""
    """Digest of the ordered class names, from `class_names_digest`."""
    training: str = ""
    """Optimizer, learning rate, epochs and batch size, as text for the run's records."""
    own_data: bool = False
    """Whether the client reads its own data instead of a partition of the run's dataset."""
    base: str = ""
    """Digest of the client's frozen base model, or "" if the model has no adapters."""
    task: str = "classification"
    """Name of the task; `classes` is the number of outputs for this task."""
    stored: str = ""
    """Storage format of the samples, as in `fedhet.data.spec.Stored`, or "" if unknown."""
    public: str = ""
    """Digest of the public set that a site has read, or "" if it reads no public set."""

    def properties(self) -> dict[str, int | str | bool]:
        """Return the description as a flat dictionary (inverse of `read_properties`)."""
        return {**vars(self), "shape": ",".join(map(str, self.shape))}


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of a run or client, and thus of its directory."""
    return _NAME.fullmatch(text) is not None


def client_name(index: int, clients: int) -> str:
    """Return a default client name such as "client-07", with a zero-padded index."""
    return f"client-{index:0{len(str(clients - 1))}d}"


def class_names_digest(classes: Sequence[str]) -> str:
    """Return a digest of the ordered class names, or "" if they are 0, 1, … or absent.

    If the digests of two clients are equal, both assign the same labels to the same classes.
    """
    if list(classes) == [str(number) for number in range(len(classes))]:
        return ""
    return hashlib.blake2b("\0".join(classes).encode(), digest_size=8).hexdigest()


def read_properties(properties: Mapping[str, object], node: str) -> ClientInfo:
    """Validate a client's description.

    Raises KnowledgeError, which names the node and the field, if the description is invalid.
    """
    if "error" in properties:
        raise KnowledgeError(node, "properties", str(properties["error"])[:300])
    name = properties.get("name")
    if not isinstance(name, str) or not is_name(name) or name == SERVER:
        rule = "must consist of letters, digits, '.', '_' and '-'"
        raise KnowledgeError(node, "name", f"{rule}, got {safe_repr(name)}")
    model = _text(name, "model", properties.get("model"), _MODEL, "a model name")
    kind = properties.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        rule = f"must be one of {', '.join(KINDS)}"
        raise KnowledgeError(name, "kind", f"{rule}, got {safe_repr(kind)}")
    shape = _shape(name, KINDS[kind], properties.get("shape"))
    samples = _integer(name, "samples", properties.get("samples"), MIN_SAMPLES, MAX_SAMPLES)
    rule = "a task, of at most 100 letters, digits, '.', '_' and '-'"
    task = _text(name, "task", properties.get("task", "classification"), _NAME, rule)
    least = 2 if task == "classification" else 1
    classes = _integer(name, "classes", properties.get("classes"), least, MAX_CLASSES)
    rule_of_digest = "empty or 16 hexadecimal digits"
    order = _text(name, "order", properties.get("order", ""), _DIGEST, rule_of_digest)
    rule = "at most 200 letters, digits and ' ,.+-'"
    training = _text(name, "training", properties.get("training", ""), _WORDS, rule)
    own_data = properties.get("own_data", False)
    if not isinstance(own_data, bool):
        raise KnowledgeError(name, "own_data", f"must be true or false, got {safe_repr(own_data)}")
    base = _text(name, "base", properties.get("base", ""), _DIGEST, rule_of_digest)
    rule = "bytes, scaled, or given"
    stored = _text(name, "stored", properties.get("stored", ""), _STORED, rule)
    public = _text(name, "public", properties.get("public", ""), _DIGEST, rule_of_digest)
    return ClientInfo(
        *(name, model, samples, classes, kind, shape, order, training, own_data, base, task),
        *(stored, public),
    )


def _text(sender: str, field: str, value: object, pattern: re.Pattern[str], rule: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise KnowledgeError(sender, field, f"must be {rule}, got {safe_repr(value)}")
    return value


def _integer(sender: str, field: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        fault = f"must be an integer from {low} to {high}, got {safe_repr(value)}"
        raise KnowledgeError(sender, field, fault)
    return value


def _shape(sender: str, kind: Kind, text: object) -> tuple[int, ...]:
    if not isinstance(text, str) or not _SHAPE.fullmatch(text):
        fault = f"must be 1 to 4 sizes like '3,32,32', got {safe_repr(text)}"
        raise KnowledgeError(sender, "shape", fault)
    shape = tuple(map(int, text.split(",")))
    if not kind.fits(shape):
        raise KnowledgeError(
            sender, "shape", f"invalid shape {text} for samples of kind {kind.name}"
        )
    for size in kind.sizes(shape):
        _integer(sender, "shape", size, 1, MAX_SIDE)
    if kind.is_numeric and math.prod(shape) > MAX_VALUES:
        fault = f"a sample must have at most {MAX_VALUES} values, got shape {text}"
        raise KnowledgeError(sender, "shape", fault)
    return shape


def capped(infos: Iterable[ClientInfo], max_ratio: float) -> dict[str, int]:
    """Return the number of samples with which each client is weighted, by client name.

    A server cannot verify the reported numbers. Unless `max_ratio` is 0, they are therefore limited
    to `max_ratio` times the lower median of all clients' numbers.
    """
    reported = {info.name: info.samples for info in infos}
    limit = (
        int(max_ratio * median_low(reported.values())) if reported and max_ratio else MAX_SAMPLES
    )
    return {name: min(samples, limit) for name, samples in reported.items()}
