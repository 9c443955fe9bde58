"""Detector of phone numbers in one zone of folded text: candidates by shape, validated by `phonenumbers`.

With + or 00 a number must be possible; without, it must be valid in one of the regions and written as it is
dialled there. After a word like `phone` almost any number counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.gateway.guard.zones import PHONE_WORDS
from ridgeline.options import OptionError

Span = tuple[int, int]

_CANDIDATE = re.compile(
    r"(?<![0-9A-Za-z_+@#$€£%])(?<![0-9][-.:/])(?<![A-Za-z][-/.])"
    r"(?:\(?\+ ?|\(?00 ?)?(?:\([0-9]{1,5}\)|[0-9])"
    r"(?:(?: ?[-/] ?|\.| ?\( ?| ?\) ?[-./]? ?| {1,2})?[0-9]){5,17}"
    r"(?![0-9A-Za-z_%€$£]|[-.:/][0-9])"
)
_WORD_BEFORE = re.compile(PHONE_WORDS)
_WORD_REACH = 64
_SECOND = re.compile(r"(?:[0-9][^0-9]{0,3}){6}[0-9]( / )")  # a second number follows a complete one
# Numbers in a row, as in a table, or more single digits than a phone number has: all are skipped.
_TABLE = re.compile(r"[0-9]+(?: {1,2}[0-9]+){16,}|[0-9](?:[ ()./-]{1,3}[0-9](?![0-9])){17,}")
_DIGITS = re.compile(r"[0-9]+")
_DATE = re.compile(
    r"(?:(?:1[89]|20)[0-9]{2}[-./](?:0?[1-9]|1[0-2])[-./](?:0?[1-9]|[12][0-9]|3[01])"
    r"|(?:0?[1-9]|[12][0-9]|3[01])[-./](?:0?[1-9]|1[0-2])[-./](?:(?:1[89]|20)[0-9]{2}|[0-9]{2})"
    r"|(?:0?[1-9]|1[0-2])[-./](?:0?[1-9]|[12][0-9]|3[01])[-./](?:(?:1[89]|20)[0-9]{2}|[0-9]{2}))(?![0-9]|[-./][0-9])"
)
_MONTH = re.compile(r"(?:19|20)[0-9]{2}[-/](?:0[1-9]|1[0-2])")
_DECIMAL = re.compile(
    r"(?:0|[1-9][0-9]{0,3})\.[0-9]+(?![.0-9]|[-/ ][0-9]{2})|(?:0|[1-9][0-9]{0,3})\.[0-9]{5,}"
)
_REFERENCE = re.compile(r"[1-9][0-9]{2}-(?:[0-9]{7}|[0-9]{2}-[0-9]{4})")  # no country writes it like this
_DOTTED = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){2,4}")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+|[1-9][0-9]?(?: [0-9]{3})+")
# Countries where the trunk prefix that `phonenumbers` writes is usually left out.
_TRUNK_LEFT_OUT = frozenset(("IN", "BR", "CN", "MX", "AR", "TR", "KR"))


class PhoneDetector:
    def __init__(self, regions: Sequence[str], bare: bool) -> None:
        try:
            import phonenumbers
        except ImportError:
            raise OptionError(
                "guards: kind phone needs phonenumbers: pip install 'ridgeline[gateway]'"
            ) from None
        for region in regions:
            if region not in phonenumbers.SUPPORTED_REGIONS:
                raise OptionError(
                    f"guards: phone_regions: unknown region {region!r}; give two letters, such as GB"
                )
        self._library: Any = phonenumbers
        self._bare = bare
        # The length rules most regions out, then one match of the general shape does, at a hundredth of
        # the cost of a parse.
        self._shapes: dict[int, list[tuple[str, re.Pattern[str]]]] = {}
        for region in regions:
            self._learn(region)

    def _learn(self, region: str) -> None:
        metadata = self._library.PhoneMetadata.metadata_for_region(region)
        prefix = metadata.national_prefix or ""
        shape = re.compile(f"(?:{prefix})?(?:{metadata.general_desc.national_number_pattern})")
        lengths = set(metadata.general_desc.possible_length)
        for length in lengths | {length + len(prefix) for length in lengths}:
            self._shapes.setdefault(length, []).append((region, shape))

    def __call__(self, zone: str) -> Iterator[Span]:
        at = 0
        while (match := _CANDIDATE.search(zone, at)) is not None:
            table = _TABLE.match(zone, match.start())
            if table is not None:
                at = table.end()
                continue
            span = self._within(zone, match)
            if span is None:
                # The number may begin at a later group: after a date, a count or a year.
                later = _DIGITS.match(zone, match.start()) or _DIGITS.search(zone, match.start())
                at = later.end() if later is not None else match.end()
            else:
                yield span
                at = span[1]

    def _within(self, zone: str, match: re.Match[str]) -> Span | None:
        """The candidate, or its longest prefix that is a phone number."""
        start = match.start()
        if zone[start] == "(" and ")" not in match.group():
            start += 1
        before = zone[max(start - _WORD_REACH, 0) : start].lower()
        named = _WORD_BEFORE.search(before) is not None
        slash = _SECOND.search(zone, start, match.end())
        stop = match.end() if slash is None else slash.start(1)
        ends = [group.end() for group in _DIGITS.finditer(zone, start, stop)]
        for end in reversed(ends):
            text = zone[start:end]
            if zone[end : end + 1] in ("-", ".") and end < stop:
                continue  # part of another number
            if text.count("(") == text.count(")") and self._is_number(text, named):
                return start, end
        return None

    def _is_number(self, text: str, named: bool) -> bool:
        digits = "".join(_DIGITS.findall(text))
        if not 6 <= len(digits) <= 17 or _DATE.match(text) or _DECIMAL.match(text):
            return False
        if text.lstrip("(").startswith("+") or (text.startswith("00") and len(digits) >= 10):
            return self._is_international(digits.removeprefix("00"))
        if named:
            return len(digits) <= 15 and text.count(".") != 1 and not _MONTH.fullmatch(text)
        if (
            len(digits) < 9
            or len(digits) > 13
            or (_DOTTED.fullmatch(text) and "." in text[:4] and len(digits) > 11)
        ):
            return False
        if _REFERENCE.fullmatch(text) or (text.count(".") == 1 and not text.startswith("0")):
            return False
        written = not text.isdigit() or digits.startswith("0") or self._bare
        if not written or (_THOUSANDS.fullmatch(text) and not digits.startswith("0")):
            return False
        return any(
            shape.fullmatch(digits) and self._is_national(digits, region)
            for region, shape in self._shapes.get(len(digits), ())
        )

    def _is_international(self, digits: str) -> bool:
        library = self._library
        try:
            number = library.parse("+" + digits, None)
        except library.NumberParseException:
            return False
        return bool(library.is_possible_number(number))

    def _is_national(self, digits: str, region: str) -> bool:
        library = self._library
        try:
            number = library.parse(digits, region)
        except library.NumberParseException:
            return False
        if not library.is_valid_number_for_region(number, region):
            return False
        dialled = "".join(_DIGITS.findall(library.format_number(number, library.PhoneNumberFormat.NATIONAL)))
        return dialled == digits or (
            (region in _TRUNK_LEFT_OUT or region in ("US", "CA"))
            and (dialled.endswith(digits) or digits.endswith(dialled))
        )
