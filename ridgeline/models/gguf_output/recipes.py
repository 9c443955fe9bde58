"""Recipes: which tensors of a GGUF file get which type, as data. The names and choices are llama.cpp's.

A recipe has one type for most matrices, another for the output, and rules for tensors that are worth more
bits. A matrix whose rows are not whole blocks of a type gets the next type with blocks of 32, or 16 bits.
Reads no files.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from ridgeline.models.files.gguf import BLOCK_SIZES
from ridgeline.models.files.gguf_writer import TensorEntry

# Which layers a rule applies to, of n layers.
#   all
#   more:    the first and the last eighth, and every third of those between
#   eighth:  the first eighth
#   four:    the first four
Layers = Literal["all", "more", "eighth", "four"]

# Types with blocks of 256, and what takes their place in rows that are not whole blocks.
NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
PLAIN = "F16"  # for rows that are not whole blocks of 32 either
FLOAT_TYPES = ("F32", "F16", "BF16")
# Matrices that stay in float32: small, and an error in them changes every token.
KEPT = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd")
EIGHT_EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors `blk.N.<stem>.weight` of these layers get `type`."""

    stems: tuple[str, ...]
    type: str
    layers: Layers = "all"


@dataclass(frozen=True, slots=True)
class Recipe:
    """number: general.file_type in llama.cpp's table. output: the type of the LM head, and of the embedding
    where it is the head too; empty: as the others. rules: the first that matches decides."""

    name: str
    type: str
    number: int
    output: str = ""
    rules: tuple[Rule, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return self.type not in FLOAT_TYPES


_DOWN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
_MORE_FOR_VALUES_AND_DOWN = Rule(("attn_v", *_DOWN), "Q6_K", "more")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", "F32", 0),
        Recipe("f16", "F16", 1),
        Recipe("bf16", "BF16", 32),
        Recipe("q8_0", "Q8_0", 7),
        Recipe("q6_k", "Q6_K", 18),
        Recipe("q5_0", "Q5_0", 8, "Q6_K"),
        Recipe("q5_1", "Q5_1", 9, "Q6_K"),
        Recipe("q5_k_s", "Q5_K", 16, "Q6_K"),
        Recipe("q5_k_m", "Q5_K", 17, "Q6_K", (_MORE_FOR_VALUES_AND_DOWN, Rule(("attn_qkv",), "Q6_K"))),
        Recipe("q4_0", "Q4_0", 2, "Q6_K"),
        Recipe("q4_1", "Q4_1", 3, "Q6_K"),
        Recipe(
            "q4_k_s", "Q4_K", 14, "Q6_K", (Rule(("attn_v",), "Q5_K", "four"), Rule(_DOWN, "Q5_K", "eighth"))
        ),
        Recipe("q4_k_m", "Q4_K", 15, "Q6_K", (_MORE_FOR_VALUES_AND_DOWN, Rule(("attn_qkv",), "Q5_K"))),
    )
}


def find_recipe(name: str) -> Recipe:
    """By name, in any case. ValueError that names the nearest one."""
    found = RECIPES.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), RECIPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(RECIPES)}"
        raise ValueError(f"unknown GGUF type {name!r}; {hint}")
    return found


def choose_type(
    recipe: Recipe, name: str, shape: tuple[int, ...], *, layers: int, tied: bool, experts: int = 0
) -> str:
    """The type of a tensor with this name and shape. tied: the embedding is the LM head too."""
    stem, _, kind = name.rpartition(".")
    if kind != "weight" or len(shape) < 2 or "norm" in stem or stem.startswith("rope_"):
        return "F32"
    layer, stem = _layer_and_stem(stem)
    if stem in KEPT:
        return "F32"
    return fitting(_wanted(recipe, stem, layer, layers, tied, experts), shape[-1])


def _wanted(recipe: Recipe, stem: str, layer: int | None, layers: int, tied: bool, experts: int) -> str:
    if stem == "output" or (stem == "token_embd" and tied):
        return recipe.output or recipe.type
    if layer is not None and recipe.rules:
        if experts == EIGHT_EXPERTS and stem in ("attn_k", "attn_v"):
            return "Q8_0"  # they are a hundredth of such a model
        for rule in recipe.rules:
            if stem in rule.stems and _applies(rule.layers, layer, layers):
                return rule.type
    return recipe.type


def fitting(wanted: str, columns: int) -> str:
    """The type, or the one that takes its place in rows of this length."""
    for candidate in (wanted, NARROWER.get(wanted, wanted)):
        if columns % BLOCK_SIZES[candidate][0] == 0:
            return candidate
    return PLAIN


def _applies(which: Layers, layer: int, layers: int) -> bool:
    if which == "all":
        return True
    if which == "four":
        return layer < 4
    eighth = layers // 8
    if which == "eighth":
        return layer < eighth
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _layer_and_stem(stem: str) -> tuple[int | None, str]:
    """ "blk.3.attn_v" → (3, "attn_v"); a name outside the layers has no number."""
    parts = stem.split(".")
    return (int(parts[1]), parts[2]) if parts[0] == "blk" and len(parts) == 3 else (None, stem)


def bits_per_weight(entries: list[TensorEntry]) -> float:
    """Of all tensors together."""
    nbytes = sum(entry.nbytes for entry in entries)
    weights = sum(entry.rows * entry.shape[-1] for entry in entries)
    return 8 * nbytes / weights
