"""Scanner: all findings in a text, whole or in pieces; a text without findings costs almost nothing.

A cheap search for what the detectors need (digits in a row, an @, a long word, a word like `password`) finds
candidates; the detectors then read the zone around each one. `ScannedText` does the same for a text that
arrives in pieces: it holds back only the zone that may still grow.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ridgeline.gateway.guard.addresses import emails, ips
from ridgeline.gateway.guard.fold import fold
from ridgeline.gateway.guard.numbers import cards, ibans, social_security
from ridgeline.gateway.guard.secrets import secrets
from ridgeline.gateway.guard.zones import (
    LONGEST,
    OVERLAP,
    PHONE_WORDS,
    SECRET_WORDS,
    WINDOW,
    first_cut,
    last_cut,
)

Detector = Callable[[str], Iterable[tuple[int, int]]]


Replace = Callable[[str, str], str]  # kind and value → the replacement


class Finding(NamedTuple):
    start: int
    end: int
    kind: str


# A finding inside another one is dropped; of two that overlap, the kind named first here is kept and covers
# both.
_RANK = {kind: rank for rank, kind in enumerate(("secret", "iban", "card", "email", "ip", "ssn", "phone"))}

_DIGITS_NEEDED = {"card": 13, "iban": 2, "ssn": 9, "phone": 6}

# The class of every byte: a digit, a letter or _ -, or the byte itself.
_DIGITS = bytes(0x30 if chr(code) in string.digits else code for code in range(256))
_WORDLIKE = bytes(
    0x61 if chr(code) in string.ascii_letters + string.digits + "_-" else 0x20 for code in range(256)
)
_LONG = b"a" * 16
_LONG_WORD = re.compile(rb"(?<!a)a{16}")
_NUMBER = re.compile(rb"(?<!0)0(?=(?:[ .,/():_-]{0,3}0){3})")
_ACCOUNT = re.compile(
    rb"00(?<=[A-Za-z][A-Za-z]00)(?=[ .-]{0,2}[A-Za-z0])"
)  # begins with a literal, which is found fast
_RARE = re.compile(rb"Q~|-----BEGIN")
_AT = re.compile(rb"@|%40")
_COLONS = re.compile(r":[0-9a-f]{0,4}:")
_WORD = re.compile(SECRET_WORDS)
_TELLING = re.compile(f"{SECRET_WORDS}|{PHONE_WORDS}")
_WORD_STEMS = (
    "pass", "pwd", "pw", "secret", "token", "key", "credential", "auth", "bearer", "basic", "kennwort",
    "contrase", "haslo", "hasło", "wachtwoord", "senord", "парол", "密", "口令", "パスワード", "비밀번호",
    "senha", "clave", "salt", "hmac", "psw",
)  # fmt: skip


class OutOfTime(Exception):
    """The check exceeded its time limit."""


class Budget:
    """The limit of one check, in CPU time: the same text takes as long on a busy machine as on an idle one.

    Tested between zones: the work for a zone is bounded.
    """

    def __init__(self, seconds: float = float("inf"), clock: Callable[[], float] = time.thread_time) -> None:
        self._seconds = seconds
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        self._until = self._clock() + self._seconds

    def check(self) -> None:
        if self._clock() > self._until:
            raise OutOfTime


UNBOUNDED = Budget()


class Scanner:
    """`detectors` by kind; `lines`: patterns over whole lines, by kind (zones are lines then)."""

    def __init__(
        self,
        detectors: dict[str, Detector],
        lines: dict[str, re.Pattern[str]] | None = None,
        allow: Callable[[str], bool] = lambda value: False,
    ) -> None:
        self._detectors = detectors
        self._lines = lines or {}
        self._allow = allow

    def findings(self, text: str, budget: Budget = UNBOUNDED) -> list[Finding]:
        return self.within(fold(text), 0, len(text), budget)

    def within(self, text: str, start: int, stop: int, budget: Budget = UNBOUNDED) -> list[Finding]:
        """Findings in `text[start:stop]`, folded; start and stop are cuts or the text's ends."""
        found: list[Finding] = []
        at = start
        for hint in self._hints(text, start, stop):
            if hint < at:
                continue
            budget.check()
            begin = self.last_cut(text, at, hint) or at
            end = self._first_cut(text, hint, stop) or stop
            while end - begin >= LONGEST:
                part, cut = self.forced(text, begin)
                found += part
                begin = cut
            found += self.zone(text, begin, end)
            at = end
        return found

    def forced(self, text: str, begin: int) -> tuple[list[Finding], int]:
        """Findings at the beginning of a zone that is too long, and where to continue."""
        part = self.zone(text, begin, begin + LONGEST)
        cut = begin + LONGEST - OVERLAP
        for finding in part:
            if finding.start < cut < finding.end:
                # At least halfway, or a text full of findings would be scanned letter by letter.
                cut = finding.start if finding.start - begin > LONGEST // 2 else finding.end
        return [finding for finding in part if finding.end <= cut], cut

    def replaced(self, text: str, replace: Replace, context: str = "", budget: Budget = UNBOUNDED) -> str:
        """A whole text with its findings replaced; `context` as in ScannedText."""
        found = self.findings(context + text, budget)
        if not found:
            return text
        out, at, hidden = [], 0, len(context)
        for start, end, kind in found:
            start, end = max(start - hidden, 0), max(end - hidden, 0)
            if start < end:
                out += [text[at:start], replace(kind, text[start:end])]
                at = end
        out.append(text[at:])
        return "".join(out)

    def zone(self, text: str, begin: int, end: int) -> list[Finding]:
        zone = text[begin:end]
        digits = sum(map(zone.count, "0123456789"))
        found: list[Finding] = []
        for kind, detector in self._detectors.items():
            if digits >= _DIGITS_NEEDED.get(kind, 0):
                if kind == "phone" and found:
                    zone = _masked(zone, found, begin)
                found += [Finding(begin + start, begin + stop, kind) for start, stop in detector(zone)]
        for kind, pattern in self._lines.items():
            found += [
                Finding(begin + m.start(), begin + m.end(), kind) for m in pattern.finditer(zone) if m.group()
            ]
        if not found:
            return found
        return [finding for finding in _merged(found) if not self._allow(text[finding.start : finding.end])]

    def last_cut(self, text: str, start: int, stop: int) -> int | None:
        if not self._lines:
            return last_cut(text, start, stop)
        newline = text.rfind("\n", start, stop)
        while newline >= 0 and last_cut(text, newline, newline + 1) is None:
            newline = text.rfind("\n", start, newline)
        return newline + 1 if newline >= 0 else None

    def _first_cut(self, text: str, start: int, stop: int) -> int | None:
        if not self._lines:
            return first_cut(text, start, stop)
        newline = text.find("\n", start, stop)
        while newline >= 0 and last_cut(text, newline, newline + 1) is None:
            newline = text.find("\n", newline + 1, stop)
        return newline + 1 if newline >= 0 else None

    def _hints(self, text: str, start: int, stop: int) -> Iterable[int]:
        """Candidate positions in order. Every zone with a finding has at least one."""
        if self._lines:
            return _line_starts(text, start, stop)
        hints: list[int] = []
        piece = text if start == 0 and stop == len(text) else text[start:stop]
        data = piece.encode("ascii", "replace")
        if _LONG in (words := data.translate(_WORDLIKE)):
            hints += [match.start() for match in _LONG_WORD.finditer(words)]
        digits = data.translate(_DIGITS)
        if b"0" in digits:
            hints += [match.start() for match in _NUMBER.finditer(digits)]
            hints += [match.start() for match in _ACCOUNT.finditer(digits)]
        if b"~" in data or b"-----BEGIN" in data:
            hints += [match.start() for match in _RARE.finditer(data)]
        if b"@" in data or b"%40" in data:
            hints += [match.start() for match in _AT.finditer(data)]
        colon = b":" in data
        if colon and (b"::" in data or data.count(b":") >= 7):
            hints += [match.start() for match in _COLONS.finditer(piece.lower())]
        if "secret" in self._detectors and (colon or b"=" in data or b"0" in digits):
            lowered = piece.lower()
            if any(stem in lowered for stem in _WORD_STEMS):
                hints += [min(match.start(), len(piece) - 1) for match in _WORD.finditer(lowered)]
        return sorted(start + hint for hint in hints)


