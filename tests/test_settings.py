"""Settings from all sources: equal values give equal runs, and errors are one line."""

import inspect
import math
import re
from typing import Literal

import pytest
import tomli_w
from federation import Server, small
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, field_validator, model_validator

from fedhet.base.errors import SettingsError, nearest
from fedhet.client_runtime.node import open_client, read_node
from fedhet.config.resolve import Config, resolve, resolve_flower
from fedhet.config.sources import (
    all_settings,
    defaults,
    parse_pairs,
    preset_names,
    read_layers,
    read_preset,
    read_toml,
    settings_for_method,
    to_flower,
    validate,
)
from fedhet.data.spec import DataSpec
from fedhet.methods.registry import find_method, method_names
from fedhet.settings.run import (
    PLACE,
    DataSettings,
    RunSettings,
    TrainingSettings,
    where_it_ran,
)
from fedhet.settings.schema import (
    MethodSettings,
    Schema,
    allowed_values,
    as_text,
    build,
    kebab,
    nest,
)


def refusal(call, *parts):
    """Return the single line of the SettingsError, which contains each of `parts`."""
    with pytest.raises(SettingsError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.isprintable()
    for part in parts:
        assert part in message
    return message


# --- what there is --------------------------------------------------------------------------


def test_every_setting_has_a_description_a_default_and_a_range():
    for name, info in all_settings().items():
        assert info.description, name
        assert info.description.isprintable(), name
        assert info.default is not None, name
        assert len(allowed_values(info)) > 3, name
        assert re.fullmatch(r"[a-z0-9.-]+", name)


@pytest.mark.parametrize(
    "name", [name for name in preset_names() if "felo.alpha" in read_preset(name)]
)
def test_velo_presets_equal_felo_presets(name):
    """With another method, a preset of Felo loses Felo's settings, including the width."""
    felo, velo = read_preset(name), read_preset(name.replace("felo", "velo"))
    own = {key.replace("felo.", "velo."): value for key, value in felo.items()}
    algorithm_2 = {"velo.interval": 1, "velo.min-separation": 0.0, "velo.memory": 2000}
    assert {**own, "method": "velo", **algorithm_2} == velo


def test_defaults_are_allowed():
    assert resolve({}) == resolve(RunSettings().flat())
    assert resolve({}).method.name == RunSettings().method


def test_run_has_the_settings_of_its_own_method_alone():
    shared = set(RunSettings.fields())
    assert set(resolve({"method": "local"}).flat()) == shared
    own = set(find_method("felo").settings())
    assert "felo.alpha" in own
    assert set(resolve({"method": "felo"}).flat()) - shared == own


def test_both_sides_of_a_method_read_the_same_settings(tmp_path):
    config = small(**{"felo.feature-dim": 7, "felo.alpha": 0.25, "felo.weighting": "samples"})
    server = Server(config, tmp_path / "run")
    node = read_node({"partition-id": 0, "num-partitions": 4}, config.run, str(tmp_path))
    for half in (server.strategy, open_client(config, node)):
        assert half.settings is config.method_settings
        assert (half.settings.feature_dim, half.settings.alpha) == (7, 0.25)
        assert half.settings.weighting == "samples"


@pytest.mark.parametrize(
    ("table", "name"), [("", "rounds"), ("data", "alpha"), ("training", "lr"), ("engine", "device")]
)
def test_settings_are_frozen(table, name):
    run = resolve({}).run
    with pytest.raises(ValidationError, match="frozen"):
        setattr(getattr(run, table) if table else run, name, 3)


@pytest.mark.parametrize(
    ("table", "setting", "text", "value"),
    [
        (TrainingSettings, "lr", "0.1, 0.01", (0.1, 0.01)),
        (TrainingSettings, "local-epochs", "1*2,3", (1, 1, 3)),
        (TrainingSettings, "milestones", "3,7", (3, 7)),
        (DataSettings, "label-space", "6-8", (6, 8)),
        (DataSettings, "superclasses", "a+b,c", (("a", "b"), ("c",))),
        (DataSettings, "superclasses", "cifar100", "cifar100"),
        (DataSettings, "exclude", '["a,b", "c"]', ("a,b", "c")),
        (DataSettings, "target", "a,b", "a,b"),  # not a list
        (TrainingSettings, "optimizer", "adam", "adam"),
    ],
)
def test_table_reads_a_list_from_text(table, setting, text, value):
    """Flower's run config stores lists as text, and every table reads this text itself."""
    for made in (table(**{setting: text}), build(table, {setting: text})):
        assert getattr(made, setting.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("setting", "text"),
    [("training.lr", "0.1,x"), ("training.lr", "0.1"), ("models.pool", "mlp*x"),
     ("models.pool", "mlp,,cnn2"), ("data.label-space", "8-6"), ("cofed.credibility", "a=1,a=2")],
)  # fmt: skip
def test_error_about_a_list_shows_the_given_text(setting, text):
    refusal(lambda: resolve_flower({"method": "cofed", setting: text}), f"'{setting}'", repr(text))
    if setting.startswith("cofed"):  # a setting of another method
        refusal(lambda: resolve_flower({"method": "local", setting: text}), setting, repr(text))


# --- tables ---------------------------------------------------------------------------------


def test_setting_is_declared_in_one_place():
    """A setting is not declared again in a subclass, nor with another range in the data.

    If the default of a method differs from that of the method it extends, only the default differs.
    """

    def schemas(base):
        return [base, *(s for own in base.__subclasses__() for s in schemas(own))]

    assert len(all_settings()) > 80  # by which every method is imported
    for schema in schemas(Schema):
        bases = [base for base in schema.__mro__ if issubclass(base, Schema)]
        for name in schema.model_fields:
            owners = [base.__name__ for base in bases if name in inspect.get_annotations(base)]
            above = next((b for b in bases[1:] if name in b.model_fields), schema)
            one, other = schema.model_fields[name], above.model_fields[name]
            alike = (allowed_values(one), one.description) == (
                allowed_values(other),
                other.description,
            )
            changed = alike and one.default != other.default
            assert len(owners) == 1 or changed, f"{name} is declared in {' and '.join(owners)}"
    for name in ("clients", "seed"):
        one, two = DataSpec.fields()[name], RunSettings.fields()[name]
        assert (allowed_values(one), one.default) == (allowed_values(two), two.default)


def test_paths_and_machines_are_no_part_of_the_experiment():
    machine = {"out", "resume", "metrics", "data.data-dir", "data.download", "engine.threads"}
    assert where_it_ran() >= {*PLACE, *machine, "engine.backend"}
    experiment = {"method", "rounds", "seed", "clients", "data.dataset", "models.pool"}
    assert not where_it_ran() & {*experiment, "training.lr", "engine.precision", "attack.kind"}


@pytest.mark.parametrize("method", method_names())
def test_given_settings_are_not_replaced(method):
    said = {"data.public-fraction": 0.3, "data.labeled-alpha": 2.0, "models.pool": ["resnet9"]}
    flat = resolve({"method": method, **said}).flat()
    assert {name: flat[name] for name in said} == said
    run = resolve({"method": method, "data.public-dataset": "digits"}).run
    assert run.data.public_fraction == 0  # the public data has its one source
    needs = {
        "data.public-fraction": find_method(method).spec.needs_public,
        "data.labeled-alpha": find_method(method).spec.needs_unlabeled,
    }
    for name, is_needed in needs.items():
        if is_needed:
            with pytest.raises(SettingsError, match=rf"'{name}'.*0"):
                resolve({"method": method, name: 0})
        else:
            assert resolve({"method": method, name: 0}).flat()[name] == 0


@pytest.mark.parametrize("method", method_names())
def test_resolved_config_resolves_to_itself(tmp_path, method):
    config = resolve({"method": method})
    _comes_back(config, tmp_path / "mine.toml")
    # In Flower's run config, a default value counts as unset, and settings of the method are kept.
    assert resolve_flower({**to_flower(defaults()), "method": method}) == config


@pytest.mark.usefixtures("encoders")
@pytest.mark.parametrize("name", preset_names())
def test_preset_resolves_to_its_values_and_to_itself(tmp_path, name):
    values = read_preset(name)
    assert values
    config = resolve(values)
    assert {key: config.flat()[key] for key in values} == values
    _comes_back(config, tmp_path / "mine.toml")


def _comes_back(config, path):
    assert resolve(config.flat()) == config
    path.write_text(config.to_toml(), encoding="utf-8")
    assert resolve(read_toml(path)) == config
    again = resolve(read_toml(path)).flat()
    assert {k: type(v) for k, v in again.items()} == {k: type(v) for k, v in config.flat().items()}


def test_unknown_table_in_a_file_raises(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[trainnig]\nlr = 0.5\n")
    with pytest.raises(SettingsError, match=r"'trainnig\.lr'"):
        settings_for_method(read_layers(config=path), "felo")
    path.write_text("clients = 3\n[fedprox]\nmu = 3.0\n")
    assert settings_for_method(read_layers(config=path), "felo") == {"clients": 3, "method": "felo"}


def test_replacing_changes_only_given_settings():
    config = resolve({"method": "cofed", "training.lr": 0.5})
    other = config.replacing(out="here", seed=3)
    flat = {**config.flat(), "out": "here", "seed": 3}
    assert other.flat() == flat
    assert config.run.out == ""


def test_cofeds_rounds_follow_from_its_settings():
    assert resolve({"method": "cofed", "cofed.iterations": 4}).run.rounds == 5
    assert resolve({"method": "cofed", "cofed.iterations": 4, "rounds": 5}).run.rounds == 5
    said = {"method": "cofed", "cofed.iterations": 4, "rounds": 7}
    refusal(
        lambda: resolve(said),
        "'rounds': the number of rounds follows from the settings of cofed, expected 5, got 7",
    )


# --- the edges of each number ---------------------------------------------------------------


def numbers():
    """Return every numeric setting of every method."""
    return [name for name, info in all_settings().items() if info.annotation in (int, float)]


def exceeds_range(name, value):
    """Return whether a value is rejected because of the range of this setting."""
    method = "felo" if name in RunSettings.fields() else name.partition(".")[0]
    try:
        validate({"method": method, name: value})
    except SettingsError as error:
        return f"expected {allowed_values(all_settings()[name])}" in str(error)
    return False


def test_every_number_is_limited_to_the_range_that_its_error_names():
    for name in numbers():
        info = all_settings()[name]
        limits = re.findall(r"([<>]=?) ([^\s,]+)", allowed_values(info))
        assert {sign[0] for sign, _ in limits} == {"<", ">"}, name
        for sign, text in limits:
            end, way = info.annotation(text), 1 if sign[0] == "<" else -1
            if info.annotation is int:
                inside, outside = (end, end + way) if "=" in sign else (end - way, end)
            else:
                beyond = math.nextafter(end, way * math.inf)
                before = math.nextafter(end, -way * math.inf)
                inside, outside = (end, beyond) if "=" in sign else (before, end)
            assert exceeds_range(name, outside), name
            assert exceeds_range(name, way * 10**19), name
            assert not exceeds_range(name, inside), name


@pytest.mark.parametrize("name", ["data.alpha", "data.test-fraction", "training.lr"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_is_finite(name, value):
    refusal(lambda: resolve({name: value}), f"'{name}'", repr(value), "number")


# --- wrong types ----------------------------------------------------------------------------

WRONG = {
    int: [True, False, "3", "three", "", 3.0, 2.5, None, [1], {"a": 1}, b"3"],
    float: [True, False, "0.5", "", None, [0.5], {}, 1j],
    bool: [0, 1, "true", "", None, 1.0],
    str: [0, 1.5, True, None, ["x"], b"x"],
}
NOUN = {int: "integer", float: "number", bool: "true or false", str: "string"}


TYPED = {
    int: ["rounds", "seed", "data.shards", "felo.feature-dim"],
    float: ["fraction", "data.alpha", "training.momentum", "felo.alpha"],
    bool: ["resume", "data.download", "felo.share-weights"],
    str: ["data.data-dir", "method", "data.dataset", "engine.device"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in TYPED.items() for n in names])
def test_value_of_another_type_raises(kind, name):
    for value in WRONG[kind]:
        refusal(lambda value=value: resolve({name: value}), f"'{name}'", repr(value), NOUN[kind])


def test_integer_is_accepted_as_number():
    config = resolve({"data.alpha": 1, "felo.alpha": 2})
    assert config == resolve({"data.alpha": 1.0, "felo.alpha": 2.0})
    assert type(config.run.data.alpha) is type(config.method_settings.alpha) is float


LITERALS = [n for n, i in RunSettings.fields().items() if allowed_values(i).startswith("one of")]
assert LITERALS


@pytest.mark.parametrize("name", [*LITERALS, "felo.weighting"])
def test_other_values_than_the_choices_raise(name):
    info = all_settings()[name]
    choices = (
        allowed_values(info)
        .removesuffix(", or a list to assign to clients")
        .removeprefix("one of ")
        .split(", ")
    )
    for value in ("nonsense", "", "IID", 0, True, None):
        refusal(lambda value=value: resolve({name: value}), f"'{name}'", repr(value), *choices)
    # The choices of a loss exist only for regression.
    needed = {"method": "local", "data.task": "regression"} if name == "data.loss" else {}
    for choice in choices:
        assert resolve({**needed, name: choice}).flat()[name] == choice


# --- lists ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lone", "several"),
    [
        ("models.pool", "mlp", ["mlp"]),
        ("data.text-column", "title", ["title"]),
        ("data.label-space", 7, [7, 7]),
        ("training.milestones", 3, [3]),
        ("training.lr", 0.5, 0.5),
    ],
)
def test_single_value_is_a_list_of_one(name, lone, several):
    config = resolve({name: lone})
    assert config == resolve({name: [lone]})
    assert config.flat()[name] == several


@pytest.mark.parametrize(
    ("name", "text", "several"),
    [
        ("models.pool", "cnn2, mlp", ["cnn2", "mlp"]),
        ("models.pool", "mlp*2", ["mlp", "mlp"]),
        ("training.lr", "0.1,0.2", [0.1, 0.2]),
        ("training.milestones", "3,5", [3, 5]),
    ],
)
def test_list_may_be_text(name, text, several):
    assert resolve({name: text}).flat()[name] == several


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("models.pool", ["mlp", 3], "expected list of strings"),
        ("models.pool", 3, "expected list of strings"),
        ("models.pool", [["mlp"]], "expected list of strings"),
        ("models.pool", {"mlp": 2}, "expected list of strings"),
        ("data.superclasses", [[0, 1]], "expected cifar100 or list of lists of strings"),
        ("training.lr", [0.1, "fast"], "expected number > 0 and <= 1000000, or a list"),
        ("training.lr", [[0.1]], "expected number > 0"),
        ("data.alpha", [0.1, 0.2], "expected number > 0"),
    ],
)
def test_invalid_list_raises(name, value, rule):
    refusal(lambda: resolve({name: value}), f"'{name}': {rule}")


# --- names that do not exist ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("round", "rounds"),
        ("local_epochs", "training.local-epochs"),
        ("training.local_epochs", "training.local-epochs"),
        ("Rounds", "rounds"),
        ("batchsize", "training.batch-size"),
        ("dta.alpha", "data.alpha"),
        ("data.alpah", "data.alpha"),
        ("felo.alpah", "felo.alpha"),
        ("felo.feature_dim", "felo.feature-dim"),
        ("felo.share-weight", "felo.share-weights"),
        ("fleo.alpha", "felo.alpha"),
        ("felo", "felo.alpha"),
        ("felo.alpha.x", "felo.alpha"),
        ("felo.", "felo.alpha"),
    ],
)
@pytest.mark.parametrize("method", ["felo", "local"])
def test_unknown_setting_raises_with_a_suggestion(name, meant, method):
    call = lambda: resolve({"method": method, name: 1})  # noqa: E731
    refusal(call, f"'{name}'", f"did you mean '{meant}'?")


