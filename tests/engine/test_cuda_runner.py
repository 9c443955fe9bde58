"""The GPU engine's runner, decoder and kernels in Triton's interpreter, against the reference on the CPU.

Memory that was never written contains NaN here, so that reading it is detected.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.cuda.runner import CudaRunner
from ridgeline.engine.run.torch_runner import TorchRunner
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.linear import gemv
from tests.engine.lettered import LETTERS, budget
from tests.engine.winding_grammar import constrained
from tests.gpu.engines import (
    FAMILIES,
    Sizes,
    Work,
    answers,
    bits_of,
    cuda_runner,
    family,
    poisoned_memory,
    serve,
    tokens_of,
    torch_runner,
    weights_of,
)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")

SIZES = Sizes(step_tokens=24, max_running=4, num_blocks=16, max_context=64)
SPEC = family("qwen3", num_layers=1)
F32 = torch.float32


@pytest.fixture(autouse=True)
def _memory_is_poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by programs: let one have many rows. How they are cut has its own tests."""
    config = gemv.gemv_config

    def wide(*args: int, **options: object) -> gemv.GemvConfig:
        return replace(config(*args, **options), block_n=64)  # type: ignore[arg-type]

    monkeypatch.setattr(gemv, "gemv_config", wide)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, SPEC.vocab_size) for _ in range(length)]


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def drawn(max_tokens: int, **more: object) -> SamplingParams:
    settings = {"temperature": 0.9, "seed": 11, "max_tokens": max_tokens, "ignore_eos": True, **more}
    return SamplingParams(**settings)  # type: ignore[arg-type]


def assert_both_answer_alike(work: Work, sizes: Sizes = SIZES, spec=SPEC, **runner: object) -> CudaRunner:
    """By tokens exactly, by log-probabilities nearly. Returns the runner under test, with no row left."""
    weights = weights_of(spec, F32)
    tested = cuda_runner(spec, weights, sizes, **runner)  # type: ignore[arg-type]
    found = serve(tested, sizes, work)
    expected = serve(torch_runner(spec, weights, sizes), sizes, work)
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        assert (one.error, other.error) == (None, None)
        for mine, theirs in (
            (one.logprobs, other.logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            assert [(each.token, each.rank) for each in mine] == [(each.token, each.rank) for each in theirs]
            assert [each.logprob for each in mine] == pytest.approx([e.logprob for e in theirs], abs=2e-5)
            tops = [[entry for each in group for entry in each.top] for group in (mine, theirs)]
            assert [token for token, _ in tops[0]] == [token for token, _ in tops[1]]
            assert [p for _, p in tops[0]] == pytest.approx([p for _, p in tops[1]], abs=2e-5)
    return tested


# test_cuda_kinds has their kinds; qwen3 is SPEC, which the other tests here run.
SLOW_FAMILIES = ("qwen2", "qwen3", "mistral", "qwen2_moe")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_FAMILIES else []) for name in FAMILIES],
)
def test_a_family_answers_as_the_reference_does(name):
    """A prompt in chunks beside decodes, a seeded draw, two samples of one prompt."""
    work = [(prompt(29), greedy(3)), (prompt(5), drawn(4)), (prompt(3), drawn(2, n=2))]
    assert_both_answer_alike(work, spec=family(name))


def test_the_tokens_of_experts_are_counted_as_by_the_reference_and_padding_is_not():
    """Three decodes are computed as a batch of four; one alone by other kernels."""
    spec = family("qwen3_moe")
    weights = weights_of(spec, F32)
    work = [(prompt(9), greedy(4)), (prompt(5), greedy(3)), (prompt(3), greedy(3))]
    counts = []
    for runner in (cuda_runner(spec, weights, SIZES), torch_runner(spec, weights, SIZES)):
        serve(runner, SIZES, work)
        counts.append(runner.expert_counts())
    assert counts[0] == counts[1]
    assert [sum(tokens) for tokens in counts[0].values()] == [3 * (9 + 3 + 5 + 2 + 3 + 2)] * spec.num_layers


