"""Models with LoRA adapters: names, nesting by rank, one frozen base, precision, and refusals."""

import copy
import json
import logging

import pytest
import torch
from bases import WIDTH, make_bases
from federation import permitted
from torch import nn

from fedhet import models
from fedhet.algorithms.adapters import factors_of
from fedhet.base.errors import DataError, ModelError
from fedhet.data.texts import VARIABLE, read_configuration
from fedhet.models import adapted
from fedhet.models.adapted import AdapterName, base_digest, rank_of, without_rank
from fedhet.privacy.sgd import check_supports_dp

TEXT, IMAGE = (0, 12, 65), (1, 8, 8)  # Token 64 stands for token 0 of the base model.


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def _variable(home, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(home))


def built(rank, base="bert", layers=1, seed=0, **options):
    shape = IMAGE if base == "vit" else TEXT
    return models.build(f"encoder-{layers}-lora{rank}:{base}", shape, 3, seed=seed, **options)


def samples(base="bert", count=5):
    draws = torch.Generator().manual_seed(1)
    if base == "bert":
        x = torch.randint(1, 64, (count, 12), generator=draws)
        x[1, 7:] = 0
        return x
    return torch.rand(count, *IMAGE, generator=draws) * 2 - 1


def trained(model):
    """Fill the factors B, which start at zero, so that the adapters have an effect."""
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.normal_(generator=draws)
    return model


def test_name_contains_rank_and_scale():
    assert AdapterName.parse("encoder-2-lora8:minilm") == AdapterName(2, 8, 2.0, "minilm")
    assert AdapterName.parse("encoder-1-lora16-scale0.5:vit") == AdapterName(1, 16, 0.5, "vit")
    for other in ("encoder-1:minilm", "encoder-1-frozen:minilm", "mlp", "encoder-1-lora0:minilm"):
        assert AdapterName.parse(other) is None
        assert (rank_of(other), without_rank(other)) == (0, other)
    assert without_rank("encoder-1-lora8:b") == without_rank("encoder-1-lora2-scale2:b")
    assert without_rank("encoder-1-lora8:b") != without_rank("encoder-1-lora8-scale1:b")


@pytest.mark.parametrize("name", ["lora0", "lora", "lora8-scale0", "loraX", "lora1000"])
def test_invalid_rank_raises(name):
    with pytest.raises(ModelError, match="encoder-1-lora8:NAME"):
        models.check_name(f"encoder-1-{name}:bert")


@pytest.mark.parametrize("base", ["bert", "vit"])
def test_only_adapters_and_head_are_sent_saved_and_trained(base):
    model = built(4, base)
    layers = ("query", "value") if base == "bert" else ("q_proj", "v_proj")
    found = {n.removeprefix("extractor.0.") for n in model.state_dict() if "lora" in n}
    path = "encoder.layer.{}.attention.self.{}" if base == "bert" else "layers.{}.attention.{}"
    paths = [path.format(block, layer) for block in range(2) for layer in layers]
    assert found == {f"{each}.lora_{f}.weight" for each in paths for f in "AB"}
    rest = set(model.state_dict()) - {f"extractor.0.{name}" for name in found}
    assert rest == {"classifier.weight", "classifier.bias"}
    assert {n for n, _ in model.named_parameters()} == set(model.state_dict())
    shapes = models.shapes(f"encoder-1-lora4:{base}", TEXT if base == "bert" else IMAGE, 3)
    assert shapes == {k: (tuple(v.shape), "float32") for k, v in model.state_dict().items()}
    model.train()(samples(base)).logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert sum(bool(p.grad.any()) for p in model.parameters()) == len(paths) + 2  # B is zero


