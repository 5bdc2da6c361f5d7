"""Texts as tokens, texts with a class each, and pretrained encoders.

A text becomes tokens by a hash of each word, or by an encoder's own tokenizer. The hash needs no
file and no vocabulary that sites would have to share: a word has the same number everywhere. Two
words may share a number; with 8192 numbers few words of a text do.

Encoders are folders in $FEDHET_ENCODERS, as `transformers` saves them. A run names an encoder,
never a path: each machine has its own folder of encoders. Weights are read from safetensors files
alone, and no code is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import unicodedata
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, ModelError, SettingsError, error_reason, nearest
from fedhet.data.cells import TextRows, read_bounded, read_rows
from fedhet.data.class_folders import Files
from fedhet.data.spec import Dataset, DataSpec, Split, check_max_bytes, encode_labels, reading
from fedhet.data.values import MANY_CLASSES, Words, class_words
from fedhet.kinds import PADDING, TEXT, Shape, text_shape

LOG = logging.getLogger("fedhet")
VARIABLE = "FEDHET_ENCODERS"
_ENCODER = re.compile(r"encoder-([1-5])(-frozen)?:(.+)")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,100}", re.ASCII)


def is_encoder(model: str) -> bool:
    """Return whether the name of a model is an encoder's, `encoder-2:NAME` or the like."""
    return _ENCODER.fullmatch(model) is not None


def encoder_parts(model: str) -> tuple[int, bool, str]:
    """Return the linear layers of such a model, whether it is frozen, and its encoder's name."""
    found = _ENCODER.fullmatch(model)
    if found is None:
        raise ModelError(f"model '{model}' is not of the form 'encoder-2:NAME'")
    return int(found[1]), bool(found[2]), found[3]


def encoder_folder(name: str) -> str:
    """Return the folder of an encoder. Raises SettingsError, or DataError if it is absent."""
    if not _NAME.fullmatch(name):
        raise SettingsError(f"encoder {name!r}: a name has letters, digits, '.', '_' and '-'")
    home = os.environ.get(VARIABLE)
    if not home:
        raise SettingsError(
            f"encoder {name!r}: the environment variable {VARIABLE} must name the folder that "
            "holds the encoders' folders"
        )
    folder = expanded(home) / name
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder (the encoder {name!r})")
    return str(folder)


def configuration(name: str) -> dict[str, Any]:
    """Return the content of an encoder's config.json. Raises DataError if it is not readable."""
    return _configuration(Path(encoder_folder(name)) / "config.json")


