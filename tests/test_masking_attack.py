"""An attack on secure aggregation by the server and one of three sites, who know six weights.

All masks of a site but one are known to them: the server unmasks the sum, and the site has its own
key. What remains of the victim's vector is its values plus the mask that it shares with the third
site. From six weights that they know, such as those of a pruned model, they get six words of this
mask, and look for the seed: it was found when the masks came from a generator with a seed of 32
bits. Here, it must not be found, and the same attack must succeed on masks that are made wrong.
"""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedhet.client_runtime.masking import Masking
from fedhet.client_runtime.node import Node
from fedhet.config.resolve import resolve
from fedhet.config.secure import simulated_peers
from fedhet.data.store import RunData
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge
from fedhet.wire.masking import BOX_BYTES, MASKED, REQUEST, REVEAL, SEEDS, SHARES, Layout

NAMES = ["site-0", "site-1", "site-2"]
VALUES, KNOWN, CAP = 500, 6, 100
HEADER = 3  # counters of 64 bits; the weights follow, with 32 bits
FRACTION = 23  # 25 - ceil(log2 3)
TRIED = 2**12  # of the keys that an attacker may guess


def stream(key: bytes, words: int = VALUES) -> np.ndarray:
    """Return the words of a ChaCha20 stream that mask the weights (RFC 8439, nonce 0)."""
    data = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    return np.frombuffer(data.update(bytes(8 * HEADER + 4 * words)), np.uint32)[2 * HEADER :]


def twister(seed: int, words: int = VALUES) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 2**32, words, dtype=np.uint32)