@pytest.mark.parametrize("base", ["bert", "vit"])
def test_adapted_weights_equal_base_weights_plus_products(home, base):
    """Compare with the unmodified model of transformers, whose weights become W + 2 B A."""
    from transformers import AutoModel

    model = trained(built(4, base)).eval()
    x = samples(base)
    plain = AutoModel.from_pretrained(home / base).eval()
    with torch.no_grad():
        for path, (b, a) in factors_of(model.extractor[0].state_dict()).items():
            plain.get_submodule(path).weight += 2 * b @ a
        if base == "bert":
            states = plain(input_ids=x, attention_mask=(x > 0).long()).last_hidden_state
            expected = [row[ids > 0].mean(0) for row, ids in zip(states, x, strict=True)]
        else:
            expected = list(plain(pixel_values=x).last_hidden_state[:, 0])
        found = model.extractor(x)
        assert torch.allclose(found, torch.stack(expected), atol=1e-4)
        merged = adapted.merged_base(model.extractor[0])
        for name, value in plain.state_dict().items():
            if "pooler" not in name:
                assert torch.allclose(merged.state_dict()[name], value, atol=1e-6), name
        assert not torch.allclose(found, built(4, base).eval().extractor(x), atol=1e-2)


@pytest.mark.parametrize("base", ["bert", "vit"])
def test_adapters_are_nested_by_rank_and_heads_equal(base):
    small, large, other = built(2, base), built(8, base), built(8, base, seed=1)
    for name, value in small.state_dict().items():
        whole = large.state_dict()[name]
        assert torch.equal(value, whole[tuple(map(slice, value.shape))]), name
    factors = factors_of(large.state_dict())
    assert all(bool(a.any()) and not b.any() for b, a in factors.values())
    drawn = [a for _, a in factors.values()]
    assert not any(torch.equal(drawn[0], each) for each in drawn[1:])
    assert all(each.abs().max() <= WIDTH**-0.5 for each in drawn)
    assert not torch.equal(drawn[0], next(iter(factors_of(other.state_dict()).values()))[1])
    assert torch.equal(built(8, base, layers=3).extractor[1].weight,
                       built(2, base, layers=3).extractor[1].weight)  # fmt: skip


def frozen_of(model, dtype=torch.float32):
    """Return the memory of each frozen tensor that a model uses."""
    encoder = model.extractor[0]
    network = encoder.network(torch.device("cpu"), dtype)
    own = {id(p) for p in encoder.parameters()}
    return {n: p.data_ptr() for n, p in network.named_parameters() if id(p) not in own}


def test_process_keeps_one_copy_of_the_base_model():
    adapted._base.cache_clear()
    one, other = trained(built(2)), trained(built(8))
    clone = copy.deepcopy(one)
    with torch.inference_mode():  # as an evaluation, which may be the first to read the weights
        expected = one(samples())
    assert frozen_of(one) == frozen_of(clone) == frozen_of(copy.deepcopy(clone))
    theirs = {n.replace(".base_layer", "") for n in frozen_of(other)}
    assert theirs == {n.replace(".base_layer", "") for n in frozen_of(one)}
    assert set(frozen_of(other).values()) == set(frozen_of(one).values())
    with torch.no_grad():  # what is trained is a clone's own
        for each in clone.parameters():
            each.add_(1.0)
        assert torch.equal(one(samples()), expected)
        assert not torch.equal(clone(samples()), expected)
    clone(samples()).sum().backward()  # the copy uses the adapters that it registers
    assert all(p.grad is not None for p in clone.parameters())
    assert all(p.grad is None for p in one.parameters())


def test_causal_model_uses_the_state_of_the_last_token(home):
    transformers = pytest.importorskip("transformers")
    model, x = built(2, "llama"), samples()  # B is zero, so the adapters have no effect
    plain = transformers.AutoModel.from_pretrained(home / "llama").eval()
    lengths = [int(row.ne(0).sum()) for row in x]
    assert lengths == [12, 7, 12, 12, 12]
    alone = [
        plain(input_ids=row[None, :size]).last_hidden_state[0, -1]
        for row, size in zip(x, lengths, strict=True)
    ]
    assert torch.allclose(model.extractor(x), torch.stack(alone), atol=1e-5)


def test_autocast_casts_the_base_model():
    model = trained(built(4))
    exact = model(samples())
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(samples())
        rough.sum().backward()
    network = model.extractor[0].network(torch.device("cpu"), torch.bfloat16)
    types = {p.dtype for n, p in network.named_parameters() if "lora" not in n and p.ndim > 1}
    assert types == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.allclose(rough.float(), exact, atol=0.3)
    assert torch.equal(model(samples()), exact)  # and in float32 again afterwards


