"""WordVectors: a text's vector as the mean of its words' vectors, each embedded once, when a route is fitted.

A decision then needs no server and takes 1 ms, where an embedding model takes several for a few dozen
tokens; and it reads all of the text. Made by `ridgeline gateway routes fit`, stored in the artifact.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.embedder import Vectors

LEAST = 2  # least number of examples with a word
MOST = 50_000  # most words, by frequency
READ_CHARS = 4000  # of a text
WORD_TOKENS = 16  # of a word, for the embedding server
# A letter of a script without spaces is a word, and so is each digit and sign.
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힣]|[^\W\d_]+|\d|[^\w\s]")


@dataclass(frozen=True, slots=True)
class WordVectors:
    """table: each word's vector, less the mean of all, times its weight. centre: the texts' mean vector."""

    words: tuple[str, ...]
    table: Vectors
    centre: Vectors
    _rows: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._rows.update((word, row) for row, word in enumerate(self.words))

    @classmethod
    def of(cls, texts: Sequence[str], embed: Callable[[Sequence[str]], Vectors]) -> WordVectors:
        """`embed`: a vector for each word. Rare words have a greater weight: the log of their rarity."""
        counts = Counter(word for text in texts for word in set(words_of(text)))
        words = tuple(word for word, count in counts.most_common(MOST) if count >= LEAST)
        vectors = embed(words)
        weights = np.log(len(texts) / np.array([counts[word] for word in words]))
        # Rounded as in the artifact: the fit sees the values used at run time.
        table = ((vectors - vectors.mean(axis=0)) * weights[:, None]).astype(np.float16).astype(np.float32)
        made = cls(words, table, np.zeros(table.shape[1], np.float32))
        return cls(words, table, np.mean([made._sum(text) for text in texts], axis=0, dtype=np.float32))

    def vector(self, text: str) -> Vectors:
        """Of length 1; all zeros for a text without a known word."""
        found = self._sum(text)
        if not found.any():
            return found
        found = found - self.centre
        length = float(np.linalg.norm(found))
        return found / length if length > 0 else found

    def many(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self.vector(text) for text in texts])

    def _sum(self, text: str) -> npt.NDArray[np.float32]:
        rows = [row for word in words_of(text) if (row := self._rows.get(word)) is not None]
        if not rows:
            return np.zeros(self.table.shape[1], np.float32)
        total: npt.NDArray[np.float32] = self.table[rows].sum(axis=0, dtype=np.float32) / np.float32(
            len(rows) ** 0.5
        )
        return total


def words_of(text: str) -> list[str]:
    return _WORD.findall(text[:READ_CHARS].lower())
