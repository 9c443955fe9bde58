"""PackedTexts: token ids of many texts as they go to an encoder's engine.

Made beside the event loop, not on it: half a million ids take some 20 ms to pack.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class PackedTexts:
    tokens: bytes  # int32, one text after the other
    lengths: list[int]
    types: bytes = b""  # one per token; empty: all 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


def pack_texts(texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> PackedTexts:
    return PackedTexts(
        array("i", chain.from_iterable(texts)).tobytes(),
        list(map(len, texts)),
        b"" if types is None else bytes(chain.from_iterable(types)),
    )
