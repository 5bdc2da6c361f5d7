"""Velo, server half: Algorithm 2, "Server process". Felo with synthetic features instead of means.

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
"""Synthetic features of each class from which the separation is measured, whatever number is sent.
With ten classes, its standard error is below two points."""
KEPT = ("features", "labels", "learned", "synthetic", "separation")
"""The strategy's own state across rounds, besides Felo's and the CVAE."""


class VeloStrategy(FeloStrategy):
    """Trains a CVAE on the clients' features and sends synthetic features; otherwise as Felo."""

    spec = SPEC
    settings: VeloSettings

    def init(self) -> None:
        """Start from a new, untrained CVAE and an empty feature dataset."""
        super().init()
        sizes = self.settings
        with seeded(self.run.seed, SERVER, "cvae"):
            self.cvae = Cvae(
                sizes.feature_dim, self.task.classes, sizes.latent_dim, sizes.hidden_dim
            )
        self.features = np.zeros((0, sizes.feature_dim), np.float32)
        """The server feature dataset [N, D], in order of arrival."""
        self.labels = np.zeros(0, np.int64)
        """The classes of `features`, [N]."""
        self.learned = np.zeros(0, np.int64)
        """The classes [P] that the CVAE has been trained on."""
        self.synthetic = np.zeros((0, sizes.samples_per_class, sizes.feature_dim), np.float32)
        """This round's features of the classes in `learned`, [P, S, D]."""
        self.separation = 0.0
        """The share of synthetic features that are nearest to their own class's mean."""

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Run lines 3 to 7: store the features, train the CVAE if it is due, decode."""
        metrics = dict(super().aggregate(round, replies))
        self._keep(round, replies)
        metrics["features_kept"] = float(len(self.labels))
        if round % self.settings.interval == 0 and len(self.labels) > 1:
            metrics |= self._train(round)
        if len(self.learned):
            # Decode this round's features of every class that the CVAE has learned (line 7).
            draws = torch_generator(self.run.seed, SERVER, round, "synthetic")
            classes, count = torch.tensor(self.learned), self.settings.samples_per_class
            self.synthetic = synthesize(self.cvae, classes, count, draws).numpy()
            metrics |= self._measure(round)
        return metrics

    def entries(self) -> dict[str, Array]:
        """Return Felo's entries, with synthetic features for classes the CVAE has learned.

        The means are sent as long as the CVAE does not separate the classes.
        """
        entries = super().entries()
        features = np.repeat(entries["features"][:, None], self.settings.samples_per_class, axis=1)
        if self.separation >= self.settings.min_separation:
            _, rows, found = np.intersect1d(entries["classes"], self.learned, return_indices=True)
            features[rows] = self.synthetic[found]
        return entries | {"features": features}

    def state_dict(self) -> dict[str, Array]:
        """Return Felo's state, the feature dataset, the CVAE and the latest synthetic features."""
        weights = {name: value.copy() for name, value in to_arrays(self.cvae).items()}
        own = {name: np.asarray(getattr(self, name)) for name in KEPT}
        return super().state_dict() | grouped("velo", own) | grouped("cvae", weights)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(state)
        for name, value in group(state, "velo").items():
            setattr(self, name, value if value.ndim else float(value))
        load_weights(self.cvae, group(state, "cvae"))

    def _keep(self, round: int, replies: Sequence[Reply]) -> None:
        """Add the replies' features to the dataset (line 4), and drop the oldest."""
        features = np.concatenate([reply.knowledge.tensors["features"] for reply in replies])
        labels = np.concatenate([reply.knowledge.tensors["classes"] for reply in replies])
        # Features of one round are equally old: a random order, not the names, decides which stay.
        order = numpy_rng(self.run.seed, SERVER, round, "arrival").permutation(len(labels))
        features = np.concatenate([self.features, features[order]])
        labels = np.concatenate([self.labels, labels[order]])
        rows = newest_rows(labels, self.settings.memory)
        self.features, self.labels = features[rows], labels[rows]

    def _train(self, round: int) -> dict[str, float]:
        """Continue training the CVAE (line 5); return its loss, or nothing if it diverged."""
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
            self.log.notice(f"the CVAE diverged in round {round}: the previous one is kept")
            return {}
        self.learned = np.union1d(self.learned, self.labels)
        return {"cvae_loss": loss}

    def _measure(self, round: int) -> dict[str, float]:
        """Return how well the CVAE separates the classes, or nothing without class means."""
        means = self.average()
        classes, rows, _ = np.intersect1d(means.classes, self.learned, return_indices=True)
        if not len(classes):  # all clients that had them have left
            return {}
        generator = torch_generator(self.run.seed, SERVER, round, "separation")
        drawn = synthesize(self.cvae, torch.tensor(classes), DRAWS, generator)
        self.separation = separation(drawn, torch.tensor(rows), torch.tensor(means.features))
        return {"separation": self.separation}
