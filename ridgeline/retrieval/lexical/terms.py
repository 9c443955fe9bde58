"""From a text to its terms, and a chunk's terms as bytes for a store.

A term is a word in lower case: letters, digits and underscores of any script, without English stop words.
Stores keep a term as a 64-bit hash: a million terms have a collision with a probability of 3e-8.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

ANALYZER = "words-1"  # stored with a namespace; a change of the rules below is a new name

_WORD = re.compile(r"\w+")
_MOST = np.iinfo(np.uint16).max
STOP_WORDS = frozenset(
    (
        *(
            "a",
            "an",
            "and",
            "are",
            "as",
            "at",
            "be",
            "but",
            "by",
            "for",
            "if",
            "in",
            "into",
            "is",
            "it",
            "no",
        ),
        *("not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this"),
        *("to", "was", "will", "with"),
    )
)

_ENTRY = np.dtype([("term", "<u8"), ("count", "<u2")])


def terms_of(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


@lru_cache(1 << 18)
def term_hash(term: str) -> int:
    return int.from_bytes(blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def packed(counts: Mapping[str, int]) -> bytes:
    """Terms and counts for a store, by hash."""
    entries = np.empty(len(counts), _ENTRY)
    entries["term"] = [term_hash(term) for term in counts]
    entries["count"] = np.minimum(list(counts.values()), _MOST)
    return entries[np.argsort(entries["term"])].tobytes()


def unpacked(data: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
    entries = np.frombuffer(data, _ENTRY)
    return np.ascontiguousarray(entries["term"]), np.ascontiguousarray(entries["count"])


def packed_text(text: str) -> bytes:
    return packed(Counter(terms_of(text)))
