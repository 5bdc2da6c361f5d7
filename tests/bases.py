"""Tiny random base models on disk, created with transformers and without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WIDTH = 16
"""Width of the hidden states."""


def make_bases(root: Path, *, shift: float = 0.0) -> Path:
    """Save the text models `bert` and `llama` and the image model `vit`; return their directory.

    `shift` is added to one weight, for another base model of the same shape.
    """
    transformers = pytest.importorskip("transformers")
    common = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": WIDTH,
        "hidden_dropout_prob": 0.1,
    }
    torch.manual_seed(0)
    bert = transformers.BertModel(
        transformers.BertConfig(**common, vocab_size=64, max_position_embeddings=16)
    )
    vit = transformers.ViTModel(
        transformers.ViTConfig(**common, image_size=8, patch_size=4, num_channels=1),
        add_pooling_layer=False,
    )
    with torch.no_grad():
        bert.embeddings.word_embeddings.weight[0, 0] += shift
        for each in (*bert.parameters(), *vit.parameters()):
            each.mul_(4.0 if each.ndim > 1 else 1.0)  # attention that is not uniform
    torch.manual_seed(1)
    llama = transformers.LlamaModel(
        transformers.LlamaConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=WIDTH,
            vocab_size=64,
            max_position_embeddings=16,
        )
    )
    llama.save_pretrained(root / "llama")
    bert.save_pretrained(root / "bert")
    vit.save_pretrained(root / "vit")
    return root


def make_language_model(directory: Path, *, tied: bool = False, **config: object) -> Path:
    """Save a random Llama and a byte-level tokenizer without a padding token."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.save_pretrained(directory)
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=WIDTH,
            vocab_size=len(vocabulary),
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    network.save_pretrained(directory, **config)
    return directory


def make_gpt2(directory: Path) -> Path:
    """Save a random GPT-2 with the vocabulary of `make_language_model`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=257,
        n_positions=32,
        eos_token_id=0,
        bos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    return directory
