"""The parts of the torch decoder's layers, each built once at load from its LayerSpec and weights.

A layer is a mixer, an ffn and the norms around them; a part knows its own description and weights, and calls
the ops of the backend. Called by `reference` once per layer and step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention, QueryScale
from ridgeline.models.spec.model_spec import ModelSpec, NormSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.weights.torch_weights import LayerTensors, there
from ridgeline.ops.backend import Backend
from ridgeline.ops.inputs import StepInputs

Rotation = tuple[Tensor, Tensor]  # cos, sin of the step's tokens
Window = tuple[int | None, bool]  # its size, and whether it is chunked
Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of a step read."""

    inputs: StepInputs
    rotations: dict[RopeSpec, Rotation]
    plans: dict[Window, Any]


class Layer:
    def __init__(self, spec: ModelSpec, layer: LayerSpec, weights: LayerTensors, ops: Backend) -> None:
        if not isinstance(layer.mixer, Attention) or layer.ffn is None:
            raise UnsupportedModel(f"{spec.name}: the torch decoder computes layers of attention and an FFN")
        self._norms = layer.norms
        self._scale = spec.residual_scale
        w, norm = weights, spec.norm
        self._attn_norm = build_norm(ops, norm, w.attn_norm, w.attn_norm_bias)
        self._ffn_norm = build_norm(ops, norm, w.ffn_norm, w.ffn_norm_bias)
        self._post_attn_norm = build_norm(ops, norm, w.post_attn_norm, w.post_attn_norm_bias)
        self._post_ffn_norm = build_norm(ops, norm, w.post_ffn_norm, w.post_ffn_norm_bias)
        self._attention = AttentionPart(layer.mixer, w, ops, norm)
        self.experts: ExpertsPart | None = None
        if isinstance(layer.ffn, Dense):
            self._ffn = dense_part(layer.ffn, w, ops)
        else:
            self.experts = ExpertsPart(layer.ffn, w, ops)
            self._ffn = self.experts.forward

    def forward(self, x: Tensor, kv: Tensor, context: StepContext) -> Tensor:
        normed = self._attn_norm(x)
        mixed = self._post_attn_norm(self._attention.forward(normed, kv, context))
        if self._norms.parallel:
            fed = self._post_ffn_norm(self._ffn(normed if self._norms.shared else self._ffn_norm(x)))
            return x + self._scaled(mixed + fed)
        x = x + self._scaled(mixed)
        return x + self._scaled(self._post_ffn_norm(self._ffn(self._ffn_norm(x))))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self._scale == 1.0 else branch * self._scale


def build_norm(ops: Backend, norm: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Part:
    """The norm with these weights; the identity if the layer has none."""
    if weight is None:
        return lambda x: x
    if norm.kind == "rms":
        return lambda x: ops.rms_norm(x, weight, norm.eps)
    return lambda x: ops.layer_norm(x, weight, bias, norm.eps)


def build_head_norms(ops: Backend, norm: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Part:
    """The norm of each of [tokens, heads, head_dim], with [heads · head_dim] weights."""
    assert weight is not None

    def normed(x: Tensor) -> Tensor:
        shared = build_norm(ops, norm, weight.new_ones(x.shape[-1]), bias)
        return (shared(x.float()) * weight.view(x.shape[1:])).to(x.dtype)

    return normed


class AttentionPart:
    def __init__(self, mixer: Attention, weights: LayerTensors, ops: Backend, norm: NormSpec) -> None:
        self._mixer, self._weights, self._ops = mixer, weights, ops
        build = build_head_norms if mixer.qk_norm == "heads" else build_norm
        self._q_norm = build(ops, norm, weights.q_norm, None)
        self._k_norm = build(ops, norm, weights.k_norm, None)
        ones = torch.ones(mixer.head_dim, dtype=torch.float32, device=weights.qkv.device)
        self._unit_norm: Part = lambda x: ops.rms_norm(x, ones, norm.eps)

    def forward(self, x: Tensor, kv: Tensor, context: StepContext) -> Tensor:
        mixer, w, ops = self._mixer, self._weights, self._ops
        qkv = ops.linear(x, w.qkv, w.qkv_bias)
        q_width, kv_width = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        q, k, v = torch.split(qkv, [q_width, kv_width, kv_width], dim=1)
        if mixer.qk_norm == "projection":
            q, k = self._q_norm(q), self._k_norm(k)
        q, k, v = (part.view(len(x), -1, mixer.head_dim) for part in (q, k, v))
        if mixer.qk_norm in ("head", "heads"):
            q, k = self._q_norm(q), self._k_norm(k)
        if mixer.rope is not None:
            cos, sin = context.rotations[mixer.rope]
            q, k = ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin)
        if mixer.qk_norm == "unit":
            q, k = self._unit_norm(q), self._unit_norm(k)
        if mixer.query_scale is not None:
            scales = query_scales(context.inputs.positions, mixer.query_scale)
            q = (q * scales[:, None, None]).to(q.dtype)
        ops.write_kv(k, v, kv, context.inputs.slots)
        plan = context.plans[mixer.window, mixer.chunked]
        out = ops.paged_attention(q, kv, plan, mixer.scale, mixer.softcap, w.sinks)
        return ops.linear(out.reshape(len(x), -1), w.o, w.o_bias)


def query_scales(positions: Tensor, scale: QueryScale) -> Tensor:
    """[T] float32"""
    return 1 + scale.weight * torch.log1p(torch.floor((positions.float() + 1) / scale.every))


def dense_part(ffn: Dense, weights: LayerTensors, ops: Backend) -> Part:
    w, down = weights, there(weights.down)
    if ffn.gated:
        gate_up = there(w.gate_up)
        return lambda x: ops.gated_mlp(x, gate_up, down, ffn.activation, w.gate_up_bias, w.down_bias)
    up = there(w.up)
    return lambda x: ops.mlp(x, up, down, ffn.activation, w.up_bias, w.down_bias)


class ExpertsPart:
    """Routed experts, with a part that all tokens use where the family has one."""

    def __init__(self, ffn: Experts, weights: LayerTensors, ops: Backend) -> None:
        self._ffn, self._weights, self._ops = ffn, weights, ops
        self.tokens = torch.zeros(ffn.num, dtype=torch.int64)  # that chose each expert so far

    def forward(self, x: Tensor) -> Tensor:
        ffn, w, ops, router = self._ffn, self._weights, self._ops, self._ffn.router
        chosen, shares = ops.route(
            ops.linear(x, there(w.router), w.router_bias),
            ffn.per_token,
            scores=router.scores,
            normalized=router.normalized,
            scale=router.scale,
            choice_bias=w.choice_bias,
            groups=router.groups,
            top_groups=router.top_groups,
            margin=router.margin,
        )
        self.tokens += torch.bincount(chosen.reshape(-1), minlength=ffn.num).cpu()
        out = ops.experts(
            x,
            chosen,
            shares,
            there(w.experts_gate_up),
            there(w.experts_down),
            ffn.activation,
            w.experts_gate_up_bias,
            w.experts_down_bias,
            ffn.clamp,
            router.scales_input,
        )
        if not ffn.shared_size:
            return out
        shared = ops.gated_mlp(x, there(w.gate_up), there(w.down), ffn.activation)
        if w.shared_scale is not None:
            shared = torch.sigmoid(ops.linear(x, w.shared_scale)) * shared
        return out + shared
