"""Classifiers without gradients behind a small interface, `fit` and `predict`.

scikit-learn's by name, or a user's own: any object with these two methods, named by the function
that returns it. They are fitted anew each time and never pickled.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedhet.arrays import Array
from fedhet.data.spec import global_random_kept
from fedhet.errors import ModelError
from fedhet.seeding import seeded


@runtime_checkable
class Classifier(Protocol):
    """The interface of a model without gradients; scikit-learn's classifiers implement it."""

    def fit(self, x: Array, y: Array) -> object:
        """Fit to samples x [N, F] float32, flattened, and labels y [N] int64."""

    def predict(self, x: Array) -> Array:
        """Return the label [N] of each sample of x [N, F], among the labels seen by `fit`."""


@dataclass(frozen=True)
class ClassicalInfo:
    """A registered classifier: `make(seed)` returns a new, unfitted one."""

    name: str
    family: str
    line: str
    source: str
    make: Callable[[int], Classifier] = field(repr=False, compare=False)


class Refitted(nn.Module):
    """A classifier without gradients as a module, fitted anew on each training set.

    Its forward pass returns the predicted class as one-hot logits [N, C], so that it is evaluated
    like any model. It has no parameters or state: to restore it, fit it on the same data.
    """

    def __init__(self, name: str, make: Callable[[], Classifier], classes: int, seed: int) -> None:
        super().__init__()
        self.name = name
        self.classes = classes
        self._make = make
        self._seed = seed
        self._fitted: Classifier | int | None = None
        self._pending: tuple[Tensor, Tensor] | None = None

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Fit a new classifier on x [N, ...] and y [N]. Raises ModelError if that fails."""
        self._pending = None
        labels = y.cpu().numpy()
        if len(np.unique(labels)) == 1:
            # scikit-learn refuses a single class: predict it always.
            self._fitted = int(labels[0])
            return
        with _calm(self._seed):
            try:
                classifier = self._make()
                classifier.fit(_flat(x), labels)
            except Exception as error:
                raise ModelError(f"model '{self.name}' cannot be fitted: {error}") from error
        self._fitted = classifier

    def fit_later(self, x: Tensor, y: Tensor) -> None:
        """Defer fitting on x and y until the next prediction."""
        self._pending = (x, y)

    def predict(self, x: Tensor) -> Tensor:
        """Return the classes [N] of x [N, ...]. Raises ModelError for an invalid class."""
        if self._pending is not None:
            self.fit(*self._pending)
        if self._fitted is None:
            # Untrained, like a network before its first round.
            return torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if isinstance(self._fitted, int):
            return torch.full((len(x),), self._fitted, device=x.device)
        with _calm(self._seed):
            try:
                predicted = np.asarray(self._fitted.predict(_flat(x)))
            except Exception as error:
                raise ModelError(f"model '{self.name}' cannot predict: {error}") from error
        return torch.from_numpy(self._checked(predicted, len(x))).to(x.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return one-hot logits [N, C]."""
        return nn.functional.one_hot(self.predict(x), self.classes).float()

    def _checked(self, predicted: Array, count: int) -> npt.NDArray[np.int64]:
        if predicted.shape != (count,) or predicted.dtype.kind not in "iu":
            raise ModelError(
                f"model '{self.name}' predicts {predicted.dtype} {list(predicted.shape)}, "
                f"must be whole numbers [{count}]"
            )
        if count and not 0 <= predicted.min() <= predicted.max() < self.classes:
            raise ModelError(
                f"model '{self.name}' predicts {predicted.min()} to {predicted.max()}, "
                f"classes are 0 to {self.classes - 1}"
            )
        return predicted.astype(np.int64)


def _flat(x: Tensor) -> npt.NDArray[np.float32]:
    flat: npt.NDArray[np.float32] = x.detach().cpu().float().flatten(1).numpy()
    return flat


@contextlib.contextmanager
def _calm(seed: int) -> Iterator[None]:
    """Use one thread, seed global random state, and silence warnings about early stopping."""
    from threadpoolctl import threadpool_limits

    with (
        threadpool_limits(1),
        global_random_kept(),
        seeded(seed, "classical"),
        warnings.catch_warnings(),
    ):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        warnings.simplefilter("ignore")
        yield


def _tree(seed: int) -> Classifier:
    from sklearn.tree import DecisionTreeClassifier

    return DecisionTreeClassifier(random_state=seed)  # type: ignore[no-any-return]


def _svm(seed: int) -> Classifier:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    return make_pipeline(StandardScaler(), SVC(random_state=seed))  # type: ignore[no-any-return]


def _gam(seed: int) -> Classifier:
    """Return cubic splines, one per feature, summed: logistic regression on SplineTransformer."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import SplineTransformer, StandardScaler

    return make_pipeline(  # type: ignore[no-any-return]
        StandardScaler(),
        SplineTransformer(n_knots=4, degree=3, include_bias=False),
        LogisticRegression(max_iter=300, random_state=seed),
    )


def _mlp(seed: int) -> Classifier:
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    network = MLPClassifier((10,), solver="lbfgs", max_iter=300, random_state=seed)
    return make_pipeline(StandardScaler(), network)  # type: ignore[no-any-return]


def _info(name: str, line: str, make: Callable[[int], Classifier]) -> ClassicalInfo:
    return ClassicalInfo(name, "classical", f"{line}; no gradients", "scikit-learn", make)


CLASSICAL = (
    _info("sk-tree", "decision tree", _tree),
    _info("sk-svm", "support vector machine, RBF kernel", _svm),
    _info("sk-gam", "additive model: cubic splines and a logistic regression", _gam),
    _info("sk-mlp", "1 hidden layer: 10", _mlp),
)