class Transcript:
    """What the server and site-2 see of two rounds, and what they know."""

    def __init__(self, root) -> None:
        self.peers, self.keys = simulated_peers(NAMES, weights=dict.fromkeys(NAMES, CAP))
        rng = np.random.default_rng(7)
        self.sent = {
            (round, name): rng.normal(0, 0.1, VALUES).astype(np.float32)
            for round, name in product((1, 2), NAMES)
        }
        self.public: list[bytes] = [self.peers.digest]
        config = resolve({"method": "fedavg", "clients": 3, "privacy.secure-aggregation": True})
        sites = {}
        for name in NAMES:
            info = ClientInfo(name, "mlp", CAP, 10, "image", (1, 8, 8))
            node = Node(
                name, 0, "", "mlp", config.run.training, "cpu", root, RunData.for_run(config.run),
                peers=self.peers, peers_key=self.keys[name],
            )  # fmt: skip
            sites[name] = Masking(config, node, info)
        self.vectors, self.boxes, self.shares = {}, {}, {}
        self.contexts: dict[int, bytes] = {}  # as site-2 knows them
        for round in (1, 2):
            nonce = bytes([round] * 16)
            request = {REQUEST: json.dumps({"nonce": nonce.hex(), "cohorts": {"0": NAMES}})}
            for name, site in sites.items():
                envelope = Envelope("run", "fedavg", round, name)
                site.begin(envelope, Knowledge({}, {}), request)
                sent = Knowledge({"weights/w": self.sent[round, name]})
                reply = site.masked(envelope, sent).tensors
                site.store(envelope, list(reply.values()))
                self.vectors[round, name] = reply[f"{MASKED}/0"]
                self.boxes[round, name] = reply[f"{SHARES}/0"]
            self.public.append(nonce)
            self.contexts[round] = bytes.fromhex(sites["site-2"]._lanes[0].context)
            for place, name in enumerate(NAMES):
                boxes = b"".join(self.boxes[round, each][place].tobytes() for each in NAMES)
                sampled = json.dumps({"run": "run", "round": round, "survivors": {"0": NAMES}})
                response = sites[name].revealed({REVEAL: sampled, f"{SHARES}/0": boxes})
                assert not response[f"{SEEDS}/0"]
                parts = response[f"{SHARES}/0"]
                size = len(parts) // 3
                for number, owner in enumerate(NAMES):
                    share = int.from_bytes(parts[number * size : (number + 1) * size], "big")
                    self.shares.setdefault((round, owner), {})[place + 1] = share

    def own_mask(self, round: int, name: str) -> np.ndarray:
        """Return PRG(b) of a site, from all shares, by Lagrange interpolation at 0."""
        prime, secret = 2**521 - 1, 0
        points = self.shares[round, name]
        for x, y in points.items():
            weight = 1
            for other in points:
                if other != x:
                    weight = weight * other * pow(other - x, -1, prime) % prime
            secret = (secret + y * weight) % prime
        return stream(secret.to_bytes(32, "big"))

    def colluders_mask(self, round: int) -> np.ndarray:
        """Return the mask that site-0 shares with site-2, which has its key."""
        public = X25519PublicKey.from_public_bytes(self.peers.peer("site-0").key)
        shared = self.keys["site-2"].exchange(public)
        key = HKDF(SHA256(), 32, self.contexts[round], b"fedhet mask").derive(shared)
        return stream(key)

    def rest(self, round: int, *, colluders_mask: bool = True) -> np.ndarray:
        """Return site-0's values plus the mask that it shares with site-1, as fixed point."""
        vector = self.vectors[round, "site-0"][2 * HEADER :] - self.own_mask(round, "site-0")
        return vector - self.colluders_mask(round) if colluders_mask else vector

    def fixed(self, round: int) -> np.ndarray:
        """Return the values of site-0 as fixed point, of which the attacker knows a few."""
        scaled = np.rint(self.sent[round, "site-0"].astype(np.float64) * 2.0**FRACTION)
        return scaled.astype(np.int64).astype(np.uint32)

    def guesses(self):
        """Yield masks [VALUES] of generators and keys that an attacker can guess."""
        for number in range(TRIED):
            yield twister(number, KNOWN), lambda number=number: twister(number)
            for order in ("big", "little"):
                key = number.to_bytes(32, order)
                yield stream(key, KNOWN), lambda key=key: stream(key)
        publics = [peer.key for peer in self.peers.peers]
        known = [*publics, *self.public, *self.contexts.values(), bytes(32)]
        for material, salt in product(known, [*known, None]):
            key = HKDF(SHA256(), 32, salt, b"fedhet mask").derive(material)
            yield stream(key, KNOWN), lambda key=key: stream(key)
            if len(material) == 32:
                yield stream(material, KNOWN), lambda key=material: stream(key)

    def recovered(self) -> float:
        """Attack round 1; return the fraction of unknown values of site-0 that are recovered."""
        rest, values = self.rest(1), self.fixed(1)
        mask = rest[:KNOWN] - values[:KNOWN]  # the words of the shared mask that are known
        for words, whole in self.guesses():
            if np.array_equal(words, mask):
                return float((rest[KNOWN:] - whole()[KNOWN:] == values[KNOWN:]).mean())
        return 0.0

    def difference(self) -> float:
        """Return the fraction of values whose difference between the rounds is recovered."""
        found = self.rest(1) - self.rest(2)
        return float((found == self.fixed(1) - self.fixed(2)).mean())


def test_six_known_weights_reveal_no_other_weight(tmp_path):
    transcript = Transcript(tmp_path)
    # The attackers do know all masks but one: with it, the vector is the site's weights.
    public = X25519PublicKey.from_public_bytes(transcript.peers.peer("site-1").key)
    key = HKDF(SHA256(), 32, transcript.contexts[1], b"fedhet mask")
    mask = stream(key.derive(transcript.keys["site-0"].exchange(public)))
    assert np.array_equal(transcript.rest(1) - mask, transcript.fixed(1))
    assert transcript.recovered() == 0
    assert transcript.difference() < 0.02
    # Nor is anything left of the values in the words: their high bits are as good as drawn.
    high = np.concatenate([transcript.rest(round) >> 28 for round in (1, 2)])
    counts = np.bincount(high, minlength=16)
    expected = len(high) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-squared, 15 degrees of freedom
    unmasked = np.bincount(transcript.fixed(1) >> 28, minlength=16)
    assert ((unmasked - VALUES / 16) ** 2 / (VALUES / 16)).sum() > 1000


