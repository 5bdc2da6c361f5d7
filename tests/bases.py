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
