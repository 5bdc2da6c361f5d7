"""Training of a model on the server."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.base.errors import DivergedError
from fedhet.base.seeding import seeded, torch_generator
from fedhet.base.transfer import all_to_device
from fedhet.learning.devices import compute_for
from fedhet.learning.training import (
    BatchLoss,
    Plateau,
    all_finite,
    logits_of,
    optimization_for,
    rate_factor,
    train_epochs,
)
from fedhet.models import HetModel, load_weights, to_arrays, to_host_arrays
from fedhet.settings.run import RunSettings
from fedhet.wire.contract import MAX_MAGNITUDE
from fedhet.wire.identity import SERVER


class Learner:
    """Trainer for a server model. Uses the run's training settings."""

    def __init__(self, model: HetModel, run: RunSettings) -> None:
        # Use the same number of threads as each client does, because this number affects
        # floating-point sums.
        torch.set_num_threads(run.engine.threads)
        self.model, self.run = model, run
        self.compute = compute_for(run.engine)
        self.compute.place(model)
        self.plateau = Plateau()
        """State of the learning-rate schedule `plateau`, which tracks the training loss or another
        error."""
        self._optimizer_state: dict[str, Tensor] = {}
        """Optimizer state after the last round, if 'training.keep-optimizer' is set."""

    def predict(self, x: Tensor) -> Array:
        """Return the logits of shape [N, C] for samples `x` of shape [N, ...]."""
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
        """Train the model with `train_epochs`, and return its logits on the training samples.

        Args:
            round: The current round, which determines the learning rate and the random draws.
            x: Samples of shape [N, ...].
            y: Targets of shape [N, ...].
            loss_of: Function that computes the loss of a batch.
            epochs: Number of epochs.
            before_epoch: Called before each epoch with the number of the epoch.
            error_of: Function that computes the error for the schedule `plateau` from the logits.
                By default, the schedule uses the training loss.

        Returns:
            Logits of shape [N, C].

        Raises:
            DivergedError: If the weights or the logits are not finite or too large. The model is
                then unchanged.
        """
        before = copy.deepcopy(self.model.state_dict())
        training, seed = self.run.training.first(), self.run.seed
        factor = rate_factor(training, round, self.run.rounds, self.plateau)
        optimizing = optimization_for(self.model.parameters(), training, self.compute, factor)
        optimizing.load_state(self.model, self._optimizer_state)
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
        in_range = bool((np.abs(logits) <= MAX_MAGNITUDE).all())  # NaN is not in range.
        if not (math.isfinite(loss) and all_finite(self.model) and in_range):
            self.model.load_state_dict(before)
            raise DivergedError(f"the loss is {loss:.3g}")
        error = error_of(logits) if error_of else loss
        self.plateau = self.plateau.after(error, patience=training.patience, decay=training.decay)
        if training.keep_optimizer:
            self._optimizer_state = optimizing.state(self.model)
        return logits

    def state_dict(self) -> dict[str, Array]:
        """Return the weights, and the states of the optimizer and of the schedule."""
        # Before the first training, the lowest error is infinite, which a checkpoint cannot store.
        plateau = {k: np.array(v) for k, v in vars(self.plateau).items() if math.isfinite(v)}
        return {
            **grouped("model", to_arrays(self.model)),
            **grouped("optimizer", to_host_arrays(self._optimizer_state)),
            **grouped("plateau", plateau),
        }

    def load_state_dict(self, state: Arrays) -> None:
        """Restore the state returned by `state_dict`."""
        load_weights(self.model, group(state, "model"))
        tensors = {k: torch.tensor(v) for k, v in group(state, "optimizer").items()}
        self._optimizer_state = all_to_device(tensors, self.compute.device)
        self.plateau = Plateau(**{k: v.item() for k, v in group(state, "plateau").items()})