def test_attack_finds_a_seed_of_few_bits(tmp_path, monkeypatch):
    derived = Masking._derived

    def weak(self, peer, bound, use):
        key = derived(self, peer, bound, use)
        is_victims = use == "mask" and {self._name, peer} == {"site-0", "site-1"}
        return (int.from_bytes(key[:4], "big") % TRIED).to_bytes(32, "big") if is_victims else key

    monkeypatch.setattr(Masking, "_derived", weak)
    assert Transcript(tmp_path).recovered() == 1


def test_attack_finds_the_seed_of_a_mersenne_twister(tmp_path, monkeypatch):
    add_mask = Layout.add_mask
    derived = Masking._derived
    victims = set()

    def recorded(self, peer, bound, use):
        key = derived(self, peer, bound, use)
        if use == "mask" and {self._name, peer} == {"site-0", "site-1"}:
            victims.add(key)
        return key

    def weak(self, vector, seed, sign):
        if seed not in victims:
            add_mask(self, vector, seed, sign)
            return
        words = twister(int.from_bytes(seed[:4], "big") % TRIED)
        vector[2 * self.wide :] += words if sign > 0 else -words

    monkeypatch.setattr(Masking, "_derived", recorded)
    monkeypatch.setattr(Layout, "add_mask", weak)
    assert Transcript(tmp_path).recovered() == 1


def test_attack_finds_a_key_that_depends_on_public_values_alone(tmp_path, monkeypatch):
    derived = Masking._derived

    def weak(self, peer, bound, use):
        if use == "mask" and {self._name, peer} == {"site-0", "site-1"}:
            return HKDF(SHA256(), 32, bound, b"fedhet mask").derive(bytes(32))
        return derived(self, peer, bound, use)

    monkeypatch.setattr(Masking, "_derived", weak)
    assert Transcript(tmp_path).recovered() == 1


def test_mask_used_twice_reveals_a_difference(tmp_path, monkeypatch):
    derived = Masking._derived

    def weak(self, peer, bound, use):
        is_victims = use == "mask" and {self._name, peer} == {"site-0", "site-1"}
        return derived(self, peer, b"" if is_victims else bound, use)

    monkeypatch.setattr(Masking, "_derived", weak)
    assert Transcript(tmp_path).difference() == 1


def test_secrets_shared_with_a_lost_site_do_not_open_its_shares(tmp_path):
    """The reply of a site that was declared lost may arrive late, when its masks are known."""
    transcript, name = Transcript(tmp_path), "site-0"
    secrets = {}
    for peer in ("site-1", "site-2"):  # both would reveal what they share with site-0
        shared = transcript.keys[peer].exchange(transcript.keys[name].public_key())
        secrets[peer] = HKDF(SHA256(), 32, transcript.contexts[1], b"fedhet mask").derive(shared)
    for place, peer in enumerate(NAMES):
        box = transcript.boxes[1, name][place].tobytes()
        for key in secrets.values():
            for nonce, text in ((box[:12], box[12:]), (bytes(12), box)):
                for extra in (None, b"", transcript.contexts[1]):
                    with pytest.raises(InvalidTag):
                        ChaCha20Poly1305(key).decrypt(nonce, text, extra)
        # The attack is one: with the key of a receiver, its box does open.
        use = f"fedhet share from {name} to {peer}".encode()
        shared = transcript.keys[peer].exchange(transcript.keys[name].public_key())
        key = HKDF(SHA256(), 32, transcript.contexts[1], use).derive(shared)
        share = ChaCha20Poly1305(key).decrypt(box[:12], box[12:], transcript.contexts[1])
        assert int.from_bytes(share, "big") == transcript.shares[1, name][place + 1]


def test_sizes_of_messages_do_not_depend_on_values(tmp_path):
    transcript = Transcript(tmp_path)
    assert {vector.shape for vector in transcript.vectors.values()} == {(2 * HEADER + VALUES,)}
    assert {boxes.shape for boxes in transcript.boxes.values()} == {(3, BOX_BYTES)}
