"""Pretrained encoders from local directories: tokens, features, frozen weights, and errors."""

import json

import pytest
import torch
from federation import permitted

from fedhet import models
from fedhet.base.errors import DataError, ModelError, SettingsError
from fedhet.data.spec import DataSpec
from fedhet.data.store import load
from fedhet.data.texts import VARIABLE, encoder_directory

WORDS = ["[UNK]", "[PAD]", "a", "cat", "dog", "stock", "fell"]
PAD = 1  # as RoBERTa has it: not the padding of this library


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
def texts(home, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(home))
    path = tmp_path / "all.csv"
    path.write_text("text,label\na cat,0\nstock fell [PAD] a bird,1\ndog,0\n")
    return load(DataSpec(dataset=f"text:{path}", tokenizer="tiny", max_tokens=8))


def test_tokens_are_those_of_the_encoder_with_padding_0(texts):
    expected = [[2, 3], [5, 6, 2, PAD], [4]]  # an unknown word, 0 there, is what PAD was
    assert [row[row > 0].tolist() for row in texts.train.x] == expected
    assert texts.format.shape == (0, 8, len(WORDS))


@pytest.mark.parametrize(("name", "layers"), [("encoder-1:tiny", 1), ("encoder-3-frozen:tiny", 3)])
def test_features_are_the_mean_of_the_last_hidden_states(texts, home, name, layers):
    from transformers import BertModel

    made = models.build(name, texts.format.shape, 2, seed=0).eval()
    frozen = "frozen" in name
    assert sum(isinstance(part, torch.nn.Linear) for part in trained(made)) == layers
    encoder = BertModel.from_pretrained(home / "tiny").eval()
    with torch.no_grad():
        for row, ids in zip(texts.train.x, ([2, 3], [5, 6, 2, 0], [4]), strict=True):
            states = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
            found = made.extractor[0](row[None])[0]
            assert torch.allclose(found, states.mean(0), atol=1e-5)
        both = made(texts.train.x)
        assert torch.allclose(made(texts.train.x[:1]), both[:1], atol=1e-5)
    made.train()(texts.train.x).sum().backward()
    traveling = models.shapes(name, texts.format.shape, 2)
    assert set(traveling) == set(made.state_dict())
    assert any("network" in key for key in traveling) is not frozen
    assert all(p.requires_grad for p in made.parameters())


def trained(made):
    """Return the linear layers after the encoder, and the classifier."""
    return [*made.extractor[1:], made.classifier]


def test_invalid_encoder_raises(texts, home, monkeypatch):
    with pytest.raises(ModelError, match=r"14 tokens.*7"):
        models.build("encoder-1:tiny", (0, 8, 99), 2, seed=0)
    with pytest.raises(ModelError, match="texts"):
        models.build("encoder-1:tiny", (3, 8, 8), 2, seed=0)
    with pytest.raises(DataError):
        models.check_name("encoder-1:other")
    with pytest.raises(SettingsError, match="name"):
        encoder_directory("../x")
    (home / "bad").mkdir(exist_ok=True)
    (home / "bad" / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 7}))
    with pytest.raises(ModelError, match="max_position_embeddings"):
        models.build("encoder-1:bad", texts.format.shape, 2, seed=0)
    (home / "bad" / "tokenizer.json").write_text("{")
    (home / "all.csv").write_text("text,label\na,0\nb,1\n")
    with pytest.raises(DataError, match="tokenizer"):
        load(DataSpec(dataset=f"text:{home / 'all.csv'}", tokenizer="bad"))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(SettingsError, match="FEDHET_ENCODERS"):
        models.check_name("encoder-1:tiny")


def test_encoder_at_a_site_needs_no_import_permission():
    """The site reads only its own $FEDHET_ENCODERS."""
    taken = permitted({"partition-id": 0}, {"method": "felo", "models.pool": "encoder-2:tiny,mlp"})
    assert taken["models.pool"] == "encoder-2:tiny,mlp"