@lru_cache(maxsize=16)
def _configuration(path: Path) -> dict[str, Any]:
    with reading(path, "configuration"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it is not an object")
    return found


WORDS = "words"
"""The tokenizer that needs no file."""
_MAX_VOCABULARY = 65_536
_WORD = re.compile(r"\w+|[^\w\s]")
_TOKEN_BYTES = 8


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

    Longer texts are cut. A tokenizer's own padding token, if any, and PADDING swap their numbers;
    `fedhet.models.libraries` swaps them back. Each text has a token or more, none of them PADDING.
    Raises DataError if the texts take more than `data.max-bytes`.
    """
    check_max_bytes(_TOKEN_BYTES * len(texts) * spec.max_tokens, spec, where)
    if spec.tokenizer == WORDS:
        number = lru_cache(maxsize=2**17)(lambda word: number_of(word, spec.vocabulary))

        def encode(text: str) -> list[int]:
            return [number(word) for word in words(text)]
    else:
        tokenizer, padding = _tokenizer(spec.tokenizer), padding_of(spec.tokenizer)
        swapped = {padding: PADDING, PADDING: padding}

        def encode(text: str) -> list[int]:
            own = [token for token in tokenizer.encode(text).ids if token != padding]
            return [swapped.get(token, token) for token in own] or [padding or 1]

    found = np.full((len(texts), spec.max_tokens), PADDING, np.int64)
    for row, text in enumerate(texts):
        tokens = encode(text)[: spec.max_tokens]
        found[row, : len(tokens)] = tokens
    return torch.from_numpy(found)


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
    with reading(path, "tokenizer"):
        tokenizer: Any = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.get_vocab_size(with_added_tokens=True) > _MAX_VOCABULARY:
        raise DataError(f"{path}: has more than {_MAX_VOCABULARY} tokens")
    return tokenizer


_MARKS = {  # UTF-32's mark begins with UTF-16's
    BOM_UTF8: "utf-8-sig", BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32",
    BOM_UTF16_LE: "utf-16", BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_WESTERN = 0.1
"""Maximum fraction of other bytes than ASCII in a text that is taken for Windows-1252. Alphabets
other than Latin have far more, so that their encodings are refused, not misread."""
_LATIN = {0xDC00 + byte: byte for byte in range(128, 256)}
"""The five bytes that Windows-1252 leaves undefined are those of Latin-1."""


def read_texts(
    train: Path, test: Path | None, spec: DataSpec, names: Sequence[str] = (), classes: int = 0
) -> Dataset:
    """Read rows of texts as a dataset. `groups` is set if `data.by` names a column.

    Without `names`, as from classes.txt, the classes are the different labels. At a site, the run
    has `classes`, and they are 0 to `classes` - 1 if all labels are such numbers. Raises DataError
    for any fault of the files, and if the run has another number of classes.
    """
    rows, names = read_rows(train, spec), tuple(names)
    if not names:
        column, numbers = spec.label_column, tuple(map(str, range(classes)))
        exact = not classes and column in spec.categories
        most = classes or MANY_CLASSES
        names, words = class_words(rows.labels, train, column, exact=exact, max_numbers=most)
        names = numbers if set(words.values()) <= set(numbers) else names
    if classes and len(names) != classes:
        raise DataError(
            f"{train}: has {len(names)} different labels, the run has {classes} classes; name all "
            f"{classes} in the run's order in {train.parent / 'classes.txt'}"
        )
    return Dataset(
        spec.dataset,
        labeled(rows, names, spec, train),
        labeled(read_rows(test, spec), names, spec, test) if test else None,
        names,
        kind=TEXT.name,
        shape=shape_of_texts(spec),
        groups=encode_labels(rows.groups) if rows.groups is not None else None,
    )


def labeled(rows: TextRows, classes: Sequence[str], spec: DataSpec, path: Path) -> Split:
    """Return rows as samples, with the places of their labels in `classes`. Raises DataError."""
    words = Words(classes)
    places = {label: words.place(label) for label in dict.fromkeys(rows.labels)}
    for line, label in zip(rows.lines, rows.labels, strict=True):
        if places[label] is None:
            close = nearest(label, classes)
            raise DataError(f"{path}: line {line} has the label {label!r}, not a class{close}")
    y = np.array([places[label] for label in rows.labels], np.int64)
    return Split(tokenized(rows.texts, spec, path), torch.from_numpy(y))


def read_files(files: Sequence[str], spec: DataSpec, like: Shape | None = None) -> torch.Tensor:
    """Return the texts of files as tokens [N, L], whatever `like` says.

    They are in UTF-8, or in UTF-16 or UTF-32 with a byte order mark. Other files are read as
    Windows-1252, with one line in the log, if nearly all of their characters are ASCII.
    """
    texts, taken, western = [], 0, []
    for path in map(Path, files):
        with reading(path, "text"):
            content = read_bounded(path, spec)
        text, encoding = _decoded(content, path)
        texts.append(text)
        western += [path] if encoding == "cp1252" else []
        taken += len(content)
        check_max_bytes(taken, spec, path.parents[1])
    if western:
        LOG.warning(
            "%s: %d of %d texts are not in UTF-8, and are read as Windows-1252 (Latin-1); the "
            "first is %s",
            western[0].parents[1], len(western), len(texts), western[0],
        )  # fmt: skip
    return tokenized(texts, spec, Path(files[0]).parents[1] if files else "")


def _decoded(content: bytes, path: Path) -> tuple[str, str]:
    """Return a text and its encoding. Raises DataError if it is unknown."""
    marked = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "")
    if not marked and content[:4000].count(0) * 10 > len(content[:4000]):
        even = content[:4000:2].count(0)  # a binary file, or UTF-16 without a mark
        odd = content[1:4000:2].count(0)
        marked = "utf-16-be" if even > 4 * odd else "utf-16-le" if odd > 4 * even else "ascii"
    try:
        return content.decode(marked or "utf-8").removeprefix("\ufeff"), marked or "utf-8"
    except UnicodeDecodeError as error:
        if not marked and sum(byte > 127 for byte in content) <= len(content) * _WESTERN:
            return content.decode("cp1252", "surrogateescape").translate(_LATIN), "cp1252"
        raise DataError(
            f"{path}: not a readable text in UTF-8 ({error_reason(error)}). Convert it, for "
            f"example with `iconv -f WINDOWS-1251 -t UTF-8`."
        ) from error


TEXTS = Files(".txt files", (".txt",), read_files, TEXT.name, shape_of_texts, bare=True)
"""Files of texts; without an ending only if a tree has no .txt file."""
