"""DP-SGD: Poisson samples, per-sample gradients that are scaled down, and noise, by Opacus.

Martin Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1. Noise and
samples are drawn from the operating system's entropy, not from the run's seed, which the server
knows.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError, SettingsError
from fedhet.privacy.accounting import EXTRA
from fedhet.privacy.quiet import root_handlers_kept
from fedhet.training import Optimization


def fresh_generator(device: torch.device | None = None) -> torch.Generator:
    """Return a generator that nobody else can have: its seed is the operating system's entropy."""
    return torch.Generator(device or "cpu").manual_seed(secrets.randbits(63))


class PrivateOptimization(Optimization):
    """An optimiser whose steps are DP-SGD's; `privately` makes one."""

    compiles = False  # the gradients of samples come from hooks, which compiling leaves out

    def __init__(self, plain: Optimization, noise: float, norm: float, batch_size: int) -> None:
        """Take over `plain`; `noise` is in units of `norm`, the bound of a sample's gradient."""
        super().__init__(plain.optimizer, plain.scaler)
        self._generator = fresh_generator()
        self._private = _opacus().optimizers.DPOptimizer(
            plain.optimizer,
            noise_multiplier=noise,
            max_grad_norm=norm,
            expected_batch_size=batch_size,
            generator=fresh_generator(self.parameters()[0].device),
        )

    def batches(
        self, samples: int, batch_size: int, generator: torch.Generator, device: torch.device
    ) -> Iterator[Tensor]:
        """Yield an epoch's Poisson samples of rows, any of which may be empty."""
        share = min(1.0, batch_size / samples)
        for _ in range(-(-samples // batch_size)):
            drawn = torch.rand(samples, generator=self._generator) < share
            yield drawn.nonzero().flatten().to(device)

    def step(self, loss: Tensor | None, penalty: Tensor | float = 0.0) -> None:
        """Do one noised step on the mean loss of a Poisson sample, None if it is empty.

        `penalty` is a term of the weights alone: its gradient is added after the noise.
        """
        self._private.zero_grad(set_to_none=True)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        self._complete()
        self._private.pre_step()
        if isinstance(penalty, Tensor):
            self._add_gradient(penalty)
        self.optimizer.step()

    def _complete(self) -> None:
        """Give each parameter a gradient per sample: zero where the loss has none, or not finite.

        A sample whose gradient is not finite would otherwise defeat the bound, for all of them.
        """
        made = [getattr(parameter, "grad_sample", None) for parameter in self._private.params]
        found = [each for each in made if each is not None]
        count = len(found[0]) if found else 0
        finite = torch.ones(count, dtype=torch.bool, device=self.parameters()[0].device)
        for each in found:
            finite &= each.flatten(1).isfinite().all(1)
        for parameter in self._private.params:
            own: Any = parameter
            if getattr(own, "grad_sample", None) is None:
                own.grad_sample = own.new_zeros(1).expand(count, *own.shape)
            elif not finite.all():
                kept = finite.view(-1, *[1] * own.dim())
                own.grad_sample = own.grad_sample.where(kept, 0)

    def _add_gradient(self, penalty: Tensor) -> None:
        parameters = self._private.params
        grads = torch.autograd.grad(penalty, parameters, allow_unused=True)
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None and parameter.grad is not None:
                parameter.grad += grad


@contextmanager
def privately(
    plain: Optimization, models: Iterable[nn.Module], noise: float, norm: float, batch_size: int
) -> Iterator[PrivateOptimization]:
    """Yield `plain` as DP-SGD; in the block, `models` give the gradient of each sample.

    Every trained parameter must belong to one of `models`. Raises ModelError for a layer in which
    one sample's gradient depends on the others.
    """
    trained = {id(parameter) for parameter in plain.parameters()}
    hooked = [m for m in models if any(id(p) in trained for p in m.parameters())]
    covered = {id(p) for model in hooked for p in model.parameters()}
    if not trained <= covered:
        raise ModelError("a parameter that is trained belongs to no model of the client's own")
    for model in hooked:
        refuse_unfit(model)
    hooks = [_opacus().grad_sample.GradSampleHooks(model, strict=False) for model in hooked]
    try:
        # A model's input has no gradient, which is what its first layer's hook is told.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield PrivateOptimization(plain, noise, norm, batch_size)
    finally:
        for each in hooks:
            each.cleanup()
        for parameter in plain.parameters():
            if hasattr(parameter, "summed_grad"):
                del parameter.summed_grad


def refuse_unfit(model: nn.Module, name: str = "") -> None:
    """Raise ModelError unless each sample's gradient of `model` can be told from the others'."""
    faults = _opacus().validators.ModuleValidator.validate(model, strict=False)
    if faults:
        own = f"model '{name}'" if name else "the model"
        raise ModelError(f"{own} cannot be trained by DP-SGD: {faults[0]}")


def _opacus() -> Any:
    """Return Opacus. Raises SettingsError if it is missing."""
    try:
        with root_handlers_kept():
            import opacus.grad_sample
            import opacus.optimizers
            import opacus.validators
    except ImportError as error:
        raise SettingsError(f"'privacy.epsilon' needs an extra: {EXTRA} ({error})") from None
    return opacus
