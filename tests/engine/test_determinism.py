"""--deterministic, bit for bit: on every instruction set that runs here, in every format of weights and KV.

Small random models, so that even the portable kernels take no time; the real one is in test_invariance.
"""

import random
from dataclasses import replace

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.start.build import BuiltEngine, build_engine
from ridgeline.ops.cpu.interface import NativeUnavailable
from ridgeline.ops.cpu.library import available_isas
from tests.models.tiny_checkpoints import tiny_model
from tests.models.tiny_families import VOCAB

try:
    ISAS = available_isas()
except NativeUnavailable:
    ISAS = ()
FORMATS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("int8", "int8"),
    ("int8-channel", "bfloat16"),
    ("int4", "int8"),
    ("int8", "int4"),
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, prompt_logprobs=0, ignore_eos=True)

Scores = list[tuple[int, float]]


@pytest.fixture(scope="module", params=["qwen3-wide", "gemma3"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    return path


@pytest.fixture
def build(checkpoint, weights_are_not_kept, monkeypatch):
    def make(isa: str, **settings) -> BuiltEngine:
        monkeypatch.setenv("RIDGELINE_ISA", isa)
        config = EngineConfig(
            model=str(checkpoint), backend="native", kv_tokens=4096, step_tokens=128, threads=2, **settings
        )
        return build_engine(config, checkpoint)

    return make


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def scores(built: BuiltEngine, prompts: list[list[int]], rounds: int = 1, **limits) -> list[Scores]:
    """Every token of every prompt and answer with its log-probability, all prompts computed together."""
    core = EngineCore(Scheduler(replace(built.core.scheduler.limits, **limits)), built.core.runner)
    for _ in range(rounds):  # in a later round the cache has what an earlier one computed
        found: dict[str, Scores] = {str(i): [] for i in range(len(prompts))}
        for name, ids in zip(found, prompts, strict=True):
            core.add(Request(name, ids, PARAMS))
        while core.has_work:
            for delta in core.step():
                found[delta.request_id] += [
                    (p.token, p.logprob) for p in (*delta.prompt_logprobs, *delta.logprobs)
                ]
    return list(found.values())


@pytest.mark.parametrize(("weights", "kv_dtype"), FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_alone_equals_batched_equals_chunked_equals_cached(build, isa, weights, kv_dtype):
    built = build(isa, weights=weights, kv_dtype=kv_dtype, deterministic=True)
    prompts = [prompt(0, 70), *(prompt(seed, 1 + 5 * seed) for seed in range(1, 10))]
    alone = scores(built, prompts[:1], prefix_cache=False)[0]
    assert len(alone) == 69 + PARAMS.max_tokens
    assert scores(built, prompts, prefix_cache=False)[0] == alone
    assert scores(built, prompts[:1], prefix_cache=False, prefill_chunk=7)[0] == alone
    assert scores(built, prompts, prefix_cache=False, prefill_chunk=9)[0] == alone
    cached = scores(built, prompts[:1], rounds=2)[0]
    assert cached[-PARAMS.max_tokens :] == alone[-PARAMS.max_tokens :]


@pytest.mark.parametrize("isa", ISAS)
def test_the_cost_of_determinism_is_said(build, isa):
    built, default = build(isa, deterministic=True), build(isa)
    assert "deterministic" in built.summary
    (note,) = [note for note in built.notes if note.startswith("deterministic")]
    assert "times as long" in note
    assert not any("deterministic" in text for text in (default.summary, *default.notes))
