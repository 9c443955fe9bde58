"""ToolInput: turns a call's arguments, as the model writes them, into a valid JSON object.

A tool_use block's input is an object, and a stream cannot take back what it has sent. So text is passed on
only up to points from which the object can be closed, and at the end it is closed. Invalid JSON is kept as
text, in a member named `invalid_json`. The same for streamed and whole answers, in the server and gateway.
"""

from __future__ import annotations

import enum
import re

import msgspec

MAX_DEPTH = 100  # clients' parsers stop at about twice that
MAX_NUMBER_CHARACTERS = 1000  # Python parses no integer of more than 4300 digits
INVALID = "invalid_json"

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_RUN = re.compile(r"[^\s,\]}]+")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB]..\\u[dD][c-fC-F]..)')
_HEX = re.compile(r"(?:\\u[0-9a-fA-F]{4}){2}")
_CLOSER = {"{": "}", "[": "]"}


class _At(enum.Enum):
    START = "before the object"
    FIRST_KEY = "after {"
    KEY = "after a comma in an object"
    IN_KEY = "in a key"
    COLON = "after a key"
    FIRST_VALUE = "after ["
    VALUE = "where a value must stand"
    IN_STRING = "in a string that is a value"
    SCALAR = "in a number, true, false or null"
    AFTER_VALUE = "after a value"
    DONE = "after the object"
    BROKEN = "after something that is not JSON"


