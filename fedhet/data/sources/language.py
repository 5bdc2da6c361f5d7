"""Texts for language modeling (`data.task = causal-lm`): plain texts, and instructions.

- `text:PATH` with this task: plain texts, which are concatenated and cut into windows. PATH is a
  .txt file, a directory with train.txt and optionally test.txt, a directory of .txt files, or a
  file of rows with a text column as in classification.
- `instructions:PATH`: JSON lines with prompts and completions. Only completions are predicted.

Samples `x` [N, L] are the tokens of `fedhet.data.texts`. The target at position t is the id of
token t + 1 in the base model's vocabulary, or NOT_PREDICTED.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedhet.base.disk import expanded, parse_json, text_in
from fedhet.base.errors import DataError, SettingsError, describe_error, safe_repr
from fedhet.data.dataset import Dataset, Format, Source, Split
from fedhet.data.rows import TEXT_ENDINGS, missing_column_error, read_bounded, read_table
from fedhet.data.sources.tables import find_row_files
from fedhet.data.spec import DataSpec, check_max_bytes, reading
from fedhet.data.texts import (
    TOKEN_BYTES,
    WORDS,
    configuration,
    encoder_directory,
    text_sample_shape,
    tokenizer_for,
    vocabulary_size,
)
from fedhet.data.words import encode_owners
from fedhet.kinds import PADDING, TEXT
from fedhet.settings.schema import invalid_setting
from fedhet.tasks import NOT_PREDICTED, CausalLanguageModeling

LOG = logging.getLogger("fedhet")
TARGETS = ("next token",)
"""Name of the only target."""
SUFFIX = ".txt"
KEYS = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
}
"""Keys that each form of an instruction requires, by the key that identifies the form."""
ROLES = ("system", "user", "assistant")


class Part(NamedTuple):
    """Consecutive tokens of a text."""

    text: str
    is_predicted: bool
    """Whether the tokens are predicted."""


def read_plain_texts(location: str, spec: DataSpec) -> Dataset:
    """Read the dataset `text:PATH` for language modeling.

    The texts of each owner (`data.by`) are concatenated, with the end-of-text token after each
    text, and cut into windows of `data.max-tokens` tokens. The last window of an owner is shorter.

    Raises:
        DataError: If a file is invalid or contains fewer than two tokens.
        SettingsError: If the tokenizer does not belong to a base model.
    """
    train: Path | None
    read: Callable[[Path, DataSpec, bool], tuple[list[str], list[str]]]
    train, test, read = expanded(location), None, _read_file
    if train.is_dir() and (train / "train.txt").exists():
        train, test = train / "train.txt", train / "test.txt"
    elif train.suffix != SUFFIX:
        train, test, read = *find_row_files(location, TEXT_ENDINGS)[1:], _read_rows
        if train is None:
            train, read = expanded(location), _read_directory
    encode = tokenizer_for(_checked(spec), special=False)
    end = _end_of_text(spec, load_tokenizer(encoder_directory(spec.tokenizer)))

    def windows(path: Path, needs_owner: bool) -> tuple[Split, list[str]]:
        texts, owners = read(path, spec, needs_owner)
        tokens: dict[str, list[int]] = {}
        for text, owner in zip(texts, owners, strict=True):
            tokens.setdefault(owner, []).extend([*(encode(text) if text else ()), end])
        check_max_bytes(2 * TOKEN_BYTES * sum(map(len, tokens.values())), spec, path)
        length, rows, owned = spec.max_tokens, [], []
        for owner, all_tokens in tokens.items():
            cuts = [all_tokens[k : k + length] for k in range(0, len(all_tokens), length)]
            cuts = [cut for cut in cuts if len(cut) > 1]  # A single token predicts nothing.
            rows += [(cut, [True] * len(cut)) for cut in cuts]
            owned += [owner] * len(cuts)
        if not rows:
            raise DataError(f"{path}: expected at least two tokens, got none")
        return _split(rows, spec), owned

    return _dataset(spec, train, test if test and test.exists() else None, windows)


def _read_file(path: Path, spec: DataSpec, _: bool = True) -> tuple[list[str], list[str]]:
    if spec.by:
        problem = f"{path} has no columns"
        raise invalid_setting("data.by", spec.by, "empty for .txt files", problem)
    with reading(path, "text"):
        return [text_in(read_bounded(path, spec), path)], [""]


def _read_directory(path: Path, spec: DataSpec, _: bool = True) -> tuple[list[str], list[str]]:
    files = sorted(each for each in path.rglob(f"*{SUFFIX}") if each.is_file())
    if not files:
        endings = ", ".join(TEXT_ENDINGS)
        raise DataError(f"{path}: expected .txt files, or train{{{endings}}}, found none")
    return [_read_file(each, spec)[0][0] for each in files], [""] * len(files)


def _read_rows(path: Path, spec: DataSpec, needs_owner: bool) -> tuple[list[str], list[str]]:
    columns = tuple(spec.text_column)
    table = read_table(path, spec, texts=columns)
    for name in columns:
        if name not in table.columns:
            raise missing_column_error(path, name, table.columns, " (data.text-column)")
    texts = [" ".join(row) for row in zip(*(table.column(n).rows() for n in columns), strict=True)]
    by = spec.by.strip()
    if not by or (by not in table.columns and not needs_owner):
        return texts, [""] * len(table)
    return texts, table.column(by).rows()


def read_instructions(location: str, spec: DataSpec) -> Dataset:
    """Read the dataset `instructions:PATH`, a .jsonl file or a directory with train.jsonl.

    Each line is an object in one of three forms: `prompt` and `completion`; `instruction`,
    optionally `input`, and `output`; or chat `messages` with the keys `role` and `content`. If the
    tokenizer has a chat template, it is applied to all forms. Only completions, i.e. the messages
    of the assistant, and the end-of-text token after the last one are predicted. Longer examples
    are truncated to `data.max-tokens`, with one warning.

    Raises:
        DataError: If a file or a line is invalid.
        SettingsError: If the tokenizer does not belong to a base model.
    """
    _, train, test = find_row_files(location, (".jsonl", ".jsonl.gz"))
    if train is None:
        raise DataError(f"{expanded(location) / 'train.jsonl'}: file not found")
    encode = tokenizer_for(_checked(spec), special=False)
    tokenizer = load_tokenizer(encoder_directory(spec.tokenizer))
    end, directory = _end_of_text(spec, tokenizer), encoder_directory(spec.tokenizer)
    template = partial(_apply, tokenizer, directory) if tokenizer.chat_template else None
    start, text = tokenizer_for(spec)("a")[:1], encode("a")
    # Tokens before a text, such as Llama's start-of-text token. Chat templates contain it.
    start = [] if template is not None or start == text[:1] else start

    def samples(path: Path, needs_owner: bool) -> tuple[Split, list[str]]:
        rows: list[tuple[list[int], list[bool]]] = []
        owned: list[str] = []
        truncated = without = 0
        for number, example in _lines(path, spec):
            where = f"{path}: line {number}"
            tokens, predicted = [*start], [False for _ in start]
            parts = _parts(example, where, template)
            for part in parts:
                added = encode(part.text) if part.text else []
                tokens, predicted = tokens + added, predicted + [part.is_predicted] * len(added)
            if template is None or tokens[-1:] != [end]:
                tokens, predicted = [*tokens, end], [*predicted, parts[-1].is_predicted]
            if len(tokens) > spec.max_tokens:
                truncated += 1
                tokens, predicted = tokens[: spec.max_tokens], predicted[: spec.max_tokens]
            if not any(predicted[1:]):
                without += 1
                continue
            rows.append((tokens, predicted))
            if spec.by and needs_owner:
                owned.append(_owner(example, spec.by, where))
        if truncated or without:
            LOG.warning(
                "%s: %d of %d examples are longer than data.max-tokens = %d and were truncated; %d "
                "without any token of a completion were left out",
                path, truncated, len(rows) + without, spec.max_tokens, without,
            )  # fmt: skip
        if not rows:
            raise DataError(f"{path}: expected examples with a completion, found none")
        check_max_bytes(2 * TOKEN_BYTES * len(rows) * spec.max_tokens, spec, path)
        return _split(rows, spec), owned

    return _dataset(spec, train, test, samples)


def _lines(path: Path, spec: DataSpec) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yield the number and the object of each line that is not empty."""
    with reading(path, "file of instructions"):
        text = text_in(read_bounded(path, spec), path)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        with reading(f"{path}: line {number}", "JSON object"):
            example = parse_json(line)
            if not isinstance(example, dict):
                raise TypeError(f"expected an object, got {safe_repr(example)}")
        yield number, example


