"""From token ids back to text: how a vocabulary encodes bytes, and text that grows token by token.

A token stands for bytes, not for characters: one character may take several tokens. So a stream is decoded as
bytes with one incremental UTF-8 decoder: constant work per token, nothing is decoded twice, and a character
is returned only when its last byte has arrived. Used by `Tokenizer` and by code that streams text to a
client.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ridgeline.models.errors import UnsupportedModel

SPACE_MARK = "▁"  # a space in SentencePiece vocabularies
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PER_BYTE = "ridgeline.replace_per_byte"


def _replace_per_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD for each byte that is not part of a character, as SentencePiece does."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _replace_per_byte)


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE: printable Latin-1, then from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How a vocabulary's tokens encode bytes, and how invalid bytes are decoded."""

    byte_level: bool  # byte-level BPE; else SentencePiece pieces with byte tokens such as <0x0A>
    leading_spaces: int = 0  # spaces dropped at the start of the text, which the tokenizer added

    @property
    def errors(self) -> str:
        return "replace" if self.byte_level else _PER_BYTE

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_BYTE_OF_LETTER[letter] for letter in token])
            except KeyError:  # an added token, written as plain text
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    def to_text(self, data: bytes) -> str:
        text = data.decode("utf-8", self.errors)
        return text[self._spaces_to_drop(text) :]

    def _spaces_to_drop(self, text: str) -> int:
        count = 0
        while count < self.leading_spaces and text[count : count + 1] == " ":
            count += 1
        return count


def spelling_of(decoder: Mapping[str, Any] | None) -> TokenSpelling | None:
    """From the `decoder` of a tokenizer.json; None for one that does not encode bytes (WordPiece, …)."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenSpelling(byte_level=True)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    replace, strip = steps[0], steps[3:]
    if replace["pattern"] != {"String": SPACE_MARK} or replace["content"] != " ":
        return None
    if not strip:
        return TokenSpelling(byte_level=False)
    if kinds[3:] == ["Strip"] and strip[0]["content"] == " " and strip[0]["stop"] == 0:
        return TokenSpelling(byte_level=False, leading_spaces=strip[0]["start"])
    return None


class SpellsTokens(Protocol):
    """The part of a `Tokenizer` that a detokenizer needs."""

    spelling: TokenSpelling | None
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def whole_text(self, token_id: int) -> str | None: ...


class IncrementalDetokenizer:
    """One stream of tokens as text. The joined pieces are exactly `tokenizer.decode` of all the ids."""

    def __init__(self, tokenizer: SpellsTokens, skip_special: bool = True) -> None:
        spelling = tokenizer.spelling
        if spelling is None:
            raise UnsupportedModel(
                "this tokenizer's decoder cannot be streamed: only byte-level BPE and SentencePiece "
                "vocabularies can generate text"
            )
        self._token_bytes = tokenizer.token_bytes
        self._whole_text = tokenizer.whole_text
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        self._spaces_to_drop = spelling.leading_spaces
        self._between_characters = True  # no byte waits for the rest of its character

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens complete; an incomplete character waits for the next push."""
        return "".join([self.push_one(token) for token in token_ids])

    def push_one(self, token: int) -> str:
        """`push` of a single token. Most are whole characters after whole characters: cached."""
        if token in self._skipped:
            return ""
        if self._between_characters and not self._spaces_to_drop:
            text = self._whole_text(token)
            if text is not None:
                return text
        text = self._decoder.decode(self._token_bytes(token))
        self._between_characters = not self._decoder.getstate()[0]
        return self._trim(text)

    def finish(self) -> str:
        """The rest: bytes that no later token completed, as replacement characters."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while self._spaces_to_drop and text:
            if text[0] != " ":
                self._spaces_to_drop = 0
            else:
                self._spaces_to_drop -= 1
                text = text[1:]
        return text
