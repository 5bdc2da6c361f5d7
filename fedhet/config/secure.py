"""Peers file of secure aggregation: the sites' names and keys, and the rules that they agreed on.

All sites have the same peers file; they compare its digest over a channel that the server does not
control. Each site also has a private X25519 key. The server has neither file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedhet.base.disk import Folder, expanded, read_pem, read_toml_tables, write_text
from fedhet.base.errors import SettingsError, StateError, error_reason, nearest, safe_repr
from fedhet.wire.identity import MAX_CLASSES, SERVER, is_name

PEERS = "peers.toml"
KEY_ENDING, PUBLIC_ENDING = ".peer.key", ".peer.toml"
MIN_PEERS, MAX_PEERS = 3, 1000
"""Minimum and maximum number of sites. With only two sites, each site could compute the other
site's values by subtracting its own values from the sum."""
SIMULATED = "_peers"
"""Directory of the keys of simulated clients, within their private state directory. No client has
this name."""
MAX_WEIGHT = 1000
"""Maximum weight of a site. A value of a site with weight w loses log2(max. weight / w) bits."""
DOMINATED = (
    "expected no site with more weight than the other sites together, because a sum would be "
    "almost equal to the values of this site"
)
Server = Literal["curious", "malicious"]
"""Server that follows the protocol, or server that may lie."""
_VERSION = 2
_CLASS = re.compile("0|[1-9][0-9]{0,4}")
_CLASS_RANGE = re.compile("([0-9]{1,5})(?:-([0-9]{1,5}))?")
_PRIME = 2**255 - 19
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True)
class Peer:
    """One site of a peers file. Raises SettingsError if the name or the key is invalid."""

    name: str
    key: bytes
    """X25519 public key, 32 bytes."""
    classes: tuple[str, ...] = ()
    """Numbers of the classes whose means the site sends, as text; empty if it sends no means."""
    weight: int = 1
    """Weight of the site in all averages. The weight is public, so it must not be the site's exact
    number of samples."""

    def __post_init__(self) -> None:
        if not is_name(self.name) or self.name == SERVER:
            rule = f"letters, digits, '.', '_' and '-', and not '{SERVER}'"
            raise SettingsError(f"name: expected {rule}, got {safe_repr(self.name)}")
        if not _can_agree(self.key):
            rule = "an X25519 public key of 64 hexadecimal digits"
            raise SettingsError(f"{self.name}: key: expected {rule}")
        _check(f"{self.name}: weight", self.weight, 1, MAX_WEIGHT)


