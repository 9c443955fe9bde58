"""The native library's logits in float32 are the reference's within 1e-3, on every instruction set.

Every family, through mixed steps: prefill from nothing, a chunk after a cached beginning, and decodes.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.run.native_runner import StepArrays, step_arrays
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.step import StepRow
from ridgeline.engine.start.loading import StepSizes
from ridgeline.engine.start.memory import GIB, plan_memory
from ridgeline.engine.start.native_build import NativeBuild
from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.ops.cpu.interface import NativeUnavailable
from ridgeline.ops.cpu.library import available_isas
from tests.models.tiny_checkpoints import MODELS, tiny_model
from tests.models.tiny_families import VOCAB

try:
    ISAS = available_isas()
except NativeUnavailable:
    ISAS = ()
TOLERANCE = 1e-3  # of the largest logit
SIZES = StepSizes(step_tokens=128, prefill_chunk=128, max_running=8)
SCORED = SamplingParams(prompt_logprobs=0)
# (start, count) for each of three sequences in each of four steps; None: it rests.
STEPS = [
    [(0, 25), (0, 31), None],
    [(25, 15), (31, 1), (0, 3)],
    [(40, 1), (32, 1), (3, 1)],
    [(41, 9), None, (4, 40)],
]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A tiny model of transformers', and the folder it was saved in."""
    made, path = tiny_model(request.param), tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    if (reason := refusal(read_spec(path), "native")) is not None:
        pytest.skip(reason)
    return made, path


@pytest.mark.parametrize("isa", ISAS)
def test_logits_are_those_of_transformers(model, isa, weights_are_not_kept, monkeypatch):
    monkeypatch.setenv("RIDGELINE_ISA", isa)
    reference, path = model
    config = EngineConfig(kv_tokens=1024, weights="float32", kv_dtype="float32", backend="native")
    spec = read_spec(path)
    build = NativeBuild(config, path, spec, threads=2)
    decoder = build.load(plan_memory(spec, config, build.footprint(SIZES), GIB), SIZES, None).runner.decoder
    assert decoder.isa == isa
    rng = random.Random(7)
    sequences = [sequence(rng, 60, first_block=10 * i) for i in range(3)]
    with torch.inference_mode():
        expected = [reference(torch.tensor([seq.tokens])).logits[0].numpy() for seq in sequences]
    for spans in STEPS:
        logits = decoder.execute(*arrays(sequences, spans))
        wanted = np.concatenate(
            [expected[i][span[0] : sum(span)] for i, span in enumerate(spans) if span is not None]
        )
        assert logits.shape == wanted.shape
        assert np.abs(logits - wanted).max() < TOLERANCE * np.abs(wanted).max()


def sequence(rng: random.Random, length: int, first_block: int) -> Sequence:
    tokens = [rng.randrange(3, VOCAB) for _ in range(length)]
    blocks = list(range(first_block, first_block + 4))
    rng.shuffle(blocks)
    return Sequence(Request("r", tokens, SCORED), 0, tokens, length, length + 1, 0, block_table=blocks)


def arrays(sequences: list[Sequence], spans: list[tuple[int, int] | None]) -> StepArrays:
    rows = [
        StepRow(seq, *span, prompt_logprobs=True)
        for seq, span in zip(sequences, spans, strict=True)
        if span is not None
    ]
    return step_arrays(rows)
