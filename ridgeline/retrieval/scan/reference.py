"""Vector search in plain numpy: what the native scan must agree with, and what runs without the library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.retrieval.types import Vector


def bytes_of(vectors: Vector) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Each row as bytes within ±127 and a scale: a row is about scale times its bytes."""
    scales = (np.abs(vectors).max(axis=1) / np.float32(127)).astype(np.float32)
    safe = np.where(scales > 0, scales, np.float32(1)).astype(np.float64)
    rounded = np.rint(vectors.astype(np.float64) / safe[:, None])
    return np.clip(rounded, -127, 127).astype(np.int8), scales


def products(queries: NDArray[np.int8], rows: NDArray[np.int8]) -> NDArray[np.int32]:
    return queries.astype(np.int32) @ rows.astype(np.int32).T


def best(
    queries: Vector, rows: Vector, allowed: NDArray[np.bool_], k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k best allowed rows of each query and their products, the first of equal ones."""
    found = np.full((len(queries), k), -1, np.int32)
    scores = np.zeros((len(queries), k), np.float32)
    places = np.flatnonzero(allowed)
    exact = queries.astype(np.float64) @ rows[places].astype(np.float64).T
    for i, row in enumerate(exact):
        order = np.argsort(-row, kind="stable")[:k]
        found[i, : len(order)] = places[order]
        scores[i, : len(order)] = row[order]
    return found, scores