@dataclass(frozen=True)
class Peers:
    """Contents of a peers file, sorted by name.

    Raises SettingsError if a rule of the file is violated.
    """

    peers: tuple[Peer, ...]
    colluding: int = 1
    """Number c of sites that may collude with the server without learning a site's values."""
    least: int = 0
    """Minimum number of sites in a round; 0 is replaced with the smallest permitted number."""
    server: Server = "curious"
    """Server against which the sites require protection; "malicious" refuses all sums that protect
    a site only from a server that follows the protocol (see `fedhet.wire.contract.Sum`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peers", tuple(sorted(self.peers, key=lambda peer: peer.name)))
        number = len(self.peers)
        for name, count in Counter(self.names).items():
            if count > 1:
                raise SettingsError(f"name: expected unique names, got '{name}' twice")
        _check("sites", number, MIN_PEERS, MAX_PEERS)
        if len({peer.key for peer in self.peers}) < number:
            raise SettingsError(
                "key: expected a different key for each site, got the same key twice"
            )
        _check("colluding", self.colluding, 1, number - 2)
        # Two disjoint sets of sites cannot both have more than half of the sites.
        lowest = max(number // 2 + 1, self.smallest)
        if type(self.least) is int and self.least == 0:
            object.__setattr__(self, "least", lowest)
        _check("least", self.least, lowest, number)
        if self.is_dominated(self.names):
            raise SettingsError(f"weight: {DOMINATED}")
        if self.server not in (servers := get_args(Server)):
            raise SettingsError(
                f"server: expected {' or '.join(servers)}, got {safe_repr(self.server)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all sites, sorted."""
        return tuple(peer.name for peer in self.peers)

    def is_dominated(self, names: Iterable[str]) -> bool:
        """Return whether one of the given sites has more weight than the other sites together."""
        weights = [self.peer(name).weight for name in names]
        return 2 * max(weights) > sum(weights)

    @property
    def max_weight(self) -> int:
        """Largest weight of a site."""
        return max(peer.weight for peer in self.peers)

    @property
    def smallest(self) -> int:
        """Minimum number of sites in any sum, so that at least two of the sites do not collude."""
        return max(MIN_PEERS, self.colluding + 2)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 digest of the format version, the rules and all sites."""
        sites = [[p.name, p.key.hex(), list(p.classes), p.weight] for p in self.peers]
        rules = [_VERSION, self.colluding, self.least, self.server, sites]
        return hashlib.sha256(b"fedhet peers\0" + json.dumps(rules).encode()).digest()

    def threshold(self, sites: int) -> int:
        """Return the number of sites that must reveal their shares; see the function."""
        return threshold(sites, self.colluding)

    def peer(self, name: str) -> Peer:
        """Return a site by name. Raises SettingsError if the peers file does not list it."""
        for peer in self.peers:
            if peer.name == name:
                return peer
        hint = nearest(name, self.names)
        raise SettingsError(f"peers: site {safe_repr(name)} not found in the peers file{hint}")

    @cached_property
    def holders(self) -> dict[int, set[str]]:
        """Names of the sites that list each class, by class number."""
        holders: dict[int, set[str]] = {}
        for peer in self.peers:
            for label in map(int, peer.classes):
                holders.setdefault(label, set()).add(peer.name)
        return holders

    def to_toml(self) -> str:
        """Return the contents of the file, in the format of `read_peers`."""
        lines = [f"colluding = {self.colluding}", f"least = {self.least}"]
        lines.append(f'server = "{self.server}"')
        for peer in self.peers:
            lines += ["", "[[site]]", *_lines(peer)]
        return "\n".join(lines) + "\n"


def threshold(sites: int, colluding: int = 1) -> int:
    """Return t, the number of sites that must reveal their shares, for a cohort of size n.

    `sites` is the size n. Two different survivor lists with t sites each have at least 2t - n sites
    in common. Each honest site accepts only one list, so 2t - n > c prevents both lists from being
    unmasked. With the default, the result is a lower bound of t for all peers files.
    """
    return max(math.ceil((sites + colluding) / 2) + 1, 2 * sites // 3 + 1)


def read_peers(path: str | Path) -> Peers:
    """Read a peers file. Raises SettingsError, naming the file and the entry, if it is invalid."""
    rules = {"colluding": "an integer", "least": "an integer", "server": "a string"}

    def parse(values: dict[str, Any]) -> Peers:
        sites = values.pop("site", [])
        if not isinstance(sites, list):
            raise SettingsError(f"site: expected [[site]] tables, got {safe_repr(sites)}")
        if unknown := sorted(values.keys() - {*rules}):
            raise SettingsError(f"{unknown[0]}: unknown, expected {', '.join(rules)}, or [[site]]")
        for name, expected in rules.items():
            if name not in values:
                raise SettingsError(f"{name}: not found, expected {expected}")
        _check("least", values["least"], 1, MAX_PEERS)
        return Peers(tuple(map(_peer, sites)), **values)

    return _parse_file(path, parse, "Create it with `fedhet peers`, from the sites' public files.")


def read_public(path: str | Path) -> Peer:
    """Read a site's public file.

    Raises SettingsError, naming the file and the entry, if it is invalid.
    """
    return _parse_file(path, _peer, "Create it with `fedhet certs DIR --peer NAME`, at the site.")


def read_key(path: str | Path) -> X25519PrivateKey:
    """Read a private key. Raises SettingsError if it is invalid or readable by other users."""
    rule, advice = "an unencrypted private key in PEM format", "fedhet certs DIR --peer NAME"
    try:
        read = partial(load_pem_private_key, password=None)
        key = read_pem(expanded(path), read, rule, secret=True)
    except StateError as error:
        raise SettingsError(f"{error}. Create one with `{advice}`.") from None
    if not isinstance(key, X25519PrivateKey):
        raise SettingsError(f"{path}: expected an X25519 key, as created by `{advice}`")
    return key


def write_peers(path: Path, peers: Peers) -> None:
    """Write a new peers file. Raises SettingsError if the file exists or cannot be written."""
    if os.path.lexists(path):
        raise SettingsError(f"{path}: already exists. Choose another file, or remove it.")
    try:
        write_text(path, peers.to_toml())
    except (OSError, StateError) as error:
        raise SettingsError(f"{path}: cannot write the file ({error_reason(error)})") from None


def write_key(
    directory: Path, name: str, classes: Sequence[str] = (), weight: int = 1
) -> list[Path]:
    """Create a site's key pair: NAME.peer.key, readable only by its owner, and NAME.peer.toml.

    Returns:
        The private and the public file.

    Raises:
        SettingsError: If the name, a class, or the weight is invalid, or if a file exists or cannot
            be written.
    """
    key = X25519PrivateKey.generate()
    values = {"name": name, "key": _public(key).hex(), "classes": list(classes), "weight": weight}
    peer = _peer(values)
    paths = [directory / f"{name}{ending}" for ending in (KEY_ENDING, PUBLIC_ENDING)]
    for path in paths:
        if os.path.lexists(path):
            raise SettingsError(f"{path}: already exists. Remove it to replace the site's key.")
    try:
        folder = Folder(directory, private=True)
        with folder.replacing(paths[0].name, private=True) as temporary:
            temporary.write_bytes(_pem(key))
        write_text(paths[1], "\n".join(_lines(peer)) + "\n")
    except (OSError, StateError) as error:
        raise SettingsError(f"{directory}: cannot write keys ({error_reason(error)})") from None
    return paths


def simulated_peers(
    names: Iterable[str],
    *,
    colluding: int = 1,
    server: Server = "curious",
    classes: Mapping[str, Sequence[str]] | None = None,
    weights: Mapping[str, int] | None = None,
) -> tuple[Peers, dict[str, X25519PrivateKey]]:
    """Return new peers for simulated clients, and their private keys by name.

    The operating system generates the keys, so that the run's seed does not reveal them. Clients
    without an entry in `weights` have the weight 1.
    """
    keys = {name: X25519PrivateKey.generate() for name in names}
    listed, weights = classes or {}, weights or {}
    sites = [
        Peer(name, _public(key), tuple(listed.get(name, ())), weights.get(name, 1))
        for name, key in keys.items()
    ]
    return Peers(tuple(sites), colluding, server=server), keys


def own_key(peers: Peers, name: str, path: str | Path) -> X25519PrivateKey:
    """Read a site's private key. Raises SettingsError unless it matches the peers file."""
    key = read_key(path)
    if peers.peer(name).key != _public(key):
        rule = (
            f"expected the private key that matches '{name}' in the peers file, got a different key"
        )
        raise SettingsError(f"{path}: {rule}")
    return key


