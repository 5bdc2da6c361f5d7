"""Words: one spelling for each category, class, and owner, and markers of missing values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any
from unicodedata import normalize

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError

MAX_NUMBER = 1e15
"""Maximum magnitude of a number, so that sums of squares are finite."""
MAX_WORD = 1000
"""Maximum number of characters in a category or a class."""
MISSING = frozenset(
    """#N/A #NA -1.#IND -1.#QNAN -NaN -nan 1.#IND 1.#QNAN <NA> N/A NA NULL NaN NaT None n/a nan
    null""".split()
) | {"", "#N/A N/A"}
"""Markers of missing values in all columns: the default markers of pandas, and `NaT`."""
_MAX_DIGITS = 64
"""Maximum number of digits of an integer that has several spellings."""
_YES, _NO = frozenset({"yes", "y", "true", "t", "1"}), frozenset({"no", "n", "false", "f", "0"})


def _plain(text: str) -> str:
    """Return a text with ASCII digits, spaces, and minus signs, without invisible characters."""
    if text.isascii():
        return text
    plain = re.sub("[\N{MINUS SIGN}\N{EN DASH}]", "-", normalize("NFKC", text))
    return "".join(filter(str.isprintable, plain)).strip()


def _decimal(text: str) -> Decimal | None:
    """Parse a finite number in Python's notation exactly, or return None."""
    try:
        number = Decimal(_plain(text)) if len(text) <= MAX_WORD else None
    except InvalidOperation:
        return None
    return number if number is not None and number.is_finite() and "_" not in text else None


def to_number(text: str) -> float:
    """Parse a finite number in Python's notation, or return NaN."""
    number = _decimal(text)
    return math.nan if number is None or math.isinf(float(number)) else float(number)


def integer_form(text: str) -> str:
    """Return the shortest form of an integer such as 1.0, +01, or 1e0, or "" for another text."""
    number = _decimal(text)
    if number is None or number.adjusted() > _MAX_DIGITS:
        return ""
    return str(int(number)) if number == number.to_integral_value() else ""


def plain_form(text: str) -> str:
    """Return a text without differences in case, spaces, or the form of characters and integers."""
    return integer_form(text) or " ".join(_plain(text).casefold().split())


def _readings(text: str) -> set[str]:
    """Return the numbers that a text may stand for in common notations.

    A comma may separate thousands or decimals. The sign may follow the number or be a pair of
    parentheses.
    """
    if not any(map(str.isdigit, text)):
        return set()
    bare = _plain(text).removeprefix("'").removeprefix("=").strip('"')
    if signed := re.fullmatch(r"\((.+)\)|(.+)-", bare):
        bare = f"-{signed[1] or signed[2]}"
    joined = re.sub(r"(?<=\d)[ ,.'\N{RIGHT SINGLE QUOTATION MARK}_](?=\d{3}(?!\d))", "", bare)
    decimal = bare.replace(".", "").replace(",", ".")
    forms = {bare, joined, joined.replace(",", "."), decimal if "," in bare else bare}
    numbers = [to_number(form) for form in forms]
    return {f"{number + 0.0:.17g}" for number in numbers if not math.isnan(number)}


def find_categories(texts: Iterable[str], field: str = "values") -> tuple[tuple[str, ...], str]:
    """Return the sorted categories of a column's texts, and a fault or "".

    If all texts are integers, 1, 01, and 1.0 are the same category. Otherwise, the categories are
    the texts. It is a fault if two of them differ only in case, spaces, or the notation of a
    number, or if there are several words for yes or no, because they may be the same category.
    `field` is the field of a schema that lists the categories.
    """
    distinct = sorted({*texts})
    integers = [integer_form(text) for text in distinct]
    if all(integers):
        return tuple(sorted({*integers}, key=int)), ""

    def fault(problem: str, *words: str) -> tuple[tuple[str, ...], str]:
        line = json.dumps([*words, "..."], ensure_ascii=False)
        fix = f"Correct the file, or list all categories in a schema ({field} = {line})."
        return tuple(distinct), f"{problem}. {fix}"

    forms: dict[str, str] = {}
    for text in distinct:
        if len(text) > MAX_WORD:
            problem = f"a value must have at most {MAX_WORD} characters, got {len(text):,}"
            return tuple(distinct), problem
        for form in {plain_form(text)} | _readings(text):
            if (other := forms.setdefault(form, text)) != text:
                return fault(f"{other!r} and {text!r} may be the same category", other, text)
    words = {integer_form(text) or _plain(text).casefold() for text in distinct}
    yes_or_no = words & (_YES | _NO)
    few = {"1", "true", "yes"}, {"0", "false", "no"}
    if (len(words) > 2 and words == yes_or_no) or any(len(words & same) > 1 for same in few):
        return fault(f"several words for yes or no: {', '.join(map(repr, distinct))}"[:300])
    return tuple(distinct), ""


def find_words(texts: Iterable[str], known: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the index in `known` of each text, or -1 if it is unknown.

    If all known words are integers, 1.0 and 01 are the word 1.
    """
    places = {word: place for place, word in enumerate(known)}
    form: Callable[[str], str] = integer_form if all(map(integer_form, known)) else str
    forms = {form(word): place for place, word in enumerate(known)}
    return np.array([places.get(text, forms.get(form(text), -1)) for text in texts], np.int64)


def encode_owners(
    owners: Sequence[str] | npt.NDArray[Any],
    where: object,
    missing: frozenset[str] = MISSING,
) -> dict[str, Any]:
    """Return the `Dataset` fields `groups` and `group_names`, given the owner of each sample.

    Integers in several spellings, such as 1 and 1.0, are the same owner. Raises DataError, prefixed
    with `where`, if an owner is one of the markers `missing`, or if several other spellings may be
    the same number.
    """
    names, groups = np.unique(np.asarray(owners), return_inverse=True)
    texts = list(map(str, names))
    for text in texts:
        if text in missing:
            row = int((groups == texts.index(text)).argmax())
            fault = f"row {row + 1}: values of data.by must not be missing, got {text!r}"
            raise DataError(f"{where}: {fault}. Name the owner, or remove the row.")
    forms = [integer_form(text) for text in texts]
    if all(forms) and len({*forms}) < len(forms):
        names, places = np.unique(forms, return_inverse=True)
        return {"groups": places[groups].astype(np.int64), "group_names": tuple(map(str, names))}
    seen: dict[str, str] = {}
    for text in texts if not all(forms) else ():
        for number in _readings(text):
            if (other := seen.setdefault(number, text)) != text:
                fault = f"{other!r} and {text!r} may be the same owner (data.by)"
                raise DataError(f"{where}: {fault}. Write each owner in one way.")
    return {"groups": groups.astype(np.int64), "group_names": tuple(texts)}