def test_logprobs_of_output_and_prompt_are_those_of_the_reference():
    work = [
        (prompt(27), greedy(4, logprobs=3, prompt_logprobs=2)),  # launched ahead from the third token on
        (prompt(4), drawn(3, logprobs=0)),
        (prompt(1), greedy(2, prompt_logprobs=0)),
    ]
    assert_both_answer_alike(work)


def test_filters_penalties_bias_and_suppressed_ids_choose_as_the_reference_does():
    work = [
        (prompt(6), drawn(4, top_k=5, top_p=0.9)),
        (prompt(6), drawn(4, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.4)),
        (prompt(6), greedy(4, logit_bias={7: 100.0}, min_tokens=3, stop_token_ids=(7,))),
        (prompt(7), greedy(4, frequency_penalty=1.9)),
    ]
    tested = assert_both_answer_alike(work)
    assert len(tested._rows) <= len(work)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", [1, 25])
def test_samples_of_one_prompt_whose_last_chunk_is_one_token(length, deterministic):
    """Both take their token from the one row, alone in its step."""
    work = [(prompt(length), drawn(3, n=2))]
    assert_both_answer_alike(work, deterministic=deterministic)


def test_a_chunk_of_one_token_in_mid_prompt_samples_nothing():
    """Every row of the step has one token, but not every row takes one from it."""
    sizes = replace(SIZES, prefill_chunk=1)
    work = [(prompt(4), greedy(2)), (prompt(1), greedy(5)), (prompt(1, seed=1), drawn(3))]
    assert_both_answer_alike(work, sizes)


def test_what_was_preempted_goes_on_where_it_was():
    """Three sequences that grow into a third block each, in a pool of seven that expects short answers."""
    sizes = replace(SIZES, num_blocks=7)
    work = [(prompt(27, seed), drawn(8, seed=seed)) for seed in range(3)]
    weights = weights_of(SPEC, F32)
    core = EngineCore(Scheduler(sizes.limits()), cuda_runner(SPEC, weights, sizes))
    for _ in range(64):
        core.scheduler.output_lengths.record(1)
    found = answers(core, work)
    assert core.stats().preemptions > 0
    assert tokens_of(found) == tokens_of(serve(torch_runner(SPEC, weights, SIZES), SIZES, work))


def test_a_prefix_found_in_the_cache_changes_no_token():
    core = EngineCore(Scheduler(SIZES.limits()), cuda_runner(SPEC, weights_of(SPEC, F32), SIZES))
    work = [(prompt(40), greedy(4, logprobs=1))]
    miss = answers(core, work)
    before = core.stats().prefix_hits
    hit = answers(core, work)
    assert core.stats().prefix_hits > before
    assert tokens_of(hit) == tokens_of(miss)
    assert [each.logprob for each in hit[0][0].logprobs] == pytest.approx(
        [each.logprob for each in miss[0][0].logprobs], abs=2e-5
    )


def test_rows_of_the_device_are_given_back():
    sizes = replace(SIZES, max_running=2)
    runner = cuda_runner(SPEC, weights_of(SPEC, F32), sizes)
    core = EngineCore(Scheduler(sizes.limits()), runner)
    for seed in range(4):  # 8 sequences through 2 places
        answers(core, [(prompt(3, seed), drawn(2, n=2))])
        assert len(runner._rows) <= 2  # of those that ended, told with the next plan
    free = len(runner._rows._free) + len(runner._rows)
    assert free == 2 * runner.graphs._sizes[-1] + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_answers_have_the_same_bits_in_any_company(dtype):
    weights = weights_of(SPEC, dtype)
    needle = (prompt(37), greedy(3, logprobs=4))
    company: Work = [(prompt(11), drawn(6, logprobs=1)), (prompt(2), drawn(4, top_k=3))]

    def bits(sizes: Sizes, *work: tuple[list[int], SamplingParams]) -> list[object]:
        runner = cuda_runner(SPEC, weights, sizes, deterministic=True)
        return bits_of(serve(runner, sizes, list(work)))[0]

    whole = bits(replace(SIZES, step_tokens=64), needle)
    assert bits(replace(SIZES, step_tokens=9), needle) == whole
    assert bits(SIZES, needle, *company) == whole


