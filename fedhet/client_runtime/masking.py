"""Client side of secure aggregation: masked replies, and the shares that unmask their sum.

Bonawitz et al., CCS 2017, with keys that the sites exchange in advance (`config.secure`). The
server is not trusted: a site checks each request against its peers file and against its ledger, and
never answers two different requests for the same round. Otherwise, the server could subtract two
vectors with the same mask, or learn both a site's mask and the secrets that the site shares with
other sites.

Each key is derived from the values that all sites of a sum must have in common: the run and its
settings, the public set, the round, the instruction, the cohort, the peers file and the layout of
the vector. If a value differs between two sites, the masks of the sites do not cancel, and the
server learns nothing. Otherwise, a server could send other weights or another learning rate to all
sites but one, and would then know their replies (Pasquini et al., CCS 2022).
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.common import NDArrays, Scalar

from fedhet.algorithms import shamir
from fedhet.base.arrays import Array, Shapes
from fedhet.base.disk import Folder, parse_json
from fedhet.base.errors import MaskingError, StateError, error_text
from fedhet.client_runtime.node import Node
from fedhet.client_runtime.state import ReplyStore
from fedhet.config.resolve import Config
from fedhet.config.secure import DOMINATED
from fedhet.settings.run import PLACE, where_it_ran
from fedhet.wire.contract import Sizes, Sum, TensorField, WeightsField, ids_of
from fedhet.wire.identity import ClientInfo, is_name
from fedhet.wire.knowledge import Envelope, Knowledge
from fedhet.wire.masking import (
    BOX_BYTES,
    COMMITMENT,
    FAULT,
    MASKED,
    NONCE_BYTES,
    REQUEST,
    REVEAL,
    SEEDS,
    SHARES,
    Layout,
    commitment,
    content_digest,
    context,
)

LOG = logging.getLogger("fedhet")
REPLY, REVEALED = "masked reply", "shares"
"""Kinds of replies in the ledger."""
DIFFERS = PLACE | {"early-stopping", "models.pool", "engine.min-samples-per-class"}
"""Settings that may differ between the sites of a round: places, settings that a site replaces with
its own values, and `early-stopping`, which does not affect training and may change on a resume.
The keys depend on the pool of models as the server sent it (`Node.pool`)."""
FOLDER, MAX_LEDGER_BYTES, MAX_REQUEST_BYTES = "_masking", 256 * 2**20, 2**20
"""Directory of the ledgers within the private state (no run has this name), and the maximum sizes
of a ledger and of a request, in bytes."""


@dataclass(frozen=True)
class Lane:
    """Vector of a masked reply, for a cohort that the site has checked."""

    number: int
    cohort: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Classes whose rows are summed, because enough sites of the cohort list these classes."""
    context: str = ""
    """Context from which all keys are derived, in hexadecimal; "" until the layout is known."""
    instruction: bytes = b""
    """Digest of the fields of the instruction that are the same for all sites of the cohort."""


