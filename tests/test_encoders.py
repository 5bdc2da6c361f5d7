"""Pretrained encoders from local directories: tokens, features, frozen weights, and errors."""

import json
import shutil

import pytest
import torch
from federation import permitted

from fedhet import models
from fedhet.algorithms.adapters import factors_of
from fedhet.base.errors import DataError, ModelError, SettingsError
from fedhet.data import texts
from fedhet.data.spec import DataSpec
from fedhet.data.store import load
from fedhet.data.texts import VARIABLE, encoder_directory

WORDS = ["[UNK]", "[PAD]", "a", "cat", "dog", "stock", "fell"]
PAD = 1  # as in RoBERTa


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("encoders")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.enable_padding(length=9, pad_id=PAD)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        pad_token_id=PAD,
    )
    transformers.BertModel(config).save_pretrained(root / "tiny")
    tokenizer.save(str(root / "tiny" / "tokenizer.json"))
    return root


@pytest.fixture
def samples(home, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(home))
    path = tmp_path / "all.csv"
    path.write_text("text,label\na cat,0\nstock fell [PAD] a bird,1\ndog,0\n")
    return load(DataSpec(dataset=f"text:{path}", tokenizer="tiny", max_tokens=8))


def test_tokens_are_those_of_the_tokenizer_except_token_0(samples):
    expected = [[2, 3], [5, 6, PAD, 2, len(WORDS)], [4]]  # an unknown word is token 0 there
    assert [row[row > 0].tolist() for row in samples.train.x] == expected
    assert samples.format.shape == (0, 8, len(WORDS) + 1)


@pytest.mark.parametrize(("name", "layers"), [("encoder-1:tiny", 1), ("encoder-3-frozen:tiny", 3)])
def test_features_are_the_mean_of_the_last_hidden_states(samples, home, name, layers):
    from transformers import BertModel

    made = models.build(name, samples.format.shape, 2, seed=0).eval()
    frozen = "frozen" in name
    assert sum(isinstance(part, torch.nn.Linear) for part in trained(made)) == layers
    encoder = BertModel.from_pretrained(home / "tiny").eval()
    with torch.no_grad():
        for row, ids in zip(samples.train.x, ([2, 3], [5, 6, PAD, 2, 0], [4]), strict=True):
            states = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
            found = made.extractor[0](row[None])[0]
            assert torch.allclose(found, states.mean(0), atol=1e-5)
        both = made(samples.train.x)
        assert torch.allclose(made(samples.train.x[:1]), both[:1], atol=1e-5)
    made.train()(samples.train.x).sum().backward()
    traveling = models.shapes(name, samples.format.shape, 2)
    assert set(traveling) == set(made.state_dict())
    assert any("network" in key for key in traveling) is not frozen
    assert all(p.requires_grad for p in made.parameters())


def trained(made):
    """Return the linear layers after the encoder, and the classifier."""
    return [*made.extractor[1:], made.classifier]


def test_invalid_encoder_raises(samples, monkeypatch):
    with pytest.raises(ModelError, match=r"below 7.*98"):
        models.build("encoder-1:tiny", (0, 8, 99), 2, seed=0)
    with pytest.raises(ModelError, match=r"16 tokens.*17"):
        models.build("encoder-1:tiny", (0, 17, 8), 2, seed=0)
    with pytest.raises(ModelError, match="texts"):
        models.build("encoder-1:tiny", (3, 8, 8), 2, seed=0)
    with pytest.raises(DataError):
        models.check_name("encoder-1:other")
    with pytest.raises(SettingsError, match="name"):
        encoder_directory("../x")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(SettingsError, match="FEDHET_ENCODERS"):
        models.check_name("encoder-1:tiny")


def test_encoder_at_a_site_needs_no_import_permission():
    """The site reads only its own $FEDHET_ENCODERS."""
    taken = permitted({"partition-id": 0}, {"method": "felo", "models.pool": "encoder-2:tiny,mlp"})
    assert taken["models.pool"] == "encoder-2:tiny,mlp"


# --- families of models -------------------------------------------------------------------------

