"""Masks: one bit for each token of the vocabulary, packed into 32-bit words; set if the token is allowed.

Pure arrays, for the samplers and the matchers. A mask may be longer or shorter than a row of logits: a token
without a bit is not allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Mask = np.ndarray[Any, np.dtype[np.int32]]
FloatRow = np.ndarray[Any, np.dtype[np.float32]]
IntRow = np.ndarray[Any, np.dtype[np.int64]]
BoolRow = np.ndarray[Any, np.dtype[np.bool_]]
_FEW_WORDS = 256


class NoToken(Exception):
    """The grammar and the parameters allow no token, or computing the allowed ones would take too long."""


def mask_words(vocab: int) -> int:
    return (vocab + 31) // 32


def allows(mask: Mask, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def allow_only(mask: Mask, token: int) -> None:
    mask[:] = 0
    mask.view(np.uint32)[token >> 5] = 1 << (token & 31)


def clear_bits(mask: Mask, tokens: Iterable[int]) -> None:
    """Bar these tokens, unless no other is allowed."""
    cleared: list[tuple[int, int]] = []
    for token in tokens:
        place = token >> 5
        if token >= 0 and place < mask.size:
            word = int(mask[place])
            if word >> (token & 31) & 1:
                cleared.append((place, word))
                mask[place] = word & ~(1 << (token & 31)) if token & 31 != 31 else word & 0x7FFFFFFF
    if cleared and not mask.any():
        for place, word in reversed(cleared):
            mask[place] = word


def few_allowed(mask: Mask) -> IntRow | None:
    """The allowed ids, sorted, if they are in few words of the mask; None if they are in many."""
    words = np.flatnonzero(mask)
    if words.size > _FEW_WORDS:
        return None
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little")
    places = np.flatnonzero(bits)
    tokens: IntRow = (words[places >> 5] << 5) + (places & 31)
    return tokens


def allowed_tokens(mask: Mask, vocab: int) -> BoolRow:
    """[vocab], true where the token is allowed."""
    return np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)


def masked(logits: FloatRow, mask: Mask) -> FloatRow:
    """A copy of the logits with -inf for tokens that are not allowed."""
    return np.where(allowed_tokens(mask, logits.size), logits, np.float32(-np.inf))