def simulated_files(state_dir: str | Path, name: str) -> tuple[str, str]:
    """Return the paths of the peers file and of the key of a simulated client."""
    directory = Path(state_dir) / SIMULATED
    return str(directory / PEERS), str(directory / f"{name}{KEY_ENDING}")


def write_simulated(
    state_dir: Path, peers: Peers, keys: Mapping[str, X25519PrivateKey], within: Path | None = None
) -> None:
    """Write the peers file and all keys of a simulation, unless they exist.

    The peers file is written last, so if it exists, all keys exist. A resumed run keeps its keys.
    Raises StateError if a file cannot be written.
    """
    directory = state_dir / SIMULATED
    if (directory / PEERS).exists():
        return
    folder = Folder(directory, within, private=True)
    for name, key in keys.items():
        with folder.replacing(f"{name}{KEY_ENDING}", private=True) as temporary:
            temporary.write_bytes(_pem(key))
    with folder.replacing(PEERS, private=True) as temporary:
        temporary.write_text(peers.to_toml(), "utf-8")


def class_numbers(text: str) -> list[str]:
    """Parse a list of class numbers such as "0-3,7". Raises SettingsError if it is invalid.

    An en dash is also accepted, because `fedhet peers` prints the classes as `units.spans`.
    """
    numbers: list[int] = []
    for part in filter(None, text.replace(" ", "").replace("–", "-").split(",")):
        match = _CLASS_RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise SettingsError(f"--classes: expected a list such as 0-3,7, got {safe_repr(text)}")
        numbers += range(first, last + 1)
    return [str(number) for number in numbers]


