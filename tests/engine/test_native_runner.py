"""A plan's rows as the native library takes them, and what the runner makes of its answer."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeline.engine.run.host_sampler import HostSampler
from ridgeline.engine.run.native_runner import NativeRunner, step_arrays
from ridgeline.engine.run.torch_runner import input_row
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.step import Sampled, StepPlan, StepRow
from ridgeline.ops.cpu.library import Format, NativeDecoder, pack_float
from ridgeline.ops.inputs import StepInputs
from tests.ops.tiny_decoder import floats, tiny_table

GREEDY = SamplingParams(temperature=0.0)


def sequence(tokens: list[int], blocks: list[int], params: SamplingParams = GREEDY) -> Sequence:
    request = Request("r", tokens, params)
    return Sequence(request, 0, tokens, len(tokens), len(tokens) + 1, 0, block_table=blocks)


def decode(length: int, blocks: list[int]) -> StepRow:
    seq = sequence(list(range(100, 100 + length)), blocks)
    return StepRow(seq, length - 1, 1, (seq,))


def chunk(
    start: int, count: int, blocks: list[int], *, samples: bool = False, scores: bool = False
) -> StepRow:
    seq = sequence(list(range(200, 200 + start + count)), blocks)
    return StepRow(seq, start, count, (seq,) if samples else (), prompt_logprobs=scores)


ROWS = {
    "one decode": [decode(5, [3])],
    "decodes": [decode(5, [3]), decode(40, [1, 9, 4]), decode(17, [2, 7])],
    "a first token alone": [chunk(0, 1, [6], samples=True), decode(3, [5])],
    "a chunk that does not sample": [chunk(16, 20, [4, 5, 8])],
    "mixed": [decode(33, [9, 2, 1]), chunk(0, 30, [7, 3]), chunk(7, 9, [5], samples=True), decode(2, [8])],
    "scored prompt": [chunk(4, 6, [1], samples=True, scores=True), decode(20, [2, 6])],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_the_arrays_are_those_of_the_reference(rows):
    ours = step_arrays(rows)
    theirs = StepInputs.from_rows([input_row(row) for row in rows], block_size=16)
    for name in ("token_ids", "positions", "query_starts", "block_tables", "logit_rows"):
        array = getattr(ours, name)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, getattr(theirs, name).numpy(), err_msg=name)


# ---- what comes of a step ----


class Watched(NativeDecoder):
    """A decoder that remembers which calls wrote logits."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.wrote_logits: list[bool] = []

    def _execute(self, step, logits, best) -> None:
        self.wrote_logits.append(logits is not None)
        super()._execute(step, logits, best)


@pytest.fixture
def runner() -> NativeRunner:
    """With a decoder whose token 0 is NaN."""
    embedding = pack_float(Format.F32, floats(40, 32, seed=9))
    embedding.data.view(np.float32)[0] = np.nan  # [hidden][16]: the packing of floats refuses it
    return NativeRunner(Watched(replace(tiny_table(), embedding=embedding), threads=2), HostSampler((7,)), 8)


def samples(runner: NativeRunner, rows: list[StepRow]) -> list[list[Sampled]]:
    return [row.samples for row in runner.execute(StepPlan(0, 32, rows)).rows]


def prompt(tokens: list[int], block: int, params: SamplingParams = GREEDY, num_samplers: int = 1) -> StepRow:
    seq = sequence(tokens, [block], params)
    return StepRow(seq, 0, len(tokens), (seq,) * num_samplers, params.prompt_logprobs is not None)


PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]


def test_where_all_want_the_best_token_alone_no_logits_are_written_and_the_tokens_are_the_same(runner):
    greedy = [prompt(tokens, block) for block, tokens in enumerate(PROMPTS)]
    alone = samples(runner, greedy)
    assert runner.decoder.wrote_logits == [False]
    assert samples(runner, [*greedy, prompt([8], 5, SamplingParams(seed=1))])[:3] == alone
    assert runner.decoder.wrote_logits == [False, True]
    logits = runner.decoder.execute(*step_arrays(greedy))
    assert alone == [[Sampled(int(row.argmax()))] for row in logits]


def test_siblings_take_the_same_best_token_and_a_chunk_that_does_not_sample_takes_none(runner):
    rows = [
        prompt(PROMPTS[0], 0, num_samplers=3),
        prompt(PROMPTS[1], 1, num_samplers=0),
        prompt(PROMPTS[2], 2),
    ]
    several, none, one = samples(runner, rows)
    assert runner.decoder.wrote_logits == [False]
    assert several == samples(runner, [prompt(PROMPTS[0], 0)])[0] * 3
    assert none == []
    assert one == samples(runner, [prompt(PROMPTS[2], 2)])[0]
    assert samples(runner, [prompt(PROMPTS[1], 1, num_samplers=0)]) == [[]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, prompt_logprobs=0),
        SamplingParams(temperature=0.0, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, min_tokens=1),
    ],
    ids=["sampled", "logprobs", "prompt logprobs", "bias", "presence", "repetition", "too short to end"],
)
def test_who_wants_more_than_the_best_token_gets_logits(runner, params):
    mixed = [prompt(PROMPTS[0], 0), prompt(PROMPTS[1], 1, params)]
    assert all(sampled.error is None for row in samples(runner, mixed) for sampled in row)
    assert runner.decoder.wrote_logits == [True]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, logprobs=0)])
def test_a_sequence_whose_logits_are_no_numbers_ends_alone(runner, params):
    rows = [prompt(PROMPTS[0], 0), prompt([5, 0, 5], 1, params), prompt(PROMPTS[2], 2)]
    well, broken, too = samples(runner, rows)
    assert [well, too] == [samples(runner, [row])[0] for row in (rows[0], rows[2])]
    assert broken[0].error is not None
    assert "not finite" in broken[0].error
