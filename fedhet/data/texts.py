"""Tokenization, readers of labeled texts, and configurations of pretrained encoders.

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
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, ModelError, SettingsError, error_reason
from fedhet.data.dataset import Dataset, Format, Split
from fedhet.data.folders import Files
from fedhet.data.rows import Table, missing_column_error, read_bounded, read_table
from fedhet.data.schemas import SCHEMA, find_schema
from fedhet.data.spec import DataSpec, Expected, check_max_bytes, reading
from fedhet.data.targets import infer_targets, read_targets
from fedhet.kinds import PADDING, TEXT, Shape, text_shape
from fedhet.tasks import CLASSIFICATION

LOG = logging.getLogger("fedhet")
VARIABLE = "FEDHET_ENCODERS"
_ENCODER = re.compile(r"encoder-([1-5])(?:-(frozen|lora.*?))?:(.+)")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,100}", re.ASCII)


def is_encoder(model: str) -> bool:
    """Return whether a model name specifies an encoder, such as `encoder-2:NAME`."""
    return _ENCODER.fullmatch(model) is not None


def encoder_parts(model: str) -> tuple[int, bool, str]:
    """Parse `encoder-K[-frozen]:NAME` into K, whether the encoder is frozen, and NAME.

    K is the number of linear layers after the encoder, including the classifier.
    """
    match = _ENCODER.fullmatch(model)
    if match is None:
        raise ModelError(f"model '{model}' must have the form 'encoder-2:NAME'")
    return int(match[1]), match[2] == "frozen", match[3]


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
    return _configuration(Path(encoder_directory(name)) / "config.json")


@lru_cache(maxsize=16)
def _configuration(path: Path) -> dict[str, Any]:
    with reading(path, "configuration"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"expected an object, got a {type(content).__name__}")
    return content


WORDS = "words"
"""Name of the hashing tokenizer, which needs no file."""
_MAX_VOCABULARY = 65_536
MAX_NEXT_TOKENS = 4096
"""Maximum vocabulary size if each token is a class, because predictions have a score per class."""
_WORD = re.compile(r"\w+|[^\w\s]")
_TOKEN_BYTES = 8


def words(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, or return [""] if it has none."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [""]


def hash_token(word: str, vocabulary: int) -> int:
    """Return the token of a word, i.e. its 8-byte BLAKE2b hash mapped to 1 .. `vocabulary` - 1."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (vocabulary - 1)


def vocabulary_size(spec: DataSpec) -> int:
    """Return the vocabulary size V of a run's tokenizer.

    Raises SettingsError or DataError if the encoder is invalid or missing.
    """
    if spec.tokenizer == WORDS:
        return spec.vocabulary
    size: int = _tokenizer(spec.tokenizer).get_vocab_size(with_added_tokens=True)
    return size


def text_sample_shape(spec: DataSpec) -> Shape:
    """Return the sample shape of texts in a run.

    Raises SettingsError or DataError if the encoder is invalid or missing.
    """
    return text_shape(spec.max_tokens, vocabulary_size(spec))


def tokenize(texts: Sequence[str], spec: DataSpec, where: object) -> Tensor:
    """Tokenize texts into int64 tokens [N, L], padded with PADDING to L = `data.max-tokens`.

    Longer texts are truncated. The padding token of an encoder's tokenizer is swapped with PADDING;
    `fedhet.models.libraries` swaps them back. Each text has at least one token other than PADDING.
    Raises DataError if the tokens would require more than `data.max-bytes`.
    """
    check_max_bytes(_TOKEN_BYTES * len(texts) * spec.max_tokens, spec, where)
    encode = _encode(spec)
    tokens = np.full((len(texts), spec.max_tokens), PADDING, np.int64)
    for row, text in enumerate(texts):
        truncated = encode(text)[: spec.max_tokens]
        tokens[row, : len(truncated)] = truncated
    return torch.from_numpy(tokens)


def _encode(spec: DataSpec, *, special: bool = True) -> Callable[[str], list[int]]:
    """Return a function that tokenizes a text, with or without an encoder's special tokens."""
    if spec.tokenizer == WORDS:
        hashed = lru_cache(maxsize=2**17)(lambda word: hash_token(word, spec.vocabulary))
        return lambda text: [hashed(word) for word in words(text)]
    tokenizer = _tokenizer(spec.tokenizer)
    # Use 0 if the encoder has no padding token.
    padding = int(configuration(spec.tokenizer).get("pad_token_id") or 0)
    swapped = {padding: PADDING, PADDING: padding}

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=special).ids
        return [swapped.get(token, token) for token in ids if token != padding] or [padding or 1]

    return encode


