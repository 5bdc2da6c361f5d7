"""The schema of a settings table: names, types, ranges, descriptions, and error messages.

A setting has one kebab-case name with its table's, such as `training.lr`: the same on the command
line, in a TOML file and in Flower's run config. The tables that every run has are in `run` and
`engine`; a method's own is the `MethodSettings` that it declares. A list in TOML or in Python is a
tuple in a table, which can be hashed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
)
from pydantic.fields import FieldInfo

from fedhet.base.errors import SettingsError, closest
from fedhet.base.metrics import chosen

Scalar = bool | int | float | str
S = TypeVar("S", bound="Schema")
FAR = 1_000_000
"""From here on, the upper end of a range only keeps numbers finite."""
RANGE = "an integer >= 1, or a range, such as [6, 8]"
A_MODEL, A_METHOD, A_DATASET = "the name of a model", "a method's name", "a dataset's name"
A_FOLDER, A_DEVICE, AN_ADDRESS = "a folder", "a device", "an address"
NAMED = (A_MODEL, A_METHOD, A_DATASET, A_FOLDER, A_DEVICE, AN_ADDRESS)
"""What the text of a setting may name; one of them is in the annotation of such a setting."""


def kebab(name: str) -> str:
    """Return the public name of a field: `local_epochs` is `local-epochs`."""
    return name.rstrip("_").replace("_", "-")


class Schema(BaseModel):
    """A frozen set of settings with kebab-case names; rejects unknown names and wrong types.

    A field may itself be a schema (a table); its settings then have dotted names.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True
    )

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Return the settings by their public names, in the order of declaration."""
        return dict(_fields(cls))

    def flat(self) -> dict[str, Any]:
        """Return the values by their public names, as TOML and JSON have them: lists for tuples."""
        found: dict[str, Any] = {}
        for name in type(self).model_fields:
            value, own = getattr(self, name), kebab(name)
            if isinstance(value, Schema):
                found |= {f"{own}.{inner}": each for inner, each in value.flat().items()}
            else:
                found[own] = plain(value)
        return found


@cache
def _fields(schema: type[Schema]) -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for name, info in schema.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Schema):
            inner = _fields(info.annotation)
            found |= {f"{kebab(name)}.{own}": setting for own, setting in inner.items()}
        else:
            found[kebab(name)] = info
    return found


class MethodSettings(Schema):
    """Base class of a method's settings; both halves of the method read them."""

    def fixed_rounds(self) -> int | None:
        """Return the number of rounds that the settings require; None: as set by `rounds`."""
        return None

    def uses_public(self) -> bool:
        """Return whether the settings require public data, if not every run of the method does."""
        return False


class Frozen(dict[str, Any]):
    """A map that can be hashed, and must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        """Return a hash of the items, whatever their order."""
        return hash(frozenset(self.items()))


def plain(value: Any) -> Any:
    """Return a value with lists for tuples, as TOML and JSON have it."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return dict(value) if isinstance(value, dict) else value


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in tables by dotted names: `{"felo": {"alpha": 1}}` becomes `felo.alpha`."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping) and "." not in name:
            flat |= {f"{name}.{own}": each for own, each in value.items()}
        else:
            flat[name] = value
    return flat


def table_of(name: str) -> str:
    """Return the table of a setting by its full name; "" if it is in none."""
    return name.rpartition(".")[0]


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted names as nested tables, settings without a table first."""
    tree = {name: value for name, value in flat.items() if "." not in name}
    for name, value in flat.items():
        table, dot, own = name.partition(".")
        if dot:
            tree.setdefault(table, {})[own] = value
    return tree


def machine(default: Any, description: str) -> Any:
    """Return a field that says where and on what a run runs, not what it computes."""
    return Field(default, description=description, json_schema_extra={"machine": True})


def is_machine(info: FieldInfo) -> bool:
    """Return whether a setting was declared by `machine`."""
    return isinstance(info.json_schema_extra, dict) and "machine" in info.json_schema_extra


def names(info: FieldInfo) -> str:
    """Return what a setting names, one of NAMED; "" if it does not say."""
    return next((mark for mark in info.metadata if mark in NAMED), "")


def _each(value: Any, validated: Callable[[Any], Any]) -> Any:
    if not isinstance(value, list | tuple) or not value:
        return validated(value)
    found = tuple(map(validated, value))
    return found if len(found) > 1 else found[0]


Assigned = WrapValidator(_each)
"""Marks a setting that may have several values, a list of which each client is assigned one.