def _owner(example: Mapping[str, Any], by: str, where: str) -> str:
    owner = example.get(by)
    if not isinstance(owner, str | int) or str(owner) == "":
        raise DataError(f"{where}: data.by: expected a text or an integer {by!r}, got {owner!r}")
    return str(owner)


Template = Callable[[Sequence[Mapping[str, str]], bool], str]
"""Function that converts messages to a text; with True, the text ends where a reply begins."""


def _parts(example: Mapping[str, Any], where: str, template: Template | None) -> list[Part]:
    """Divide an example into texts that are predicted, and texts that are not."""
    form = next((form for form in KEYS if form in example), "")
    if not form:
        forms = "; ".join(" and ".join(map(repr, keys)) for keys in KEYS.values())
        raise DataError(f"{where}: expected the keys {forms}, got {', '.join(example)[:200]}")
    if form == "messages":
        messages = _messages(example["messages"], where)
    else:
        texts = {key: example.get(key) for key in (*KEYS[form], "input")}
        texts["input"] = texts["input"] or ""
        for key, text in texts.items():
            if not isinstance(text, str):
                raise DataError(f"{where}: {key}: expected a text, got {safe_repr(text)}")
        prompt, completion = (str(texts[key]) for key in KEYS[form])
        if form == "instruction" and template is None:
            given = f"### Input:\n{texts['input']}\n\n" if texts["input"] else ""
            prompt = f"### Instruction:\n{prompt}\n\n{given}### Response:\n"
        elif texts["input"]:
            prompt = f"{prompt}\n\n{texts['input']}"
        if template is None:
            return [Part(prompt, False), Part(completion, True)]
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
    if template is None:
        return [
            Part(text, is_predicted)
            for each in messages
            for text, is_predicted in (
                (f"### {each['role'].capitalize()}:\n", False),
                (each["content"] + "\n\n", each["role"] == "assistant"),
            )
        ]
    parts, done = [], ""
    for count, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        for text, is_predicted in (
            (template(messages[: count - 1], True), False),
            (template(messages[:count], False), True),
        ):
            if not text.startswith(done):
                raise DataError(
                    f"{where}: the chat template changes earlier messages when a message is "
                    "added, so a completion cannot be separated. Use prompt and completion."
                )
            parts.append(Part(text.removeprefix(done), is_predicted))
            done = text
    return parts


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    """Check chat messages."""
    messages = value if isinstance(value, list) else []
    for number, each in enumerate(messages, 1):
        is_text = isinstance(each, dict) and isinstance(each.get("content"), str)
        if not is_text or each.get("role") not in ROLES:
            raise DataError(
                f"{where}: message {number}: expected 'content' and a 'role' in "
                f"{', '.join(ROLES)}, got {safe_repr(each)}"
            )
    if not any(each["role"] == "assistant" for each in messages):
        raise DataError(f"{where}: messages: expected a list with a message of the assistant")
    return messages


