"""Recognition of the values in a column: missing values, numbers, dates, and words.

The rules apply to all distinct values of a column together, because one value decides how the
others are read: "13/02/2024" shows that "01/02/2024" begins with the day, and "2,5" shows that
"1,234" has a decimal comma. A column that can be read in two ways is refused, and the message names
the setting that decides. docs/data.md lists the rules for users.
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
"""Marks of a missing value in any column, in lower case: of pandas, R, SQL, and spreadsheets."""
MISSING_NUMBER = frozenset(
    """- -- --- – — . .. ... … * ** / _ ._ none nil undef undefined missing unknown unk blank
    (blank) empty nd n.d. n/d nr n.r. n.a. n.a s/d s.d. n/v n/k n/s nc n.c. n.n. k.a. k.a na. -nan
    nan(ind) -nan(ind) 1.#ind -1.#ind 1.#qnan -1.#qnan 0000-00-00 desconocido inconnu manquant
    unbekannt fehlt fehlend leer sconosciuto mancante onbekend desconhecido""".split()
) | {
    "not available", "no data", "not known", "not recorded", "not done", "not applicable",
    "no disponible", "non disponible", "sin dato", "keine angabe", "0000-00-00 00:00:00",
}  # fmt: skip
"""Further marks in columns that otherwise hold numbers or dates. Elsewhere they are words."""
_MISSING_FORM = re.compile(r"#[¡¿]?[^\W\d]\S*|err:\d+|\.[a-z]", re.IGNORECASE)
"""Errors of spreadsheets in all languages (#DIV/0!, #WERT!), and .A to .Z of SAS and Stata."""
MAX_NUMBER = 1e15
"""Squares of such numbers, and their sums, are finite."""
MAX_ODD = 0.1
"""If fewer values than this fraction are no numbers, in a column of numbers, they are mistakes."""
FEW = 5
"""Of fewer numbers, nothing is concluded about the words next to them."""
MANY_CLASSES = 20
"""A target of more different numbers is a measurement, not a class."""
MAX_WORD = 1000
"""Characters of a category or of a class."""
DAY = 86_400.0


class UnclearError(Exception):
    """Raised if a column can be read in two ways, or in none.

    `place` is the distinct value that shows it, or None.
    """

    def __init__(self, fault: str, place: int | None = None) -> None:
        super().__init__(fault)
        self.fault, self.place = fault, place


@dataclass(frozen=True)
class Distinct:
    """The distinct values of a column, in the order of their first rows."""

    texts: Sequence[str]
    codes: npt.NDArray[np.int64]
    """The place [N] of each row's value in `texts`."""

    @classmethod
    def of(cls, values: Sequence[str]) -> Distinct:
        """Number the distinct values of a column."""
        texts = dict.fromkeys(values)
        places = dict(zip(texts, range(len(texts)), strict=True))
        codes = np.fromiter(map(places.__getitem__, values), np.int64, len(values))
        return cls(list(texts), codes)

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of rows [D] of each distinct value."""
        return np.bincount(self.codes, minlength=len(self.texts))

    def row(self, place: int) -> int:
        """Return the first row of a distinct value."""
        return int((self.codes == place).argmax())


@dataclass(frozen=True)
class Reading:
    """The result of `recognize`."""

    kind: Kind
    missing: npt.NDArray[np.bool_]
    """Whether each distinct value [D] stands for a missing one."""
    why: str
    """The evidence, for the user."""
    numbers: Numbers | None = None
    """The number of each distinct value [D], NaN if it is missing; None for categories."""
    written: str = ""
    """How numbers or dates are written, a key of NUMBERS or DATES; "" = as Python and ISO 8601."""
    unit: str = ""
    """What every number is followed or preceded by, such as %."""
    words: tuple[str, ...] = ()
    """Categories, sorted."""


# --- missing values -----------------------------------------------------------------------------


def is_missing(text: str, marks: Sequence[str] = ()) -> bool:
    """Return whether a value is missing in a column of any kind; `marks` are the user's own."""
    return text.lower() in MISSING or text in marks


def is_missing_number(text: str) -> bool:
    """Return whether a value stands for a missing number."""
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
"""Notations of numbers. Blanks and apostrophes may separate thousands in each of them."""
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
    """Return a number as Python writes it, or NaN."""
    try:
        found = float(text)
    except ValueError:
        return math.nan
    return found if abs(found) <= MAX_NUMBER and "_" not in text else math.nan


def _parts(text: str) -> tuple[str, str]:
    """Split a value into its number, without other signs, and its unit; ("", "") for no number."""
    text = text.translate(_SIGNS)
    sign = ""
    if found := _WRAPPED.fullmatch(text):  # ="12" and '12 of spreadsheets, (12) of accounts
        sign = "-" if found[3] is not None else ""
        text = next(part for part in found.groups() if part is not None).strip()
    if len(text) > 1 and text[-1] == "-" and text[-2].isdigit():  # of SAP
        sign, text = "-", text[:-1]
    found = _AFFIXED.fullmatch(text)
    if found is None:
        return "", ""
    outer, before, number, after = found.groups()
    return (sign or outer) + number, (before or after or "").casefold()


def _value(number: str, written: str) -> float:
    """Return the value of a number in a notation, or NaN."""
    if not NUMBERS[written].fullmatch(number):
        return math.nan
    bare = number.replace(" ", "").replace("'", "")
    comma = written in (_COMMA, _COMMA_GROUPS)
    return _plain(bare.replace(".", "").replace(",", ".") if comma else bare.replace(",", ""))


def _clock(text: str) -> float:
    """Return the seconds of a duration or a time of day, such as 1 days 02:30:00, or NaN."""
    found = _CLOCK_FORM.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return math.nan
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups()[1:5])
    if found[6]:
        hours = hours % 12 + 12 * (found[6].lower() == "p")
    total = days * DAY + hours * 3600 + minutes * 60 + seconds
    return -total if found[1] else total