@pytest.mark.parametrize("name", ["", "zzzzzz", "x.y", ".", "=", "felo.qqqqqqqqqqqqqqqqqqqqqqq"])
def test_unknown_setting_without_a_similar_name_raises(name):
    refusal(lambda: resolve({name: 1}), f"'{name}'")


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31m", "a\rb"])
def test_control_characters_stay_on_one_line(name):
    refusal(lambda: resolve({name: 1}))
    refusal(lambda: resolve({"method": name}), "unknown method")
    refusal(lambda: resolve({"data.dataset": name}), "'data.dataset'")
    refusal(lambda: resolve({"models.pool": name}), "'models.pool'")
    refusal(lambda: read_preset(name), "preset")


def test_unknown_method_raises():
    message = refusal(lambda: resolve({"method": "fello"}), "unknown method 'fello'")
    assert "did you mean 'felo'?" in message
    refusal(lambda: resolve({"method": "qqq"}), "unknown method 'qqq'; `fedhet methods` lists all")


@pytest.mark.parametrize("name", ["base", "roster", "node", "open", "../felo", "felo.felo", ""])
def test_module_that_is_no_method_raises(name):
    refusal(lambda: resolve({"method": name}), f"'{name}'")


def test_setting_of_another_method_raises():
    call = lambda: resolve({"method": "local", "felo.alpha": 0.7})  # noqa: E731
    refusal(call, "'felo.alpha'", "0.7", "local")
    # Its default is accepted, because Flower's run config lists every setting.
    assert resolve({"method": "local", "felo.alpha": 1.0}) == resolve({"method": "local"})


