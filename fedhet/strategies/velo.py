"""Velo strategy: Felo with synthetic instead of mean features (Algorithm 2, "Server process").

Yun-Hin Chan and Edith C. H. Ngai, Exploiting Features and Logits in Heterogeneous Federated
Learning, Computer Networks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedhet.algorithms.classwise import newest_rows
from fedhet.algorithms.feature_models import Cvae, separation, synthesize, train_cvae
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.seeding import numpy_rng, seeded, torch_generator
from fedhet.learning.training import all_finite
from fedhet.methods.velo import SPEC, VeloSettings
from fedhet.models import load_weights, to_arrays
from fedhet.strategies.base import Reply
from fedhet.strategies.felo import FeloStrategy
from fedhet.wire.identity import SERVER

DRAWS = 100
"""Number of synthetic features per class that are used to measure the separation. With ten classes,
the standard error of the separation is below two percentage points."""
STATE = ("features", "labels", "learned", "synthetic", "separation")
"""Attributes saved in the checkpoint, in addition to Felo's state and the CVAE."""


class VeloStrategy(FeloStrategy):
    """Strategy that trains a CVAE on the clients' features and sends synthetic features."""

    spec = SPEC
    settings: VeloSettings

    def init(self) -> None:
        """Build a new CVAE and an empty feature dataset."""
        super().init()
        settings = self.settings
        width = settings.feature_dim
        with seeded(self.run.seed, SERVER, "cvae"):
            self.cvae = Cvae(
                width, self.reference_client.classes, settings.latent_dim, settings.hidden_dim
            )
        self.features = np.zeros((0, width), np.float32)
        """Feature dataset [N, D] of the server, in order of arrival."""
        self.labels = np.zeros(0, np.int64)
        """Classes [N] of `features`."""
        self.learned = np.zeros(0, np.int64)
        """Classes [P] on which the CVAE was trained."""
        self.synthetic = np.zeros((0, settings.samples_per_class, width), np.float32)
        """Synthetic features [P, S, D] of the classes in `learned`."""
        self.separation = 0.0
        """Fraction of synthetic features that are nearest to the mean of their class."""

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the features, train the CVAE, and generate features (lines 3 to 7)."""
        metrics = dict(super().aggregate(round, replies))
        # Add the features to the dataset (line 4), and discard the oldest features. Features of a
        # round are equally old, so a random order decides which features to discard.
        features = np.concatenate([reply.knowledge.tensors["features"] for reply in replies])
        labels = np.concatenate([reply.knowledge.tensors["classes"] for reply in replies])
        order = numpy_rng(self.run.seed, SERVER, round, "arrival").permutation(len(labels))
        features = np.concatenate([self.features, features[order]])
        labels = np.concatenate([self.labels, labels[order]])
        rows = newest_rows(labels, self.settings.memory)
        self.features, self.labels = features[rows], labels[rows]
        metrics["features_kept"] = float(len(self.labels))
        if round % self.settings.interval == 0 and len(self.labels) > 1:
            metrics |= self._train(round)
        if len(self.learned):
            # Generate features of all classes on which the CVAE was trained (line 7).
            draws = torch_generator(self.run.seed, SERVER, round, "synthetic")
            classes, count = torch.tensor(self.learned), self.settings.samples_per_class
            self.synthetic = synthesize(self.cvae, classes, count, draws).numpy()
            metrics |= self._measure_separation(round)
        metrics["synthetic"] = float(len(self.learned) > 0 and self._is_separated)
        return metrics

    @property
    def _is_separated(self) -> bool:
        return self.separation >= self.settings.min_separation

    def entries(self) -> dict[str, Array]:
        """Return Felo's averages, with synthetic features instead of mean features.

        The mean features are used while the separation is below `min-separation`, and for classes
        on which the CVAE was not trained.
        """
        entries = super().entries()
        features = np.repeat(entries["features"][:, None], self.settings.samples_per_class, axis=1)
        if self._is_separated:
            classes = entries["classes"]
            _, rows, indices = np.intersect1d(classes, self.learned, return_indices=True)
            features[rows] = self.synthetic[indices]
        return entries | {"features": features}

    def state_dict(self) -> dict[str, Array]:
        """Return Felo's state, the feature dataset, the CVAE and the synthetic features."""
        weights = {name: value.copy() for name, value in to_arrays(self.cvae).items()}
        values = {name: np.asarray(getattr(self, name)) for name in STATE}
        return super().state_dict() | grouped("velo", values) | grouped("cvae", weights)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(state)
        for name, value in group(state, "velo").items():
            setattr(self, name, value if value.ndim else float(value))
        load_weights(self.cvae, group(state, "cvae"))

    def _train(self, round: int) -> dict[str, float]:
        """Continue to train the CVAE (line 5), and return its loss, or {} if training diverged."""
        before = copy.deepcopy(self.cvae)
        loss = train_cvae(
            self.cvae,
            torch.tensor(self.features),
            torch.tensor(self.labels),
            epochs=self.settings.epochs,
            batch_size=self.settings.cvae_batch_size,
            lr=self.settings.cvae_lr,
            deviation=self.settings.deviation,
            generator=torch_generator(self.run.seed, SERVER, round, "cvae"),
        )
        if not all_finite(self.cvae):
            self.cvae = before
            self.log.notice(f"round {round}: the CVAE diverged; its previous weights are kept")
            return {}
        self.learned = np.union1d(self.learned, self.labels)
        return {"cvae_loss": loss}

    def _measure_separation(self, round: int) -> dict[str, float]:
        """Measure the separation of the CVAE's classes. Returns {} if no class has a mean."""
        means = self.average()
        classes, rows, _ = np.intersect1d(means.classes, self.learned, return_indices=True)
        if not len(classes):  # All clients with these classes have left.
            return {}
        generator = torch_generator(self.run.seed, SERVER, round, "separation")
        generated = synthesize(self.cvae, torch.tensor(classes), DRAWS, generator)
        self.separation = separation(generated, torch.tensor(rows), torch.tensor(means.features))
        return {"separation": self.separation}
