"""Contracts: a method's declaration of the fields of its messages, and the check against it.

Each half of a method declares the fields of the knowledge it sends. This one declaration is used to
validate every message, by `fedhet methods NAME` and by the reference page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np

from fedhet.base.arrays import Array, Arrays, Shapes, group_of, grouped
from fedhet.base.errors import KnowledgeError, nearest

MAX_MAGNITUDE = 1e12
"""The largest absolute value of a number that travels, unless its field allows another.

No model or logit comes near it. Sums of squares of such numbers, and their sums over a million
clients, are finite in float32; sums of such integers fit into int64.
"""
VARIANCES = "running_var"
"""The name in a state dict under which batch normalization keeps its variances."""
SUM_TOLERANCE = 1e-3
"""How far the sum of a probability distribution in float32 may be from 1."""


def require(owner: object, **expected: type | tuple[type, ...]) -> None:
    """Raise TypeError if an attribute of a declaration has a type other than the expected ones.

    A method is declared in its author's module: a fault is reported there, not in a later round.
    """
    for name, types in expected.items():
        value = getattr(owner, name)
        if not isinstance(value, types):
            kinds = types if isinstance(types, tuple) else (types,)
            rule = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise TypeError(_declared(owner, name, rule, value))


def _declared(owner: object, name: str, rule: str, value: object) -> str:
    title = getattr(owner, "name", None)
    where = f"{type(owner).__name__}{f' {title!r}' if isinstance(title, str) else ''}"
    return f"{where}: '{name}' must be {rule}, got {value!r:.100}"


_LIMIT = (int, float, type(None))


@dataclass(frozen=True)
class TensorField:
    """A named tensor.

    An axis is a number or a letter. Letters that the run fixes (C classes, D feature width) must
    have the run's size; other letters must have one size throughout a message. The dtype "uint" is
    the smallest unsigned integer type for values below the size that `ids` or `numbers` names.
    """

    name: str
    dtype: str
    axes: tuple[str | int, ...]
    help: str
    required: bool = True
    ids: str = ""
    """Letter of the axis that the values index: each value in [0, size), without repetition."""
    numbers: str = ""
    """Letter of a size that bounds the values: each in [0, size), possibly repeated."""
    low: float | None = None
    """Minimum value."""
    distribution: bool = False
    """Whether each row along the last axis is a probability distribution."""
    needs: tuple[str, ...] = ()
    """Fields that must be present if this one is."""

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a declaration that no message could satisfy."""
        require(self, name=str, dtype=str, axes=tuple, help=str, ids=str, numbers=str, needs=tuple)
        require(self, required=bool, distribution=bool, low=_LIMIT)
        if not all(isinstance(axis, int | str) for axis in self.axes):
            raise TypeError(_declared(self, "axes", "letters and numbers", self.axes))
        if self.dtype != "uint":
            try:
                np.dtype(self.dtype)
            except TypeError:
                rule = "'uint' or a dtype of NumPy"
                raise ValueError(_declared(self, "dtype", rule, self.dtype)) from None

    def describe(self) -> str:
        """Return the dtype and axes, such as `float32 [P, D]`."""
        return f"{self.dtype} [{', '.join(map(str, self.axes))}]"


@dataclass(frozen=True)
class WeightsField:
    """A whole model: tensors `name/<name in the state dict>`, either all of them or none."""

    name: str
    help: str
    required: bool = True
    low: float | None = None
    """Minimum value."""
    stacked: str = ""
    """Letter of an additional first axis of every tensor: the number of models stacked along it."""
    nested: bool = False
    """Whether the tensors of smaller models are the leading parts of those of larger ones."""

    def __post_init__(self) -> None:
        """Raise TypeError for a declaration that no message could satisfy."""
        require(self, name=str, help=str, required=bool, stacked=str, nested=bool, low=_LIMIT)

    def describe(self) -> str:
        """Return a short name of the type."""
        return f"weights [{self.stacked}, ...]" if self.stacked else "weights"

    def expected(self, sender: str, found: Arrays, shapes: Shapes) -> Shapes:
        """Return the tensors that a message must have, by their names after `name/`.

        `found` are those that it has, `shapes` those of the model.
        """
        return shapes

    def least(self, name: str) -> float | None:
        """Return the minimum value of a tensor."""
        return 0.0 if name.endswith(VARIANCES) else self.low


@dataclass(frozen=True)
class ScalarField:
    """A scalar."""

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    help: str
    required: bool = True
    low: float | None = None
    high: float | None = None
    """Maximum value; None: MAX_MAGNITUDE."""

    def __post_init__(self) -> None:
        """Raise TypeError for a declaration that no message could satisfy."""
        require(self, name=str, help=str, required=bool, low=_LIMIT, high=_LIMIT)
        if self.type not in (bool, int, float, str):
            raise TypeError(_declared(self, "type", "bool, int, float or str", self.type))

    def describe(self) -> str:
        """Return the type's name."""
        return self.type.__name__


