"""Base classes for settings tables: names, types, ranges, descriptions, and error messages.

A setting has one full name in kebab case, such as `training.lr`. The command line, TOML files and
Flower's run config all use this name. The modules `run` and `engine` declare the tables that every
run has; a method declares its table as a subclass of `MethodSettings`. Lists are stored as tuples,
so that a table can be hashed.

Flower's run config supports only strings, numbers and booleans, so lists and mappings may also be
given as text: `cnn2,mlp` (list), `a+b,c+d` (list of lists), `6-8` (range), `site-a=2` (mapping). In
a list, `cnn2*3` repeats an item three times. TOML syntax for lists is also supported.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
)
from pydantic.fields import FieldInfo

from fedhet.base.errors import SettingsError, closest
from fedhet.base.metrics import select_metrics

Scalar = bool | int | float | str
S = TypeVar("S", bound="Schema")
TECHNICAL_BOUND = 1_000_000
"""Minimum value of upper bounds that serve only to keep numbers finite; brief descriptions omit
these bounds."""
MAX_REPEATS = 1000
"""Maximum number of times that `VALUE*N` repeats a value in a list."""
SEPARATORS = ",+"
"""Separators between the items in a list, and between the items in a nested list."""
_UNQUOTED = re.compile(r"[^\s,+*=\[\]'\"]([^,+*=\[\]'\"]*[^\s,+*=\[\]'\"])?")
"""Pattern for items that need no quotes in a list."""
RANGE = "integer >= 1, or a range such as [6, 8]"
A_MODEL, A_METHOD, A_DATASET = "model", "method", "dataset"
A_DIRECTORY, A_DEVICE, AN_ADDRESS = "directory", "device", "address"
REFERENTS = (A_MODEL, A_METHOD, A_DATASET, A_DIRECTORY, A_DEVICE, AN_ADDRESS)
"""Kinds of objects that a setting's text can name, as stated in the setting's annotation."""


def kebab(name: str) -> str:
    """Return the public name of a field, e.g. `local-epochs` for `local_epochs`."""
    return name.rstrip("_").replace("_", "-")


class Schema(BaseModel):
    """Frozen table of settings with kebab-case names. Rejects unknown names and wrong types.

    If a field is itself a schema, its settings have dotted names.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_collections(cls, value: object, info: ValidationInfo) -> object:
        return _read_collection(cls.model_fields[str(info.field_name)], value)

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Return the fields of all settings by public name, in the order of declaration."""
        return dict(_fields(cls))

    def flat(self) -> dict[str, Any]:
        """Return the values by public name, in types that TOML and JSON support (no tuples)."""
        values: dict[str, Any] = {}
        for field in type(self).model_fields:
            value, name = getattr(self, field), kebab(field)
            if isinstance(value, Schema):
                values |= {f"{name}.{inner}": each for inner, each in value.flat().items()}
            else:
                values[name] = plain(value)
        return values


@cache
def _fields(schema: type[Schema]) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for name, info in schema.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Schema):
            inner = _fields(info.annotation)
            fields |= {f"{kebab(name)}.{key}": setting for key, setting in inner.items()}
        else:
            fields[kebab(name)] = info
    return fields


class MethodSettings(Schema):
    """Base class for the settings of a method, as read by its strategy and its client."""

    model_config = ConfigDict(validate_default=True)  # Custom methods may have invalid defaults.

    def fixed_rounds(self) -> int | None:
        """Return the number of rounds that the settings imply, or None if `rounds` sets it."""
        return None

    def uses_public(self) -> bool:
        """Return whether these settings require public data, even if the method itself does not."""
        return False


class Frozen(dict[str, Any]):
    """Dictionary that is hashable and must not be modified."""

    def __hash__(self) -> int:  # type: ignore[override]
        """Return a hash of the items that does not depend on their order."""
        return hash(frozenset(self.items()))


def plain(value: Any) -> Any:
    """Convert tuples to lists, for TOML and JSON."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return dict(value) if isinstance(value, dict) else value


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nested tables with dotted names: `{"felo": {"alpha": 1}}` -> `{"felo.alpha": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping) and "." not in name:
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return flat


def table_of(name: str) -> str:
    """Return the table part of a setting's full name, or "" for a top-level setting."""
    return name.rpartition(".")[0]


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Replace dotted names with nested tables (inverse of `flatten`); top-level settings first."""
    tree = {name: value for name, value in flat.items() if "." not in name}
    for name, value in flat.items():
        table, dot, inner = name.partition(".")
        if dot:
            tree.setdefault(table, {})[inner] = value
    return tree


def machine_field(default: Any, description: str) -> Any:
    """Declare a setting that determines where and how a run executes, but not its results."""
    return Field(default, description=description, json_schema_extra={"machine": True})


def is_machine(info: FieldInfo) -> bool:
    """Return whether a setting was declared with `machine_field`."""
    return isinstance(info.json_schema_extra, dict) and "machine" in info.json_schema_extra


def referent(info: FieldInfo) -> str:
    """Return the kind of object that a setting names, one of `REFERENTS`, or "" if undeclared."""
    return next((mark for mark in info.metadata if mark in REFERENTS), "")


def _validate_each(value: Any, validate: Callable[[Any], Any]) -> Any:
    if not isinstance(value, list | tuple) or not value:
        return validate(value)
    values = tuple(map(validate, value))
    return values if len(values) > 1 else values[0]


Assigned = WrapValidator(_validate_each)
"""Annotation of a setting that accepts a list of values, one of which is assigned to each client.

The annotated type is the type of a single value. The table stores either a single value, or a tuple
of at least two values, which `TrainingSettings.pools` returns.
"""


def is_assigned(info: FieldInfo) -> bool:
    """Return whether a setting accepts a list of values to assign to clients."""
    return Assigned in info.metadata


def _as_tuple(value: object) -> object:
    """Convert a list, or a single value, to a tuple."""
    if isinstance(value, str) and "," in value:
        items = json.dumps([item.strip() for item in value.split(",")], ensure_ascii=False)
        raise ValueError(f"expected a list such as {items}")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _as_range(value: object) -> object:
    """Return the two ends of a range; a single number N is converted to (N, N)."""
    ends = tuple(value) if isinstance(value, list | tuple) else (value,)
    return ends * 2 if len(ends) == 1 else ends


def _check_ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError("expected a list of integers >= 1 in ascending order")
    return values


def _check_quantiles(levels: tuple[float, ...]) -> tuple[float, ...]:
    if not 1 <= len(levels) <= MAX_QUANTILES or list(levels) != sorted(set(levels)):
        raise ValueError(
            f"expected a list of 1 to {MAX_QUANTILES} levels between 0 and 1 in ascending order"
        )
    return levels


def _check_distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values or len(set(values)) < len(values):
        raise ValueError("expected a list of at least one value, without duplicates")
    return values


def _check_unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("expected a list without duplicates")
    return values


def _check_range(ends: tuple[int, int]) -> tuple[int, int]:
    if ends[0] > ends[1]:
        raise ValueError(f"expected {RANGE}")
    return ends


# The following types and ranges are shared by several settings.
ModelName = Annotated[str, A_MODEL]
"""Model name, to be checked by `resolve`."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Listed = BeforeValidator(_as_tuple)
"""Validator that converts a list or a single value to a tuple."""
Distinct = AfterValidator(_check_distinct)
"""Validator that rejects empty tuples and duplicates."""
Unique = AfterValidator(_check_unique)
"""Validator that rejects duplicates."""
Names = Annotated[tuple[str, ...], Listed]
Metrics = Annotated[tuple[str, ...], Listed, AfterValidator(select_metrics)]
"""Names of metrics, including accuracy unless a metric of another task is named."""
Ascending = Annotated[tuple[Count, ...], Listed, AfterValidator(_check_ascending)]
MAX_QUANTILES = 99
Quantiles = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)], ...], Listed, AfterValidator(_check_quantiles)
]
"""Levels of quantiles, ascending."""
Range = Annotated[tuple[Count, Count], BeforeValidator(_as_range), AfterValidator(_check_range)]
"""Lower and upper end of a range, both inclusive."""
Bytes = Annotated[int, Field(ge=1, le=2**60)]
Vocabulary = Annotated[int, Field(ge=16, le=65_536)]
Tokens = Annotated[int, Field(ge=1, le=4096)]
Side = Annotated[int, Field(ge=0, le=65_535)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


def allowed_values(info: FieldInfo, *, brief: bool = False) -> str:
    """Describe the allowed values of a setting, e.g. "number > 0 and <= 1".

    With `brief`, upper bounds >= `TECHNICAL_BOUND` are omitted.
    """
    allowed = _describe(info.annotation, info.metadata, brief)
    return f"{allowed}, or a list to assign to clients" if is_assigned(info) else allowed


def _describe(kind: Any, metadata: Iterable[object], brief: bool, *, plural: bool = False) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _describe(parts[0], parts[1:], brief, plural=plural)
    if origin is Literal:
        choices = ", ".join(map(str, parts))
        one_of = "values from " if plural else "one of "
        return f"{one_of}{choices}" if len(parts) > 1 else choices
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list{'s' * plural} of {_describe(parts[0], (), brief, plural=True)}"
    if origin is tuple:
        return RANGE
    if origin is dict:
        return f"mapping from names to {_describe(parts[1], (), brief, plural=True)}"
    if origin is not None:
        return " or ".join(_describe(part, (), brief, plural=plural) for part in parts)
    if kind is bool:
        return "true or false"
    nouns = {int: "integer", float: "number", str: "string"}
    noun = nouns.get(kind, str(kind)) + "s" * plural
    if kind not in (int, float):
        return noun
    rules = [r for each in metadata for r in getattr(each, "metadata", [each])]
    signs = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
    bounds = [
        (signs[type(r)], getattr(r, type(r).__name__.lower())) for r in rules if type(r) in signs
    ]
    conditions = [
        f"{sign} {int(bound) if bound == int(bound) else bound}"
        for sign, bound in bounds
        if not (brief and sign == "<=" and bound >= TECHNICAL_BOUND)
    ]
    return f"{noun} {' and '.join(conditions)}".rstrip()


def build(schema: type[S], values: Mapping[str, object], prefix: str = "") -> S:
    """Validate `values`, keyed by public name, and return them as an instance of `schema`.

    Raises SettingsError if a value is invalid or a name is unknown. The one-line message contains
    the setting, its allowed values, and its value, or the closest known name.
    """
    fields = schema.fields()
    for name in values:
        if name not in fields:
            raise unknown(prefix + name, [prefix + field for field in fields])
    try:
        return schema.model_validate(nest(values))
    except ValidationError as error:
        first: Any = error.errors()[0]
        fault = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else ""
        # The error's location may have additional parts after the setting's name.
        places = (".".join(map(str, first["loc"][:n])) for n in range(1, len(first["loc"]) + 1))
        name = next((each for each in places if each in fields), "")
        if not name:
            raise SettingsError(fault) from None
        fault = fault or f"expected {allowed_values(fields[name])}"
        default = None if first["type"] == "missing" else first["input"]
        shown = repr(plain(values.get(name, default)))[:200]
        raise SettingsError(f"setting '{prefix}{name}': {fault}, got {shown}") from None


# --- text of settings


def read_text(name: str, info: FieldInfo | None, text: str) -> object:
    """Parse the text of a setting on the command line according to its type.

    Text that does not match the type is returned unchanged, and `build` rejects it later. The text
    of an unknown setting (`info` is None) is only unquoted. Raises SettingsError if a list or a
    mapping is malformed.
    """
    if info is None:
        return _unquote(text)
    value = read_collection(name, info, text)
    return _parse_value(info.annotation, text, SEPARATORS) if value is text else value


def read_collection(name: str, info: FieldInfo, value: object) -> object:
    """Parse a list or a mapping that is given as text, as `Schema` does for each of its settings.

    Other values are returned unchanged. Raises SettingsError if the text is malformed.
    """
    try:
        return _read_collection(info, value)
    except ValueError as error:
        raise SettingsError(f"setting '{name}': {error}, got {str(value)[:200]!r}") from None


def _read_collection(info: FieldInfo, value: object) -> object:
    if not isinstance(value, str):
        return value
    if is_assigned(info):  # Text without a comma is a single value.
        parts = (info.annotation, ...)
        return _read_list(parts, value, SEPARATORS) if "," in value else value
    kinds = [info.annotation, *get_args(info.annotation)]
    origins = {get_origin(_without_rules(kind)) for kind in kinds}
    is_text = origins.isdisjoint({tuple, dict})
    return value if is_text else _parse_value(info.annotation, value, SEPARATORS)


def as_text(value: object) -> str:
    """Format a setting's value as text such as true, 0.5 or a,b (inverse of `read_text`)."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, dict):
        return ",".join(f"{name}={as_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        nested = [each if isinstance(each, list | tuple) else [each] for each in value]
        texts = [[as_text(each) for each in inner] for inner in nested]
        if all(_UNQUOTED.fullmatch(text) for inner in texts for text in inner):
            return ",".join("+".join(inner) for inner in texts)
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _parse_value(kind: Any, text: str, separators: str) -> Any:
    kind = _without_rules(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if kind is str or origin is Literal:
        return _unquote(text)
    if origin in (Union, UnionType):  # The text is a keyword such as auto, or has another type.
        kinds = [_without_rules(part) for part in parts]
        keywords = [word for k in kinds if get_origin(k) is Literal for word in get_args(k)]
        types = [each for each in kinds if each is not str and get_origin(each) is not Literal]
        word = _unquote(text)
        return word if word in keywords or not types else _parse_value(types[0], text, separators)
    if origin is tuple:
        return _read_list(parts, text, separators)
    if origin is dict and "=" in text:
        mapping: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = map(str.strip, part.partition("="))
            if name in mapping:
                raise ValueError(f"duplicate name '{name}', expected unique names")
            mapping[name] = _parse_value(parts[1], value, "")
        return mapping
    return text if origin is dict else _toml(text)


def _read_list(parts: tuple[Any, ...], text: str, separators: str) -> object:
    """Parse a list, where `cnn2*3` means three times `cnn2`, or the endpoints of a range."""
    if text.startswith("["):
        return _toml(text)
    if parts[-1] is not Ellipsis:  # The text is a range.
        return tuple(_toml(end.strip()) for end in re.split("[-,]", text))
    items = [part.strip() for part in text.split(separators[:1])] if text.strip() else []
    if _without_rules(parts[0]) is str:
        if len(items) > 1 and "" in items:
            raise ValueError("empty name in the list, expected names separated by single commas")
        items = list(filter(None, items))
    values = []
    for item in items:
        value, sign, repeats = item, "", ""
        if separators == SEPARATORS:
            value, sign, repeats = map(str.strip, item.partition("*"))
        if sign and not (value and repeats.isdecimal() and 1 <= int(repeats[:5]) <= MAX_REPEATS):
            raise ValueError(
                f"invalid list item '{item}', expected VALUE or VALUE*N with N from 1 to "
                f"{MAX_REPEATS}"
            )
        values += [_parse_value(parts[0], value, separators[1:])] * (int(repeats) if sign else 1)
    return tuple(values)


def _without_rules(kind: Any) -> Any:
    """Return the type inside `Annotated`, or `kind` itself if it is not annotated."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _unquote(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted and text[0] not in text[1:-1] else text


def _toml(text: str) -> Any:
    """Parse a TOML value, or return `text` unchanged if it is not valid TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


# --- errors


def unknown(name: str, names: Iterable[str]) -> SettingsError:
    """Return the error for an unknown setting, with a hint such as the closest known name."""
    known = list(names)
    endings = {full.rpartition(".")[2]: full for full in reversed(known)}
    if target := synonym_of(name, known):
        hint = f"; did you mean '{target}'?"
    elif matches := [full for full in known if full.rpartition(".")[2] == name]:
        hint = f"; use its full name, {' or '.join(map(repr, matches))}"
    elif reason := UNSUPPORTED.get(_last_part(name)):
        hint = f": {reason}"
    elif close := closest(name, [*known, *endings]):
        hint = f"; did you mean '{endings.get(close, close)}'?"
    else:
        hint = "; see `fedhet settings` or `fedhet methods NAME`"
    return SettingsError(f"unknown setting '{name}'{hint}")


def synonym_of(name: str, known: Collection[str]) -> str:
    """Return the setting in `known` that other libraries call `name`, or "" if there is none."""
    target = SYNONYMS.get(_last_part(name), "")
    return target if target in known else ""


def _last_part(name: str) -> str:
    """Return the last part of a dotted name in kebab case, e.g. num-epochs for train.num_epochs."""
    return name.rpartition(".")[2].strip("-").replace("_", "-").lower()


def invalid_setting(name: str, value: object, expected: str, problem: str = "") -> SettingsError:
    """Return the error "setting 'NAME': PROBLEM, expected EXPECTED, got VALUE"."""
    reason = f"{problem}, " if problem else ""
    shown = repr(plain(value))[:200]
    return SettingsError(f"setting '{name}': {reason}expected {expected}, got {shown}")


# --- names from other libraries and papers

_SYNONYMS = {
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
    "data.test-fraction": "test-size test-split test-ratio",
    "data.validation-fraction": "val-fraction val-size val-split val-ratio validation-split "
    "validation-size valid-fraction",
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
SYNONYMS = MappingProxyType(
    {word: name for name, words in _SYNONYMS.items() for word in words.split()}
)
"""Full names of settings, by their names in other libraries and papers."""
_RECORDS = "a run always writes metrics.jsonl and TensorBoard files to its directory"
UNSUPPORTED = MappingProxyType(
    {
        **dict.fromkeys(("logger", "tensorboard"), _RECORDS),
        "num-workers": "data is decoded once and kept in memory, without loader processes",
        "verbose": "Flower's log is in flower.log in the run's directory",
    }
)
"""Explanations for settings of other libraries that fedhet does not have."""
