"""Recognition of the values in a column as missing values, numbers, dates, or words.

All distinct values of a column are parsed together, because one value can resolve the ambiguity of
other values. For example, "13/02/2024" shows that "01/02/2024" begins with the day. An ambiguous
column causes an error whose message names the setting that resolves the ambiguity. docs/data.md
documents the rules for users.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Literal
from unicodedata import normalize

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError

Kind = Literal["number", "date", "category"]
Numbers = npt.NDArray[np.float64]

MISSING = frozenset(
    """? na n/a nan null <na> nat \\n #n/a #na #nv #n/d (null) <null> <missing> <nan>""".split()
) | {"", "#n/a n/a"}
"""Missing-value markers for all columns, in lower case, from pandas, R, SQL, and spreadsheets."""
MISSING_NUMBER = frozenset(
    """- -- --- – — . .. ... … * ** / _ ._ none nil undef undefined missing unknown unk blank
    (blank) empty nd n.d. n/d nr n.r. n.a. n.a s/d s.d. n/v n/k n/s nc n.c. n.n. k.a. k.a na. -nan
    nan(ind) -nan(ind) 1.#ind -1.#ind 1.#qnan -1.#qnan 0000-00-00 desconocido inconnu manquant
    unbekannt fehlt fehlend leer sconosciuto mancante onbekend desconhecido""".split()
) | {
    "not available", "no data", "not known", "not recorded", "not done", "not applicable",
    "no disponible", "non disponible", "sin dato", "keine angabe", "0000-00-00 00:00:00",
}  # fmt: skip
"""Additional missing-value markers for columns of numbers or dates. In other columns, these markers
are words."""
_MISSING_FORM = re.compile(r"#[¡¿]?[^\W\d]\S*|err:\d+|\.[a-z]", re.IGNORECASE)
"""Pattern for spreadsheet errors in all languages (#DIV/0!, #WERT!), and for .A to .Z from SAS and
Stata."""
_INTEGER = re.compile(r"([+-]?\d+)[.,](?:000)*0{1,2}")
MAX_NUMBER = 1e15
"""Maximum magnitude of a number, so that sums of squares are finite."""
MAX_ODD = 0.1
"""Fraction of non-numeric values in a column below which these values are treated as mistakes."""
FEW = 5
"""Minimum number of numeric values needed to treat a column's other values as mistakes."""
MANY_CLASSES = 20
"""Maximum number of distinct numbers in a target that are treated as classes. Targets with more
distinct numbers are treated as measurements."""
MAX_WORD = 1000
"""Maximum number of characters in a category or a class."""
DAY = 86_400.0


class UnclearError(Exception):
    """Raised if a column is ambiguous or unreadable.

    `place` is the index of the distinct value that causes the error, or None.
    """

    def __init__(self, fault: str, place: int | None = None) -> None:
        super().__init__(fault)
        self.fault, self.place = fault, place


@dataclass(frozen=True)
class Distinct:
    """Distinct values of a column, in order of first appearance."""

    texts: Sequence[str]
    codes: npt.NDArray[np.int64]
    """Index in `texts` of each row's value, of shape [N]."""

    @classmethod
    def of(cls, values: Sequence[str]) -> Distinct:
        """Find the distinct values of a column."""
        texts = dict.fromkeys(values)
        places = dict(zip(texts, range(len(texts)), strict=True))
        codes = np.fromiter(map(places.__getitem__, values), np.int64, len(values))
        return cls(list(texts), codes)

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of rows [D] with each distinct value."""
        return np.bincount(self.codes, minlength=len(self.texts))

    def row(self, place: int) -> int:
        """Return the index of the first row that contains the distinct value `texts[place]`."""
        return int((self.codes == place).argmax())


@dataclass(frozen=True)
class Reading:
    """Type and parsed values of a column, as returned by `recognize`."""

    kind: Kind
    missing: npt.NDArray[np.bool_]
    """Mask [D] of the distinct values that mark missing values."""
    evidence: str
    """Reason for this result, which is shown to the user."""
    numbers: Numbers | None = None
    """Numeric value of each distinct value [D], or NaN if it is missing; None for categories."""
    written: str = ""
    """Notation, as a key of NUMBERS or DATES; "" = Python's notation or ISO 8601."""
    unit: str = ""
    """Unit before or after every number, such as %."""
    words: tuple[str, ...] = ()
    """Sorted categories."""


