"""JSON inside a text, such as the arguments of a tool call: strings are read unescaped and written back
escaped, in pieces of any size.

`inside` makes the channel for a string's text, given the name of its field; `outside` makes the channel for
the text between strings (numbers), or None to pass it on unread. Text that is not JSON passes as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol


class TextChannel(Protocol):
    """Changes a text that arrives in pieces."""

    @property
    def holds(self) -> bool: ...
    def feed(self, piece: str) -> str: ...
    def finish(self) -> str: ...


_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|u(?P<hex>[0-9a-fA-F]{4})|(?P<letter>[^u])|u)",
    re.DOTALL,
)
_UNFINISHED = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z"
)
_SIGN = re.compile(r"[:,{}\[\]]")
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_TO_ESCAPE = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_NAMES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_LONGEST_KEY = 64


class JsonText:
    def __init__(
        self, inside: Callable[[str], TextChannel], outside: Callable[[str], TextChannel] | None
    ) -> None:
        self._inside = inside
        self._outside = outside
        self._channel = outside("") if outside is not None else None  # of the string, or between strings
        self._in_string = False
        self._pending = ""  # an incomplete escape
        self._minus = ""  # a sign that ends what was written between strings
        self._last = ""  # the last string, up to the length of a field name
        self._key = ""

    @property
    def holds(self) -> bool:
        return bool(self._pending or self._minus) or (self._channel is not None and self._channel.holds)

    def feed(self, piece: str) -> str:
        text, self._pending = self._pending + piece, ""
        out: list[str] = []
        at = 0
        while at < len(text):
            at = self._string(text, at, out) if self._in_string else self._between(text, at, out)
        return "".join(out)

    def finish(self) -> str:
        out = self._text(self._pending) if self._pending else ""
        self._pending = ""
        rest = self._channel.finish() if self._channel is not None else ""
        return out + (escaped(rest) if self._in_string else self._unsigned(rest, last=True))

    def _between(self, text: str, at: int, out: list[str]) -> int:
        quote = text.find('"', at)
        end = quote if quote >= 0 else len(text)
        part = text[at:end]
        signs = _SIGN.findall(part)
        if signs:
            self._key = self._last if signs[-1] == ":" else ""
        out.append(part if self._channel is None else self._unsigned(self._channel.feed(part)))
        if quote < 0:
            return end
        if self._channel is not None:
            out.append(self._unsigned(self._channel.finish(), last=True))
        out.append('"')
        self._in_string, self._last = True, ""
        self._channel = self._inside(self._key)
        return quote + 1

    def _unsigned(self, text: str, *, last: bool = False) -> str:
        """A number that became a string loses its sign: -"…" is not JSON."""
        text, self._minus = self._minus + text, ""
        if text.endswith("-") and not last:
            text, self._minus = text[:-1], "-"
        return text.replace('-"', '"')

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if text[at] == '"':
            assert self._channel is not None
            out += [escaped(self._channel.finish()), '"']
            self._in_string, self._key = False, ""
            self._channel = self._outside(self._last) if self._outside is not None else None
            return at + 1
        plain = _PLAIN.match(text, at)
        if plain is not None:
            out.append(self._text(plain.group()))
            return plain.end()
        if _UNFINISHED.match(text, at):
            self._pending = text[at:]
            return len(text)
        escape = _ESCAPE.match(text, at)
        assert escape is not None
        out.append(self._text(_decoded(escape)))
        return escape.end()

    def _text(self, text: str) -> str:
        assert self._channel is not None
        self._last = (self._last + text)[:_LONGEST_KEY]
        return escaped(self._channel.feed(text))


def escaped(text: str) -> str:
    """As it stands between the quotes of a JSON string."""
    return _TO_ESCAPE.sub(lambda match: _NAMES.get(match[0]) or f"\\u{ord(match[0]):04x}", text)


def _decoded(escape: re.Match[str]) -> str:
    if escape["high"]:
        return chr(0x10000 + ((int(escape["high"], 16) - 0xD800) << 10) + int(escape["low"], 16) - 0xDC00)
    if escape["hex"]:
        return chr(int(escape["hex"], 16))
    letter = escape["letter"]
    return _LETTERS.get(letter, escape[0]) if letter else escape[0]
