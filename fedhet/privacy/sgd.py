"""DP-SGD with Poisson samples, clipped per-sample gradients from Opacus, and secret noise.

Martin Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1. Noise and
samples are drawn from `SecretNoise`, because the server knows the run's seed and PyTorch's
generators are not cryptographic. Only the per-sample gradients come from Opacus, not the optimizer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedhet.base.errors import ModelError, SettingsError
from fedhet.kinds import KINDS, Kind, Shape
from fedhet.learning.training import Optimization
from fedhet.models import HetModel
from fedhet.privacy.accounting import EXTRA, root_handlers_kept
from fedhet.privacy.noise import Grid, SecretNoise, on_exact_device


class PrivateOptimization(Optimization):
    """DP-SGD optimizer, created by `dp_sgd`."""

    compiles = False  # torch.compile would skip Opacus' hooks.

    def __init__(
        self, plain: Optimization, noise: float, norm: float, batch_size: int, rows: int = 0
    ) -> None:
        """Wrap the optimizer `plain`; `noise` is relative to `norm`, the maximum gradient norm."""
        super().__init__(plain.optimizer, plain.scaler)
        self._secret = SecretNoise()
        self._noise, self._norm, self._batch_size = noise, norm, batch_size
        self._rows = rows

    def batches(
        self, samples: int, batch_size: int, generator: torch.Generator, device: torch.device
    ) -> Iterator[Tensor]:
        """Yield the row indices of each Poisson sample in an epoch. A sample may be empty.

        The sampling rate and the number of steps follow from the accounted number of rows.
        """
        rows = self._rows or samples
        rate = min(1.0, batch_size / rows)
        for _ in range(-(-rows // batch_size)):
            yield self._secret.sample(samples, rate).to(device)

    def step(self, loss: Tensor | None, penalty: Tensor | float = 0.0) -> None:
        """Take a noised step on the mean loss of a Poisson sample.

        `loss` is None if the sample is empty. `penalty` must depend only on the weights; its
        gradient is added after the noise.
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad_sample = None  # type: ignore[attr-defined]
        self.optimizer.zero_grad(set_to_none=True)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        grid = Grid(self._norm, sum(parameter.numel() for parameter in parameters))
        noised = self._secret.add(self._clipped_sums(parameters, grid), self._noise, grid)
        for parameter, total in zip(parameters, noised, strict=True):
            parameter.grad = (total / self._batch_size).to(parameter)
            parameter.grad_sample = None  # type: ignore[attr-defined]
        if isinstance(penalty, Tensor):
            grads = torch.autograd.grad(penalty, parameters, allow_unused=True)
            for parameter, grad in zip(parameters, grads, strict=True):
                if grad is not None and parameter.grad is not None:
                    parameter.grad += grad
        self.optimizer.step()

    def _clipped_sums(self, parameters: list[nn.Parameter], grid: Grid) -> list[Tensor]:
        """Return the exact sum of the clipped per-sample gradients for each parameter.

        The sums are integers on the grid. A gradient with NaN or infinity is replaced by zeros.
        """
        per_sample: list[Any] = [getattr(p, "grad_sample", None) for p in parameters]
        sums = iter(grid.sum_all([grads for grads in per_sample if grads is not None]))
        return [
            torch.zeros_like(on_exact_device(parameter), dtype=torch.int64)
            if grads is None
            else next(sums)
            for parameter, grads in zip(parameters, per_sample, strict=True)
        ]


@contextmanager
def dp_sgd(
    plain: Optimization,
    models: Iterable[nn.Module],
    noise: float,
    norm: float,
    batch_size: int,
    kind: str = "",
    shape: Shape | None = None,
    rows: int = 0,
) -> Iterator[PrivateOptimization]:
    """Convert an optimizer to DP-SGD within the block, with per-sample gradients of `models`.

    Each trained parameter must belong to one of the models. `noise` is relative to `norm`, the
    maximum L2 norm of a sample's gradient. `rows` is the number of rows from which the sampling
    rate and the number of steps follow; 0 = the number of samples. Raises ModelError if a sample's
    gradient depends on other samples (see `check_supports_dp`).
    """
    trained = {id(parameter) for parameter in plain.parameters()}
    hooked = [m for m in models if any(id(p) in trained for p in m.parameters())]
    covered = {id(p) for model in hooked for p in model.parameters()}
    if not trained <= covered:
        raise ModelError("DP-SGD: a trained parameter belongs to none of the client's models")
    for model in hooked:
        check_supports_dp(model, kind, shape)
    hooks = [_opacus().grad_sample.GradSampleHooks(model, strict=False) for model in hooked]
    try:
        # Ignore PyTorch's warning that the input of a model's first layer has no gradient.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield PrivateOptimization(plain, noise, norm, batch_size, rows)
    finally:
        for each in hooks:
            each.cleanup()


def check_supports_dp(
    model: nn.Module, kind: str = "", shape: Shape | None = None, name: str = ""
) -> None:
    """Check that a model processes samples independently. Raises ModelError if it does not.

    Rejects layers that Opacus does not support. If the kind and shape of a sample are given, a
    network is also tested on random inputs, once for each architecture in a process.
    """
    errors = _opacus().validators.ModuleValidator.validate(model, strict=False)
    fault = str(errors[0]) if errors else ""
    if not fault and shape is not None and isinstance(model, HetModel):
        # Test each architecture once, because modules of the same class with the same arguments
        # compute the same function.
        layout = tuple((each.is_contiguous(), each.requires_grad) for each in model.parameters())
        key = (str(model), tuple(map(type, model.modules())), layout, kind, tuple(shape))
        if key not in _TESTED:
            _TESTED[key] = _dependence(model, KINDS[kind], tuple(shape))
        fault = _TESTED[key]
    if fault:
        label = f"model '{name}'" if name else "the model"
        raise ModelError(f"{label} cannot be trained with DP-SGD: {fault}")


