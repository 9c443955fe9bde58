"""BM25 in memory against its definition, and against bm25s."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ridgeline.retrieval.lexical.index import LexicalIndex, best_rows
from ridgeline.retrieval.lexical.reference import K1, B, bm25
from ridgeline.retrieval.lexical.terms import packed, packed_text, terms_of


def corpus(count: int, seed: int = 1) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [[f"w{n}" for n in rng.zipf(1.4, rng.integers(1, 60)) if n < 500] or ["w1"] for _ in range(count)]


def test_terms_are_lower_case_words_of_any_script_without_stop_words() -> None:
    assert terms_of("The Zürich-Files: 3 größer ДОМ, a_b") == ["zürich", "files", "3", "größer", "дом", "a_b"]


def test_the_index_scores_as_the_definition_says_however_it_was_filled() -> None:
    texts = corpus(300)
    index = LexicalIndex()
    for first, end in ((0, 1), (1, 2), (2, 150), (150, 160), (160, 300)):
        index.add([packed(Counter(text)) for text in texts[first:end]])
    alive = np.random.default_rng(2).random(300) < 0.8
    living = [text for text, there in zip(texts, alive, strict=True) if there]
    for query in (["w1"], ["w3", "w7", "w3"], ["w2", "absent"], []):
        found = index.scores(query, alive)
        np.testing.assert_allclose(found[alive], bm25(query, living), rtol=1e-12)
        assert (found[~alive] == 0).all()


def test_the_best_rows_are_allowed_and_ordered() -> None:
    scores = np.array([0.0, 2.0, 1.0, 2.0, 3.0])
    allowed = np.array([True, True, True, True, False])
    assert best_rows(scores, allowed, 2).tolist() == [1, 3]
    assert best_rows(scores, allowed, 9).tolist() == [1, 3, 2]


def test_scores_equal_those_of_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s")
    texts = corpus(400, seed=4)
    oracle = bm25s.BM25(method="lucene", k1=K1, b=B)
    oracle.index(texts, show_progress=False)
    index = LexicalIndex()
    index.add([packed(Counter(text)) for text in texts])
    for query in (["w2", "w9"], ["w5"], ["w11", "w40", "w3"]):
        # Lucene leaves the constant factor k1 + 1 out.
        expected = oracle.get_scores(query) * (K1 + 1)
        np.testing.assert_allclose(index.scores(query, np.ones(400, bool)), expected, rtol=1e-4, atol=1e-5)


def test_a_chunk_of_stop_words_has_no_terms() -> None:
    index = LexicalIndex()
    index.add([packed_text("to be or not"), packed_text("question")])
    assert index.scores(["question"], np.ones(2, bool)).tolist()[0] == 0