@pytest.mark.parametrize("base", ["bert", "vit"])
def test_gradients_flow_after_an_evaluation(base):
    """PyTorch cannot save a tensor that was created in inference mode for a backward pass."""
    adapted._base.cache_clear()
    model = trained(built(2, base))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            model(samples(base))
        model(samples(base)).sum().backward()
    assert all(p.grad.any() for p in model.parameters())


def test_layers_with_adapters_support_per_sample_gradients():
    pytest.importorskip("opacus")
    check_supports_dp(trained(built(4)), "text", TEXT)
    check_supports_dp(trained(built(4, "vit")), "image", IMAGE)


def test_stacked_adapters_run_under_vmap():
    made = [trained(built(4, "vit", seed=seed)) for seed in (0, 1)]
    stacked, _ = torch.func.stack_module_state(made)
    x = samples("vit")
    expected = torch.stack([each(x) for each in made])
    found = torch.vmap(lambda own: torch.func.functional_call(made[0], own, (x,)))(stacked)
    assert torch.allclose(found, expected, atol=1e-4)


def test_feature_width_and_image_shapes_are_adapted():
    assert built(2, feature_dim=7)(samples()).shape == (5, 3)
    model = models.build("encoder-1-lora2:vit", (1, 20, 12), 3, seed=0)
    assert model(torch.rand(2, 1, 20, 12)).shape == (2, 3)


def test_digest_identifies_the_base_model(tmp_path, monkeypatch):
    found = base_digest("encoder-1-lora8:bert")
    assert found == base_digest("encoder-2-lora2:bert") != base_digest("encoder-1-lora8:vit")
    assert base_digest("encoder-1:bert") == base_digest("mlp") == ""
    monkeypatch.setenv(VARIABLE, str(make_bases(tmp_path)))
    assert base_digest("encoder-1-lora8:bert") == found
    make_bases(tmp_path, shift=0.01)
    assert base_digest("encoder-1-lora8:bert") != found


def test_unsupported_base_model_raises(home, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=r"images \[C, H, W\]"):
        models.build("encoder-1-lora2:vit", TEXT[1:], 3, seed=0)
    with pytest.raises(ModelError, match=r"1 channels.*3"):
        models.build("encoder-1-lora2:vit", (3, 8, 8), 3, seed=0)
    with pytest.raises(ModelError, match=r"16 tokens.*40"):
        models.build("encoder-1-lora2:bert", (0, 40, 64), 3, seed=0)
    with pytest.raises(DataError):
        models.check_name("encoder-1-lora2:other")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    pooled = transformers.SiglipVisionConfig(
        **size, intermediate_size=8, image_size=8, patch_size=4
    )
    transformers.SiglipVisionModel(pooled).save_pretrained(tmp_path / "siglip")
    with pytest.raises(ModelError, match="MultiheadAttention"):
        models.build("encoder-1-lora2:siglip", (3, 8, 8), 3, seed=0)
    fused = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=64)
    transformers.GPT2Model(fused).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match="q_lin"):
        models.build("encoder-1-lora2:gpt2", TEXT, 3, seed=0)
    config = json.loads((home / "bert" / "config.json").read_text())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        models.check_name("encoder-1-lora2:empty")
    torch.save({}, tmp_path / "empty" / "pytorch_model.bin")  # a pickle is never read
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        models.check_name("encoder-1-lora2:empty")


IMAGES = {"num_channels": 3, "image_size": 8}
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
       "patch_size": 4, **IMAGES}  # fmt: skip
