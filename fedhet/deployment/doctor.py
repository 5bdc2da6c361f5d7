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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedhet.base.errors import FedhetError, error_reason, one_line
from fedhet.deployment import certs
from fedhet.runs.units import human_bytes, plural
from fedhet.settings.text import split_host_port

FIRST_PERSON = 1000
"""Lowest user ID of a person, as on most Linux systems; services have lower ones."""
NO_LOGIN = ("nologin", "false")
"""Shells of users that only run services."""
Level = Literal["ok", "warning", "error"]
MIN_MEMORY, MIN_DISK = 2 * 2**30, 2 * 2**30
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


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
"""A finding that may do harm."""
error = partial(Finding, "error")
"""A finding that has to be mended."""


def of_machine(folder: Path) -> Iterator[Finding]:
    """Yield what is found of this machine; `folder` is on the disk that is to be used."""
    shared = Path("/dev/shm")  # noqa: S108
    space = {
        "memory": (lambda: psutil.virtual_memory().available, MIN_MEMORY, "", "few clients fit"),
        "disk": (lambda: psutil.disk_usage(str(folder)).free, MIN_DISK, f" for {folder}",
                 "a run keeps models and states"),
        "Ray": (lambda: psutil.disk_usage(str(shared)).free, 2**30, f" in {shared}",
                "Ray writes to the disk instead; in a container, raise --shm-size"),
    }  # fmt: skip
    yield from _guarded(_packages)
    yield from _guarded(_cuda)
    for what, (free, least, place, advice) in space.items():
        if what != "Ray" or shared.is_dir():
            yield from _guarded(partial(_space, what, free, least, place, advice))
    yield from _guarded(_ports)


def of_keys(folder: Path) -> Iterator[Finding]:
    """Yield what is found of the keys and certificates in a folder of `fedhet certs`."""
    for path in sorted(folder.rglob("*")):
        is_pair = path.is_file() and path.with_name(f"{path.name}.pub").exists()
        if path.suffix in (".crt", ".pem"):
            yield from _guarded(partial(_certificate, path))
        elif is_pair:
            yield from _guarded(partial(_pair, path))
        is_private = is_pair or (path.is_file() and path.suffix == ".key")
        if is_private and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            yield error("key", f"{path} can be read by others ({mode:o}): chmod 600 {path}")
        if path.name == certs.CA_KEY:
            yield from _guarded(partial(_authority_key, path))
    if (folder / certs.SERVER_CERTIFICATE).exists():
        yield from _guarded(partial(_signature, folder))


def of_server(address: str, authority: Path) -> Iterator[Finding]:
    """Yield what is found of a server at HOST:PORT: whether it answers, its certificate, clock."""
    yield from _guarded(partial(_answer, address, authority))


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


def _space(
    what: str, measure: Callable[[], int], least: int, place: str, advice: str
) -> Iterator[Finding]:
    free = measure()
    text = f"{human_bytes(free)} free{place}"
    yield warning(what, f"{text}: {advice}") if free < least else ok(what, text)


def _ports() -> Iterator[Finding]:
    taken = []
    for port in PORTS:
        with socket.socket() as probe:
            taken += [port] if probe.connect_ex(("127.0.0.1", port)) == 0 else []
    if not taken:
        yield ok("ports", f"{', '.join(map(str, PORTS))} are free")
    for port in taken:
        text = f"{port} ({PORTS[port]}) is in use: it runs already, or give another"
        yield warning("ports", text)


def _certificate(path: Path) -> Iterator[Finding]:
    try:
        end = certs.read_certificate(path).not_valid_after_utc
    except FedhetError as fault:
        yield error("certificate", str(fault))
        return
    text, left = certs.ends(path), end - datetime.datetime.now(datetime.UTC)
    if left < datetime.timedelta(0):
        advice = "`fedhet certs DIR --renew`, and start the server again"
        yield error(path.name, f"{text}: {advice}")
    elif left < certs.SOON:
        yield warning(path.name, f"{text}: `fedhet certs DIR --renew`")
    else:
        yield ok(path.name, text)


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
        host, port = split_host_port(address)
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
        yield error("server", f"{address} does not answer: {error_reason(fault)}")
        return
    yield ok("server", f"{address} answers, with a certificate of {authority}")
    try:
        there = email.utils.parsedate_to_datetime(answer.headers.get("Date") or "")
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
