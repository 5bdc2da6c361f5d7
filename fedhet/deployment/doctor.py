"""Checks of a machine, its keys, a site and a server, for `fedhet doctor`."""

from __future__ import annotations

import datetime
import email.utils
import pwd
import socket
import stat
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedhet.base.disk import is_secret, read_pem
from fedhet.base.errors import FedhetError, SettingsError, one_line
from fedhet.deployment import certs
from fedhet.deployment.control import Connection
from fedhet.deployment.transport import TRANSPORT
from fedhet.runs.units import human_bytes, plural

if TYPE_CHECKING:
    from fedhet.client_runtime.node import Budget, NodeSettings

MIN_PERSON_UID = 1000
"""Lowest user id of a person on most Linux systems; services have lower ids."""
NO_LOGIN = ("nologin", "false")
"""Shells of users that only run services."""
PUBLISHERS = ("publisher.yaml", "publishers.yaml")
"""Endings of the names of files with the publishers that a site trusts."""
P = ParamSpec("P")
Level = Literal["ok", "warning", "error"]
MIN_MEMORY, MIN_DISK = 2 * 2**30, 2 * 2**30
MAX_SKEW = 60.0
"""Maximum difference between two clocks in seconds. Flower rejects messages that seem too old."""
PORTS = {8000: "the server's control API", 9092: "the server's port for sites", 9094: "a site"}


@dataclass(frozen=True)
class Finding:
    """Result of a check, shown as one line."""

    level: Level
    subject: str
    """Part of the system that was checked."""
    text: str
    """Result of the check, and advice if there is a problem."""


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
error = partial(Finding, "error")


def _guarded(check: Callable[P, Iterator[Finding]]) -> Callable[P, Iterator[Finding]]:
    """Wrap a check so that it yields a warning instead of raising an error."""

    @wraps(check)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        try:
            yield from check(*args, **kwargs)
        except Exception as fault:
            yield warning("a check failed", one_line(f"{type(fault).__name__}: {fault}"))

    return guarded


def check_machine(directory: Path) -> Iterator[Finding]:
    """Check this machine, and the disk that contains `directory`."""
    shared = Path("/dev/shm")  # noqa: S108
    space = {
        "memory": (lambda: psutil.virtual_memory().available, MIN_MEMORY, "",
                   "few clients fit in memory"),
        "disk": (lambda: psutil.disk_usage(str(directory)).free, MIN_DISK, f" for {directory}",
                 "runs store models and states"),
        "Ray": (lambda: psutil.disk_usage(str(shared)).free, 2**30, f" in {shared}",
                "Ray writes to the disk instead; in a container, increase --shm-size"),
    }  # fmt: skip
    yield from _packages()
    yield from _cuda()
    for subject, (measure, minimum, place, advice) in space.items():
        if subject != "Ray" or shared.is_dir():
            yield from _space(subject, measure, minimum, place, advice)
    yield from _ports()


def check_keys(directory: Path) -> Iterator[Finding]:
    """Check the keys and certificates in a directory written by `fedhet certs`."""
    for path in sorted(directory.rglob("*")):
        is_pair = path.is_file() and path.with_name(f"{path.name}.pub").exists()
        if path.suffix in (".crt", ".pem"):
            yield from _certificate(path)
        elif is_pair:
            yield from _pair(path)
        is_private = is_pair or (path.is_file() and path.suffix == ".key")
        if is_private and not is_secret(path):
            mode, advice = stat.S_IMODE(path.stat().st_mode), f"Use `chmod 600 {path}`."
            yield error("key", f"{path}: can be read by other users ({mode:o}). {advice}")
        if path.name.endswith(PUBLISHERS):
            yield from _publishers(path)
        if path.name == certs.CA_KEY:
            yield from _authority_key(path)
    if (directory / certs.SERVER_CERTIFICATE).exists():
        yield from _signature(directory)


@_guarded
def check_site(node_config: str) -> Iterator[Finding]:
    """Check a site's node settings, peers file, declaration, and data, as the node does.

    `node_config` is the value of `--node-config`. Yields a finding for each problem.
    """
    # Import lazily: the other checks must also work on a machine where PyTorch cannot be imported.
    from flwr.common.config import parse_config_args

    from fedhet.client_runtime.node import NodeSettings
    from fedhet.settings.schema import build

    try:
        config = parse_config_args([node_config])
        settings = build(NodeSettings, config, prefix="node-config ")
    except Exception as fault:  # Flower raises errors of its command-line parser.
        yield error("node-config", one_line(str(getattr(fault, "message", fault))))
        return
    if settings.partition_id < 0 and not (settings.data and settings.name):
        missing = "name" if settings.data else "data"
        rule = "expected both 'name' and 'data' at a site with its own data"
        yield error("node-config", f"node-config '{missing}': not set, {rule}")
    try:
        budget = settings.budget()
    except FedhetError as fault:
        yield error("privacy", str(fault))
        budget = None
    listed: tuple[int, ...] = ()
    if settings.peers or settings.peers_key:
        listed = yield from _peers(settings)
    if settings.data and (settings.privacy or settings.peers):
        # Noise also hides classes without samples, so the site may list any class.
        yield from _declared(settings, () if settings.privacy else listed, budget)
    elif settings.data:
        yield from _undeclared(settings.data)


