"""Detectors of numbers with a checksum: payment cards (Luhn), IBANs (mod 97); and of US social security.

Each takes one zone of folded text and returns the spans it found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ridgeline.gateway.guard.zones import PHONE_WORDS

Span = tuple[int, int]

_PHONE_WORD = re.compile(PHONE_WORDS)
_RUN = re.compile(r"(?<![0-9A-Za-z])[0-9]+(?:[-._ ][0-9]+| [- ] ?[0-9]+)*(?![0-9A-Za-z])")
_GROUP = re.compile(r"[0-9]+")
_ISSUERS = re.compile(r"1(?=[0-9]{14}\Z)|2[2-7]|3[0-9]|4|5[0-8]|6|8[16]|9[27]")
_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)

_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}[0-9]{2}(?=[ .-]{0,2}[A-Za-z0-9])")
_IBAN_CHARACTER = re.compile(r"[ .-]{0,2}([A-Za-z0-9])")
# Characters of an IBAN by country, from the SWIFT registry.
IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27,
    "BR": 29, "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28,
    "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23,
    "GL": 18, "GR": 27, "GT": 28, "HN": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26,
    "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21,
    "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MN": 20, "MR": 27, "MT": 31, "MU": 30, "NI": 28,
    "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29, "RO": 24, "RS": 22,
    "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "SO": 23, "ST": 25,
    "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20, "YE": 30,
}  # fmt: skip

_SSN = re.compile(
    r"(?<![0-9A-Za-z+])(?<![0-9][-.])(?<!\+[0-9] )(?<!\+[0-9]{2} )(?<!\+[0-9]{3} )"
    r"(?!000|666|9)[0-9]{3}([- .])(?!00)[0-9]{2}\1(?!0000)[0-9]{4}(?![0-9A-Za-z]|[-.][0-9])"
)


def cards(zone: str) -> Iterator[Span]:
    """13 to 19 digits, in groups or not, that begin like a card number and pass the Luhn check."""
    for run in _RUN.finditer(zone):
        groups = [group.span() for group in _GROUP.finditer(zone, run.start(), run.end())]
        if len(groups) > 19 and groups[-1][1] - groups[0][0] < 3 * len(groups):
            continue  # single digits in a row: a table
        first = 0
        while first < len(groups):
            last = _card_from(zone, groups, first)
            start = groups[first][0]
            if (
                last is not None
                and groups[last][1] - start == 13
                and _PHONE_WORD.search(zone[:start].lower())
            ):
                last = None  # as many digits as a phone number may have, after a word such as `phone`
            if last is None:
                first += 1
            else:
                yield start, groups[last][1]
                first = last + 1


def _card_from(zone: str, groups: list[Span], first: int) -> int | None:
    """The last group of the card that begins with this group; the longest match wins."""
    digits, found = "", None
    sizes: tuple[int, ...] = ()
    for at in range(first, len(groups)):
        start, end = groups[at]
        digits += zone[start:end]
        sizes += (end - start,)
        if len(digits) > 19:
            break
        if len(digits) >= 13 and _is_laid_out(sizes) and _ISSUERS.match(digits) and luhn(digits):
            found = at
    return found


def _is_laid_out(sizes: tuple[int, ...]) -> bool:
    return set(sizes) == {1} or all(size >= 3 for size in sizes[:-1])


def luhn(digits: str) -> bool:
    total = sum(map(int, digits[-1::-2])) + sum(_DOUBLED[int(digit)] for digit in digits[-2::-2])
    return total % 10 == 0 and digits.strip("0") != ""


def ibans(zone: str) -> Iterator[Span]:
    """Country code, check digits and that country's number of characters; mod 97 is 1."""
    for head in _IBAN.finditer(zone):
        length = IBAN_LENGTHS.get(zone[head.start() : head.start() + 2].upper())
        if length is None:
            continue
        characters, at = head.group(), head.end()
        while len(characters) < length:
            step = _IBAN_CHARACTER.match(zone, at)
            if step is None:
                break
            characters += step.group(1)
            at = step.end()
        ended = at == len(zone) or not (zone[at].isascii() and zone[at].isalnum())
        if len(characters) == length and ended and mod97(characters) == 1:
            yield head.start(), at


def mod97(iban: str) -> int:
    return int("".join(str(int(character, 36)) for character in iban[4:] + iban[:4])) % 97


def social_security(zone: str) -> Iterator[Span]:
    for match in _SSN.finditer(zone):
        if len(set(match.group()) - set("- .")) > 1:
            yield match.span()
