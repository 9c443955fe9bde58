"""The memory plan is made before loading, and says which limit to lower."""

import pytest

from ridgeline.engine import memory
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import OutOfMemoryPlan
from ridgeline.engine.memory import DEFAULT_KV_TOKENS, GIB, available_memory, plan_memory, resident_bytes
from ridgeline.models.read_spec import read_spec


@pytest.fixture(scope="module")
def spec(smollm2_path):
    return read_spec(smollm2_path)


def test_weights_and_kv_take_what_the_spec_says(spec):
    plan = plan_memory(spec, EngineConfig(), 4, 32 * GIB)
    assert plan.weights_bytes == spec.parameters * 4
    assert plan.kv_tokens == DEFAULT_KV_TOKENS
    assert plan.kv_bytes == DEFAULT_KV_TOKENS * spec.kv_bytes_per_token(4)
    assert plan.num_blocks * 16 == plan.kv_tokens
    assert plan.max_context == spec.max_context


def test_little_memory_gives_a_smaller_cache_and_a_shorter_context(spec):
    plan = plan_memory(spec, EngineConfig(), 4, int(1.3 * GIB))
    assert 0 < plan.kv_tokens < spec.max_context
    assert plan.max_context == plan.kv_tokens
    assert plan.weights_bytes + plan.kv_bytes + plan.activation_bytes <= 0.6 * 1.3 * GIB


def test_weights_that_do_not_fit_are_said_before_loading(spec):
    with pytest.raises(OutOfMemoryPlan, match="smaller dtype"):
        plan_memory(spec, EngineConfig(), 4, GIB // 2)


@pytest.mark.parametrize("wish", [{"kv_tokens": 10**7}, {"kv_memory_gib": 100.0}])
def test_a_wished_cache_that_does_not_fit_names_its_flag(spec, wish):
    with pytest.raises(OutOfMemoryPlan, match="--kv-tokens or --kv-memory-gib"):
        plan_memory(spec, EngineConfig(**wish), 4, 8 * GIB)


def test_wishes_are_kept_to_the_block(spec):
    assert plan_memory(spec, EngineConfig(kv_tokens=1000), 4, 8 * GIB).kv_tokens == 992
    by_bytes = plan_memory(spec, EngineConfig(kv_memory_gib=1.0), 4, 8 * GIB)
    assert GIB - 16 * spec.kv_bytes_per_token(4) <= by_bytes.kv_bytes <= GIB


def test_a_context_beyond_the_models_own_is_refused(spec):
    with pytest.raises(OutOfMemoryPlan, match="--max-context 9000"):
        plan_memory(spec, EngineConfig(max_context=9000), 4, 8 * GIB)
    assert plan_memory(spec, EngineConfig(max_context=512), 4, 8 * GIB).max_context == 512


def test_a_cgroups_limit_counts_without_the_file_cache_it_would_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    unlimited = available_memory()
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{90 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {20 << 20}\nfile {70 << 20}\ninactive_file {60 << 20}\n")
    assert available_memory() == 70 << 20
    (tmp_path / "memory.current").write_text(f"{200 << 20}\n")
    assert available_memory() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() == pytest.approx(unlimited, rel=0.2)


def test_this_machine_has_memory_and_this_process_uses_some():
    assert available_memory() > 100 << 20
    assert resident_bytes() > 10 << 20
