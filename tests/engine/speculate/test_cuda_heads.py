"""Draft heads on the GPU engine, in Triton's interpreter: they read the hidden states that the reference's
read, so they guess the same; and no guess changes an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.run.drafters.medusa_drafter import MedusaDrafter
from ridgeline.engine.run.drafters.model_drafter import ModelDrafter
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.linear import gemv
from tests.engine.speculate.option_cases import assert_alike, served, work
from tests.engine.speculate.small_heads import SPEC, WEIGHTS, mimo, random_head, random_medusa, random_mtp
from tests.gpu.engines import Sizes, cuda_runner, poisoned_memory, torch_runner, weights_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")

SIZES = Sizes(step_tokens=32, max_running=16, num_blocks=48, max_context=64)
MIMO = mimo()
MIMO_WEIGHTS = weights_of(MIMO, torch.float32)
KINDS = ("eagle3", "medusa", "mtp", "draft_model")
SLOW = ("eagle3", "draft_model")
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


def model_of(kind: str):
    return (MIMO, MIMO_WEIGHTS) if kind == "mtp" else (SPEC, WEIGHTS)


def drafter_of(kind: str, runner, sizes: Sizes = SIZES):
    spec, weights = model_of(kind)
    embed = weights.embed.tensor
    if kind == "eagle3":
        return ChainDrafter(random_head(), embed, 1.0, runner, sizes.max_running)
    if kind == "medusa":
        return MedusaDrafter(random_medusa(), runner, spec.num_layers)
    if kind == "mtp":
        head = random_mtp(spec, weights.lm_head.tensor)
        return ChainDrafter(head, embed, 1.0, runner, sizes.max_running)
    blocks = 120
    own = torch_runner(spec, weights_of(spec, torch.float32, seed=9), replace(sizes, num_blocks=blocks))
    return ModelDrafter(own, blocks, 16, sizes.step_tokens, sizes.max_context)


def watch(drafter) -> dict[tuple[int, ...], list[int]]:
    said: dict[tuple[int, ...], list[int]] = {}
    propose = drafter.propose

    def watched(seqs: list[Sequence], most: int) -> list[Draft | None]:
        drafts = propose(seqs, most)
        said.update({tuple(s.tokens): list(d.tokens) for s, d in zip(seqs, drafts, strict=True) if d is not None})
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


@pytest.mark.parametrize("kind", ["medusa", "mtp", *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)])
def test_it_guesses_as_on_the_reference_and_changes_nothing(kind):
    check(kind, ["logprobs"], tokens=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_every_option(kind):
    spec, weights = model_of(kind)
    requests = work()
    expected = served(cuda_runner(spec, weights, SIZES), SIZES, requests)
    found, _ = speculated(kind, cuda_runner(spec, weights, SIZES), SIZES, requests, 3)
    assert_alike(found, expected, LOGPROB_BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_with_chunks_preemption_and_cached_prefixes(kind, deterministic):
    few = replace(SIZES, step_tokens=24, prefill_chunk=7, num_blocks=6, max_running=4)
    names = ["sampled", "greedy penalties", "logprobs", "grammar"]
    check(kind, names, few, tokens=20, deterministic=deterministic)
