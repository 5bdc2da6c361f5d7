"""Contracts: declarations of the fields in a method's messages, and their validation.

The server side and the client side of a method each declare the fields that they send. Every
message is validated against this declaration. `fedhet methods NAME` and the reference documentation
also show the declaration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any, Literal

import numpy as np

from fedhet.base.arrays import Array, Arrays, Shapes, group_of, grouped
from fedhet.base.errors import KnowledgeError, closest, nearest

MAX_MAGNITUDE = 1e12
"""Maximum absolute value of a number in a message, unless its field sets another limit.

Weights and logits are far smaller. With this limit, sums of squares over a million clients are
finite in float32, and sums of integers fit into int64.
"""
DIGEST_BITS = 59
"""Number of bits in a digest of weights, so that it has at most 18 decimal digits."""
VARIANCES = "running_var"
"""Name of the variances of batch normalization in a state dict."""
SUM_TOLERANCE = 1e-3
"""Maximum difference between 1 and the sum of a probability distribution in float32."""


def require(owner: object, **expected: type | tuple[type, ...]) -> None:
    """Check the types of a declaration's attributes. Raises TypeError if a type is wrong.

    The error thus occurs when the method's module is imported, rather than in a later round.
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
    """Declaration of a tensor in a message.

    Example:
        >>> TensorField("means", "float32", ("P", "D"), "mean features of each class").describe()
        'float32 [P, D]'
    """

    name: str
    dtype: str
    """NumPy dtype, or "uint" for the smallest unsigned type that can represent all valid values.

    For "uint", `ids` or `numbers` must be set.
    """
    axes: tuple[str | int, ...]
    """Axis sizes, each a number or a letter.

    Letters fixed by the run, such as C for classes and D for features, must match the run's sizes.
    Any other letter must have the same size throughout a message.
    """
    help: str
    """Description shown by `fedhet methods NAME`."""
    required: bool = True
    """Whether the message must contain the tensor."""
    ids: str = ""
    """Letter of an axis size; if set, the values must be unique integers in [0, size)."""
    numbers: str = ""
    """Letter of an axis size; if set, the values must be integers in [0, size)."""
    low: float | None = None
    """Minimum value, or None for -MAX_MAGNITUDE."""
    distribution: bool = False
    """Whether each row along the last axis is a probability distribution."""
    counts: bool = False
    """Whether the values are numbers of samples that the client claims, and that act as weights.

    With a robust aggregation rule, all of them become 1, so that all clients have the same weight.
    """
    needs: tuple[str, ...] = ()
    """Fields that must be present if this field is present."""

    def __post_init__(self) -> None:
        """Check the declaration. Raises TypeError or ValueError if it is invalid."""
        require(self, name=str, dtype=str, axes=tuple, help=str, ids=str, numbers=str, needs=tuple)
        require(self, required=bool, distribution=bool, counts=bool, low=_LIMIT)
        if not all(isinstance(axis, int | str) for axis in self.axes):
            raise TypeError(_declared(self, "axes", "letters and numbers", self.axes))
        if self.dtype != "uint":
            try:
                np.dtype(self.dtype)
            except TypeError:
                rule = "'uint' or a NumPy dtype"
                raise ValueError(_declared(self, "dtype", rule, self.dtype)) from None

    def describe(self) -> str:
        """Return the dtype and the axes, e.g. `float32 [P, D]`."""
        return f"{self.dtype} [{', '.join(map(str, self.axes))}]"


@dataclass(frozen=True)
class WeightsField:
    """Declaration of a model's weights in a message.

    The tensors are named `name/<name in the state dict>`. A message contains either all tensors of
    the model or, if `required` is False, none.

    Example:
        >>> WeightsField("models", "stacked weights", stacked="K").describe()
        'weights [K, ...]'
    """

    name: str
    help: str
    """Description shown by `fedhet methods NAME`."""
    required: bool = True
    """Whether the message must contain the weights."""
    low: float | None = None
    """Minimum value, or None for -MAX_MAGNITUDE. Variances must always be at least 0."""
    stacked: str = ""
    """Letter of an additional leading axis that stacks the weights of several models."""
    nested: bool = False
    """Whether the tensors of a smaller model are leading slices of a larger model's tensors."""

    def __post_init__(self) -> None:
        """Check the declaration. Raises TypeError if it is invalid."""
        require(self, name=str, help=str, required=bool, stacked=str, nested=bool, low=_LIMIT)

    def describe(self) -> str:
        """Return a short description of the type."""
        return f"weights [{self.stacked}, ...]" if self.stacked else "weights"

    def expected(self, sender: str, received: Arrays, shapes: Shapes) -> Shapes:
        """Return the shapes and dtypes that the tensors in a message must have.

        Args:
            sender: Name of the sender in error messages.
            received: The received tensors, by their names after `name/`.
            shapes: Shapes and dtypes of the model's tensors.
        """
        return shapes

    def min_value(self, name: str) -> float | None:
        """Return the minimum value of a tensor, or None if it is the default, -MAX_MAGNITUDE."""
        return 0.0 if name.endswith(VARIANCES) else self.low


