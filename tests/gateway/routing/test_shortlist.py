"""The shortlist of examples that may be near: nearly all near ones stand on it."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.gateway.routing.learned.neighbours import DIRECTIONS, FEW, Shortlist, nearest


def topics(count: int, dimensions: int = 384, seed: int = 0) -> np.ndarray:
    """Unit vectors around some directions, as embeddings of texts lie around their topics."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((40, dimensions)) * (0.93 ** np.arange(dimensions))
    vectors = centres[random.integers(0, 40, count)] + 0.1 * random.standard_normal((count, dimensions))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_those_who_are_near_are_on_it() -> None:
    vectors = topics(5000)
    examples, asked = vectors[:4900], vectors[4900:]
    shortlist = Shortlist.of(examples)
    assert shortlist is not None
    assert shortlist.places.shape == (4900, DIRECTIONS)
    near, _ = nearest(examples, asked, 40)
    found = [np.isin(near[n], shortlist.likely(asked[n], 160)).mean() for n in range(len(asked))]
    assert np.mean(found) > 0.9


def test_with_room_for_all_all_are_on_it() -> None:
    vectors = topics(1200)
    shortlist = Shortlist.of(vectors)
    assert shortlist is not None
    assert sorted(shortlist.likely(vectors[0], 5000)) == list(range(1200))


@pytest.mark.parametrize(("count", "dimensions"), [(FEW - 1, 384), (5000, DIRECTIONS)])
def test_where_little_would_be_saved_there_is_none(count: int, dimensions: int) -> None:
    assert Shortlist.of(topics(count, dimensions)) is None
