"""DP-SGD: Poisson samples, clipped per-sample gradients from Opacus, and secret noise.

Martin Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1. Noise and
samples come from `SecretNoise`, never from the run's seed, which the server knows, and never from
a generator of PyTorch. Opacus computes the gradient of each sample; its optimizer is not used.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedhet.base.errors import ModelError, SettingsError
from fedhet.kinds import KINDS, Kind, Shape
from fedhet.learning.training import Optimization
from fedhet.models import HetModel
from fedhet.privacy.accounting import EXTRA, root_handlers_kept
from fedhet.privacy.noise import SecretNoise


class PrivateOptimization(Optimization):
    """Optimizer whose steps are steps of DP-SGD; `privately` creates it."""

    compiles = False  # Opacus' hooks compute the gradients of samples; compiling skips hooks.

    def __init__(self, plain: Optimization, noise: float, norm: float, batch_size: int) -> None:
        """Take over `plain`; `noise` is in units of `norm`, the bound of a sample's gradient."""
        super().__init__(plain.optimizer, plain.scaler)
        self._secret = SecretNoise()
        self._noise, self._norm, self._batch_size = noise, norm, batch_size

    def batches(
        self, samples: int, batch_size: int, generator: torch.Generator, device: torch.device
    ) -> Iterator[Tensor]:
        """Yield the row indices of an epoch's Poisson samples; a sample may be empty."""
        rate = min(1.0, batch_size / samples)
        for _ in range(-(-samples // batch_size)):
            yield self._secret.sample(samples, rate).to(device)

    def step(self, loss: Tensor | None, penalty: Tensor | float = 0.0) -> None:
        """Do one noised step on the mean loss of a Poisson sample, None if it is empty.

        `penalty` is a term of the weights alone: its gradient is added after the noise.
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad_sample = None  # type: ignore[attr-defined]
        self.optimizer.zero_grad(set_to_none=True)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        noised = self._secret.add(self._clipped_sums(parameters), self._noise, self._norm)
        for parameter, total in zip(parameters, noised, strict=True):
            parameter.grad = total / self._batch_size
            parameter.grad_sample = None  # type: ignore[attr-defined]
        if isinstance(penalty, Tensor):
            grads = torch.autograd.grad(penalty, parameters, allow_unused=True)
            for parameter, grad in zip(parameters, grads, strict=True):
                if grad is not None and parameter.grad is not None:
                    parameter.grad += grad
        self.optimizer.step()

    def _clipped_sums(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return the sum over samples of the clipped gradients, for each parameter.

        A sample counts as zero if its gradient is not finite: it would exceed the bound.
        """
        found: list[Any] = [getattr(parameter, "grad_sample", None) for parameter in parameters]
        used = [grads for grads in found if grads is not None]
        if not used:  # an empty sample
            return [torch.zeros_like(parameter) for parameter in parameters]
        norms = torch.stack([grads.flatten(1).norm(dim=1) for grads in used]).norm(dim=0)
        scale = (self._norm / (norms + 1e-6)).clamp(max=1.0)
        finite = norms.isfinite()
        if not finite.all():
            scale = scale.where(finite, 0)
            used = [g.where(finite.view(-1, *[1] * (g.dim() - 1)), 0) for g in used]
        sums = iter(torch.einsum("i,i...", scale, grads) for grads in used)
        return [
            torch.zeros_like(parameter) if grads is None else next(sums)
            for parameter, grads in zip(parameters, found, strict=True)
        ]


@contextmanager
def privately(
    plain: Optimization,
    models: Iterable[nn.Module],
    noise: float,
    norm: float,
    batch_size: int,
    kind: str = "",
    shape: Shape | None = None,
) -> Iterator[PrivateOptimization]:
    """Yield `plain` as DP-SGD; in the block, `models` give the gradient of each sample.

    Every trained parameter must belong to one of `models`. Raises ModelError for a model in which
    one sample's gradient depends on the others; `kind` and `shape` are those of a sample, as
    `refuse_unfit` has them.
    """
    trained = {id(parameter) for parameter in plain.parameters()}
    hooked = [m for m in models if any(id(p) in trained for p in m.parameters())]
    covered = {id(p) for model in hooked for p in model.parameters()}
    if not trained <= covered:
        raise ModelError("a parameter that is trained belongs to no model of the client's own")
    for model in hooked:
        refuse_unfit(model, kind, shape)
    hooks = [_opacus().grad_sample.GradSampleHooks(model, strict=False) for model in hooked]
    try:
        # A model's input has no gradient, which is what its first layer's hook is told.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield PrivateOptimization(plain, noise, norm, batch_size)
    finally:
        for each in hooks:
            each.cleanup()


def refuse_unfit(
    model: nn.Module, kind: str = "", shape: Shape | None = None, name: str = ""
) -> None:
    """Raise ModelError unless `model` computes each sample independently of the others.

    Rejects layers that Opacus does not support. If the kind and the `shape` of a sample are given,
    a network is also tested on random inputs of it, once for each architecture in a process.
    """
    faults = _opacus().validators.ModuleValidator.validate(model, strict=False)
    fault = str(faults[0]) if faults else ""
    if not fault and shape is not None and isinstance(model, HetModel):
        # The same classes with the same arguments compute the same function.
        layout = tuple(each.is_contiguous() for each in model.parameters())
        key = (str(model), tuple(map(type, model.modules())), layout, kind, tuple(shape))
        if key not in _TESTED:
            _TESTED[key] = _dependence(model, KINDS[kind], tuple(shape))
        fault = _TESTED[key]
    if fault:
        own = f"model '{name}'" if name else "the model"
        raise ModelError(f"{own} cannot be trained by DP-SGD: {fault}")


_TESTED: dict[tuple[object, ...], str] = {}
"""The fault of each architecture that was tested in this process, empty for independent samples."""


class _WithoutDropout(TorchFunctionMode):
    """Replaces dropout and stochastic depth by the identity, in layers and in functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "bernoulli_":
            return args[0].fill_(1)
        return func(*args, **kwargs)


def _dependence(model: HetModel, kind: Kind, shape: Shape) -> str:
    """Return how a sample's outputs or gradients depend on other samples, or "" if they do not."""
    own, secret, tolerance = copy.deepcopy(model).cpu().double(), SecretNoise(bytes(32)), 1e-6
    buffers = [each.clone() for each in own.buffers()]
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        warnings.catch_warnings(),
        _WithoutDropout(),
    ):
        warnings.simplefilter("ignore")
        try:
            fault = _fault_on_inputs(own, kind, shape, secret, torch.float64, tolerance)
        except Exception:  # perhaps the model computes in float32 alone
            own, tolerance = copy.deepcopy(model).cpu().float(), 1e-3
            buffers = [each.clone() for each in own.buffers()]
            try:
                fault = _fault_on_inputs(own, kind, shape, secret, torch.float32, tolerance)
            except Exception as error:  # such as a batch norm of one sample
                fault = f"it fails on random samples ({type(error).__name__})"
        pairs = zip(buffers, own.buffers(), strict=True)
        if not fault and any(_differ(before, after, tolerance) for before, after in pairs):
            fault = "its buffers change when it computes outputs"
    return fault


def _fault_on_inputs(
    own: HetModel,
    kind: Kind,
    shape: Shape,
    secret: SecretNoise,
    dtype: torch.dtype,
    tolerance: float,
) -> str:
    """Return how a sample depends on others on random inputs, or "".

    Each sample goes through the model alone, in batches of several sizes, in another order, next to
    other samples, and again. What is compared must be equal but for rounding. Forward passes and
    per-sample gradients are tested, in training mode and evaluation mode.
    """

    def inputs(count: int) -> Tensor:
        size = (count, *(shape if kind.is_numeric else shape[1:2]))
        drawn = secret.add([torch.zeros(size, dtype=torch.float64)], 1.0, 1.0)[0]
        if kind.is_numeric:
            return drawn.to(dtype)
        return 1 + (drawn.abs() * 1e4).long() % (shape[2] - 1)

    def set_mode(*, training: bool) -> None:
        own.train(training)
        for each in own.modules():
            if isinstance(each, nn.modules.dropout._DropoutNd):
                each.eval()

    def outputs(x: Tensor) -> Tensor:
        features, logits = own.features_and_logits(x)
        return torch.cat([features.flatten(1), logits.flatten(1), own(x).flatten(1)], dim=1)

    def gradients(x: Tensor) -> list[Tensor]:
        """Return the gradients of the first sample."""
        hooks = _opacus().grad_sample.GradSampleHooks(own, strict=False, loss_reduction="sum")
        try:
            logits = own(x)
            weights = torch.arange(1.0, logits.shape[1] + 1, dtype=dtype)
            (logits.log_softmax(1) * weights).sum().backward()
            found = [getattr(p, "grad_sample", None) for p in own.parameters()]
            return [each[0].clone() for each in found if each is not None]
        finally:
            hooks.cleanup()
            own.zero_grad(set_to_none=True)

    for training in (True, False):
        set_mode(training=training)
        where = f"in {'training' if training else 'evaluation'} mode"
        with torch.no_grad():
            for count in (2, 7, 40):
                x = inputs(count)
                found, others = outputs(x), x.clone()
                if len(found) != count:
                    return f"{count} samples have {len(found)} outputs {where}"
                others[1:] = inputs(count - 1) * (100 if kind.is_numeric else 1)
                pairs = (
                    (found[:1], outputs(x[:1])),
                    (found[-1:], outputs(x[-1:])),
                    (found.flip(0), outputs(x.flip(0))),
                    (found[:1], outputs(others)[:1]),
                )
                if any(_differ(*pair, tolerance) for pair in pairs):
                    return f"a sample's outputs depend on the other samples {where}"
                if _differ(found, outputs(x), tolerance):
                    return f"outputs depend on earlier calls or on random draws {where}"
    x = inputs(5)
    others = torch.cat([x[:1], inputs(3)])
    set_mode(training=True)
    alone = gradients(x[:1])
    for batch in (x, others):
        if any(_differ(*pair, tolerance) for pair in zip(alone, gradients(batch), strict=True)):
            return "a sample's gradient depends on the other samples"
    return ""


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    scale = 1 + float(one.abs().max()) if one.numel() else 1.0
    return one.shape != other.shape or not torch.allclose(
        one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def _opacus() -> Any:
    """Return Opacus. Raises SettingsError if it is missing."""
    try:
        with root_handlers_kept():
            import opacus.grad_sample
            import opacus.validators
    except ImportError as error:
        raise SettingsError(f"'privacy.epsilon' needs an extra: {EXTRA} ({error})") from None
    return opacus