class ScannedText:
    """One text in pieces: `feed` returns the text that is final, findings replaced; `finish` the rest.

    `context` is text before it that is not part of it, such as the name of the field.
    """

    def __init__(
        self, scanner: Scanner, replace: Replace, context: str = "", budget: Budget = UNBOUNDED
    ) -> None:
        self._scanner = scanner
        self._replace = replace
        self._budget = budget
        self._raw = context
        self._folded = fold(context)
        self._done = 0  # text before this was returned; some of it is kept because cuts look back
        self._tested = 0  # no cut lies between done and here
        self._hidden = len(context)

    @property
    def holds(self) -> bool:
        return len(self._raw) > max(self._done, self._hidden)

    def feed(self, piece: str) -> str:
        self._raw += piece
        self._folded += fold(piece)
        out = ""
        cut = self._scanner.last_cut(self._folded, max(self._tested, self._done), len(self._folded))
        if cut is not None:
            out = self._out(self._scanner.within(self._folded, self._done, cut, self._budget), cut)
        self._tested = len(self._folded)
        while len(self._folded) - self._done >= LONGEST:
            found, cut = self._scanner.forced(self._folded, self._done)
            out += self._out(found, cut)
        self._forget()
        return out

    def finish(self) -> str:
        end = len(self._folded)
        return self._out(self._scanner.within(self._folded, self._done, end, self._budget), end)

    def _out(self, found: list[Finding], cut: int) -> str:
        pieces = []
        at = self._done
        for start, end, kind in found:
            start, end = max(start, self._hidden), max(end, self._hidden)
            if start < end:
                pieces += [
                    self._raw[max(at, self._hidden) : start],
                    self._replace(kind, self._raw[start:end]),
                ]
                at = end
        pieces.append(self._raw[max(at, self._hidden) : cut])
        self._done = cut
        return "".join(pieces)

    def _forget(self) -> None:
        gone = self._done - WINDOW
        if gone > WINDOW:
            self._raw, self._folded = self._raw[gone:], self._folded[gone:]
            self._done -= gone
            self._tested -= gone
            self._hidden = max(self._hidden - gone, 0)


