"""Local epochs of several clients at once: their models are stacked, and take one step together.

A small network's step is bound by the number of its operations, not by their size. `together`
computes the objectives of K clients of one architecture by `torch.func.vmap` over stacked
parameters [K, ...] and buffers [K, ...], and lets one optimiser do a step for all, which changes
each element as a client's own optimiser would.

- Each client draws its own batches and augmentations from its own generators, as if it were alone.
- A batch is never padded. The clients whose next batches have equally many samples, usually all,
  are computed at once; a last, smaller batch is computed with those as small, or by itself.
- A client that has done its epochs gets its tensors back. Its place in the stack then means
  nothing, whatever the optimiser still makes of it.
- Batch norms update the running statistics of their own client, which are stacked buffers. Dropout
  draws for each client separately, but from one generator: its masks differ from those drawn alone.
- Only what is `alike` is stacked: the same modules with the same settings, state of the same
  shapes, the same optimiser.

The result equals training one by one but for rounding, and for dropout's masks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedhet.base.seeding import seeded
from fedhet.base.transfer import Numbers, rows_of
from fedhet.learning.devices import Compute
from fedhet.learning.objective import Objective
from fedhet.learning.training import Augment, Optimization

Tensors = Mapping[str, Tensor]
TRIED = 2
"""Samples of each client with which it is tried whether its objective can be computed stacked."""
SMALL = 2**16
"""The most weights of a network whose training is stacked on a processor."""


@dataclass(frozen=True)
class Work:
    """The local epochs of one client on x [N, ...], y [N]: what `train_epochs` is given."""

    objective: Objective
    x: Tensor
    y: Tensor
    optimizing: Optimization
    epochs: int
    batch_size: int
    generator: torch.Generator
    compute: Compute
    augment: Augment | None = None
    before_epoch: Callable[[int], object] | None = None

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of the objective that are trained, and the others, by name."""
        trained = {id(parameter) for parameter in self.optimizing.parameters()}
        every = dict(self.objective.named_parameters()) | dict(self.objective.named_buffers())
        changed = {name: each for name, each in every.items() if id(each) in trained}
        return changed, {name: each for name, each in every.items() if name not in changed}


@dataclass(frozen=True)
class _Batch:
    """A client's next batch: it can be computed with others of the same `form`."""

    epoch: int
    form: Hashable
    given: tuple[Tensor, ...]
    """x [N, ...], y [N], and what was drawn for them."""


def alike(work: Work) -> Hashable:
    """Return what must be equal for the works of two clients to be stacked."""
    changed, fixed = work.tensors()
    rates = [{k: v for k, v in g.items() if k != "params"} for g in _groups(work.optimizing)]
    shapes = [[(n, t.shape, t.dtype) for n, t in each.items()] for each in (changed, fixed)]
    optimizer = type(work.optimizing.optimizer)
    return (repr(shapes), _settings(work.objective), optimizer, repr(rates), work.compute)


def pays_on(device: torch.device, objective: nn.Module) -> bool:
    """Return whether training stacked saves time: on a processor, with small linear layers alone.

    There the convolutions of many clients take longer as one of many groups, and the weights of
    large networks leave its cache (docs/performance.md).
    """
    if device.type != "cpu":
        return True
    with_weights = (m for m in objective.modules() if next(m.parameters(False), None) is not None)
    size = sum(parameter.numel() for parameter in objective.parameters())
    return size <= SMALL and all(isinstance(module, nn.Linear) for module in with_weights)


def can_be_stacked(works: Sequence[Work]) -> bool:
    """Return whether `vmap` can compute the objectives: a model may do what it cannot."""
    generators = [each for work in works for each in _generators(work.objective)]
    before, device = [each.get_state() for each in generators], works[0].compute.device
    try:
        with seeded(0, device=device), torch.no_grad():
            given = [_given(replace(work, augment=None), _few(work)) for work in works]
            _Stack(works).losses(range(len(works)), given)
    except (RuntimeError, ValueError, TypeError):
        return False
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
    return True


def together(works: Sequence[Work]) -> list[float]:
    """Train the clients' models on the epochs of their works, which are `alike`.

    Returns each client's mean loss over the samples of its last epoch.
    """
    stack, plans = _Stack(works), [_batches(work) for work in works]
    device = works[0].compute.device
    totals, epochs = torch.zeros(len(works), device=device), [0] * len(works)
    current = {place: next(plan) for place, plan in enumerate(plans)}
    while current:
        losses = []
        for places in _of_one_form(current):
            given = [current[place].given for place in places]
            losses.append(each := stack.losses(places, given))
            totals[stack.rows(places)] += each.detach() * len(given[0][1])
        stack.step(torch.cat(losses).sum())
        for place in list(current):
            if (batch := next(plans[place], None)) is None:
                stack.give_back(place)
                del current[place]
                continue
            if batch.epoch != epochs[place]:
                epochs[place] = batch.epoch
                totals[place] = 0.0
            current[place] = batch
    counts = torch.tensor([len(work.y) for work in works], device=device)
    found: list[float] = (totals / counts).tolist()
    return found


