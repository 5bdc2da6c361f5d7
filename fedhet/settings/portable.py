"""A settings table as plain data, from which a table of equal names, types and ranges is made.

Rules that are code, such as those between two settings, are not in it: the class has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from keyword import iskeyword
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from fedhet.settings.schema import MethodSettings

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}
_BOUNDS = {"ge": Ge, "gt": Gt, "le": Le, "lt": Lt}


def to_data(schema: type[MethodSettings]) -> list[dict[str, Any]]:
    """Return the settings of a table in the order of declaration, as JSON can hold them."""
    return [_setting(name, info) for name, info in schema.fields().items()]


def from_data(name: str, settings: Iterable[Mapping[str, Any]]) -> type[MethodSettings]:
    """Return a table of the settings that `to_data` returned; the inverse of it."""
    fields: dict[str, Any] = {_identifier(each["name"]): _field(each) for each in settings}
    return create_model(name, __base__=MethodSettings, **fields)


def has_several_types(info: FieldInfo) -> bool:
    """Tell whether a setting takes values of several types, such as a word or a number."""
    return get_origin(info.annotation) in (Union, UnionType)


def _setting(name: str, info: FieldInfo) -> dict[str, Any]:
    kind = info.annotation
    choices = list(get_args(kind)) if get_origin(kind) is Literal else []
    types = get_args(kind) if has_several_types(info) else (kind,)
    bounds = {
        sign: getattr(rule, sign)
        for rule in info.metadata
        for sign, bound in _BOUNDS.items()
        if isinstance(rule, bound)
    }
    allowed = {"choices": choices} if choices else {"types": [part.__name__ for part in types]}
    return {
        "name": name,
        "default": info.default,
        "help": info.description or "",
        **allowed,
        **({"bounds": bounds} if bounds else {}),
    }


def _field(setting: Mapping[str, Any]) -> tuple[Any, FieldInfo]:
    if choices := setting.get("choices"):
        kind: Any = Literal[tuple(choices)]
    else:
        kind = Union[tuple(_TYPES[name] for name in setting["types"])]  # noqa: UP007
    default, bounds = setting["default"], setting.get("bounds", {})
    return kind, Field(default, description=setting["help"], **bounds)


def _identifier(name: str) -> str:
    """Return the name of a setting's field in Python; `kebab` is the inverse."""
    field = name.replace("-", "_")
    return f"{field}_" if iskeyword(field) else field