def test_under_grammars_the_same_is_chosen_as_the_reference_chooses():
    """Beside one without, and one whose prompt is scored when the others' tokens have been chosen."""
    requests = [
        constrained(Request("greedy", prompt(6), greedy(4, logprobs=1))),
        constrained(Request("two", prompt(3), drawn(9, n=2)), length=3),
        Request("free", prompt(4), drawn(6)),
        Request("scored", prompt(28), greedy(2, prompt_logprobs=1), arrival=1.0),
    ]

    def said(runner: CudaRunner | TorchRunner) -> dict[tuple[str, int], list[int]]:
        core = EngineCore(Scheduler(SIZES.limits()), runner)
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for request in requests:
            core.add(request)
        while core.has_work:
            for delta in core.step():
                assert delta.error is None
                found[delta.request_id, delta.index] += delta.tokens
                found[delta.request_id, -1] += [each.rank for each in delta.prompt_logprobs]
        return found

    weights = weights_of(SPEC, F32)
    found = said(cuda_runner(SPEC, weights, SIZES))
    assert found == said(torch_runner(SPEC, weights, SIZES))
    assert (len(found["two", 1]), len(found["greedy", 0])) == (3, 4)


@pytest.mark.slow
def test_thinking_ends_at_its_budget_as_by_the_reference():
    """Beside one without a budget and samples of one prompt; steps are launched ahead."""
    held = budget(3, closer="UV")
    work = [
        (prompt(6), greedy(8, thinking=held, logprobs=1)),
        (prompt(3), drawn(7, n=2, thinking=held, frequency_penalty=1.0, min_tokens=5, stop_token_ids=(20,))),
        (prompt(4), drawn(6)),
        (prompt(5), drawn(5, thinking=budget(0, closer="UV"), top_p=0.8)),
    ]
    assert_both_answer_alike(work)
    weights = weights_of(SPEC, F32)
    found = serve(cuda_runner(SPEC, weights, SIZES), SIZES, work)
    closer = LETTERS.encode("UV")
    assert [one.tokens[3:5] for one in chain(*found[:2])] == [closer] * 3
    assert found[3][0].tokens[:2] == closer


def test_an_exhausted_device_does_less_at_a_time_and_loses_no_token():
    class Exhausted(CudaRunner):
        refusals = (3, 6)  # launches that find no memory

        def __init__(self, **sizes: object) -> None:
            super().__init__(**sizes)  # type: ignore[arg-type]
            forward, launches = self.decoder.forward, iter(range(1, 1000))

            def refuse(step: object) -> torch.Tensor:
                if next(launches) in self.refusals:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return forward(step)  # type: ignore[arg-type]

            self.decoder.forward = refuse  # type: ignore[method-assign]

    work = [(prompt(20, seed), drawn(4, seed=seed)) for seed in range(3)]
    assert_both_answer_alike(work, kind=Exhausted)


def test_logits_that_are_not_finite_end_their_own_sequence_alone():
    spec = replace(SPEC, tied_embeddings=False)
    weights = weights_of(spec, F32)
    weights.embed.tensor[2] = float("nan")
    work = [(prompt(9), greedy(4)), ([5, 2, 6], greedy(4)), (prompt(4), drawn(4, logprobs=1))]
    found = serve(cuda_runner(spec, weights, SIZES), SIZES, work)
    assert "not finite" in (found[1][0].error or "")
    assert found[1][0].tokens == []
    del work[1]
    expected = serve(torch_runner(spec, weights, SIZES), SIZES, work)
    assert tokens_of([found[0], found[2]]) == tokens_of(expected)