# --- missing values -----------------------------------------------------------------------------


def is_missing(text: str, marks: Sequence[str] = ()) -> bool:
    """Return whether a text marks a missing value in any column; `marks` are custom markers.

    An integer marker such as -999 also has the form -999.0, as pandas and Parquet write it.
    """
    if text.lower() in MISSING or text in marks:
        return True
    shortened = _without_zeros(text) if marks else text
    return any(shortened == _without_zeros(mark) for mark in marks)


def _without_zeros(text: str) -> str:
    """Remove the decimals of an integer such as 9.0 or 9,00, but not from 9.000, which may be 9000.

    Returns any other text unchanged.
    """
    match = _INTEGER.fullmatch(text)
    return match[1] if match else text


def is_missing_number(text: str) -> bool:
    """Return whether a value marks a missing number or date."""
    return text.lower() in MISSING_NUMBER or _MISSING_FORM.fullmatch(text) is not None


# --- numbers ------------------------------------------------------------------------------------

_DIGITS = r"\d+|\d{1,3}(?:[ ']\d{3})+"
_EXPONENT = r"(?:[eE][+-]?\d+)?"
NUMBERS: Mapping[str, re.Pattern[str]] = {
    written: re.compile(rf"[+-]?(?=[.,]?\d)(?:{_DIGITS}{groups})?(?:{sign}\d*)?{_EXPONENT}")
    for written, sign, groups in (
        ("1234.5", r"\.", ""),
        ("1,234.5", r"\.", r"|\d{1,3}(?:,\d{2,3})*,\d{3}"),
        ("1234,5", ",", ""),
        ("1.234,5", ",", r"|\d{1,3}(?:\.\d{3})+"),
    )
}
"""Notations of numbers, each of which also accepts spaces and apostrophes between thousands."""
_POINT, _POINT_GROUPS, _COMMA, _COMMA_GROUPS = NUMBERS
CLOCK = "h:mm:ss"
_CLOCK_FORM = re.compile(
    r"(-)?(?:(\d+) days?,?)?\s*(?:\+?(\d{1,3}):(\d{2})(?::(\d{2}(?:\.\d+)?))?)?(?:\s*([ap])m)?",
    re.IGNORECASE,
)
_CURRENCY = r"[$€£¥₹₽₩₺₪฿₫₴₦¢]|(?:USD|EUR|GBP|CHF|JPY|CNY|CAD|AUD|SEK|NOK|DKK|PLN|BRL|INR)\b"
_UNIT = r"(?:[^\W\d_]|[%‰°µ$€£¥₹₽₩₺₪฿₫₴₦¢\"″′])[\w%‰°µ/²³·^.]{0,14}"
_AFFIXED = re.compile(
    rf"([+-]?)({_CURRENCY})?\s?([+-]?[.,]?\d(?:[\d.,' ]*\d)?[.,]?{_EXPONENT})"
    rf"\s?({_UNIT}(?: {_UNIT})?)?"
)
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "‒": "-", "－": "-", "﹣": "-", "’": "'", "ʼ": "'", "´": "'", "`": "'"}
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\u2002\u2003\t", " ")
)
_WRAPPED = re.compile(r"=?\"(.*)\"|'(.*)'?|\((.*\d.*)\)")


