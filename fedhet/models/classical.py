"""Classifiers without gradients behind a small interface, `fit` and `predict`.

scikit-learn's by name, or a user's own: any object with these two methods, named by the function
that returns it. They are fitted again each time and never pickled. Probabilities are used where a
classifier has them.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedhet.base.arrays import Array
from fedhet.base.errors import ModelError, describe_error
from fedhet.base.seeding import seeded
from fedhet.data.spec import preserve_global_rng
from fedhet.learning.devices import scaled


@runtime_checkable
class Classifier(Protocol):
    """The interface of a model without gradients; scikit-learn's classifiers implement it."""

    def fit(self, x: Array, y: Array) -> object:
        """Fit to samples x [N, F] float32, flattened, and labels y [N] int64."""

    def predict(self, x: Array) -> Array:
        """Return the label [N] of each sample of x [N, F], among the labels seen by `fit`."""


@runtime_checkable
class Probabilistic(Protocol):
    """A fitted classifier with probabilities, as scikit-learn's have them."""

    classes_: Array
    """The labels [P] that the columns of `predict_proba` stand for."""

    def predict_proba(self, x: Array) -> Array:
        """Return the probability [N, P] of each label, for x [N, F]."""


@dataclass(frozen=True)
class ClassicalInfo:
    """A registered classifier: `make(seed)` returns a new, unfitted one."""

    name: str
    family: str
    line: str
    source: str
    make: Callable[[int], Classifier] = field(repr=False, compare=False)


class Refitted(nn.Module):
    """A classifier without gradients as a module, fitted again on each training set.

    Its forward pass returns the predicted class as one-hot logits [N, C], so that it is evaluated
    like any model. It has no parameters or state: to restore it, fit it on the same data.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Classifier],
        classes: int,
        seed: int,
        error: type[ModelError] = ModelError,
    ) -> None:
        """`error`: the type that is raised where the classifier fails."""
        super().__init__()
        self._error = error
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
                raise self._failed("cannot be fitted", error) from error
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
                raise self._failed("cannot predict", error) from error
        return torch.from_numpy(self._checked(predicted, len(x))).to(x.device)

    def probabilities(self, x: Tensor) -> Tensor:
        """Return the probability [N, C] of each class, for x [N, ...].

        They are those of the classifier's `predict_proba`, as scikit-learn defines it. A classifier
        that has none, such as an SVM, counts as certain of what it predicts.
        Raises ModelError for an invalid class or probability.
        """
        certain: Tensor = self(x)
        fitted = self._fitted
        if isinstance(fitted, int) or not isinstance(fitted, Probabilistic):
            return certain
        with _calm(self._seed):
            try:
                found = np.asarray(fitted.predict_proba(_flat(x)), np.float32)
                labels = self._checked(np.asarray(fitted.classes_), found.shape[1])
            except ModelError:
                raise
            except Exception as error:
                raise self._failed("cannot predict", error) from error
        # A float32 probability may be outside 0 to 1 by rounding.
        if len(found) != len(x) or not (np.abs(found - 0.5) <= 0.5 + 1e-5).all():
            wanted = f"[{len(x)}, {len(labels)}], from 0 to 1"
            raise self._error(f"model '{self.name}': its probabilities must be {wanted}")
        columns = torch.zeros(certain.shape)
        columns[:, torch.from_numpy(labels)] = torch.from_numpy(found)
        return columns.to(x.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return one-hot logits [N, C]."""
        return nn.functional.one_hot(self.predict(x), self.classes).float()

    def _failed(self, what: str, error: Exception) -> ModelError:
        return self._error(f"model '{self.name}' {what}: {describe_error(error)}")

    def _checked(self, predicted: Array, count: int) -> npt.NDArray[np.int64]:
        if predicted.shape != (count,) or predicted.dtype.kind not in "iu":
            raise self._error(
                f"model '{self.name}' predicts {predicted.dtype} {list(predicted.shape)}, "
                f"must be whole numbers [{count}]"
            )
        if count and not 0 <= predicted.min() <= predicted.max() < self.classes:
            raise self._error(
                f"model '{self.name}' predicts {predicted.min()} to {predicted.max()}, "
                f"classes are 0 to {self.classes - 1}"
            )
        return predicted.astype(np.int64)


def _flat(x: Tensor) -> npt.NDArray[np.float32]:
    flat: npt.NDArray[np.float32] = scaled(x.detach().cpu()).float().flatten(1).numpy()
    return flat


@contextlib.contextmanager
def _calm(seed: int) -> Iterator[None]:
    """Use one thread, seed global random state, and silence warnings about early stopping."""
    from threadpoolctl import threadpool_limits

    with (
        threadpool_limits(1),
        preserve_global_rng(),
        seeded(seed, "classical"),
        warnings.catch_warnings(),
    ):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        warnings.simplefilter("ignore")
        yield


def numeric_columns(x: Array) -> Array:
    """Return which columns of x [N, F] hold numbers, [M]: those with a value that is not 0 or 1.

    The others are taken to be one-hot. Scaled, a rare category would be as far from the others as
    the most extreme number, and an SVM's distances would depend on it.
    """
    return np.flatnonzero(((x != 0) & (x != 1)).any(0))


def _scikit_learn(name: str, seed: int) -> Any:
    """Return a new classifier; of pipelines, the first steps leave one-hot columns unchanged."""
    if name == "sk-tree":
        from sklearn.tree import DecisionTreeClassifier

        return DecisionTreeClassifier(random_state=seed)
    if name == "sk-boosted-gam":  # the sum of trees that each split on one feature is additive
        from sklearn.ensemble import HistGradientBoostingClassifier

        return HistGradientBoostingClassifier(
            interaction_cst="no_interactions", early_stopping=False, random_state=seed
        )
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import SplineTransformer, StandardScaler

    steps = [StandardScaler()]
    if name == "sk-svm":
        from sklearn.svm import SVC

        last = SVC(random_state=seed)
    elif name == "sk-gam":
        from sklearn.linear_model import LogisticRegression

        steps += [SplineTransformer(n_knots=4, degree=3, include_bias=False)]
        last = LogisticRegression(max_iter=300, random_state=seed)
    else:
        from sklearn.neural_network import MLPClassifier

        last = MLPClassifier((10,), solver="lbfgs", max_iter=300, random_state=seed)
    by_column = make_column_transformer(
        (make_pipeline(*steps), numeric_columns), remainder="passthrough", sparse_threshold=0
    )
    return make_pipeline(by_column, last)


CLASSICAL = tuple(
    ClassicalInfo(
        name, "classical", f"{line}; no gradients", "scikit-learn", partial(_scikit_learn, name)
    )
    for name, line in (
        ("sk-tree", "decision tree"),
        ("sk-svm", "support vector machine, RBF kernel"),
        ("sk-gam", "additive model: cubic splines and a logistic regression"),
        ("sk-boosted-gam", "additive model: boosted trees of a single feature each"),
        ("sk-mlp", "1 hidden layer: 10"),
    )
)
