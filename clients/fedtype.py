"""FedType, client half: Algorithm 1, uncertainty-based asymmetrical reciprocity learning.

Jiaqi Wang, Chenxu Zhao, Lingjuan Lyu, Quanzeng You, Mengdi Huai and Fenglong Ma, Bridging Model
Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical Reciprocity Learning, ICML
2024.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.base import HetClient
from fedhet.algorithms.conformal import (
    Calibration,
    Raps,
    calibrate,
    consensus,
    dynamic_penalty,
    imitation_loss,
    prediction_sets,
    top_sets,
)
from fedhet.algorithms.distillation import distillation_loss
from fedhet.algorithms.proxies import (
    LEAST_SCALE,
    MoreauProxy,
    ProximalProxy,
    Proxy,
    VariationalProxy,
)
from fedhet.arrays import Array, grouped
from fedhet.data import Split
from fedhet.errors import KnowledgeError
from fedhet.models import HetModel, build, load_weights
from fedhet.seeding import derive, numpy_rng
from fedhet.training import Optimization, logits_of
from fedhet.wire.contract import Contract, ScalarField, WeightsField
from fedhet.wire.knowledge import Knowledge
from strategies.fedtype import FedTypeSettings


class FedTypeClient(HetClient):
    """Trains a private model and a proxy on each other; only the proxy is sent."""

    settings: FedTypeSettings
    sends = Contract(
        (
            WeightsField("proxy", "the proxy's weights; of a variational one, the means"),
            WeightsField(
                "scale",
                "a variational proxy's standard deviations",
                required=False,
                low=LEAST_SCALE,
            ),
            ScalarField("eta", float, "mean consensus weight", required=False, low=0, high=1),
            ScalarField("proxy_set", float, "mean size of the proxy's sets", required=False, low=0),
            ScalarField(
                "private_set", float, "mean size of the private model's sets", required=False, low=0
            ),
            ScalarField("tau", float, "the proxy's threshold, if finite", required=False, low=0),
        )
    )

    def prepare(self) -> None:
        """Split D' from D: 7:2:1 of the client's samples for training, test and calibration."""
        everything = len(self.y) + len(self.tests.get("personal", ()))
        count = max(1, round(self.settings.calibration * everything))
        count = min(count, len(self.y) - 2)
        order = numpy_rng(self.run.seed, "calibration", self.info.name).permutation(len(self.y))
        held, rest = (
            torch.tensor(part.copy(), device=self.compute.device)
            for part in (order[:count], order[count:])
        )
        self.held_out = Split(self.x[held], self.y[held])
        self.samples.own = Split(self.x[rest], self.y[rest])

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model and the proxy."""
        return {"private": self.build_model(), "proxy": self._new_proxy()}

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model, the proxy, and the server's proxy as last received."""
        models = dict(self.models)
        if weights := knowledge.group("proxy"):
            models["global"] = self.placed(self._new_proxy(), weights)
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run Algorithm 1, starting from the server's proxy."""
        load_weights(self.models["proxy"], knowledge.group("proxy"))
        proxy = self._proxy(round, knowledge)
        learning = Reciprocity(self, proxy, round)
        for epoch in range(self.training.local_epochs):
            learning.run_epoch(epoch)
        return Knowledge(self._upload(proxy), learning.figures())

    def _new_proxy(self) -> HetModel:
        return build(self.settings.proxy, self.info.shape, self.info.classes, seed=self.run.seed)

    def _proxy(self, round: int, knowledge: Knowledge) -> Proxy:
        """Return the proxy, with the training that its kind of aggregation needs."""
        model, chosen = self.models["proxy"], self.settings
        anchor = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        match chosen.aggregation:
            case "fedprox":
                return ProximalProxy(model, anchor, chosen.prox_mu)
            case "pfedme":
                return MoreauProxy(model, anchor, chosen.moreau_lambda, chosen.moreau_rate)
            case "pfedbayes":
                seed = derive(self.run.seed, self.info.name, round, "weights")
                return VariationalProxy(
                    model, anchor, self._scale(knowledge), chosen.bayes_zeta, seed
                )
        return Proxy(model, anchor)

    def _scale(self, knowledge: Knowledge) -> dict[str, Tensor]:
        """Return a variational proxy's standard deviations. Raises KnowledgeError if missing."""
        scale = knowledge.group("scale")
        if not scale:
            raise KnowledgeError("server", "scale", "missing, pfedbayes needs it")
        return {name: torch.tensor(v, device=self.compute.device) for name, v in scale.items()}

    def _upload(self, proxy: Proxy) -> dict[str, Array]:
        sent = grouped("proxy", {k: v.cpu().numpy() for k, v in proxy.upload().items()})
        if isinstance(proxy, VariationalProxy):
            sent |= grouped("scale", {k: v.cpu().numpy() for k, v in proxy.scale().items()})
        return sent