@pytest.mark.parametrize("value", [math.nan, "1.0", None, True, [1.0]])
def test_invalid_setting_of_another_method_raises(value):
    refusal(lambda: resolve({"method": "local", "felo.alpha": value}), "'felo.alpha'", repr(value))


def test_unknown_model_raises():
    pool = "'models.pool'"
    refusal(lambda: resolve({"models.pool": ["mlp", "cnn22"]}), pool, "'cnn22'", "'cnn2'")
    for empty in ("", " "):
        given = parse_pairs([f"models.pool={empty}"])
        refusal(lambda given=given: resolve(given), pool, "[]", "empty")
    refusal(lambda: resolve({"models.pool": "no_such_module:build"}), pool, "no_such_module")


def test_unknown_dataset_raises():
    message = refusal(lambda: resolve({"data.dataset": "cifar-10"}), "'data.dataset'", "'cifar-10'")
    assert "did you mean 'cifar10'?" in message
    refusal(lambda: resolve({"data.dataset": ""}), "'data.dataset'", "digits")
    refusal(lambda: resolve({"data.dataset": "npy:/data"}), "'npy'", "'npz'")


def test_unknown_preset_raises():
    refusal(lambda: read_preset("dem"), "'dem'", "did you mean 'demo'?")
    for name in ("", "../presets/demo", "demo.toml", "/etc/passwd"):
        refusal(lambda name=name: read_preset(name), f"'{name}'")


