"""FCCL client: cross-correlation on public data, and distillation from the client's earlier models.

Wenke Huang, Mang Ye and Bo Du, Learn from Others and Be Yourself in Heterogeneous Federated
Learning, CVPR 2022, Section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.algorithms.distillation import cross_correlation_loss, distillation_loss
from fedhet.clients.fedmd import Consensus, FedMdClient
from fedhet.learning.training import BatchLoss, Optimization
from fedhet.methods.fccl import FcclSettings


class FcclClient(FedMdClient):
    """Client that learns from all clients, and remembers what it has learned.

    A client's first round is the paper's pretraining: the client trains only on its own data. The
    result is the intra-domain teacher, "pretrained". The inter-domain teacher, "previous", is the
    model at the end of the client's previous round. Teachers are neither sent nor evaluated.
    """

    settings: FcclSettings

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model and its teachers, which are replaced in the first round."""
        return {kind: self.build_model() for kind in ("private", "pretrained", "previous")}

    def learn(self, round: int, consensus: Consensus | None, optimizing: Optimization) -> None:
        """Train on the consensus and on the client's data, and then update the teachers."""
        is_first = self.state.participations == 0
        super().learn(round, None if is_first else consensus, optimizing)
        for kind in ("pretrained", "previous") if is_first else ("previous",):
            self.models[kind].load_state_dict(self.network.state_dict())

    def consensus_loss(self, consensus: Consensus, x: Tensor, rows: Tensor) -> Tensor:
        """Return the cross-correlation loss (collaborative updating)."""
        target = consensus.scores[rows]
        return cross_correlation_loss(self.network(x), target, self.settings.off_diagonal)

    def own_loss(self) -> BatchLoss:
        """Return the loss of local updating, which has no teachers in the client's first round."""
        if self.state.participations == 0 or not self.settings.dual_weight:
            return super().own_loss()
        teachers = [self.models[kind].eval() for kind in ("pretrained", "previous")]
        weight = self.settings.dual_weight
        return DualObjective(self.network, teachers, self.own_classes, self.task.loss(), weight)


class DualObjective(nn.Module):
    """Loss on labels, plus the weighted divergences from both teachers.

    CE(f(x), y) + lambda_Loc sum_t KL(teacher_t(x) || f(x)), within the client's label space.
    """

    def __init__(
        self,
        model: nn.Module,
        teachers: list[nn.Module],
        own_classes: nn.Module,
        loss_of: BatchLoss,
        weight: float,
    ) -> None:
        super().__init__()
        self.model, self.teachers, self.own_classes = model, nn.ModuleList(teachers), own_classes
        self._loss_of, self._weight = loss_of, weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        logits, labels = self.own_classes(self.model(x), y)
        loss = self._loss_of(logits.float(), labels)
        for teacher in self.teachers:
            with torch.no_grad():
                target, _ = self.own_classes(teacher(x), y)
            loss = loss + self._weight * distillation_loss(target, logits)
        return loss
