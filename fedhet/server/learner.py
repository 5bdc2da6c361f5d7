"""A model that the server itself trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedhet.algorithms.rounds import Plateau, rate_factor
from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.base.errors import DivergedError
from fedhet.base.seeding import seeded, torch_generator
from fedhet.base.transfer import all_to_device
from fedhet.learning.devices import compute_for
from fedhet.learning.training import (
    BatchLoss,
    all_finite,
    logits_of,
    optimization_for,
    train_epochs,
)
from fedhet.models import HetModel, load_weights, to_arrays, to_host_arrays
from fedhet.settings.run import RunSettings
from fedhet.wire.contract import MAX_MAGNITUDE
from fedhet.wire.identity import SERVER


class Learner:
    """Trains a model of the server with the run's training settings, over all rounds."""

    def __init__(self, model: HetModel, run: RunSettings) -> None:
        # The thread count affects floating-point sums: fix it, as on the clients.
        torch.set_num_threads(run.engine.threads)
        self.model, self.run = model, run
        self.compute = compute_for(run.engine)
        self.compute.place(model)
        self.plateau = Plateau()
        """What the schedule `plateau` follows: the training loss, or an error of its own."""
        self._known: dict[str, Tensor] = {}
        """What the optimizer of the last round knew, if it is kept."""

    def predict(self, x: Tensor) -> Array:
        """Return the logits [N, C] of x [N, ...]."""
        return logits_of(self.model, x, self.compute).cpu().numpy()

    def train(
        self,
        round: int,
        x: Tensor,
        y: Tensor,
        loss_of: BatchLoss,
        *,
        epochs: int,
        before_epoch: Callable[[int], object] | None = None,
        error_of: Callable[[Array], float] | None = None,
    ) -> Array:
        """Train on x [N, ...] and y [N] as `train_epochs` does; return the logits [N, C] of x.

        The schedule `plateau` follows `error_of` these logits, or the training loss. Raises
        DivergedError, with the model as it was, if it or its logits are of no more use.
        """
        before = copy.deepcopy(self.model.state_dict())
        training, seed = self.run.training, self.run.seed
        factor = rate_factor(training, round, self.run.rounds, self.plateau)
        now = training.model_copy(update={"lr": training.lr * factor})
        optimizing = optimization_for(self.model.parameters(), now, self.compute)
        optimizing.load_state(self.model, self._known)
        self.model.train()
        with seeded(seed, SERVER, round, device=self.compute.device):
            loss = train_epochs(
                x,
                y,
                loss_of,
                optimizing,
                epochs=epochs,
                batch_size=training.batch_size,
                generator=torch_generator(seed, SERVER, round),
                compute=self.compute,
                before_epoch=before_epoch,
            )
        logits = self.predict(x)
        within = bool((np.abs(logits) <= MAX_MAGNITUDE).all())  # False for NaN
        if not (math.isfinite(loss) and all_finite(self.model) and within):
            self.model.load_state_dict(before)
            raise DivergedError(f"the loss is {loss:.3g}")
        error = error_of(logits) if error_of else loss
        self.plateau = self.plateau.after(error, patience=training.patience, decay=training.decay)
        if training.keep_optimizer:
            self._known = optimizing.state(self.model)
        return logits

    def state_dict(self) -> dict[str, Array]:
        """Return the model, and what the next round's optimizer needs."""
        # Before the first round that trains the least error is infinite, which no checkpoint holds.
        plateau = {k: np.array(v) for k, v in vars(self.plateau).items() if math.isfinite(v)}
        return {
            **grouped("model", to_arrays(self.model)),
            **grouped("optimizer", to_host_arrays(self._known)),
            **grouped("plateau", plateau),
        }

    def load_state_dict(self, state: Arrays) -> None:
        """Restore what `state_dict` returned."""
        load_weights(self.model, group(state, "model"))
        kept = {k: torch.tensor(v) for k, v in group(state, "optimizer").items()}
        self._known = all_to_device(kept, self.compute.device)
        self.plateau = Plateau(**{k: v.item() for k, v in group(state, "plateau").items()})
