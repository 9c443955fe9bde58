"""Operators and the roofline: what a pass costs, what binds it, and what is said to move it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.operators import OperatorCost, all_reduce_bytes, operators
from ridgeline.lab.perfmodel.roofline import Roofline, roofline, study
from ridgeline.models.spec.cache_layout import CacheLayout
from tests.lab.plan.known_specs import deepseek_v3, llama_8b, llama_70b, qwen3_30b_a3b

H200 = find_chip("h200")


def cost_of(costs: list[OperatorCost], name: str) -> OperatorCost:
    return next(cost for cost in costs if cost.name == name)


@pytest.mark.parametrize("shape", [llama_8b(), deepseek_v3(), qwen3_30b_a3b()], ids=lambda shape: shape.name)
def test_operators_add_up_to_the_operations_of_the_shape(shape) -> None:
    prefill = operators(shape, "prefill", 1, 512, 1_000, "bfloat16")
    assert sum(cost.flops for cost in prefill) == pytest.approx(shape.flops(512, 1_000))
    decode = operators(shape, "decode", 16, 1, 1_000, "bfloat16")
    assert sum(cost.flops for cost in decode) == pytest.approx(16 * shape.flops(1, 1_000))


@pytest.mark.parametrize("shape", [llama_8b(), deepseek_v3(), qwen3_30b_a3b()], ids=lambda shape: shape.name)
def test_a_decode_step_reads_the_weights_once_and_every_sequence_its_own_cache(shape) -> None:
    costs = operators(shape, "decode", 16, 1, 4_000, "fp8", "fp8")
    weights = shape.weight_bytes_read("fp8", 16)
    cache = 16 * (CacheLayout.of(shape, 1).read(4_001) + CacheLayout.of(shape, 1).token_bytes)
    # Besides, activations pass through: of 16 rows, little.
    assert sum(cost.bytes for cost in costs) == pytest.approx(weights + cache, rel=0.02)
    assert sum(cost.bytes for cost in costs) > 0.999 * (weights + cache)


def test_each_of_several_chips_has_its_part_of_the_work_and_sends_what_it_must() -> None:
    alone = operators(llama_70b(), "prefill", 1, 2_048, 0, "bfloat16")
    shared = operators(llama_70b(), "prefill", 1, 2_048, 0, "bfloat16", tp=4)
    for name in ("qkv", "attention", "o", "ffn", "lm_head"):
        assert cost_of(shared, name).flops == pytest.approx(cost_of(alone, name).flops / 4)
    assert cost_of(shared, "all-reduce").link_bytes == 80 * 2 * all_reduce_bytes(2_048, 8192, 4)
    assert all_reduce_bytes(1, 8192, 4) == 2 * 3 / 4 * 8192 * 2
    assert "all-reduce" not in {cost.name for cost in alone}


def test_a_latent_cache_is_read_whole_by_every_chip_and_grouped_heads_are_divided() -> None:
    latent, grouped = deepseek_v3(), llama_70b()
    one, eight = (
        cost_of(operators(latent, "decode", 64, 1, 8_000, "fp8", tp=tp), "attention") for tp in (1, 8)
    )
    assert eight.bytes > 0.9 * one.bytes
    one, eight = (
        cost_of(operators(grouped, "decode", 64, 1, 8_000, "fp8", tp=tp), "attention") for tp in (1, 8)
    )
    assert eight.bytes == pytest.approx(one.bytes / 8)
    sixteen = cost_of(operators(grouped, "decode", 64, 1, 8_000, "fp8", tp=16), "attention")
    assert sixteen.bytes > 0.9 * eight.bytes  # eight KV heads cannot be divided by sixteen


def test_decode_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    decode = study(llama_8b(), H200, "decode", 8, 1, 1_024, "bfloat16")
    assert decode.bound == "memory"
    assert decode.total.intensity < 10
    prefill = study(llama_8b(), H200, "prefill", 1, 2_048, 0, "bfloat16")
    assert prefill.bound == "compute"
    assert prefill.total.intensity > prefill.total.ridge == pytest.approx(H200.ridge("bfloat16"))


def test_the_limit_is_the_slower_of_memory_and_arithmetic_and_operators_follow_each_other() -> None:
    costs = [OperatorCost("ffn", 989e12, 1.0), OperatorCost("attention", 1.0, 4.8e12 / 2)]
    found = roofline(costs, H200)
    assert [point.bound for point in found.points] == ["compute", "memory"]
    assert found.limit_s == pytest.approx(1.5)
    assert found.bound == "compute"


def test_one_sequence_decodes_no_faster_than_its_weights_are_read() -> None:
    found = study(llama_70b(), H200, "decode", 1, 1, 1, "fp8", tp=2)
    assert found.limit_s == pytest.approx(llama_70b().weight_bytes_read("fp8", 1) / 2 / 4.8e12, rel=0.02)


def move(found: Roofline, change: str) -> tuple[float, str]:
    return next((move.factor, move.text) for move in found.what_moves_it if move.change == change)


def test_the_batch_at_which_arithmetic_binds_is_computed() -> None:
    """Short sequences: little cache. Then the weights decide, and the ridge is about the batch."""
    found = study(llama_8b(), H200, "decode", 8, 1, 16, "bfloat16")
    factor, text = move(found, "batch")
    assert factor == pytest.approx(2, rel=0.05)
    crossing = int(text.rsplit("batch of ", 1)[1].replace(",", ""))
    assert H200.ridge("bfloat16") < crossing < 1.3 * H200.ridge("bfloat16")
    at = study(llama_8b(), H200, "decode", crossing, 1, 16, "bfloat16").total
    before = study(llama_8b(), H200, "decode", crossing - 1, 1, 16, "bfloat16").total
    assert at.compute_s >= at.memory_s
    assert before.compute_s < before.memory_s


def test_where_the_cache_keeps_memory_binding_at_any_batch_that_is_said() -> None:
    factor, text = move(study(llama_8b(), H200, "decode", 32, 1, 8_000, "bfloat16"), "batch")
    assert factor < 1.5
    assert "no batch makes arithmetic bind the whole pass" in text
    assert "the weight matrices alone are bound by arithmetic from a batch of 220" in text


def test_the_chunk_at_which_prefill_is_bound_by_arithmetic_is_computed() -> None:
    _, text = move(study(deepseek_v3(), H200, "prefill", 1, 512, 0, "fp8", tp=8), "chunk")
    crossing = int(text.rsplit("chunk of ", 1)[1].replace(",", ""))
    at = study(deepseek_v3(), H200, "prefill", 1, crossing, 0, "fp8", tp=8).total
    assert at.compute_s == pytest.approx(at.memory_s, rel=0.01)


def test_fewer_bits_help_decode_by_the_bytes_and_prefill_by_the_unit() -> None:
    factor, text = move(study(llama_70b(), H200, "decode", 1, 1, 128, "bfloat16", tp=4), "weights fp8")
    assert factor == pytest.approx(1.9, abs=0.1)
    changes = {
        move.change for move in study(llama_70b(), H200, "prefill", 1, 4_096, 0, "bfloat16").what_moves_it
    }
    assert "weights fp8" in changes
    assert "weights int4" not in changes  # widened before they are multiplied: no faster arithmetic
    on_b200 = study(llama_70b(), find_chip("b200"), "prefill", 1, 4_096, 0, "bfloat16")
    assert move(on_b200, "weights nvfp4")[0] > 2
    assert "multiplied as fp4" in move(on_b200, "weights nvfp4")[1]
    assert "multiplied as fp8" in text


def test_moves_are_sorted_by_what_they_gain() -> None:
    factors = [
        move.factor for move in study(llama_8b(), H200, "decode", 4, 1, 1_000, "bfloat16").what_moves_it
    ]
    assert factors == sorted(factors, reverse=True)
    assert len(factors) >= 4


def test_a_slow_link_is_seen_to_bind() -> None:
    found = study(llama_70b(), find_chip("l40s"), "prefill", 1, 2_048, 0, "fp8", tp=8)
    assert found.bound == "link"


def test_a_chip_without_a_link_cannot_share_a_model() -> None:
    with pytest.raises(BadInput, match="no link for tensor parallel"):
        roofline(operators(llama_8b(), "decode", 1, 1, 8, "fp8", tp=2), replace(H200, link_bytes_per_s=None))
