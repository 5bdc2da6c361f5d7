"""Settings from every source: the same values are the same run, a wrong one earns one line."""

import math
from typing import Literal

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, field_validator, model_validator

from fedhet.config.methods import find_method, method_names
from fedhet.config.resolve import (
    Config,
    all_settings,
    data_spec,
    parse_pairs,
    pool,
    preset_names,
    read_preset,
    read_toml,
    resolve,
    resolve_items,
)
from fedhet.config.schema import MethodSettings, Settings, allowed, build, kebab
from fedhet.errors import SettingsError, nearest


def often(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True)


def refusal(call, *parts):
    """The one line of the SettingsError, which holds each of `parts`."""
    with pytest.raises(SettingsError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.isprintable()
    for part in parts:
        assert part in message
    return message


# --- what there is --------------------------------------------------------------------------


def test_both_first_methods_are_found():
    assert {"felo", "local"} <= set(method_names())


@pytest.mark.parametrize("name", all_settings())
def test_a_setting_says_what_it_is_and_what_it_takes(name):
    info = all_settings()[name]
    assert info.description
    assert info.description.isprintable()
    assert info.default is not None
    assert len(allowed(info)) > 3
    assert name == name.lower()
    assert "_" not in name


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("felo-")])
def test_velo_has_every_experiment_of_felos(name):
    """A preset of Felo's given to another method loses Felo's own settings, the width too."""
    felo, velo = read_preset(name), read_preset(name.replace("felo", "velo"))
    own = {key.replace("felo.", "velo."): value for key, value in felo.items()}
    assert {**own, "method": "velo", "velo.interval": 1} == velo


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_resolves(name):
    values = read_preset(name)
    assert values
    config = resolve(values)
    assert {key: config.flat()[key] for key in values} == values
    title = preset_names()[name]
    assert title
    assert not title.startswith("#")


def test_the_defaults_are_allowed():
    assert resolve({}) == resolve(Settings().flat())
    assert resolve({}).method.name == Settings().method


def test_a_run_has_the_settings_of_its_own_method_alone():
    flat = resolve({"method": "local"}).flat()
    assert not [name for name in flat if "." in name]
    flat = resolve({"method": "felo"}).flat()
    assert {name for name in flat if "." in name} == set(find_method("felo").settings())


def test_both_halves_of_felo_get_what_they_share():
    config = resolve({"felo.feature-dim": 7, "felo.alpha": 0.25, "felo.weighting": "samples"})
    assert config.server.feature_dim == config.client.feature_dim == 7
    assert config.client.alpha == 0.25
    assert config.server.weighting == "samples"


def test_settings_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        resolve({}).run.rounds = 3


def test_data_spec_says_what_the_settings_say():
    values = {"clients": 3, "partition": "iid", "alpha": 2.0, "seed": 9, "max-samples": 50}
    spec = data_spec(resolve(values).run)
    said = (spec.clients, spec.partition, spec.alpha, spec.seed, spec.max_samples)
    assert said == (3, "iid", 2.0, 9, 50)


def test_a_pool_is_read_with_its_spaces():
    assert pool(resolve({"models": " mlp , cnn2,,mlp "}).run) == ["mlp", "cnn2", "mlp"]


# --- the edges of each number ---------------------------------------------------------------

JUST = math.nextafter
BOUNDS = {
    # name: least, most, what is just too little, what is just too much
    "rounds": (1, 1_000_000, 0, 1_000_001),
    "seed": (0, 1_000_000_000, -1, 1_000_000_001),
    "clients": (1, 1_000_000, 0, 1_000_001),
    "alpha": (5e-324, 1e6, 0.0, JUST(1e6, 2e6)),
    "shards": (1, 1_000_000, 0, 1_000_001),
    "classes-per-client": (1, 1_000_000, 0, 1_000_001),
    "min-samples": (1, 1_000_000, 0, 1_000_001),
    "test-fraction": (5e-324, JUST(1, 0), 0.0, 1.0),
    "image-size": (0, 1_000_000_000, -1, 1_000_000_001),
    "max-samples": (0, 1_000_000_000, -1, 1_000_000_001),
    "max-test-samples": (0, 1_000_000_000, -1, 1_000_000_001),
    "num-classes": (0, 1_000_000_000, -1, 1_000_000_001),
    "fraction": (5e-324, 1.0, 0.0, JUST(1, 2)),
    "local-epochs": (1, 1_000_000, 0, 1_000_001),
    "lr": (5e-324, 1e6, 0.0, JUST(1e6, 2e6)),
    "momentum": (0.0, JUST(1, 0), -5e-324, 1.0),
    "weight-decay": (0.0, 1e6, -5e-324, JUST(1e6, 2e6)),
    "evaluate-every": (1, 1_000_000, 0, 1_000_001),
    "threads": (1, 1_000_000, 0, 1_000_001),
    "cpus-per-client": (5e-324, 1e6, 0.0, JUST(1e6, 2e6)),
    "gpus-per-client": (0.01, 1.0, JUST(0.01, 0), JUST(1, 2)),
    "round-timeout": (5e-324, 1e6, 0.0, JUST(1e6, 2e6)),
    "max-payload-mb": (5e-324, 1e6, 0.0, JUST(1e6, 2e6)),
}