class Masking:
    """Masked replies of one client, and the shares that unmask their sum."""

    def __init__(self, config: Config, node: Node, info: ClientInfo) -> None:
        """Prepare to mask a client's replies.

        Args:
            config: Settings of the run as the server sent them, without the node's own values.
            node: The site, with its peers file and its key.
            info: The client's unfiltered description.
        """
        if node.peers is None or node.peers_key is None:
            raise MaskingError("node-config 'peers': not set, expected a peers file")
        self._peers, self._key, self._name = node.peers, node.peers_key, node.name
        self._contract, self._settings = config.method.spec.replies, config.method_settings
        self._sums = config.method.spec.sums.for_run(config.method_settings, config.run.data.task)
        self._classes, self._weight = info.classes, node.peers.peer(node.name).weight
        self._is_site = node.is_site
        common = {k: v for k, v in config.flat().items() if k not in where_it_ran() | DIFFERS}
        self._run_settings = json.dumps([common, node.pool, info.public], sort_keys=True)
        self._root, self._ledger = node.state_dir, Ledger(node.state_dir, node.name)
        self._lanes: list[Lane] = []
        self._faults: list[str] = []
        """Reasons why this site refuses lanes of the request."""
        self._nonce, self._request = b"", ""
        self._instruction: Mapping[str, Array] = {}
        """Tensors of the instruction."""

    # Masked replies.

    def begin(
        self, envelope: Envelope, instruction: Knowledge, config: Mapping[str, Scalar]
    ) -> NDArrays | None:
        """Check a request for a masked reply, and return the stored reply to the same request.

        Returns None for a new request. Refuses each lane whose cohort violates the rules of the
        peers file. Raises MaskingError if all lanes are refused, or if this site has already
        replied to another request for the round.
        """
        request = _parsed(config.get(REQUEST), {"nonce", "cohorts"})
        nonce, cohorts = request["nonce"], request["cohorts"]
        try:
            self._nonce = bytes.fromhex(nonce)
            numbers = sorted(map(int, cohorts))
            if {*map(str, numbers)} != cohorts.keys():
                raise ValueError("numbers in a different form")
        except (AttributeError, TypeError, ValueError):
            raise MaskingError(f"{REQUEST}: expected a nonce and cohorts") from None
        valid = len(self._nonce) == 16 and numbers and numbers[0] >= 0
        if not valid or numbers[-1] >= len(self._sums):
            raise MaskingError(f"{REQUEST}: expected a nonce of 16 bytes, and cohorts of this run")
        self._lanes, self._faults = [], []
        for number in numbers:
            try:
                lane = self._lane(number, cohorts.get(str(number)))
            except MaskingError as error:
                self._faults.append(str(error))
                continue
            differs = self._sums[number].differs
            tensors = instruction.tensors
            names = [name for name in tensors if name.partition("/")[0] not in differs]
            digest = content_digest({n: tensors[n] for n in names}, instruction.scalars)
            self._lanes.append(replace(lane, instruction=digest))
        if not self._lanes:
            raise MaskingError("; ".join(self._faults))
        self._instruction = instruction.tensors
        digest = content_digest(instruction.tensors, instruction.scalars)
        lanes = json.dumps([[lane.number, lane.cohort] for lane in self._lanes])
        self._request = context(
            *(envelope.run, envelope.round, self._nonce, digest, self._run_settings),
            *(self._peers.digest, lanes),
        ).hex()
        run, round = envelope.run, envelope.round
        stored = self._replies(run).get(round)
        if stored is None and round not in self._ledger.rounds(run, REPLY):
            self._check_new(run, round, REPLY, REVEALED)
            return None
        if stored is None or json.loads(stored[0].tobytes())[0] != self._request:
            raise _repeated(run, round, REPLY)
        # Write the record if it is missing. The process may have been killed before it wrote the
        # record, or the ledger may have been truncated.
        self._ledger.commit(run, round, REPLY, self._request, lambda: None)
        return stored[1:]

    def masked(self, envelope: Envelope, sent: Knowledge, model: str = "") -> Knowledge:
        """Return a reply with one masked vector for each lane that this site does not refuse.

        `model` is the name of the client's architecture. Sites whose replies must depend only on
        common values must have the same architecture.

        If a value is NaN or infinite, the reply contains the values of the instruction, or zeros.
        Whether this site replies must not depend on its samples.

        Raises MaskingError if this site refuses all lanes.
        """
        tensors: dict[str, Array] = {}
        lanes, own = [], {int(label) for label in self._peers.peer(self._name).classes}
        layouts = [
            self._layout(self._sums[lane.number], sent, len(lane.cohort)) for lane in self._lanes
        ]
        summed = [part.name for layout in layouts for part in layout.parts]
        is_finite = all(np.isfinite(sent.tensors[name]).all() for name in summed)
        if not is_finite:
            LOG.warning("%s: reply contains NaN or infinity; sending no change", self._name)
        for lane, layout in zip(self._lanes, layouts, strict=True):
            threshold = self._peers.threshold(len(lane.cohort))
            declared = self._sums[lane.number]
            is_same = declared.within == "architecture" or declared.server == "malicious"
            bound = context(
                *(envelope.run, self._nonce, envelope.round, lane.number, lane.cohort),
                *(self._peers.digest, threshold, layout.describe(), [*map(str, lane.rows)]),
                *(lane.instruction, self._run_settings, model if is_same else ""),
            )
            rows = own.intersection(lane.rows)
            # A site must send a row for each class listed for it in the peers file: if two of three
            # listed sites sent no row, the sum would reveal the third site's row.
            absent = rows - {*sent.tensors[layout.ids].tolist()} if layout.ids else ()
            if self._is_site and absent:
                self._faults.append(
                    "a class that the peers file lists for this site: too few samples, expected at "
                    "least node-config 'min-samples-per-class'. List only classes with enough "
                    "samples."
                )
                continue
            # Two sums that differ by one site would reveal its numbers of samples and batches.
            values = dict(sent.tensors)
            for part in layout.parts:
                value = values[part.name]
                if part.kind == "integer" or not is_finite:
                    zeros = np.zeros_like(value)
                    received = self._instruction.get(part.name, zeros)
                    is_same_type = (received.shape, received.dtype) == (value.shape, value.dtype)
                    is_usable = is_same_type and np.isfinite(received).all()
                    values[part.name] = received if is_usable else zeros
                if part.kind == "totals":
                    values[part.name] = np.full_like(value, self._weight)
            vector, clipped = layout.encode(values, self._weight, self._peers.max_weight, rows)
            if clipped:
                LOG.warning(
                    "%s: round %d: %d values of the reply were clipped, because they exceed the "
                    "range of secure aggregation",
                    *(self._name, envelope.round, clipped),
                )
            secret = secrets.token_bytes(shamir.SECRET_BYTES)
            layout.add_mask(vector, secret, 1)
            shares, boxes = shamir.split(secret, threshold, len(lane.cohort)), []
            for peer, share in zip(lane.cohort, shares, strict=True):
                if peer != self._name:
                    sign = 1 if self._name < peer else -1
                    layout.add_mask(vector, self._derived(peer, bound, "mask"), sign)
                key = self._derived(peer, bound, f"share from {self._name} to {peer}")
                nonce = secrets.token_bytes(NONCE_BYTES)
                box = nonce + ChaCha20Poly1305(key).encrypt(nonce, share, bound)
                boxes.append(np.frombuffer(box, np.uint8))
            tensors[f"{MASKED}/{lane.number}"] = vector
            tensors[f"{SHARES}/{lane.number}"] = np.stack(boxes)
            tensors[f"{COMMITMENT}/{lane.number}"] = np.stack(
                [commitment("seed", secret), *(commitment("share", share) for share in shares)]
            )
            lanes.append(replace(lane, context=bound.hex()))
        if not lanes:
            raise MaskingError("; ".join(self._faults))
        self._lanes = lanes
        return Knowledge(tensors, {FAULT: "; ".join(self._faults)} if self._faults else {})

    def store(self, envelope: Envelope, arrays: NDArrays) -> NDArrays:
        """Store a masked reply before it is sent, and return the reply to send.

        If another process has stored a reply to the same request, returns that reply, because two
        different vectors with the same mask must never be sent. Raises MaskingError if the ledger
        records another request for the round.
        """
        run, round, replies = envelope.run, envelope.round, self._replies(envelope.run)
        lanes = [[lane.number, lane.cohort, lane.rows, lane.context] for lane in self._lanes]
        record = np.frombuffer(json.dumps([self._request, lanes]).encode(), np.uint8)

        def put_reply() -> None:
            replies.put(round, [record, *arrays])

        if self._ledger.commit(run, round, REPLY, self._request, put_reply):
            return arrays
        if (stored := replies.get(round)) is None:
            raise _repeated(run, round, REPLY)
        return stored[1:]

    # Shares that unmask a sum.

    def revealed(self, config: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return shares of surviving sites' masks, and the secrets shared with lost sites.

        Reveals nothing for a lane with too few survivors, except the reason. Raises MaskingError if
        all lanes have too few survivors, if a list of survivors violates the rules, or if this site
        has revealed shares for another request for the round.

        `config` contains the run, the round, and the survivors of each lane in JSON, and for each
        lane the encrypted shares for this site, in the order of the survivors.
        """
        request = _parsed(config.get(REVEAL), {"run", "round", "survivors"})
        run, round, listed = request["run"], request["round"], request["survivors"]
        valid = isinstance(run, str) and is_name(run) and isinstance(listed, dict)
        if not valid or type(round) is not int:
            raise MaskingError(f"{REVEAL}: expected a run, a round, and survivors")
        stored = self._replies(run).get(round)
        if stored is None or round not in self._ledger.rounds(run, REPLY):
            raise MaskingError(f"{REVEAL}: this site sent no masked reply in round {round}")
        lanes: dict[str, Lane] = {}
        for number, cohort, rows, key_context in json.loads(stored[0].tobytes())[1]:
            lanes[str(number)] = Lane(number, tuple(cohort), tuple(rows), key_context)
        survivors = {
            number: self._survivors(lanes.get(number), names) for number, names in listed.items()
        }
        faults = {number: self._fault(lanes[number], names) for number, names in survivors.items()}
        if all(faults.values()):
            raise MaskingError(f"{REVEAL}: survivors: {next(iter(faults.values()), 'no lanes')}")
        boxes: dict[str, bytes] = {}
        for number, names in survivors.items():
            box = config.get(f"{SHARES}/{number}")
            if not isinstance(box, bytes) or len(box) != BOX_BYTES * len(names):
                raise MaskingError(f"{SHARES}/{number}: expected one share from each survivor")
            boxes[number] = box
        digest = context(run, round, json.dumps(survivors), *boxes.values()).hex()
        known, told = self._replies(run, REVEALED), digest.encode()
        if (before := known.get(round)) is None:
            self._check_new(run, round, REVEALED)
        elif before[0].tobytes() != told:
            raise _repeated(run, round, REVEALED)
        self._ledger.commit(
            *(run, round, REVEALED, digest),
            lambda: known.put(round, [np.frombuffer(told, np.uint8)]),
        )
        answer: dict[str, Scalar] = {FAULT: "; ".join(sorted({*faults.values()} - {""}))}
        for number, names in survivors.items():
            if faults[number]:
                continue
            bound, shares = bytes.fromhex(lanes[number].context), b""
            for position, peer in enumerate(names):
                key = self._derived(peer, bound, f"share from {peer} to {self._name}")
                box = boxes[number][position * BOX_BYTES : (position + 1) * BOX_BYTES]
                try:
                    share = ChaCha20Poly1305(key).decrypt(
                        box[:NONCE_BYTES], box[NONCE_BYTES:], bound
                    )
                except InvalidTag:  # The server may not need the share, so do not fail.
                    share = bytes(shamir.SHARE_BYTES)
                shares += share
            lost = (peer for peer in lanes[number].cohort if peer not in names)
            answer[f"{SHARES}/{number}"] = shares
            answer[f"{SEEDS}/{number}"] = b"".join(self._derived(n, bound, "mask") for n in lost)
        return answer

    # Helpers for the methods above.

    def _lane(self, number: int, cohort: Any) -> Lane:
        """Return a cohort's lane. Raises MaskingError if the cohort violates the peers file."""
        names, peers, lane = _names(cohort, f"{REQUEST}: cohort"), self._peers, self._sums[number]
        if peers.server == "malicious" != lane.server:
            raise MaskingError(
                f"the sum of {', '.join(lane.fields)} protects a site only from a server that "
                "follows the protocol, but the peers file requires protection from a malicious "
                'server. Use another method, or a peers file with server = "curious".'
            )
        if strangers := sorted({*names} - {*peers.names}):
            raise MaskingError(
                f"{REQUEST}: cohort: expected sites in the peers file, got {', '.join(strangers)}"
            )
        if self._name not in names:
            raise MaskingError(
                f"{REQUEST}: cohort: expected a list that includes this site, {self._name}"
            )
        if len(names) < (least := peers.least if lane.within == "all" else peers.smallest):
            raise MaskingError(
                f"{REQUEST}: cohort: expected at least {least} sites, got {len(names)}"
            )
        if peers.is_dominated(names):
            raise MaskingError(f"{REQUEST}: cohort: {DOMINATED}")
        rows: list[int] = []
        if any(ids_of(self._contract, f) for f in self._contract.fields if f.name in lane.fields):
            present = ((c, sites.intersection(names)) for c, sites in peers.holders.items())
            rows = sorted(
                label
                for label, sites in present
                if len(sites) >= peers.smallest and not peers.is_dominated(sites)
            )
        return Lane(number, names, tuple(rows))

    def _survivors(self, lane: Lane | None, listed: Any) -> tuple[str, ...]:
        """Return the survivors of a lane. Raises MaskingError if the list is invalid."""
        if lane is None:
            raise MaskingError(
                f"{REVEAL}: unknown lane, expected only lanes of this site's masked reply"
            )
        names = _names(listed, f"{REVEAL}: survivors")
        if self._name not in names or not {*lane.cohort}.issuperset(names):
            raise MaskingError(
                f"{REVEAL}: survivors: expected sites of the cohort, including {self._name}"
            )
        return names

    def _fault(self, lane: Lane, names: tuple[str, ...]) -> str:
        """Return the reason why a lane has too few survivors, or "" if it has enough."""
        sites, smallest = len(lane.cohort), self._peers.smallest
        if len(names) < (threshold := self._peers.threshold(sites)):
            return f"expected at least {threshold} of {sites} sites, got {len(names)}"
        if self._peers.is_dominated(names):
            return DOMINATED
        for label in lane.rows:
            holders = self._peers.holders.get(label, set()).intersection(names)
            if len(holders) < smallest:
                rule = f"expected at least {smallest} sites that list class {label}"
                return f"{rule}, got {len(holders)}"
            if self._peers.is_dominated(holders):
                return f"class {label}: {DOMINATED}"
        return ""

    def _layout(self, lane: Sum, sent: Knowledge, sites: int) -> Layout:
        """Return the layout of a lane, with the sizes of the reply's tensors."""
        axes: dict[str, int] = {}
        models: dict[str, Shapes] = {}
        for field in (each for each in self._contract.fields if each.name in lane.fields):
            if isinstance(field, WeightsField):
                models[field.name] = {
                    name: (value.shape, value.dtype.name)
                    for name, value in sent.group(field.name).items()
                }
            elif isinstance(field, TensorField):
                sizes = zip(field.axes, sent.tensors[field.name].shape, strict=True)
                axes |= {axis: size for axis, size in sizes if isinstance(axis, str)}
        axes["C"] = self._classes
        return Layout.for_reply(lane, self._contract, Sizes(axes, models), sites, self._settings)

    def _derived(self, peer: str, bound: bytes, use: str) -> bytes:
        """Return a key of 32 bytes that only this site and the peer can derive."""
        public = X25519PublicKey.from_public_bytes(self._peers.peer(peer).key)
        shared = self._key.exchange(public)
        return HKDF(SHA256(), 32, bound, f"fedhet {use}".encode()).derive(shared)

    def _replies(self, run: str, kind: str = REPLY) -> ReplyStore:
        return ReplyStore(self._root, run, self._name, kind.partition(" ")[0])

    def _check_new(self, run: str, round: int, *kinds: str) -> None:
        """Raise MaskingError if this site has stored a reply for this round or a later round.

        A site replies to rounds in ascending order. The stored replies of the last rounds therefore
        suffice to detect a second request, even if the ledger lost lines or comes from a backup.
        """
        if (newest := max(self._replies(run, kind).newest() for kind in kinds)) >= round:
            raise MaskingError(
                f"round {round} of run {run}: expected a round after {newest}, because this site "
                "accepts rounds only in ascending order"
            )


class Ledger:
    """Record of the requests that a site has answered in all runs, with one JSON list per line.

    A line is written and synced before the reply is sent. A site that loses its ledger must replace
    its key, because without a ledger, it could answer a second request for the same round.
    """

    def __init__(self, root: Path, client: str) -> None:
        self._folder = Folder(root / FOLDER, root, private=True)
        self._name, self.path = f"{client}.jsonl", root / FOLDER / f"{client}.jsonl"

    def rounds(self, run: str, kind: str) -> set[int]:
        """Return the rounds of a run in which a request of the given kind was answered."""
        if not self.path.exists():
            return set()
        with self.path.open("rb") as file:
            requests = self._parsed(file.read(MAX_LEDGER_BYTES + 1))
        return {each[1] for each in requests if (each[0], each[2]) == (run, kind)}

    def commit(
        self, run: str, round: int, kind: str, digest: str, write: Callable[[], None]
    ) -> bool:
        """Record that a request is answered, and sync the record to disk before returning.

        Returns False if the same request is already recorded. Otherwise, calls `write` before the
        record is written. Raises MaskingError if another request for the round is recorded, and
        StateError if the file is damaged or cannot be written.
        """
        with self._folder.appending(self._name, MAX_LEDGER_BYTES) as (content, append):
            if (known := self._parsed(content).get((run, round, kind))) is not None:
                if known != digest:
                    raise _repeated(run, round, kind)
                return False
            write()
            append(f"{json.dumps([run, round, kind, digest])}\n".encode())
        return True

    def _parsed(self, content: bytes) -> dict[tuple[str, int, str], str]:
        """Return the digests of all complete lines; no reply was sent for an incomplete line."""
        requests: dict[tuple[str, int, str], str] = {}
        try:
            if len(content) > MAX_LEDGER_BYTES:
                raise ValueError("too large")
            for line in content[: content.rfind(b"\n") + 1].splitlines():
                run, round, kind, digest = json.loads(line)
                requests[run, round, kind] = digest
        except (ValueError, TypeError, RecursionError) as error:
            raise StateError(
                f"{self.path}: damaged ({error_text(error)}), so this site sends no masked reply. "
                "Replace the site's key with `fedhet certs DIR --peer NAME`, and remove the file."
            ) from None
        return requests


def _repeated(run: str, round: int, kind: str) -> MaskingError:
    return MaskingError(
        f"round {round} of run {run}: expected the same request as before, because this "
        f"site has already sent its {kind}, got a different request"
    )


def _parsed(text: Scalar | None, keys: set[str]) -> dict[str, Any]:
    """Parse a JSON object with exactly the given keys. Raises MaskingError if it is invalid."""
    try:
        if not isinstance(text, str) or len(text) > MAX_REQUEST_BYTES:
            raise ValueError("not a text")
        value = parse_json(text)
        if not isinstance(value, dict) or value.keys() != keys:
            raise ValueError("other keys")
    except (ValueError, RecursionError):
        expected = f"JSON with {', '.join(sorted(keys))}"
        raise MaskingError(
            f"expected {expected} from the server ('privacy.secure-aggregation')"
        ) from None
    return value


def _names(listed: Any, where: str) -> tuple[str, ...]:
    """Return listed names as a tuple. Raises MaskingError unless they are sorted and unique."""
    valid = isinstance(listed, list) and all(isinstance(name, str) for name in listed)
    if not valid or listed != sorted({*listed}):
        raise MaskingError(f"{where}: expected a sorted list of distinct names")
    return tuple(listed)
