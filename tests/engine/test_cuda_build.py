"""What the GPU backend plans, refuses and prints: all that is decided before a device is touched."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig, OutOfMemoryPlan
from ridgeline.engine.limits.cuda_limits import ceilings_path, device_ceilings
from ridgeline.engine.limits.machine_limits import DeviceCeilings
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.start.backend_choice import BackendChoice
from ridgeline.engine.start.build import StartupBudget, build_engine, step_sizes
from ridgeline.engine.start.compiled_marks import CompiledMarks
from ridgeline.engine.start.cuda_build import CudaBuild, what_to_lower
from ridgeline.engine.start.cuda_kernels import KernelLoading
from ridgeline.engine.start.cuda_preload import log_errors
from ridgeline.engine.start.loading import StepSizes
from ridgeline.engine.start.memory import GIB, plan_memory
from ridgeline.engine.start.memory_receipt import PARTS, MemoryReceipt, receipt_of
from ridgeline.models.decoders.cuda_workspace import workspace
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import random_weights
from tests.models.tiny_checkpoints import tiny_model

SIZES = StepSizes(step_tokens=8192, prefill_chunk=8192, max_running=256)
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> Path:
    """A directory with a config.json and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def build_at(path: Path, free_bytes: int = 138 * GIB, **settings: object) -> CudaBuild:
    """A build for a device with this much free memory."""
    build = CudaBuild(EngineConfig(**settings), path, read_spec(path), 1)  # type: ignore[arg-type]
    build._device.free_at_start = free_bytes
    return build


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_weights_take_just_what_is_planned(tmp_path: Path, family: str, dtype: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    made = random_weights(read_spec(tmp_path), getattr(torch, dtype))
    assert build_at(tmp_path, weights=dtype).weights_bytes == made.nbytes


@pytest.mark.parametrize(
    ("stored", "asked", "dtype"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float32", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("gguf:Q4_1", "auto", "bfloat16"),
        ("float16", "float32", "float32"),
    ],
)
def test_the_dtype_is_as_asked_or_16_bits_that_keep_the_files_range(
    qwen3_8b: Path, stored: str, asked: str, dtype: str
) -> None:
    spec = replace(read_spec(qwen3_8b), weight_format=stored)
    build = CudaBuild(EngineConfig(weights=asked), qwen3_8b, spec, 1)  # type: ignore[arg-type]
    assert build.weights_bytes == pytest.approx(spec.weight_bytes(dtype), rel=1e-3)
    changed = [f"weights are converted from {stored} in the file to {dtype} (--weights)"]
    assert list(build._notes()) == (changed if asked == "auto" and stored != dtype else [])


def test_keys_of_another_type_than_the_weights_are_refused(qwen3_8b: Path) -> None:
    with pytest.raises(
        InvalidConfig, match=r"--kv-dtype float32: on a GPU .* inputs, bfloat16, or fp8 or int8"
    ):
        build_at(qwen3_8b, kv_dtype="float32")
    build_at(qwen3_8b, kv_dtype="float32", weights="float32")


def test_the_sizes_of_a_step_are_the_gpus_unless_asked_otherwise(qwen3_8b: Path) -> None:
    spec, choice = read_spec(qwen3_8b), BackendChoice("cuda")
    assert step_sizes(EngineConfig(), choice, spec, 1) == SIZES
    asked = EngineConfig(step_tokens=512, max_running=8, prefill_chunk=128)
    assert step_sizes(asked, choice, spec, 1) == StepSizes(512, 128, 8)


def test_a_plan_of_an_8b_model_adds_up_to_the_fraction(qwen3_8b: Path) -> None:
    build, config = build_at(qwen3_8b), EngineConfig()
    spec = read_spec(qwen3_8b)
    plan = plan_memory(spec, config, build.footprint(SIZES), 0)
    taken = plan.weights_bytes + plan.activation_bytes + plan.reserve_bytes + plan.kv_bytes
    assert int(0.9 * 138 * GIB) - 16 * 147_456 < taken <= 0.9 * 138 * GIB
    assert plan.weights_bytes == pytest.approx(2 * 8_190_735_360, rel=1e-4)
    assert plan.kv_bytes == plan.kv_tokens * 147_456
    assert plan.max_context == 40960


def test_a_small_model_is_given_no_more_cache_than_all_its_contexts(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    plan = plan_memory(spec, EngineConfig(), build_at(tmp_path).footprint(SIZES), 0)
    assert plan.kv_tokens == 256 * spec.max_context


def test_a_model_too_large_for_the_device_says_so_before_it_is_loaded(qwen3_8b: Path) -> None:
    build = build_at(qwen3_8b, free_bytes=12 * GIB)
    with pytest.raises(OutOfMemoryPlan, match=r"15\.26 GiB .* choose a smaller model"):
        plan_memory(read_spec(qwen3_8b), EngineConfig(), build.footprint(SIZES), 0)


def widened(spec: ModelSpec, **sizes: int) -> str:
    wanted = {"step_tokens": 256, "max_running": 8, "max_context": 1024, **sizes}
    return what_to_lower(0, workspace(spec, 2, **wanted))


def test_the_limit_to_lower_is_the_one_behind_most_of_the_bytes(qwen3_8b: Path) -> None:
    spec = read_spec(qwen3_8b)
    assert "--step-tokens" in widened(spec, step_tokens=65_536)
    assert "--max-running" in widened(spec, max_running=2048, step_tokens=1)
    assert "--max-context" in widened(spec, max_context=40_960)


@pytest.mark.parametrize("size", ["step_tokens", "max_running", "max_context"])
def test_the_workspace_grows_with_each_of_its_limits(qwen3_8b: Path, size: str) -> None:
    spec = read_spec(qwen3_8b)
    sizes = {"step_tokens": 4096, "max_running": 64, "max_context": 8192}
    larger = {**sizes, size: 2 * sizes[size]}
    plain = sum(workspace(spec, 2, **sizes).values())
    assert sum(workspace(spec, 2, **larger).values()) > plain
    assert sum(workspace(spec, 4, **sizes).values()) > plain


def test_without_graphs_no_memory_is_kept_for_them(qwen3_8b: Path) -> None:
    with_graphs, without = build_at(qwen3_8b), build_at(qwen3_8b, cuda_graphs=False)
    assert with_graphs.footprint(SIZES).reserve_bytes > without.footprint(SIZES).reserve_bytes


RECEIPT = MemoryReceipt(
    planned={part: (place + 1) * GIB for place, part in enumerate(PARTS)},
    observed={part: (place + 1) * GIB + GIB // 2 for place, part in enumerate(PARTS)},
    peak_tensor_bytes=7 * GIB,
    peak_reserved_bytes=8 * GIB,
    device_free_bytes=9 * GIB,
    device_total_bytes=140 * GIB,
)


def test_a_receipt_shows_planned_beside_taken_and_survives_the_socket() -> None:
    assert receipt_of({**RECEIPT.as_bytes(), "rest": 1}) == RECEIPT
    assert receipt_of({"weights": 1, "kv": 1, "rest": 1}) is None
    parts, whole = RECEIPT.lines()
    assert parts.startswith("weights 1.50 (planned 1.00) · KV cache 2.50 (planned 2.00) · activations 3.50")
    assert whole == "peak 7.00 of 8.00 GiB held · device 9.00 of 140.00 GiB free"


def test_a_devices_ceilings_are_measured_once_and_kept_by_name_and_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    measured: list[str] = []

    def measure(dtype: str) -> DeviceCeilings:
        measured.append(dtype)
        return DeviceCeilings(4.27e12, 791e12)

    for _ in range(2):
        assert device_ceilings("NVIDIA H200", "bfloat16", measure) == DeviceCeilings(4.27e12, 791e12)
    assert measured == ["bfloat16"]
    device_ceilings("NVIDIA H200", "float32", measure)
    device_ceilings("NVIDIA H100 80GB HBM3", "bfloat16", measure)
    assert len(measured) == 3
    for damage in ("", "{}", '{"read_bytes_per_s": 0, "flops_per_s": 1}', "[1]"):
        ceilings_path("NVIDIA H200", "bfloat16").write_text(damage)
        assert device_ceilings("NVIDIA H200", "bfloat16", measure).flops_per_s == 791e12
    assert len(measured) == 7


def test_a_cache_that_cannot_be_written_costs_only_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu-limits").write_text("in the way")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    assert device_ceilings("any", "bfloat16", lambda dtype: DeviceCeilings(1.0, 2.0)) == DeviceCeilings(
        1.0, 2.0
    )


def test_random_weights_need_a_configuration_and_no_files(tmp_path: Path) -> None:
    """By torch, which runs everywhere; on a GPU the same weights are made there."""
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    config = EngineConfig(backend="torch", load_format="dummy", kv_tokens=256, max_context=64)
    built = build_engine(config, tmp_path)
    assert any("random" in note for note in built.notes)
    assert built.receipt is None  # a GPU's
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    built.core.add(Request("one", [1, 2, 3], params))
    tokens = []
    while built.core.has_work:
        for delta in built.core.step():
            assert delta.error is None
            tokens += delta.tokens
    assert len(tokens) == 3


def test_the_runner_is_made_as_planned(tmp_path: Path) -> None:
    """The GPU's runner on a CPU, where it can be made and not be fast."""
    pytest.importorskip("triton", reason="triton is not installed; the runner's kernels cannot be imported")
    tiny_model("qwen3").save_pretrained(tmp_path)
    build, sizes = build_at(tmp_path, kv_tokens=512), StepSizes(64, 64, 8)
    spec = read_spec(tmp_path)
    plan = plan_memory(spec, EngineConfig(kv_tokens=512), build.footprint(sizes), 0)
    runner = build._runner(random_weights(spec, torch.bfloat16), plan, sizes)
    assert runner.kv.nbytes == plan.kv_bytes
    assert runner.kv.dtype == torch.bfloat16


def test_a_stage_within_another_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 10.0, 20.0, 25.0])
    monkeypatch.setattr("ridgeline.engine.start.build.time.monotonic", lambda: next(times))
    budget = StartupBudget()
    with budget.stage("weights"), budget.stage("buffers"):
        pass
    with budget.stage("weights"):
        pass
    assert budget.seconds == {"weights": 7.0 + 5.0, "buffers": 3.0}


