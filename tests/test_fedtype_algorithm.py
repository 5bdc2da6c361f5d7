"""FedType's Algorithm 1, transcribed from the paper, against a client's round.

Epochs are one full batch with plain SGD, the models have no batch norm or dropout, and u is fixed.
No random draw and no order of samples matters.
"""

import copy
import math

import pytest
import torch
from federation import small
from rounds import opened, state_of, step

from fedhet.base.arrays import grouped
from fedhet.models import build
from fedhet.wire.knowledge import Knowledge

RATE = 0.05
EPOCHS = 3
U = 0.4
USUAL = {
    "clients": 3,
    "max-samples": 400,
    "models": "mlp2",
    "local-epochs": EPOCHS,
    "batch-size": 1000,
    "optimizer": "sgd",
    "momentum": 0.0,
    "lr": RATE,
    "alpha": 0.3,
    "fedtype.proxy": "mlp",
    "fedtype.calibrate-on": "held",
    "fedtype.proxy-loss": "kl",
    "fedtype.u": U,
    "fedtype.lambda": 0.05,
    "fedtype.theta": 0.1,
}


def log_softmax(row):
    return [z - math.log(sum(math.exp(other) for other in row)) for z in row]


def temperature(logits, labels):
    """Appendix F: ten steps of SGD with rate 0.01 on the mean likelihood, starting at 1.3."""
    found = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    for _ in range(10):
        lost = torch.zeros((), dtype=torch.float64)
        for row, label in zip(logits, labels, strict=True):
            scaled = torch.tensor(row, dtype=torch.float64) / found
            lost = lost + torch.log(torch.exp(scaled).sum()) - scaled[label]
        (slope,) = torch.autograd.grad(lost / len(labels), found)
        found = (found - 0.01 * slope).detach().requires_grad_()
    return float(found)


def scores(row, heat, penalty, k_reg):
    """Eq. 6: pi u + rho + g (o - k_reg)^+ of every label."""
    shares = [math.exp(value) for value in log_softmax([z / heat for z in row])]
    found = []
    for share in shares:
        above = sum(other for other in shares if other > share)
        rank = sum(other >= share for other in shares)
        found.append(share * U + above + penalty * max(rank - k_reg, 0))
    return found


def threshold(logits, labels, heat, penalty, k_reg, theta, quantile):
    """Return the 1 - theta quantile of the true labels' scores, or Appendix B's with n + 1."""
    own = sorted(
        scores(row, heat, penalty, k_reg)[label] for row, label in zip(logits, labels, strict=True)
    )
    if quantile == "plain":
        return own[math.ceil(round((len(own) - 1) * (1 - theta), 9))]
    place = math.ceil(round((len(own) + 1) * (1 - theta), 9))
    return own[place - 1] if place <= len(own) else math.inf


def prediction_set(row, heat, tau, penalty, k_reg):
    found = {k for k, s in enumerate(scores(row, heat, penalty, k_reg)) if s <= tau}
    return found or {max(range(len(row)), key=lambda k: row[k])}


