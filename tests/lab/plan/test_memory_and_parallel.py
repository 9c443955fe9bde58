"""Memory and parallelism: what fits, on how many chips, and why it is spread the way it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.lab.errors import Infeasible
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.memory import activation_bytes, memory_plan, tp_sizes
from ridgeline.lab.perfmodel.parallel import choose_parallel
from tests.lab.plan.known_specs import deepseek_v3, llama_8b, llama_70b, qwen3_30b_a3b

GB = 1e9


def test_weights_cache_activations_and_reserve_share_the_memory() -> None:
    needs = memory_plan(llama_8b(), find_chip("h100"), "bfloat16", context_in=3_000, context_out=1_000)
    assert needs.weights == llama_8b().weight_bytes("bfloat16")
    assert needs.kv_per_token == 131_072
    assert needs.kv_per_request == 4_000 * 131_072
    assert needs.reserve == pytest.approx(0.1 * 80 * 2**30, rel=1e-6)
    room = 80 * 2**30 - needs.weights - needs.activations - needs.reserve
    assert needs.requests_that_fit == room // needs.kv_per_request
    assert (needs.gpus, needs.gpus_needed) == (1, 1)


def test_a_processor_leaves_memory_to_other_programs() -> None:
    here = replace(find_chip("h200"), name="cpu", memory_bytes=10**11)
    assert memory_plan(llama_8b(), here, "gguf:Q4_1").reserve == 4 * 10**10


def test_what_does_not_fit_says_how_many_chips_it_takes() -> None:
    needs = memory_plan(llama_70b(), find_chip("h100"), "bfloat16")
    assert needs.requests_that_fit == 0
    assert needs.gpus_needed == 2
    assert memory_plan(llama_70b(), find_chip("h200"), "fp8", tp=4).gpus_needed == 1
    assert memory_plan(deepseek_v3(), find_chip("h100"), "fp8").gpus_needed == 16
    assert memory_plan(deepseek_v3(), find_chip("h200"), "fp8").gpus_needed == 8


def test_a_smaller_cache_format_doubles_the_requests() -> None:
    wide = memory_plan(llama_8b(), find_chip("h200"), "bfloat16", "bfloat16")
    narrow = memory_plan(llama_8b(), find_chip("h200"), "bfloat16", "fp8")
    assert narrow.requests_that_fit == pytest.approx(2 * wide.requests_that_fit, abs=1)


def test_a_latent_cache_is_on_every_chip_and_grouped_heads_are_divided() -> None:
    for shape, parts in ((deepseek_v3(), 1), (llama_70b(), 8)):
        one = memory_plan(shape, find_chip("b300"), "nvfp4", tp=1)
        eight = memory_plan(shape, find_chip("b300"), "nvfp4", tp=8)
        assert eight.kv_per_request == pytest.approx(one.kv_per_request / parts, rel=1e-3)


def test_requests_longer_than_the_model_reads_are_infeasible() -> None:
    with pytest.raises(Infeasible, match="reads at most 131,072 tokens; 131,000 in and 100 out are 131,100"):
        memory_plan(llama_8b(), find_chip("h200"), "fp8", context_in=131_000, context_out=100)


def test_heads_decide_by_how_many_chips_a_layer_can_be_divided() -> None:
    assert tp_sizes(llama_8b()) == [1, 2, 4, 8, 16, 32]
    assert tp_sizes(deepseek_v3())[-1] == 128


def test_activations_grow_with_the_step_and_shrink_with_the_chips() -> None:
    assert activation_bytes(llama_70b(), 8_192, 1) > activation_bytes(llama_70b(), 2_048, 1)
    assert activation_bytes(llama_70b(), 8_192, 8) < activation_bytes(llama_70b(), 8_192, 1)


def test_a_model_that_fits_one_chip_is_not_split() -> None:
    choice = choose_parallel(llama_8b(), find_chip("h200"), "bfloat16", concurrency=32)
    assert (choice.tp, choice.pp, choice.ep) == (1, 1, 1)
    assert "replicas of it scale without any link" in choice.reason


def test_more_requests_at_once_take_more_chips() -> None:
    few = choose_parallel(llama_70b(), find_chip("h100"), "bfloat16", context_in=4_096, concurrency=4)
    many = choose_parallel(llama_70b(), find_chip("h100"), "bfloat16", context_in=4_096, concurrency=128)
    assert few.gpus < many.gpus
    assert many.memory.requests_that_fit >= 128
    assert "tensor parallel over" in many.reason


def test_tensor_parallel_stays_inside_a_node_and_stages_cross_it() -> None:
    choice = choose_parallel(deepseek_v3(), find_chip("h100"), "fp8")
    assert (choice.tp, choice.pp) == (8, 2)
    assert "2 pipeline stages across nodes: at 50 GB/s" in choice.reason
    assert "each of the 8 chips keeps the whole latent cache" in choice.reason
    rack = choose_parallel(deepseek_v3(), find_chip("gb200"), "bfloat16")
    assert (rack.tp, rack.pp) == (8, 1)  # the rack's link reaches further than the node


def test_experts_stay_whole_where_their_slices_would_be_thinner_than_a_tile() -> None:
    thin = choose_parallel(qwen3_30b_a3b(), find_chip("l4"), "bfloat16")
    assert thin.tp == 4
    assert thin.ep == 4
    assert "32 whole experts of 128: a 4th of an expert would be 192 columns" in thin.reason
    wide = choose_parallel(deepseek_v3(), find_chip("h200"), "fp8")
    assert wide.ep == 1
    assert "sliced into 256 each" in wide.reason


def test_what_no_number_of_chips_allowed_holds_names_what_binds() -> None:
    with pytest.raises(
        Infeasible, match=r"on 2 × h100.*requests of 8,192 tokens fit at once, 500 are wanted"
    ):
        choose_parallel(
            llama_70b(),
            find_chip("h100"),
            "fp8",
            context_in=8_000,
            context_out=192,
            concurrency=500,
            most_gpus=2,
        )


def test_cards_without_a_system_are_used_side_by_side_only_when_told() -> None:
    with pytest.raises(Infeasible, match="on 1 × rtx-5090"):
        choose_parallel(llama_70b(), find_chip("rtx-5090"), "int4")
    choice = choose_parallel(llama_70b(), find_chip("rtx-5090"), "int4", most_gpus=4)
    assert choice.tp == 2
    assert "the link of 64 GB/s" in choice.reason
