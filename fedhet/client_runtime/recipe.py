"""The part of a client's training that depends on the round: rate, augmentation, optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from fedhet.algorithms.schedule import Plateau, rate_factor
from fedhet.base.arrays import group, grouped
from fedhet.base.errors import StateError
from fedhet.base.seeding import torch_generator
from fedhet.client_runtime.semi import FixMatch
from fedhet.client_runtime.state import ClientState
from fedhet.data.spec import Split
from fedhet.kinds import KINDS, augmentation
from fedhet.learning.devices import Compute
from fedhet.learning.training import (
    Augment,
    Epochs,
    LossOfBatch,
    Optimization,
    all_finite,
    optimization,
    train_epochs,
)
from fedhet.runs.measures import WORK
from fedhet.settings.run import RunSettings, TrainingSettings
from fedhet.wire.identity import ClientInfo

OPTIMIZER = "optimizer"
"""The group of tensors, and the fact, of the optimiser that `training.keep-optimizer` keeps."""
PLATEAU = "plateau"
"""The prefix of the facts of the schedule `plateau`."""


class Recipe:
    """Applies a client's training settings in the round that `begin` names.

    What it needs from earlier rounds is in the client's saved state.
    """

    def __init__(
        self, run: RunSettings, info: ClientInfo, state: ClientState, compute: Compute
    ) -> None:
        """Raise DataError if `training.augment` is not for the client's samples."""
        self._seed, self._rounds, self._client = run.seed, run.rounds, info.name
        self._state, self._compute = state, compute
        self._kind, self._shape = KINDS[info.kind], info.shape
        self._change = augmentation(run.training.augment, self._kind, self._shape)
        self._optimizing: Optimization | None = None
        """The optimiser whose state is to be kept."""
        self._samples, self._is_simulated = info.samples, run.pace.is_simulated
        self.work = 0
        """The samples that the round's training has used, each time that it used one."""
        self.begin(1)

    def begin(self, round: int) -> None:
        """Begin a round: its learning rate, and its random draws."""
        self._round, self._optimizing = round, None
        self.work = 0
        self.draws = torch_generator(self._seed, self._client, round, "augment")
        """The generator of the round's augmentations."""

    def counted(self) -> dict[str, float]:
        """Return the samples that the round's training has used, if a simulated clock needs it."""
        return {WORK: float(self.work or self._samples)} if self._is_simulated else {}

    def end(self, settings: TrainingSettings, loss: float | None) -> None:
        """Add to the client's state what later rounds need; `loss` is the training loss.

        Raises StateError if training diverged; the state saved before remains.
        """
        for model in self._state.models.values():
            model.zero_grad()  # gradients take as much as weights while the client waits
        _check_converged(self._state.models.values(), loss)
        self._keep(settings.optimizer)
        if settings.schedule == "plateau" and loss is not None:
            now = self._plateau.after(loss, patience=settings.patience, decay=settings.decay)
            self._state.facts |= {f"{PLATEAU}.{name}": value for name, value in vars(now).items()}

    def optimization(
        self, settings: TrainingSettings, parameters: Iterable[nn.Parameter]
    ) -> Optimization:
        """Return an optimiser over `parameters`, at the round's rate; with its kept state, if any.

        Only its state for the private model is kept: other models, such as a proxy, are replaced
        in each round.
        """
        factor = rate_factor(settings, self._round, self._rounds, self._plateau)
        now = settings.model_copy(update={"lr": settings.lr * factor})
        made = optimization(parameters, now, self._compute)
        if settings.keep_optimizer:
            self._keep(settings.optimizer)
            if self._state.facts.get(OPTIMIZER) == settings.optimizer:
                made.load_state(self._private, group(self._state.tensors, OPTIMIZER))
            self._optimizing = made
        return made

    def train_epochs(
        self,
        settings: TrainingSettings,
        x: Tensor,
        y: Tensor,
        loss_of: LossOfBatch,
        optimizing: Optimization,
        generator: torch.Generator,
        augment: bool | Augment,
        options: Epochs,
    ) -> float:
        """Train as `fedhet.learning.training.train_epochs` does, by default for the local epochs.

        Returns the mean loss of the last epoch.
        """
        options["epochs"] = options.get("epochs") or settings.local_epochs
        options["batch_size"] = options.get("batch_size") or settings.batch_size
        self.work += options["epochs"] * len(y) * options.get("steps", 1)
        change = self.augmentation(augment)
        loss_of = self._compute.compiled(loss_of) if optimizing.compiles else loss_of
        train = partial(train_epochs, generator=generator, compute=self._compute, augment=change)
        return train(x, y, loss_of, optimizing, **options)

    def fix_match(
        self, labelled: Split, unlabelled: Split, model: nn.Module, settings: TrainingSettings
    ) -> FixMatch:
        """Return how the round's training learns from unlabelled samples besides labelled ones."""
        kind, shape, compute = self._kind, self._shape, self._compute
        return FixMatch(labelled, unlabelled, kind, shape, model, settings, compute, self.draws)

    @property
    def augment(self) -> Augment | None:
        """Return the function that changes the images of a batch; None if they do not change."""
        change = self._change
        if change is None:
            return None
        return lambda x: self._compute.images(change(x, self.draws))

    def augmentation(self, wanted: bool | Augment) -> Augment | None:
        """Return `augment` or, if it is not wanted, None; a function is returned as it is."""
        if isinstance(wanted, bool):
            return self.augment if wanted else None
        return wanted

    @property
    def _plateau(self) -> Plateau:
        facts = self._state.facts
        known = {k: facts[f"{PLATEAU}.{k}"] for k in vars(Plateau()) if f"{PLATEAU}.{k}" in facts}
        return Plateau(**known)  # type: ignore[arg-type]

    @property
    def _private(self) -> nn.Module:
        return self._state.models["private"]

    def _keep(self, optimizer: str) -> None:
        """Replace the kept state by that of the round's optimiser, if it is to be kept."""
        if self._optimizing is None:
            return
        found = grouped(OPTIMIZER, self._optimizing.state(self._private))
        others = {k: v for k, v in self._state.tensors.items() if not _is_kept(k)}
        self._state.tensors = others | found
        self._state.facts[OPTIMIZER] = optimizer


def _check_converged(models: Iterable[nn.Module], loss: float | None) -> None:
    """Raise StateError if training diverged."""
    if not all(map(all_finite, models)) or not math.isfinite(loss or 0.0):
        raise StateError(
            f"training diverged (loss {loss}): the client keeps its earlier models; "
            "a smaller 'training.lr' may help"
        )


def _is_kept(name: str) -> bool:
    return name.startswith(f"{OPTIMIZER}/")