def _peers(settings: NodeSettings) -> Generator[Finding, None, tuple[int, ...]]:
    """Check a site's peers file and key, and return the classes that the file lists for it."""
    from fedhet.config.secure import own_key, read_peers

    for name in ("peers", "peers-key"):
        if not getattr(settings, name.replace("-", "_")):
            rule = "expected both files of secure aggregation"
            yield error("peers", f"node-config '{name}': not set, {rule}")
    try:
        settings.check_training()
    except FedhetError as fault:
        yield error("peers", str(fault))
    try:
        peers = read_peers(settings.peers) if settings.peers else None
    except FedhetError as fault:
        yield error("peers", str(fault))
        peers = None
    if peers is None or not settings.name:
        return ()
    try:
        peer = peers.peer(settings.name)
        if settings.peers_key:
            own_key(peers, settings.name, settings.peers_key)
    except FedhetError as fault:
        yield error("peers", str(fault))
        return ()
    yield ok("peers", f"{settings.peers} lists {plural(len(peers.peers), 'site')}")
    return tuple(map(int, peer.classes))


def _undeclared(dataset: str) -> Iterator[Finding]:
    from fedhet.data.site import directory_of
    from fedhet.settings.run import DataSettings

    try:
        directory = directory_of(dataset, DataSettings())
    except FedhetError as fault:
        yield error("data", str(fault))
        return
    if directory is None or directory.is_dir():
        text = "needs no declaration, because the site has neither 'privacy' nor 'peers'"
        yield ok("data", f"{dataset} {text}")
    else:
        yield error("data", f"{directory}: file or directory not found")


def _declared(
    settings: NodeSettings, listed: tuple[int, ...], budget: Budget | None
) -> Iterator[Finding]:
    """Check the declaration of a private site, and compare it with the data."""
    from fedhet.data.declaration import Declaration

    try:
        declared = Declaration.from_files(settings.data, settings.max_data_bytes)
    except FedhetError as fault:
        yield error("declaration", str(fault))
        return
    count = len(declared.names)
    yield ok("declaration", f"{declared.path}: {plural(count, 'output')}, {list(declared.shape)}")
    if budget and settings.peers:
        try:
            declared.check_rows()
        except FedhetError as fault:
            yield error("declaration", str(fault))
    if outside := [label for label in listed if label >= count]:
        rule = f"expected classes below {count}, the declared number"
        yield error("peers", f"classes listed for {settings.name}: {rule}, got {outside[0]}")
        listed = tuple(label for label in listed if label < count)
    try:
        data = declared.read_data(
            settings.data, settings.name, listed, settings.min_samples_per_class
        )
    except FedhetError as fault:
        yield error("data", one_line(str(fault)))
        return
    samples = len(data.train)
    yield ok("data", f"{settings.data}: {plural(samples, 'training sample')}")
    if budget and (difference := declared.rows_fault(samples)):
        yield warning("declaration", difference)
    rows = declared.accounted_rows(samples)
    if budget and budget.delta * rows >= 1:
        rule = f"must be below 1 / samples = {1 / rows:.2g} for {rows} samples"
        yield error("privacy", f"node-config 'privacy': delta {rule}, got {budget.delta:g}")


