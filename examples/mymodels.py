"""Custom models: a network, and a classifier without gradients."""

from math import prod

import numpy as np
from torch import nn


def tiny(shape, classes):  # e.g. (3, 32, 32), 10
    extractor = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 32), nn.ReLU())
    return extractor, nn.Linear(32, classes)


class NearestMean:
    def fit(self, x, y):
        self.labels = np.unique(y)
        self.means = np.stack([x[y == label].mean(0) for label in self.labels])

    def predict(self, x):
        distances = ((x[:, None] - self.means) ** 2).sum(2)
        return self.labels[distances.argmin(1)]


def nearest_mean(shape, classes):
    return NearestMean()