class _Stack:
    """The tensors of clients whose works are alike, along a first dimension [K, ...]."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works, self._wholes = works, [_Whole(work.objective) for work in works]
        pairs = [work.tensors() for work in works]
        changed, fixed = zip(*pairs, strict=True)
        self._own = [each | other for each, other in pairs]
        self.changed = {name: each.requires_grad_() for name, each in _stacked(changed).items()}
        self.fixed = _stacked(fixed)
        remake = works[0].optimizing.alike
        assert remake is not None, "only a plain optimiser is stacked"
        self._optimizing = remake(self.changed.values())
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def losses(self, places: Sequence[int], given: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Return the losses of the clients at `places`, one for each, of a batch each."""
        whole, compute = self._wholes[places[0]], self._works[0].compute
        inputs = [torch.stack(each) for each in zip(*given, strict=True)]
        every, rows = len(places) == len(self._works), self.rows(places)
        changed, fixed = (
            each if every else {name: tensor[rows] for name, tensor in each.items()}
            for each in (self.changed, self.fixed)
        )

        def loss(changed: Tensors, fixed: Tensors, *batch: Tensor) -> Tensor:
            tensors = {f"objective.{k}": v for k, v in (*changed.items(), *fixed.items())}
            found: Tensor = functional_call(whole, tensors, batch)
            return found

        with compute.autocast():
            losses: Tensor = vmap(loss, randomness="different")(changed, fixed, *inputs)
        if not every:
            for name, tensor in fixed.items():
                self.fixed[name][rows] = tensor
        return losses

    def rows(self, places: Sequence[int]) -> Tensor:
        """Return `places` as an index on the device; the usual ones are copied there once."""
        key = tuple(places)
        if key not in self._rows:
            self._rows[key] = torch.tensor(key, device=self._works[0].compute.device)
        return self._rows[key]

    def step(self, loss: Tensor) -> None:
        """Do one optimiser step on the sum of the clients' losses: each has its own gradient."""
        self._optimizing.step(loss)

    @torch.no_grad()
    def give_back(self, place: int) -> None:
        """Copy the tensors of a client into its own."""
        for name, tensor in (*self.changed.items(), *self.fixed.items()):
            self._own[place][name].copy_(tensor[place])


class _Whole(nn.Module):
    """An objective's loss with its penalty."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.objective(*batch) + self.objective.penalty()
        return loss


def _batches(work: Work) -> Iterator[_Batch]:
    """Yield the batches of all epochs, in the order and with the draws of `train_epochs`."""
    samples, device = len(work.y), work.x.device
    for epoch in range(work.epochs):
        if work.before_epoch is not None:
            work.before_epoch(epoch)
        settings = _settings(work.objective)
        for index in work.optimizing.batches(samples, work.batch_size, work.generator, device):
            yield _Batch(epoch, (len(index), settings), _given(work, index))


def _few(work: Work) -> Tensor:
    return torch.arange(TRIED, device=work.x.device)


def _given(work: Work, index: Tensor) -> tuple[Tensor, ...]:
    targets = rows_of(work.y, index)
    inputs = work.compute.images(work.x[index])
    inputs = inputs if work.augment is None else work.augment(inputs)
    return inputs, targets, *work.objective.drawn(targets)


def _of_one_form(current: Mapping[int, _Batch]) -> list[list[int]]:
    """Return the places of clients whose batches can be computed at once, in lists."""
    forms = {form: number for number, form in enumerate({b.form: 0 for b in current.values()})}
    ordered = sorted(current, key=lambda place: (forms[current[place].form], place))
    return [list(each) for _, each in groupby(ordered, lambda place: current[place].form)]


def _stacked(each: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([own[name].detach() for own in each]) for name in each[0]}


def _groups(optimizing: Optimization) -> list[dict[str, object]]:
    return optimizing.optimizer.param_groups


def _settings(objective: nn.Module) -> str:
    """Return how an objective computes: its modules, and all that they are but tensors."""
    return repr([(type(module), *_plain(module)) for module in objective.modules()])


def _generators(objective: nn.Module) -> list[Any]:
    """Return what an objective draws from: generators, and numbers that are drawn already."""
    every = (value for module in objective.modules() for value in vars(module).values())
    return [value for value in every if isinstance(value, torch.Generator | Numbers)]


def _plain(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield a module's public attributes; a tensor that is not part of its state as itself."""
    for name, value in vars(module).items():
        if not name.startswith("_"):
            yield name, id(value) if isinstance(value, Tensor) else value