def test_nearest_suggests_only_similar_names():
    assert nearest("rounds", []) == ""
    assert nearest("qqqq", ["rounds"]) == ""
    assert "'rounds'" in nearest("ruonds", ["rounds", "seed"])


# --- KEY=VALUE ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("rounds=5", {"rounds": 5}),
        (" rounds = 5 ", {"rounds": 5}),
        ("data.alpha=1e-3", {"data.alpha": 0.001}),
        ("alpha=1e-3", {"data.alpha": 0.001}),
        ("download=true", {"data.download": True}),
        ("partition=iid", {"data.partition": "iid"}),
        ("partition='iid'", {"data.partition": "iid"}),
        ('data.partition="iid"', {"data.partition": "iid"}),
        (" data.partition = iid", {"data.partition": "iid"}),
        ("channels-last=true", {"engine.channels-last": "true"}),
        ("data-dir=123", {"data.data-dir": "123"}),
        ("data-dir=/a b/c", {"data.data-dir": "/a b/c"}),
        ("data-dir=rock'n'", {"data.data-dir": "rock'n'"}),
        ("data-dir='a' and 'b'", {"data.data-dir": "'a' and 'b'"}),
        ("out=", {"out": ""}),
        ("out=''", {"out": ""}),
        ("dataset=npz:/a=b", {"data.dataset": "npz:/a=b"}),
        ("felo.weighting=samples", {"felo.weighting": "samples"}),
        ("felo.share-weights=false", {"felo.share-weights": False}),
        ("milestones=300,500", {"training.milestones": (300, 500)}),
        ("milestones=[300, 500]", {"training.milestones": [300, 500]}),
        ("milestones=", {"training.milestones": ()}),
        ("pool=cnn2*2,mlp", {"models.pool": ("cnn2", "cnn2", "mlp")}),
        ("pool=cnn2", {"models.pool": ("cnn2",)}),
        ("lr=0.1,1e-2", {"training.lr": (0.1, 0.01)}),
        ("lr=0.1", {"training.lr": 0.1}),
        ("superclasses=cifar100", {"data.superclasses": "cifar100"}),
        ("superclasses=0+1, 2", {"data.superclasses": (("0", "1"), ("2",))}),
    ],
)
def test_pair_is_parsed(pair, expected):
    values = parse_pairs([pair])
    assert values == expected
    assert [type(v) for v in values.values()] == [type(v) for v in expected.values()]