def readable(digest: bytes) -> str:
    """Return a digest in groups of four hexadecimal digits, to be read aloud."""
    text = digest.hex()
    return " ".join(text[start : start + 4] for start in range(0, len(text), 4))


def _parse_file(
    path: str | Path, parse: Callable[[dict[str, Any]], _Parsed], remedy: str
) -> _Parsed:
    """Read and parse a TOML file. Raises SettingsError, naming the file, if it is invalid."""
    try:
        return parse(read_toml_tables(expanded(path)))
    except OSError as error:
        fault = f"{path}: cannot read the file ({error_reason(error)})"
    except StateError as error:
        fault = str(error)
    except SettingsError as error:
        fault = f"{path}: {error}"
    raise SettingsError(f"{fault}. {remedy}")


def _peer(values: Any) -> Peer:
    """Parse the table of a site. Raises SettingsError, naming the entry, if it is invalid."""
    if not isinstance(values, dict):
        raise SettingsError(f"site: expected a table, got {safe_repr(values)}")
    if unknown := sorted(values.keys() - {"name", "key", "classes", "weight"}):
        raise SettingsError(f"site: {unknown[0]}: unknown, expected name, key, classes, or weight")
    name, key, classes = values.get("name"), values.get("key"), values.get("classes", [])
    if not isinstance(name, str):
        raise SettingsError(f"name: expected a string, got {safe_repr(name)}")
    try:
        public = bytes.fromhex(key) if isinstance(key, str) else b""
    except ValueError:
        public = b""
    if not isinstance(classes, list) or len({*map(repr, classes)}) < len(classes):
        raise SettingsError(f"{name}: classes: expected a list without duplicates")
    for each in classes:
        if not isinstance(each, str) or not _CLASS.fullmatch(each):
            rule = f'class numbers such as "0", at most {MAX_CLASSES - 1}'
            raise SettingsError(f"{name}: classes: expected {rule}, got {safe_repr(each)}")
    return Peer(name, public, tuple(sorted(classes, key=int)), values.get("weight", 1))


@lru_cache(maxsize=MAX_PEERS)
def _can_agree(key: bytes) -> bool:
    """Return whether a public key yields a different secret with each private key."""
    if int.from_bytes(key, "little") >= _PRIME:  # The value is a second encoding of a smaller key.
        return False
    try:  # A point of low order yields the same secret with every key.
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def _lines(peer: Peer) -> list[str]:
    classes = json.dumps(list(peer.classes))
    lines = [f'name = "{peer.name}"', f'key = "{peer.key.hex()}"', f"classes = {classes}"]
    return [*lines, f"weight = {peer.weight}"]


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _pem(key: X25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _check(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        rule = f"an integer from {low} to {high}"
        raise SettingsError(f"{name}: expected {rule}, got {safe_repr(value)}")
