"""Models for texts, signals, and tables against slow models, and every method on them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from federation import Server, fast, records
from torch.nn import functional as F

from fedhet import models
from fedhet.algorithms.uncertainty import has_dropout
from fedhet.base.errors import KnowledgeError, ModelError, SettingsError
from fedhet.config.resolve import check, resolve
from fedhet.kinds import KINDS, SIGNAL, TEXT, text_shape
from fedhet.methods.registry import find_method, method_names
from fedhet.models import MODELS
from fedhet.wire.identity import ClientInfo, read_properties

SHAPE = text_shape(24, 50)
TEXTS = [name for name, info in MODELS.items() if info.takes is TEXT]
SIGNALS = [name for name, info in MODELS.items() if info.takes is SIGNAL]


def tokens(lengths, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in zip(x, lengths, strict=True):
        row[:length] = torch.randint(1, 50, (length,), generator=generator)
    return x


@cache
def model(name):
    return models.build(name, SHAPE, 3, seed=0).eval()


@pytest.mark.parametrize("name", TEXTS)
def test_logits_do_not_depend_on_padding(name):
    short = tokens([1, 5, 7, 12], 12)
    long = F.pad(short, (0, 12))
    with torch.no_grad():
        found = model(name)(short)
        assert torch.equal(model(name)(long), found)  # cut to the longest: not a bit differs
        for row, logits in zip(long, found, strict=True):  # alone, and cut to its own length
            assert torch.allclose(model(name)(row[None]), logits[None], atol=1e-5)
        # What the vector of padding is does not matter.
        embedding = model(name).get_submodule("extractor.tokens.embedding").weight
        kept = embedding[0].clone()
        embedding[0] = 9.0
        assert torch.equal(model(name)(long), found)
        embedding[0] = kept
        assert model(name)(torch.zeros(2, 24, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("name", TEXTS)
def test_padding_gets_no_gradient_and_every_weight_gets_one(name):
    made = models.build(name, SHAPE, 3, seed=1).train()
    F.cross_entropy(made(tokens([9, 12, 24, 6], 24)), torch.tensor([0, 1, 2, 0])).backward()
    for part, parameter in made.named_parameters():
        assert parameter.grad is not None, part
        assert parameter.grad.abs().sum() > 0, part
        if part.endswith("embedding.weight"):
            assert parameter.grad[0].abs().sum() == 0


def vectors_of(name, x):
    return model(name).get_submodule("extractor.tokens.embedding").weight[x]


def test_models_of_texts_word_by_word():
    """Compare a batch with each text alone, without padding and with loops over words."""
    x = tokens([1, 4, 9], 24, seed=3)
    with torch.no_grad():
        batch = {name: model(name)(x) for name in TEXTS}
        for place, row in enumerate(x):
            text, found = row[row > 0], {name: batch[name][place] for name in TEXTS}
            head = {n: model(n).classifier for n in TEXTS}
            v = vectors_of("text-bag", text)
            features = F.relu(model("text-bag").extractor.hidden(v.sum(0) / len(text)))
            close(head["text-bag"](features), found["text-bag"])
            v = vectors_of("text-cnn", text)
            parts = []
            for conv in model("text-cnn").extractor.convs:
                size = conv.kernel_size[0]
                v_after = torch.cat([v, torch.zeros(size - 1, v.shape[1])])
                each = [
                    torch.einsum("oik,ki->o", conv.weight, v_after[at : at + size]) + conv.bias
                    for at in range(len(text))
                ]
                parts.append(F.relu(torch.stack(each)).amax(0))
            close(head["text-cnn"](torch.stack(parts, 1).flatten()), found["text-cnn"])
            for name in ("text-gru", "text-lstm"):
                layer, v = model(name).extractor.layer, vectors_of(name, text)
                close(head[name](layer(v)[0].amax(0)), found[name])
            extractor, v = model("text-transformer").extractor, vectors_of("text-transformer", text)
            states = extractor.layers((v + extractor.places[: len(text)])[None])[0]
            close(head["text-transformer"](states.mean(0)), found["text-transformer"])


def close(left, right):
    assert torch.allclose(left, right, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in [*TEXTS, *SIGNALS] if MODELS[name].narrows])
def test_narrow_model_is_the_leading_part_of_the_whole_one(name):
    """If all other values are zero, both have the same logits (HeteroFL averages such parts)."""
    shape = SHAPE if name in TEXTS else (2, 32)
    whole, part = (models.build(n, shape, 3, seed=0).eval() for n in (name, f"{name}-x0.5"))
    state = whole.state_dict()
    with torch.no_grad():
        for key, small in part.state_dict().items():
            if not small.ndim or "running" in key:
                continue
            leading = tuple(map(slice, small.shape))
            small.copy_(state[key][leading])
            state[key].zero_()
            state[key][leading] = small
        x = tokens([3, 24, 7], 24) if name in TEXTS else torch.randn(3, *shape)
        close(whole(x), part(x))


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("shape", [(1, 8), (3, 33), (9, 128)])
def test_models_of_signals_take_any_channels_and_time(name, shape):
    made = models.build(name, shape, 4, seed=0, feature_dim=10)
    features, logits = made.features_and_logits(torch.randn(5, *shape))
    assert (features.shape, logits.shape) == ((5, 10), (5, 4))


def test_unsupported_samples_raise():
    for name, kind, shape, fault in (
        ("text-cnn", "image", (3, 8, 8), "expected texts"),
        ("signal-gru", "table", (5,), "expected signals"),
        ("signal-cnn2", "signal", (2, 4), "of 8 steps or more"),
        ("ft-transformer", "signal", (3, 8), "expected rows"),
        ("mlp", "text", SHAPE, "does not support texts"),
        ("cnn2", "text", SHAPE, "does not support texts"),
        ("resnet10", "signal", (2, 64), "expected images"),
    ):
        with pytest.raises(ModelError, match=fault):
            models.build(name, shape, 3, seed=0, kind=kind)


def test_ft_transformer_column_by_column():
    made = models.build("ft-transformer", (4,), 2, seed=0).eval()
    row, extractor = torch.tensor([0.5, -2.0, 0.0, 1.5]), made.extractor
    columns = [row[c] * extractor.weight[c] + extractor.bias[c] for c in range(4)]
    states = extractor.layers(torch.stack([extractor.row[0], *columns])[None])[0]
    close(made.classifier(states[0]), made(row[None])[0])


def test_description_of_texts_round_trips():
    info = ClientInfo("a", "text-bag", 5, 2, "text", SHAPE)
    assert read_properties(info.properties(), "node") == info
    for odd in ("0,24", "0,0,50", "0,24,0", "0,24,2000000", "0,1,1,1", "3,0,8"):
        with pytest.raises(KnowledgeError, match="shape"):
            read_properties({**info.properties(), "shape": odd}, "node")
    for kind in ("", "film", 3):
        with pytest.raises(KnowledgeError, match=r"image, table"):
            read_properties({**info.properties(), "kind": kind}, "node")


def test_kind_is_sent_for_every_shape():
    """Signals and table rows may have any shape of their rank, so the shape states no kind."""
    signal = ClientInfo("a", "signal-cnn2", 5, 2, "signal", (6, 3))
    assert read_properties(signal.properties(), "node").kind == "signal"
    with pytest.raises(KnowledgeError, match=r"6,3 .*table"):
        read_properties({**signal.properties(), "kind": "table"}, "node")


# Default models.


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_default_models_of_a_kind_support_its_samples(kind):
    defaults = {*kind.pool, kind.model, kind.large_model, kind.dropout_model}
    for name in sorted(defaults):
        made = models.build(name, kind.example, 3, seed=0, kind=kind.name)
        assert made.eval()(kind.blank(2, kind.example)).shape == (2, 3), name
        if name == kind.dropout_model:
            assert has_dropout(made)


def test_new_kind_needs_no_change_in_a_method():
    """A method takes its default models from the kind, even if fedhet does not know the kind."""
    volume = replace(
        SIGNAL, name="volume", plural="volumes", fits=lambda shape: len(shape) == 4,
        pool=("small", "other"), model="small", large_model="large", dropout_model="dropped",
    )  # fmt: skip
    pools = {name: find_method(name).spec.pool(volume) for name in method_names()}
    assert pools["um-pfssl"] == ("dropped",)
    assert pools["heterofl"] == pools["fedlora"] == pools["fedavg"] == ("small",)
    assert pools["felo"] == pools["local"] == ("small", "other")
    assert {*pools.values()} == {("dropped",), ("small",), ("small", "other")}
    named = [find_method(name).spec.defaults(volume) for name in method_names()]
    assert {model for each in named for model in each.values()} == {"small", "large"}


# Every method on texts and on signals.

ORDINARY = {("felo", "text"), ("fedtype", "text"), ("felo", "signal")}


def make(kind, root):
    """Write a dataset with 3 classes that a model can distinguish, for 3 clients."""
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    if kind == "signal":
        x = np.sin(np.arange(16) * (y[:, None] + 1)) + rng.normal(0, 0.1, (120, 16))
        np.savez(root / "train.npz", x=x[:, None], y=y)
        np.savez(root / "test.npz", x=x[:30, None], y=y[:30])
        return
    for part, count in (("train", 120), ("test", 30)):
        lines = [f"word{label} word{label} a{rng.integers(9)},c{label}" for label in y[:count]]
        (root / f"{part}.csv").write_text("\n".join(["text,label", *lines]))


def settings(kind, root):
    return {
        "data.dataset": f"{kind}:{root}",
        "data.vocabulary": 64,
        "data.max-tokens": 8,
        "data.partition": "iid",
        "clients": 3,
        "training.local-epochs": 1,
        "engine.backend": "inline",
    }


def every_method():
    for name in method_names():
        for kind in ("text", "signal"):
            marks = [] if (name, kind) in ORDINARY else [pytest.mark.slow]
            yield pytest.param(name, kind, marks=marks)


@pytest.mark.parametrize(("name", "kind"), list(every_method()))
def test_every_method_runs(name, kind, tmp_path):
    make(kind, tmp_path)
    config = resolve({"method": name, **settings(kind, tmp_path), **fast(name, models=False)})
    check(config)
    server = Server(config, tmp_path / "run")
    for number in (1, 2):
        server.play(number)
        server.close(number)
    record = records(tmp_path / "run")[-1]
    assert record["failed"] == {}
    found = record["accuracy"]["common"][find_method(name).spec.kinds[0]]["per_client"]
    assert len(found) == 3
    assert all(0 <= accuracy <= 1 for accuracy in found.values())


def test_fixmatch_supports_texts_and_not_signals(tmp_path):
    make("text", tmp_path)
    semi = {"method": "fedavg", "training.semi": "fixmatch"}
    config = resolve({**settings("text", tmp_path), **semi, "training.semi-threshold": 0.2})
    server = Server(config, tmp_path / "run")
    server.play(1)
    server.close(1)
    assert records(tmp_path / "run")[-1]["method"]["pseudo_labels"] > 0
    with pytest.raises(SettingsError, match=r"'training\.semi'"):
        resolve({**settings("signal", tmp_path), **semi})
