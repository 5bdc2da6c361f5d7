"""Texts as tokens: by a hash of each word, or by an encoder's own tokenizer from a local folder.

The hash needs no file and no vocabulary that sites would have to share: a word has the same number
everywhere. Two words may share a number; with 8192 numbers few words of a text do.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.base.errors import DataError, SettingsError, reason_of
from fedhet.data.encoders import configuration, encoder_folder
from fedhet.data.spec import DataSpec, refuse_more
from fedhet.kinds import PADDING, Shape, text_shape

WORDS = "words"
"""The tokenizer that needs no file."""
_MOST = 65_536
_WORD = re.compile(r"\w+|[^\w\s]")
_TOKEN_BYTES = 8
Encode = Callable[[str], list[int]]
"""A text -> its tokens, one or more, none of them PADDING."""


def words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case; [""] if it has none."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [""]


def number_of(word: str, vocabulary: int) -> int:
    """Return the number of a word, from 1 to `vocabulary` - 1: its BLAKE2b hash, 8 bytes of it."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (vocabulary - 1)


def vocabulary_of(spec: DataSpec) -> int:
    """Return V: all tokens of a run's texts are below it. Raises SettingsError or DataError."""
    if spec.tokenizer == WORDS:
        return spec.vocabulary
    size: int = _tokenizer(spec.tokenizer).get_vocab_size(with_added_tokens=True)
    return size


def shape_of_texts(spec: DataSpec) -> Shape:
    """Return the shape of a run's texts. Raises SettingsError or DataError."""
    return text_shape(spec.max_tokens, vocabulary_of(spec))


def tokenized(texts: Sequence[str], spec: DataSpec, where: object) -> Tensor:
    """Return texts as tokens [N, L] int64, L = `data.max-tokens`; PADDING follows the last token.

    Longer texts are cut. Raises DataError if they take more than `data.max-bytes`.
    """
    refuse_more(_TOKEN_BYTES * len(texts) * spec.max_tokens, spec, where)
    encode = _hashing(spec.vocabulary) if spec.tokenizer == WORDS else _encoding(spec.tokenizer)
    found = np.full((len(texts), spec.max_tokens), PADDING, np.int64)
    for row, text in enumerate(texts):
        tokens = encode(text)[: spec.max_tokens]
        found[row, : len(tokens)] = tokens
    return torch.from_numpy(found)


def _hashing(vocabulary: int) -> Encode:
    number = lru_cache(maxsize=2**17)(lambda word: number_of(word, vocabulary))
    return lambda text: [number(word) for word in words(text)]


def _encoding(name: str) -> Encode:
    """Return the function of a tokenizer, whose own padding token, if any, becomes PADDING.

    The two swap their numbers; `fedhet.models.encoder` swaps them back.
    """
    tokenizer, padding = _tokenizer(name), padding_of(name)
    swapped = {padding: PADDING, PADDING: padding}

    def encode(text: str) -> list[int]:
        found = [token for token in tokenizer.encode(text).ids if token != padding]
        return [swapped.get(token, token) for token in found] or [padding or 1]

    return encode


def padding_of(name: str) -> int:
    """Return the number that an encoder's configuration gives its padding token; 0 if none."""
    return int(configuration(name).get("pad_token_id") or 0)


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Any:
    """Return the tokenizer in an encoder's tokenizer.json, without padding and truncation."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SettingsError(
            f"data.tokenizer = {name!r}: needs the package 'tokenizers': "
            "pip install 'fedhet[encoders]'"
        ) from None
    path = Path(encoder_folder(name)) / "tokenizer.json"
    try:
        tokenizer: Any = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library's own, for each fault of the file
        raise DataError(f"{path}: not a readable tokenizer ({reason_of(error)})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.get_vocab_size(with_added_tokens=True) > _MOST:
        raise DataError(f"{path}: has more than {_MOST} tokens")
    return tokenizer