def _plain(text: str) -> float:
    """Parse a number in Python's notation, or return NaN."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if abs(number) <= MAX_NUMBER and "_" not in text else math.nan


def _parts(text: str) -> tuple[str, str]:
    """Split a value into number and unit, or return ("", "") if it contains no number."""
    text = text.translate(_SIGNS)
    sign = ""
    # Spreadsheets write ="12" and '12, and accountants write (12) for -12.
    if match := _WRAPPED.fullmatch(text):
        sign = "-" if match[3] is not None else ""
        text = next(part for part in match.groups() if part is not None).strip()
    if len(text) > 1 and text[-1] == "-" and text[-2].isdigit():  # SAP writes 12- for -12.
        sign, text = "-", text[:-1]
    match = _AFFIXED.fullmatch(text)
    if match is None:
        return "", ""
    outer, before, number, after = match.groups()
    return (sign or outer) + number, (before or after or "").casefold()


def _value(number: str, written: str) -> float:
    """Parse a number in the notation `written`, a key of NUMBERS, or return NaN."""
    if not NUMBERS[written].fullmatch(number):
        return math.nan
    bare = number.replace(" ", "").replace("'", "")
    comma = written in (_COMMA, _COMMA_GROUPS)
    return _plain(bare.replace(".", "").replace(",", ".") if comma else bare.replace(",", ""))


def _clock(text: str) -> float:
    """Convert a duration or time of day, such as 1 days 02:30:00, to seconds, or return NaN."""
    match = _CLOCK_FORM.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return math.nan
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups()[1:5])
    if match[6]:
        hours = hours % 12 + 12 * (match[6].lower() == "p")
    total = days * DAY + hours * 3600 + minutes * 60 + seconds
    return -total if match[1] else total


def parse_numbers(texts: Sequence[str], written: str, unit: str) -> Numbers:
    """Parse texts [D] as numbers with the given notation and unit; other texts become NaN."""
    if written == CLOCK:
        return np.array([_clock(text) for text in texts], np.float64)
    numbers = np.empty(len(texts))
    plain = not unit and written in (_POINT, _POINT_GROUPS)
    for place, text in enumerate(texts):
        value = _plain(text) if plain else math.nan
        if math.isnan(value):
            number, its_unit = _parts(text)
            value = _value(number, written) if its_unit == unit else math.nan
        numbers[place] = value
    return numbers


def decimal_separator(texts: Sequence[str]) -> str:
    """Return the decimal separator of a column, "." or ",", or "" if it is ambiguous."""
    signed = [text for text in texts if "," in text or "." in text]
    if not any("," in text for text in signed):
        return ""
    numbers = [number for number, _ in map(_parts, signed) if number]
    if 2 * len(numbers) < len(signed):  # Most values are words.
        return ""
    return _better({sign: _values(numbers, written) for sign, (_, written) in _SIGNED.items()})


def _values(numbers: Sequence[str], written: str) -> Numbers:
    return np.array([_value(number, written) for number in numbers], np.float64)


def _fits(numbers: Numbers) -> int:
    """Return the number of values that could be parsed."""
    return int((~np.isnan(numbers)).sum())


def _better(readings: Mapping[str, Numbers]) -> str:
    """Return the name of the reading with more valid values, or "" if both have the same number."""
    (one, first), (two, second) = readings.items()
    more = _fits(first) - _fits(second)
    return "" if not more else one if more > 0 else two


def _numbers(
    texts: Sequence[str], counts: npt.NDArray[np.int64], decimal: str, evidence: Callable[[], str]
) -> tuple[Numbers, str, str, str]:
    """Parse values as numbers, in the most frequent unit and the best-fitting notation.

    `decimal` is the setting `data.decimal`; `evidence` returns the decimal separator of other
    columns. Returns the numbers, the notation, the unit, and the evidence. Raises UnclearError if a
    comma could separate either decimals or thousands.
    """
    plain = np.array([_plain(text) for text in texts], np.float64)
    sign, why = {"point": ".", "comma": ","}.get(decimal, ""), "all values are numbers"
    if not np.isnan(plain).any() and sign != ",":
        by_points = sign != "." and any("." in text for text in texts)
        by_points = by_points and all(map(_GROUPED_BY_POINTS, texts))
        if not by_points or evidence() != ",":
            return plain, _POINT, "", why
    parts = [_parts(text) for text in texts]
    rows: Counter[str] = Counter()
    for (number, unit), count in zip(parts, counts.tolist(), strict=True):
        if number:
            rows[unit] += count
    unit = max(rows, key=lambda each: (rows[each], each == ""), default="")
    cores = [number if its_unit == unit else "" for number, its_unit in parts]
    found = {written: _values(cores, written) for written in NUMBERS}
    by_point, by_comma = found[_POINT_GROUPS], found[_COMMA_GROUPS]
    if not (sign := sign or _better({".": by_point, ",": by_comma})):
        unclear = (by_point != by_comma) & ~(np.isnan(by_point) & np.isnan(by_comma))
        first = next(iter(np.flatnonzero(unclear).tolist()), None)
        if first is not None and (seen := evidence()):
            sign, why = seen, f"the decimal separator is {seen!r}, as in other columns"
        elif first is None or _fits(found[_POINT]) == _fits(by_point):
            sign = "."
        else:
            raise UnclearError(
                f"ambiguous number {texts[first]!r}: the comma may separate decimals or thousands. "
                "Set data.decimal to comma or point.",
                first,
            )
    ungrouped, grouped = _SIGNED[sign]
    written = ungrouped if _fits(found[ungrouped]) == _fits(found[grouped]) else grouped
    read = np.flatnonzero(~np.isnan(found[grouped])).tolist()
    example = next((repr(texts[place]) for place in read if "," in cores[place]), "")
    if sign == "," and example and why == "all values are numbers":
        why = f"numbers with a decimal comma, such as {example}"
    elif written == _POINT_GROUPS:
        why = f"numbers with commas between thousands, such as {example}"
    return found[written], written, unit, why + (f", with unit {unit!r}" if unit else "")


_SIGNED = {".": (_POINT, _POINT_GROUPS), ",": (_COMMA, _COMMA_GROUPS)}
"""Notations for each decimal separator, without and with separators between thousands."""
_GROUPED_BY_POINTS = re.compile(r"[+-]?(?:0|[1-9]\d{0,2}(?:\.\d{3})*)").fullmatch
"""Match an integer that may have points between thousands, such as 950 and 1.234."""

# --- dates --------------------------------------------------------------------------------------

DATES = {"dd/mm/yyyy": "dmy", "mm/dd/yyyy": "mdy"}
"""Notations of dates, with their order of day, month, and year. Each notation also accepts ISO
8601."""
_NAME = r"[^\W\d_]{3,10}\.?"
_DATE_FORM = re.compile(
    rf"(?:[^\W\d_]{{2,10}},? )?(\d{{1,4}}|{_NAME})(?:[-/ ]|\.\s?)(\d{{1,2}}|{_NAME}),?"
    rf"(?:[-/ ]|\.\s?)(\d{{1,4}})\.?(?:[T,]?\s?(\S.*))?"
    r"|(\d{1,2})([a-zA-Z]{3})(\d{4})(?::(.+))?"
)
_TIME_FORM = re.compile(
    r"(\d{1,2})(?:[:.h](\d{2}))?(?:[:.](\d{2})(?:[.,](\d{1,9}))?)?\s*(?:([ap])\.?m\.?)?"
    r"\s*(?:Z|UTC|GMT|([+-])(\d{2}):?(\d{2}))?",
    re.IGNORECASE,
)
_MONTHS = {
    name: month
    for month, names in enumerate(
        ("jan ene gen", "feb fév fev", "mar mär mrz maa", "apr avr abr", "may mai mag maj mei",
         "jun juin giu", "jul juil lug", "aug aoû aou ago", "sep set", "oct okt ott out", "nov",
         "dec dez déc dic"), 1)
    for name in names.split()
}  # fmt: skip


def _date(text: str, order: str) -> float:
    """Convert a date, with or without a time, to days since 1970, or return NaN.

    Times without a time zone are UTC. `order` is "dmy", "mdy", or "" for ISO 8601 only.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        if not order:
            return math.nan
        match = _DATE_FORM.fullmatch(text)
        if match is None:
            return math.nan
        first, second, third, time = match.groups()[:4] if match[1] else match.groups()[4:]
        if len(first) == 4 and first.isdigit():
            year, month, day = first, second, third
        elif not first.isdigit() or (order == "mdy" and second.isdigit()):
            month, day, year = first, second, third
        else:
            day, month, year = first, second, third
        at = _TIME_FORM.fullmatch(time) if time else None
        if len(year) != 4 or (time and at is None):
            return math.nan
        if not month.isdigit():
            name = month.casefold()
            month = str(_MONTHS.get(name[:4], 0) or _MONTHS.get(name[:3], 0))
        try:
            moment = datetime(int(year), int(month), int(day))
            if at is not None:
                hour, minute, second = int(at[1]), int(at[2] or 0), int(at[3] or 0)
                if at[5]:
                    hour = hour % 12 + 12 * (at[5].lower() == "p")
                micro, zone = int((at[4] or "0").ljust(6, "0")[:6]), None
                if at[6]:
                    offset = timedelta(hours=int(at[7]), minutes=int(at[8]))
                    zone = timezone(offset * int(at[6] + "1"))
                moment = moment.replace(
                    hour=hour, minute=minute, second=second, microsecond=micro, tzinfo=zone
                )
        except (ValueError, OverflowError):
            return math.nan
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / DAY


