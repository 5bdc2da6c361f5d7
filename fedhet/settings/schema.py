"""The schema of a settings table: names, types, ranges, descriptions, and error messages.

A setting has one kebab-case name, with its table's, such as `training.lr`: the same on the command
line, in a TOML file and in Flower's run config. The tables that every run has are in `tables`; a
method's own is the `MethodSettings` that it declares.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from fedhet.errors import SettingsError, closest
from fedhet.settings.metrics import beside_accuracy
from fedhet.settings.words import instead, meant

Scalar = bool | int | float | str
S = TypeVar("S", bound="Schema")
FAR = 1_000_000
"""The least upper end of a range that is only there to keep numbers finite."""
MOST_TIMES = 1000
"""How often a pool may repeat a model."""
A_MODEL = "the name of a model"
"""Marks such a setting."""
WHERE_LISTED = "`fedhet settings` and `fedhet methods NAME` list them"


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
        found: dict[str, FieldInfo] = {}
        for name, info in cls.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Schema):
                inner = info.annotation.fields()
                found |= {f"{kebab(name)}.{own}": setting for own, setting in inner.items()}
            else:
                found[kebab(name)] = info
        return found

    def flat(self) -> dict[str, Scalar]:
        """Return the values by their public names."""
        return flatten(self.model_dump(by_alias=True))


class MethodSettings(Schema):
    """Base class of a method's settings; both halves of the method read them."""

    def fixed_rounds(self) -> int | None:
        """Return the number of rounds that the settings require; None: as set by `rounds`."""
        return None

    def uses_public(self) -> bool:
        """Tell whether the settings require public data, if not every run of the method does."""
        return False


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names: `{"felo": {"alpha": 1}}` becomes `felo.alpha`."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return flat


def table_of(name: str) -> str:
    """Return the table of a setting by its full name; "" if it stands in none."""
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
    """Return a field that sets where and on what a run runs, not what it computes."""
    return Field(default, description=description, json_schema_extra={"machine": True})


def is_machine(info: FieldInfo) -> bool:
    """Tell whether a setting was declared by `machine`."""
    return isinstance(info.json_schema_extra, dict) and "machine" in info.json_schema_extra


class Dealt:
    """Marks a setting that may have several values, comma-separated, dealt to the clients.

    The annotation is the type of one value. A run's table holds either one, or the text of several;
    `TrainingSettings.pools` reads them, and each client gets one.
    """

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Accept what one value's type accepts, and text of several values that it accepts."""
        as_it_is = core_schema.plain_serializer_function_ser_schema(lambda value: value)
        return core_schema.no_info_wrap_validator_function(
            _each, handler(source), serialization=as_it_is
        )


def _each(value: Any, validated: Callable[[Any], Any]) -> Any:
    if not is_pool(value):
        return validated(value)
    return ",".join(str(validated(entry)) for entry in entries(value))


def is_pool(value: object) -> bool:
    """Tell whether the value of a dealt setting is several values."""
    return isinstance(value, str) and "," in value


def entries(pool: str) -> list[Scalar]:
    """Return the values in a comma-separated text: numbers where they read as numbers."""
    return [_read_toml(entry.strip()) for entry in pool.split(",")]


def is_dealt(info: FieldInfo) -> bool:
    """Tell whether a setting may have several values, of which each client gets one."""
    return any(isinstance(rule, Dealt) for rule in _rules(info))


def span(text: str) -> tuple[int, int]:
    """Return the ends of a range such as "6-8"; for "7", 7 and 7; for "all", 0 and 0."""
    low, _, high = text.partition("-")
    return (0, 0) if text == "all" else (int(low), int(high or low))


def _is_span(text: str) -> str:
    parts = text.split("-")
    whole = len(parts) <= 2 and all(part.isdecimal() and len(part) < 7 for part in parts)
    if text != "all" and not (whole and 1 <= int(parts[0]) <= int(parts[-1])):
        raise ValueError("it takes a number, or a range such as 6-8, from 1")
    return text


def _is_number_span(text: str) -> str:
    return _is_span("" if text == "all" else text)


def milestones(text: str) -> list[int]:
    """Return the rounds in a comma-separated text; none if it is empty."""
    return [int(part) for part in text.split(",")] if text else []


def _is_milestones(text: str) -> str:
    parts = [part.strip() for part in text.split(",")] if text else []
    rounds = [int(part) for part in parts if part.isdecimal() and 0 < len(part) < 8]
    if len(rounds) < len(parts) or rounds != sorted({*rounds} - {0}):
        raise ValueError("it takes rounds from 1, ascending and comma-separated, or nothing")
    return ",".join(parts)


