"""The tensors that a model's checkpoint must contain, and the target rows of each in the fused matrices.

q, k, v and gate, up are rows of fused matrices. Read by every loader; holds no weights and reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint, and the position of its rows in the decoder's tensors.

    role is translated by the formats to their own names: embed, q, k_bias, attn_norm, …
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
    """Every tensor that this model's checkpoint must contain."""
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