FORMS = ["encoder-1", "encoder-1-frozen", "encoder-1-lora2"]
TOKENS = ["!", "[PAD]", "<end>", "[UNK]", "a", "cat", "dog", "stock", "fell"]
"""The vocabulary of the families: as in GPT-2, token 0 is a word."""
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "max_position_embeddings": 16,
}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
DEBERTA = {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}
FAMILIES = {
    # name: (class of the saved model, sizes, padding token, longest text, is causal, supports LoRA)
    "bert": ("BertForMaskedLM", SIZES, 1, 16, False, True),
    "bert-padding-is-a-word": ("BertModel", SIZES, 0, 16, False, True),
    "roberta": ("RobertaForMaskedLM", SIZES, 1, 14, False, True),
    "roberta-far-padding": ("RobertaModel", SIZES, 3, 12, False, True),
    "deberta-v2": ("DebertaV2Model", SIZES | DEBERTA, 1, 16, False, True),
    "modernbert": ("ModernBertModel", SIZES, 1, 16, False, False),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 16},
        1, 16, False, True,
    ),
    "electra": ("ElectraModel", SIZES | {"embedding_size": 8}, 1, 16, False, True),
    "convbert": ("ConvBertModel", SIZES | {"embedding_size": 16}, 1, 16, False, True),
    "gpt2": ("GPT2LMHeadModel", GPT2, None, 16, True, False),
    "gpt2-padding-is-the-end": ("GPT2Model", GPT2, 2, 16, True, False),
    "llama": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}, None, 16, True, True),
    "llama-minus-one": ("LlamaModel", SIZES, -1, 16, True, True),
    "llama-last-padding": ("LlamaModel", SIZES, 11, 16, True, True),
    "qwen2": ("Qwen2Model", SIZES | {"num_key_value_heads": 2}, 2, 16, True, True),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16,
         "max_position_embeddings": 16, "word_embed_proj_dim": 8},
        1, 16, True, True,
    ),
    "bloom": ("BloomModel", {"hidden_size": 16, "n_layer": 1, "n_head": 2}, 1, None, True, False),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ, 1, 16, False, True),
    "t5": ("T5ForConditionalGeneration", T5, 1, None, False, True),
    "t5-encoder": ("T5EncoderModel", T5, 1, None, False, True),
}  # fmt: skip
ROWS = 12
"""Rows of the embeddings: more than the tokenizer has tokens, as is common."""
SENTENCES = ["! cat dog", "fell", "a stock fell ! [PAD] cat !", "!"]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("families")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(TOKENS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(TOKENS[1:4])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 2)]
    )
    torch.manual_seed(0)
    for name, (kind, sizes, padding, *_) in FAMILIES.items():
        special = {"pad_token_id": padding, "bos_token_id": 2, "eos_token_id": 2}
        saved = getattr(transformers, kind)
        network = saved(saved.config_class(**sizes, **special, vocab_size=ROWS))
        with torch.no_grad():
            for weight in network.parameters():
                weight.copy_(torch.randn_like(weight) * (0.5 if weight.ndim > 1 else 0.1))
        network.save_pretrained(root / name)
        tokenizer.save(str(root / name / "tokenizer.json"))
    return root


def read(name, home, length=10):
    """Return SENTENCES as fedhet tokenizes them, and the shape of a sample."""
    path = home / "sentences.csv"
    path.write_text(
        "text,label\n" + "".join(f"{each},{n % 2}\n" for n, each in enumerate(SENTENCES))
    )
    dataset = load(DataSpec(dataset=f"text:{path}", tokenizer=name, max_tokens=length))
    return dataset.train.x, dataset.format.shape


