"""Text format of settings (on the command line and in Flower's run config) and of addresses.

Flower's run config supports only strings, numbers and booleans, so lists and mappings are written
as strings: `cnn2,mlp` (list), `a+b,c+d` (list of lists), `6-8` (range), `site-a=2` (mapping). In a
list, `cnn2*3` repeats an item three times. TOML syntax for lists is also supported.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from fedhet.base.errors import SettingsError
from fedhet.settings.schema import AN_ADDRESS, is_assigned

MAX_REPEATS = 1000
"""Maximum number of times that `VALUE*N` repeats a value in a list."""
SEPARATORS = ",+"
"""Separators between the items in a list, and between the items in a nested list."""
_UNQUOTED = re.compile(r"[^\s,+*=\[\]'\"]([^,+*=\[\]'\"]*[^\s,+*=\[\]'\"])?")
"""Pattern for items that need no quotes in a list."""
AUTO = "auto"
"""Value of `engine.ray-address` for the Ray cluster to which this machine belongs."""
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)
_MAX_HOST = 253
_CLIENT = "ray://"


def read_text(name: str, info: FieldInfo | None, text: str) -> object:
    """Parse the text of a setting according to its type.

    Text that does not match the type is returned unchanged, and `build` rejects it later. The text
    of an unknown setting (`info` is None) is only unquoted. Raises SettingsError if a list or a
    mapping is malformed.
    """
    if info is None:
        return _unquote(text)
    try:
        if is_assigned(info) and "," in text:
            return _read_list((info.annotation, ...), text, SEPARATORS)
        return _parse_value(info.annotation, text, SEPARATORS)
    except ValueError as error:
        raise SettingsError(f"setting '{name}': {error}, got {text[:200]!r}") from None


def as_text(value: object) -> str:
    """Format a setting's value as text such as true, 0.5 or a,b (inverse of `read_text`)."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, dict):
        return ",".join(f"{name}={as_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        nested = [each if isinstance(each, list | tuple) else [each] for each in value]
        texts = [[as_text(each) for each in inner] for inner in nested]
        if all(_UNQUOTED.fullmatch(text) for inner in texts for text in inner):
            return ",".join("+".join(inner) for inner in texts)
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def is_collection(info: FieldInfo) -> bool:
    """Return whether a setting may be a list or a mapping, which Flower's config stores as text."""
    kinds = [info.annotation, *get_args(info.annotation)]
    origins = {get_origin(_without_rules(kind)) for kind in kinds}
    return is_assigned(info) or not origins.isdisjoint({tuple, dict})


def _parse_value(kind: Any, text: str, separators: str) -> Any:
    kind = _without_rules(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if kind is str or origin is Literal:
        return _unquote(text)
    if origin in (Union, UnionType):  # The text is a keyword such as auto, or has another type.
        kinds = [_without_rules(part) for part in parts]
        keywords = [word for k in kinds if get_origin(k) is Literal for word in get_args(k)]
        types = [each for each in kinds if each is not str and get_origin(each) is not Literal]
        word = _unquote(text)
        return word if word in keywords or not types else _parse_value(types[0], text, separators)
    if origin is tuple:
        return _read_list(parts, text, separators)
    if origin is dict and "=" in text:
        mapping: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = map(str.strip, part.partition("="))
            if name in mapping:
                raise ValueError(f"duplicate name '{name}', expected unique names")
            mapping[name] = _parse_value(parts[1], value, "")
        return mapping
    return text if origin is dict else _toml(text)


def _read_list(parts: tuple[Any, ...], text: str, separators: str) -> object:
    """Parse a list, where `cnn2*3` means three times `cnn2`, or the endpoints of a range."""
    if text.startswith("["):
        return _toml(text)
    if parts[-1] is not Ellipsis:  # The text is a range.
        return tuple(_toml(end.strip()) for end in re.split("[-,]", text))
    items = [part.strip() for part in text.split(separators[:1])] if text.strip() else []
    if _without_rules(parts[0]) is str:
        if len(items) > 1 and "" in items:
            raise ValueError("empty name in the list, expected names separated by single commas")
        items = list(filter(None, items))
    values = []
    for item in items:
        value, sign, repeats = item, "", ""
        if separators == SEPARATORS:
            value, sign, repeats = map(str.strip, item.partition("*"))
        if sign and not (value and repeats.isdecimal() and 1 <= int(repeats[:5]) <= MAX_REPEATS):
            raise ValueError(
                f"invalid list item '{item}', expected VALUE or VALUE*N with N from 1 to "
                f"{MAX_REPEATS}"
            )
        values += [_parse_value(parts[0], value, separators[1:])] * (int(repeats) if sign else 1)
    return tuple(values)


def _without_rules(kind: Any) -> Any:
    """Return the type inside `Annotated`, or `kind` itself if it is not annotated."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _unquote(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted and text[0] not in text[1:-1] else text


def _toml(text: str) -> Any:
    """Parse a TOML value, or return `text` unchanged if it is not valid TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def read_host(text: str) -> str:
    """Return the normalized form of a host name or an IP address, as used in certificates.

    Removes the brackets of an IPv6 address and the trailing dot of a name, and encodes
    internationalized names in ASCII ("xn--..."). Raises ValueError if the text is invalid.
    """
    invalid = ValueError(
        f"expected a host name or an IP address, such as fed.example.org or fd00::2, without "
        f"scheme, port or path, got {text!r}"
    )
    bare = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
    if ":" in bare or re.fullmatch(r"[0-9.]+", bare):
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            raise invalid from None
        if bare is text or address.version == 6:
            return str(address)
        raise invalid
    try:
        name = bare.removesuffix(".").encode("idna").decode()
    except UnicodeError:
        raise invalid from None
    labels = name.split(".")
    if bare is not text or len(name) > _MAX_HOST or labels[-1].isdecimal():
        raise invalid
    if not all(map(_LABEL.fullmatch, labels)):
        raise invalid
    return name


def split_host_port(text: str) -> tuple[str, int]:
    """Split "HOST:PORT" into the normalized host and the port. Raises ValueError if invalid."""
    host, _, port = text.rpartition(":")
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
    if not 1 <= number <= 65_535 or (":" in host and not host.startswith("[")):
        raise ValueError(
            "expected HOST:PORT with a port from 1 to 65535, such as fed.example.org:8000 or "
            f"[fd00::2]:8000, without scheme or path, got {text!r}"
        )
    return read_host(host), number


def join_host_port(host: str, port: int) -> str:
    """Return "HOST:PORT", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_address(text: str) -> str:
    if text.startswith(_CLIENT):
        raise ValueError(
            "the Ray Client scheme ray:// is unsupported because the server must run on a machine "
            "of the cluster, expected auto or HOST:PORT"
        )
    if text in ("", AUTO):
        return text
    try:
        return join_host_port(*split_host_port(text))
    except ValueError:
        raise ValueError(
            "expected auto, HOST:PORT with a port from 1 to 65535 ([ADDRESS]:PORT for IPv6), or an "
            "empty value to start a local cluster"
        ) from None


RayAddress = Annotated[str, AN_ADDRESS, AfterValidator(_is_address)]
