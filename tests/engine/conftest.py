"""One real SmolLM2 engine for the tests of this folder, and other limits over the same weights.

It is deterministic: tests compare what was computed alone with what was computed in a batch, token for token.
"""

from dataclasses import dataclass, field, replace

import pytest

from ridgeline import LLM
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import FinishReason, Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.models.weights import packed_cache
from ridgeline.telemetry.timing import TimingRecord

KV_TOKENS = 16_384


@pytest.fixture(scope="session")
def llm(smollm2_path) -> LLM:
    return LLM(str(smollm2_path), kv_tokens=KV_TOKENS, deterministic=True)


@pytest.fixture(autouse=True)
def nothing_is_cached(request):
    """Schedulers of other tests write into this engine's memory: what its own had cached there is gone."""
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").engine.core.scheduler.pool.drop_cached()


@pytest.fixture(scope="module")
def weights_are_not_kept():
    """Packed weights of temporary checkpoints, or in unused formats, stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_cache, "source_key", lambda *args: {})
        yield


@dataclass
class Outcome:
    """What one sample of one request came to, at the level of tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    timing: TimingRecord | None = None


class Driver:
    """Runs requests through a separate core, which shares the fixture's weights and KV memory."""

    def __init__(self, llm: LLM, **limits) -> None:
        runner = llm.engine.core.runner
        self.core = EngineCore(Scheduler(replace(llm.engine.core.scheduler.limits, **limits)), runner)
        self._count = 0

    def run(self, work: list[tuple[list[int], SamplingParams]]) -> list[list[Outcome]]:
        """All the work together; for each request its n outcomes."""
        outcomes: dict[str, list[Outcome]] = {}
        for prompt_ids, params in work:
            name = f"r{self._count}"
            self._count += 1
            outcomes[name] = [Outcome() for _ in range(params.n)]
            self.core.add(Request(name, prompt_ids, params))
        while self.core.has_work:
            for delta in self.core.step():
                outcome = outcomes[delta.request_id][delta.index]
                outcome.tokens += delta.tokens
                outcome.logprobs += delta.logprobs
                outcome.prompt_logprobs += delta.prompt_logprobs
                if delta.finish_reason is not None:
                    outcome.finish_reason = delta.finish_reason
                    outcome.error = delta.error
                    outcome.timing = delta.timing
        self.core.scheduler.check_integrity()
        return list(outcomes.values())

    def one(self, prompt_ids: list[int], params: SamplingParams) -> Outcome:
        return self.run([(prompt_ids, params)])[0][0]


@pytest.fixture
def driver(llm):
    """driver(prefill_chunk=7, num_blocks=40, …) → a Driver with those limits."""
    return lambda **limits: Driver(llm, **limits)
