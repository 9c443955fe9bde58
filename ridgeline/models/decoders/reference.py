"""The decoder: one implementation for every dense family, configured by the flags of its ModelSpec.

The runner calls `forward` once per step, under torch.inference_mode. The decoder owns weights and rotary
tables; the caller owns the KV cache. The backend implements each op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.models.spec.model_spec import LayerSpec, ModelSpec, RopeSpec
from ridgeline.models.spec.rope_tables import rope_tables
from ridgeline.models.weights.torch_weights import DecoderWeights, LayerWeights
from ridgeline.ops.backend import Backend
from ridgeline.ops.inputs import StepInputs

Rotation = tuple[Tensor, Tensor]  # cos, sin


class Decoder:
    """A model that turns StepInputs into logits. `max_context` bounds the positions it accepts."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, backend: Backend, max_context: int | None = None
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = backend
        self.max_context = spec.max_context if max_context is None else max_context
        device = weights.embed.device
        self._rope_tables: dict[RopeSpec, Rotation] = {
            rope: (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for rope, (cos, sin) in rope_tables(spec, self.max_context, weights.rope_divisors).items()
        }

    def forward(self, inputs: StepInputs, kv_cache: list[Tensor]) -> Tensor:
        """Compute the step's tokens, write their KV, and return float32 logits [L, vocab] of logit_rows."""
        spec, weights, ops = self.spec, self.weights, self.ops
        rotations = {
            rope: (cos[inputs.positions], sin[inputs.positions])
            for rope, (cos, sin) in self._rope_tables.items()
        }
        plans = {window: ops.plan_attention(inputs, window) for window in {s.window for s in spec.layers}}
        x = ops.embed(inputs.token_ids, weights.embed, spec.embedding_scale)
        for layer, layer_weights, kv in zip(spec.layers, weights.layers, kv_cache, strict=True):
            x = x + self._attention(x, layer, layer_weights, kv, inputs, rotations, plans)
            x = x + self._mlp(x, layer_weights)
        return self._logits(x[inputs.logit_rows])

    def _attention(
        self,
        x: Tensor,
        layer: LayerSpec,
        weights: LayerWeights,
        kv: Tensor,
        inputs: StepInputs,
        rotations: dict[RopeSpec, Rotation],
        plans: dict[int | None, Any],
    ) -> Tensor:
        spec, ops = self.spec, self.ops
        normed = ops.rms_norm(x, weights.attn_norm, spec.norm_eps)
        qkv = ops.linear(normed, weights.qkv, weights.qkv_bias).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(qkv, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = ops.rms_norm(q, weights.q_norm, spec.norm_eps)
            k = ops.rms_norm(k, weights.k_norm, spec.norm_eps)
        cos, sin = rotations[layer.rope]
        q, k = ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin)
        ops.write_kv(k, v, kv, inputs.slots)
        out = ops.paged_attention(q, kv, plans[layer.window], spec.attention_scale, spec.attention_softcap)
        out = ops.linear(out.view(len(x), -1), weights.o, weights.o_bias)
        if weights.post_attn_norm is not None:
            out = ops.rms_norm(out, weights.post_attn_norm, spec.norm_eps)
        return out

    def _mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        spec, ops = self.spec, self.ops
        out = ops.gated_mlp(
            ops.rms_norm(x, weights.ffn_norm, spec.norm_eps),
            weights.gate_up,
            weights.down,
            spec.activation,
            weights.gate_up_bias,
            weights.down_bias,
        )
        if weights.post_ffn_norm is not None:
            out = ops.rms_norm(out, weights.post_ffn_norm, spec.norm_eps)
        return out

    def _logits(self, x: Tensor) -> Tensor:
        normed = self.ops.rms_norm(x, self.weights.final_norm, self.spec.norm_eps)
        logits = self.ops.linear(normed, self.weights.lm_head).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def allocate_kv(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """One uninitialised [2, num_blocks, block_size, kv_heads, head_dim] per layer: keys, then values."""
    shape = (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    return [torch.empty(shape, dtype=dtype, device=device) for _ in spec.layers]
