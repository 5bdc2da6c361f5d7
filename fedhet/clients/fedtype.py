"""FedType client: uncertainty-based asymmetrical reciprocity learning (Algorithm 1)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.conformal import Imitation
from fedhet.algorithms.distillation import distillation_loss
from fedhet.algorithms.local_models import LocalModel, MoreauModel, ProximalModel, VariationalModel
from fedhet.base.arrays import grouped
from fedhet.base.errors import KnowledgeError
from fedhet.base.seeding import derive, numpy_rng
from fedhet.base.transfer import all_to_device, rows_of
from fedhet.clients.base import HetClient
from fedhet.data.dataset import Split
from fedhet.learning.training import Optimization, evaluating, frozen_statistics
from fedhet.methods.fedtype import FedTypeSettings
from fedhet.models import HetModel, load_weights, to_host_arrays
from fedhet.wire.knowledge import Knowledge

MIN_CALIBRATED = 32
"""Minimum batch size on the calibration data D', unless the training batch size is smaller. Batch
norms need large batches."""
Pair = tuple[Tensor, Tensor]
"""Pair of tensors from the private model and from its teacher (by default, the proxy)."""


class FedTypeClient(HetClient):
    """Client whose private model and proxy teach each other. Only the proxy is sent.

    D is the client's training data, and D' its calibration data.
    """

    settings: FedTypeSettings

    def prepare(self) -> None:
        """Split D' from D, in the ratio 7:2:1 of training, test and calibration samples.

        Without `calibrate-on = held`, D' is D, or a part of D in each epoch.
        """
        self.label_set = torch.unique(self.y)
        """Classes [P] in D, ascending."""
        self.held_out = self.samples.own
        if self.settings.calibrate_on != "held":
            return
        total = len(self.y) + len(self.tests.get("personal", ()))
        count = max(1, round(self.settings.calibration * total))
        count = min(count, len(self.y) - 2)
        order = numpy_rng(self.run.seed, "calibration", self.info.name).permutation(len(self.y))
        held_out, remaining = (torch.tensor(part.copy()) for part in (order[:count], order[count:]))
        x, y = self.x, self.y
        self.held_out = Split(rows_of(x, held_out), rows_of(y, held_out))
        self.samples.own = Split(rows_of(x, remaining), rows_of(y, remaining))

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model and the proxy."""
        return {"private": self.build_model(), "proxy": self._new_proxy()}

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model, the trained proxy and, if received, the server's proxy."""
        models = dict(self.models)
        if weights := knowledge.group("proxy"):
            models["global"] = self.compute.place(load_weights(self._new_proxy(), weights))
        return {kind: self.samples.within_space(model) for kind, model in models.items()}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run Algorithm 1, starting from the server's proxy."""
        load_weights(self.models["proxy"], knowledge.group("proxy"))
        proxy = self._proxy(round, knowledge)
        reciprocity = Reciprocity(self, proxy, round)
        for epoch in range(self.training.local_epochs):
            reciprocity.run_epoch(epoch)
        if (accuracy := reciprocity.imitation.accuracy) is not None:
            self.state.metadata["proxy_accuracy"] = accuracy
        sent = grouped("proxy", to_host_arrays(proxy.upload()))
        if isinstance(proxy, VariationalModel):
            sent |= grouped("scale", to_host_arrays(proxy.scale()))
        return Knowledge(sent, reciprocity.imitation.metrics())

    @property
    def accuracy(self) -> float | None:
        """Last measured accuracy of the proxy on D', or None before the first measurement."""
        accuracy = self.state.metadata.get("proxy_accuracy")
        return None if accuracy is None else float(accuracy)

    def _new_proxy(self) -> HetModel:
        return self.build_model(name=self.settings.proxy)

    def _proxy(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the proxy's training objective for the configured `aggregation`.

        Raises KnowledgeError if the standard deviations of a variational proxy are missing.
        """
        model, settings = self.models["proxy"], self.settings
        anchor = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        match settings.aggregation:
            case "fedprox":
                return ProximalModel(model, anchor, settings.prox_mu)
            case "pfedme":
                return MoreauModel(model, anchor, settings.moreau_lambda, settings.moreau_rate)
            case "pfedbayes":
                if not (scale := knowledge.group("scale")):
                    raise KnowledgeError("server", "scale", "missing, required by pfedbayes")
                scales = {name: torch.tensor(value) for name, value in scale.items()}
                scales = all_to_device(scales, self.compute.device)
                seed = derive(self.run.seed, self.info.name, round, "weights")
                return VariationalModel(model, anchor, scales, settings.bayes_zeta, seed)
        return LocalModel(model, anchor)


class Reciprocity:
    """Joint training of the private model and the proxy in one round (Algorithm 1)."""

    def __init__(self, client: FedTypeClient, proxy: LocalModel, round: int) -> None:
        """Start a round with a proxy that has the server's weights."""
        self.client, self.settings, self.proxy = client, client.settings, proxy
        self.private = client.network.train()
        self.proxy.model.train()
        self.teacher = (
            proxy
            if self.settings.teacher == "proxy"
            else LocalModel(copy.deepcopy(proxy.model).requires_grad_(False), proxy.anchor)
        )
        """Model that the private model imitates."""
        self.optimizing: Optimization = client.optimization(
            self.private.parameters(), proxy.parameters()
        )
        self.order = client.generator(round, "batches")
        self.parts = torch.randperm(len(client.y), generator=client.generator(round, "parts"))
        labels = torch.searchsorted(client.space, client.label_set)
        if self.settings.labels == "all":
            labels = torch.arange(len(client.space), device=labels.device)
        self.imitation = Imitation(
            self.settings, labels, client.generator(round, "u"), client.accuracy
        )

    def run_epoch(self, epoch: int) -> None:
        """Calibrate both models on D', and then train both models on the epoch's data.

        With `calibrate-on = unseen`, D' contains the parts of D that the epoch does not use.
        """
        x, y = self.client.x, self.client.y
        if self.settings.epoch_data == "part":
            parts = [*self.parts.tensor_split(self.client.training.local_epochs)]
            rows, unseen = parts.pop(epoch), torch.cat([*parts, self.parts[:0]])
            if self.settings.calibrate_on == "unseen":
                self.client.held_out = Split(rows_of(x, unseen), rows_of(y, unseen))
            x, y = rows_of(x, rows), rows_of(y, rows)
        if self.settings.backward == "conformal" and not self.skips_imitation:
            self.calibrate()
        if len(y) < 2:
            return
        losses = {self.loss: self.proxy.stepped}
        if self.settings.order == "alternating":
            losses = {self.private_loss: lambda: None, self.proxy_loss: self.proxy.stepped}
        for loss, stepped in losses.items():
            self.client.train_own(
                *(loss, self.private, self.optimizing, self.order, Split(x, y)),
                epochs=1,
                after_batch=stepped,
            )

    @property
    def skips_imitation(self) -> bool:
        """Whether imitation is skipped because D' is too small."""
        return self.imitation.is_skipped(len(self.client.held_out))

    @torch.no_grad()
    def calibrate(self) -> None:
        """Fit both conformal models on D' (Eq. 5), in the mode used to compute prediction sets."""
        held_out = self.client.held_out
        count = max(1, len(held_out) // self.client.training.batch_size)
        with frozen_statistics(self.private), frozen_statistics(self.teacher.model):
            parts = [self.held_out_views(part) for part in torch.tensor_split(held_out.x, count)]
        private, teacher = (torch.cat(part).float() for part in zip(*parts, strict=True))
        targets = torch.searchsorted(self.client.space, held_out.y)
        self.imitation.calibrate(teacher, private, targets)

    def held_out_views(self, x: Tensor) -> Pair:
        """Return the result of `views` for a part of D'.

        A small part is padded with training samples, because batch norms need large batches.
        """
        missing = max(min(self.client.training.batch_size, MIN_CALIBRATED) - len(x), 0)
        rows = self.parts[:missing]
        with self.client.compute.autocast():
            joined = self.client.compute.to_inputs(torch.cat([x, rows_of(self.client.x, rows)]))
            private, proxy = self.views(joined)
        return private[: len(x)], proxy[: len(x)]

    def logits(self, x: Tensor) -> Pair:
        """Return the training-mode logits [N, C] of the private model and of its teacher.

        C is the number of classes in the client's label space.
        """
        return self.within(self.private(x)), self.within(self.teacher.logits(x))

    def within(self, logits: Tensor) -> Tensor:
        """Return the columns of logits that belong to the client's label space."""
        return self.client.samples.own_columns(logits)

    @torch.no_grad()
    def views(self, x: Tensor, trained: Pair | None = None) -> Pair:
        """Return both models' logits, from which prediction sets are computed.

        A single sample is always passed in evaluation mode, because batch norms need two samples.

        Args:
            x: Samples, of shape [N, ...].
            trained: Logits of the current training step, or None outside of training steps.
        """
        if self.settings.mode == "training" and len(x) > 1:
            return trained or self.logits(x)
        with evaluating(self.private), evaluating(self.teacher.model):
            return self.within(self.private(x)), self.within(self.teacher.model(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the joint loss of a batch (Eq. 2)."""
        private = self.within(self.private(x))
        self.step_proxy_before(private, x, y)
        proxy = self.within(self.proxy.logits(x))
        teacher = proxy if self.teacher is self.proxy else self.teacher_logits(x)
        private_loss = self.supervised(private, y) + self.backward_loss(x, private, teacher)
        return private_loss + self.forward_loss(private, proxy, y)

    def private_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the private model's part of Eq. 2 for a batch; the teacher is frozen."""
        private = self.within(self.private(x))
        return self.supervised(private, y) + self.backward_loss(x, private, self.teacher_logits(x))

    def proxy_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the proxy's part of Eq. 2 for a batch; the private model is frozen.

        As in the authors' code, the private model is in evaluation mode.
        """
        with torch.no_grad(), evaluating(self.private):
            private = self.within(self.private(x))
        self.step_proxy_before(private, x, y)
        return self.forward_loss(private, self.within(self.proxy.logits(x)), y)

    @torch.no_grad()
    def teacher_logits(self, x: Tensor) -> Tensor:
        """Return the training-mode logits [N, C] of the frozen teacher."""
        with frozen_statistics(self.teacher.model):
            return self.within(self.teacher.logits(x))

    def supervised(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of logits [N, C] with labels y [N]."""
        return F.cross_entropy(logits.float(), torch.searchsorted(self.client.space, y))

    def step_proxy_before(self, private: Tensor, x: Tensor, y: Tensor) -> None:
        """Take the first K - 1 of pFedMe's K steps on the proxy, before the joint step."""
        count = self.settings.moreau_steps - 1 if isinstance(self.proxy, MoreauModel) else 0
        for _ in range(count):
            self.optimizing.step(self.forward_loss(private, self.within(self.proxy.logits(x)), y))

    def forward_loss(self, private: Tensor, proxy: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the proxy: Eq. 1 or the authors' variant, plus the regularizer."""
        divergence, regularizer = distillation_loss(private, proxy), self.proxy.regularizer()
        if self.settings.proxy_loss == "kl":
            return divergence + regularizer
        return self.supervised(proxy, y) + divergence / proxy.shape[1] + regularizer

    def backward_loss(self, x: Tensor, private: Tensor, teacher: Tensor) -> Tensor:
        """Return the private model's loss against its teacher: Eq. 3 or an ablation."""
        if self.settings.backward == "symmetric":
            return distillation_loss(teacher, private)
        if self.settings.backward == "none" or self.skips_imitation:
            return private.new_zeros(())
        return self.imitation.loss(private, teacher, self.views(x, (private, teacher)))