def _merged(found: list[Finding]) -> list[Finding]:
    """In order and without overlaps; two that overlap become one that covers both."""
    found.sort(key=lambda finding: (finding.start, -finding.end))
    kept = [found[0]]
    for finding in found[1:]:
        last = kept[-1]
        if finding.start >= last.end:
            kept.append(finding)
        elif finding.end > last.end or _rank(finding.kind) < _rank(last.kind):
            kind = min(last.kind, finding.kind, key=_rank)
            kept[-1] = Finding(last.start, max(last.end, finding.end), kind)
    return kept


def _masked(zone: str, found: list[Finding], begin: int) -> str:
    """Drop findings inside a number with a checksum: digits of a card are not a phone number."""
    for finding in found:
        start, end = finding.start - begin, finding.end - begin
        zone = zone[:start] + "\n" * (end - start) + zone[end:]
    return zone


def _rank(kind: str) -> int:
    return _RANK.get(kind, len(_RANK))


def _line_starts(text: str, start: int, stop: int) -> Iterator[int]:
    at = start
    while at < stop:
        yield at
        newline = text.find("\n", at, stop)
        if newline < 0:
            return
        at = newline + 1


def context_of(name: str) -> str:
    """A field's name as context of its value, if the name describes the value."""
    return f"{name} = " if name and _TELLING.search(name.lower()) else ""


def built_in(kinds: Iterable[str], phone: Detector | None) -> dict[str, Detector]:
    """The detectors of these kinds, without patterns and NER."""
    every: dict[str, Detector] = {
        "secret": secrets, "iban": ibans, "card": cards, "email": emails, "ip": ips, "ssn": social_security,
    }  # fmt: skip
    if phone is not None:
        every["phone"] = phone
    wanted = set(kinds)
    return {kind: detector for kind, detector in every.items() if kind in wanted}