def of_type(kind):
    return [name for name, info in Settings.fields().items() if info.annotation is kind]


def numbers():
    """Every setting that is a number, of every method."""
    return [name for name, info in all_settings().items() if info.annotation in (int, float)]


def test_the_table_of_bounds_is_of_settings_that_exist():
    assert BOUNDS.keys() <= {*of_type(int), *of_type(float)}


@pytest.mark.parametrize("name", numbers())
def test_a_number_has_two_ends(name):
    rule = allowed(all_settings()[name])
    assert ">" in rule
    assert "<" in rule
    method = name.partition(".")[0] if "." in name else "felo"
    for value in (-(10**12), 10**12):
        refusal(lambda value=value: resolve({"method": method, name: value}), f"'{name}'", rule)


@pytest.mark.parametrize("name", BOUNDS)
def test_the_edges_of_a_number(name):
    least, most, below, above = BOUNDS[name]
    for value in (least, most):
        assert build(Settings, {name: value}).flat()[name] == value
    for value in (below, above):
        rule = allowed(Settings.fields()[name])
        refusal(lambda value=value: resolve({name: value}), f"'{name}'", repr(value), rule)


@pytest.mark.parametrize("name", [n for n in BOUNDS if n in of_type(float)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_is_finite(name, value):
    refusal(lambda: resolve({name: value}), f"'{name}'", repr(value), "a number")


@pytest.mark.parametrize("name", BOUNDS)
def test_the_rule_names_both_ends(name):
    least, most, below, above = BOUNDS[name]
    rule = allowed(Settings.fields()[name])
    for edge, open_sign, closed_sign in ((below, "> ", ">= "), (above, "< ", "<= ")):
        shown = {f"{open_sign}{edge:g}", f"{open_sign}{edge}"}
        inside = least if edge == below else most
        shown |= {f"{closed_sign}{inside:g}", f"{closed_sign}{inside}"}
        assert any(f" {text} " in f" {rule} " for text in shown), (rule, shown)


# --- wrong types ----------------------------------------------------------------------------

WRONG = {
    int: [True, False, "3", "three", "", 3.0, 2.5, None, [1], {"a": 1}, b"3"],
    float: [True, False, "0.5", "", None, [0.5], {}, 1j],
    bool: [0, 1, "true", "", None, 1.0],
    str: [0, 1.5, True, None, ["x"], b"x"],
}
NOUN = {int: "an integer", float: "a number", bool: "true or false", str: "text in quotes"}


TYPED = {
    int: ["rounds", "seed", "felo.feature-dim"],
    float: ["alpha", "momentum", "felo.alpha"],
    bool: ["download", "felo.share-weights"],
    str: ["data-dir", "method", "models", "dataset", "device"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in TYPED.items() for n in names])
def test_another_type(kind, name):
    for value in WRONG[kind]:
        refusal(lambda value=value: resolve({name: value}), f"'{name}'", repr(value), NOUN[kind])


def test_a_whole_number_stands_for_a_number():
    config = resolve({"alpha": 1, "felo.alpha": 2})
    assert config == resolve({"alpha": 1.0, "felo.alpha": 2.0})
    assert type(config.run.data.alpha) is type(config.client.alpha) is float


LITERALS = [n for n, i in Settings.fields().items() if allowed(i).startswith("one of")]


def test_the_choices_are_found():
    assert {"partition", "deal", "optimizer", "backend", "precision"} <= set(LITERALS)


@pytest.mark.parametrize("name", [*LITERALS, "felo.weighting"])
@pytest.mark.parametrize("value", ["nonsense", "", "IID", 0, True, None])
def test_not_one_of_the_choices(name, value):
    info = all_settings()[name]
    choices = allowed(info).removeprefix("one of ").split(", ")
    refusal(lambda: resolve({name: value}), f"'{name}'", repr(value), *choices)
    for choice in choices:
        assert resolve({name: choice}).flat()[name] == choice


# --- names that do not exist ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("round", "rounds"),
        ("local_epochs", "local-epochs"),
        ("Rounds", "rounds"),
        ("batchsize", "batch-size"),
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
def test_a_setting_that_does_not_exist(name, meant, method):
    call = lambda: resolve({"method": method, name: 1})  # noqa: E731
    refusal(call, f"'{name}'", f"did you mean '{meant}'?")


@pytest.mark.parametrize("name", ["", "zzzzzz", "x.y", ".", "=", "felo.qqqqqqqqqqqqqqqqqqqqqqq"])
def test_a_setting_like_none_that_exists(name):
    refusal(lambda: resolve({name: 1}), f"'{name}'")


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31m", "a\rb"])
def test_a_strange_name_stays_on_one_line(name):
    refusal(lambda: resolve({name: 1}))
    refusal(lambda: resolve({"method": name}), "'method'")
    refusal(lambda: resolve({"dataset": name}), "'dataset'")
    refusal(lambda: resolve({"models": name}), "'models'")
    refusal(lambda: read_preset(name), "preset")


def test_a_method_that_does_not_exist():
    message = refusal(lambda: resolve({"method": "fello"}), "'method'", "'fello'", "felo, ")
    assert "did you mean 'felo'?" in message
    for name in method_names():
        assert name in message


@pytest.mark.parametrize("name", ["base", "roster", "node", "open", "../felo", "felo.felo", ""])
def test_a_module_that_is_no_method(name):
    refusal(lambda: resolve({"method": name}), "'method'", f"'{name}'")


def test_a_setting_of_another_method():
    call = lambda: resolve({"method": "local", "felo.alpha": 0.7})  # noqa: E731
    refusal(call, "'felo.alpha'", "0.7", "local")
    # At its default it may stand there, as in Flower's run config.
    assert resolve({"method": "local", "felo.alpha": 1.0}) == resolve({"method": "local"})


@pytest.mark.parametrize("value", [math.nan, "1.0", None, True, [1.0]])
def test_a_wrong_value_of_a_setting_of_another_method(value):
    refusal(lambda: resolve({"method": "local", "felo.alpha": value}), "'felo.alpha'", repr(value))


def test_models_that_do_not_exist():
    refusal(lambda: resolve({"models": "mlp,cnn22"}), "'models'", "'cnn22'", "'cnn2'")
    for empty in ("", " ", ",,"):
        refusal(lambda empty=empty: resolve({"models": empty}), "'models'", repr(empty), "empty")
    refusal(lambda: resolve({"models": "no_such_module:build"}), "'models'", "no_such_module")


def test_datasets_that_do_not_exist():
    message = refusal(lambda: resolve({"dataset": "cifar-10"}), "'dataset'", "'cifar-10'")
    assert "did you mean 'cifar10'?" in message
    assert "digits" in message
    refusal(lambda: resolve({"dataset": ""}), "'dataset'", "digits")
    refusal(lambda: resolve({"dataset": "npy:/data"}), "'npy:/data'", "npz")


def test_presets_that_do_not_exist():
    refusal(lambda: read_preset("dem"), "'dem'", "did you mean 'demo'?")
    for name in ("", "../presets/demo", "demo.toml", "/etc/passwd"):
        refusal(lambda name=name: read_preset(name), f"'{name}'")


def test_nearest_offers_only_what_is_near():
    assert nearest("rounds", []) == ""
    assert nearest("qqqq", ["rounds"]) == ""
    assert "'rounds'" in nearest("ruonds", ["rounds", "seed"])


# --- KEY=VALUE ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("rounds=5", {"rounds": 5}),
        (" rounds = 5 ", {"rounds": 5}),
        ("alpha=1e-3", {"alpha": 0.001}),
        ("download=true", {"download": True}),
        ("partition=iid", {"partition": "iid"}),
        ("partition='iid'", {"partition": "iid"}),
        ('partition="iid"', {"partition": "iid"}),
        ("channels-last=true", {"channels-last": "true"}),
        ("data-dir=123", {"data-dir": "123"}),
        ("data-dir=/a b/c", {"data-dir": "/a b/c"}),
        ("data-dir=rock'n'", {"data-dir": "rock'n'"}),
        ("data-dir='a' and 'b'", {"data-dir": "'a' and 'b'"}),
        ("out=", {"out": ""}),
        ("out=''", {"out": ""}),
        ("dataset=npz:/a=b", {"dataset": "npz:/a=b"}),
        ("felo.weighting=samples", {"felo.weighting": "samples"}),
        ("felo.share-weights=false", {"felo.share-weights": False}),
    ],
)
def test_a_pair_is_read(pair, expected):
    values = parse_pairs([pair])
    assert values == expected
    assert [type(v) for v in values.values()] == [type(v) for v in expected.values()]