class Paper:
    """Algorithm 1 on one client, and the training of its proxy with one of four aggregations."""

    def __init__(self, client, proxy, before, chosen):
        self.client, self.chosen = client, chosen
        self.server = copy.deepcopy(proxy).double()
        self.w, self.p = copy.deepcopy(client.models["private"]).double(), proxy.double()
        self.start = [q.detach().clone() for q in self.p.parameters()]
        self.copy = [q.detach().clone() for q in self.p.parameters()]
        self.before = before
        held = chosen.get("calibrate-on", "held") == "held"
        y = (torch.cat([client.y, client.held_out.y]) if held else client.y).tolist()
        assert not held or len(client.held_out) < len(client.y) / 2
        every = range(client.info.classes)
        self.labels = sorted(set(y)) if chosen.get("labels", "own") == "own" else list(every)
        self.lam, self.theta, self.k_reg = 0.05, 0.1, chosen.get("k-reg", 1)

    def own_logits(self, model, x):
        return model(x.double())[:, self.labels].tolist()

    def calibrate(self):
        held = self.chosen.get("calibrate-on", "held") == "held"
        data = self.client.held_out if held else self.client
        x, y = data.x, data.y.tolist()
        places = [self.labels.index(label) for label in y]
        self.calibrated = []
        for model in (self.teacher, self.w):
            logits = self.own_logits(model, x)
            heat = temperature(logits, places)
            quantile = self.chosen.get("quantile", "plain")
            tau = threshold(logits, places, heat, self.lam, self.k_reg, self.theta, quantile)
            self.calibrated.append((heat, tau))
        right = self.teacher(x.double()).argmax(1).tolist()
        accuracy = sum(a == b for a, b in zip(right, y, strict=True)) / len(y)
        change = 0.0 if self.before is None else accuracy - self.before
        self.g = self.lam * change - change + self.lam if change < 0 else self.lam
        if self.chosen.get("g") == "g2":
            self.g = self.lam
        self.g_of_w = self.g if self.chosen.get("shrinks") == "both" else self.lam
        self.before = accuracy

    def sets_of(self, own, other):
        """Return L from the private model's logits for a sample, and S from the proxy's logits."""
        if self.chosen.get("backward") == "topk":
            ranked = [sorted(range(len(r)), key=lambda k: -r[k])[:3] for r in (own, other)]
            return set(ranked[0]), set(ranked[1])
        (p_heat, p_tau), (w_heat, w_tau) = self.calibrated
        return (
            prediction_set(own, w_heat, w_tau, self.g_of_w, self.k_reg),
            prediction_set(other, p_heat, p_tau, self.g, self.k_reg),
        )

    @property
    def teacher(self):
        return self.server if self.chosen.get("teacher") == "global" else self.p

    def backward(self, own, proxy):
        """Compute Eq. 3 for every sample from the private model's logits, with gradient."""
        kind = self.chosen.get("backward", "conformal")
        total = torch.zeros((), dtype=torch.float64)
        if kind == "none":
            return total
        for row, said in zip(own, proxy.detach(), strict=True):
            if kind == "symmetric":
                total = total + (said.softmax(0) * (said.softmax(0) / row.softmax(0)).log()).sum()
                continue
            mine, theirs = row[self.labels], said[self.labels]
            small, large = self.sets_of(mine.tolist(), theirs.tolist())
            common = len(large & small)
            eta = common / (len(large | small) if len(large) >= len(small) else len(large))
            if self.chosen.get("eta") == "one":
                eta = 1.0
            phi = torch.exp(mine).sum()
            inside = sum(torch.log(torch.exp(mine[k]) / phi) for k in large)
            if self.chosen.get("set-loss", "mean") == "mean":
                inside = inside / len(large)
            total = total - eta * inside
        return total / len(own)

    def forward(self, x, target):
        """Compute Eq. 1 or the published code's loss, and the aggregation's term."""
        own = self.p(x).softmax(1)
        loss = (target * (target / own).log()).sum(1).mean()
        if self.chosen.get("proxy-loss") == "ce+kl":
            rows = torch.arange(len(x))
            loss = loss / 10 - own[rows, self.client.y].log().mean()
        anchor, weight = {"fedprox": (self.start, 0.3), "pfedme": (self.copy, 15.0)}.get(
            self.chosen.get("aggregation"), (self.start, 0.0)
        )
        far = sum(((q - a) ** 2).sum() for q, a in zip(self.p.parameters(), anchor, strict=True))
        return loss + weight / 2 * far

    def descend(self, model, loss):
        step(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), RATE)

    def epoch(self):
        if self.chosen.get("backward", "conformal") == "conformal":
            self.calibrate()
        x, y = self.client.x.double(), self.client.y
        own = self.w(x)
        target = own.detach().softmax(1)
        if self.chosen.get("aggregation") == "pfedme":
            for _ in range(4 - 1):
                self.descend(self.p, self.forward(x, target))
        supervised = -torch.log(own.softmax(1)[torch.arange(len(y)), y]).mean()
        private = supervised + self.backward(own, self.teacher(x))
        if self.chosen.get("order") == "alternating":
            self.descend(self.w, private)
            target = self.w(x).detach().softmax(1)
            self.descend(self.p, self.forward(x, target))
        else:
            proxy = self.forward(x, target)
            self.descend(self.w, private)
            self.descend(self.p, proxy)
        with torch.no_grad():
            for mine, q in zip(self.copy, self.p.parameters(), strict=True):
                mine -= 0.02 * 15.0 * (mine - q)


VARIANTS = [
    {},
    {"set-loss": "sum"},
    {"quantile": "corrected"},
    {"labels": "all"},
    {"labels": "all", "k-reg": 3},
    {"eta": "one"},
    {"g": "g2"},
    {"shrinks": "both"},
    {"backward": "topk"},
    {"backward": "symmetric"},
    {"backward": "none"},
    {"mode": "evaluation"},
    {"teacher": "global"},
    {"teacher": "global", "backward": "symmetric"},
    {"proxy-loss": "ce+kl"},
    {"order": "alternating"},
    {"calibrate-on": "training"},
    {"calibrate-on": "training", "order": "alternating", "proxy-loss": "ce+kl"},
    {"calibrate-on": "training", "proxy-loss": "ce+kl"},
    {"calibrate-on": "training", "proxy-loss": "ce+kl", "teacher": "global"},
    {"aggregation": "fedprox", "prox-mu": 0.3},
    {"aggregation": "pfedme", "moreau-steps": 4, "moreau-rate": 0.02},
]


def started(directory, chosen):
    """Return a client with method settings, a proxy, and the instruction that sends the proxy."""
    config = small("fedtype", **{**USUAL, **{f"fedtype.{k}": v for k, v in chosen.items()}})
    client = opened(config, directory)
    client.state.metadata["proxy_accuracy"] = 1.0  # so that Eq. 7 sees a loss of accuracy
    proxy = build("mlp", client.info.shape, client.info.classes, seed=7)
    return client, proxy, Knowledge(grouped("proxy", state_of(proxy)))


@pytest.mark.parametrize(
    "chosen", VARIANTS, ids=lambda v: "-".join(map(str, v.values())) or "as-is"
)
def test_round_equals_algorithm_1(tmp_path, chosen):
    client, proxy, sent = started(tmp_path, chosen)
    paper = Paper(client, proxy, 1.0, chosen)
    for _ in range(EPOCHS):
        paper.epoch()
    reply = client.train(1, sent).group("proxy")
    for ours, theirs in zip(client.network.parameters(), paper.w.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)
    expected = paper.copy if chosen.get("aggregation") == "pfedme" else paper.p.parameters()
    for ours, theirs in zip(reply.values(), expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours).double(), theirs, rtol=1e-4, atol=1e-6)


def test_variants_differ_from_one_another(tmp_path):
    """Each variant must change the round; a switch without effect would pass the test above."""
    ends = []
    for number, chosen in enumerate(VARIANTS):
        client, _, sent = started(tmp_path / str(number), chosen)
        client.train(1, sent)
        kinds = [model.state_dict() for model in client.models.values()]
        ends.append(torch.cat([tensor.flatten() for kind in kinds for tensor in kind.values()]))
    alike = {(i, j) for i in range(len(ends)) for j in range(i) if torch.equal(ends[i], ends[j])}
    # Models without batch norm or dropout are the same in both modes.
    assert alike == {(VARIANTS.index({"mode": "evaluation"}), 0)}
