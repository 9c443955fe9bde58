"""A needle in batches of many sizes: the same bits in deterministic mode, and not without it."""

from __future__ import annotations

import random

import torch

from ridgeline.engine.run.cuda.launched_step import LaunchedStep
from ridgeline.engine.run.cuda.runner import CudaRunner
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.ops.cuda.norm import FEW_ROWS, norm_tile
from tests.gpu.collection import DEVICE, Skipped, scaled
from tests.gpu.engines import Work, bits_of, cuda_runner, serve, weights_of
from tests.gpu.models import SIZES, SPEC, WIDE_SPEC, compile_kernels, drawn, greedy, model_weights, prompt

BATCHES = scaled((1, 2, 3, 5, 8, 16, 33, 64), (1, 3))
LENGTHS = scaled((3, 17, 64, 130, 300, 700), (2, 9))


def _company(count: int) -> Work:
    rng = random.Random(count)
    return [
        (prompt(rng.choice(LENGTHS), seed), drawn(rng.randrange(1, scaled(40, 5)), seed, top_k=seed % 3 * 10))
        for seed in range(count)
    ]


def _needle_in_batches(deterministic: bool, **asked: int) -> list[object]:
    """What it says, to the last bit, in each batch; first, in the middle or last of it."""
    compile_kernels(SPEC, "bfloat16", SIZES, deterministic)
    runner = cuda_runner(SPEC, model_weights("bfloat16"), SIZES, deterministic=deterministic)
    needle = (prompt(scaled(300, 20), seed=-1), greedy(scaled(24, 3), logprobs=5, **asked))
    found = []
    for size in BATCHES:
        company = _company(size - 1)
        place = random.Random(size).randrange(size)
        found.append(bits_of(serve(runner, SIZES, [*company[:place], needle, *company[place:]]))[place][0])
        assert found[-1][3] is None, found[-1][3]
    return found


def check_a_needle_has_the_same_bits_in_every_batch() -> None:
    found = _needle_in_batches(deterministic=True)
    differ = [size for size, bits in zip(BATCHES, found, strict=True) if bits != found[0]]
    assert not differ, f"batches of {differ} give other bits than the needle alone"


def check_its_prompts_log_probabilities_too() -> None:
    found = _needle_in_batches(deterministic=True, prompt_logprobs=2)
    differ = [size for size, bits in zip(BATCHES, found, strict=True) if bits != found[0]]
    assert not differ, f"batches of {differ} give other bits than the needle alone"


class _CountingRunner(CudaRunner):
    """Knows how many tokens its largest step had."""

    largest = 0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.largest = max(self.largest, sum(row.count for row in plan.rows))
        return super().launch(plan)


def check_a_prompts_bits_are_the_same_in_a_step_of_many_tokens() -> None:
    """Norms cut their rows in another way there, and would sum them in another order."""
    assert norm_tile(FEW_ROWS, WIDE_SPEC.hidden_size) != norm_tile(FEW_ROWS + 1, WIDE_SPEC.hidden_size)
    compile_kernels(WIDE_SPEC, "bfloat16", SIZES, deterministic=True)
    weights = weights_of(WIDE_SPEC, torch.bfloat16, seed=1, device=DEVICE)
    needle = (prompt(scaled(300, 9), seed=-1), greedy(scaled(8, 2), logprobs=5, prompt_logprobs=2))
    found, largest = [], []
    for length in (0, scaled(1300, 30)):
        runner = cuda_runner(WIDE_SPEC, weights, SIZES, kind=_CountingRunner, deterministic=True)
        company = [(prompt(length), greedy(2))] if length else []
        found.append(bits_of(serve(runner, SIZES, [needle, *company]))[0][0])
        assert found[-1][3] is None, found[-1][3]
        assert isinstance(runner, _CountingRunner)
        largest.append(runner.largest)
    assert largest[0] < scaled(FEW_ROWS, 30) < largest[1], largest
    assert found[0] == found[1]


def check_without_the_mode_some_batch_changes_a_bit() -> None:
    """Else the check above could not fail."""
    found = _needle_in_batches(deterministic=False)
    if len(BATCHES) < 4:
        raise Skipped("nothing but a device reorders its sums")
    assert any(bits != found[0] for bits in found)