def parse_dates(texts: Sequence[str], written: str) -> Numbers:
    """Convert dates [D] in the given format to days since 1970; other strings become NaN."""
    order = DATES.get(written, "")
    return np.array([_date(text, order) for text in texts], np.float64)


def date_order(texts: Sequence[str]) -> str:
    """Return the date order of a column, "dmy" or "mdy", or "" if its first rows are ambiguous."""
    return _better({order: parse_dates(texts[:4096], written) for written, order in DATES.items()})


def _dates(
    texts: Sequence[str], order: str, evidence: Callable[[], str]
) -> tuple[Numbers, str, str]:
    """Parse values as dates, and return days since 1970, the notation, and the evidence.

    Raises UnclearError if day and month could be swapped, or if all dates are invalid.
    """
    iso = parse_dates(texts, "")
    other = []  # These values have another date format, with a year of two or four digits.
    for place in np.flatnonzero(np.isnan(iso)).tolist():
        form = _DATE_FORM.fullmatch(texts[place])
        if form and (
            form[5] or len(form[3]) in (2, 4) or (len(form[1]) == 4 and form[1].isdigit())
        ):
            other.append(place)
    orders = {order: name for name, order in DATES.items()}
    parsed = {order: parse_dates(texts, name) for order, name in orders.items() if other}
    fits = {order: _fits(days) for order, days in parsed.items()}
    if len(other) > 1 and len(other) == len(texts) and not any(fits.values()):
        raise UnclearError(
            f"invalid date {texts[other[0]]!r}: expected a four-digit year and a valid day. "
            "Correct it, or add the column to data.categories if it contains words.",
            other[0],
        )
    if not other or set(fits.values()) == {_fits(iso)}:  # The other values are mistakes.
        return iso, "", "all values are ISO 8601 dates"
    both = ~np.isnan(parsed["dmy"] + parsed["mdy"])
    differ = np.flatnonzero(both & (parsed["dmy"] != parsed["mdy"])).tolist()
    best = _better(parsed)
    if order in parsed or not (best or differ):
        best, why = order if order in parsed else "dmy", "all values are dates"
    elif best:
        first = texts[np.flatnonzero(~np.isnan(parsed[best]) & ~both).tolist()[0]]
        why = f"dates in the order {orders[best]}, as {first!r} shows"
    elif all("." in texts[place] for place in differ):
        best, why = "dmy", "dates with points, which begin with the day"
    elif best := evidence():
        why = f"dates in the order {orders[best]}, as in other columns"
    else:
        raise UnclearError(
            f"ambiguous date {texts[differ[0]]!r}: it may begin with the day or the month. "
            "Set data.date-order to dmy or mdy.",
            differ[0],
        )
    return parsed[best], orders[best], why


