"""Output with guesses is output without: every drafter with every option and feature, on the torch backend.

Requests come twice, the second time with their prompts in the cache and past answers known. Steps that are
launched ahead are the GPU engine's: `test_cuda_heads`, `test_cuda_drafts` and, with graphs, `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ridgeline.engine.schedule.request import Request
from tests.engine.speculate.matrix import DRAFTERS, Moody, drafter_of, model_of
from tests.engine.speculate.option_cases import GRAMMARS, OPTIONS, Answers, assert_alike, served, work
from tests.gpu.engines import Sizes, torch_runner

BOUND = 2e-4
SIZES = Sizes(step_tokens=40, max_running=16, num_blocks=48, max_context=64)
FEATURES = {
    "roomy": SIZES,
    "chunked": replace(SIZES, step_tokens=24, prefill_chunk=5),
    "preempted": replace(SIZES, step_tokens=24, prefill_chunk=7, num_blocks=6, max_running=4),
}
NAMES = (*OPTIONS, *GRAMMARS)
FEW = ("sampled", "greedy penalties", "logprobs", "grammar, sampled, penalties")
MODELS = {model_of(kind)[0].family: model_of(kind) for kind in DRAFTERS}
# Samples of one prompt and scores of prompts need more blocks than there are.
TOO_LARGE = ("several", "prompt logprobs")


def requests_of(names: tuple[str, ...], feature: str) -> list[Request]:
    kept = [name for name in names if feature != "preempted" or name not in TOO_LARGE]
    return work(kept, tokens=20 if feature == "preempted" else 9)


@cache
def plain(family: str, feature: str, names: tuple[str, ...]) -> Answers:
    """Without guesses, once for the drafters of one model."""
    spec, weights = MODELS[family]
    sizes = FEATURES[feature]
    return served(torch_runner(spec, weights, sizes), sizes, requests_of(names, feature))


def check(kind: str, feature: str, names: tuple[str, ...], seed: int = 0) -> None:
    spec, weights = model_of(kind)
    sizes, requests = FEATURES[feature], requests_of(names, feature)
    runner = torch_runner(spec, weights, sizes)
    speculation = Moody(drafter_of(kind, runner, sizes), spec.vocab_size, seed)
    expected = plain(spec.family, feature, names)
    assert_alike(served(runner, sizes, requests, speculation, times=2), expected, BOUND)
    if len(names) == len(NAMES) and kind != "ngram":
        assert speculation.stats().drafted > 20


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_with_every_option_together(kind):
    check(kind, "roomy", NAMES)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_with_chunks_and_preemption(kind):
    check(kind, "preempted", FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("feature", ["chunked", "preempted"])
def test_every_option_together_with_chunks_and_preemption(kind, feature):
    check(kind, feature, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", NAMES)
def test_every_option_alone(kind, feature, name):
    if feature != "preempted" or name not in TOO_LARGE:
        check(kind, feature, (name,), seed=1)
