"""Addresses: host names and IP addresses, with or without a port, wherever a user gives one."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

from fedhet.settings.schema import AN_ADDRESS

AUTO = "auto"
"""The cluster to which this machine belongs."""
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)
_MAX_HOST = 253
_CLIENT = "ray://"


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
