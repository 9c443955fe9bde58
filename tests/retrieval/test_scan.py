"""The native vector search against numpy: integer products exactly, results as an exact search finds them."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.ops.cpu.library import available_isas
from ridgeline.ops.cpu.scan import Scanner, ScanRows
from ridgeline.retrieval.scan import reference
from ridgeline.retrieval.scan.rows import VectorRows
from ridgeline.retrieval.types import Vector


def unit(rng: np.random.Generator, rows: int, dimensions: int) -> Vector:
    made = rng.normal(size=(rows, dimensions))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dimensions", [1, 7, 64, 384])
def test_products_of_bytes_are_exact_integers(isa: str, dimensions: int) -> None:
    rng = np.random.default_rng(dimensions)
    vectors = unit(rng, 99, dimensions)
    rows = ScanRows(dimensions, 99)
    rows.store(np.arange(99, dtype=np.int32), vectors)
    queries = np.zeros((23, rows.padded), np.int8)
    queries[:, :dimensions] = rng.integers(-127, 128, (23, dimensions))
    expected = reference.products(queries[:, :dimensions], reference.bytes_of(vectors)[0])
    np.testing.assert_array_equal(Scanner(1, isa).products(rows, queries)[:, :99], expected)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kind", ["random", "near duplicates", "uneven", "equal"])
def test_a_search_finds_what_an_exact_search_finds(isa: str, kind: str) -> None:
    """Near duplicates differ by less than the rounding to bytes: bounds, not luck, must keep them."""
    rng = np.random.default_rng(7)
    scanner = Scanner(2, isa)
    for dimensions, count, k in ((5, 40, 3), (48, 3000, 10), (384, 1000, 50)):
        vectors = unit(rng, count, dimensions)
        if kind == "near duplicates":
            vectors = vectors[:1] + 1e-5 * vectors
        elif kind == "uneven":
            vectors[:, 0] += 30
        elif kind == "equal":
            vectors[:] = vectors[0]
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        rows = VectorRows(dimensions, scanner)
        rows.add(vectors[: count // 3])
        rows.add(vectors[count // 3 :])
        queries = np.concatenate([unit(rng, 33, dimensions), vectors[:9]])
        for share in (1.0, 0.5, 0.01):
            allowed = rng.random(count) < share
            found, scores = rows.search(queries, allowed, k)
            expected, best = reference.best(queries, vectors, allowed, k)
            np.testing.assert_allclose(scores, best, atol=1e-6)
            assert ((found >= 0) == (expected >= 0)).all()
            if kind == "random":  # others have ties below the last bit of a double
                np.testing.assert_array_equal(found, expected)


def test_numpy_replaces_a_missing_library() -> None:
    rng = np.random.default_rng(3)
    vectors, queries, allowed = unit(rng, 200, 32), unit(rng, 5, 32), rng.random(200) < 0.5
    plain, native = VectorRows(32, None), VectorRows(32, Scanner(1))
    for rows in (plain, native):
        rows.add(vectors)
    for a, b in zip(plain.search(queries, allowed, 7), native.search(queries, allowed, 7), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
