"""NamespaceIndex: what a process keeps in memory of a namespace to search it; a copy of a store's rows.

A read of the store brings it up to date by the namespace's revision: other processes may write.
Rows of deleted chunks are masked, and dropped when they are the larger part.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.retrieval.filters import Filter
from ridgeline.retrieval.lexical.index import LexicalIndex, best_rows
from ridgeline.retrieval.lexical.terms import terms_of
from ridgeline.retrieval.scan.rows import VectorRows
from ridgeline.retrieval.types import Attributes, Scored, Vector

KEPT_MASKS = 32


@dataclass(frozen=True, slots=True)
class IndexRow:
    """number grows with every chunk that the store takes, and is never used again."""

    number: int
    id: str
    document_id: str
    terms: bytes
    vector: Vector | None


class NamespaceIndex:
    def __init__(self, vectors: VectorRows | None) -> None:
        self.revision = -1
        self.last_number = -1
        self._vectors = vectors
        self._lexical = LexicalIndex()
        self._numbers = np.zeros(0, np.int64)  # ascending
        self._ids: list[str] = []
        self._slots = np.zeros(0, np.int32)  # each row's document
        self._alive = np.zeros(0, np.bool_)
        self._slot_of: dict[str, int] = {}
        self._attributes: list[Attributes] = []
        self._masks: OrderedDict[Filter | None, NDArray[np.bool_]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Vectors and postings; ids and attributes are not counted."""
        return self._lexical.nbytes + (self._vectors.nbytes if self._vectors else 0)

    @property
    def mostly_dead(self) -> bool:
        return len(self._alive) > 1000 and 2 * int(self._alive.sum()) < len(self._alive)

    def set_attributes(self, document_id: str, attributes: Attributes) -> None:
        self._masks.clear()
        slot = self._slot_of.setdefault(document_id, len(self._attributes))
        if slot == len(self._attributes):
            self._attributes.append(attributes)
        else:
            self._attributes[slot] = attributes

    def add(self, rows: list[IndexRow]) -> None:
        """Rows by ascending number, after their documents' attributes."""
        if not rows:
            return
        self._masks.clear()
        self._lexical.add([row.terms for row in rows])
        if self._vectors is not None:
            self._vectors.add(np.array([row.vector for row in rows], np.float32))
        self._ids += [row.id for row in rows]
        self._numbers = np.append(self._numbers, [row.number for row in rows]).astype(np.int64)
        slots = [self._slot_of[row.document_id] for row in rows]
        self._slots = np.append(self._slots, slots).astype(np.int32)
        self._alive = np.append(self._alive, np.ones(len(rows), np.bool_))
        self.last_number = rows[-1].number

    def keep(self, numbers: NDArray[np.int64]) -> None:
        """Mask the rows that are not among these."""
        self._masks.clear()
        self._alive &= np.isin(self._numbers, numbers)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Mask the rows of these numbers."""
        self._masks.clear()
        self._alive &= ~np.isin(self._numbers, numbers)

    def search_vectors(self, queries: Vector, where: Filter | None, k: int) -> list[list[Scored]]:
        assert self._vectors is not None
        found, scores = self._vectors.search(queries, self._mask(where), k)
        return [
            [Scored(self._ids[row], float(score)) for row, score in zip(*one, strict=True) if row >= 0]
            for one in zip(found.tolist(), scores.tolist(), strict=True)
        ]

    def search_text(self, query: str, where: Filter | None, k: int) -> list[Scored]:
        scores = self._lexical.scores(terms_of(query), self._alive)
        best = best_rows(scores, self._mask(where), k)
        return [Scored(self._ids[row], float(scores[row])) for row in best]

    def _mask(self, where: Filter | None) -> NDArray[np.bool_]:
        """Rows that are there and match. The masks of recent filters are kept until the namespace changes."""
        if where is None:
            return self._alive
        known = self._masks.get(where)
        if known is None:
            matching = np.array([where.matches(one) for one in self._attributes], np.bool_)
            known = self._alive & (matching[self._slots] if len(matching) else False)
            self._masks[where] = known
            while len(self._masks) > KEPT_MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(where)
        return known


class IndexCache:
    """The indexes of a store's namespaces, up to a number of bytes; the least recently used go first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int | str, NamespaceIndex] = OrderedDict()

    def get(self, key: int | str) -> NamespaceIndex | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: int | str, index: NamespaceIndex) -> None:
        self._kept[key] = index
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and self.nbytes > self._most_bytes:
            self._kept.popitem(last=False)

    def drop(self, key: int | str) -> None:
        self._kept.pop(key, None)

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self._kept.values())