The annotation is the type of one value. A run's table holds one value, or a tuple of several, which
`TrainingSettings.pools` returns.
"""


def is_assigned(info: FieldInfo) -> bool:
    """Return whether a setting may have several values, of which each client is assigned one."""
    return Assigned in info.metadata


def _listed(value: object) -> object:
    """Return a list as a tuple, and a lone value as a tuple of one."""
    if isinstance(value, str) and "," in value:
        names = json.dumps([name.strip() for name in value.split(",")], ensure_ascii=False)
        raise ValueError(f"it takes a list, such as {names}")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _ends(value: object) -> object:
    """Return the two ends of a range; those of 7 are 7 and 7."""
    ends = tuple(value) if isinstance(value, list | tuple) else (value,)
    return ends * 2 if len(ends) == 1 else ends


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError("it takes a list of integers >= 1, ascending")
    return values


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values or len(set(values)) < len(values):
        raise ValueError("it takes a list of one value or more, none twice")
    return values


def _upward(ends: tuple[int, int]) -> tuple[int, int]:
    if ends[0] > ends[1]:
        raise ValueError(f"it takes {RANGE}")
    return ends


# Types and ranges that several settings share.
ModelName = Annotated[str, A_MODEL]
"""The name of a model, which `resolve` checks."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Listed = BeforeValidator(_listed)
"""Lets a tuple be given as a list, and as a lone value."""
Distinct = AfterValidator(_distinct)
"""Refuses a tuple that is empty or holds a value twice."""
Names = Annotated[tuple[str, ...], Listed]
Metrics = Annotated[tuple[str, ...], Listed, AfterValidator(chosen)]
"""Names of metrics, accuracy among them."""
Ascending = Annotated[tuple[Count, ...], Listed, AfterValidator(_ascending)]
Range = Annotated[tuple[Count, Count], BeforeValidator(_ends), AfterValidator(_upward)]
"""The two ends of a range, both of which are in it."""
Bytes = Annotated[int, Field(ge=1, le=2**60)]
Vocabulary = Annotated[int, Field(ge=16, le=65_536)]
Tokens = Annotated[int, Field(ge=1, le=4096)]
Side = Annotated[int, Field(ge=0, le=65_535)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


def takes(info: FieldInfo, *, brief: bool = False) -> str:
    """Describe the values that a setting accepts; if `brief`, without ends from FAR on."""
    allowed = _allowed(info.annotation, info.metadata, brief)
    return allowed + (", or a list of such" if is_assigned(info) else "")


def _allowed(kind: Any, metadata: Iterable[object], brief: bool) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _allowed(parts[0], parts[1:], brief)
    if origin is Literal:
        return ("one of " if len(parts) > 1 else "") + ", ".join(map(str, parts))
    if origin is tuple and parts[-1] is Ellipsis:
        each = _allowed(parts[0], (), brief)
        inner = each.removeprefix("a list")
        return f"a list, each {each}" if inner == each else f"a list of lists{inner}"
    if origin is tuple:
        return RANGE
    if origin is dict:
        return f"a map of names to {_allowed(parts[1], (), brief)}"
    if origin is not None:
        return " or ".join(_allowed(part, (), brief) for part in parts)
    noun = {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(kind)
    if kind in (int, float):
        rules = [r for each in metadata for r in getattr(each, "metadata", [each])]
        signs = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
        ends = [
            (signs[type(r)], getattr(r, type(r).__name__.lower()))
            for r in rules
            if type(r) in signs
        ]
        shown = [
            f"{sign} {end}" for sign, end in ends if not (brief and sign == "<=" and end >= FAR)
        ]
        return f"{noun} {' and '.join(shown)}".rstrip()
    return "text in quotes" if kind is str and not brief else noun or str(kind)


def build(schema: type[S], values: Mapping[str, object], prefix: str = "") -> S:
    """Validate `values` (by public names) and return them as a `schema`.

    Raises SettingsError with a one-line message: the setting, its value, what is allowed and, for
    an unknown name, the nearest known one.
    """
    fields = schema.fields()
    for name in values:
        if name not in fields:
            raise unknown(prefix + name, [prefix + field for field in fields])
    try:
        return schema.model_validate(nest(values))
    except ValidationError as error:
        first: Any = error.errors()[0]
        reason = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else ""
        # The error's location may have extra parts after the setting's name.
        places = (".".join(map(str, first["loc"][:n])) for n in range(1, len(first["loc"]) + 1))
        name = next((each for each in places if each in fields), "")
        if not name:
            raise SettingsError(reason) from None
        if not reason:
            raise refused(prefix + name, values.get(name), takes(fields[name])) from None
        shown = repr(plain(values.get(name)))[:200]
        raise SettingsError(
            f"setting '{prefix}{name}' = {shown} is not allowed: {reason}"
        ) from None


def unknown(name: str, names: Iterable[str]) -> SettingsError:
    """Return the error for an unknown setting, with its full name or the nearest known name."""
    known = list(names)
    endings = {full.rpartition(".")[2]: full for full in reversed(known)}
    if target := meant(name, known):
        hint = f"; did you mean '{target}'?"
    elif homes := [full for full in known if full.rpartition(".")[2] == name]:
        hint = f": it is {' or '.join(map(repr, homes))}"
    elif reason := ABSENT.get(_word(name)):
        hint = f": {reason}"
    elif close := closest(name, [*known, *endings]):
        hint = f"; did you mean '{endings.get(close, close)}'?"
    else:
        hint = "; `fedhet settings` and `fedhet methods NAME` list them"
    return SettingsError(f"unknown setting '{name}'{hint}")


def meant(name: str, known: Collection[str]) -> str:
    """Return the setting among `known` that another name stands for, or ""."""
    target = MEANT.get(_word(name), "")
    return target if target in known else ""


def _word(name: str) -> str:
    """Return the last part of a name as settings are spelled: `train.num_epochs` is num-epochs."""
    return name.rpartition(".")[2].strip("-").replace("_", "-").lower()


def refused(name: str, value: object, rule: str) -> SettingsError:
    """Return the error for a value that a setting does not allow."""
    shown = repr(plain(value))[:200]
    return SettingsError(f"setting '{name}' = {shown} is not allowed: it takes {rule}")


# --- names from other libraries and papers

_MEANT = {
    "clients": "num-clients n-clients num-users users num-parties parties num-supernodes",
    "rounds": "num-rounds n-rounds comm-rounds communication-rounds global-rounds global-epochs "
    "num-server-rounds",
    "fraction": "frac client-fraction sample-fraction fraction-fit fraction-train join-ratio "
    "participation participation-rate",
    "seed": "random-seed rng-seed manual-seed",
    "evaluate-every": "eval-every eval-interval eval-gap test-every test-gap",
    "early-stopping": "early-stop stop-patience early-stopping-patience",
    "keep-best": "save-best",
    "out": "output output-dir out-dir log-dir logdir save-dir",
    "data.dataset": "data dataset-name",
    "data.data-dir": "data-path data-root dataset-dir root",
    "data.partition": "split partitioner partitioning partition-type iid non-iid",
    "data.alpha": "dirichlet dirichlet-alpha dir-alpha concentration heterogeneity",
    "data.test-fraction": "test-size test-split test-ratio val-fraction",
    "data.public-dataset": "public public-data proxy-data proxy-dataset",
    "models.pool": "model network net arch architecture architectures backbone",
    "training.local-epochs": "epochs epoch num-epochs local-epoch local-ep",
    "training.batch-size": "batch batchsize bs minibatch local-batch-size local-bs",
    "training.lr": "learning-rate learningrate client-lr local-lr step-size eta",
    "training.optimizer": "optim opt optimiser local-optimizer",
    "training.weight-decay": "wd l2 weightdecay",
    "training.clip": "grad-clip clip-grad gradient-clipping max-norm",
    "training.schedule": "scheduler lr-schedule lr-scheduler",
    "training.decay": "lr-decay gamma",
    "training.augment": "augmentation data-augmentation transform transforms",
    "engine.device": "gpu cuda accelerator",
    "engine.precision": "amp fp16 bf16 half mixed-precision dtype",
    "engine.threads": "num-threads torch-threads",
    "engine.gpus-per-client": "num-gpus gpus",
    "engine.cpus-per-client": "num-cpus cpus",
    "engine.round-timeout": "client-timeout call-timeout",
    "engine.track": "wandb mlflow tracker tracking report-to",
    "pace.drop-outs": "dropouts drop-rate failure-rate",
    "pace.stragglers": "straggler straggler-rate",
    "pace.over-selection": "over-commitment overcommitment overselection",
    "pace.min-replies": "min-responses k-of-n quorum",
    "pace.grace": "grace-period wait-time-after-min-received",
    "pace.max-age": "staleness max-staleness",
    "pace.select": "selection client-selection sampler",
    "metrics": "metric",
    "attack.attackers": "malicious byzantine num-attackers num-malicious",
}
MEANT = MappingProxyType({word: name for name, words in _MEANT.items() for word in words.split()})
"""A setting's full name, by another name for it."""
_RECORDS = "a run always writes metrics.jsonl and TensorBoard's files into its directory"
ABSENT = MappingProxyType(
    {
        **dict.fromkeys(("logger", "tensorboard"), _RECORDS),
        "num-workers": "data is decoded once and kept in memory; there are no loader processes",
        "verbose": "Flower's log is in the run's directory, in flower.log",
    }
)
"""Settings of other projects, and what fedhet has instead."""
