"""VectorRows: the vectors of a namespace in memory, searched exactly.

The native scan reads one byte a dimension and decides by floats: 5 bytes a dimension are held. Without the
native library numpy compares floats.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ridgeline.ops.cpu.interface import NativeUnavailable
from ridgeline.ops.cpu.scan import CAPACITY_STEP, Scanner, ScanRows
from ridgeline.retrieval.scan import reference
from ridgeline.retrieval.types import Vector

MOST_THREADS = 4


@cache
def shared_scanner() -> Scanner | None:
    """One pool of threads for all namespaces; None without the native library."""
    try:
        return Scanner(min(MOST_THREADS, len(os.sched_getaffinity(0))))
    except NativeUnavailable:
        return None


class VectorRows:
    """Rows are numbered in the order they are added."""

    def __init__(self, dimensions: int, scanner: Scanner | None) -> None:
        self._scanner = scanner
        self._rows = ScanRows(dimensions, CAPACITY_STEP)
        self._count = 0

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def add(self, vectors: Vector) -> None:
        end = self._count + len(vectors)
        if end > self._rows.capacity:
            self._rows = self._rows.grown(max(end, self._rows.capacity * 3 // 2))
        if self._scanner is None:
            self._rows.vectors[self._count : end] = vectors
        else:
            places = np.arange(self._count, end, dtype=np.int32)
            self._rows.store(places, np.ascontiguousarray(vectors, np.float32))
        self._count = end

    def search(
        self, queries: Vector, allowed: NDArray[np.bool_], k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best allowed rows of each query and their products; row -1 where fewer are allowed."""
        whole = np.zeros(self._rows.capacity, np.bool_)
        whole[: self._count] = allowed
        wanted = np.ascontiguousarray(queries, np.float32)
        if self._scanner is None:
            return reference.best(wanted, self._rows.vectors, whole, k)
        mask = np.packbits(whole, bitorder="little").view("<u2").astype(np.uint16, copy=False)
        found, scores, _ = self._scanner.search(self._rows, mask, wanted, k)
        return found, scores