# --- words --------------------------------------------------------------------------------------

_WHOLE = re.compile(r"([+-]?\d+)[.,]0+")
_YES, _NO = frozenset({"yes", "y", "true", "t", "1"}), frozenset({"no", "n", "false", "f", "0"})


def normalized(word: str) -> str:
    """Return a normalized form that all spellings of a word share.

    The form ignores case, whitespace, compatible Unicode forms, and the `.0` of integers. For
    example, "Yes" and "YES" are the same word, and so are "1" and "1.0".
    """
    word = " ".join(normalize("NFKC", word).casefold().split())
    match = _WHOLE.fullmatch(word)
    return match[1] if match else word


def merge_spellings(texts: Sequence[str], counts: Sequence[int], *, exact: bool) -> dict[str, str]:
    """Map each text to the most frequent spelling of the same word.

    With `exact`, only integers such as `1.0` and `1` are merged. Raises UnclearError if a column
    mixes several words for yes or no, or if a word is too long.
    """
    groups: dict[str, dict[str, int]] = {}
    numeric = not exact and not any(math.isnan(_plain(text)) for text in texts)
    for text, count in zip(texts, counts, strict=True):
        match = _WHOLE.fullmatch(text)
        key = (match[1] if match else text) if exact else normalized(text)
        if numeric:  # 1, 01, and 1e0 are the same integer.
            key = f"{_plain(text):.17g}"
        if len(text) > MAX_WORD:
            raise UnclearError(
                f"a value must have at most {MAX_WORD} characters, got {len(text):,}"
            )
        groups.setdefault(key, {})[text] = int(count)
    if not exact and len(groups) > 2 and groups.keys() <= _YES | _NO:
        mixed = ", ".join(repr(word) for word in sorted(texts))
        raise UnclearError(
            f"several words for yes or no: {mixed}. Use one word for yes and one word for no, or "
            "add the column to data.categories if all words are different categories."
        )
    words: dict[str, str] = {}
    for key, spellings in groups.items():
        # Always use the spelling 1, not 1.0, so that class names match across files.
        is_integer = key.lstrip("+-").isdecimal()
        word = key if is_integer else max(sorted(spellings), key=lambda text: spellings[text])
        words |= dict.fromkeys(spellings, word)
    return words