class Reciprocity:
    """One round of Algorithm 1 at one client: the private model and the proxy learn jointly."""

    def __init__(self, client: FedTypeClient, proxy: Proxy, round: int) -> None:
        self.client = client
        self.settings = client.settings
        self.private = client.network.train()
        self.proxy = proxy
        self.proxy.model.train()
        self.optimizing: Optimization = client.optimization(
            self.private.parameters(), proxy.parameters()
        )
        self.order = client.generator(round, "batches")
        self.noise = client.generator(round, "u")
        self.raps = Raps(self.settings.lambda_, self.settings.k_reg)
        self.accuracy: float | None = None
        self.penalty = self.settings.lambda_
        self.calibrations: tuple[Calibration, Calibration] | None = None
        self.parts = torch.randperm(len(client.y), generator=client.generator(round, "parts"))
        self.sums = torch.zeros(4, device=client.compute.device)

    def run_epoch(self, epoch: int) -> None:
        """Calibrate both models on D', then train both on the epoch's data."""
        if self.settings.backward == "conformal":
            self.calibrate()
        rows = self.rows(epoch)
        x, y = self.client.x, self.client.y
        if rows is not None:
            x, y = x[rows], y[rows]
        if len(y) > 1:
            self.client.train_epochs(
                x, y, self.loss, self.optimizing, self.order, epochs=1, stepped=self.proxy.stepped
            )

    def rows(self, epoch: int) -> Tensor | None:
        """Return the rows of the epoch's part of the data; None means all data."""
        if self.settings.epoch_data == "full":
            return None
        part = self.parts.tensor_split(self.client.training.local_epochs)[epoch]
        return part.to(self.client.compute.device)

    def calibrate(self) -> None:
        """Fit both conformal models (Eq. 5), and how much the proxy's sets must shrink (Eq. 7)."""
        client = self.client
        proxy = logits_of(self.proxy.model, client.held_out.x, client.compute)
        private = logits_of(self.private, client.held_out.x, client.compute)
        self.calibrations = (self._calibration(proxy), self._calibration(private))
        accuracy = (proxy.argmax(1) == client.held_out.y).float().mean().item()
        change = 0.0 if self.accuracy is None else accuracy - self.accuracy
        self.penalty = dynamic_penalty(change, self.settings.lambda_, self.settings.g)
        self.accuracy = accuracy

    def _calibration(self, logits: Tensor) -> Calibration:
        u, labels = self.factors(len(logits)), self.client.held_out.y
        return calibrate(logits, labels, u, theta=self.settings.theta, raps=self.raps)

    def factors(self, count: int) -> Tensor:
        """Return u of Eq. 6, [count]: uniform in [0, 1), or fixed."""
        if self.settings.u != "random":
            return torch.full((count,), float(self.settings.u), device=self.client.compute.device)
        return torch.rand(count, generator=self.noise).to(self.client.compute.device)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the joint objective of a batch (Eq. 2)."""
        private = self.private(x)
        for _ in range(self.extra_steps()):
            self.optimizing.step(
                distillation_loss(private, self.proxy.logits(x)) + self.proxy.regulariser()
            )
        proxy = self.proxy.logits(x)
        classification = F.cross_entropy(private.float(), y)
        forward = distillation_loss(private, proxy) + self.proxy.regulariser()
        return classification + forward + self.backward_loss(private, proxy.detach().float())

    def extra_steps(self) -> int:
        """Return the number of proxy steps before the joint step (pFedMe's K - 1)."""
        return self.settings.moreau_steps - 1 if isinstance(self.proxy, MoreauProxy) else 0

    def backward_loss(self, private: Tensor, proxy: Tensor) -> Tensor:
        """Return the private model's loss on the proxy's logits: Eq. 3 or an ablation."""
        if self.settings.backward == "symmetric":
            return distillation_loss(proxy, private)
        own, other = self.sets(private.detach().float(), proxy)
        eta = consensus(other, own)
        if self.settings.eta == "one":
            eta = torch.ones_like(eta)
        self._note(eta, other, own)
        return imitation_loss(private, other, eta)

    def sets(self, private: Tensor, proxy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sets L of the private model and S of the proxy (Eq. 6), [N, C]."""
        if self.calibrations is None:
            return top_sets(private, self.settings.top_k), top_sets(proxy, self.settings.top_k)
        for_proxy, for_private = self.calibrations
        k_reg, plain = self.settings.k_reg, self.settings.lambda_
        u = self.factors(len(proxy))
        return (
            prediction_sets(private, for_private, u, penalty=plain, k_reg=k_reg),
            prediction_sets(proxy, for_proxy, u, penalty=self.penalty, k_reg=k_reg),
        )

    def _note(self, eta: Tensor, proxy: Tensor, private: Tensor) -> None:
        sums = [eta.sum(), proxy.sum(), private.sum(), eta.new_tensor(len(eta))]
        self.sums += torch.stack([value.float() for value in sums])

    def figures(self) -> dict[str, float]:
        """Return the round's mean eta and set sizes, and the proxy's last threshold if finite."""
        eta, proxy, private, count = self.sums.tolist()
        if count == 0:  # symmetric distillation has no sets
            return {}
        found = {"eta": eta / count, "proxy_set": proxy / count, "private_set": private / count}
        tau = torch.inf if self.calibrations is None else self.calibrations[0].tau.item()
        return found if tau == torch.inf else {**found, "tau": tau}