def _apply(tokenizer: Any, where: str, messages: Sequence[Mapping[str, str]], replies: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=replies
        )
    except Exception as error:  # Templates raise many exception types.
        raise DataError(f"{where}: chat template: {describe_error(error)}") from error
    return str(text)


def chat_prompt(tokenizer: Any, prompt: str) -> str:
    """Return the text with which a reply to the message `prompt` of a user begins."""
    return _apply(tokenizer, "prompt", [{"role": "user", "content": prompt}], True)


def load_tokenizer(directory: str) -> Any:
    """Load a tokenizer with transformers, which reads its chat template and its special tokens.

    Raises DataError if this fails.
    """
    try:
        import transformers
    except ImportError:
        raise SettingsError(
            "data.task = causal-lm: package 'transformers' not found. Install it with: "
            "pip install 'fedhet[encoders]'"
        ) from None
    with reading(directory, "tokenizer", describe=describe_error):
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )


def _end_of_text(spec: DataSpec, tokenizer: Any) -> int:
    """Return the token that ends a text. Raises DataError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if end is None:
        stated = configuration(spec.tokenizer).get("eos_token_id")
        end = stated[0] if isinstance(stated, list) and stated else stated
    if not isinstance(end, int) or not 0 <= end < vocabulary_size(spec) - 1:
        raise DataError(
            f"{encoder_directory(spec.tokenizer)}/tokenizer_config.json: eos_token: expected a "
            f"token that ends a text, got {end!r}"
        )
    return end or vocabulary_size(spec) - 1  # Token 0 is PADDING.


def _checked(spec: DataSpec) -> DataSpec:
    """Check that the tokens are those of a base model. Raises SettingsError otherwise."""
    if spec.tokenizer == WORDS:
        raise invalid_setting(
            "data.tokenizer", WORDS, "the name of the base model", "the model predicts its tokens"
        )
    return spec


def _split(rows: Sequence[tuple[list[int], list[bool]]], spec: DataSpec) -> Split:
    """Return padded samples, given the tokens of each text and whether they are predicted."""
    x = torch.full((len(rows), spec.max_tokens), PADDING)
    y = torch.full((len(rows), spec.max_tokens), NOT_PREDICTED)
    zero = vocabulary_size(spec) - 1
    for row, (tokens, predicted) in enumerate(rows):
        x[row, : len(tokens)] = torch.tensor(tokens)
        ids = torch.tensor([0 if token == zero else token for token in tokens[1:]])
        y[row, : len(ids)] = ids.where(torch.tensor(predicted[1:]), NOT_PREDICTED)
    return Split(x, y)


def _dataset(
    spec: DataSpec,
    train: Path,
    test: Path | None,
    read: Callable[[Path, bool], tuple[Split, list[str]]],
) -> Dataset:
    """Return a dataset; `read` reads a file, given whether its samples must have owners."""
    samples, owners = read(train, True)
    format = Format.from_samples(
        samples.x, TARGETS, TEXT, shape=text_sample_shape(spec), task=CausalLanguageModeling()
    )
    owned = encode_owners(owners, f"{train}: {spec.by}") if spec.by and owners else {}
    return Dataset(spec.dataset, samples, read(test, False)[0] if test else None, format, **owned)


SOURCES = (
    Source(
        "instructions",
        "prompts and completions in JSON lines, for data.task = causal-lm",
        read_instructions,
        "PATH",
        TEXT,
        text_sample_shape,
        owners="instructions:PATH",
    ),
)
