"""A draft model's guesses: right where it is the served model itself, without effect where it is not."""

from __future__ import annotations

from dataclasses import replace

import torch

from ridgeline.engine.run.drafters.model_drafter import ModelDrafter
from ridgeline.engine.speculate.speculation import Speculation
from tests.engine.speculate.option_cases import assert_alike, served, work
from tests.engine.speculate.small_heads import SIZES, SPEC, WEIGHTS
from tests.gpu.engines import torch_runner, weights_of

BOUND = 2e-4
OTHER = weights_of(SPEC, torch.float32, seed=9)


def model_drafter(weights, blocks: int = 200, step_tokens: int = 24) -> ModelDrafter:
    sizes = replace(SIZES, num_blocks=blocks, step_tokens=step_tokens)
    return ModelDrafter(torch_runner(SPEC, weights, sizes), blocks, 16, step_tokens, SIZES.max_context)


def test_the_served_model_itself_is_always_right():
    """Also at temperature 0.8: it draws with the noise of the served model."""
    names = ["greedy", "sampled", "top-p", "penalties", "bias", "logprobs"]
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    expected = served(runner, SIZES, work(names))
    speculation = Speculation(model_drafter(WEIGHTS), SPEC.vocab_size, 3)
    assert_alike(served(runner, SIZES, work(names), speculation), expected, BOUND)
    stats = speculation.stats()
    assert stats.accepted > 0.9 * stats.drafted > 0


def test_another_model_changes_no_answer():
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    expected = served(runner, SIZES, work())
    speculation = Speculation(model_drafter(OTHER), SPEC.vocab_size, 4)
    assert_alike(served(runner, SIZES, work(), speculation), expected, BOUND)
    assert speculation.stats().accepted < speculation.stats().drafted


def test_nor_with_chunks_preemption_and_few_blocks():
    few = replace(SIZES, step_tokens=24, prefill_chunk=7, num_blocks=6, max_running=4)
    requests = work(["greedy", "sampled", "penalties", "grammar", "logprobs"], tokens=20)
    runner = torch_runner(SPEC, WEIGHTS, few)
    expected = served(runner, few, requests)
    drafter = model_drafter(WEIGHTS, blocks=5)
    speculation = Speculation(drafter, SPEC.vocab_size, 3)
    assert_alike(served(runner, few, requests, speculation), expected, BOUND)
    assert len(drafter._free) + sum(len(each.seq.block_table) for each in drafter._shadows.values()) == 5