Field = TensorField | WeightsField | ScalarField


@dataclass(frozen=True)
class Sizes:
    """The sizes against which the fields of a message are checked.

    `axes`: the run's sizes by letter, e.g. {"C": 10, "D": 64}; `models`: for each WeightsField, the
    tensors of its model; `rows`: for a letter whose rows are some of a larger set, such as the
    public samples, their numbers in it.
    """

    axes: Mapping[str, int]
    models: Mapping[str, Shapes] = dataclass_field(default_factory=dict)
    rows: Mapping[str, Array] = dataclass_field(default_factory=dict)


@dataclass(frozen=True)
class Contract:
    """The fields of the knowledge that one half of a method sends."""

    fields: tuple[Field, ...] = ()

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless `fields` holds fields with different names."""
        require(self, fields=tuple)
        for index, field in enumerate(self.fields):
            if not isinstance(field, TensorField | WeightsField | ScalarField):
                raise TypeError(_declared(self, "fields", "a tuple of fields", self.fields))
            if any(field.name == other.name for other in self.fields[:index]):
                raise ValueError(f"Contract: two fields are named {field.name!r}")

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the fields that hold the weights of models."""
        return tuple(field.name for field in self.fields if isinstance(field, WeightsField))

    def replacing(self, field: Field) -> Contract:
        """Return this contract with the field of the same name replaced by `field`."""
        return Contract(tuple(field if old.name == field.name else old for old in self.fields))

    def check(
        self,
        sender: str,
        tensors: Mapping[str, Array],
        scalars: Mapping[str, bool | int | float | str],
        sizes: Sizes,
    ) -> None:
        """Raise KnowledgeError for the first violation in a message."""
        scalar_names = {f.name for f in self.fields if isinstance(f, ScalarField)}
        tensor_names = {f.name for f in self.fields if isinstance(f, TensorField)}
        models = set(self.weights)
        for name in scalars:
            if name not in scalar_names:
                raise _undeclared(sender, name, scalar_names)
        for name in tensors:
            model, slash, _ = name.partition("/")
            if name not in tensor_names and not (slash and model in models):
                raise _undeclared(sender, name, tensor_names | models)
        axes = dict(sizes.axes)
        for field in self.fields:
            if isinstance(field, WeightsField):
                _check_weights(sender, field, tensors, sizes.models.get(field.name, {}), axes)
            elif field.name not in (scalars if isinstance(field, ScalarField) else tensors):
                if field.required:
                    raise KnowledgeError(sender, field.name, "missing")
            elif isinstance(field, ScalarField):
                _check_scalar(sender, field, scalars[field.name])
            else:
                _check_tensor(sender, field, tensors, axes)


def all_or_none(first: TensorField, *others: TensorField) -> tuple[TensorField, ...]:
    """Return these fields as optional: a message has all of them, or none."""
    needs = tuple(field.name for field in others)
    return (
        replace(first, required=False, needs=needs),
        *(replace(field, required=False, needs=(first.name,)) for field in others),
    )


def poisonable(contract: Contract) -> tuple[Field, ...]:
    """Return the fields of a message that are logits, probabilities or weights.

    Fields with a minimum value are excluded: poisoned values below it would be rejected.
    """
    return tuple(
        field
        for field in contract.fields
        if (isinstance(field, WeightsField) and field.low is None)
        or (isinstance(field, TensorField) and (field.name == "logits" or field.distribution))
    )


def floating(contract: Contract) -> tuple[Field, ...]:
    """Return the fields of a message that hold floating-point numbers of each client's own."""
    return tuple(
        field
        for field in contract.fields
        if (isinstance(field, WeightsField) and not field.stacked)
        or (isinstance(field, TensorField) and field.dtype.startswith("float"))
    )


def ids_of(contract: Contract, field: Field) -> str:
    """Return the field that numbers the rows of a tensor field, such as Felo's classes, or ""."""
    return _same_rows(contract, field, "ids")


def labels_of(contract: Contract, field: Field) -> str:
    """Return the field with the class of each row of a tensor field, such as FedGKT's, or ""."""
    return _same_rows(contract, field, "numbers")


def _same_rows(contract: Contract, field: Field, meaning: str) -> str:
    if not isinstance(field, TensorField):
        return ""
    rows = [f for f in contract.fields if isinstance(f, TensorField) and getattr(f, meaning)]
    return next((f.name for f in rows if f.axes == field.axes[:1]), "")