def test_compilations_that_fail_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log_errors([])
    assert not caplog.records
    log_errors([ValueError("no such instruction"), KeyError(1)])
    (told,) = caplog.records
    assert told.getMessage() == "could not compile 2 kernels ahead"
    assert told.exc_info
    assert told.exc_info[0] is ValueError


class Compiling:
    """Stands for the processes that compile; told what to compile, and whether that works."""

    def __init__(self, works: bool = True) -> None:
        self.urgent_done = threading.Event()
        self.urgent_done.set()
        self.works = works
        self.tasks: list[tuple[dict[str, Any], list[int]]] = []

    def compile(self, dry_run: dict[str, Any], decode_sizes: list[int]) -> bool:
        self.tasks.append((dry_run, decode_sizes))
        return self.works

    def end(self) -> None:
        pass


def started(
    path: Path, monkeypatch: pytest.MonkeyPatch, works: bool = True
) -> tuple[Any, Compiling, list[str]]:
    """A build whose kernels are loaded, the processes that it used, and which kernels it compiled itself."""
    from ridgeline.engine.run.cuda import warm as cuda_warm
    from ridgeline.ops.cuda import recording

    build, sizes = build_at(path, kv_tokens=512), StepSizes(64, 64, 8)
    plan = plan_memory(read_spec(path), EngineConfig(kv_tokens=512), build.footprint(sizes), 0)
    compiled: list[str] = []
    compiling = Compiling(works)
    for name in ("first", "urgent", "other"):
        monkeypatch.setattr(cuda_warm, f"{name}_kernels", lambda *args, name=name: [name])
    monkeypatch.setattr(
        recording, "compile_all", lambda launches, threads=16: compiled.extend(launches) or []
    )
    monkeypatch.setattr(recording, "distinct", list)
    monkeypatch.setattr("ridgeline.engine.start.cuda_kernels.CompilingProcesses", lambda: compiling)
    begun: list[threading.Thread] = []

    def in_thread(target: Callable[..., object], *args: object) -> threading.Thread:
        begun.append(threading.Thread(target=target, args=args))
        begun[-1].start()
        return begun[-1]

    monkeypatch.setattr("ridgeline.engine.start.cuda_kernels.in_thread", in_thread)
    build._compiler = threading.Thread(target=int)
    build._compiler.start()
    build._kernels = KernelLoading(CompiledMarks(path / "cache", "model"))
    build._warm_kernels(torch.bfloat16, plan, sizes)
    for thread in begun:
        thread.join()
    return build, compiling, compiled


