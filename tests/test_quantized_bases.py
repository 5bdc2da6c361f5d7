"""Frozen base models in 4 bits, compared with transformers and bitsandbytes."""

import copy
import sys

import pytest
import torch
from bases import make_gpt2, make_language_model
from federation import Server, records, run, small
from rounds import clients

from fedhet import models
from fedhet.base.errors import ModelError, SettingsError
from fedhet.data.texts import VARIABLE
from fedhet.models.adapted import prepare_base
from fedhet.settings.engine import ComputeSettings

transformers = pytest.importorskip("transformers")
SHAPE = (0, 24, 258)
NF4 = ComputeSettings(base_precision="nf4")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    make_language_model(root / "tiny")
    make_gpt2(root / "gpt2")
    bert = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        vocab_size=257,
    )  # fmt: skip
    transformers.BertModel(bert).save_pretrained(root / "bert")
    return root


@pytest.fixture(autouse=True)
def _variable(home, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(home))


def quantized(name, classes=1):
    model = models.build(name, SHAPE, classes, seed=0)
    prepare_base(model, NF4)
    return model


def reference(home, name, auto=transformers.AutoModelForCausalLM):
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    return auto.from_pretrained(
        home / name, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_outputs_and_gradients_equal_those_of_transformers_and_peft(home, name):
    peft = pytest.importorskip("peft")
    model, ids = quantized(f"causal-lora4:{name}"), torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    full = models.build(f"causal-lora4:{name}", SHAPE, 1, seed=0)(ids)
    paths = ["q_proj", "v_proj"] if name == "tiny" else ["c_attn"]
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=paths, lora_dropout=0.0)
    other = peft.get_peft_model(reference(home, name), settings)
    own = dict(model.extractor.named_parameters())
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, each in other.named_parameters():
            if "lora_" in path:
                short = path.removeprefix("base_model.model.").replace(".default", "")
                own[short].copy_(torch.randn(own[short].shape, generator=draws))
                each.copy_(own[short])
    outputs, expected = model(ids), other(input_ids=ids).logits
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    assert (outputs - full).abs().max() > 1e-3
    outputs.square().mean().backward()
    expected.square().mean().backward()
    for path, each in other.named_parameters():
        if "lora_" in path:
            short = path.removeprefix("base_model.model.").replace(".default", "")
            torch.testing.assert_close(own[short].grad, each.grad, rtol=1e-3, atol=1e-5)


def test_features_of_encoders_equal_those_of_transformers(home):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    model = quantized("encoder-1-lora4:bert", 3)
    states = reference(home, "bert", transformers.AutoModel)(input_ids=ids).last_hidden_state
    features = model.extractor(ids)
    full = models.build("encoder-1-lora4:bert", SHAPE, 3, seed=0).extractor(ids)
    assert any(torch.allclose(features, each, atol=1e-4) for each in (states[:, 0], states.mean(1)))
    assert not torch.allclose(features, full, atol=1e-4)


def test_models_share_weights_of_4_bits():
    """A weight of 16 x 16 has 128 bytes, and the models and copies have one tensor."""
    first = quantized("causal-lora4:tiny")
    every = [first, quantized("causal-lora8:tiny"), copy.deepcopy(first)]
    weights = []
    for model in every:
        model(torch.tensor([[5, 6, 7]]))
        network = model.extractor._hidden[0]
        weights.append(network.model.layers[1].mlp.up_proj.weight)
        assert network.lm_head.weight.dtype == torch.float32
    assert weights[0].nbytes == 128
    assert weights[0] is weights[1] is weights[2]
    assert not any("base_layer" in name for name, _ in first.named_parameters())


def federation(root, **changes):
    (root / "train.txt").write_text("the cat sat on the mat and we count 1 2 3 4. " * 30)
    few = {
        "dataset": f"text:{root}", "task": "causal-lm", "tokenizer": "tiny", "max_tokens": 24,
        "clients": 2, "models": ["causal-lora2:tiny", "causal-lora4:tiny"], "batch_size": 4,
        "max_samples": 0, "min_samples": 4, "partition": "iid", "rounds": 2, "lr": 0.02,
        "base_precision": "nf4",
    }  # fmt: skip
    return small("fedlora", **{**few, **changes})


def test_clients_train_with_a_base_of_4_bits(tmp_path):
    run(federation(tmp_path), tmp_path / "out")
    first, last = (
        each["metrics"]["perplexity"]["personal"]["private"]["mean"]
        for each in records(tmp_path / "out")
    )
    assert last < first
    client = next(iter(clients(Server(federation(tmp_path), tmp_path / "server")).values()))
    client.state.restore("run", 1)
    client.network(torch.tensor([[5, 6, 7]]))
    network = client.network.extractor._hidden[0]
    assert network.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.uint8


@pytest.mark.parametrize("rule", ["flora", "fedex"])
def test_rules_that_change_the_base_need_full_precision(tmp_path, rule):
    with pytest.raises(SettingsError, match=r"another rule with 'engine\.base-precision'"):
        Server(federation(tmp_path, aggregation=rule), tmp_path / "out")
    model = quantized("causal-lora2:tiny")
    state = model.state_dict()
    path = "extractor.model.layers.0.self_attn.q_proj"
    state |= {f"{path}.merged_B": torch.ones(16, 1), f"{path}.merged_A": torch.ones(1, 16)}
    with pytest.raises(ModelError, match="cannot be merged into weights of 4 bits"):
        model.load_state_dict(state)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = models.build("causal-lora4:tiny", SHAPE, 1, seed=0)
    with pytest.raises(ModelError, match=r"'bitsandbytes' not found.*fedhet\[quantized\]"):
        prepare_base(model, NF4)
