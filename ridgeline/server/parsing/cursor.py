"""The unread text of an answer that is still being generated, and how parsers read it.

Readers are generators: a bare `yield` means "the next chunk is needed". No decision depends on where a chunk
ended, only on the text and on whether it has ended for good, so the events are the same for every split.
Every character is passed once: reading is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Out = Callable[[str], object]

SPACE = re.compile(r"\s+")


class Markers:
    """Literal texts to find in a stream; none contains another, so the first match is unambiguous."""

    def __init__(self, *texts: str) -> None:
        assert not any(a != b and a in b for a in texts for b in texts), (
            f"markers contain each other: {texts}"
        )
        self.texts = texts
        self.pattern = re.compile("|".join(re.escape(text) for text in texts))
        self._reach = max(len(text) for text in texts) - 1
        self._firsts = frozenset(text[0] for text in texts)

    def safe_until(self, text: str, start: int) -> int:
        """The length up to which `text` cannot be the start of a marker that a later chunk completes."""
        for index in range(max(start, len(text) - self._reach), len(text)):
            if text[index] in self._firsts:
                rest = text[index:]
                if any(marker.startswith(rest) for marker in self.texts):
                    return index
        return len(text)


class Cursor:
    """Unread text, and the text read since `hold` that becomes a call or content."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def hold(self, text: str = "") -> None:
        """Keep the text read from here on, starting with `text`."""
        self._held = [text]

    def release(self) -> str:
        """Stop keeping, and return the kept text."""
        held, self._held = self._held, None
        return "".join(held or ())

    def advance(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._held is not None:
            self._held.append(text)
        return text

    def peek(self) -> Reading[str]:
        """The next character, unread; "" at the end of the text."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def literal(self, *options: str) -> Reading[str | None]:
        """Read whichever of `options` comes next, or nothing. None may be a prefix of another."""
        longest = max(map(len, options))
        while True:
            rest = self._text[self._at : self._at + longest]
            for option in options:
                if rest.startswith(option):
                    return self.advance(len(option))
            if self.ended or not any(option.startswith(rest) for option in options):
                return None
            yield

    def closer(self, text: str) -> Reading[bool]:
        """Read `text` if it comes next; at the end of the answer also its start, which a length limit cut."""
        is_whole = (yield from self.literal(text)) is not None
        rest = self._text[self._at :]
        if not is_whole and self.ended and text.startswith(rest):
            self.advance(len(rest))
        return is_whole

    def run(self, pattern: re.Pattern[str], out: Out | None = None) -> Reading[None]:
        """Read all matching characters; `pattern` is one character class with a plus."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None:
                text = self.advance(found.end() - self._at)
                if out is not None:
                    out(text)
            if self._at < len(self._text) or self.ended:
                return
            yield

    def space(self) -> Reading[None]:
        yield from self.run(SPACE)

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def until(self, markers: Markers, out: Out) -> Reading[str | None]:
        """Read up to and including the first marker, passing the text before it to `out`; None at the end."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            if found is not None:
                if found.start() > self._at:
                    out(self.advance(found.start() - self._at))
                return self.advance(len(found.group()))
            safe = len(self._text) if self.ended else markers.safe_until(self._text, self._at)
            if safe > self._at:
                out(self.advance(safe - self._at))
            if self.ended:
                return None
            yield

    def rest(self, out: Out) -> Reading[None]:
        """Read everything to the end of the text."""
        while True:
            if self._at < len(self._text):
                out(self.advance(len(self._text) - self._at))
            if self.ended:
                return
            yield