class Words:
    """Index of known words that also finds words in other spellings."""

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: place for place, name in enumerate(names)}
        keys = Counter(map(normalized, names))
        self._keys = {normalized(name): place for place, name in enumerate(names)}
        self._ambiguous = {key for key, count in keys.items() if count > 1}
        numbers = {_plain(name): place for place, name in enumerate(names)}
        distinct = len(numbers) == len(names) and not any(map(math.isnan, numbers))
        self._numbers = numbers if distinct else {}  # Compare numbers, so that 01 and 1e0 match 1.

    def place(self, word: str) -> int | None:
        """Return the index of a word, or None if it is unknown."""
        place = self._exact.get(word)
        if place is None and (key := normalized(word)) not in self._ambiguous:
            place = self._keys.get(key)
        return self._numbers.get(_plain(word)) if place is None else place


def label_text(value: object) -> str | None:
    """Convert a label from JSON or a data frame to text, or return None if its type is invalid."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return None


def class_words(
    labels: Sequence[str],
    path: Path | str,
    column: str,
    *,
    exact: bool = False,
    max_numbers: int = MANY_CLASSES,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the sorted classes, and the class of each distinct label.

    Integers are sorted numerically, and other labels alphabetically. With `exact`
    (`data.categories`), different spellings are different classes. Raises DataError if a label is
    unprintable, or if there are more than `max_numbers` different numbers, because such labels are
    measurements.
    """
    counts = Counter(labels)
    for name in sorted(counts):
        if not name.isprintable():
            raise DataError(f"{path}: label {name!r} must be printable text")
    try:
        words = merge_spellings(list(counts), list(counts.values()), exact=exact)
    except UnclearError as error:
        raise DataError(f"{path}: column {column!r}: {error.fault}") from None
    classes = set(words.values())
    if not exact and len(classes) > max_numbers:
        numbers = []
        for name in classes:
            core, _ = _parts(name)
            read = (_plain(name), _value(core, _POINT_GROUPS), _value(core, _COMMA_GROUPS))
            numbers += [value for value in read if not math.isnan(value)][:1]
        if len(numbers) > (1 - MAX_ODD) * len(classes):
            raise DataError(
                f"{path}: column {column!r}: expected classes, got {len(numbers)} different "
                f"numbers from {min(numbers):g} to {max(numbers):g}. Set data.task to regression "
                "to predict numbers, or to classification if each number is a class."
            )
    integers = all(name.isascii() and name.isdecimal() for name in classes)
    return tuple(sorted(classes, key=lambda name: (int(name), name) if integers else name)), words


FEATURE_ADVICE = (
    ". Correct the invalid values, leave them empty, list them in data.missing, or add the column "
    "to data.categories if its values are words."
)
"""Advice for a feature column that mixes numbers and words."""
MISSING_TARGET = "the target is missing. Remove the row."
TARGET_ADVICE = (
    ". Correct the invalid values, or remove their rows. If the values are classes, set data.task "
    "to classification."
)
"""Advice for a numeric target that contains words."""


# --- columns ------------------------------------------------------------------------------------