def read_windows(train: Path, test: Path | None, spec: DataSpec) -> Dataset:
    """Read text files as windows of `data.max-tokens` tokens.

    The label of a window is the token that follows it. Windows do not overlap, so a training window
    shares no token with a test window. The classes are the tokens of the vocabulary. Raises
    DataError if a file is too short or not valid UTF-8, and SettingsError if the vocabulary is too
    large.
    """
    size, length = vocabulary_size(spec), spec.max_tokens
    if size > MAX_NEXT_TOKENS:
        raise SettingsError(
            f"data.dataset = {spec.dataset!r}: each token is a class, so the vocabulary must have "
            f"at most {MAX_NEXT_TOKENS:,} tokens, got {size:,}. With data.tokenizer = "
            "words, lower data.vocabulary; otherwise, choose a tokenizer with fewer tokens."
        )
    encode = _encode(spec, special=False)

    def split(path: Path) -> Split:
        with reading(path, "text"):
            content = read_bounded(path, spec)
        tokens = encode(_decoded(content, path))
        check_max_bytes(_TOKEN_BYTES * len(tokens), spec, path)
        if (count := len(tokens) // (length + 1)) < 1:
            raise DataError(
                f"{path}: expected more than data.max-tokens = {length} tokens, got {len(tokens)}"
            )
        windows = torch.tensor(tokens[: count * (length + 1)]).view(count, length + 1)
        return Split(windows[:, :-1].clone(), windows[:, -1].clone())

    samples, names = split(train), tuple(map(str, range(size)))
    described = Format.from_samples(samples.x, names, TEXT, shape=text_sample_shape(spec))
    return Dataset(spec.dataset, samples, split(test) if test else None, described)


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Any:
    """Load the tokenizer of an encoder, without padding and truncation."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SettingsError(
            f"data.tokenizer = {name!r}: package 'tokenizers' not found. "
            "Install it with: pip install 'fedhet[encoders]'"
        ) from None
    path = Path(encoder_directory(name)) / "tokenizer.json"
    with reading(path, "tokenizer"):
        tokenizer: Any = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if (size := tokenizer.get_vocab_size(with_added_tokens=True)) > _MAX_VOCABULARY:
        raise DataError(f"{path}: expected at most {_MAX_VOCABULARY} tokens, got {size}")
    return tokenizer


_MARKS = {  # UTF-32 comes first, because its byte order mark starts with the UTF-16 mark.
    BOM_UTF8: "utf-8-sig", BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32",
    BOM_UTF16_LE: "utf-16", BOM_UTF16_BE: "utf-16",
}  # fmt: skip


def read_texts(train: Path, test: Path | None, spec: DataSpec) -> Dataset:
    """Read row files with labeled texts as a dataset.

    Args:
        train: File of the training rows.
        test: File of the test rows, if any.
        spec: Data settings.

    Raises:
        DataError: If a file is invalid, or the number of classes differs from the expected number.
    """
    expected, columns = spec.expected or Expected(), tuple(spec.text_column)
    declared = find_schema(train, shared=spec.expected is not None)
    target = declared.target if declared else spec.target or spec.label_column.strip()
    spec = spec.replace(target=target)
    rows = read_table(train, spec, texts=columns)
    for name in columns:
        if name not in rows.columns:
            raise missing_column_error(train, name, rows.columns, " (data.text-column)")
        rows.column(name)
    if declared and declared.task == CLASSIFICATION.name and target not in rows.columns:
        hint = f". It is the target in {train.parent / SCHEMA}, which describes all files there."
        raise missing_column_error(train, target, rows.columns, hint)
    schema = infer_targets(rows, spec, declared=declared)
    expected.check_outputs(len(schema.outputs), train, train.parent)

    def split(table: Table) -> Split:
        parts = [table.column(name) for name in columns]
        for name, values in zip(columns, parts, strict=True):
            if len(parts) == 1 and "" in values.texts:
                row = values.first_row(values.texts.index(""))
                raise table.error(name, row, "the text is missing")
        texts = list(map(" ".join, zip(*(each.rows() for each in parts), strict=True)))
        return Split(tokenize(texts, spec, table.path), read_targets(schema, table))

    samples = split(rows)
    return Dataset(
        spec.dataset,
        samples,
        split(read_table(test, spec, texts=columns)) if test else None,
        Format.from_samples(
            samples.x,
            schema.outputs,
            TEXT,
            shape=text_sample_shape(spec),
            schema=schema,
        ),
        **rows.owners(),
    )


def read_files(files: Sequence[str], spec: DataSpec, like: Shape | None = None) -> torch.Tensor:
    """Read text files as tokens [N, L]. `like` is ignored.

    The encoding must be UTF-8, or UTF-16 or UTF-32 with a byte order mark. Raises DataError
    otherwise.
    """
    texts, size = [], 0
    for path in map(Path, files):
        with reading(path, "text"):
            content = read_bounded(path, spec)
        texts.append(_decoded(content, path))
        size += len(content)
        check_max_bytes(size, spec, f"{files[0]} and the other texts")
    return tokenize(texts, spec, f"{files[0]} and the other texts" if files else "")


def _decoded(content: bytes, path: Path) -> str:
    """Decode a text. Raises DataError if the encoding is unsupported."""
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")
    fault = "null characters"  # UTF-16 without a byte order mark may be valid UTF-8.
    try:
        if "\0" not in (text := content.decode(encoding)):
            return text
    except UnicodeDecodeError as error:
        fault = error_reason(error)
    raise DataError(
        f"{path}: not valid UTF-8 text ({fault}). Convert the file, for example with `iconv -f "
        "WINDOWS-1252 -t UTF-8`."
    )


TEXTS = Files(".txt files", (".txt",), read_files, TEXT, text_sample_shape)
"""File type of texts."""
