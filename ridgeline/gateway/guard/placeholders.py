"""Placeholders for values, and the way back: Vault gives <EMAIL_1> for an address, RestoredText the address
for <EMAIL_1>, also in a text that arrives in pieces.

A vault lives in memory for the length of its request; it is never written to disk.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import zlib

_PIECE = 500  # values
_BODY = r"[A-Za-z0-9_ \\-]"
# Models rewrite placeholders: in lower case, with spaces, with Markdown's or HTML's escapes.
_TAG = re.compile(rf"\\?(?:<|&lt;)({_BODY}{{3,48}})(?:>|&gt;)")
_BEGUN = re.compile(
    rf"\\?(?:<{_BODY}{{0,48}}(?:&(?:gt?)?)?|&(?:l(?:t(?:;{_BODY}{{0,48}}(?:&(?:gt?)?)?)?)?)?|(?<=\\))\Z"
)
_NAME = re.compile(r" *([A-Za-z][A-Za-z0-9_ \\-]*?)[ _\\-]+([0-9]{1,6}) *\\? *")
_PLAIN = re.compile(r"[ \\-]+")


class Vault:
    """One request's values. The same value of the same kind has the same placeholder throughout."""

    def __init__(self) -> None:
        self._placeholders: dict[tuple[str, str], str] = {}
        self._values: dict[tuple[str, int], str] = {}
        self._counts: dict[str, int] = {}
        self._taken: set[tuple[str, int]] = set()
        self._first = 1

    def __bool__(self) -> bool:
        return bool(self._values)

    def start_behind(self, earlier: str) -> None:
        """Start the numbers elsewhere for each conversation that an upstream continues: its old placeholders
        stand for values that this vault does not know, and must not be taken for new ones."""
        self._first = 1000 + zlib.crc32(earlier.encode()) % 900_000 if earlier else 1

    def pieces(self) -> list[bytes]:
        """All values, encoded for another process: each piece decodes in less than 1 ms."""
        values = list(self._values.items())
        starts = range(0, len(values), _PIECE)
        return [pickle.dumps(self._counts), *(pickle.dumps(values[at : at + _PIECE]) for at in starts)]

    @classmethod
    async def of_pieces(cls, pieces: list[bytes]) -> Vault:
        """A vault that only restores values. Yields to the event loop between two pieces."""
        vault = cls.whole(pieces[:1])
        for piece in pieces[1:]:
            vault._values.update(pickle.loads(piece))
            await asyncio.sleep(0)
        return vault

    @classmethod
    def whole(cls, pieces: list[bytes]) -> Vault:
        vault = cls()
        vault._counts = pickle.loads(pieces[0])
        for piece in pieces[1:]:
            vault._values.update(pickle.loads(piece))
        return vault

    def avoid(self, text: str) -> None:
        """Reserve the placeholders that the text already holds: no value gets them."""
        if "<" in text or "&lt;" in text:
            self._taken.update(name for tag in _TAG.finditer(text) if (name := _name(tag[1])) is not None)

    def placeholder(self, kind: str, value: str) -> str:
        placeholder = self._placeholders.get((kind, value))
        if placeholder is None:
            label = kind.upper()
            number = self._counts.get(label, self._first - 1) + 1
            while (label, number) in self._taken:
                number += 1
            self._counts[label] = number
            placeholder = self._placeholders[kind, value] = f"<{label}_{number}>"
            self._values[label, number] = value
        return placeholder

    def restored(self, text: str) -> str:
        """A whole text with this vault's placeholders replaced by their values; others stay as they are."""
        if "<" not in text and "&lt;" not in text:
            return text
        return _TAG.sub(self._value, text)

    def may_become(self, begun: str) -> bool:
        """Whether a tag with this beginning could be a placeholder of this vault."""
        head = begun.lstrip("\\").removeprefix("<").removeprefix("&lt;").lstrip(" ")
        name = _PLAIN.sub("_", head.partition("&")[0]).upper()
        return any(label.startswith(name) or name.startswith(label) for label in self._counts)

    def _value(self, tag: re.Match[str]) -> str:
        name = _name(tag[1])
        value = self._values.get(name) if name is not None else None
        return tag[0] if value is None else value


def _name(body: str) -> tuple[str, int] | None:
    match = _NAME.fullmatch(body)
    return (_PLAIN.sub("_", match[1]).upper(), int(match[2])) if match else None


class RestoredText:
    """One text in pieces: `feed` returns the text that is final, `finish` the rest."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._held = ""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def feed(self, piece: str) -> str:
        text = self._held + piece
        at = self._begun(text) if "<" in text or "&" in text or text.endswith("\\") else len(text)
        self._held = text[at:]
        return self._vault.restored(text[:at])

    def _begun(self, text: str) -> int:
        """Where an incomplete placeholder begins."""
        begun = _BEGUN.search(text)
        while begun is not None and not self._vault.may_become(begun[0]):
            begun = _BEGUN.search(text, begun.start() + 1)
        return len(text) if begun is None else begun.start()

    def finish(self) -> str:
        text, self._held = self._held, ""
        return self._vault.restored(text)
