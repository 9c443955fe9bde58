"""Exact vector search by the native library: every row is compared with every query.

`ScanRows` keeps rows as bytes and as floats, 5 bytes a dimension; `Scanner` searches them.
The functions are looked up at the first use: a library that was built before them still serves models.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.ops.cpu.interface import (
    LIBRARY_PATH,
    NativeError,
    NativeUnavailable,
    address,
    last_error,
    load,
)
from ridgeline.ops.cpu.library import choose_isa

PANEL = 16  # rows that lie side by side
CAPACITY_STEP = 32


class _CRows(ctypes.Structure):
    _fields_ = (
        ("dimensions", c_int32),
        ("capacity", c_int64),
        *((name, c_void_p) for name in ("panels", "scales", "residuals", "vectors")),
    )


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "rl_scanner_create": (c_void_p, [c_char_p, c_int32]),
    "rl_scanner_free": (None, [c_void_p]),
    "rl_scanner_isa": (c_char_p, [c_void_p]),
    "rl_scan_store": (c_int32, [POINTER(_CRows), c_void_p, c_void_p, c_int32]),
    "rl_scan_search": (
        c_int32,
        [c_void_p, POINTER(_CRows), c_void_p, c_void_p, c_int32, c_int32, *[c_void_p] * 3],
    ),
    "rl_scan_products": (c_int32, [c_void_p, POINTER(_CRows), c_void_p, c_int32, c_void_p]),
}


@cache
def _library() -> Any:
    library = load()
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise NativeUnavailable(
            f"{LIBRARY_PATH} has no vector search. Reinstall ridgeline (in a checkout: make native)"
        ) from error
    return library


class ScanRows:
    """Rows of at most length 1 in fixed places. A row that was never stored must be masked in a search."""

    def __init__(self, dimensions: int, capacity: int) -> None:
        self.dimensions = dimensions
        self.capacity = -(-max(capacity, 1) // CAPACITY_STEP) * CAPACITY_STEP
        self.padded = -(-dimensions // 4) * 4
        self._panels = _aligned(self.capacity * self.padded)
        self._scales = np.zeros(self.capacity, np.float32)
        self._residuals = np.zeros(self.capacity, np.float32)
        self.vectors = np.zeros((self.capacity, dimensions), np.float32)
        self.struct = _CRows(
            dimensions,
            self.capacity,
            *(array.ctypes.data for array in (self._panels, self._scales, self._residuals, self.vectors)),
        )

    @property
    def nbytes(self) -> int:
        arrays = (self._panels, self._scales, self._residuals, self.vectors)
        return sum(array.nbytes for array in arrays)

    def store(self, rows: NDArray[np.int32], vectors: NDArray[np.float32]) -> None:
        """Write vectors [n, dimensions] to these rows."""
        source = address(vectors, np.float32, (len(rows), self.dimensions), "the vectors")
        places = address(rows, np.int32, (len(rows),), "the rows")
        if _library().rl_scan_store(byref(self.struct), source, places, len(rows)):
            raise NativeError(f"the native library rejected a vector: {last_error()}")

    def grown(self, capacity: int) -> ScanRows:
        """A copy with room for more rows."""
        larger = ScanRows(self.dimensions, capacity)
        larger._panels[: len(self._panels)] = self._panels
        for name in ("_scales", "_residuals", "vectors"):
            getattr(larger, name)[: self.capacity] = getattr(self, name)
        return larger


class Scanner:
    """Threads that search. One search at a time; further callers wait."""

    def __init__(self, threads: int, isa: str | None = None) -> None:
        self._library = _library()
        self._handle = self._library.rl_scanner_create(choose_isa(isa).encode(), threads)
        if not self._handle:
            raise NativeError(f"no scanner: {last_error()}")
        self.isa = str(self._library.rl_scanner_isa(self._handle).decode())

    def search(
        self, rows: ScanRows, mask: NDArray[np.uint16], queries: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], int]:
        """The k best rows of each query and their products, best first; row -1 where fewer match.

        mask [capacity / 16]: bit i of a word is row i of its panel. The last value is the number of rows that
        were compared as floats, over all queries.
        """
        count = len(queries)
        found = np.empty((count, k), np.int32)
        scores = np.empty((count, k), np.float32)
        rescored = c_int64()
        failed = self._library.rl_scan_search(
            self._handle,
            byref(rows.struct),
            address(mask, np.uint16, (rows.capacity // PANEL,), "the mask"),
            address(queries, np.float32, (count, rows.dimensions), "the queries"),
            count,
            k,
            found.ctypes.data,
            scores.ctypes.data,
            ctypes.addressof(rescored),
        )
        if failed:
            raise NativeError(f"the native library rejected a search: {last_error()}")
        return found, scores, rescored.value

    def products(self, rows: ScanRows, queries: NDArray[np.int8]) -> NDArray[np.int32]:
        """The integer products [n, capacity] of queries [n, padded dimensions] with all rows' bytes."""
        out = np.empty((len(queries), rows.capacity), np.int32)
        source = address(queries, np.int8, (len(queries), rows.padded), "the queries")
        if self._library.rl_scan_products(
            self._handle, byref(rows.struct), source, len(queries), out.ctypes.data
        ):
            raise NativeError(f"the native library rejected a scan: {last_error()}")
        return out

    def close(self) -> None:
        if self._handle:
            self._library.rl_scanner_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _aligned(size: int) -> NDArray[np.uint8]:
    """Bytes of 128, which stand for zero, at an address that is a multiple of 64."""
    whole = np.full(size + 64, 128, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + size]