def parse_numbers(texts: Sequence[str], written: str, unit: str) -> Numbers:
    """Return numbers [D] in a notation and with a unit; NaN for a text that is none."""
    if written == CLOCK:
        return np.array([_clock(text) for text in texts], np.float64)
    found = np.empty(len(texts))
    plain = not unit and written in (_POINT, _POINT_GROUPS)
    for place, text in enumerate(texts):
        value = _plain(text) if plain else math.nan
        if math.isnan(value):
            number, own = _parts(text)
            value = _value(number, written) if own == unit else math.nan
        found[place] = value
    return found


def decimal_sign(texts: Sequence[str]) -> str:
    """Return the decimal sign, "." or ",", that a column's values show beyond doubt, or ""."""
    signed = [text for text in texts if "," in text or "." in text]
    if not any("," in text for text in signed):
        return ""
    numbers = [number for number, _ in map(_parts, signed) if number]
    if 2 * len(numbers) < len(signed):  # words
        return ""
    return _better({sign: _values(numbers, written) for sign, (_, written) in _SIGNED.items()})


def _values(numbers: Sequence[str], written: str) -> Numbers:
    return np.array([_value(number, written) for number in numbers], np.float64)


def _fits(numbers: Numbers) -> int:
    """Return how many values were read."""
    return int((~np.isnan(numbers)).sum())


def _better(readings: Mapping[str, Numbers]) -> str:
    """Return the one of two readings that fits more values, or "" if both fit alike."""
    (one, first), (two, second) = readings.items()
    more = _fits(first) - _fits(second)
    return "" if not more else one if more > 0 else two


def _numbers(
    texts: Sequence[str], counts: npt.NDArray[np.int64], decimal: str, evidence: Callable[[], str]
) -> tuple[Numbers, str, str, str]:
    """Read values as numbers, in the unit of most rows and in the notation that fits.

    Returns the numbers, the notation, the unit, and the evidence. `decimal` is the setting, and
    `evidence` returns the decimal sign that other columns show. Raises UnclearError if a comma or a
    point may separate decimals as well as thousands.
    """
    plain = np.array([_plain(text) for text in texts], np.float64)
    sign, why = {"point": ".", "comma": ","}.get(decimal, ""), "all are numbers"
    if not np.isnan(plain).any() and sign != ",":
        by_points = sign != "." and all(map(_GROUPED_BY_POINTS, texts))
        if not by_points or evidence() != ",":
            return plain, _POINT, "", why
    parts = [_parts(text) for text in texts]
    rows: Counter[str] = Counter()
    for (number, unit), count in zip(parts, counts.tolist(), strict=True):
        if number:
            rows[unit] += count
    unit = max(rows, key=lambda each: (rows[each], each == ""), default="")
    cores = [number if own == unit else "" for number, own in parts]
    found = {written: _values(cores, written) for written in NUMBERS}
    by_point, by_comma = found[_POINT_GROUPS], found[_COMMA_GROUPS]
    if not (sign := sign or _better({".": by_point, ",": by_comma})):
        unclear = (by_point != by_comma) & ~(np.isnan(by_point) & np.isnan(by_comma))
        first = next(iter(np.flatnonzero(unclear).tolist()), None)
        if first is not None and (seen := evidence()):
            sign, why = seen, f"the decimal sign is {seen!r}, as in other columns"
        elif first is None or _fits(found[_POINT]) == _fits(by_point):
            sign = "."
        else:
            raise UnclearError(
                f"{texts[first]!r} may have a decimal comma or a comma between thousands. "
                "Set data.decimal to comma or to point",
                first,
            )
    ungrouped, grouped = _SIGNED[sign]
    written = ungrouped if _fits(found[ungrouped]) == _fits(found[grouped]) else grouped
    read = np.flatnonzero(~np.isnan(found[grouped])).tolist()
    example = next((repr(texts[place]) for place in read if "," in cores[place]), "")
    if sign == "," and example and why == "all are numbers":
        why = f"numbers with a decimal comma, such as {example}"
    elif written == _POINT_GROUPS:
        why = f"numbers with commas between thousands, such as {example}"
    return found[written], written, unit, why + (f", each with {unit!r}" if unit else "")