def test_duplicate_pair_raises():
    with pytest.raises(SettingsError, match=r"'rounds'"):
        parse_pairs(["rounds=1", "seed=2", "rounds=3"])
    with pytest.raises(SettingsError, match=r"'training\.lr'.*'0\.2'"):
        parse_pairs(["training.lr=0.1", "lr=0.2"])


def test_last_part_of_an_unambiguous_name_is_enough():
    for name, info in RunSettings.fields().items():
        last, default = name.rpartition(".")[2], info.default
        assert parse_pairs([f"{last}={as_text(default)}"]) == {name: default}
        assert parse_pairs([f"{name}={as_text(default)}"], "cofed") == {name: default}


def test_last_part_may_belong_to_the_method():
    assert parse_pairs(["feature-dim=3"], "felo") == {"felo.feature-dim": 3}
    assert parse_pairs(["interval=3", "memory=5"], "velo") == {"velo.interval": 3, "velo.memory": 5}
    # Without a method, or if the method has no such setting, the shared setting is meant.
    for method in (None, "local", "cofed"):
        assert parse_pairs(["alpha=3"], method) == {"data.alpha": 3}


@pytest.mark.parametrize(
    ("method", "key", "names"),
    [
        ("felo", "alpha", ["data.alpha", "felo.alpha"]),
        ("velo", "alpha", ["data.alpha", "velo.alpha"]),
        ("velo", "samples-per-class", ["data.samples-per-class", "velo.samples-per-class"]),
    ],
)
def test_ambiguous_last_part_raises_with_all_names(method, key, names):
    said = refusal(lambda: parse_pairs([f"{key}=1"], method), f"'{key}'", " or ".join(names))
    assert said.count(key) == 1 + len(names)
    for name in names:
        assert parse_pairs([f"{name}=1"], method) == {name: 1}