_TESTED: dict[tuple[object, ...], str] = {}
"""Test results in this process by architecture: a fault, or "" if samples are independent."""


class _WithoutDropout(TorchFunctionMode):
    """Function mode that replaces dropout and stochastic depth with the identity function."""

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
    """Return a description of how a sample depends on other samples, or "" if it does not.

    Tests the model in float64, or in float32 if it supports only float32.
    """
    fault, secret = "", SecretNoise(bytes(32))
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        warnings.catch_warnings(),
        _WithoutDropout(),
    ):
        warnings.simplefilter("ignore")
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
            tested = copy.deepcopy(model).cpu().to(dtype)
            buffers = [each.clone() for each in tested.buffers()]
            test = _RandomInputs(tested, kind, shape, secret, dtype, tolerance)
            try:
                fault = test.dependence_of_outputs() or test.dependence_of_gradients()
            except Exception as error:  # For example, batch norms reject a single sample.
                fault = f"it fails on random samples ({type(error).__name__})"
                continue
            pairs = zip(buffers, tested.buffers(), strict=True)
            if not fault and any(_differ(before, after, tolerance) for before, after in pairs):
                fault = "a forward pass changes its buffers"
            break
    return fault


@dataclass(frozen=True)
class _RandomInputs:
    """Tests of a model on random inputs: a sample's results must not depend on other samples.

    Results are compared up to rounding errors. Each test returns a description of the dependence,
    or "" if there is none.
    """

    model: HetModel
    kind: Kind
    shape: Shape
    secret: SecretNoise
    dtype: torch.dtype
    tolerance: float

    def dependence_of_outputs(self) -> str:
        """Compare forward passes in training and evaluation mode.

        A sample must have the same outputs alone, in batches of several sizes, in reverse order,
        next to other samples, and in a repeated call.
        """
        for training in (True, False):
            self._set_mode(training=training)
            where = f"in {'training' if training else 'evaluation'} mode"
            with torch.no_grad():
                for count in (2, 7, 40):
                    x = self._inputs(count)
                    expected, changed = self._outputs(x), x.clone()
                    if len(expected) != count:
                        return f"{count} samples have {len(expected)} outputs {where}"
                    changed[1:] = self._inputs(count - 1) * (100 if self.kind.is_numeric else 1)
                    pairs = (
                        (expected[:1], self._outputs(x[:1])),
                        (expected[-1:], self._outputs(x[-1:])),
                        (expected.flip(0), self._outputs(x.flip(0))),
                        (expected[:1], self._outputs(changed)[:1]),
                    )
                    if any(_differ(*pair, self.tolerance) for pair in pairs):
                        return f"a sample's outputs depend on the other samples {where}"
                    if _differ(expected, self._outputs(x), self.tolerance):
                        return f"outputs depend on earlier calls or on random draws {where}"
        return ""

    def dependence_of_gradients(self) -> str:
        """Compare a sample's gradient alone and next to other samples, in training mode."""
        x = self._inputs(5)
        changed = torch.cat([x[:1], self._inputs(3)])
        self._set_mode(training=True)
        alone = self._first_gradients(x[:1])
        for batch in (x, changed):
            gradients = zip(alone, self._first_gradients(batch), strict=True)
            if any(_differ(*pair, self.tolerance) for pair in gradients):
                return "a sample's gradient depends on the other samples"
        return ""

    def _inputs(self, count: int) -> Tensor:
        size = (count, *(self.shape if self.kind.is_numeric else self.shape[1:2]))
        noise = self.secret.add([torch.zeros(size, dtype=torch.int64)], 1.0, Grid(1.0))[0]
        if self.kind.is_numeric:
            return noise.to(self.dtype)
        return 1 + (noise.abs() * 1e4).long() % (self.shape[2] - 1)

    def _set_mode(self, *, training: bool) -> None:
        self.model.train(training)
        for each in self.model.modules():
            if isinstance(each, nn.modules.dropout._DropoutNd):
                each.eval()

    def _outputs(self, x: Tensor) -> Tensor:
        features, logits = self.model.features_and_logits(x)
        return torch.cat([features.flatten(1), logits.flatten(1), self.model(x).flatten(1)], dim=1)

    def _first_gradients(self, x: Tensor) -> list[Tensor]:
        """Return the gradients of the first sample."""
        model = self.model
        hooks = _opacus().grad_sample.GradSampleHooks(model, strict=False, loss_reduction="sum")
        try:
            logits = model(x).flatten(1)  # A language model has logits for each token.
            weights = torch.arange(1.0, logits.shape[1] + 1, dtype=self.dtype)
            # The log softmax of a single output, as in regression, is always 0 and has no gradient.
            losses = logits.log_softmax(1) if logits.shape[1] > 1 else logits.square()
            (losses * weights).sum().backward()
            per_sample = [getattr(p, "grad_sample", None) for p in model.parameters()]
            return [each[0].clone() for each in per_sample if each is not None]
        finally:
            hooks.cleanup()
            model.zero_grad(set_to_none=True)


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    scale = 1 + float(one.abs().max()) if one.numel() else 1.0
    return one.shape != other.shape or not torch.allclose(
        one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def _opacus() -> Any:
    """Import Opacus. Raises SettingsError if it is not installed."""
    try:
        with root_handlers_kept():
            import opacus.grad_sample
            import opacus.validators
    except ImportError as error:
        raise SettingsError(
            f"setting 'privacy.epsilon' requires Opacus: {EXTRA} ({error})"
        ) from None
    return opacus