class ToolInput:
    def __init__(self) -> None:
        self._at = _At.START
        self._open: list[str] = []  # brackets
        self._held = ""  # read, but not yet safe to pass on
        self._escape = ""  # an incomplete escape in a string
        self._has_members = False  # of the object itself
        self._invalid: list[str] = []
        self._broke_in_string = False

    def add(self, text: str) -> str:
        """Add text from the model. Returns what may be passed on now."""
        out: list[str] = []
        place = 0
        while place < len(text):
            if self._at is _At.BROKEN:
                self._invalid.append(text[place:])
                break
            place = self._read(text, place, out)
        return "".join(out)

    def end(self, cut: bool) -> str:
        """The rest of the object. `cut`: the model was stopped, so that its last value is only incomplete."""
        if self._at is _At.SCALAR and not cut:
            self._at = _At.BROKEN  # the object was never closed
        rest = self._held + self._escape + "".join(self._invalid)
        out = ['"'] if self._at is _At.IN_STRING or self._broke_in_string else []
        if not self._open:
            out.append("{")
        out += [_CLOSER[bracket] for bracket in reversed(self._open[1:])]
        if self._is_whole or cut:
            return "".join((*out, "}"))
        comma = "," if self._has_members else ""
        member = msgspec.json.encode(INVALID) + b":" + msgspec.json.encode(rest)
        return "".join((*out, comma, member.decode(), "}"))

    @property
    def _is_whole(self) -> bool:
        """A call without arguments gets an empty object."""
        return self._at is _At.DONE or (self._at is _At.START and not self._invalid)

    def _read(self, text: str, place: int, out: list[str]) -> int:
        """Read from `place`; return the position after what was read."""
        if self._at in (_At.IN_KEY, _At.IN_STRING):
            return self._in_string(text, place, out)
        if self._at is _At.SCALAR:
            return self._in_scalar(text, place, out)
        mark = text[place]
        if mark in _SPACE:
            if self._at not in (_At.START, _At.DONE):
                self._held += mark
        elif not self._structure(mark, out):
            self._break(mark)
        return place + 1

    def _structure(self, mark: str, out: list[str]) -> bool:
        """Handle a character outside strings and scalars; False if it is not allowed there."""
        at = self._at
        if at is _At.START:
            return mark == "{" and self._begin(mark, out)
        if mark == '"' and at in (_At.FIRST_KEY, _At.KEY):
            self._held += mark
            self._at = _At.IN_KEY
        elif mark == ":" and at is _At.COLON:
            self._held += mark
            self._at = _At.VALUE
        elif mark == "," and at is _At.AFTER_VALUE:
            self._held += mark
            self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
        elif (mark == "}" and at in (_At.FIRST_KEY, _At.AFTER_VALUE)) or (
            mark == "]" and at in (_At.FIRST_VALUE, _At.AFTER_VALUE)
        ):
            return self._close(mark, out)
        elif at in (_At.VALUE, _At.FIRST_VALUE):
            return self._begin(mark, out)
        else:
            return False
        return True

    def _begin(self, mark: str, out: list[str]) -> bool:
        """Start a value, if `mark` can start one."""
        if mark in "{[":
            if len(self._open) == MAX_DEPTH:
                return False
            self._pass_on(mark, out)
            self._open.append(mark)
            self._at = _At.FIRST_KEY if mark == "{" else _At.FIRST_VALUE
        elif mark == '"':
            self._pass_on(mark, out)
            self._at = _At.IN_STRING
        elif mark in "-0123456789tfn":
            self._escape = mark  # kept apart from the held text
            self._at = _At.SCALAR
        else:
            return False
        return True

    def _close(self, mark: str, out: list[str]) -> bool:
        if _CLOSER[self._open[-1]] != mark:
            return False
        if len(self._open) == 1:  # `end` passes on the object's own bracket
            self._held = ""
            self._at = _At.DONE
            return True
        self._pass_on(mark, out)
        self._open.pop()
        self._at = _At.AFTER_VALUE
        return True

    def _in_scalar(self, text: str, place: int, out: list[str]) -> int:
        run = _SCALAR_RUN.match(text, place)
        if run:
            self._escape += run[0]
            if len(self._escape) > MAX_NUMBER_CHARACTERS:
                self._break("")
            return run.end()
        if not _SCALAR.fullmatch(self._escape):
            self._break("")
            return place
        scalar, self._escape = self._escape, ""
        self._pass_on(scalar, out)
        self._at = _At.AFTER_VALUE
        return place

    def _in_string(self, text: str, place: int, out: list[str]) -> int:
        if self._escape:
            self._in_escape(text[place], out)
            return place + 1
        run = _PLAIN.match(text, place)
        if run:
            self._in_text(run[0], out)
            return run.end()
        mark = text[place]
        if mark == "\\":
            self._escape = mark
        elif mark == '"':
            self._in_text(mark, out)
            self._at = _At.COLON if self._at is _At.IN_KEY else _At.AFTER_VALUE
        else:  # a line break or another control character that the model did not escape
            self._in_text(msgspec.json.encode(mark)[1:-1].decode(), out)
        return place + 1

    def _in_escape(self, mark: str, out: list[str]) -> None:
        self._escape += mark
        escape = self._escape
        if _ESCAPE.fullmatch(escape) and (len(escape) < 12 or _HEX.fullmatch(escape)):
            self._escape = ""
            self._in_text(escape, out)
        elif len(escape) >= 12 or not _may_become_escape(escape):
            self._escape = escape[:-1]
            self._break(mark)

    def _in_text(self, text: str, out: list[str]) -> None:
        if self._at is _At.IN_KEY:
            self._held += text
        else:
            out.append(text)

    def _pass_on(self, text: str, out: list[str]) -> None:
        out.append(self._held + text)
        self._held = ""
        if len(self._open) == 1:
            self._has_members = True

    def _break(self, mark: str) -> None:
        self._broke_in_string = self._at is _At.IN_STRING
        self._invalid.append(mark)
        self._at = _At.BROKEN


def _may_become_escape(begun: str) -> bool:
    kind = begun[1]
    if kind != "u":
        return False
    digits = begun[2:6]
    if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return False
    if len(begun) < 6:
        return True
    is_high = digits[0] in "dD" and digits[1] in "89abAB"
    return is_high and "\\u"[: len(begun) - 6] == begun[6:8][: len(begun) - 6]
