"""Settings as text, on a command line and in Flower's run config, and network addresses.

Flower's run config holds text, numbers and booleans alone, so that lists and maps are text in it:
`cnn2,mlp` for a list, `a+b,c+d` for a list of lists, `6-8` for a range, `site-a=2` for a map. In
a list `cnn2*3` stands for three of them. A list may also be written as in TOML.
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

MAX_TIMES = 1000
"""How often a list may repeat a value."""
SEPARATORS = ",+"
"""What stands between the values of a list, and between those of a list in a list."""
_PLAIN = re.compile(r"[^\s,+*=\[\]'\"]([^,+*=\[\]'\"]*[^\s,+*=\[\]'\"])?")
"""A value that reads the same in a list."""
AUTO = "auto"
"""The cluster to which this machine belongs."""
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)
_MAX_HOST = 253
_CLIENT = "ray://"


def read_text(name: str, info: FieldInfo | None, text: str) -> object:
    """Return the value of a setting's text, by its type; of an unknown setting (None), the text.

    What is not of that type is left as it is, for `build` to refuse it. Raises SettingsError for a
    list that repeats a value in another way than `cnn2*3`.
    """
    if info is None:
        return _unquoted(text)
    try:
        if is_assigned(info) and "," in text:
            return _read_list((info.annotation, ...), text, SEPARATORS)
        return _read(info.annotation, text, SEPARATORS)
    except ValueError as error:
        raise SettingsError(f"setting '{name}' = {text[:200]!r} is not allowed: {error}") from None


def as_text(value: object) -> str:
    """Return a setting's value as it is typed: true, 0.5, a,b; the inverse of `read_text`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, dict):
        return ",".join(f"{name}={as_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        inner = [each if isinstance(each, list | tuple) else [each] for each in value]
        words = [[as_text(each) for each in several] for several in inner]
        if all(_PLAIN.fullmatch(word) for several in words for word in several):
            return ",".join("+".join(several) for several in words)
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def holds_several(info: FieldInfo) -> bool:
    """Return whether a setting may be a list or a map, which Flower's run config has as text."""
    kinds = [info.annotation, *get_args(info.annotation)]
    return is_assigned(info) or any(get_origin(_bare(kind)) in (tuple, dict) for kind in kinds)


def _read(kind: Any, text: str, separators: str) -> Any:
    kind = _bare(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if kind is str or origin is Literal:
        return _unquoted(text)
    if origin in (Union, UnionType):  # one of some words, or another type
        kinds = [_bare(part) for part in parts]
        words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
        others = [each for each in kinds if each is not str and get_origin(each) is not Literal]
        word = _unquoted(text)
        return word if word in words or not others else _read(others[0], text, separators)
    if origin is tuple:
        return _read_list(parts, text, separators)
    if origin is dict and "=" in text:
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = map(str.strip, part.partition("="))
            if name in found:
                raise ValueError(f"'{name}' is given twice")
            found[name] = _read(parts[1], value, "")
        return found
    return text if origin is dict else _toml(text)


def _read_list(parts: tuple[Any, ...], text: str, separators: str) -> object:
    """Return the values of a list, or the ends of a range; in a list `cnn2*3` is three of cnn2."""
    if text.startswith("["):
        return _toml(text)
    if parts[-1] is not Ellipsis:  # a range
        return tuple(_toml(end.strip()) for end in re.split("[-,]", text))
    several = [part.strip() for part in text.split(separators[:1])] if text.strip() else []
    if _bare(parts[0]) is str:
        several = list(filter(None, several))
    found = []
    for part in several:
        value, sign, times = part, "", ""
        if separators == SEPARATORS:
            value, sign, times = map(str.strip, part.partition("*"))
        if sign and not (value and times.isdecimal() and 1 <= int(times[:5]) <= MAX_TIMES):
            raise ValueError(
                f"'{part}' is not an item of a list: write VALUE, or VALUE*3 with a number from 1 "
                f"to {MAX_TIMES}"
            )
        found += [_read(parts[0], value, separators[1:])] * (int(times) if sign else 1)
    return tuple(found)


def _bare(kind: Any) -> Any:
    """Return a type without its rules."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _unquoted(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted and text[0] not in text[1:-1] else text


def _toml(text: str) -> Any:
    """Return the TOML value of `text`; the text itself if it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def read_host(text: str) -> str:
    """Return a host name or an IP address in the form in which certificates and programs hold it.

    IPv6 addresses may be in brackets. Names may end in a dot, and names in other scripts are
    returned in ASCII ("xn--..."). Raises ValueError.
    """
    wrong = ValueError(
        f"expected a host name or an IP address alone, such as fed.example.org or fd00::2, without "
        f"scheme, port or path, got {text!r}"
    )
    bare = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
    if ":" in bare or re.fullmatch(r"[0-9.]+", bare):
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            raise wrong from None
        if bare is text or address.version == 6:
            return str(address)
        raise wrong
    try:
        name = bare.removesuffix(".").encode("idna").decode()
    except UnicodeError:
        raise wrong from None
    labels = name.split(".")
    if bare is not text or len(name) > _MAX_HOST or labels[-1].isdecimal():
        raise wrong
    if not all(map(_LABEL.fullmatch, labels)):
        raise wrong
    return name


def host_and_port(text: str) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT", as `read_host` does. Raises ValueError."""
    host, _, port = text.rpartition(":")
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
    if not 1 <= number <= 65_535 or (":" in host and not host.startswith("[")):
        raise ValueError(
            "expected HOST:PORT with a port from 1 to 65535, such as fed.example.org:8000 or "
            f"[fd00::2]:8000, without scheme or path, got {text!r}"
        )
    return read_host(host), number


def joined(host: str, port: int) -> str:
    """Return "HOST:PORT", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_address(text: str) -> str:
    if text.startswith(_CLIENT):
        raise ValueError(
            "ray:// is Ray Client, for programs outside of a cluster; a run's server must be on "
            "one of its machines: start the run there, with auto or HOST:PORT"
        )
    if text in ("", AUTO):
        return text
    try:
        return joined(*host_and_port(text))
    except ValueError:
        raise ValueError(
            "it takes auto, HOST:PORT with a port from 1 to 65535 ([ADDRESS]:PORT for IPv6), or "
            "nothing for a cluster of its own"
        ) from None


RayAddress = Annotated[str, AN_ADDRESS, AfterValidator(_is_address)]
