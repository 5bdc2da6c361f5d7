"""Estimators without gradients: scikit-learn models by name, or custom estimators.

A custom estimator is any object with `fit` and `predict`, returned by a user's function. Estimators
are never pickled, but refitted when they are restored. If a classifier has `predict_proba`, its
probabilities are used. In regression, each target has a separate regressor.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from fedhet.learning.devices import scaled


@runtime_checkable
class Classifier(Protocol):
    """Interface of a model without gradients, which scikit-learn's estimators implement."""

    def fit(self, x: Array, y: Array) -> object:
        """Fit the model to flattened samples x [N, F] float32 and labels y [N] int64.

        In regression, y [N] float64 contains the standardized values of a single target.
        """

    def predict(self, x: Array) -> Array:
        """Return the predicted labels or values [N] for x [N, F]."""


@runtime_checkable
class Probabilistic(Protocol):
    """Interface of a fitted scikit-learn classifier with probabilities."""

    classes_: Array
    """Labels [P] of the columns of `predict_proba`."""

    def predict_proba(self, x: Array) -> Array:
        """Return the label probabilities [N, P] for x [N, F]."""


@dataclass(frozen=True)
class ClassicalInfo:
    """Registry entry for a classifier and the corresponding regressor.

    `make(seed, numbers)` returns a new, unfitted instance; `numbers` selects the regressor.
    """

    name: str
    family: str
    line: str
    source: str
    make: Callable[[int, bool], Classifier] = field(repr=False, compare=False)


