"""The weights that a model's checkpoint must contain, by role, and the target rows of each in the decoder.

q, k, v and gate, up are rows of fused matrices; experts are stacked. Read by every loader; holds no weights
and reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """One weight of a checkpoint by its role, and the position of its rows in the decoder's tensors.

    role is translated by the formats to their own names: embed, q, k_bias, attn_norm, …
    """

    role: str
    layer: int | None
    shape: tuple[int, ...]
    field: str  # of LayerWeights or DecoderWeights
    first_row: int = 0
    head_rows: int = 0  # rows per head of q and k, matrix and bias
    rotated_rows: int = 0  # of them, those that are rotated: the first ones
    expert: int | None = None  # of a stack of experts

    @property
    def is_norm(self) -> bool:
        """A norm's weight: the family's offset is added to it."""
        return self.field.endswith("_norm")

    @property
    def is_float32(self) -> bool:
        """Kept in float32 whatever the model's dtype is: norms and their biases."""
        return self.field.endswith(("_norm", "_norm_bias"))


def pieces(spec: ModelSpec) -> Iterator[Piece]:
    """Every weight that this model's checkpoint must contain."""
    hidden = spec.hidden_size
    yield Piece("embed", None, (spec.vocab_size, hidden), "embed")
    if spec.learned_positions:
        yield Piece("positions", None, (spec.learned_positions, hidden), "positions")
    yield from _norm(spec, "final_norm", None)
    if not spec.tied_embeddings:
        yield Piece("lm_head", None, (spec.vocab_size, hidden), "lm_head")
    if spec.head_bias:
        yield Piece("lm_head_bias", None, (spec.vocab_size,), "lm_head_bias")
    for number, layer in enumerate(spec.layers):
        yield from _layer(spec, layer, number)


def _layer(spec: ModelSpec, layer: LayerSpec, number: int) -> Iterator[Piece]:
    if not isinstance(layer.mixer, Attention) or layer.ffn is None:
        raise UnsupportedModel(f"{spec.name}: weights of layer {number} cannot be loaded")
    norms = layer.norms
    if norms.before:
        yield from _norm(spec, "attn_norm", number)
    yield from _attention(layer.mixer, spec.hidden_size, number)
    if norms.before and not norms.shared:
        yield from _norm(spec, "ffn_norm", number)
    if norms.after:
        yield from _norm(spec, "post_attn_norm", number)
        yield from _norm(spec, "post_ffn_norm", number)
    if isinstance(layer.ffn, Dense):
        yield from _dense(layer.ffn, spec.hidden_size, number)
    else:
        yield from _experts(layer.ffn, spec.hidden_size, number)


def _norm(spec: ModelSpec, name: str, layer: int | None) -> Iterator[Piece]:
    yield Piece(name, layer, (spec.hidden_size,), name)
    if spec.norm.bias:
        yield Piece(f"{name}_bias", layer, (spec.hidden_size,), f"{name}_bias")


def _attention(mixer: Attention, hidden: int, layer: int) -> Iterator[Piece]:
    head = mixer.head_dim
    q_rows, kv_rows = mixer.heads * head, mixer.kv_heads * head
    rotated = mixer.rope.dim if mixer.rope is not None else 0
    first = 0
    for role, rows, of_head in (("q", q_rows, head), ("k", kv_rows, head), ("v", kv_rows, 0)):
        turned = rotated if of_head else 0
        yield Piece(role, layer, (rows, hidden), "qkv", first, of_head, turned)
        if mixer.qkv_bias:
            yield Piece(f"{role}_bias", layer, (rows,), "qkv_bias", first, of_head, turned)
        first += rows
    if mixer.qk_norm not in ("", "unit"):
        whole = mixer.qk_norm != "head"
        yield Piece("q_norm", layer, (q_rows if whole else head,), "q_norm", 0, head, rotated)
        yield Piece("k_norm", layer, (kv_rows if whole else head,), "k_norm", 0, head, rotated)
    if mixer.sinks:
        yield Piece("sinks", layer, (mixer.heads,), "sinks")
    yield Piece("o", layer, (hidden, q_rows), "o")
    if mixer.output_bias:
        yield Piece("o_bias", layer, (hidden,), "o_bias")


def _dense(ffn: Dense, hidden: int, layer: int) -> Iterator[Piece]:
    for role, first in (("gate", 0), ("up", ffn.size)) if ffn.gated else (("up", 0),):
        field = "gate_up" if ffn.gated else "up"
        yield Piece(role, layer, (ffn.size, hidden), field, first)
        if ffn.bias:
            yield Piece(f"{role}_bias", layer, (ffn.size,), f"{field}_bias", first)
    yield Piece("down", layer, (hidden, ffn.size), "down")
    if ffn.bias:
        yield Piece("down_bias", layer, (hidden,), "down_bias")


def _experts(ffn: Experts, hidden: int, layer: int) -> Iterator[Piece]:
    yield Piece("router", layer, (ffn.num, hidden), "router")
    if ffn.router.bias:
        yield Piece("router_bias", layer, (ffn.num,), "router_bias")
    if ffn.router.choice_bias:
        yield Piece("choice_bias", layer, (ffn.num,), "choice_bias")
    for expert in range(ffn.num):
        for role, first in (("expert_gate", 0), ("expert_up", ffn.size)):
            yield Piece(role, layer, (ffn.size, hidden), "experts_gate_up", first, expert=expert)
            if ffn.bias:
                yield Piece(f"{role}_bias", layer, (ffn.size,), "experts_gate_up_bias", first, expert=expert)
        yield Piece("expert_down", layer, (hidden, ffn.size), "experts_down", expert=expert)
        if ffn.bias:
            yield Piece("expert_down_bias", layer, (hidden,), "experts_down_bias", expert=expert)
    if ffn.shared_size:
        for role, first in (("shared_gate", 0), ("shared_up", ffn.shared_size)):
            yield Piece(role, layer, (ffn.shared_size, hidden), "gate_up", first)
        yield Piece("shared_down", layer, (hidden, ffn.shared_size), "down")
    if ffn.shared_gate:
        yield Piece("shared_scale", layer, (1, hidden), "shared_scale")