@_guarded
def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    problems = []
    for text in metadata.requires("fedhet") or ():
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(required.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{required.name} not found")
            continue
        if not required.specifier.contains(version, prereleases=True):
            problems.append(f"{required.name} must be {required.specifier}, got {version}")
    if problems:
        yield error("packages", f"{'; '.join(problems)}. Install fedhet again with pip.")
    else:
        versions = [f"{name} {metadata.version(name)}" for name in ("fedhet", "flwr", "torch")]
        yield ok("packages", ", ".join(versions))


@_guarded
def _cuda() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield ok("GPU", "PyTorch is built without CUDA")
    elif not torch.cuda.is_available():
        yield ok("GPU", "no usable GPU: no device was found, or the driver is too old")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield ok(f"cuda:{index}", f"{name}, {human_bytes(free)} of {human_bytes(total)} free")


@_guarded
def _space(
    subject: str, measure: Callable[[], int], minimum: int, place: str, advice: str
) -> Iterator[Finding]:
    free = measure()
    text = f"{human_bytes(free)} free{place}"
    yield warning(subject, f"{text}: {advice}") if free < minimum else ok(subject, text)


@_guarded
def _ports() -> Iterator[Finding]:
    used = []
    for port in PORTS:
        with socket.socket() as probe:
            used += [port] if probe.connect_ex(("127.0.0.1", port)) == 0 else []
    if not used:
        yield ok("ports", f"{', '.join(map(str, PORTS))} are free")
    for port in used:
        text = (
            f"{port} ({PORTS[port]}) is in use. Choose another port unless the service runs there."
        )
        yield warning("ports", text)


@_guarded
def _certificate(path: Path) -> Iterator[Finding]:
    try:
        end = certs.read_certificate(path).not_valid_after_utc
    except FedhetError as fault:
        yield error("certificate", str(fault))
        return
    text, remaining = certs.expiry(path), end - datetime.datetime.now(datetime.UTC)
    advice = "Renew it with `fedhet certs DIR --renew`"
    if remaining < datetime.timedelta(0):
        yield error(path.name, f"{text}. {advice}, and restart the server.")
    elif remaining < certs.RENEWAL_PERIOD:
        yield warning(path.name, f"{text}. {advice}.")
    else:
        yield ok(path.name, text)


@_guarded
def _signature(directory: Path) -> Iterator[Finding]:
    server = certs.read_certificate(directory / certs.SERVER_CERTIFICATE)
    authority = certs.read_certificate(directory / certs.CA_CERTIFICATE)
    try:
        server.verify_directly_issued_by(authority)
    except Exception:
        text = f"{certs.SERVER_CERTIFICATE} is not signed by {certs.CA_CERTIFICATE}"
        yield error("certificate", text)
        return
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = ", ".join(str(name.value) for name in names)
    yield ok("certificate", f"{certs.SERVER_CERTIFICATE} is valid for {hosts}")


@_guarded
def _pair(path: Path) -> Iterator[Finding]:
    read_private = partial(load_ssh_private_key, password=None)
    private = read_pem(path, read_private, certs.PRIVATE_SSH_KEY).public_key()
    public = read_pem(path.with_name(f"{path.name}.pub"), load_ssh_public_key, "a public key")
    if private != public:
        yield error("key", f"{path.name}.pub is not the public key of {path.name}")
    else:
        yield ok("key", f"{path.name} and {path.name}.pub are a pair")


@_guarded
def _publishers(path: Path) -> Iterator[Finding]:
    try:
        publishers = certs.read_publishers(path)
    except SettingsError as fault:
        yield error("publishers", str(fault))
        return
    yield ok("publishers", f"{path} trusts {plural(len(publishers), 'publisher')} of signed apps")


@_guarded
def _authority_key(path: Path) -> Iterator[Finding]:
    """Check that the CA's key belongs to root rather than to a service that may be attacked."""
    uid = path.stat().st_uid
    advice = f"expected root. Use `chown root: {path}`, or move the key to an offline machine."
    try:
        user = pwd.getpwuid(uid)
    except KeyError:  # The user is from another machine or container image.
        yield warning("CA key", f"{path}: belongs to the unknown user {uid}, {advice}")
        return
    if user.pw_uid == 0:
        yield ok("CA key", f"{path} belongs to root")
    elif Path(user.pw_shell).name in NO_LOGIN or user.pw_uid < MIN_PERSON_UID:
        yield error("CA key", f"{path}: belongs to the service user '{user.pw_name}', {advice}")
    else:
        yield warning("CA key", f"{path}: belongs to '{user.pw_name}', {advice}")


@_guarded
def check_sites_address(address: str, authority: Path) -> Iterator[Finding]:
    """Check that a site can connect to the server at HOST:PORT, with the installed Flower."""
    try:
        Connection(Path(), address, authority).check_transport()
    except FedhetError as fault:
        yield error("server", str(fault).removeprefix("server ").removeprefix("server: "))
        return
    yield ok(
        "server",
        f"{address} replies to sites over {TRANSPORT}, with a certificate signed by {authority}",
    )


@_guarded
def check_server(address: str, authority: Path) -> Iterator[Finding]:
    """Check that the server at HOST:PORT replies, and check its certificate and clock."""
    try:
        date = Connection(Path(), address, authority).check_reachable()
    except FedhetError as fault:
        yield error("server", str(fault).removeprefix("server ").removeprefix("server: "))
        return
    yield ok("server", f"{address} replies with a certificate signed by {authority}")
    try:
        server_time = email.utils.parsedate_to_datetime(date)
    except ValueError:
        return  # A proxy may remove or replace the header.
    if server_time.tzinfo is None:
        server_time = server_time.replace(tzinfo=datetime.UTC)
    skew = abs((datetime.datetime.now(datetime.UTC) - server_time).total_seconds())
    text = f"differs from the server's clock by {plural(round(skew), 'second')}"
    if skew > MAX_SKEW:
        yield error("clock", f"{text}. Synchronize the clocks with NTP.")
    else:
        yield ok("clock", text)