_SIGNED = {".": (_POINT, _POINT_GROUPS), ",": (_COMMA, _COMMA_GROUPS)}
"""The notations of numbers with each decimal sign: without and with groups of thousands."""
_GROUPED_BY_POINTS = re.compile(r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+").fullmatch

# --- dates --------------------------------------------------------------------------------------

DATES = {"dd/mm/yyyy": "dmy", "mm/dd/yyyy": "mdy"}
"""Notations of dates, by the order of day, month, and year. ISO 8601 is read in each of them."""
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
    """Return the days since 1970 of a date, with or without a time, or NaN.

    A time without a zone is taken as UTC. `order` is that of day, month, and year, or "" for
    ISO 8601 alone.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        if not order:
            return math.nan
        found = _DATE_FORM.fullmatch(text)
        if found is None:
            return math.nan
        first, second, third, time = found.groups()[:4] if found[1] else found.groups()[4:]
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
                    away = timedelta(hours=int(at[7]), minutes=int(at[8]))
                    zone = timezone(away * int(at[6] + "1"))
                moment = moment.replace(
                    hour=hour, minute=minute, second=second, microsecond=micro, tzinfo=zone
                )
        except (ValueError, OverflowError):
            return math.nan
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / DAY


def parse_dates(texts: Sequence[str], written: str) -> Numbers:
    """Return the days since 1970 [D] of dates in a notation; NaN for a text that is no date."""
    order = DATES.get(written, "")
    return np.array([_date(text, order) for text in texts], np.float64)


def date_order(texts: Sequence[str]) -> str:
    """Return the order, "dmy" or "mdy", that a column's first dates show beyond doubt, or ""."""
    return _better({own: parse_dates(texts[:4096], written) for written, own in DATES.items()})


def _dates(
    texts: Sequence[str], order: str, evidence: Callable[[], str]
) -> tuple[Numbers, str, str]:
    """Read values as dates: the days since 1970, the notation, and the evidence.

    Raises UnclearError if the day and the month may be exchanged.
    """
    iso = parse_dates(texts, "")
    rest = []  # in the form of a date, with a year of two digits or four
    for place in np.flatnonzero(np.isnan(iso)).tolist():
        form = _DATE_FORM.fullmatch(texts[place])
        if form and (
            form[5] or len(form[3]) in (2, 4) or (len(form[1]) == 4 and form[1].isdigit())
        ):
            rest.append(place)
    found = {own: parse_dates(texts, written) for written, own in DATES.items()} if rest else {}
    fits = {own: _fits(days) for own, days in found.items()}
    if len(rest) > 1 and len(rest) == len(texts) and not any(fits.values()):
        raise UnclearError(
            f"{texts[rest[0]]!r} looks like a date, expected a year of four digits and a day that "
            "exists. Correct it, or name the column in data.categories if it holds words",
            rest[0],
        )
    if not rest or set(fits.values()) == {_fits(iso)}:  # the others are mistakes
        return iso, "", "all are dates as ISO 8601 writes them"
    both = ~np.isnan(found["dmy"] + found["mdy"])
    differ = np.flatnonzero(both & (found["dmy"] != found["mdy"])).tolist()
    names, shown = {own: written for written, own in DATES.items()}, _better(found)
    if order in found or not (shown or differ):
        shown, why = order if order in found else "dmy", "all are dates"
    elif shown:
        first = texts[np.flatnonzero(~np.isnan(found[shown]) & ~both).tolist()[0]]
        why = f"dates in the order {names[shown]}, as {first!r} shows"
    elif all("." in texts[place] for place in differ):
        shown, why = "dmy", "dates with points, which begin with the day"
    elif shown := evidence():
        why = f"dates in the order {names[shown]}, as in other columns"
    else:
        raise UnclearError(
            f"{texts[differ[0]]!r} may begin with the day or with the month. "
            "Set data.date-order to dmy or to mdy",
            differ[0],
        )
    return found[shown], names[shown], why


# --- words --------------------------------------------------------------------------------------

_WHOLE = re.compile(r"([+-]?\d+)[.,]0+")
_YES, _NO = frozenset({"yes", "y", "true", "t", "1"}), frozenset({"no", "n", "false", "f", "0"})


def key_of(word: str) -> str:
    """Return what the spellings of a word have in common.

    Case, blanks, and compatible Unicode forms do not count, and neither does the `.0` of a whole
    number: Yes and YES are the same word, and so are 1 and 1.0.
    """
    word = " ".join(normalize("NFKC", word).casefold().split())
    found = _WHOLE.fullmatch(word)
    return found[1] if found else word


def merged(texts: Sequence[str], counts: Sequence[int], *, exact: bool) -> dict[str, str]:
    """Return the word that each spelling stands for: the most frequent spelling of the same key.

    With `exact`, only `1.0` and `1` are the same. Raises UnclearError if several words for yes or
    no are mixed, or if a word is too long.
    """
    groups: dict[str, dict[str, int]] = {}
    numeric = not exact and not any(math.isnan(_plain(text)) for text in texts)
    for text, count in zip(texts, counts, strict=True):
        found = _WHOLE.fullmatch(text)
        key = (found[1] if found else text) if exact else key_of(text)
        if numeric:  # 1, 01, and 1e0
            key = f"{_plain(text):.17g}"
        if len(text) > MAX_WORD:
            raise UnclearError(
                f"holds a text of {len(text):,} characters, expected at most {MAX_WORD}"
            )
        groups.setdefault(key, {})[text] = int(count)
    if not exact and len(groups) > 2 and groups.keys() <= _YES | _NO:
        said = ", ".join(repr(word) for word in sorted(texts))
        raise UnclearError(
            f"holds several words for yes and no: {said}. Write one word for each, or name the "
            "column in data.categories if all of them differ"
        )
    words: dict[str, str] = {}
    for key, spellings in groups.items():
        # 1 stands for 1.0, whichever is more frequent: the classes of two files are then the same.
        whole = key.lstrip("+-").isdecimal()
        word = key if whole else max(sorted(spellings), key=lambda text: spellings[text])
        words |= dict.fromkeys(spellings, word)
    return words


class Words:
    """Known words, of which other spellings are found as well."""

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: place for place, name in enumerate(names)}
        keys = Counter(map(key_of, names))
        self._keys = {key_of(name): place for place, name in enumerate(names)}
        self._unclear = {key for key, count in keys.items() if count > 1}
        numbers = {_plain(name): place for place, name in enumerate(names)}
        distinct = len(numbers) == len(names) and not any(map(math.isnan, numbers))
        self._numbers = numbers if distinct else {}  # 01 and 1e0 are then the number 1

    def place(self, word: str) -> int | None:
        """Return the place of a word among the known ones, or None if it is unknown."""
        found = self._exact.get(word)
        if found is None and (key := key_of(word)) not in self._unclear:
            found = self._keys.get(key)
        return self._numbers.get(_plain(word)) if found is None else found


