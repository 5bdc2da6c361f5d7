"""Tokenization of texts, and configurations of pretrained encoders.

Texts are tokenized by hashing each word, or with the tokenizer of a pretrained encoder. With
hashing, sites need not share a vocabulary, because a word has the same token everywhere. Different
words may share a token, but with a vocabulary of 8192, this is rare within a text.

Encoders are directories in $FEDHET_ENCODERS, as saved by `transformers`. Runs refer to encoders by
name, not by path, because each machine has its own encoder directory. Weights are loaded only from
safetensors files, and code in an encoder's directory is never executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.base.disk import expanded, read_text
from fedhet.base.errors import DataError, ModelError, SettingsError, error_text
from fedhet.data.spec import DataSpec, check_max_bytes, reading
from fedhet.kinds import PADDING, Shape, text_shape
from fedhet.wire.identity import MAX_SIDE

LOG = logging.getLogger("fedhet")
VARIABLE = "FEDHET_ENCODERS"
_ENCODER = re.compile(r"(?:encoder-([1-5])(?:-(frozen|lora.*?))?|causal-lora.*?):(.+)")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,100}", re.ASCII)


def is_encoder(model: str) -> bool:
    """Return whether a model name specifies a base model, such as `encoder-2:NAME`."""
    return _ENCODER.fullmatch(model) is not None


def encoder_parts(model: str) -> tuple[int, bool, str]:
    """Parse `encoder-K[-frozen]:NAME` into K, whether the encoder is frozen, and NAME.

    K is the number of linear layers after the encoder, including the classifier. It is 0 for the
    names of causal language models, `causal-lora8:NAME`.
    """
    match = _ENCODER.fullmatch(model)
    if match is None:
        raise ModelError(f"model '{model}' must have the form 'encoder-2:NAME'")
    return int(match[1] or 0), match[2] == "frozen", match[3]


def encoder_directory(name: str) -> str:
    """Return the directory of an encoder.

    Raises SettingsError if the name or $FEDHET_ENCODERS is invalid, and DataError if the directory
    is missing.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"encoder {name!r}: a name must consist of letters, digits, '.', '_', and '-'"
        )
    home = os.environ.get(VARIABLE)
    if not home:
        raise SettingsError(
            f"encoder {name!r}: the environment variable {VARIABLE} must be the directory that "
            "contains the encoders"
        )
    directory = expanded(home) / name
    if not directory.is_dir():
        raise DataError(f"{directory}: directory not found (encoder {name!r})")
    return str(directory)


def configuration(name: str) -> dict[str, Any]:
    """Read the config.json of an encoder. Raises DataError if it is unreadable."""
    return read_configuration(Path(encoder_directory(name)) / "config.json")


@lru_cache(maxsize=16)
def read_configuration(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises DataError if the file is missing or contains anything else."""
    with reading(path, "configuration"):
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise TypeError(f"expected an object, got a {type(content).__name__}")
    return content


WORDS = "words"
"""Name of the hashing tokenizer, which needs no file."""
_WORD = re.compile(r"\w+|[^\w\s]")
TOKEN_BYTES = 8


def words(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, or return [""] if it has none."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [""]


def hash_token(word: str, vocabulary: int) -> int:
    """Return the token of a word, i.e. its 8-byte BLAKE2b hash mapped to 1 .. `vocabulary` - 1."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (vocabulary - 1)


def vocabulary_size(spec: DataSpec) -> int:
    """Return the vocabulary size V of a run, including PADDING.

    Raises SettingsError or DataError if the encoder is invalid or missing.
    """
    return spec.vocabulary if spec.tokenizer == WORDS else 1 + _tokenizer(spec.tokenizer)[1]


def text_sample_shape(spec: DataSpec) -> Shape:
    """Return the sample shape of texts in a run.

    Raises SettingsError or DataError if the encoder is invalid or missing.
    """
    return text_shape(spec.max_tokens, vocabulary_size(spec))


def tokenize(texts: Sequence[str], spec: DataSpec, where: object) -> Tensor:
    """Tokenize texts into int64 tokens [N, L], padded with PADDING to L = `data.max-tokens`.

    Longer texts are truncated. Token 0 of an encoder's tokenizer becomes V - 1, which the tokenizer
    does not use, because 0 is PADDING. `fedhet.models.libraries` restores it. Each text has at
    least one token other than PADDING. Raises DataError if the tokens would require more than
    `data.max-bytes`, or if the tokenizer fails.
    """
    check_max_bytes(TOKEN_BYTES * len(texts) * spec.max_tokens, spec, where)
    encode = tokenizer_for(spec)
    tokens = np.full((len(texts), spec.max_tokens), PADDING, np.int64)
    for row, text in enumerate(texts):
        truncated = encode(text)[: spec.max_tokens]
        tokens[row, : len(truncated)] = truncated
    return torch.from_numpy(tokens)


def tokenizer_for(spec: DataSpec, *, special: bool = True) -> Callable[[str], list[int]]:
    """Return a function that tokenizes a text, with or without an encoder's special tokens."""
    if spec.tokenizer == WORDS:
        hashed = lru_cache(maxsize=2**17)(lambda word: hash_token(word, spec.vocabulary))
        return lambda text: [hashed(word) for word in words(text)]
    tokenizer, size = _tokenizer(spec.tokenizer)
    added = tokenizer.get_added_tokens_decoder().items()
    empty = [min((token for token, entry in added if entry.special), default=0)]

    def encode(text: str) -> list[int]:
        try:
            ids = tokenizer.encode(text, add_special_tokens=special).ids
        except Exception as error:  # The library raises plain exceptions.
            path = Path(encoder_directory(spec.tokenizer)) / "tokenizer.json"
            raise DataError(f"{path}: a text cannot be tokenized ({error_text(error)})") from error
        return [token or size for token in ids or empty]

    return encode


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> tuple[Any, int]:
    """Load an encoder's tokenizer, without padding and truncation, and its number of token ids."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SettingsError(
            f"data.tokenizer = {name!r}: package 'tokenizers' not found. "
            "Install it with: pip install 'fedhet[encoders]'"
        ) from None
    path = Path(encoder_directory(name)) / "tokenizer.json"
    hint = (
        ". Create it with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained("
        "DIRECTORY)"
    )
    with reading(path, "tokenizer", absent=hint):
        tokenizer: Any = Tokenizer.from_str(read_text(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Ids may have gaps, so the largest id counts, not the number of tokens.
        size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        special = max(tokenizer.encode("").ids, default=0)
    if special >= size:
        raise DataError(
            f"{path}: post_processor adds token {special}, but the vocabulary ends at {size - 1}"
        )
    if size >= MAX_SIDE:
        raise DataError(f"{path}: expected token ids below {MAX_SIDE - 1}, got {size - 1}")
    return tokenizer, size