class Refitted(nn.Module):
    """Module that wraps a classifier without gradients, which is refitted on each training set.

    The forward pass returns the predicted class as one-hot logits [N, C]. The module has no
    parameters or state; to restore it, fit it on the same data.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Classifier],
        classes: int,
        seed: int,
        error: type[ModelError] = ModelError,
    ) -> None:
        """Create an unfitted module.

        Args:
            name: Model name, for error messages.
            make: Function that returns a new, unfitted classifier.
            classes: Number of classes C.
            seed: Seed for the global random state while the classifier is used.
            error: Exception type to raise if the classifier fails.
        """
        super().__init__()
        self._error = error
        self.name = name
        self.classes = classes
        self._make = make
        self._seed = seed
        self._fitted: Classifier | int | None = None
        self._pending: Callable[[], tuple[Tensor, Tensor]] | None = None

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Fit a new classifier to x [N, ...] and y [N]. Raises ModelError if this fails."""
        self._pending = None
        labels = y.cpu().numpy().copy()
        if len(np.unique(labels)) == 1:
            # scikit-learn does not support training data with a single class, so always predict
            # this class.
            self._fitted = int(labels[0])
            return
        with self._using_estimator("cannot be fitted"):
            classifier = self._make()
            classifier.fit(_flat(x), labels)
        self._fitted = classifier

    def fit_later(self, training_set: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Defer fitting until the next prediction, when `training_set` is called for x and y."""
        self._pending = training_set

    def predict(self, x: Tensor) -> Tensor:
        """Return the predicted classes [N] for x [N, ...].

        Raises ModelError if a predicted class is invalid.
        """
        if self._pending is not None:
            self.fit(*self._pending())
        if self._fitted is None:
            # Predict class 0, because the model is untrained before its first round.
            return torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if isinstance(self._fitted, int):
            return torch.full((len(x),), self._fitted, device=x.device)
        with self._using_estimator("cannot predict"):
            predicted = np.asarray(self._fitted.predict(_flat(x)))
        return torch.from_numpy(self._checked(predicted, len(x))).to(x.device)

    def probabilities(self, x: Tensor) -> Tensor:
        """Return the class probabilities [N, C] for x [N, ...].

        Uses the classifier's `predict_proba`. For a classifier without this method, such as an SVM,
        the predicted class has probability 1. Raises ModelError if a class or a probability is
        invalid.
        """
        one_hot: Tensor = self(x)
        fitted = self._fitted
        if isinstance(fitted, int) or not isinstance(fitted, Probabilistic):
            return one_hot
        with self._using_estimator("cannot predict"):
            values = np.asarray(fitted.predict_proba(_flat(x)), np.float32)
            classes, count = np.asarray(fitted.classes_), values.shape[1]
        labels = self._checked(classes, count)
        # Rounding may move a float32 probability slightly outside [0, 1].
        if len(values) != len(x) or not (np.abs(values - 0.5) <= 0.5 + 1e-5).all():
            rule = f"[{len(x)}, {len(labels)}], from 0 to 1"
            raise self._error(f"model '{self.name}': probabilities must be {rule}")
        probabilities = torch.zeros(one_hot.shape)
        probabilities[:, torch.from_numpy(labels)] = torch.from_numpy(values)
        return probabilities.to(x.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return one-hot logits [N, C]."""
        return nn.functional.one_hot(self.predict(x), self.classes).float()

    @contextlib.contextmanager
    def _using_estimator(self, fault: str) -> Iterator[None]:
        """Use one thread, seed the global random state, and silence warnings in the block.

        Raises ModelError, which contains `fault`, if the block raises an error.
        """
        from threadpoolctl import threadpool_limits

        with (
            threadpool_limits(1),
            seeded(self._seed, "classical"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                yield
            except Exception as error:
                reason = f"model '{self.name}' {fault}: {describe_error(error)}"
                raise self._error(reason) from error

    def _checked(self, predicted: Array, count: int) -> npt.NDArray[np.int64]:
        if predicted.shape != (count,) or predicted.dtype.kind not in "iu":
            raise self._error(
                f"model '{self.name}': predictions must be integers [{count}], got "
                f"{predicted.dtype} {list(predicted.shape)}"
            )
        if count and not 0 <= predicted.min() <= predicted.max() < self.classes:
            raise self._error(
                f"model '{self.name}': predictions must be from 0 to {self.classes - 1}, got "
                f"{predicted.min()} to {predicted.max()}"
            )
        return predicted.astype(np.int64)


class RefittedRegressor(Refitted):
    """Variant of `Refitted` for regression, with a separate regressor for each target.

    The forward pass returns standardized predictions [N, K]. Before the model is fitted, the
    predictions are 0, i.e. the mean of each target.
    """

    _regressors: Sequence[Classifier] = ()

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Fit new regressors to x [N, ...] and y [N, K]. Raises ModelError if a regressor fails."""
        self._pending = None
        with self._using_estimator("cannot be fitted"):
            regressors = [self._make() for _ in range(self.classes)]
            for regressor, target in zip(regressors, y.double().cpu().numpy().T, strict=True):
                regressor.fit(_flat(x), target)
        self._regressors = regressors

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions [N, K]. Raises ModelError if a prediction is not a number."""
        if self._pending is not None:
            self.fit(*self._pending())
        values = np.zeros((len(x), self.classes), np.float32)
        # scikit-learn's regressors reject empty arrays.
        for target, regressor in enumerate(self._regressors if len(x) else ()):
            with self._using_estimator("cannot predict"):
                values[:, target] = np.asarray(regressor.predict(_flat(x))).reshape(len(x))
        return torch.from_numpy(values).to(x.device)


def _flat(x: Tensor) -> npt.NDArray[np.float32]:
    """Return a copy of samples x [N, ...] as an array [N, F], because estimators may change it."""
    return np.array(scaled(x.detach().cpu()).flatten(1).numpy(), np.float32)


def numeric_columns(x: Array) -> Array:
    """Return the indices [M] of columns in x [N, F] with values other than 0 and 1.

    All other columns are assumed to be one-hot. If they were standardized, a rare category would be
    as far from other categories as an extreme number is from the mean, and would dominate an SVM's
    distances.
    """
    return np.flatnonzero(((x != 0) & (x != 1)).any(0))


def _scikit_learn(name: str, seed: int, numbers: bool) -> Any:
    """Return a new classifier or regressor that does not standardize one-hot columns."""
    if name == "sk-tree":
        from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

        return (DecisionTreeRegressor if numbers else DecisionTreeClassifier)(random_state=seed)
    # The model is additive, because each tree splits on a single feature.
    if name == "sk-boosted-gam":
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        boosted = HistGradientBoostingRegressor if numbers else HistGradientBoostingClassifier
        return boosted(interaction_cst="no_interactions", early_stopping=False, random_state=seed)
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import SplineTransformer, StandardScaler

    steps = [StandardScaler()]
    if name == "sk-svm":
        from sklearn.svm import SVC, SVR

        last = SVR() if numbers else SVC(random_state=seed)
    elif name == "sk-gam":
        from sklearn.linear_model import LogisticRegression, Ridge

        steps += [SplineTransformer(n_knots=4, degree=3, include_bias=False)]
        last = Ridge() if numbers else LogisticRegression(max_iter=300, random_state=seed)
    else:
        from sklearn.neural_network import MLPClassifier, MLPRegressor

        network = MLPRegressor if numbers else MLPClassifier
        last = network(hidden_layer_sizes=(10,), solver="lbfgs", max_iter=300, random_state=seed)
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
        ("sk-gam", "additive model: cubic splines and logistic or ridge regression"),
        ("sk-boosted-gam", "additive model: boosted trees with a single feature each"),
        ("sk-mlp", "1 hidden layer: 10"),
    )
)
