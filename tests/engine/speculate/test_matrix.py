"""Output with guesses is output without: every drafter with every option and feature, on the torch backend.

Requests come twice, the second time with their prompts in the cache and past answers known. Steps that are
launched ahead are the GPU engine's: `test_cuda_heads`, `test_cuda_drafts` and, with graphs, `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ridgeline.engine.schedule.request import Request
from tests.engine.speculate.matrix import DRAFTERS, HEADS, TEXT, Moody, drafter_of, model_of
from tests.engine.speculate.option_cases import (
    NAMES,
    UNGUESSABLE,
    Answers,
    assert_alike,
    assert_ended_as_asked,
    copies,
    run,
    served,
    work,
)
from tests.gpu.engines import Sizes, torch_runner

BOUND = 2e-4
SIZES = Sizes(step_tokens=48, max_running=24, num_blocks=96, max_context=64)
FEATURES = {
    "roomy": SIZES,
    "chunked": replace(SIZES, step_tokens=24, prefill_chunk=5),
    "preempted": replace(SIZES, step_tokens=24, prefill_chunk=7, num_blocks=8, max_running=4),
}
FEW = ("sampled", "greedy penalties", "logprobs", "stop string", "ends", "schema", "grammar")
MODELS = {model_of(kind)[0].family: model_of(kind) for kind in DRAFTERS}


def requests_of(names: tuple[str, ...], feature: str, likely: bool) -> list[Request]:
    """One option alone comes four times where sequences are to be preempted."""
    requests = work(list(names), tokens=20 if feature == "preempted" else 9, likely=likely)
    return copies(requests, 4) if feature == "preempted" and len(names) == 1 else requests


@cache
def plain(family: str, feature: str, names: tuple[str, ...], likely: bool) -> Answers:
    """Without guesses, once for the drafters of one model."""
    spec, weights = MODELS[family]
    sizes = FEATURES[feature]
    answers = served(torch_runner(spec, weights, sizes), sizes, requests_of(names, feature, likely))
    assert_ended_as_asked(answers)
    return answers


def check(kind: str, feature: str, names: tuple[str, ...], likely: bool = True, seed: int = 0) -> None:
    """Also that what is tested took place: guesses, right ones, preemption, and hits of the prefix cache."""
    spec, weights = model_of(kind)
    sizes, requests = FEATURES[feature], requests_of(names, feature, likely)
    runner = torch_runner(spec, weights, sizes)
    speculation = Moody(drafter_of(kind, runner, sizes, likely=likely), spec.vocab_size, seed)
    found = run(runner, sizes, requests, speculation, times=2, repeats=True)
    assert_alike(found.answers, plain(spec.family, feature, names, likely), BOUND)
    stats = speculation.stats()
    if kind not in TEXT or set(names) - set(UNGUESSABLE):
        assert stats.drafted > 0
    if len(names) > 1:
        assert stats.drafted > 20
        assert 0 < stats.accepted < stats.drafted or not likely
    assert found.preemptions > 0 or feature != "preempted"
    assert found.prefix_hits > 0 or not found.repeated
    assert found.repeated or names == ("prompt logprobs",) or not likely


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_with_every_option_together(kind):
    check(kind, "roomy", NAMES)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_with_chunks_and_preemption(kind):
    check(kind, "preempted", FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft_model", *HEADS])
@pytest.mark.parametrize("feature", ["roomy", "chunked"])
def test_guesses_that_are_hardly_ever_right(kind, feature):
    check(kind, feature, NAMES, likely=False)


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
    check(kind, feature, (name,), seed=1)