def features_of_transformers(network, directory, padding, *, last, together):
    """Return the features that transformers' own tokenizer and model compute."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    part = network.get_encoder() if hasattr(network, "shared") else network  # BART and T5
    batches = [[text] for text in SENTENCES]
    if together:
        tokenizer.pad_token, tokenizer.padding_side = TOKENS[padding], "right"
        batches = [SENTENCES]
    features = []
    for batch in batches:
        found = tokenizer(batch, padding=together, return_tensors="pt")
        ids, mask = found["input_ids"], found["attention_mask"]
        with torch.no_grad():
            states = part(input_ids=ids, attention_mask=mask).last_hidden_state
        for row, used in zip(states, mask.bool(), strict=True):
            features.append(row[used][-1] if last else row[used].mean(0))
    return torch.stack(features)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_features_equal_those_of_transformers(families, monkeypatch, name, form):
    from transformers import AutoModel

    monkeypatch.setenv(VARIABLE, str(families))
    *_, padding, longest, last, has_lora = FAMILIES[name]
    x, shape = read(name, families)
    assert shape == (0, 10, len(TOKENS) + 1)
    model = f"{form}:{name}"
    if "lora" in form and not has_lora:
        with pytest.raises(ModelError, match=rf"{name}.*linear layer named"):
            models.build(model, shape, 2, seed=0)
        return
    made = models.build(model, shape, 2, seed=0).eval()
    plain = AutoModel.from_pretrained(families / name).eval()
    if "lora" in form:
        with torch.no_grad():
            for path, (b, a) in factors_of(made.extractor[0].state_dict()).items():
                b.normal_()
                plain.get_submodule(path).weight += 2 * b @ a
    with torch.no_grad():
        found = made.extractor(x)
    for together in (False, True):
        if together and padding not in range(len(TOKENS)):
            continue
        if not together and name == "convbert":  # Its convolutions read the padding.
            continue
        expected = features_of_transformers(
            plain, families / name, padding, last=last, together=together
        )
        assert torch.allclose(found, expected, atol=1e-5), (found - expected).abs().max()
    made(x).logsumexp(1).sum().backward()
    assert made.classifier.weight.grad.any()
    assert all(p.grad.any() for n, p in made.named_parameters() if "lora" in n)
    if longest:
        with pytest.raises(ModelError, match=rf"{longest} tokens.*{longest + 1}"):
            models.build(model, (0, longest + 1, 10), 2, seed=0)
    models.build(model, (0, longest or 500, ROWS + 1), 2, seed=0)
    with pytest.raises(ModelError, match=rf"below {ROWS}, .*below {ROWS + 1}"):
        models.build(model, (0, 10, ROWS + 2), 2, seed=0)


# --- files of users -----------------------------------------------------------------------------


@pytest.fixture
def copied(families, tmp_path, monkeypatch):
    """Return a function that copies a base model and replaces entries of its config.json."""

    def copy(name, **changes):
        shutil.copytree(families / name, tmp_path / name)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return tmp_path / name

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return copy


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"pad_token_id": 12}, "pad_token_id must be below vocab_size = 12.*got 12"),
        ("bert", {"pad_token_id": 128_001}, "pad_token_id must be below vocab_size = 12"),
        ("roberta", {"pad_token_id": None}, "pad_token_id is null"),
        ("roberta", {"pad_token_id": -1}, "no position.*pad_token_id.*-1"),
        ("roberta", {"pad_token_id": "x"}, "pad_token_id"),
        ("gpt2", {"n_head": 3}, "num_heads"),
        ("gpt2", {"activation_function": "none"}, "KeyError: 'none'"),
        ("t5", {"model_type": "t9"}, "t9"),
    ],
)
def test_contradictory_configuration_raises(copied, form, name, changes, message):
    directory = copied(name, **changes)
    with pytest.raises(ModelError, match=rf"{directory}/config\.json: .*{message}"):
        models.build(f"{form}:{name}", (0, 8, 10), 2, seed=0)


def test_model_without_attention_mask_raises(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.FNetConfig(hidden_size=8, num_hidden_layers=1, intermediate_size=8)
    transformers.FNetModel(config).save_pretrained(tmp_path / "fnet")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ModelError, match=r"fnet/config\.json.*no attention mask"):
        models.build("encoder-1:fnet", (0, 8, 10), 2, seed=0)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_another_shape_raise_before_the_run(copied, form):
    for name, changes, where in [
        ("electra", {"vocab_size": 14}, r"word_embeddings.*\[14, 8\].*\[12, 8\]"),
        ("gpt2", {"n_positions": 20}, r"wpe.*\[20, 16\].*\[16, 16\]"),
    ]:
        directory = copied(name, **changes)
        with pytest.raises(ModelError, match=rf"{directory}/config\.json: expected .*{where}"):
            models.check(f"{form}:{name}", "text", (0, 8, 10), 2, any_model=True)


@pytest.mark.parametrize("form", FORMS)
def test_damaged_weights_raise_before_the_run(copied, form):
    path = copied("bert") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"{path}: .*incomplete"):
        models.check(f"{form}:bert", "text", (0, 8, 10), 2, any_model=True)
    path.unlink()
    with pytest.raises(ModelError, match=rf"{path}: file not found"):
        models.check_name(f"{form}:bert")


def test_missing_weights_raise_unless_they_are_unused(copied):
    from safetensors.torch import load_file, save_file

    for name, prefix, is_used in [("t5", "decoder.", False), ("electra", "encoder.layer.1.", True)]:
        path = copied(name) / "model.safetensors"
        kept = {k: v for k, v in load_file(path).items() if not k.startswith(prefix)}
        assert len(kept) < len(load_file(path))
        save_file(kept, path, {"format": "pt"})
        if is_used:
            with pytest.raises(ModelError, match=rf"{path}: .*encoder\.layer\.1"):
                models.build(f"encoder-1:{name}", (0, 8, 10), 2, seed=0)
        else:
            models.build(f"encoder-1:{name}", (0, 8, 10), 2, seed=0)


def test_invalid_tokenizer_raises(copied):
    path = copied("bert") / "tokenizer.json"
    plain = json.loads(path.read_text())
    (path.parent.parent / "all.csv").write_text("text,label\na zebra,0\na cat,1\n")
    spec = DataSpec(dataset=f"text:{path.parent.parent / 'all.csv'}", tokenizer="bert")
    added = json.loads(path.read_text())
    added["post_processor"]["special_tokens"]["<end>"]["ids"] = [40]
    unknown = plain | {"added_tokens": [], "model": plain["model"] | {"unk_token": "[NONE]"}}
    large = {**plain["model"], "vocab": {**plain["model"]["vocab"], "a": 2**20}}
    for content, message in [
        ("{", "not a readable tokenizer"),
        (json.dumps(added), "post_processor adds token 40.*ends at 8"),
        (json.dumps(unknown), r"cannot be tokenized.*\[NONE\]|cannot be tokenized.*UNK"),
        (json.dumps(plain | {"model": large}), "1048576"),
    ]:
        path.write_text(content)
        texts._tokenizer.cache_clear()
        with pytest.raises(DataError, match=rf"{path}: .*{message}"):
            load(spec)
    path.unlink()
    texts._tokenizer.cache_clear()
    with pytest.raises(DataError, match=rf"{path}: file not found.*save_pretrained"):
        load(spec)


def test_vocabulary_ends_at_the_largest_id(copied):
    path = copied("bert") / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["cat"] = 11  # Ids 5, 9, and 10 are not used.
    path.write_text(json.dumps(content))
    texts._tokenizer.cache_clear()
    x, shape = read("bert", path.parent.parent)
    assert shape == (0, 10, 13)
    assert x[0, :4].tolist() == [12, 11, 6, 2]
    models.build("encoder-1:bert", shape, 2, seed=0)(x)


def test_text_without_tokens_becomes_the_first_special_token(copied):
    path = copied("gpt2") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    texts._tokenizer.cache_clear()
    spec = DataSpec(dataset="text:none", tokenizer="gpt2", max_tokens=3)
    assert texts.tokenize([" ", "!"], spec, "here").tolist() == [[1, 0, 0], [9, 0, 0]]


def test_next_tokens_include_token_0(copied, tmp_path):
    copied("gpt2")
    (tmp_path / "train.txt").write_text("a cat ! a dog cat " * 9)
    spec = DataSpec(dataset=f"next-token:{tmp_path}", tokenizer="gpt2", max_tokens=2)
    found = load(spec).train
    assert found.x[0].tolist() == [4, 5]
    assert found.y[:2].tolist() == [9, 5]
    assert len(load(spec).format.classes) == 10
