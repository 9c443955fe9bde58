"""The memory plan is made before loading, and says which limit to lower."""

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import OutOfMemoryPlan
from ridgeline.engine.start import memory
from ridgeline.engine.start.loading import StepSizes
from ridgeline.engine.start.memory import (
    DEFAULT_KV_TOKENS,
    GIB,
    DeviceRoom,
    Footprint,
    available_memory,
    plan_memory,
    resident_bytes,
)
from ridgeline.engine.start.torch_build import TorchBuild
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.read_spec import read_spec

SIZES = StepSizes(step_tokens=512, prefill_chunk=512, max_running=64)


@pytest.fixture(scope="module")
def spec(smollm2_path):
    return read_spec(smollm2_path)


@pytest.fixture(scope="module")
def plan(spec, smollm2_path):
    """plan(config, available bytes): in float32, by torch."""

    def make(config, available_bytes):
        footprint = TorchBuild(config, smollm2_path, spec, 1).footprint(SIZES)
        return plan_memory(spec, config, footprint, available_bytes)

    return make


def test_weights_and_kv_take_what_the_spec_says(spec, plan):
    made = plan(EngineConfig(), 32 * GIB)
    assert made.weights_bytes == spec.parameters * 4
    assert made.kv_tokens == DEFAULT_KV_TOKENS
    assert made.kv_bytes == DEFAULT_KV_TOKENS * CacheLayout.of(spec, 4).token_bytes
    assert made.num_blocks * 16 == made.kv_tokens
    assert made.max_context == spec.max_context


def test_little_memory_gives_a_smaller_cache_and_a_shorter_context(spec, plan):
    made = plan(EngineConfig(), int(1.3 * GIB))
    assert 0 < made.kv_tokens < spec.max_context
    assert made.max_context == made.kv_tokens
    assert made.weights_bytes + made.kv_bytes + made.activation_bytes <= 0.6 * 1.3 * GIB


def test_weights_that_do_not_fit_are_said_before_loading(plan):
    with pytest.raises(OutOfMemoryPlan, match="smaller --weights"):
        plan(EngineConfig(), GIB // 2)


@pytest.mark.parametrize("wish", [{"kv_tokens": 10**7}, {"kv_memory_gib": 100.0}])
def test_a_wished_cache_that_does_not_fit_names_its_flag(plan, wish):
    with pytest.raises(OutOfMemoryPlan, match="--kv-tokens or --kv-memory-gib"):
        plan(EngineConfig(**wish), 8 * GIB)


def test_wishes_are_kept_to_the_block(spec, plan):
    assert plan(EngineConfig(kv_tokens=1000), 8 * GIB).kv_tokens == 992
    by_bytes = plan(EngineConfig(kv_memory_gib=1.0), 8 * GIB)
    assert GIB - 16 * CacheLayout.of(spec, 4).token_bytes <= by_bytes.kv_bytes <= GIB


def test_a_context_beyond_the_models_own_is_refused(plan):
    with pytest.raises(OutOfMemoryPlan, match="--max-context 9000"):
        plan(EngineConfig(max_context=9000), 8 * GIB)
    assert plan(EngineConfig(max_context=512), 8 * GIB).max_context == 512


@pytest.fixture(scope="module")
def on_device(spec, smollm2_path):
    """on_device(config, free bytes, most useful tokens): in bfloat16, on a GPU with that many bytes free."""

    def make(config, free_bytes, most_kv_tokens=10**9):
        footprint = Footprint(
            weights_bytes=2 * spec.parameters,
            kv_bytes_per_token=CacheLayout.of(spec, 2).token_bytes,
            activation_bytes=GIB // 8,
            reserve_bytes=GIB // 4,
            device=DeviceRoom(free_bytes, most_kv_tokens, "lower --step-tokens"),
        )
        return plan_memory(spec, config, footprint, available_bytes=0)

    return make


def test_on_a_gpu_the_cache_takes_all_that_fits_in_the_fraction(spec, on_device):
    made = on_device(EngineConfig(), 8 * GIB)
    taken = made.weights_bytes + made.activation_bytes + made.reserve_bytes + made.kv_bytes
    assert 0 <= int(0.9 * 8 * GIB) - taken < 16 * CacheLayout.of(spec, 2).token_bytes
    assert (made.available_bytes, made.reserve_bytes) == (8 * GIB, GIB // 4)
    half = on_device(EngineConfig(memory_fraction=0.5), 8 * GIB)
    assert half.kv_bytes == pytest.approx(made.kv_bytes - 0.4 * 8 * GIB, rel=0.01)
    shared = on_device(EngineConfig(memory_fraction=1.0, memory_share=0.5), 8 * GIB)
    assert shared.kv_bytes == half.kv_bytes


def test_on_a_gpu_the_cache_is_no_larger_than_it_can_be_of_use(spec, on_device):
    assert on_device(EngineConfig(), 80 * GIB, most_kv_tokens=64_000).kv_tokens == 64_000
    assert on_device(EngineConfig(), 80 * GIB, most_kv_tokens=64).kv_tokens == spec.max_context


def test_on_a_gpu_wishes_are_kept_or_refused_as_elsewhere(on_device):
    assert on_device(EngineConfig(kv_tokens=1000), 8 * GIB).kv_tokens == 992
    with pytest.raises(OutOfMemoryPlan, match="--kv-tokens or --kv-memory-gib"):
        on_device(EngineConfig(kv_tokens=10**7), 8 * GIB)


def test_what_does_not_fit_a_gpu_names_the_limit_to_lower(on_device):
    with pytest.raises(OutOfMemoryPlan, match="free on the GPU: lower --step-tokens, or raise --memory-fr"):
        on_device(EngineConfig(), GIB // 2)


def test_a_cgroups_limit_counts_without_the_file_cache_it_would_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_meminfo_available", lambda: 8 * GIB)
    assert available_memory() == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{90 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {20 << 20}\nfile {70 << 20}\ninactive_file {60 << 20}\n")
    assert available_memory() == 70 << 20
    (tmp_path / "memory.current").write_text(f"{200 << 20}\n")
    assert available_memory() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() == 8 * GIB


def test_this_machine_has_memory_and_this_process_uses_some():
    assert available_memory() > 100 << 20
    assert resident_bytes() > 10 << 20
