"""Every path of the native library stays close to float32 on the same weights, over wikitext-2.

Mean KL divergence of the next-token distribution from float32 weights and KV: at most 0.001 for bfloat16
weights, 0.005 for 8 bits, 0.012 for 4 bits. The default run is short: after 80 tokens of context 8 to 256
tokens per path, by the speed of the instruction set. The slow run has 16 × 512 on the best one, 4 × 512 on
the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.cpu.library import BLOCK_TOKENS, KvFormat
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.quality.conftest import AS_STORED, FORMS, packed_table
from tests.quality.native_paths import (
    ISAS,
    KV_FORMATS,
    Course,
    Regime,
    decoder_for,
    divergences,
    in_float32,
    kl,
    logits_of,
    logprobs,
    reference,
)

ONE_ROW = Regime("1 row", (1,))
FEW_ROWS = Regime("4–12 rows", (4, 12))
MANY_ROWS = Regime("64 rows", (1,), 64)
MOST_ROWS = Regime("128 rows", (1,), 128)  # 4-bit weights are expanded to bytes


class Size(NamedTuple):
    """How much of a text is measured."""

    sequences: int
    length: int


# What takes a second or two: a core with AVX-512 computes 100 to 300 tokens a second one by one, 400 to 1,000
# in company; with the portable kernels it is 30 and 60.
FOUR_ROWS, EIGHT_ROWS = Regime("4 rows", (4,)), Regime("8 rows", (8,))
TWICE_32_ROWS, FOUR_TIMES_32_ROWS = Regime("2 × 32 rows", (2,), 32), Regime("4 × 32 rows", (4,), 32)
BRIEF = {
    "portable": {ONE_ROW: Size(1, 8), FOUR_ROWS: Size(4, 8), TWICE_32_ROWS: Size(2, 32)},
    "others": {ONE_ROW: Size(1, 16), FOUR_ROWS: Size(4, 16), FOUR_TIMES_32_ROWS: Size(4, 32)},
    ISAS[0] if ISAS else "best": {
        ONE_ROW: Size(1, 32),
        EIGHT_ROWS: Size(8, 32),
        TWICE_32_ROWS: Size(8, 32),
        FOUR_TIMES_32_ROWS: Size(8, 32),
    },
}
BRIEF_CONTEXT = 80
BRIEF_TEXT = Size(8, 32)
WHOLE_REGIMES = (ONE_ROW, FEW_ROWS, MANY_ROWS, MOST_ROWS)
WHOLE_SIZE = Size(16, 512)
WHOLE_SIZE_OF_OTHERS = Size(4, 512)
TORCH_TOKENS = 256
TOLERANCE = 1e-3  # of a logit, relative to the largest of its row


@pytest.fixture(scope="session")
def brief_text(text):
    return text(BRIEF_CONTEXT, *BRIEF_TEXT)


@pytest.fixture(scope="session")
def brief_reference(table, brief_text):
    return reference(table, brief_text)


@pytest.mark.parametrize("isa", ISAS)
def test_the_mean_divergence_from_float32_is_small(form, table, brief_text, brief_reference, isa):
    for kv_format in brief_kv_formats(form, isa):
        course = Course(decoder_for(table, brief_text, kv_format, isa), brief_text)
        means = mean_divergences(course, BRIEF.get(isa, BRIEF["others"]), brief_reference)
        # None is nothing: then float32 would have been compared with itself.
        assert all(0 < mean <= form.bound for mean in means.values()), (kv_format.name, means)


def brief_kv_formats(form, isa):
    """Weights and KV are read by their own kernels: the slow sets meet each of them, but not each pair."""
    return KV_FORMATS if isa not in ("avx2", "portable") else [KV_FORMATS[FORMS.index(form) % 2]]


def test_regimes_differ_from_each_other_by_no_more_than_from_float32(form, table, brief_text):
    """What a request gets alone and what it gets in company, in the default mode."""
    course = Course(decoder_for(table, brief_text, KvFormat.BF16, ISAS[0]), brief_text)
    size = Size(2, 32)
    alone, chunked = (logprobs(logits_of(course, size, regime)) for regime in (ONE_ROW, MANY_ROWS))
    for expected, actual in ((alone, chunked), (chunked, alone)):
        assert kl(expected, actual).mean() <= form.bound


def test_float32_weights_give_the_logits_of_torch(smollm2_path, text):
    """The base of the divergence is itself right; other instruction sets: test_native_logits."""
    whole = text(0, 1, TORCH_TOKENS)
    expected = torch_logits(smollm2_path, whole.endings[0].tolist())
    exact = in_float32(packed_table(smollm2_path, AS_STORED))
    course = Course(decoder_for(exact, whole, KvFormat.F32, ISAS[0]), whole)
    actual = logits_of(course, Size(1, TORCH_TOKENS), MANY_ROWS)[0]
    difference = np.abs(actual - expected).max(-1) / np.abs(expected).max(-1)
    assert difference.max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("isa", ISAS)
def test_the_mean_divergence_over_many_tokens_is_small(form, table, whole_text, whole_reference, isa):
    """Prints the rows of the table in docs/performance/quality.md (pytest -s)."""
    size = WHOLE_SIZE if isa == ISAS[0] else WHOLE_SIZE_OF_OTHERS
    found = {}
    for kv_format in KV_FORMATS:
        course = Course(decoder_for(table, whole_text, kv_format, isa), whole_text)
        means = mean_divergences(course, dict.fromkeys(WHOLE_REGIMES, size), whole_reference)
        figures = " | ".join(f"{mean:.5f}" for mean in means.values())
        print(f"\n| {form.name} | {isa} | {kv_format.name.lower()} | {figures} | {form.bound} |", flush=True)
        found |= {(kv_format.name, regime): mean for regime, mean in means.items()}
    assert all(0 < mean <= form.bound for mean in found.values()), found


@pytest.fixture(scope="session")
def whole_text(text):
    return text(0, *WHOLE_SIZE)


@pytest.fixture(scope="session")
def whole_reference(table, whole_text):
    return reference(table, whole_text)  # 1.6 GB


def mean_divergences(course, sizes, expected):
    return {regime.name: divergences(course, size, regime, expected).mean() for regime, size in sizes.items()}


def torch_logits(path, tokens):
    spec = read_spec(path)
    decoder = Decoder(spec, load_weights(path, spec, torch.float32), select_backend("torch"))
    blocks = list(range(-(-len(tokens) // BLOCK_TOKENS)))
    kv = allocate_kv(spec, len(blocks), BLOCK_TOKENS, torch.float32)
    with torch.inference_mode():
        step = StepInputs.from_rows([InputRow(tokens, 0, blocks, logits_from=0)], BLOCK_TOKENS)
        return decoder.forward(step, kv).numpy()