@dataclass(frozen=True)
class ScalarField:
    """Declaration of a scalar in a message.

    Example:
        >>> ScalarField("samples", int, "number of training samples", low=1).describe()
        'int'
    """

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    help: str
    """Description shown by `fedhet methods NAME`."""
    required: bool = True
    """Whether the message must contain the scalar."""
    low: float | None = None
    """Minimum value, or None for -MAX_MAGNITUDE."""
    high: float | None = None
    """Maximum value, or None for MAX_MAGNITUDE."""

    def __post_init__(self) -> None:
        """Check the declaration. Raises TypeError if it is invalid."""
        require(self, name=str, help=str, required=bool, low=_LIMIT, high=_LIMIT)
        if self.type not in (bool, int, float, str):
            raise TypeError(_declared(self, "type", "bool, int, float, or str", self.type))

    def describe(self) -> str:
        """Return the name of the type."""
        return self.type.__name__


Field = TensorField | WeightsField | ScalarField


@dataclass(frozen=True)
class Sizes:
    """Sizes against which the fields in a message are validated."""

    axes: Mapping[str, int]
    """Sizes of the run, by letter, e.g. {"C": 10, "D": 64}."""
    models: Mapping[str, Shapes] = dataclass_field(default_factory=dict)
    """Shapes and dtypes of the model's tensors, by name of the WeightsField."""
    rows: Mapping[str, Array] = dataclass_field(default_factory=dict)
    """Row indices, by letter, for axes that cover a subset of the public samples."""
    unused: tuple[str, ...] = ()
    """Names of fields that messages of the run must not contain, because of the run's task."""