def label_of(value: object) -> str | None:
    """Return a label of JSON or of a data frame as text, or None if it cannot be a label."""
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
    """Return the classes in order, and the class of each distinct label.

    Numbers are ordered by size, other labels alphabetically. Set `exact` if spellings differ on
    purpose (`data.categories`). Raises DataError for a label that cannot be shown, and for more
    than `max_numbers` different numbers, which are measurements.
    """
    counts = Counter(labels)
    for name in sorted(counts):
        if not name.isprintable():
            raise DataError(f"{path}: the label {name!r} is not printable")
    try:
        words = merged(list(counts), list(counts.values()), exact=exact)
    except UnclearError as error:
        raise DataError(f"{path}: column {column!r}: {error.fault}") from None
    found = set(words.values())
    if not exact and len(found) > max_numbers:
        known = []
        for name in found:
            core, _ = _parts(name)
            read = (_plain(name), _value(core, _POINT_GROUPS), _value(core, _COMMA_GROUPS))
            known += [value for value in read if not math.isnan(value)][:1]
        if len(known) > (1 - MAX_ODD) * len(found):
            raise DataError(
                f"{path}: column {column!r} holds {len(known)} different numbers from "
                f"{min(known):g} to {max(known):g}, expected classes: fedhet classifies and does "
                "not predict numbers. Replace the numbers by classes, or name the column in "
                "data.categories if each number is a class"
            )
    whole = all(name.isascii() and name.isdecimal() for name in found)
    return tuple(sorted(found, key=lambda name: (int(name), name) if whole else name)), words


