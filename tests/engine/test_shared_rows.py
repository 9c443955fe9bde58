"""Decode rows that stand on the same first blocks: found once a batch, put side by side, computed right."""

from __future__ import annotations

import functools
import random

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.cuda import shared_rows
from ridgeline.engine.run.cuda.shared_rows import SharedRows
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepRow
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from tests.gpu.engines import Sizes, cuda_runner, family, torch_runner, weights_of

PREFIX = list(range(100, 100 + 300))  # blocks: 4,800 tokens


def row(*blocks: int) -> StepRow:
    params = SamplingParams(max_tokens=1)
    seq = Sequence(Request("r", [1], params), 0, [1], 1, 2, seed=0, block_table=list(blocks))
    return StepRow(seq, 0, 1, (seq,))


def test_rows_that_share_much_are_put_side_by_side() -> None:
    rows = [row(*PREFIX, 1), row(7, 8, 9), row(*PREFIX, 2), row(*PREFIX, 3), row(*PREFIX, 4), row(*PREFIX, 5)]
    arrangement = SharedRows(rows_per_tile=4, block_size=16).arrange(rows, padded_rows=8)
    assert arrangement.order == [0, 2, 3, 4, 5, 1]
    assert arrangement.tiles is not None
    assert arrangement.tiles.tokens == [4800] * 5 + [0] * 3
    assert list(zip(arrangement.tiles.first_rows, arrangement.tiles.row_counts, strict=True))[:2] == [
        (0, 4),
        (4, 1),
    ]


def test_a_little_that_is_shared_is_not_worth_a_kernel() -> None:
    rows = [row(*PREFIX[:20], number) for number in range(4)]  # 3 · 320 tokens saved
    arrangement = SharedRows(rows_per_tile=4, block_size=16).arrange(rows, padded_rows=4)
    assert arrangement.tiles is None
    assert arrangement.order == [0, 1, 2, 3]


def test_a_batch_is_looked_at_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    find = shared_rows.find_shared_prefixes
    monkeypatch.setattr(shared_rows, "find_shared_prefixes", lambda *a: looked.append(a) or find(*a))
    shared = SharedRows(rows_per_tile=4, block_size=16)
    rows = [row(*PREFIX, number) for number in range(5)]
    first = shared.arrange(rows, 8)
    for step in rows:
        step.seq.block_table.append(99)  # what grows is not shared
    assert shared.arrange(rows, 8) is first
    assert len(looked) == 1
    assert shared.arrange(rows[:4], 4) != first
    assert len(looked) == 2


@pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; tests/gpu checks on it")
def test_decodes_over_a_shared_prefix_give_the_reference_s_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "LEAST_SAVED_TOKENS", 64)
    find = functools.partial(shared_rows.find_shared_prefixes, least_tokens=32)
    monkeypatch.setattr(shared_rows, "find_shared_prefixes", find)
    spec = family("qwen3", num_layers=1)
    sizes = Sizes(step_tokens=64, max_running=6, num_blocks=48, max_context=96)
    weights = weights_of(spec, torch.float32)
    rng = random.Random(0)
    common = [rng.randrange(3, spec.vocab_size) for _ in range(48)]
    prompts = [[*common, *(rng.randrange(3, spec.vocab_size) for _ in range(3 + n))] for n in range(5)]
    shared_steps = []

    def serve(runner: object) -> dict[str, list[int]]:
        core = EngineCore(Scheduler(sizes.limits()), runner)  # type: ignore[arg-type]
        tokens: dict[str, list[int]] = {}
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        core.add(Request("first", prompts[0], params, arrival=0.0))
        while not tokens.get("first"):  # its prefix is cached then
            for delta in core.step():
                tokens.setdefault(delta.request_id, []).extend(delta.tokens)
        for number, prompt in enumerate(prompts[1:]):
            core.add(Request(f"other {number}", prompt, params, arrival=1.0 + number))
        while core.has_work:
            for delta in core.step():
                assert delta.error is None
                tokens.setdefault(delta.request_id, []).extend(delta.tokens)
        return tokens

    tested = cuda_runner(spec, weights, sizes)
    step = tested.graphs.step
    monkeypatch.setattr(
        tested.graphs, "step", lambda key: shared_steps.append(key.shares_prefix) or step(key)
    )
    assert serve(tested) == serve(torch_runner(spec, weights, sizes))
    assert any(shared_steps)
