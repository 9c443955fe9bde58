"""A row's arithmetic depends on the number of rows in a step, nothing else; deterministic, not even on that.

Bit for bit, on every instruction set: the first layers of SmolLM2 with a small vocabulary, in every form of
weights and KV. That regimes differ by little is in test_divergence; the engine's share is in tests/engine.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ridgeline.ops.cpu.library import KvFormat, PackedMatrix, packed_bytes
from tests.quality.native_paths import ISAS, ROUNDED_KV_FORMATS, Course, Regime, Text, decoder_for, logits_of

LAYERS, VOCAB = 2, 256
CONTEXT = 64
SIZE = (9, 4)  # sequences, tokens

ALONE = Regime("alone", (1,))
BATCHES = (Regime("2 and 7 rows", (2, 7)), Regime("9 rows", (9,)))
CHUNKS = (Regime("chunks of 2", (1,), 2), Regime("36 rows", (9,), 4))

EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
EVERY_KV = pytest.mark.parametrize("kv_format", ROUNDED_KV_FORMATS, ids=lambda kv: f"kv-{kv.name.lower()}")


@pytest.fixture(scope="session")
def beginning(table):
    """The first layers, and a vocabulary of the first tokens."""
    head = first_rows(table.lm_head, VOCAB)
    return replace(table, vocab=VOCAB, embedding=head, lm_head=head, layers=table.layers[:LAYERS])


@pytest.fixture(scope="module")
def random_text():
    ids = np.random.default_rng(3).integers(0, VOCAB, CONTEXT + SIZE[0] * SIZE[1], np.int32)
    return Text(ids[:CONTEXT], ids[CONTEXT:].reshape(SIZE))


@EVERY_KV
@EVERY_ISA
def test_deterministic_alone_equals_batched_equals_chunked_equals_cached(
    beginning, random_text, isa, kv_format
):
    decoder = decoder_for(beginning, random_text, kv_format, isa, deterministic=True, copies=2)
    expected = from_scratch(decoder, random_text, -1)
    for copy, chunk in enumerate((CONTEXT, 5)):  # each time all sequences share the blocks of one context
        course = Course(decoder, random_text, chunk=chunk, first_block=copy * random_text.blocks)
        for regime in (*BATCHES, *CHUNKS) if copy == 0 else BATCHES[-1:]:
            actual = logits_of(course, SIZE, regime)[-1]
            assert np.array_equal(actual, expected), f"{regime.name}, context in chunks of {chunk}"


@EVERY_ISA
def test_the_default_mode_would_fail_that(form, beginning, random_text, isa):
    """Only bfloat16 knows a single regime, and even that not where tiles pay."""
    course = Course(decoder_for(beginning, random_text, KvFormat.BF16, isa), random_text)
    alone, together = (logits_of(course, (8, 4), regime) for regime in (ALONE, Regime("8 rows", (8,))))
    assert np.array_equal(alone, together) == (form.name == "bfloat16" and isa != "amx")


@EVERY_KV
@EVERY_ISA
def test_by_default_each_regime_is_invariant_by_itself(beginning, random_text, isa, kv_format):
    decoder = decoder_for(beginning, random_text, kv_format, isa, copies=2)
    course = Course(decoder, random_text)
    elsewhere = Course(decoder, random_text, first_block=random_text.blocks)
    for first, *others in regimes_of(isa):
        expected = logits_of(course, SIZE, first)
        assert np.array_equal(expected, logits_of(elsewhere, SIZE, first)), f"{first.name}, in other blocks"
        for regime in others:
            assert np.array_equal(expected, logits_of(course, SIZE, regime)), f"{first.name}, {regime.name}"


@EVERY_ISA
def test_the_number_of_threads_changes_nothing(beginning, random_text, isa):
    one, three = (
        Course(decoder_for(beginning, random_text, KvFormat.BF16, isa, threads=threads), random_text)
        for threads in (1, 3)
    )
    for regime in (ALONE, BATCHES[-1], CHUNKS[-1]):
        assert np.array_equal(logits_of(one, SIZE, regime), logits_of(three, SIZE, regime)), regime.name


def regimes_of(isa: str) -> list[tuple[Regime, ...]]:
    """Numbers of rows that are computed alike."""
    if isa == "amx":  # tiles from some numbers of rows on, and for the attention of neighbouring tokens
        return [(ALONE,), (Regime("2 rows", (2,)), Regime("3 rows", (3,))), CHUNKS[-1:]]
    return [(ALONE,), (*BATCHES, *CHUNKS)]


def from_scratch(decoder, text, index):
    """One sequence alone, one token at a time, its context included: the logits of its ending."""
    whole = Text(text.context[:0], np.concatenate([text.context, text.endings[index]])[None, :])
    return logits_of(Course(decoder, whole), whole.endings.shape, ALONE)[0, len(text.context) :]


def first_rows(matrix: PackedMatrix, n: int) -> PackedMatrix:
    """Panels of 16 rows lie one after the other."""
    return PackedMatrix(n, matrix.k, matrix.format, matrix.data[: packed_bytes(matrix.format, n, matrix.k)])
