"""Batched = alone, cache hit = miss, chunked = whole: nearly, by a stated tolerance; to the bit in
deterministic mode. float32 and bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.scheduler import Scheduler
from tests.gpu.collection import scaled
from tests.gpu.engines import Answer, Sizes, Work, answers, bits_of, cuda_runner, serve
from tests.gpu.models import (
    SIZES,
    SPEC,
    drawn,
    first_difference,
    greedy,
    largest_difference,
    model_weights,
    prompt,
)

# Of a log-probability; logits of this model are within ±6, bfloat16 keeps 8 bits of them.
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.1}
LENGTHS = scaled((1, 5, 31, 64, 200, 333, 800, 1500), (1, 19))
COUNT = scaled(16, 3)
LONG = scaled(1500, 40)


def _runner(dtype: str, deterministic: bool, sizes: Sizes = SIZES) -> Any:
    return cuda_runner(SPEC, model_weights(dtype), sizes, deterministic=deterministic)


def _assert_alike(
    one: list[list[Answer]], other: list[list[Answer]], dtype: str, deterministic: bool
) -> None:
    if deterministic:
        assert bits_of(one) == bits_of(other)
        return
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            assert a.error is None, a.error
            assert b.error is None, b.error
            found = first_difference(a, b, TOLERANCE[dtype])
            assert found is None, f"request {number}: {found}"


def _batched_is_alone(dtype: str, deterministic: bool) -> None:
    # Draws are compared to the bit alone: a race that is nearly a tie says nothing of the tokens in it.
    kinds = (greedy, drawn) if deterministic else (greedy, greedy)
    work: Work = [
        (prompt(length, seed=3), kinds[place % 2](COUNT, logprobs=8)) for place, length in enumerate(LENGTHS)
    ]
    runner = _runner(dtype, deterministic)
    alone = [serve(runner, SIZES, [item])[0] for item in work]
    _assert_alike(serve(runner, SIZES, work), alone, dtype, deterministic)


def _hit_is_miss(dtype: str, deterministic: bool) -> None:
    core = EngineCore(Scheduler(SIZES.limits()), _runner(dtype, deterministic))
    work = [(prompt(LONG, seed=4), greedy(COUNT, logprobs=8))]
    miss = answers(core, work)
    before = core.stats().prefix_hits
    hit = answers(core, work)
    assert core.stats().prefix_hits > before
    _assert_alike(hit, miss, dtype, deterministic)


def _chunked_is_whole(dtype: str, deterministic: bool) -> None:
    work = [(prompt(LONG, seed=5), greedy(COUNT, logprobs=8))]
    scored = [(prompt(LONG, seed=5), greedy(1, prompt_logprobs=0))]
    runner = _runner(dtype, deterministic)
    whole, whole_scores = serve(runner, SIZES, work), serve(runner, SIZES, scored)
    for chunk in scaled((61, 512, 1024), (7,)):
        sizes = replace(SIZES, prefill_chunk=chunk)
        _assert_alike(serve(runner, sizes, work), whole, dtype, deterministic)
        scores = serve(runner, sizes, scored)
        mine, theirs = (
            [each.logprob for each in found[0][0].prompt_logprobs] for found in (scores, whole_scores)
        )
        assert largest_difference(mine, theirs) <= (0.0 if deterministic else TOLERANCE[dtype]), chunk


def check_batched_is_alone_in_bfloat16() -> None:
    _batched_is_alone("bfloat16", deterministic=False)


def check_batched_is_alone_in_float32() -> None:
    _batched_is_alone("float32", deterministic=False)


def check_batched_is_alone_to_the_bit() -> None:
    _batched_is_alone("bfloat16", deterministic=True)


def check_batched_is_alone_to_the_bit_in_float32() -> None:
    _batched_is_alone("float32", deterministic=True)


def check_a_cache_hit_is_a_miss() -> None:
    _hit_is_miss("bfloat16", deterministic=False)


def check_a_cache_hit_is_a_miss_to_the_bit() -> None:
    _hit_is_miss("bfloat16", deterministic=True)


def check_chunked_is_whole() -> None:
    _chunked_is_whole("bfloat16", deterministic=False)


def check_chunked_is_whole_to_the_bit() -> None:
    _chunked_is_whole("bfloat16", deterministic=True)