def test_of_one_setting_there_is_one_pair():
    with pytest.raises(SettingsError, match="'rounds' is given twice"):
        parse_pairs(["rounds=1", "seed=2", "rounds=3"])


@pytest.mark.parametrize(
    ("pair", "parts"),
    [
        ("rounds", ["'rounds'", "KEY=VALUE"]),
        ("", ["''", "KEY=VALUE"]),
        ("=3", ["unknown setting ''"]),
        ("round=3", ["'round'", "'rounds'"]),
        ("rounds=three", ["'rounds'", "'three'", "an integer >= 1"]),
        ("rounds=", ["'rounds'", "''", "an integer"]),
        ("rounds=10.0", ["'rounds'", "10.0", "an integer"]),
        ("rounds='3'", ["'rounds'", "'3'", "an integer"]),
        ("rounds=true", ["'rounds'", "True", "an integer"]),
        ("rounds=[1]", ["'rounds'", "[1]", "an integer"]),
        ("rounds=[1", ["'rounds'", "'[1'", "an integer"]),
        ("rounds={a=1}", ["'rounds'", "an integer"]),
        ("rounds=2020-01-01", ["'rounds'", "2020", "an integer"]),
        ("rounds=1\nseed=2", ["'rounds'", "an integer"]),
        ("rounds=" + "9" * 5000, ["'rounds'", "an integer"]),
        ("alpha=nan", ["'alpha'", "nan", "a number > 0"]),
        ("alpha=inf", ["'alpha'", "inf", "a number > 0"]),
        ("alpha=0,5", ["'alpha'", "'0,5'", "a number > 0"]),
        ("download=True", ["'download'", "'True'", "true or false"]),
        ("download=1", ["'download'", "1", "true or false"]),
        ("partition=dirichle", ["'partition'", "'dirichle'", "dirichlet, iid"]),
        ("felo.alpah=1", ["'felo.alpah'", "'felo.alpha'"]),
        ("felo.weighting=sample", ["'felo.weighting'", "'sample'", "samples"]),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_a_pair_that_is_wrong(pair, parts):
    refusal(lambda: resolve(parse_pairs([pair])), *parts)


@often(300)
@given(st.sampled_from(sorted(all_settings())), st.text(max_size=15))
def test_any_text_resolves_or_earns_one_line(name, text):
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
def test_a_file_that_is_no_toml(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refusal(lambda: read_toml(path), str(path))


def test_files_that_cannot_be_read(tmp_path):
    refusal(lambda: read_toml(tmp_path / "absent.toml"), "absent.toml")
    refusal(lambda: read_toml(tmp_path), str(tmp_path))
    (tmp_path / "latin.toml").write_bytes("out = 'ü'".encode("latin1"))
    refusal(lambda: read_toml(tmp_path / "latin.toml"), "latin.toml")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rounds = 0", ["'rounds'", "0", ">= 1"]),
        ("rounds = 2020-01-01", ["'rounds'", "an integer"]),
        ("rounds = [1]", ["'rounds'", "[1]"]),
        ("[rounds]\nx = 1", ["'rounds.x'"]),
        ("felo = 3", ["'felo'"]),
        ("[[felo]]\nalpha = 1", ["'felo'"]),
        ("method = 3", ["'method'", "3"]),
        ("[felo]\nalpha = -1", ["'felo.alpha'", "-1", ">= 0"]),
        ("[felo]\nalpa = 1", ["'felo.alpa'", "'felo.alpha'"]),
        ("method = 'local'\n[felo]\nalpha = 2", ["'felo.alpha'", "2", "local"]),
    ],
)
def test_a_file_with_a_wrong_setting(tmp_path, text, parts):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refusal(lambda: resolve(read_toml(path)), *parts)


def test_a_files_table_may_be_written_with_dots(tmp_path):
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
    "dataset": st.sampled_from(["digits", "cifar10", "npz:/some/where", "imagefolder:a b"]),
    "download": st.booleans(),
    "partition": st.sampled_from(["dirichlet", "iid", "shards", "classes"]),
    "alpha": number(0, 1e6),
    "test-fraction": number(0, 1),
    "models": st.sampled_from(["mlp", "cnn2,resnet10", "mlp, mlp"]),
    "fraction": number(0, 1),
    "lr": number(0, 1),
    "weight-decay": st.floats(0, 1e6),
    "channels-last": st.sampled_from(["auto", "true", "false"]),
    "max-payload-mb": number(0, 1e6),
}
OWN = {
    "felo.alpha": st.floats(0, 1e6),
    "felo.feature-dim": st.integers(1, 1_000_000),
    "felo.share-weights": st.booleans(),
    "felo.weighting": st.sampled_from(["clients", "samples"]),
}


