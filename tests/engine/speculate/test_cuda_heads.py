"""Draft heads on the GPU engine, in Triton's interpreter: they read the hidden states that the reference's
read, so they guess the same; and no guess changes an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.linear import gemv
from tests.engine.speculate.matrix import DRAFTERS, Moody, drafter_of, model_of
from tests.engine.speculate.option_cases import NAMES, assert_alike, assert_ended_as_asked, run, served, work
from tests.gpu.engines import Sizes, cuda_runner, poisoned_memory, torch_runner

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")

SIZES = Sizes(step_tokens=32, max_running=16, num_blocks=48, max_context=64)
LOGPROB_BOUND = 2e-5
ALIKE = 0.9  # least share of guesses that both backends make; hidden states differ by rounding


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch):
    """As in test_cuda_drafts: unwritten memory is NaN, and a program has many rows."""
    config = gemv.gemv_config

    def wide(*args: int, **options: object) -> gemv.GemvConfig:
        return replace(config(*args, **options), block_n=64)  # type: ignore[arg-type]

    monkeypatch.setattr(gemv, "gemv_config", wide)
    with poisoned_memory():
        yield


def watch(drafter) -> dict[tuple[int, ...], list[int]]:
    said: dict[tuple[int, ...], list[int]] = {}
    propose = drafter.propose

    def watched(seqs: list[Sequence], most: int) -> list[Draft | None]:
        drafts = propose(seqs, most)
        said.update(
            {tuple(s.tokens): list(d.tokens) for s, d in zip(seqs, drafts, strict=True) if d is not None}
        )
        return drafts

    drafter.propose = watched
    return said


def speculated(kind: str, runner, sizes: Sizes, requests, length: int):
    spec, _ = model_of(kind)
    drafter = drafter_of(kind, runner, sizes)
    said = watch(drafter)
    speculation = Speculation(drafter, spec.vocab_size, length)
    with torch.inference_mode(False):
        found = served(runner, sizes, requests, speculation)
    assert speculation.stats().drafted > 0
    return found, said


def check(kind: str, names: list[str], sizes: Sizes = SIZES, tokens: int = 6, **runner: object) -> None:
    spec, weights = model_of(kind)
    requests = work(names, tokens=tokens)
    plain = cuda_runner(spec, weights, sizes, **runner)
    expected = served(plain, sizes, requests)
    found, said = speculated(kind, cuda_runner(spec, weights, sizes, **runner), sizes, requests, 3)
    assert_alike(found, expected, 0.0 if runner.get("deterministic") else LOGPROB_BOUND)
    _, reference = speculated(kind, torch_runner(spec, weights, sizes), sizes, requests, 3)
    both = [tokens for tokens in said if tokens in reference]
    pairs = [(mine, other) for each in both for mine, other in zip(said[each], reference[each], strict=False)]
    assert len(pairs) >= 3
    assert sum(mine == other for mine, other in pairs) >= ALIKE * len(pairs)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in ("eagle3", "medusa")), "mtp"]
)
def test_it_guesses_as_on_the_reference_and_changes_nothing(kind):
    """Prompts come in chunks beside decodes, with padding between the two."""
    check(kind, ["logprobs", "minimum"], replace(SIZES, step_tokens=16, prefill_chunk=12), tokens=6)


def mixed(kind: str, sizes: Sizes, names: list[str] | None, tokens: int, **runner: object) -> None:
    """Steps with guesses, some of them right, between steps that were launched ahead."""
    spec, weights = model_of(kind)
    requests = work(names, tokens=tokens, likely=True)
    expected = served(cuda_runner(spec, weights, sizes, **runner), sizes, requests)
    assert_ended_as_asked(expected)
    tested = cuda_runner(spec, weights, sizes, **runner)
    speculation = Moody(drafter_of(kind, tested, sizes, likely=True), spec.vocab_size)
    with torch.inference_mode(False):
        found = run(tested, sizes, requests, speculation, repeats=True)
    assert_alike(found.answers, expected, 0.0 if runner.get("deterministic") else LOGPROB_BOUND)
    stats = speculation.stats()
    assert stats.off["overlap"] > 0
    assert 0 < stats.accepted < stats.drafted
    assert found.prefix_hits > 0
    assert found.preemptions > 0 or sizes.num_blocks >= SIZES.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("part", range(3))
def test_every_option_with_steps_launched_ahead(kind, part):
    mixed(kind, SIZES, list(NAMES[part::3]), tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_preemption_and_cached_prefixes(kind, deterministic):
    few = replace(SIZES, step_tokens=24, prefill_chunk=7, num_blocks=8, max_running=4)
    names = ["sampled", "greedy penalties", "logprobs", "stop string", "ends", "schema", "grammar"]
    mixed(kind, few, names, tokens=12, deterministic=deterministic)