@dataclass(frozen=True)
class Contract:
    """Fields of the messages that the server side or the client side of a method sends.

    Example:
        >>> Contract((
        ...     TensorField("classes", "uint", ("P",), "class ids", ids="C"),
        ...     TensorField("means", "float32", ("P", "D"), "mean features of each class"),
        ... ))
    """

    fields: tuple[Field, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields.

        Raises TypeError or ValueError unless they are fields with unique names.
        """
        require(self, fields=tuple)
        for index, field in enumerate(self.fields):
            if not isinstance(field, TensorField | WeightsField | ScalarField):
                raise TypeError(_declared(self, "fields", "a tuple of fields", self.fields))
            if any(field.name == other.name for other in self.fields[:index]):
                raise ValueError(f"Contract: duplicate field {field.name!r}")

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the fields that contain model weights."""
        return tuple(field.name for field in self.fields if isinstance(field, WeightsField))

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the fields that contain claimed numbers of samples."""
        return tuple(f.name for f in self.fields if isinstance(f, TensorField) and f.counts)

    def replacing(self, field: Field) -> Contract:
        """Return a copy of the contract in which `field` replaces the field of the same name."""
        return Contract(tuple(field if old.name == field.name else old for old in self.fields))

    def check(
        self,
        sender: str,
        tensors: Mapping[str, Array],
        scalars: Mapping[str, bool | int | float | str],
        sizes: Sizes,
    ) -> None:
        """Validate the content of a message.

        Args:
            sender: Name of the sender in error messages.
            tensors: Tensors in the message, by name.
            scalars: Scalars in the message, by name.
            sizes: Sizes of the run, of its models, and of its public samples.

        Raises:
            KnowledgeError: If the message violates the contract. The error describes the first
                violation.
        """
        fields = [field for field in self.fields if field.name not in sizes.unused]
        self.check_names(sender, tensors, scalars, sizes.unused)
        axes = dict(sizes.axes)
        for field in fields:
            if isinstance(field, WeightsField):
                _check_weights(sender, field, tensors, sizes.models.get(field.name, {}), axes)
            elif isinstance(field, ScalarField):
                if field.name in scalars:
                    _check_scalar(sender, field, scalars[field.name])
            elif field.name in tensors:
                needs = tuple(name for name in field.needs if name not in sizes.unused)
                _check_tensor(sender, replace(field, needs=needs), tensors, axes)

    def check_names(
        self,
        sender: str,
        tensors: Iterable[str],
        scalars: Iterable[str],
        unused: Collection[str] = (),
    ) -> None:
        """Check that a message contains only declared fields, and all required fields.

        Args:
            sender: Name of the sender in error messages.
            tensors: Names of the tensors in the message.
            scalars: Names of the scalars in the message.
            unused: Names of fields that the message must not contain, because of the run's task.

        Raises:
            KnowledgeError: If a field is unknown or missing.
        """
        fields = [field for field in self.fields if field.name not in unused]
        scalar_names = {f.name for f in fields if isinstance(f, ScalarField)}
        tensor_names = {f.name for f in fields if isinstance(f, TensorField)}
        models, sent_models, tensors = set(self.weights), set[str](), [*tensors]
        scalars = [*scalars]
        for name in scalars:
            if name not in scalar_names:
                raise KnowledgeError(sender, name, unknown_field(name, scalar_names))
        for name in tensors:
            model, slash, _ = name.partition("/")
            if name not in tensor_names and not (slash and model in models):
                # A misspelled model is named without the tensor, so that the suggestion fits.
                known = tensor_names | models
                shown = model if slash and closest(model, known) else name
                raise KnowledgeError(sender, name, unknown_field(shown, known))
            sent_models.add(model)
        sent = {*tensors, *scalars, *sent_models}
        for field in fields:
            if field.required and field.name not in sent:
                raise KnowledgeError(sender, field.name, "missing")


@dataclass(frozen=True)
class Sum:
    """Fields of the clients' replies that the server uses only as a weighted sum over clients.

    Example:
        >>> Sum(("weights",)).weight
        'samples'
    """

    fields: tuple[str, ...]
    """Names of the summed fields, except the field with class ids."""
    weight: Literal["samples", "clients", "classes"] = "samples"
    """Weight of a client in the plain method: number of samples ("samples"), 1 ("clients"), or
    number of samples per class ("classes"; 1 if the method's setting `weighting` is "clients").
    With secure aggregation, the weight in the peers file replaces the number of samples."""
    within: Literal["all", "architecture"] = "all"
    """Clients whose fields are summed: all clients, or the clients with the same architecture."""
    only_if: tuple[str, object] | None = None
    """Setting of the method, and the value of this setting that enables the fields; None if the
    fields are always sent."""
    distribution: bool | None = None
    """Tasks in which the fields are sent: only tasks whose outputs are a distribution over classes
    (True), only other tasks (False), or all tasks (None)."""
    differs: tuple[str, ...] = ()
    """Fields of the instruction that differ between the summed clients. All other fields are the
    same for these clients, so the clients' keys depend on them."""
    server: Literal["curious", "malicious"] = "curious"
    """Server from which the sum protects a client: a server that follows the protocol ("curious"),
    or also a server that lies ("malicious").

    A sum resists a malicious server only if a reply depends on nothing except the client's samples
    and what all summed clients have in common, i.e. the settings and the instruction. If clients
    keep a model between rounds, a server can first spoil the models of all clients but one. If
    instructions differ, it can spoil the instructions of all clients but one. In both cases, it
    knows the other replies, and the sum reveals the remaining reply."""

    def __post_init__(self) -> None:
        """Raise TypeError if the declaration is invalid."""
        require(self, fields=tuple, weight=str, within=str, differs=tuple, server=str)


def all_or_none(first: TensorField, *others: TensorField) -> tuple[TensorField, ...]:
    """Return the given fields as optional fields that must occur together in a message."""
    needs = tuple(field.name for field in others)
    return (
        replace(first, required=False, needs=needs),
        *(replace(field, required=False, needs=(first.name,)) for field in others),
    )


def poisonable(contract: Contract) -> tuple[Field, ...]:
    """Return the fields that contain logits, probabilities or weights.

    Fields with a minimum value are excluded, because lower poisoned values would be rejected.
    """
    return tuple(
        field
        for field in contract.fields
        if (isinstance(field, WeightsField) and field.low is None)
        or (isinstance(field, TensorField) and (field.name == "logits" or field.distribution))
    )


def floating(contract: Contract) -> tuple[Field, ...]:
    """Return the fields that contain floating-point numbers of a single client."""
    return tuple(
        field
        for field in contract.fields
        if (isinstance(field, WeightsField) and not field.stacked)
        or (isinstance(field, TensorField) and field.dtype.startswith("float"))
    )


def ids_of(contract: Contract, field: Field) -> str:
    """Return the name of the field with unique ids for the rows of `field`, or "" if it is absent.

    In Felo, for example, each row of class means has a class id.
    """
    return _same_rows(contract, field, "ids")


def labels_of(contract: Contract, field: Field) -> str:
    """Return the name of the field with labels for the rows of `field`, or "" if it is absent.

    In FedGKT, for example, each row of features has a class label.
    """
    return _same_rows(contract, field, "numbers")


def _same_rows(contract: Contract, field: Field, meaning: str) -> str:
    if not isinstance(field, TensorField):
        return ""
    rows = [f for f in contract.fields if isinstance(f, TensorField) and getattr(f, meaning)]
    return next((f.name for f in rows if f.axes == field.axes[:1]), "")


def smallest_uint(size: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer dtype for the values 0 to size - 1."""
    return np.min_scalar_type(max(size, 1) - 1)


def unknown_field(name: str, names: Collection[str]) -> str:
    """Return the message for a field that is not among the declared `names`."""
    rule = f"expected one of {', '.join(sorted(names))}" if names else "expected no field"
    return f"unknown field, {rule}{nearest(name, names)}"


def _check_scalar(sender: str, field: ScalarField, value: bool | int | float | str) -> None:
    fault = ""
    if type(value) is not field.type:
        fault = f"expected {field.type.__name__}, got {type(value).__name__}"
    elif isinstance(value, float) and not np.isfinite(value):
        fault = f"must be finite, got {value}"
    elif isinstance(value, int | float):
        low = -MAX_MAGNITUDE if field.low is None else field.low
        high = MAX_MAGNITUDE if field.high is None else field.high
        if value < low:
            fault = f"must be at least {low}, got {value}"
        elif value > high:
            fault = f"must be at most {high}, got {value}"
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
        raise fault(f"expected dtype {dtype}, got {value.dtype}")
    if value.ndim != len(field.axes):
        raise fault(f"expected {field.describe()}, got shape {list(value.shape)}")
    for axis, size in zip(field.axes, value.shape, strict=True):
        expected = axis if isinstance(axis, int) else sizes.setdefault(axis, size)
        if size != expected:
            where = "" if isinstance(axis, int) else f" with {axis} = {expected}"
            raise fault(f"expected {field.describe()}{where}, got shape {list(value.shape)}")
    check_finite(sender, field.name, value)
    for letter in filter(None, (field.numbers, field.ids)):
        outside = value[(value < 0) | (value >= sizes[letter])]
        if outside.size:
            raise fault(f"must be from 0 to {sizes[letter] - 1}, got {outside[0]}")
    if field.ids:
        ids, counts = np.unique(value, return_counts=True)
        if (counts > 1).any():
            raise fault(f"values must be unique, got {ids[counts > 1][0]} more than once")
    _check_range(sender, field.name, value, field.low)
    if field.distribution:
        outside = value[(value < 0) | (value > 1)]
        if outside.size:
            raise fault(f"probabilities must be from 0 to 1, got {outside[0]:.6g}")
        sums = value.sum(-1, dtype=np.float64)
        wrong = sums[np.abs(sums - 1) > SUM_TOLERANCE]
        if wrong.size:
            raise fault(f"each row must sum to 1, got {wrong[0]:.6g}")
    for name in field.needs:
        if name not in tensors:
            raise KnowledgeError(sender, name, f"missing, required by {field.name}")


def _check_weights(
    sender: str,
    field: WeightsField,
    tensors: Mapping[str, Array],
    shapes: Shapes,
    sizes: dict[str, int],
) -> None:
    received = {name for name in tensors if name.startswith(field.name + "/")}
    if not received and not field.required:
        return
    expected = grouped(field.name, field.expected(sender, group_of(tensors, field.name), shapes))
    for name in sorted(expected.keys() ^ received):
        fault = "missing" if name in expected else "not a tensor of the client's model"
        raise KnowledgeError(sender, name, fault)
    for name, (shape, dtype) in expected.items():
        value = tensors[name]
        if field.stacked:  # The first field that uses the letter sets the number of models.
            count = sizes.setdefault(field.stacked, value.shape[0] if value.ndim else 0)
            shape = (count, *shape)
        if value.shape != shape or value.dtype != np.dtype(dtype):
            fault = f"expected {dtype} {list(shape)}, got {value.dtype} {list(value.shape)}"
            raise KnowledgeError(sender, name, fault)
        check_finite(sender, name, value)
        _check_range(sender, name, value, field.min_value(name))


def _check_range(sender: str, name: str, value: Array, low: float | None) -> None:
    if not value.size:
        return
    # Compare Python numbers, because numpy would convert the limit to the tensor's dtype, perhaps
    # to inf.
    smallest, largest = value.min().item(), value.max().item()
    if low is not None and smallest < low:
        raise KnowledgeError(sender, name, f"must be at least {low}, got {smallest}")
    if smallest < -MAX_MAGNITUDE or largest > MAX_MAGNITUDE:
        outside = smallest if smallest < -MAX_MAGNITUDE else largest
        raise KnowledgeError(
            sender, name, f"magnitude must be at most {MAX_MAGNITUDE:g}, got {outside}"
        )


def check_values(sender: str, name: str, value: Array) -> None:
    """Raise KnowledgeError if a tensor contains NaN, infinity, or numbers beyond MAX_MAGNITUDE."""
    check_finite(sender, name, value)
    _check_range(sender, name, value, None)


def check_finite(sender: str, name: str, value: Array) -> None:
    """Check a floating-point tensor. Raises KnowledgeError if it contains NaN or infinity."""
    if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
        raise KnowledgeError(sender, name, "contains NaN or infinity")