@pytest.mark.parametrize(
    ("key", "inside"),
    [
        ("attack", "attack.kind, attack.attackers, attack.scale"),
        ("models", "models.pool, models.assignment, models.num-classes"),
        ("data", "data.dataset, data.sample-kind, data.data-dir"),
        ("training", "training.lr"),
        ("engine", "engine.device"),
        ("felo", "felo.weighting, felo.feature-dim, felo.alpha, felo.feature-weight"),
    ],
)
def test_name_of_a_table_raises_with_its_settings(key, inside):
    refusal(lambda: parse_pairs([f"{key}=1"], "felo"), f"'{key}' is a table", inside)


def test_last_part_of_a_setting_of_another_method_raises():
    refusal(lambda: parse_pairs(["threshold=0.5"], "felo"), "'threshold'", "'cofed.threshold'")
    said = refusal(lambda: parse_pairs(["feature-dim=3"]), "'felo.feature-dim'")
    assert "'velo.feature-dim'" in said


def test_last_part_raises_outside_the_command_line():
    """Files and Flower's run config need the full name."""
    for name in [n for n in RunSettings.fields() if "." in n]:
        last = name.rpartition(".")[2]
        if last not in RunSettings.fields():
            refusal(lambda last=last: resolve({last: 1}), f"unknown setting '{last}'")