def test_a_first_start_leaves_most_kernels_to_other_processes_and_the_next_loads_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed; kernels cannot be compiled")
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    build, compiling, compiled = started(tmp_path, monkeypatch)
    ((arguments, decode_sizes),) = compiling.tasks
    assert compiled == ["first", "urgent", "other"]
    assert build._kernels.loaded is None
    assert pickle.loads(pickle.dumps(arguments)) == arguments
    assert arguments["max_rows"] == decode_sizes[-1] == 8

    build, compiling, compiled = started(tmp_path, monkeypatch)
    assert compiling.tasks == []
    assert compiled == ["first", "other"]
    assert build._kernels.loaded is None


def test_a_start_whose_compilation_failed_leaves_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed; kernels cannot be compiled")
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    for _ in range(2):
        _, compiling, _ = started(tmp_path, monkeypatch, works=False)
        assert len(compiling.tasks) == 1


def test_marks_are_of_one_model_and_one_plan_and_may_be_damaged(tmp_path: Path) -> None:
    marks = CompiledMarks(tmp_path, "model", "bfloat16")
    assert not marks
    marks.add("plan", [1, 2])
    marks.add("plan", [1, 4])
    again = CompiledMarks(tmp_path, "model", "bfloat16")
    assert again
    assert again.holds("plan", [1, 2])
    assert not again.holds("plan", [1, 2, 4])
    assert not CompiledMarks(tmp_path, "model", "float16")
    (path,) = tmp_path.iterdir()
    for damage in ("", "{}", "[1]", "\0"):
        path.write_text(damage)
        assert not again.holds("plan", [1, 2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_gpu_engine_starts_with_a_receipt_that_keeps_to_its_plan(tmp_path: Path, overlap: bool) -> None:
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    config = EngineConfig(
        backend="cuda", load_format="dummy", kv_tokens=4096, max_running=8, step_tokens=256, overlap=overlap
    )
    built = build_engine(config, tmp_path)
    stages = ["plan", "import", "import kernels", "device", "weights", "cublas", "buffers", "kernels"]
    assert list(built.budget.seconds) == [*stages, "warm-up", "graphs", "limits"]
    assert len(built.core.runner._rows) == 0  # type: ignore[attr-defined]
    receipt = built.receipt
    assert receipt is not None
    assert receipt.observed["weights"] == pytest.approx(receipt.planned["weights"], abs=1 << 20)
    assert receipt.observed["kv"] == built.plan.kv_bytes
    assert receipt.observed["activations"] <= receipt.planned["activations"] + (1 << 20)
    assert receipt.peak_tensor_bytes >= receipt.observed["weights"] + receipt.observed["kv"]
    assert receipt_of(built.budget.bytes) is not None
    assert built.limits["read_bytes_per_s"] > 1e11