def recognize(
    values: Distinct,
    *,
    marks: Sequence[str] = (),
    words: bool = False,
    typed: bool = False,
    target: bool = False,
    decimal: str = "auto",
    order: str = "auto",
    decimal_evidence: Callable[[], str] = str,
    order_evidence: Callable[[], str] = str,
) -> Reading:
    """Recognize a column as numbers, dates, or words.

    Args:
        values: Distinct values of the column.
        marks: Custom missing-value markers.
        words: Whether to treat the values as words even if all of them are numbers
            (`data.categories`).
        typed: Whether the file declares the column numeric.
        target: Whether the column is a numeric target, whose values must not be missing.
        decimal: Setting `data.decimal`.
        order: Setting `data.date-order`.
        decimal_evidence: Function that returns the decimal separator in other columns, or "".
        order_evidence: Function that returns the date order in other columns, or "".

    Raises:
        UnclearError: If the column is ambiguous.
    """
    texts, counts = values.texts, values.counts()
    missing = np.array([is_missing(text, marks) for text in texts], bool)
    present = np.flatnonzero(~missing).tolist()
    places = [place for place in present if not is_missing_number(texts[place])]
    candidates, rows = [texts[place] for place in places], counts[places]
    attempts = ("number",) if typed else ("number", "date", CLOCK)
    error: UnclearError | None = None
    for attempt in attempts if candidates and not words else ():
        written = unit = ""
        try:
            if attempt == "number":
                sign = "point" if typed else decimal
                numbers, written, unit, why = _numbers(candidates, rows, sign, decimal_evidence)
            elif attempt == "date":
                numbers, written, why = _dates(candidates, order, order_evidence)
            else:
                numbers, written = parse_numbers(candidates, CLOCK, ""), CLOCK
                why = "all values are times"
        except UnclearError as unclear:
            raise UnclearError(unclear.fault, places[unclear.place or 0]) from None
        odd = np.isnan(numbers)
        if not odd.any():
            full = np.full(len(texts), math.nan)
            full[places] = numbers
            kind: Kind = "date" if attempt == "date" else "number"
            return Reading(
                kind, np.isnan(full), why, full, "" if written == _POINT else written, unit
            )
        if error is None and (fault := _fault(attempt, unit, numbers, candidates, rows)):
            fault += TARGET_ADVICE if target else FEATURE_ADVICE
            error = UnclearError(fault, places[int(odd.argmax())])
    if error is not None:
        raise error
    if target:
        return Reading("category", missing, "words")
    spelled = merge_spellings(
        [texts[place] for place in present], counts[present].tolist(), exact=words
    )
    names = tuple(sorted(set(spelled.values())))
    respelled = [f"{text!r} as {word!r}" for text, word in spelled.items() if text != word]
    why = "named in data.categories" if words else f"{len(names)} different words"
    if respelled:
        why += f"; read {', '.join(respelled[:5])}" + (" and more" if len(respelled) > 5 else "")
    return Reading("category", missing, why, words=names)


def _fault(
    attempt: str,
    unit: str,
    numbers: Numbers,
    texts: Sequence[str],
    rows: npt.NDArray[np.int64],
) -> str:
    """Describe the problem with a column that mixes numbers (or dates) and words, or return "".

    A few words among numbers are treated as mistakes. Many words are accepted as codes if the
    numbers are integers with few distinct, frequent values, as in 1, 2, 3, X. Many words among
    measurements are treated as unrecognized missing-value markers.
    """
    odd = np.isnan(numbers)
    num_numeric, num_odd, distinct = int(rows[~odd].sum()), int(rows[odd].sum()), _fits(numbers)
    if not num_numeric or (unit and distinct <= FEW):  # Accept words such as 1st and 2nd.
        return ""
    nouns = {"number": f"number up to ±{MAX_NUMBER:g}", "date": "date such as 2026-01-31"}
    noun = nouns.get(attempt, "time such as 12:30:00")
    examples = [repr(texts[place]) for place in np.flatnonzero(odd)[:3].tolist()]
    if num_odd < MAX_ODD * (num_numeric + num_odd):
        return f"{examples[0]} is not a {noun}, unlike almost all other values"
    fractions = bool((numbers[~odd] % 1 != 0).any())
    if num_numeric < FEW or not (
        fractions or distinct > MANY_CLASSES or 2 * distinct > num_numeric
    ):
        return ""
    return (
        f"{num_odd} of {num_numeric + num_odd} values, such as {', '.join(examples)[:100]}, "
        f"cannot be read as a {noun}, unlike the other values"
    )