# --- columns ------------------------------------------------------------------------------------


def recognize(
    values: Distinct,
    *,
    marks: Sequence[str] = (),
    words: bool = False,
    typed: bool = False,
    decimal: str = "auto",
    order: str = "auto",
    decimal_evidence: Callable[[], str] = str,
    order_evidence: Callable[[], str] = str,
) -> Reading:
    """Read a column as numbers, dates, or else words.

    `marks` are further marks of missing values. With `words`, the column holds words even if all of
    them are numbers (`data.categories`); with `typed`, the file says that it holds numbers.
    `decimal` and `order` are the settings `data.decimal` and `data.date-order`, and the functions
    return what other columns of the file show. Raises UnclearError if the column is in doubt.
    """
    texts, counts = values.texts, values.counts()
    missing = np.array([is_missing(text, marks) for text in texts], bool)
    there = np.flatnonzero(~missing).tolist()
    places = [place for place in there if not is_missing_number(texts[place])]
    given, rows = [texts[place] for place in places], counts[places]
    attempts = ("number",) if typed else ("number", "date", CLOCK)
    doubt: UnclearError | None = None
    for attempt in attempts if given and not words else ():
        written = unit = ""
        try:
            if attempt == "number":
                sign = "point" if typed else decimal
                numbers, written, unit, why = _numbers(given, rows, sign, decimal_evidence)
            elif attempt == "date":
                numbers, written, why = _dates(given, order, order_evidence)
            else:
                numbers, written, why = parse_numbers(given, CLOCK, ""), CLOCK, "all are times"
        except UnclearError as error:
            raise UnclearError(error.fault, places[error.place or 0]) from None
        odd = np.isnan(numbers)
        if not odd.any():
            full = np.full(len(texts), math.nan)
            full[places] = numbers
            kind: Kind = "date" if attempt == "date" else "number"
            return Reading(
                kind, np.isnan(full), why, full, "" if written == _POINT else written, unit
            )
        if doubt is None and (fault := _doubt(attempt, unit, numbers, given, rows)):
            doubt = UnclearError(fault, places[int(odd.argmax())])
    if doubt is not None:
        raise doubt
    spelled = merged([texts[place] for place in there], counts[there].tolist(), exact=words)
    names = tuple(sorted(set(spelled.values())))
    others = [f"{text!r} as {word!r}" for text, word in spelled.items() if text != word]
    why = "named in data.categories" if words else f"{len(names)} different words"
    if others:
        why += f"; read {', '.join(others[:5])}" + (" and others" if len(others) > 5 else "")
    return Reading("category", missing, why, words=names)


def _doubt(
    attempt: str,
    unit: str,
    numbers: Numbers,
    given: Sequence[str],
    rows: npt.NDArray[np.int64],
) -> str:
    """Return the fault of a column of numbers (or dates) and words, or "" for a column of words.

    A few words among numbers are mistakes. Many words are codes if the numbers next to them are
    few, whole, and frequent (1, 2, 3, X); next to measurements they are unknown marks.
    """
    odd = np.isnan(numbers)
    numeric, others, different = int(rows[~odd].sum()), int(rows[odd].sum()), _fits(numbers)
    if not numeric or (unit and different <= FEW):  # such as 1st, next to 2nd
        return ""
    nouns = {"number": f"number up to {MAX_NUMBER:g} either way", "date": "date such as 2026-01-31"}
    noun = nouns.get(attempt, "time such as 12:30:00")
    few = [repr(given[place]) for place in np.flatnonzero(odd)[:3].tolist()]
    if others < MAX_ODD * (numeric + others):
        return (
            f"{few[0]} is not a {noun}, unlike nearly all others. Correct it, leave it empty, list "
            "it in data.missing, or name the column in data.categories if its values are words"
        )
    fractions = bool((numbers[~odd] % 1 != 0).any())
    if numeric < FEW or not (fractions or different > MANY_CLASSES or 2 * different > numeric):
        return ""
    return (
        f"{others} of {numeric + others} values, such as {', '.join(few)[:100]}, are not a {noun}, "
        "and the others are. Correct them, leave them empty, list them in data.missing, or name "
        "the column in data.categories if its values are words"
    )
