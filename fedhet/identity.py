"""What a client says of itself before a run: who it is and what task its data is of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedhet.errors import KnowledgeError
from fedhet.knowledge import is_name

MAX_CLASSES = 100_000
MAX_SIDE = 65_536
_MODEL = re.compile(r"[\w.:-]{1,200}")


@dataclass(frozen=True)
class ClientInfo:
    """What a client says of itself; no sample, no label count."""

    name: str
    model: str
    samples: int
    """Training samples."""
    classes: int
    shape: tuple[int, ...]
    """Of one sample."""

    def properties(self) -> dict[str, int | str]:
        """Return the client's words as flat properties; `read_properties` takes them back."""
        shape = ",".join(map(str, self.shape))
        return {
            "name": self.name,
            "model": self.model,
            "samples": self.samples,
            "classes": self.classes,
            "shape": shape,
        }


def read_properties(properties: Mapping[str, object], node: str) -> ClientInfo:
    """Return what a client says of itself. Raises KnowledgeError naming the node and the field."""
    if "error" in properties:
        raise KnowledgeError(node, "properties", str(properties["error"])[:300])
    name = properties.get("name")
    if not isinstance(name, str) or not is_name(name) or name == "server":
        raise KnowledgeError(node, "name", f"is {name!r}, must be letters, digits, '.', '_', '-'")
    model = properties.get("model")
    if not isinstance(model, str) or not _MODEL.fullmatch(model):
        raise KnowledgeError(name, "model", "must be a model's name")
    shape = _shape(name, properties.get("shape"))
    samples = _whole(name, "samples", properties.get("samples"), 2, 10**12)
    classes = _whole(name, "classes", properties.get("classes"), 2, MAX_CLASSES)
    return ClientInfo(name, model, samples, classes, shape)


def _whole(sender: str, field: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        fault = f"is {value!r}, must be an integer from {low} to {high}"
        raise KnowledgeError(sender, field, fault)
    return value


def _shape(sender: str, text: object) -> tuple[int, ...]:
    sides = str(text).split(",")
    if not 1 <= len(sides) <= 4 or not all(s.isdecimal() and len(s) < 6 for s in sides):
        raise KnowledgeError(sender, "shape", f"is {text!r}, must be 1 to 4 sizes like '3,32,32'")
    return tuple(_whole(sender, "shape", int(s), 1, MAX_SIDE) for s in sides)
