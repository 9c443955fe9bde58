"""The GPU engine with weights in 8 and 4 bits and an 8-bit KV cache, in Triton's interpreter: the promises of
every engine (alone = batched = chunked = from the cache), what is planned, and what the start says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; no test of the GPU engine runs")

import tests.triton_interpreter  # noqa: F401
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.start import cuda_build
from ridgeline.engine.start.cuda_build import CudaBuild
from ridgeline.engine.start.gpu_probe import Gpu
from ridgeline.engine.start.loading import StepSizes
from ridgeline.engine.start.memory import GIB, plan_memory
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.low_bits.plan import low_bit_plan
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import device_tensors_of, load_weights, random_weights, tensors_of
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.low_bit_formats import LowBitFormat
from ridgeline.ops.low_bits import LowBits, expanded
from ridgeline.ops.mxfp4 import Mxfp4
from ridgeline.ops.mxfp4 import expanded as mxfp4_expanded
from tests.gpu.engines import Sizes, Work, answers, bits_of, cuda_runner, family, poisoned_memory, serve
from tests.models.quantized.writers import LAYOUTS, write_quantized
from tests.models.tiny_checkpoints import tiny_model

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a CUDA device is here; the benchmark has its checks")

SIZES = Sizes(step_tokens=24, max_running=4, num_blocks=16, max_context=64)
SPEC = family("qwen3", num_layers=1)
MODES = [("fp8", "fp8"), ("int8", "int8"), ("int4", "")]


@pytest.fixture(autouse=True)
def _memory_is_poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, SPEC.vocab_size) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize(("weights", "kv"), MODES)
def test_alone_batched_and_chunked_have_the_same_bits_in_deterministic_mode(weights: str, kv: str) -> None:
    low = low_bit_plan(SPEC, weights)
    stored = random_weights(SPEC, torch.bfloat16, low=low)
    needle = (prompt(18), greedy(2))

    def bits(sizes: Sizes, *work: tuple[list[int], SamplingParams]) -> list[object]:
        runner = cuda_runner(SPEC, stored, sizes, deterministic=True, low=low, kv_format=kv)
        found = serve(runner, sizes, list(work))
        assert all(answer.error is None for group in found for answer in group)
        return bits_of(found)[0]

    alone = bits(SIZES, needle)
    assert bits(replace(SIZES, step_tokens=7), needle) == alone
    assert bits(SIZES, needle, (prompt(5, 1), greedy(3))) == alone


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_a_hit_has_the_bits_of_a_miss_in_deterministic_mode(kv: str) -> None:
    runner = cuda_runner(SPEC, random_weights(SPEC, torch.bfloat16), SIZES, deterministic=True, kv_format=kv)
    core = EngineCore(Scheduler(SIZES.limits()), runner)
    work: Work = [(prompt(20), greedy(2))]
    miss, before = answers(core, work), core.stats().prefix_hits
    hit = answers(core, work)
    assert core.stats().prefix_hits > before
    assert bits_of(hit) == bits_of(miss)


@pytest.mark.parametrize(("weights", "kv"), [("fp8", "fp8"), ("int4", "int8")])
def test_the_fast_kernels_are_near_those_of_deterministic_mode(weights: str, kv: str) -> None:
    low = low_bit_plan(SPEC, weights)
    stored = random_weights(SPEC, torch.float32 if weights == "fp8" else torch.bfloat16, low=low)
    work: Work = [(prompt(18), greedy(3)), (prompt(3), greedy(3))]
    found = []
    for deterministic in (False, True):
        runner = cuda_runner(SPEC, stored, SIZES, deterministic=deterministic, low=low, kv_format=kv)
        found.append(serve(runner, SIZES, work))
    for (fast,), (fixed,) in zip(*found, strict=True):
        assert (fast.error, fixed.error) == (None, None)
        first, second = ([p for _, p in answer.logprobs[0].top] for answer in (fast, fixed))
        assert first == pytest.approx(second, abs=0.03)


@pytest.mark.parametrize(
    ("model", "layout", "kept"),
    [
        ("qwen3", "fp8-channel", 8),
        ("qwen3", "gptq-act-order", 8),
        ("qwen3", "awq", 8),
        ("qwen3", "int4-zeros", 8),
        ("qwen3", "int8", 8),
        ("qwen3", "nvfp4", 0),
        ("qwen3-moe", "fp8-channel", 8),
    ],
)
def test_a_files_matrices_are_kept_without_changing_a_value(
    tmp_path: Path, model: str, layout: str, kept: int
) -> None:
    tiny_model(model).save_pretrained(tmp_path / "float")
    quantized, twin = tmp_path / "quantized", tmp_path / "twin"
    write_quantized(tmp_path / "float", quantized, twin, LAYOUTS[layout])
    spec = read_spec(quantized)
    build = CudaBuild(EngineConfig(), quantized, spec, 1)
    stored = stream_weights(quantized, spec, torch.bfloat16, device="cpu", low=build._low)
    assert stored.nbytes == build.weights_bytes
    floats = tensors_of(load_weights(twin, read_spec(twin), torch.float32))
    count = 0
    for ours, theirs in zip(device_tensors_of(stored).layers, floats.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down"):
            matrix, expected = getattr(ours, name), getattr(theirs, name)
            if isinstance(matrix, LowBits):
                assert torch.equal(expanded(matrix), expected)
                count += 1
            elif expected is not None:
                assert torch.equal(matrix, expected.bfloat16())
    assert count >= kept if kept else not count
    words = "are computed as stored" if kept else "are expanded to 16 bits: no GPU kernel computes it"
    assert any(words in note for note in build._notes())


def test_experts_in_mxfp4_are_kept_in_any_family(tmp_path: Path) -> None:
    tiny_model("qwen3-moe").save_pretrained(tmp_path / "float")
    quantized, twin = tmp_path / "quantized", tmp_path / "twin"
    write_quantized(tmp_path / "float", quantized, twin, LAYOUTS["mxfp4"])
    spec = read_spec(quantized)
    build = CudaBuild(EngineConfig(), quantized, spec, 1)
    stored = stream_weights(
        quantized, spec, torch.bfloat16, device="cpu", stored_experts=build._stored_experts, low=build._low
    )
    assert stored.nbytes == build.weights_bytes
    floats = tensors_of(load_weights(twin, read_spec(twin), torch.float32))
    for ours, theirs in zip(device_tensors_of(stored).layers, floats.layers, strict=True):
        for name in ("experts_gate_up", "experts_down"):
            matrix = getattr(ours, name)
            assert isinstance(matrix, Mxfp4)
            assert torch.equal(mxfp4_expanded(matrix), getattr(theirs, name))
    assert any("of experts are computed as stored, in MXFP4" in note for note in build._notes())


def test_what_is_rounded_at_load_is_what_was_planned(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    for weights in ("fp8", "int8", "int4"):
        build = CudaBuild(EngineConfig(weights=weights), tmp_path, spec, 1)  # type: ignore[arg-type]
        made = stream_weights(tmp_path, spec, torch.bfloat16, device="cpu", low=build._low)
        assert made.nbytes == build.weights_bytes
        assert f"(--weights {weights})" in " ".join(build._notes())
        assert build._weights_name == f"{weights} and bfloat16"


def test_an_8_bit_cache_is_planned_and_allocated_with_its_scales(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    spec, sizes = read_spec(tmp_path), StepSizes(64, 64, 8)
    tokens = []
    for kv_dtype in ("auto", "fp8", "int8"):
        config = EngineConfig(kv_dtype=kv_dtype, kv_memory_gib=1 / 64)  # type: ignore[arg-type]
        build = CudaBuild(config, tmp_path, spec, 1)
        build._device.free_at_start = 8 * GIB
        plan = plan_memory(spec, config, build.footprint(sizes), 0)
        runner = build._runner(random_weights(spec, torch.bfloat16), plan, sizes)
        assert runner.kv_bytes == plan.kv_bytes
        tokens.append(plan.kv_tokens)
    per_head = 2 * spec.head_dim / (spec.head_dim + 4)  # 1.94 for heads of 128
    assert tokens[1] == tokens[2] == pytest.approx(per_head * tokens[0], rel=0.02)


def test_the_policy_keeps_matrices_in_16_bits(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    config = EngineConfig(weights="fp8", quantization_keep=("layers.0", "attention.o", "lm_head"))
    build = CudaBuild(config, tmp_path, spec, 1)
    last = spec.num_layers - 1
    assert not any(layer == 0 or name == "o" for layer, name in build._low.formats)
    assert {name for layer, name in build._low.formats if layer == last} == {"qkv", "gate_up", "down"}
    for wrong in ("layer.0", "layers", "layers.0.router"):
        with pytest.raises(InvalidConfig, match="--quantization-keep"):
            EngineConfig(weights="fp8", quantization_keep=(wrong,))
    with pytest.raises(InvalidConfig, match="the model has layers 0 to"):
        CudaBuild(EngineConfig(weights="fp8", quantization_keep=("layers.99",)), tmp_path, spec, 1)


def test_a_gpu_without_fp8_expands_a_file_and_refuses_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "float")
    write_quantized(tmp_path / "float", tmp_path / "fp8", tmp_path / "twin", LAYOUTS["fp8-channel"])
    monkeypatch.setattr(cuda_build, "find_gpu", lambda: Gpu("A100", 80 * GIB, (8, 0), (13, 0)))
    spec = read_spec(tmp_path / "fp8")
    build = CudaBuild(EngineConfig(), tmp_path / "fp8", spec, 1)
    assert not build._low.formats
    assert any("this GPU does not multiply FP8" in note for note in build._notes())
    for settings in ({"weights": "fp8"}, {"kv_dtype": "fp8"}):
        with pytest.raises(InvalidConfig, match=r"8\.9 or newer; A100 has 8\.0\. Use --\S+ int8"):
            CudaBuild(EngineConfig(**settings), tmp_path / "fp8", spec, 1)  # type: ignore[arg-type]


def test_blocks_of_an_fp8_file_become_rows_with_their_scales(tmp_path: Path) -> None:
    layout = LAYOUTS["fp8-block"]
    from ridgeline.models.quantized.format import fp8_format
    from ridgeline.models.quantized.rounding import quantize

    block = replace(fp8_format("block"), group=(32, 32))
    block = replace(block, activations=replace(block.activations, group=32))  # type: ignore[type-var]
    config = {**layout.config, "weight_block_size": [32, 32]}
    tiny_model("qwen3").save_pretrained(tmp_path / "float")
    layout = layout._replace(quantize=lambda weights: quantize(weights, block), config=config)
    write_quantized(tmp_path / "float", tmp_path / "fp8", tmp_path / "twin", layout)
    spec = read_spec(tmp_path / "fp8")
    build = CudaBuild(EngineConfig(), tmp_path / "fp8", spec, 1)
    assert set(build._low.formats.values()) == {LowBitFormat("fp8", 32, inputs=True)}
    stored = stream_weights(tmp_path / "fp8", spec, torch.bfloat16, device="cpu", low=build._low)
    floats = tensors_of(load_weights(tmp_path / "twin", read_spec(tmp_path / "twin"), torch.float32))
    for ours, theirs in zip(device_tensors_of(stored).layers, floats.layers, strict=True):
        assert isinstance(ours.qkv, LowBits)
        assert torch.equal(expanded(ours.qkv), theirs.qkv)
