"""FedL2G: guided training of clients, and gradients that train the guiding vectors on the server.

Jianqing Zhang, Yang Liu, Yang Hua, Jian Cao and Qiang Yang, FedL2G: Learning to Guide Local
Training in Heterogeneous Federated Learning, arXiv:2410.06490.

Shapes: N samples, C classes, vectors of width W. W is C for guided logits, and D for features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedhet.algorithms import Guide
from fedhet.learning.training import LabelSpace

VECTORS = "vectors"
"""Name of the buffer with the guiding vectors in `GuidedObjective`."""
Batch = tuple[Tensor, Tensor]
"""Inputs [N, ...] and labels [N]."""


class GuidedObjective(nn.Module):
    """Module that computes the local loss: cross-entropy plus the guiding loss.

    The guiding loss is the mean squared difference between a sample's logits or features and the
    guiding vector of its class. Both losses cover only the logits of the client's label space.
    """

    vectors: Tensor

    def __init__(
        self, model: nn.Sequential, own_classes: LabelSpace, vectors: Tensor, guide: Guide
    ) -> None:
        """Create the objective.

        Args:
            model: Model to train, with an extractor and a classifier.
            own_classes: Module that restricts logits and labels to the client's label space.
            vectors: Guiding vectors of shape [C, W].
            guide: Output of the model that the vectors guide.
        """
        super().__init__()
        self.model, self.own_classes, self.guide = model, own_classes, guide
        self.register_buffer(VECTORS, vectors)

    def forward(self, x: Tensor, y: Tensor, guided: bool = True) -> Tensor:
        """Return the loss of a batch, or the cross-entropy alone if `guided` is not set."""
        extractor, classifier = self.model
        features = extractor(x)
        logits, labels = self.own_classes(classifier(features), y)
        loss = F.cross_entropy(logits.float(), labels)
        if not guided:
            return loss
        targets = self.vectors[y]
        if self.guide == "logits":
            return loss + F.mse_loss(logits.float(), self.own_classes.columns(targets))
        return loss + F.mse_loss(features.float(), targets)


def guiding_gradient(objective: GuidedObjective, study: Batch, quiz: Batch, lr: float) -> Tensor:
    """Return the gradient [C, W] of the quiz loss with respect to the guiding vectors.

    The quiz loss is the cross-entropy on the quiz set after one step of gradient descent on the
    study set. The vectors affect this loss only through the guiding loss in that step. Their
    gradient therefore contains no second derivatives with respect to the weights: the guiding loss
    is quadratic in the model's outputs, so that its mixed derivative is the Jacobian of the
    outputs, times a constant.

    The model does not change. Its buffers are copied, because batch normalization writes to them.

    Args:
        objective: Objective with the model at which the step starts.
        study: Samples on which the step minimizes the objective.
        quiz: Samples on which the new weights are evaluated.
        lr: Learning rate of the step.
    """
    weights = {
        name: value.detach().requires_grad_()
        for name, value in objective.named_parameters()
        if value.requires_grad
    }
    state = {name: value.clone() for name, value in objective.named_buffers()}
    vectors = state[VECTORS].requires_grad_()
    with _twice_differentiable(objective):
        loss = functional_call(objective, weights | state, study)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        stepped = {
            name: value - lr * slope
            for (name, value), slope in zip(weights.items(), slopes, strict=True)
        }
        quiz_loss = functional_call(objective, stepped | state, (*quiz, False))
        (gradient,) = torch.autograd.grad(quiz_loss, vectors)
    return gradient


@contextlib.contextmanager
def _twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Run attention and recurrent layers in operations that have second derivatives."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def lacks_second_derivatives(model: nn.Sequential, x: Tensor) -> bool:
    """Return whether a layer of a model has no second derivatives.

    PyTorch does not implement them for every layer, e.g. not for the hard sigmoid.

    Args:
        model: Model in training mode.
        x: Inputs of shape [N, ...], with N at least 2.
    """
    y = torch.zeros(len(x), dtype=torch.long)
    classes = model(x).shape[1]
    space = LabelSpace(torch.arange(classes))
    objective = GuidedObjective(model, space, torch.zeros(classes, classes), "logits")
    try:
        guiding_gradient(objective, (x, y), (x, y), lr=0.0)
    except RuntimeError as error:
        if "derivative for" in str(error) or "does not require grad" in str(error):
            return True
        raise
    return False