def pool_names(pool: str) -> list[str]:
    """Return the names in a pool of models, `name*3` as often as it says.

    Raises ValueError for another multiple.
    """
    found: list[str] = []
    for entry in filter(None, map(str.strip, pool.split(","))):
        name, sign, times = map(str.strip, entry.partition("*"))
        if sign and not (name and times.isdecimal() and 1 <= int(times[:5]) <= MOST_TIMES):
            raise ValueError(
                f"'{entry}' is no part of a pool, which is NAME, or NAME*3 with a whole number "
                f"from 1 to {MOST_TIMES}"
            )
        found += [name] * (int(times) if sign else 1)
    return found


def _is_pool_of_models(text: str) -> str:
    pool_names(text)
    return text


def _are_metrics(text: str) -> str:
    beside_accuracy(text)
    return text


# Types and ranges that several settings share.
Span = Annotated[str, AfterValidator(_is_number_span)]
SpanOrAll = Annotated[str, AfterValidator(_is_span)]
Milestones = Annotated[str, AfterValidator(_is_milestones)]
ModelName = Annotated[str, A_MODEL]
"""The name of a model, which `resolve` checks."""
Pool = Annotated[str, AfterValidator(_is_pool_of_models)]
Metrics = Annotated[str, AfterValidator(_are_metrics)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Bytes = Annotated[int, Field(ge=1, le=2**60)]
Vocabulary = Annotated[int, Field(ge=16, le=65_536)]
Tokens = Annotated[int, Field(ge=1, le=4096)]
Side = Annotated[int, Field(ge=0, le=65_535)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


def allowed(info: FieldInfo, *, brief: bool = False) -> str:
    """Describe the values that a setting accepts; if `brief`, without ends that nobody reaches."""
    kind = info.annotation
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        rules = [rule for rule in _rules(info) if not (brief and _is_far(rule))]
        bounds = [_bound(rule) for rule in rules]
        noun = "an integer" if kind is int else "a number"
        return " ".join([noun, " and ".join(filter(None, bounds))]).strip()
    if kind is str:
        return "text" if brief else "text in quotes"
    return " or ".join(part.__name__ for part in get_args(kind)) or str(kind)


def takes(info: FieldInfo, *, brief: bool = False) -> str:
    """Describe the values that a setting accepts, and that it accepts several if it is dealt."""
    return allowed(info, brief=brief) + (", or several, comma-separated" if is_dealt(info) else "")


def _rules(info: FieldInfo) -> Iterable[object]:
    for rule in info.metadata:
        yield from rule.metadata if isinstance(rule, FieldInfo) else [rule]


def _is_far(rule: object) -> bool:
    return isinstance(rule, Le) and isinstance(rule.le, int | float) and rule.le >= FAR


def _bound(rule: object) -> str:
    for kind, sign in ((Ge, ">="), (Gt, ">"), (Le, "<="), (Lt, "<")):
        if isinstance(rule, kind):
            return f"{sign} {getattr(rule, kind.__name__.lower())}"
    return ""


def parse_text(info: FieldInfo | None, text: str) -> object:
    """Return the value of `text` as typed on a command line."""
    if info is None or info.annotation is str or get_origin(info.annotation) is Literal:
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if quoted and text[0] not in text[1:-1] else text
    return _read_toml(text)


def _read_toml(text: str) -> Any:
    """Return the TOML value of `text`; the text itself if it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


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
        name = next((n for n in _places(first["loc"]) if n in fields), "")
        if not name:
            raise SettingsError(reason) from None
        rule = reason or f"it takes {takes(fields[name])}"
        raise _not_allowed(prefix + name, values.get(name), rule) from None


def _places(where: tuple[object, ...]) -> Iterable[str]:
    """Yield candidate setting names for pydantic's error location, which may have extra parts."""
    for length in range(1, len(where) + 1):
        yield ".".join(map(str, where[:length]))


def unknown(name: str, names: Iterable[str]) -> SettingsError:
    """Return the error for an unknown setting, with its full name or the nearest known name."""
    known = list(names)
    if target := meant(name, known):
        return SettingsError(f"unknown setting '{name}'; did you mean '{target}'?")
    homes = [full for full in known if full.rpartition(".")[2] == name]
    if homes:
        found = "' or '".join(homes)
        return SettingsError(f"unknown setting '{name}': it is '{found}'")
    if reason := instead(name):
        return SettingsError(f"unknown setting '{name}': {reason}")
    endings = {full.rpartition(".")[2]: full for full in reversed(known)}
    close = closest(name, [*known, *endings])
    hint = f"; did you mean '{endings.get(close, close)}'?" if close else f"; {WHERE_LISTED}"
    return SettingsError(f"unknown setting '{name}'{hint}")


def refused(name: str, value: object, rule: str) -> SettingsError:
    """Return the error for a value that a setting does not allow."""
    return _not_allowed(name, value, f"it takes {rule}")


def _not_allowed(name: str, value: object, reason: str) -> SettingsError:
    return SettingsError(f"setting '{name}' = {repr(value)[:200]} is not allowed: {reason}")
