"""Folds text for the detectors: digits, spaces, dashes and quotes of other scripts become ASCII.

One character becomes one character, so an offset in the folded text is the same offset in the original.
"""

from __future__ import annotations

import re

_ZEROS = (
    0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xE50, 0xED0, 0xF20,
    0x1040, 0x17E0, 0x1810, 0xFF10,
)  # fmt: skip
_SPACES = (0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F)
_DASHES = (*range(0x2010, 0x2016), 0x2212, 0xFE58, 0xFE63)

_FOLD = {
    **{zero + value: str(value) for zero in _ZEROS for value in range(10)},
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width ASCII
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys(_DASHES, "-"),
    **dict.fromkeys((0x201C, 0x201D, 0x201E, 0xAB, 0xBB), '"'),
    **dict.fromkeys((0x2018, 0x2019, 0x201A), "'"),
}
_FOLDABLE = re.compile("[" + "".join(map(chr, _FOLD)) + "]")


def fold(text: str) -> str:
    if text.isascii() or _FOLDABLE.search(text) is None:
        return text
    return text.translate(_FOLD)