def smallest_uint(size: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer type for the values 0 to size - 1."""
    return np.min_scalar_type(max(size, 1) - 1)


def _undeclared(sender: str, name: str, names: set[str]) -> KnowledgeError:
    known = ", ".join(sorted(names)) or "nothing"
    return KnowledgeError(
        sender, name, f"not in the contract, which has {known}{nearest(name, names)}"
    )


def _check_scalar(sender: str, field: ScalarField, value: bool | int | float | str) -> None:
    fault = ""
    if type(value) is not field.type:
        fault = f"is {type(value).__name__}, must be {field.type.__name__}"
    elif isinstance(value, float) and not np.isfinite(value):
        fault = f"is {value}, must be finite"
    elif isinstance(value, int | float):
        low = -MAX_MAGNITUDE if field.low is None else field.low
        high = MAX_MAGNITUDE if field.high is None else field.high
        if value < low:
            fault = f"is {value}, must be at least {low}"
        elif value > high:
            fault = f"is {value}, must be at most {high}"
    if fault:
        raise KnowledgeError(sender, field.name, fault)


def _check_tensor(
    sender: str, field: TensorField, tensors: Mapping[str, Array], sizes: dict[str, int]
) -> None:
    value, dtype = tensors[field.name], field.dtype

    def fault(text: str) -> KnowledgeError:
        return KnowledgeError(sender, field.name, text)

    if dtype == "uint":
        dtype = smallest_uint(sizes[field.ids or field.numbers]).name
    if value.dtype != np.dtype(dtype):
        raise fault(f"is {value.dtype}, must be {dtype}")
    if value.ndim != len(field.axes):
        raise fault(f"has shape {list(value.shape)}, must be {field.describe()}")
    for axis, size in zip(field.axes, value.shape, strict=True):
        expected = axis if isinstance(axis, int) else sizes.setdefault(axis, size)
        if size != expected:
            where = "" if isinstance(axis, int) else f" with {axis} = {expected}"
            raise fault(f"has shape {list(value.shape)}, must be {field.describe()}{where}")
    check_finite(sender, field.name, value)
    for letter in filter(None, (field.numbers, field.ids)):
        outside = value[(value < 0) | (value >= sizes[letter])]
        if outside.size:
            raise fault(f"holds {outside[0]}, must be from 0 to {sizes[letter] - 1}")
    if field.ids:
        ids, counts = np.unique(value, return_counts=True)
        if (counts > 1).any():
            raise fault(f"holds {ids[counts > 1][0]} more than once")
    _check_range(sender, field.name, value, field.low)
    if field.distribution:
        outside = value[(value < 0) | (value > 1)]
        if outside.size:
            raise fault(f"holds {outside[0]:.6g}, must be from 0 to 1")
        sums = value.sum(-1, dtype=np.float64)
        wrong = sums[np.abs(sums - 1) > SUM_TOLERANCE]
        if wrong.size:
            raise fault(f"has a row that sums to {wrong[0]:.6g}, must be 1")
    for name in field.needs:
        if name not in tensors:
            raise KnowledgeError(sender, name, f"missing, {field.name} needs it")


def _check_weights(
    sender: str,
    field: WeightsField,
    tensors: Mapping[str, Array],
    shapes: Shapes,
    sizes: dict[str, int],
) -> None:
    found = {name for name in tensors if name.startswith(field.name + "/")}
    if not found and not field.required:
        return
    expected = grouped(field.name, field.expected(sender, group_of(tensors, field.name), shapes))
    for name in sorted(expected.keys() ^ found):
        fault = "missing" if name in expected else "not a tensor of this client's model"
        raise KnowledgeError(sender, name, fault)
    for name, (shape, dtype) in expected.items():
        value = tensors[name]
        if field.stacked:  # the first field that uses the letter sets the number of models
            count = sizes.setdefault(field.stacked, value.shape[0] if value.ndim else 0)
            shape = (count, *shape)
        if value.shape != shape or value.dtype != np.dtype(dtype):
            fault = f"is {value.dtype} {list(value.shape)}, must be {dtype} {list(shape)}"
            raise KnowledgeError(sender, name, fault)
        check_finite(sender, name, value)
        _check_range(sender, name, value, field.least(name))


def _check_range(sender: str, name: str, value: Array, low: float | None) -> None:
    if not value.size:
        return
    # As Python's numbers: numpy would compare in the tensor's type, where the limit may be inf.
    least, most = value.min().item(), value.max().item()
    if low is not None and least < low:
        raise KnowledgeError(sender, name, f"holds {least}, the least is {low}")
    if least < -MAX_MAGNITUDE or most > MAX_MAGNITUDE:
        odd = least if least < -MAX_MAGNITUDE else most
        raise KnowledgeError(
            sender, name, f"holds {odd}, the most allowed is {MAX_MAGNITUDE:g} either way"
        )


def check_finite(sender: str, name: str, value: Array) -> None:
    """Raise KnowledgeError if a floating-point tensor holds NaN or infinity."""
    if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
        raise KnowledgeError(sender, name, "holds NaN or infinity")
