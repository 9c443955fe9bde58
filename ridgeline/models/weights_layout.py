"""Weights of one decoder in the form the decoder computes with, whatever file they come from.

`pieces` lists what a checkpoint of a model must hold and where each tensor's rows go; q, k, v and gate, up
are rows of fused matrices. Norms are float32 and contain Gemma's added 1. Reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; None where the family has no such tensor."""

    attn_norm: Tensor
    qkv: Tensor  # q rows, then k rows, then v rows
    o: Tensor
    ffn_norm: Tensor
    gate_up: Tensor  # gate rows, then up rows
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_ffn_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embed: Tensor  # [vocab, hidden]
    final_norm: Tensor
    lm_head: Tensor  # the very tensor `embed` where embeddings are tied
    layers: list[LayerWeights]
    rope_divisors: Tensor | None = None  # [rope dim / 2], on the CPU: GGUF's own form of a rope scaling

    @property
    def nbytes(self) -> int:
        """Memory held, each tensor counted once."""
        tensors = [self.embed, self.final_norm]
        if self.lm_head is not self.embed:
            tensors.append(self.lm_head)
        for layer in self.layers:
            tensors += [t for t in _fields(layer).values() if t is not None]
        return sum(t.nbytes for t in tensors)


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint, and the place of its rows in the decoder's tensors.

    role is what the formats translate to their own names: embed, q, k_bias, attn_norm, …
    """

    role: str
    layer: int | None
    shape: tuple[int, ...]
    field: str  # of LayerWeights or DecoderWeights
    first_row: int = 0
    head_rows: int = 0  # rows per rotated head: q and k, matrix and bias

    @property
    def is_norm(self) -> bool:
        return self.field.endswith("_norm")


def pieces(spec: ModelSpec) -> Iterator[Piece]:
    """Every tensor this model's checkpoint must hold."""
    if spec.moe is not None:
        raise UnsupportedModel(f"{spec.name}: mixture-of-experts weights cannot be loaded yet")
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield Piece("embed", None, (spec.vocab_size, hidden), "embed")
    yield Piece("final_norm", None, (hidden,), "final_norm")
    if not spec.tied_embeddings:
        yield Piece("lm_head", None, (spec.vocab_size, hidden), "lm_head")
    for layer in range(spec.num_layers):
        yield Piece("attn_norm", layer, (hidden,), "attn_norm")
        first = 0
        for role, rows, head in (
            ("q", q_rows, spec.head_dim),
            ("k", kv_rows, spec.head_dim),
            ("v", kv_rows, 0),
        ):
            yield Piece(role, layer, (rows, hidden), "qkv", first, head)
            if spec.qkv_bias:
                yield Piece(f"{role}_bias", layer, (rows,), "qkv_bias", first, head)
            first += rows
        if spec.qk_norm:
            yield Piece("q_norm", layer, (spec.head_dim,), "q_norm")
            yield Piece("k_norm", layer, (spec.head_dim,), "k_norm")
        yield Piece("o", layer, (hidden, q_rows), "o")
        if spec.output_bias:
            yield Piece("o_bias", layer, (hidden,), "o_bias")
        yield Piece("ffn_norm", layer, (hidden,), "ffn_norm")
        if spec.post_norms:
            yield Piece("post_attn_norm", layer, (hidden,), "post_attn_norm")
            yield Piece("post_ffn_norm", layer, (hidden,), "post_ffn_norm")
        for role, first in (("gate", 0), ("up", ffn)):
            yield Piece(role, layer, (ffn, hidden), "gate_up", first)
            if spec.mlp_bias:
                yield Piece(f"{role}_bias", layer, (ffn,), "gate_up_bias", first)
        yield Piece("down", layer, (hidden, ffn), "down")
        if spec.mlp_bias:
            yield Piece("down_bias", layer, (hidden,), "down_bias")


def allocate(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, rope_divisors: Tensor | None
) -> DecoderWeights:
    """Uninitialised tensors for every piece, fused ones sized by their last piece."""
    sizes: dict[tuple[int | None, str], tuple[int, ...]] = {}
    for piece in pieces(spec):
        sizes[piece.layer, piece.field] = (piece.first_row + piece.shape[0], *piece.shape[1:])

    def tensors(layer: int | None) -> dict[str, Any]:
        return {
            field: torch.empty(
                shape, dtype=torch.float32 if field.endswith("_norm") else dtype, device=device
            )
            for (place, field), shape in sizes.items()
            if place == layer
        }

    whole = tensors(None)
    whole.setdefault("lm_head", whole["embed"])
    layers = [LayerWeights(**tensors(layer)) for layer in range(spec.num_layers)]
    return DecoderWeights(layers=layers, rope_divisors=rope_divisors, **whole)


def target(weights: DecoderWeights, piece: Piece) -> Tensor:
    """The rows this piece fills."""
    owner = weights if piece.layer is None else weights.layers[piece.layer]
    tensor: Tensor = getattr(owner, piece.field)
    return tensor[piece.first_row : piece.first_row + piece.shape[0]]


def _fields(layer: LayerWeights) -> dict[str, Tensor | None]:
    return {name: getattr(layer, name) for name in LayerWeights.__slots__}
