"""Chunkers on any text: offsets are exact, chunks cover the text, overlaps are as asked."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.retrieval.chunking.code import code_blocks
from ridgeline.retrieval.chunking.markdown import sections
from ridgeline.retrieval.chunking.sentences import sentences
from ridgeline.retrieval.chunking.spans import Span, token_count
from ridgeline.retrieval.chunking.strategy import AUTO, KINDS, Kind, Strategy, chunk
from ridgeline.retrieval.chunking.tokens import token_chunks


def words(text: str) -> list[int]:
    """A tokenizer as simple as can be: where words and marks begin."""
    return [found.start() for found in re.finditer(r"\w+|[^\w\s]", text)]


TEXTS = st.text(
    alphabet=st.sampled_from("ab c.\n!?#`~ -\t。é\U0001f600{}") | st.characters(codec="utf-8"), max_size=600
)
SIZES = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size // 2)))


@given(TEXTS, SIZES)
def test_token_chunks_cover_the_text_and_share_exactly_the_overlap(text: str, sizes: tuple[int, int]) -> None:
    size, overlap = sizes
    tokens = words(text)
    chunks = token_chunks(Span(0, len(text)), tokens, size, overlap)
    if not tokens:
        assert chunks == []
        return
    assert chunks[0].begin == 0
    assert chunks[-1].end == len(text)
    for chunk_, following in itertools.pairwise(chunks):
        assert token_count(tokens, chunk_) == size
        shared = Span(following.begin, chunk_.end)
        assert token_count(tokens, shared) == overlap
    assert 1 <= token_count(tokens, chunks[-1]) <= size


@given(TEXTS, SIZES, st.sampled_from(KINDS))
def test_no_token_is_lost_and_no_chunk_is_too_long(text: str, sizes: tuple[int, int], kind: Kind) -> None:
    size, overlap = sizes
    tokens = words(text)
    chunks = chunk(text, tokens, Strategy(kind, size, overlap))
    covered = [False] * len(text)
    for one in chunks:
        assert 0 <= one.begin < one.end <= len(text)
        assert 1 <= token_count(tokens, one) <= size
        covered[one.begin : one.end] = [True] * (one.end - one.begin)
    assert all(covered[i] for i, letter in enumerate(text) if not letter.isspace())
    assert chunks == sorted(chunks)
    for before, after in itertools.pairwise(chunks):
        assert before.end < after.end, "a chunk adds something to the one before it"
        shared = Span(after.begin, max(after.begin, before.end))
        assert token_count(tokens, shared) <= overlap


@given(TEXTS)
def test_units_are_the_text(text: str) -> None:
    blocks = [block for section in sections(text) for block in section]
    for units in (sentences(text), blocks, code_blocks(text)):
        assert "".join(text[unit.begin : unit.end] for unit in units) == text


def test_a_sentence_ends_at_its_mark_and_not_at_an_abbreviation() -> None:
    text = 'Dr. Smith met J. Doe, i.e. his friend. "Really?" he asked.  Yes!\n\nA title\n\nEnd'
    found = [text[one.begin : one.end].strip() for one in sentences(text)]
    assert found == [
        "Dr. Smith met J. Doe, i.e. his friend.",
        '"Really?"',
        "he asked.",
        "Yes!",
        "A title",
        "End",
    ]


def test_markdown_is_cut_at_headings_and_never_inside_a_fence_that_fits() -> None:
    text = "# One\n\nfirst\n\n```py\n# not a heading\n\nx = 1\n```\n\n## Two\nsecond\n"
    found = [[text[block.begin : block.end] for block in blocks] for blocks in sections(text)]
    assert found == [
        ["# One\n\n", "first\n\n", "```py\n# not a heading\n\nx = 1\n```\n", "\n"],
        ["## Two\nsecond\n"],
    ]


def test_code_is_cut_between_definitions() -> None:
    text = "import os\n\n\ndef a():\n    return 1\n\n\ndef b(\n    x,\n):\n    return x\n"
    found = [text[block.begin : block.end].strip() for block in code_blocks(text)]
    assert found == ["import os", "def a():\n    return 1", "def b(\n    x,\n):\n    return x"]


def test_auto_is_800_tokens_with_400_shared() -> None:
    text = "word " * 2000
    chunks = chunk(text, words(text), AUTO)
    assert [len(text[one.begin : one.end].split()) for one in chunks] == [800, 800, 800, 800]
    assert [one.begin for one in chunks] == [0, 2000, 4000, 6000]


def test_hostile_runs_are_read_in_linear_time() -> None:
    """Quadratic scanning of these would take hours, not a moment."""
    for text in ("." * 300_000, "\n " * 150_000, '."' * 150_000, "a" * 300_000, "`" * 300_000, "#" * 300_000):
        assert sum(one.end - one.begin for one in sentences(text)) == len(text)
        assert sections(text)
        assert code_blocks(text)


def test_an_overlap_as_large_as_the_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap < size"):
        token_chunks(Span(0, 3), [0], 4, 4)