IMAGE_FAMILIES = {
    "ViTModel": (VIT, lambda states: states[:, 0]),
    "Dinov2Model": (VIT, lambda states: states[:, 0]),
    "CLIPVisionModel": (VIT, lambda states: states[:, 0]),
    "SwinModel": (
        {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "patch_size": 2,
         **IMAGES},
        lambda states: states.mean(1),
    ),
    "SegformerModel": (
        {"hidden_sizes": [4, 4, 8, 12], "num_attention_heads": [1] * 4, "depths": [1] * 4,
         **IMAGES, "image_size": 64},
        lambda states: states.flatten(2).mean(2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_image_features_equal_those_of_transformers(family, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    sizes, reduce = IMAGE_FAMILIES[family]
    saved = getattr(transformers, family)
    torch.manual_seed(0)
    saved(saved.config_class(**sizes)).save_pretrained(tmp_path / "base")
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "base" / "preprocessor_config.json").write_text(json.dumps(processor))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    size = sizes["image_size"]
    x = torch.rand(3, 3, size, size)
    made = models.build("encoder-1-lora2:base", (3, size, size), 2, seed=0)
    plain = transformers.AutoModel.from_pretrained(tmp_path / "base").eval()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in processor.values())
    with torch.no_grad():
        expected = reduce(plain(pixel_values=(x - mean) / std).last_hidden_state)
        assert torch.allclose(made.extractor(2 * x - 1), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"image_mean": [0.5], "image_std": [0.5] * 3}, "image_mean.*3 numbers"),
        ({"image_mean": [0.5] * 3, "image_std": 0.5}, "image_std.*3 numbers"),
        ({"image_mean": [0.5] * 3}, "image_std.*None"),
        ({"image_mean": [0.5] * 3, "image_std": [0.5, 0, 0.5]}, "image_std.*above 0"),
        ([], "configuration"),
    ],
)
def test_invalid_preprocessor_raises(content, message, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    transformers.ViTModel(transformers.ViTConfig(**VIT)).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "preprocessor_config.json"
    path.write_text(json.dumps(content))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises((DataError, ModelError), match=rf"{path}: .*{message}"):
        models.build("encoder-1-lora2:base", (3, 8, 8), 2, seed=0)
    path.write_text(json.dumps({"image_mean": [9.0] * 3, "do_normalize": False}))
    read_configuration.cache_clear()
    x, plain = torch.rand(2, 3, 8, 8), transformers.AutoModel.from_pretrained(path.parent).eval()
    features = models.build("encoder-1-lora2:base", (3, 8, 8), 2, seed=0).extractor(2 * x - 1)
    assert torch.allclose(features, plain(pixel_values=x).last_hidden_state[:, 0], atol=1e-5)


def test_model_that_masks_random_patches_raises(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    transformers.ViTMAEModel(transformers.ViTMAEConfig(**VIT)).save_pretrained(tmp_path / "mae")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ModelError, match=r"mae/config\.json: mask_ratio.*0\.75"):
        models.build("encoder-1-lora2:mae", (3, 8, 8), 2, seed=0)


def test_missing_weights_raise(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    make_bases(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    path = tmp_path / "bert" / "model.safetensors"
    weights = load_file(path)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"output\.dense\.weight"):
        built(2)(samples())


def test_base_model_without_pooler_loads_silently(tmp_path, monkeypatch, caplog):
    from safetensors.torch import load_file, save_file

    make_bases(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    path = tmp_path / "bert" / "model.safetensors"
    weights = {k: v for k, v in load_file(path).items() if not k.startswith("pooler.")}
    save_file(weights, path, {"format": "pt"})
    logger = logging.getLogger("transformers")  # It does not propagate to caplog's handler.
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    assert built(2)(samples()).shape == (5, 3)
    assert not caplog.records


def test_remote_code_is_not_run(home, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(make_bases(tmp_path)))
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "evil.py").write_text("raise SystemExit('remote code')\n")
    config |= {"auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}}
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    assert built(2)(samples()).shape == (5, 3)


def test_adapters_at_a_site_need_no_import_permission():
    pool = "encoder-1-lora2:bert,encoder-1-lora8:bert"
    taken = permitted({"partition-id": 0}, {"method": "felo", "models.pool": pool})
    assert taken["models.pool"] == pool


def test_skeleton_does_not_count_as_model_memory():
    with models.AllocationLimit(1000):
        with torch.device("meta"):
            torch.empty(10**6)
        torch.zeros(10**6, device="meta")
        with pytest.raises(ModelError, match="1,000"):
            torch.empty(10**6)


def test_base_model_is_not_a_submodule():
    assert not any(isinstance(m, nn.Embedding) for m in built(2).modules())
