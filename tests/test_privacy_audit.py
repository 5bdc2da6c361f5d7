"""An attack on the replies of private clients, which bounds epsilon from below.

Thomas Steinke, Milad Nasr and Matthew Jagielski, Privacy Auditing with One (1) Training Run,
NeurIPS 2023. A coin flip decides for each of M canaries whether it is a sample of the client. The
attacker knows all canaries, the settings, and the replies, and guesses the canaries of which it is
most certain. More correct guesses than an (epsilon, delta)-private client allows refute the claim.
"""

import io

import numpy as np
import pytest
import scipy.stats
import torch
from federation import SMALL, Server, client_of, settings
from torch.nn import functional as F

from fedhet import models
from fedhet.client_runtime.privacy import DifferentialPrivacy
from fedhet.config.resolve import resolve
from fedhet.data.dataset import Split
from fedhet.models import load_weights
from fedhet.privacy.accounting import Noise
from fedhet.wire.knowledge import decode

pytestmark = pytest.mark.slow

CANARIES, GUESSES, CLASSES, DELTA = 400, 120, 10, 1e-5
CLAIM = 2.0
CONFIDENCE = 0.95


def p_value(guesses, right, epsilon, delta, canaries):
    """Bound the probability of this many correct guesses (Theorem 5.2; code of Appendix D)."""
    share = 1 / (1 + np.exp(-epsilon))
    beta = scipy.stats.binom.sf(right - 1, guesses, share)
    alpha, total = 0.0, 0.0
    for i in range(1, right + 1):
        total += scipy.stats.binom.pmf(right - i, guesses, share)
        alpha = max(alpha, total / i)
    return min(1.0, beta + 2 * canaries * delta * alpha)


def lower_bound(guesses, right, delta=DELTA, canaries=CANARIES):
    """Return the largest epsilon that is refuted with confidence CONFIDENCE."""
    low, high = 0.0, 20.0
    if p_value(guesses, right, low, delta, canaries) > 1 - CONFIDENCE:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if p_value(guesses, right, middle, delta, canaries) <= 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def test_bound_equals_that_of_guessing():
    assert lower_bound(100, 50) == 0.0
    assert lower_bound(100, 100, delta=0.0) == pytest.approx(3.49, abs=0.03)  # 0.05 ** 0.01
    assert lower_bound(100, 90) < lower_bound(100, 95) < lower_bound(200, 190)


def canaries(seed):
    """Return random images and classes, and a mask of the samples that the client has."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (CANARIES, 1, 8, 8)).astype(np.uint8)
    y = np.arange(CANARIES) % CLASSES
    return torch.tensor(x), torch.tensor(y), rng.random(CANARIES) < 0.5


def sent(method, x, y, tmp_path, epochs, own):
    """Return the reply of a client with only these samples in one round of `method`."""
    chosen = {
        **SMALL, **settings(method, clients=2, rounds=1, models=["mlp"]), **own,
        "training.local-epochs": epochs, "training.batch-size": 32, "privacy.delta": DELTA,
    }  # fmt: skip
    server = Server(resolve({"training.lr": 3e-3, **chosen, "privacy.epsilon": CLAIM}), tmp_path)
    instructions = server.instruct(1)
    client = client_of(instructions[0][0])
    client.samples.own = Split(x, y)
    result = server.train(instructions[:1])[0][1]
    assert "error" not in result.metrics, result.metrics
    arrays = [np.load(io.BytesIO(tensor)) for tensor in result.parameters.tensors]
    return decode(arrays, "test")[1], client


def by_loss(model, x, y):
    """Return a score per sample that rises with lower loss, and thus with training on it."""
    with torch.no_grad():
        logits = model.eval()(x.float() / 127.5 - 1)
    return -F.cross_entropy(logits, y, reduction="none").numpy()


def attack_fedavg(x, y, tmp_path):
    def score(present):
        knowledge, client = sent("fedavg", x[present], y[present], tmp_path, 40, {})
        model = load_weights(client.build_model(), knowledge.group("weights"))
        return by_loss(model, x, y)

    return score


def attack_fedtype(x, y, tmp_path):
    own = {"fedtype.backward": "symmetric", "fedtype.labels": "all", "fedtype.proxy": "mlp"}
    own["fedtype.calibration"] = 0.01

    def score(present):
        knowledge, _ = sent("fedtype", x[present], y[present], tmp_path, 40, own)
        model = load_weights(
            models.build("mlp", (1, 8, 8), CLASSES, seed=0), knowledge.group("proxy")
        )
        return by_loss(model, x, y)

    return score


def attack_felo(x, y, tmp_path):
    """Solve the class sums for the number of times that they contain each canary.

    The extractor is almost untrained, so the attacker knows each canary's features.
    """
    own = {"felo.share-weights": False, "training.lr": 1e-12, "privacy.class-noise": NOISE}

    def score(present):
        knowledge, client = sent("felo", x[present], y[present], tmp_path, 1, own)
        with torch.no_grad():
            found = client.network.eval().extractor(x.float() / 127.5 - 1).numpy()
        features = found * np.minimum(1, 5.0 / np.linalg.norm(found, axis=1))[:, None]
        scores, tensors = np.full(CANARIES, 0.5), knowledge.tensors
        for row, label in enumerate(tensors["classes"]):
            of_class = np.flatnonzero(y.numpy() == label)
            total = tensors["features"][row] * tensors["counts"][row]
            scores[of_class] = np.linalg.lstsq(features[of_class].T, total, rcond=None)[0]
        return scores

    return score


NOISE = 6.0
ATTACKS = {"fedavg": attack_fedavg, "felo": attack_felo, "fedtype": attack_fedtype}


def right_guesses(method, tmp_path, seed):
    x, y, present = canaries(seed)
    scores = ATTACKS[method](x, y, tmp_path)(present)
    order = np.argsort(scores + 1e-9 * np.random.default_rng(seed).normal(size=CANARIES))
    absent, included = order[: GUESSES // 2], order[-GUESSES // 2 :]
    return int(present[included].sum() + (~present[absent]).sum())


@pytest.mark.parametrize("method", ATTACKS)
def test_attack_does_not_refute_the_claimed_epsilon(method, tmp_path):
    right = right_guesses(method, tmp_path, 5)
    assert lower_bound(GUESSES, right) < CLAIM


@pytest.mark.parametrize("method", ATTACKS)
def test_attack_refutes_the_claim_without_noise(method, tmp_path, monkeypatch):
    monkeypatch.setattr(DifferentialPrivacy, "noise", Noise(1e-9, 1e-9, 1e-9))
    monkeypatch.setattr(DifferentialPrivacy, "_check", lambda *_: None)
    right = right_guesses(method, tmp_path, 5)
    assert lower_bound(GUESSES, right) > 1.25 * CLAIM