@pytest.mark.parametrize(
    ("pair", "parts"),
    [
        ("rounds", ["'rounds'", "KEY=VALUE"]),
        ("", ["''", "KEY=VALUE"]),
        ("=3", ["unknown setting ''"]),
        ("round=3", ["'round'", "'rounds'"]),
        ("rounds=three", ["'rounds'", "'three'", "integer >= 1"]),
        ("rounds=", ["'rounds'", "''", "integer"]),
        ("rounds=10.0", ["'rounds'", "10.0", "integer"]),
        ("rounds='3'", ["'rounds'", "'3'", "integer"]),
        ("rounds=true", ["'rounds'", "True", "integer"]),
        ("rounds=[1]", ["'rounds'", "[1]", "integer"]),
        ("rounds=[1", ["'rounds'", "'[1'", "integer"]),
        ("rounds={a=1}", ["'rounds'", "integer"]),
        ("rounds=2020-01-01", ["'rounds'", "2020", "integer"]),
        ("rounds=1\nseed=2", ["'rounds'", "integer"]),
        ("rounds=" + "9" * 5000, ["'rounds'", "integer"]),
        ("alpha=nan", ["'data.alpha'", "nan", "number > 0"]),
        ("alpha=inf", ["'data.alpha'", "inf", "number > 0"]),
        ("data.alpha=0,5", ["'data.alpha'", "'0,5'", "number > 0"]),
        ("download=True", ["'data.download'", "'True'", "true or false"]),
        ("download=1", ["'data.download'", "1", "true or false"]),
        ("partition=dirichle", ["'data.partition'", "'dirichle'", "dirichlet, iid"]),
        ("data.lr=1", ["unknown setting 'data.lr'", "did you mean"]),
        ("felo.alpah=1", ["'felo.alpah'", "'felo.alpha'"]),
        ("felo.weighting=sample", ["'felo.weighting'", "'sample'", "samples"]),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_invalid_pair_raises(pair, parts):
    refusal(lambda: resolve(parse_pairs([pair])), *parts)


@settings(max_examples=300, derandomize=True)
@given(st.sampled_from(sorted(all_settings())), st.text(max_size=15))
def test_any_text_resolves_or_raises_one_line(name, text):
    try:
        config = resolve(parse_pairs([f"{name}={text}"]))
    except SettingsError as error:
        message = str(error)
    else:
        assert isinstance(config, Config)
        return
    assert len(message.splitlines()) == 1
    assert name in message


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "rounds = ",
        "rounds = 3\nrounds = 4",
        "rounds: 3",
        "[felo\nalpha = 1",
        "rounds = " + "9" * 5000,
        "rounds = " + "[" * 5000,
    ],
    ids=lambda text: text[:20],
)
def test_invalid_toml_raises(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert refusal(lambda: read_toml(path)).count(str(path)) == 1


def test_unreadable_file_raises(tmp_path):
    absent = tmp_path / "absent.toml"
    said = refusal(lambda: read_toml(absent))
    assert said == f"cannot read settings from {absent}: No such file or directory"
    refusal(lambda: read_toml(tmp_path), str(tmp_path))
    (tmp_path / "latin.toml").write_bytes("out = 'ü'".encode("latin1"))
    refusal(lambda: read_toml(tmp_path / "latin.toml"), "latin.toml")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rounds = 0", ["'rounds'", "0", ">= 1"]),
        ("rounds = 2020-01-01", ["'rounds'", "integer"]),
        ("rounds = [1]", ["'rounds'", "[1]"]),
        ("[rounds]\nx = 1", ["'rounds.x'"]),
        ("[data]\nalpha = 0", ["'data.alpha'", "0", "> 0"]),
        ("[data]\nalpah = 1", ["'data.alpah'", "'data.alpha'"]),
        ("[data]\nlr = 1", ["'data.lr'"]),
        ("[data.alpha]\nx = 1", ["'data.alpha'", "{'x': 1}", "number > 0"]),
        ("data = 3", ["'data'"]),
        ("[[data]]\nalpha = 1", ["'data'"]),
        ("engine = 'ray'", ["'engine'"]),
        ("felo = 3", ["'felo'"]),
        ("[[felo]]\nalpha = 1", ["'felo'"]),
        ("method = 3", ["'method'", "3"]),
        ("[felo]\nalpha = -1", ["'felo.alpha'", "-1", ">= 0"]),
        ("[felo]\nalpa = 1", ["'felo.alpa'", "'felo.alpha'"]),
        ("method = 'local'\n[felo]\nalpha = 2", ["'felo.alpha'", "2", "local"]),
    ],
)
def test_file_with_an_invalid_setting_raises(tmp_path, text, parts):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refusal(lambda: resolve(read_toml(path)), *parts)


