"""Settings: their names, types, ranges and help texts, and the one line that a wrong one earns.

A setting has one flat kebab-case name, the same on the command line, in a TOML file and in
Flower's run config. What every run has is `Settings`; a method's own stand in the `MethodSettings`
that its two halves declare, and are written under the method's name (`felo.alpha`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from fedhet.errors import SettingsError, nearest

Scalar = bool | int | float | str
S = TypeVar("S", bound="Schema")


def kebab(name: str) -> str:
    """Return the public name of a field: `local_epochs` is `local-epochs`."""
    return name.rstrip("_").replace("_", "-")


class Schema(BaseModel):
    """A frozen set of settings under kebab-case names; unknown names, wrong types are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True
    )

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Return the fields by their public names, in the order of declaration."""
        return {kebab(name): info for name, info in cls.model_fields.items()}

    def flat(self) -> dict[str, Scalar]:
        """Return the values by their public names."""
        return self.model_dump(by_alias=True)


class MethodSettings(Schema):
    """What one half of a method lets a user choose."""


def span(text: str) -> tuple[int, int]:
    """Return the ends of a range such as "6-8"; of "7", 7 and 7; of "all", 0 and 0."""
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


# The vocabulary: ranges that several settings share.
Span = Annotated[str, AfterValidator(_is_number_span)]
SpanOrAll = Annotated[str, AfterValidator(_is_span)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Settings(Schema):
    """What every run has, whatever its method."""

    method: str = Field("felo", description="the method, as `fedhet methods` lists them")
    rounds: Count = Field(10, description="rounds of the federation")
    seed: CountOrNone = Field(0, description="the seed from which every random draw is derived")

    dataset: str = Field(
        "digits",
        description="digits, breast-cancer, mnist, fashion-mnist, cifar10, cifar100, adult:DIR, "
        "imagefolder:DIR or npz:DIR",
    )
    data_dir: str = Field("data", description="where torchvision's datasets lie")
    download: bool = Field(False, description="may a missing dataset be downloaded?")
    clients: Count = Field(10, description="number of clients")
    partition: Literal["dirichlet", "iid", "shards", "classes", "superclasses"] = Field(
        "dirichlet", description="how the training set is dealt to the clients"
    )
    alpha: Positive = Field(0.5, description="Dirichlet's concentration; smaller is more skewed")
    shards: Count = Field(2, description="shards a client, for partition = shards")
    classes_per_client: Count = Field(2, description="classes a client, for partition = classes")
    superclasses: str = Field(
        "",
        description="classes joined into superclasses, as a+b,c+d, or cifar100; empty = not joined",
    )
    label_space: Span = Field(
        "6-8", description="classes a client draws, for partition = superclasses"
    )
    subclasses: SpanOrAll = Field(
        "all", description="subclasses that a client holds of each, such as 1-2; all is IID"
    )
    samples_per_class: Count = Field(
        50, description="samples a client holds of each, for partition = superclasses"
    )
    min_samples: Count = Field(10, description="least samples a client may be dealt")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="share of a client's samples kept as its own test split"
    )
    image_size: CountOrNone = Field(
        0, description="side to which an image folder is resized; 0 = as it is"
    )
    max_samples: CountOrNone = Field(
        0, description="train on a seeded subset of this size; 0 = all"
    )
    max_test_samples: CountOrNone = Field(
        0, description="judge on a seeded subset of the common test set; 0 = all"
    )
    public_dataset: str = Field(
        "",
        description="data that no client owns, named as 'dataset' is, or generated (tables); "
        "empty = public-fraction",
    )
    public_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the training set kept from the clients as public data; 0 = none, or "
        "0.2 for a method that needs it and has no public-dataset",
    )
    public_samples: CountOrNone = Field(
        0, description="a seeded subset of public-dataset, or rows to generate; 0 = all"
    )
    labelled_alpha: NonNegative = Field(
        0.0,
        description="Dirichlet's concentration of each client's labelled and unlabelled share; "
        "0 = all is labelled, or 0.5 for a method that needs unlabelled data",
    )
    num_classes: CountOrNone = Field(
        0, description="classes of the task; 0 = as the data has it; a site's own folder needs it"
    )

    models: str = Field(
        "cnn2,cnn3,mlp,gems-resnet11,resnet10",
        description="pool of models, comma-separated, as `fedhet models` lists them; a method "
        "whose clients must have one model has one of its own for this default",
    )
    deal: Literal["cycle", "shuffle"] = Field(
        "cycle", description="how the pool is dealt: in turn, or in turn and then shuffled"
    )

    fraction: Fraction = Field(1.0, description="share of the clients sampled each round")
    local_epochs: Count = Field(5, description="epochs over a client's data a round")
    batch_size: Count = Field(32, description="samples a minibatch")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="the clients' optimiser")
    lr: Positive = Field(1e-3, description="learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of sgd")
    weight_decay: NonNegative = Field(0.0, description="weight decay")
    eval_batch_size: Count = Field(1024, description="samples a batch in evaluation")
    evaluate_every: Count = Field(
        1, description="rounds between evaluations; the last round is always evaluated"
    )

    attack: Literal["none", "paf", "lie", "ofom"] = Field(
        "none", description="how some of the clients' logits or weights are poisoned each round"
    )
    attackers: CountOrNone = Field(
        0, description="clients poisoned a round; 0 = as FedGEMS has it: 1, or 2 for ofom"
    )
    attack_scale: Positive = Field(
        10.0, description="paf, ofom: length of what is added, in lengths of the benign mean"
    )

    backend: Literal["ray", "inline"] = Field(
        "ray", description="Flower's simulation on Ray, or everything in this process"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto is bfloat16 on a GPU that has it, else float32"
    )
    channels_last: Literal["auto", "true", "false"] = Field(
        "auto", description="memory format of images; auto is channels-last on a GPU"
    )
    threads: Count = Field(1, description="torch threads a worker")
    cpus_per_client: Positive = Field(1.0, description="Ray: processors a worker takes")
    gpus_per_client: Annotated[float, Field(ge=0.01, le=1)] = Field(
        0.25, description="Ray: share of a GPU a worker takes, where the device is one"
    )
    join_timeout: Positive = Field(
        120.0, description="seconds to wait at the start for all clients"
    )
    min_clients: CountOrNone = Field(
        0, description="start with so many if the others do not come in time; 0 = all must come"
    )
    round_timeout: Positive = Field(
        3600.0, description="seconds after which a round goes on without those who are missing"
    )
    in_flight: CountOrNone = Field(
        0,
        description="clients asked at once where each is told something of its own, which bounds "
        "the server's memory; 0 = as many as there are workers, in a deployment all",
    )
    max_payload_mb: Positive = Field(2048.0, description="a reply larger than this is refused, MB")
    out: str = Field(
        "", description="the run's directory; empty = runs/<method>-<dataset>-s<seed>-<time>"
    )

    resume: bool = Field(
        False, description="go on with the run in 'out' after its last whole round, if one is there"
    )

    @model_validator(mode="after")
    def _a_run_to_resume_is_named(self) -> Settings:
        if self.resume and not self.out:
            raise ValueError(
                "setting 'resume' = True is not allowed: it takes the run's directory in 'out'"
            )
        return self

    @model_validator(mode="after")
    def _public_data_has_one_source(self) -> Settings:
        if self.public_dataset and self.public_fraction:
            raise ValueError(
                f"setting 'public-fraction' = {self.public_fraction} is not allowed: "
                f"it takes 0 with a 'public-dataset', which is {self.public_dataset!r}"
            )
        return self

    @model_validator(mode="after")
    def _attackers_attack(self) -> Settings:
        if self.attackers and self.attack == "none":
            raise ValueError(
                f"setting 'attackers' = {self.attackers} is not allowed: it takes 0 without an "
                "'attack'"
            )
        if self.attack != "none" and self.attackers >= self.clients:
            raise ValueError(
                f"setting 'attackers' = {self.attackers} is not allowed: "
                f"it takes less than 'clients', which is {self.clients}"
            )
        return self

    @model_validator(mode="after")
    def _least_is_no_more_than_all(self) -> Settings:
        if self.min_clients > self.clients:
            raise ValueError(
                f"setting 'min-clients' = {self.min_clients} is not allowed: "
                f"it takes at most 'clients', which is {self.clients}"
            )
        return self


def allowed(info: FieldInfo) -> str:
    """Return in words what values a setting takes."""
    kind = info.annotation
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        bounds = [_bound(rule) for rule in _rules(info)]
        noun = "an integer" if kind is int else "a number"
        return " ".join([noun, " and ".join(filter(None, bounds))]).strip()
    if kind is str:
        return "text in quotes"
    return " or ".join(part.__name__ for part in get_args(kind)) or str(kind)


def _rules(info: FieldInfo) -> Iterable[object]:
    for rule in info.metadata:
        yield from rule.metadata if isinstance(rule, FieldInfo) else [rule]


def _bound(rule: object) -> str:
    for kind, sign in ((Ge, ">="), (Gt, ">"), (Le, "<="), (Lt, "<")):
        if isinstance(rule, kind):
            return f"{sign} {getattr(rule, kind.__name__.lower())}"
    return ""


def parse_text(info: FieldInfo | None, text: str) -> object:
    """Return the value that `text`, typed on a command line, stands for."""
    if info is None or info.annotation is str or get_origin(info.annotation) is Literal:
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if quoted and text[0] not in text[1:-1] else text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def build(schema: type[S], values: Mapping[str, object], prefix: str = "") -> S:
    """Validate `values` (by public names) and return them as a `schema`.

    Raises SettingsError: one line with the setting, its value, what is allowed, and, for a
    name that does not exist, the nearest that does.
    """
    fields = schema.fields()
    for name in values:
        if name not in fields:
            raise unknown(prefix + name, [prefix + field for field in fields])
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        first: Any = error.errors()[0]
        reason = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else ""
        if not first["loc"]:
            raise SettingsError(reason) from None
        name = str(first["loc"][0])
        rule = reason or f"it takes {allowed(fields[name])}"
        raise _not_allowed(prefix + name, values.get(name), rule) from None


def unknown(name: str, names: Iterable[str]) -> SettingsError:
    """Return the error for a setting that does not exist."""
    hint = nearest(name, names) or "; `fedhet settings` and `fedhet methods NAME` list them"
    return SettingsError(f"unknown setting '{name}'{hint}")


def refused(name: str, value: object, rule: str) -> SettingsError:
    """Return the error for a value that a setting does not allow."""
    return _not_allowed(name, value, f"it takes {rule}")


def _not_allowed(name: str, value: object, reason: str) -> SettingsError:
    return SettingsError(f"setting '{name}' = {repr(value)[:200]} is not allowed: {reason}")
