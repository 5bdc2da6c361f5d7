"""What is amiss with a machine, its keys or a server, a line each: `fedhet doctor`."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import pwd
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedhet.base.errors import FedhetError, one_line, reason_of
from fedhet.deployment import certs
from fedhet.runs.units import human_bytes, plural
from fedhet.settings.text import host_and_port

FIRST_PERSON = 1000
"""Lowest user ID of a person, as on most Linux systems; services have lower ones."""
NO_LOGIN = ("nologin", "false")
"""Shells of users that only run services."""
Level = Literal["ok", "warning", "error"]
LEAST_MEMORY, LEAST_DISK = 2 * 2**30, 2 * 2**30
LARGEST_SKEW = 60.0
"""Seconds by which two clocks may differ; Flower refuses a node's messages that seem too old."""
PORTS = {8000: "the server's control API", 9092: "the server's port for sites", 9094: "a site"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's."""

    level: Level
    what: str
    """What was looked at."""
    text: str
    """What was found, and what to do."""


def ok(what: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding("ok", what, text)


def warning(what: str, text: str) -> Finding:
    """Return a finding that may do harm."""
    return Finding("warning", what, text)


def error(what: str, text: str) -> Finding:
    """Return a finding that has to be mended."""
    return Finding("error", what, text)


def of_machine(folder: Path) -> Iterator[Finding]:
    """Yield what is found of this machine; `folder` is on the disk that is to be used."""
    for check in (_packages, _cuda, _memory, lambda: _disk(folder), _shared_memory, _ports):
        yield from _guarded(check)


def of_keys(folder: Path) -> Iterator[Finding]:
    """Yield what is found of the keys and certificates in a folder of `fedhet certs`."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".crt", ".pem"):
            yield from _guarded(lambda path=path: _certificate(path))  # type: ignore[misc]
        elif path.is_file() and _public(path).exists():
            yield from _guarded(lambda path=path: _pair(path))  # type: ignore[misc]
        if path.is_file() and (path.suffix == ".key" or _public(path).exists()):
            yield from _mode(path)
        if path.name == certs.CA_KEY:
            yield from _guarded(lambda path=path: _authority_key(path))  # type: ignore[misc]
    if not (folder / certs.SERVER_CERTIFICATE).exists():
        return
    yield from _guarded(lambda: _signature(folder))


def _public(key: Path) -> Path:
    """Return where the public key of a node's private one is."""
    return key.with_name(f"{key.name}.pub")


def of_server(address: str, authority: Path) -> Iterator[Finding]:
    """Yield what is found of a server at HOST:PORT: whether it answers, its certificate, clock."""
    yield from _guarded(lambda: _answer(address, authority))


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings; a check that fails is a finding too."""
    try:
        yield from check()
    except Exception as fault:
        yield warning("a check failed", one_line(f"{type(fault).__name__}: {fault}"))


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    amiss = []
    for text in metadata.requires("fedhet") or ():
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(asked.name)
        except metadata.PackageNotFoundError:
            amiss.append(f"{asked.name} is missing")
            continue
        if not asked.specifier.contains(found, prereleases=True):
            amiss.append(f"{asked.name} is {found}, and {asked.specifier} is needed")
    if amiss:
        yield error("packages", f"{'; '.join(amiss)}: install fedhet again with pip")
    else:
        versions = [f"{name} {metadata.version(name)}" for name in ("fedhet", "flwr", "torch")]
        yield ok("packages", ", ".join(versions))


def _cuda() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield ok("GPU", "this PyTorch is built without CUDA")
    elif not torch.cuda.is_available():
        yield ok("GPU", "none that PyTorch can use: no device, or a driver that is too old")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield ok(f"cuda:{index}", f"{name}, {human_bytes(free)} of {human_bytes(total)} free")


def _memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available
    text = f"{human_bytes(free)} free"
    few = free < LEAST_MEMORY
    yield warning("memory", f"{text}: few clients fit") if few else ok("memory", text)


def _disk(folder: Path) -> Iterator[Finding]:
    free = psutil.disk_usage(str(folder)).free
    text = f"{human_bytes(free)} free for {folder}"
    few = free < LEAST_DISK
    yield warning("disk", f"{text}: a run keeps models and states") if few else ok("disk", text)


def _shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")  # noqa: S108
    if place.is_dir():
        free = psutil.disk_usage(str(place)).free
        text = f"{human_bytes(free)} free in {place}"
        few = free < 2**30
        advice = ": Ray writes to the disk instead; in a container, raise --shm-size"
        yield warning("Ray", text + advice) if few else ok("Ray", text)


def _ports() -> Iterator[Finding]:
    taken = [port for port in PORTS if _is_taken(port)]
    if not taken:
        yield ok("ports", f"{', '.join(map(str, PORTS))} are free")
    for port in taken:
        yield warning(
            "ports", f"{port} ({PORTS[port]}) is in use: it runs already, or give another"
        )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _certificate(path: Path) -> Iterator[Finding]:
    try:
        end = certs.read_certificate(path).not_valid_after_utc
    except FedhetError as fault:
        yield error("certificate", str(fault))
        return
    yield _until(path.name, end, certs.ends(path))


def _until(what: str, end: datetime.datetime, text: str) -> Finding:
    left = end - datetime.datetime.now(datetime.UTC)
    if left < datetime.timedelta(0):
        return error(what, f"{text}: `fedhet certs DIR --renew`, and start the server again")
    if left < certs.SOON:
        return warning(what, f"{text}: `fedhet certs DIR --renew`")
    return ok(what, text)


def _signature(folder: Path) -> Iterator[Finding]:
    server = certs.read_certificate(folder / certs.SERVER_CERTIFICATE)
    authority = certs.read_certificate(folder / certs.CA_CERTIFICATE)
    try:
        server.verify_directly_issued_by(authority)
    except Exception:
        yield error("certificate", f"{certs.SERVER_CERTIFICATE} is not signed by the CA beside it")
        return
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    yield ok("certificate", f"the server's is for {', '.join(str(name.value) for name in names)}")


def _pair(path: Path) -> Iterator[Finding]:
    private = load_ssh_private_key(path.read_bytes(), None).public_key()
    public = load_ssh_public_key(path.with_name(f"{path.name}.pub").read_bytes())
    if private != public:
        yield error("key", f"{path.name}.pub is not the public key of {path.name}")
    else:
        yield ok("key", f"{path.name} and {path.name}.pub are a pair")


def _mode(path: Path) -> Iterator[Finding]:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        yield error("key", f"{path} can be read by others ({mode:o}): chmod 600 {path}")


def _authority_key(path: Path) -> Iterator[Finding]:
    """Check who owns the CA's key. A service that owns it could sign certificates if taken over."""
    uid = path.stat().st_uid
    advice = f"expected root. `chown root: {path}`, or move it to a machine without a network"
    try:
        user = pwd.getpwuid(uid)
    except KeyError:  # of another machine, or of a container's image
        yield warning("CA key", f"{path}: belongs to the unknown user {uid}, {advice}")
        return
    if user.pw_uid == 0:
        yield ok("CA key", f"{path} belongs to root")
    elif Path(user.pw_shell).name in NO_LOGIN or user.pw_uid < FIRST_PERSON:
        yield error("CA key", f"{path}: belongs to the service user '{user.pw_name}', {advice}")
    else:
        yield warning("CA key", f"{path}: belongs to '{user.pw_name}', {advice}")


def _answer(address: str, authority: Path) -> Iterator[Finding]:
    try:
        host, port = host_and_port(address)
    except ValueError as fault:
        yield error("server", str(fault))
        return
    if not authority.is_file():
        yield error("server", f"{authority}: no such file; it must be the CA's certificate")
        return
    try:
        context = ssl.create_default_context(cafile=str(authority))
        connection = http.client.HTTPSConnection(host, port, timeout=10, context=context)
        connection.request("GET", "/")
        answer = connection.getresponse()
    except ssl.SSLCertVerificationError as fault:
        yield error("server", f"{address}: its certificate is refused: {fault.verify_message}")
        return
    except (OSError, http.client.HTTPException) as fault:
        yield error("server", f"{address} does not answer: {reason_of(fault)}")
        return
    yield ok("server", f"{address} answers, with a certificate of {authority}")
    yield from _clock(answer.headers.get("Date"))


def _clock(date: str | None) -> Iterator[Finding]:
    try:
        there = email.utils.parsedate_to_datetime(date or "")
    except ValueError:
        return  # a proxy may remove the header, or write its own
    if there.tzinfo is None:
        there = there.replace(tzinfo=datetime.UTC)
    skew = abs((datetime.datetime.now(datetime.UTC) - there).total_seconds())
    text = f"{plural(round(skew), 'second')} from the server's"
    if skew > LARGEST_SKEW:
        yield error("clock", f"{text}: set the clocks by NTP")
    else:
        yield ok("clock", text)