def test_files_table_may_be_written_with_dots(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("felo.alpha = 0.5\nrounds = 2")
    assert read_toml(path) == {"felo.alpha": 0.5, "rounds": 2}
    path.write_text("rounds = 2\n[felo]\nalpha = 0.5")
    assert read_toml(path) == {"felo.alpha": 0.5, "rounds": 2}


# --- the same settings, whatever they come from ---------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=20)
plain = st.text("abc/._-:= üλ", max_size=20).map(str.strip)


def number(low, high):
    return st.floats(low, high, exclude_min=True, exclude_max=True)


COMMON = {
    "rounds": st.integers(1, 1_000_000),
    "seed": st.integers(0, 1_000_000_000),
    "clients": st.integers(1, 50),
    "data.dataset": st.sampled_from(["digits", "cifar10", "npz:/some/where", "imagefolder:a b"]),
    "data.download": st.booleans(),
    "data.partition": st.sampled_from(["dirichlet", "iid", "shards", "classes"]),
    "data.alpha": number(0, 1e6),
    "data.test-fraction": number(0, 1),
    "data.label-space": st.sampled_from([[6, 8], [7, 7]]),
    "data.subclasses": st.sampled_from(["all", [1, 2]]),
    "data.superclasses": st.sampled_from(["cifar100", [], [["a", "b"], ["c"]]]),
    "data.text-column": st.sampled_from([["text"], ["title, or so", "[body]"]]),
    "models.pool": st.sampled_from([["mlp"], ["cnn2", "resnet10"], ["mlp", "mlp"]]),
    "training.milestones": st.sampled_from([[], [3], [300, 500]]),
    "training.optimizer": st.sampled_from(["sgd", ["adam", "sgd"]]),
    "fraction": number(0, 1),
    "training.lr": number(0, 1),
    "training.weight-decay": st.floats(0, 1e6),
    "engine.channels-last": st.sampled_from(["auto", "true", "false"]),
    "engine.max-payload-mb": number(0, 1e6),
}
OWN = {
    "felo.alpha": st.floats(0, 1e6),
    "felo.feature-weight": st.floats(0, 1e6),
    "felo.feature-norm": st.sampled_from(["none", "rms", "unit"]),
    "felo.feature-dim": st.integers(1, 1_000_000),
    "felo.share-weights": st.booleans(),
    "felo.weighting": st.sampled_from(["clients", "samples"]),
}


def some_settings(words):
    words_of = {"data.data-dir": words, "out": words, "engine.device": words}
    felo = st.fixed_dictionaries({}, optional=COMMON | OWN | words_of)
    local = st.fixed_dictionaries({"method": st.just("local")}, optional=COMMON | words_of)
    return felo | local


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    return tmp_path_factory.mktemp("settings") / "mine.toml"


@settings(max_examples=150, derandomize=True)
@given(values=some_settings(plain))
def test_same_settings_from_every_source(mine, values):
    mine.write_text(tomli_w.dumps(nest(values)), encoding="utf-8")
    # As Flower's run config gives them: all there are, of every method, in another order.
    flat = dict(sorted(to_flower({**defaults(), **values}).items()))

    config = resolve(values)
    assert resolve(parse_pairs(f"{k}={as_text(v)}" for k, v in values.items())) == config
    assert resolve(read_toml(mine)) == config
    assert {type(value) for value in flat.values()} <= {bool, int, float, str}
    assert resolve_flower(flat) == config
    for name, value in values.items():
        assert config.flat()[name] == value


@settings(max_examples=150, derandomize=True)
@given(values=some_settings(texts))
def test_config_round_trips(mine, values):
    config = resolve(values)
    assert resolve(config.flat()) == config
    assert hash(resolve(config.flat())) == hash(config)
    mine.write_text(config.to_toml(), encoding="utf-8")
    again = resolve(read_toml(mine))
    assert again.flat() == {**config.flat(), "out": ""}  # a place is no part of what was run
    assert again.to_toml() == config.to_toml()


@settings(max_examples=60, derandomize=True)
@given(values=some_settings(plain), other=some_settings(plain))
def test_different_settings_are_different_configs(values, other):
    one, two = resolve(values), resolve(other)
    assert (one == two) == (one.flat() == two.flat())


# --- a method's own schema ------------------------------------------------------------------


class Mine(MethodSettings):
    """A schema that a method may declare."""

    low: int = Field(1, ge=0, description="low end")
    high: int = Field(5, description="high end")
    class_: Literal["a", "b"] = Field("a", description="a name that Python keeps for itself")
    even: int = Field(2, description="even")

    @field_validator("even")
    @classmethod
    def check_even(cls, value):
        """Refuse odd numbers."""
        if value % 2:
            raise ValueError("an even number")
        return value

    @model_validator(mode="after")
    def check_order(self):
        """Refuse an empty range."""
        if self.low > self.high:
            raise ValueError("'mine.low' must not exceed 'mine.high'")
        return self


def test_checks_of_a_methods_schema_name_the_setting():
    assert kebab("class_") == "class"
    made = build(Mine, {"low": 2, "class": "b"}, "mine.")
    assert made.flat() == {"low": 2, "high": 5, "class": "b", "even": 2}
    refusal(lambda: build(Mine, {"class": "c"}, "mine."), "'mine.class'", "'c'", "one of a, b")
    refusal(lambda: build(Mine, {"lo": 1}, "mine."), "'mine.lo'", "'mine.low'")
    refusal(lambda: build(Mine, {"even": 3}, "mine."), "'mine.even'", "3", "an even number")
    refusal(lambda: build(Mine, {"low": 6}, "mine."), "'mine.low' must not exceed 'mine.high'")
