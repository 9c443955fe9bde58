"""Output with guesses is output without on the GPU engine, in Triton's interpreter: every option, whatever is
guessed, with steps launched ahead, chunks, preemption and cached prefixes.

In float32 two tokens are never tied here, so the tokens must be the same; log-probabilities differ by
rounding only. In deterministic mode they are the same bits.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.schedule.request import Request, Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import MOST_DRAFTS, Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.linear import gemv
from tests.engine.speculate.option_cases import Answers, assert_alike, served, work
from tests.gpu.engines import Sizes, cuda_runner, family, poisoned_memory, weights_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")

SIZES = Sizes(step_tokens=96, max_running=64, num_blocks=96, max_context=64)
SPEC = family("qwen3", num_layers=1)
LOGPROB_BOUND = 2e-5


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch):
    """Unwritten memory is NaN; the interpreter's time goes by programs: let one have many rows."""
    config = gemv.gemv_config

    def wide(*args: int, **options: object) -> gemv.GemvConfig:
        return replace(config(*args, **options), block_n=64)  # type: ignore[arg-type]

    monkeypatch.setattr(gemv, "gemv_config", wide)
    with poisoned_memory():
        yield


class Oracle:
    """Guesses what was said without guesses; at times other tokens, ends, ids without a token."""

    name = "oracle"
    waits = True
    longest = MOST_DRAFTS

    def __init__(self, answers: Answers, wrong: float) -> None:
        self._answers, self._wrong, self._rng = answers, wrong, random.Random(2)
        self._due = 0.0  # wrong guesses: how many are drafted depends on measured times, their share must not

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        return [self._draft(seq, most) for seq in seqs]

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def passes(self, length: int) -> int:
        return length

    def behind(self, seq: Sequence) -> int | None:
        return 0

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        return 0

    def _draft(self, seq: Sequence, most: int) -> Draft:
        rng, said = self._rng, self._answers[seq.request.request_id, seq.index].tokens[seq.num_output :]
        said = [*said, *(rng.randrange(SPEC.vocab_size) for _ in range(most))][:most]
        others = [rng.randrange(SPEC.vocab_size), *seq.end_ids, SPEC.vocab_size + 3, -1]
        return Draft([rng.choice(others) if self._is_wrong() else token for token in said])

    def _is_wrong(self) -> bool:
        self._due += self._wrong
        wrong = self._due >= 1
        self._due -= wrong
        return wrong


def check(
    requests: list[Request], length: int, wrong: float, sizes: Sizes = SIZES, **runner: object
) -> Speculation:
    tested = cuda_runner(SPEC, weights_of(SPEC, torch.float32), sizes, **runner)
    expected = served(tested, sizes, requests)
    tested.drop_sequences()
    assert not any(answer.error for answer in expected.values())
    speculation = Speculation(Oracle(expected, wrong), SPEC.vocab_size, length)
    found = served(tested, sizes, requests, speculation)
    tested.drop_sequences()
    assert_alike(found, expected, 0.0 if runner.get("deterministic") else LOGPROB_BOUND)
    assert len(tested._rows) == 0
    return speculation


def test_some_options_together_with_right_and_wrong_guesses():
    """One of each way in which a sample behind a draft is taken; all options are in the slow tests."""
    names = ["sampled", "greedy penalties", "grammar, sampled, penalties"]
    few = replace(SIZES, max_running=16)
    speculation = check(work(names, tokens=6), length=3, wrong=0.34, sizes=few)
    assert 0 < speculation.stats().accepted < speculation.stats().drafted


@pytest.mark.slow
def test_every_option_together_with_right_and_wrong_guesses():
    speculation = check(work(), length=3, wrong=0.2)
    stats = speculation.stats()
    assert stats.drafted > 60
    assert 0.2 * stats.drafted < stats.accepted < stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampled", "penalties", "thinks, penalties", "grammar, sampled, penalties"])
def test_one_alone_with_right_guesses(name):
    """Nearly all are accepted: what is not verified would show."""
    speculation = check(work([name]), length=4, wrong=0.0)
    stats = speculation.stats()
    assert stats.accepted >= 4


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [1, 5, 15])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_option_with_any_guesses(length, wrong, deterministic):
    check(work(), length, wrong, deterministic=deterministic)


@pytest.mark.slow
def test_deterministic_with_chunks_and_preemption_bit_for_bit():
    few = replace(SIZES, step_tokens=24, prefill_chunk=7, num_blocks=6, max_running=4)
    names = ["sampled", "greedy penalties", "logprobs", "grammar"]
    check(work(names, tokens=20), length=3, wrong=0.15, sizes=few, deterministic=True)


@pytest.mark.slow
def test_penalties_of_more_drafts_than_there_are_spare_rows(monkeypatch):
    monkeypatch.setattr("ridgeline.engine.run.cuda.verified_rows.SPARE_ROWS", 3)
    speculation = check(work(["penalties", "greedy penalties"]), length=4, wrong=0.0)
    assert 0 < speculation.stats().accepted < speculation.stats().drafted
