"""Names and addresses of hosts, as written in settings and on the command line."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

from fedhet.settings.schema import AN_ADDRESS

AUTO = "auto"
"""Value of `engine.ray-address` for the Ray cluster to which this machine belongs."""
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)
_MAX_HOST = 253
_CLIENT = "ray://"


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