def some_settings(words):
    words_of = {"data-dir": words, "out": words, "device": words}
    felo = st.fixed_dictionaries({}, optional=COMMON | OWN | words_of)
    local = st.fixed_dictionaries({"method": st.just("local")}, optional=COMMON | words_of)
    return felo | local


def as_text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    return tmp_path_factory.mktemp("settings") / "mine.toml"


@often(150)
@given(values=some_settings(plain))
def test_the_same_settings_from_every_source(mine, values):
    tables = {k: v for k, v in values.items() if "." not in k}
    own = {k.removeprefix("felo."): v for k, v in values.items() if "." in k}
    mine.write_text(tomli_w.dumps(tables | ({"felo": own} if own else {})), encoding="utf-8")
    # As Flower's run config gives them: all there are, of every method, in another order.
    everything = {name: info.default for name, info in all_settings().items()}
    flat = dict(sorted({**everything, **values}.items()))

    config = resolve(values)
    assert resolve(parse_pairs(f"{k}={as_text(v)}" for k, v in values.items())) == config
    assert resolve(read_toml(mine)) == config
    assert resolve(flat) == config
    assert resolve_items(tuple(flat.items())) == config
    for name, value in values.items():
        assert config.flat()[name] == value


@often(150)
@given(values=some_settings(texts))
def test_a_config_comes_back_from_what_it_says(mine, values):
    config = resolve(values)
    assert resolve(config.flat()) == config
    assert hash(resolve(config.flat())) == hash(config)
    mine.write_text(config.to_toml(), encoding="utf-8")
    again = resolve(read_toml(mine))
    assert again.flat() == {**config.flat(), "out": ""}  # a place is no part of what was run
    assert again.to_toml() == config.to_toml()


@often(60)
@given(values=some_settings(plain), other=some_settings(plain))
def test_different_settings_are_different_configs(values, other):
    one, two = resolve(values), resolve(other)
    assert (one == two) == (one.flat() == two.flat())


# --- a method's own schema ------------------------------------------------------------------


class Mine(MethodSettings):
    """A schema as a method may write it."""

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


def test_a_methods_own_schema():
    assert kebab("class_") == "class"
    made = build(Mine, {"low": 2, "class": "b"}, "mine.")
    assert made.flat() == {"low": 2, "high": 5, "class": "b", "even": 2}
    refusal(lambda: build(Mine, {"class": "c"}, "mine."), "'mine.class'", "'c'", "one of a, b")
    refusal(lambda: build(Mine, {"lo": 1}, "mine."), "'mine.lo'", "'mine.low'")


def test_a_schemas_own_check_of_one_field():
    refusal(lambda: build(Mine, {"even": 3}, "mine."), "'mine.even'", "3", "an even number")


def test_a_schemas_own_check_across_fields():
    refusal(lambda: build(Mine, {"low": 6}, "mine."), "'mine.low' must not exceed 'mine.high'")
