"""LexicalIndex: BM25 over the chunks of a namespace, in memory. `reference` is its definition.

Postings lie in a few segments, each sorted by term; a new segment swallows its neighbours of up to twice its
size. A posting takes 6 bytes. Removed rows are masked by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.retrieval.lexical.reference import K1, B
from ridgeline.retrieval.lexical.terms import term_hash, unpacked


@dataclass(frozen=True, slots=True)
class _Segment:
    terms: NDArray[np.uint64]  # distinct, ascending
    starts: NDArray[np.int64]  # of each term's postings
    rows: NDArray[np.int32]
    counts: NDArray[np.uint16]

    def postings(self, term: int) -> slice:
        at = int(np.searchsorted(self.terms, np.uint64(term)))
        if at == len(self.terms) or int(self.terms[at]) != term:
            return slice(0, 0)
        return slice(int(self.starts[at]), int(self.starts[at + 1]))

    @property
    def nbytes(self) -> int:
        return self.terms.nbytes + self.starts.nbytes + self.rows.nbytes + self.counts.nbytes


class LexicalIndex:
    """Rows are numbered in the order they are added."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self.lengths = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments) + self.lengths.nbytes

    def add(self, packed_rows: Sequence[bytes]) -> None:
        """Rows as `terms.packed` made them."""
        if not packed_rows:
            return
        first = len(self.lengths)
        parts = [unpacked(data) for data in packed_rows]
        sizes = [len(terms) for terms, _ in parts]
        terms = np.concatenate([terms for terms, _ in parts])
        counts = np.concatenate([counts for _, counts in parts])
        rows = np.repeat(np.arange(first, first + len(parts), dtype=np.int32), sizes)
        totals = np.array([int(count.sum(dtype=np.int64)) for _, count in parts], np.int64)
        self.lengths = np.concatenate([self.lengths, totals])
        made = _segment(terms, rows, counts)
        while self._segments and len(self._segments[-1].rows) <= 2 * len(made.rows):
            made = _merged(self._segments.pop(), made)
        self._segments.append(made)

    def scores(self, query: Sequence[str], alive: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The BM25 score of every row, 0 without a term of the query. Statistics are of alive rows."""
        scores = np.zeros(len(alive), np.float64)
        total = int(alive.sum())
        if not total:
            return scores
        mean = float(self.lengths[alive].sum()) / total
        for term in dict.fromkeys(query):
            found = [(one, one.postings(term_hash(term))) for one in self._segments]
            rows = np.concatenate([one.rows[part] for one, part in found])
            there = alive[rows]
            rows, n = rows[there], int(there.sum())
            if not n:
                continue
            tf = np.concatenate([one.counts[part] for one, part in found])[there].astype(np.float64)
            idf = math.log(1 + (total - n + 0.5) / (n + 0.5))
            scores[rows] += idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * self.lengths[rows] / mean))
        return scores


def best_rows(scores: NDArray[np.float64], allowed: NDArray[np.bool_], k: int) -> NDArray[np.int64]:
    """The k allowed rows of the largest scores above 0, best first, the first of equal ones."""
    places = np.flatnonzero((scores > 0) & allowed)
    if len(places) > k:
        limit = np.partition(scores[places], len(places) - k)[len(places) - k]
        places = places[scores[places] >= limit]
    return places[np.argsort(-scores[places], kind="stable")][:k]


def _segment(terms: NDArray[np.uint64], rows: NDArray[np.int32], counts: NDArray[np.uint16]) -> _Segment:
    order = np.argsort(terms, kind="stable")
    distinct, firsts = np.unique(terms[order], return_index=True)
    starts = np.append(firsts, len(terms)).astype(np.int64)
    return _Segment(distinct, starts, rows[order], counts[order])


def _merged(left: _Segment, right: _Segment) -> _Segment:
    terms = [np.repeat(one.terms, np.diff(one.starts)) for one in (left, right)]
    return _segment(
        np.concatenate(terms),
        np.concatenate([left.rows, right.rows]),
        np.concatenate([left.counts, right.counts]),
    )
