"""The native backend, built: every format answers, memory is as planned, and the limits follow from it."""

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable
from ridgeline.engine.start.loading import StepSizes
from ridgeline.engine.start.memory import GIB, plan_memory
from ridgeline.engine.start.native_build import NativeBuild
from ridgeline.models.spec.read_spec import read_spec

SIZES = StepSizes(step_tokens=512, prefill_chunk=512, max_running=64)


@pytest.fixture(scope="module")
def spec(smollm2_path):
    return read_spec(smollm2_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "float32"},
        {"weights": "bfloat16"},
        {"weights": "int8"},
        {"weights": "int8-channel"},
        {"weights": "int4"},
        {"kv_dtype": "float32"},
        {"kv_dtype": "int8"},
    ],
    ids=lambda settings: "-".join(*settings.items()),
)
def test_every_format_answers(smollm2_path, weights_are_not_kept, settings):
    llm = LLM(str(smollm2_path), kv_tokens=2048, **settings)
    assert llm.engine.backend == "native"
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    # Two samples that share the last block of their prompt: blocks are copied in this format too.
    pair = SamplingParams(temperature=0.01, seed=1, n=2, max_tokens=4)
    answer, both = llm.generate(["The capital of France is"] * 2, [greedy, pair])
    assert answer.text.startswith(" Paris")
    assert all(completion.text.startswith(" Paris") for completion in both.completions)


@pytest.mark.parametrize(
    ("kv_dtype", "head_bytes"),
    [("float32", 256), ("bfloat16", 128), ("auto", 128), ("int8", 64 + 4), ("int4", 32 + 4)],
)
def test_kv_takes_the_bytes_of_its_format(spec, smollm2_path, kv_dtype, head_bytes):
    """Each key and each value of a head has a float scale in int8, a scale and a minimum in int4."""
    footprint = NativeBuild(EngineConfig(kv_dtype=kv_dtype), smollm2_path, spec, 1).footprint(SIZES)
    assert footprint.kv_bytes_per_token == 2 * spec.num_layers * spec.num_kv_heads * head_bytes


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
def test_the_library_takes_no_more_memory_than_was_planned(spec, smollm2_path, kv_dtype):
    config = EngineConfig(kv_tokens=4096, kv_dtype=kv_dtype)
    build = NativeBuild(config, smollm2_path, spec, 2)
    footprint = build.footprint(SIZES)
    plan = plan_memory(spec, config, footprint, 8 * GIB)
    loaded = build.load(plan, SIZES, None)
    taken = loaded.runner.decoder.bytes
    assert plan.kv_bytes <= taken <= plan.kv_bytes + plan.activation_bytes
    assert loaded.weights_bytes == plan.weights_bytes


def test_weights_as_stored_take_what_the_file_does(spec, smollm2_path):
    planned = NativeBuild(EngineConfig(), smollm2_path, spec, 1).weights_bytes
    assert planned == pytest.approx(smollm2_path.stat().st_size, rel=0.05)
    in_float32 = NativeBuild(EngineConfig(weights="float32"), smollm2_path, spec, 1).weights_bytes
    assert in_float32 == pytest.approx(4 * spec.parameters, rel=0.01)


def test_the_limits_are_bandwidth_over_bytes_and_rate_over_operations(llm):
    limits, spec = llm.engine.limits, llm.engine.spec
    step_bytes = limits["read_bytes_per_s"] / limits["decode_tokens_per_s"]
    weights_bytes = llm.engine.plan.weights_bytes  # all of it: the embedding is the head too
    assert step_bytes == pytest.approx(weights_bytes, rel=0.01)
    flops_per_token = limits["flops_per_s"] / limits["prefill_tokens_per_s"]
    assert flops_per_token == pytest.approx(spec.prefill_flops_per_token(512))


def test_a_backend_whose_first_step_fails_does_not_start(smollm2_path, monkeypatch):
    from ridgeline.engine.run import native_runner

    def refuse(*args):
        raise MemoryError("made to fail")

    monkeypatch.setattr(native_runner, "step_arrays", refuse)
    with pytest.raises(BackendUnavailable, match="made to fail"):
        LLM(str(smollm2_path), kv_tokens=1024)
