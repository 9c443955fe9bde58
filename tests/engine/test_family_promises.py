"""Every family keeps the engine's promises: cache hit = miss, batched = alone, chunked = whole.

Through the real engine on tiny random checkpoints: with tolerance in the default modes, bit for bit in
deterministic mode. test_families compares the same models with transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.limits.machine_limits import DeviceCeilings, limits_of
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.start.build import BuiltEngine, build_engine
from ridgeline.engine.start.native_build import NativeBuild
from ridgeline.engine.start.torch_build import TorchBuild
from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.read_spec import read_spec
from tests.models.tiny_checkpoints import MODELS, tiny_model
from tests.models.tiny_families import VOCAB


class Mode(NamedTuple):
    backend: str
    settings: dict[str, Any]
    tolerance: float  # of a log-probability


FLOATS = {"weights": "float32", "kv_dtype": "float32"}
MODES = {
    "torch": Mode("torch", {"weights": "float32"}, 1e-4),
    "native": Mode("native", FLOATS, 1e-4),
    "deterministic": Mode("native", {**FLOATS, "deterministic": True}, 0.0),
}
PROMPT_TOKENS = 53  # four blocks, the last one partly filled; several of the tiny models' windows
OUTPUT_TOKENS = 5
ANSWERED = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, logprobs=1, ignore_eos=True)
SCORED = SamplingParams(
    temperature=0.0, max_tokens=OUTPUT_TOKENS, logprobs=1, prompt_logprobs=0, ignore_eos=True
)

Scores = list[tuple[int, float]]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def machine_is_not_measured() -> Iterator[None]:
    """Its limits, and the cost of determinism, are figures for the start-up message: a second per engine."""
    with pytest.MonkeyPatch.context() as patch:
        for build in (NativeBuild, TorchBuild):
            patch.setattr(
                build, "limits", lambda self: limits_of(self._spec, 1, DeviceCeilings(1.0, 1.0, 0.0))
            )
        patch.setattr(NativeBuild, "_cost_of_determinism", lambda self: "not measured")
        yield


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


class Promises:
    """The first prompt's tokens and log-probabilities, computed in different company and different pieces."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built = built
        self.prompts = [prompt(0, PROMPT_TOKENS), *(prompt(seed, 3 + 11 * seed) for seed in range(1, 5))]

    def scores(
        self, count: int = 1, rounds: int = 1, params: SamplingParams = SCORED, **limits: Any
    ) -> tuple[Scores, int]:
        """And how many of its tokens were found in the cache, in the last of the rounds."""
        scheduler = Scheduler(replace(self._built.core.scheduler.limits, **limits))
        core = EngineCore(scheduler, self._built.core.runner)
        for _ in range(rounds):
            found: Scores = []
            cached = 0
            for index, tokens in enumerate(self.prompts[:count]):
                core.add(Request(str(index), tokens, params))
            while core.has_work:
                for delta in core.step():
                    if delta.request_id != "0":
                        continue
                    found += [(p.token, p.logprob) for p in (*delta.prompt_logprobs, *delta.logprobs)]
                    if delta.timing is not None:
                        cached = delta.timing.cached_tokens
        return found, cached


@pytest.mark.parametrize("mode", MODES)
def test_hits_batches_and_chunks_give_the_same_answer(
    mode: str, checkpoint: Path, weights_are_not_kept: None
) -> None:
    backend, settings, tolerance = MODES[mode]
    if (reason := refusal(read_spec(checkpoint), backend)) is not None:
        pytest.skip(reason)
    config = EngineConfig(
        model=str(checkpoint), backend=backend, kv_tokens=1024, step_tokens=128, threads=1, **settings
    )
    promises = Promises(build_engine(config, checkpoint))
    alone, cached = promises.scores(prefix_cache=False)
    assert len(alone) == PROMPT_TOKENS - 1 + OUTPUT_TOKENS
    assert cached == 0
    batched, _ = promises.scores(count=5, prefix_cache=False)
    chunked, _ = promises.scores(prefix_cache=False, prefill_chunk=7)
    hit, cached = promises.scores(rounds=2, params=ANSWERED)  # a scored prompt is computed whole
    assert cached >= PROMPT_TOKENS // 16 * 16 - 16
    assert_same(batched, alone, tolerance)
    assert_same(chunked, alone, tolerance)
    assert_same(hit, alone[-OUTPUT_TOKENS:], tolerance)


def assert_same(actual: Scores, expected: Scores, tolerance: float) -> None:
    assert [token for token, _ in actual] == [token for token, _ in expected]
    for (_, ours), (_, theirs) in zip(actual, expected, strict=True):
        assert abs(ours - theirs) <= tolerance
