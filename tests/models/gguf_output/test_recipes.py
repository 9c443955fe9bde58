"""Recipes: the types that llama-quantize gives the same tensors."""

from __future__ import annotations

import pytest

from ridgeline.models.gguf_output.recipes import RECIPES, choose_type, find_recipe

# Of 28 layers: those whose attn_v and ffn_down llama-quantize makes Q6_K in Q4_K_M.
MORE_BITS = (0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27)


def chosen(recipe: str, name: str, shape: tuple[int, ...] = (1536, 1536), tied: bool = True) -> str:
    return choose_type(RECIPES[recipe], name, shape, layers=28, tied=tied)


@pytest.mark.parametrize("stem", ["attn_v", "ffn_down"])
def test_q4_k_m_gives_six_bits_to_half_of_the_sensitive_matrices(stem: str) -> None:
    six = tuple(layer for layer in range(28) if chosen("q4_k_m", f"blk.{layer}.{stem}.weight") == "Q6_K")
    assert six == MORE_BITS


def test_the_head_gets_six_bits_wherever_it_is() -> None:
    assert chosen("q4_k_m", "token_embd.weight", tied=True) == "Q6_K"
    assert chosen("q4_k_m", "token_embd.weight", tied=False) == "Q4_K"
    assert chosen("q4_k_m", "output.weight", tied=False) == "Q6_K"
    assert chosen("q8_0", "output.weight", tied=False) == "Q8_0"


def test_rows_that_are_not_whole_blocks_get_the_next_type_that_fits() -> None:
    assert chosen("q4_k_m", "blk.3.attn_q.weight", (576, 576)) == "Q5_0"
    assert chosen("q5_k_s", "blk.3.attn_q.weight", (576, 576)) == "Q5_1"
    assert chosen("q6_k", "blk.3.attn_q.weight", (576, 576)) == "Q8_0"
    assert chosen("q4_k_m", "blk.3.ffn_down.weight", (576, 1536)) == "Q4_K"
    assert chosen("q8_0", "blk.3.attn_q.weight", (80, 40)) == "F16"


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "position_embd.weight"],
)
def test_small_tensors_stay_in_float32(name: str) -> None:
    assert {chosen(recipe, name) for recipe in RECIPES} == {"F32"}


def test_few_experts_leave_room_for_better_keys_and_values() -> None:
    recipe = find_recipe("Q4_K_M")
    types = [
        choose_type(recipe, f"blk.4.{stem}.weight", (1024, 4096), layers=32, tied=False, experts=8)
        for stem in ("attn_k", "attn_v", "attn_q", "ffn_down_exps")
    ]
    assert types == ["Q8_0", "Q8_0", "Q4_K", "Q4_K"]
