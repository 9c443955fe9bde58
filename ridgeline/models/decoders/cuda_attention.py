"""The attention of the CUDA decoder's layers, each built once from its mixer and weights.

`branch` computes what attention adds to the residual, as a row per token or as the partial sums of a split
product, and writes the keys and values of the step's tokens. Nothing here allocates, synchronizes or reads a
value from the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.decoders.cuda_ffn import Project
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import NormSpec
from ridgeline.models.weights.torch_weights import DeviceLayer
from ridgeline.ops.cuda.attention.decode_attention import decode_attention
from ridgeline.ops.cuda.attention.decode_config import decode_splits
from ridgeline.ops.cuda.attention.eight_bit_kv import rope_write_eight
from ridgeline.ops.cuda.attention.prefill_attention import prefill_attention
from ridgeline.ops.cuda.attention.qk_norm import norm_queries_keys
from ridgeline.ops.cuda.attention.rope_kv import rope_write
from ridgeline.ops.cuda.attention.shared_prefix import shared_prefix_attention

RopeTables = tuple[Tensor, Tensor]  # cos and sin [positions, rotated elements / 2]


def norms_apart(mixer: Attention, norm: NormSpec) -> bool:
    """Whether queries and keys are normed or scaled by a separate kernel, before attention."""
    layer_norm = mixer.qk_norm == "head" and norm.kind == "layer"
    return layer_norm or mixer.qk_norm in ("projection", "heads") or mixer.query_scale is not None


class AttentionPart:
    def __init__(
        self,
        mixer: Attention,
        norm: NormSpec,
        weights: DeviceLayer,
        kv: Tensor,
        buffers: Buffers,
        rope: RopeTables,
        deterministic: bool,
        kv_steps: Tensor | None = None,
    ) -> None:
        self._mixer, self._norm, self._weights = mixer, norm, weights
        self._kv, self._buffers, self._deterministic = kv, buffers, deterministic
        self._cos, self._sin = rope
        self._kv_steps = kv_steps  # of a cache in 8 bits
        self._norms_apart = norms_apart(mixer, norm)
        self._q_norm = None if self._norms_apart else weights.q_norm
        self._k_norm = None if self._norms_apart else weights.k_norm
        if mixer.qk_norm == "unit":  # a rotation does not change the norm, so it may come first
            self._q_norm = self._k_norm = torch.ones(mixer.head_dim, device=weights.qkv.device)

    def branch(self, x: Tensor, step: DeviceStep, project: Project) -> Tensor:
        """The bias of the last product is left to the consumer, which adds it with the residual."""
        w, buffers = self._weights, self._buffers
        self._attend(project(x, w.qkv, buffers.qkv), step)
        return project(buffers.attended[: len(x)], w.o, buffers.branch)

    def attend_decodes(self, qkv: Tensor, step: DeviceStep, bias: Tensor | None) -> None:
        """Compute buffers.attended for the decode rows, and write their keys and values to the cache."""
        mixer, rows = self._mixer, step.num_decodes
        splits = decode_splits(rows, mixer.kv_heads)
        is_eight = self._kv_steps is not None
        queries = self._stored(qkv, step, bias) if step.verifies or is_eight else None
        prefix = step.prefix if mixer.window is None and not is_eight else None
        if prefix is not None:
            shared_prefix_attention(
                qkv,
                self._kv,
                step.tables,
                step.table_rows,
                step.positions[:rows],
                self._cos,
                self._sin,
                self._buffers.decode,
                prefix,
                scale=mixer.scale,
                num_heads=mixer.heads,
                num_kv_heads=mixer.kv_heads,
                splits=splits,
                q_norm=self._q_norm,
                eps=self._norm.eps,
                bias=bias,
                softcap=mixer.softcap,
            )
        decode_attention(
            qkv if queries is None else None,
            self._kv,
            step.tables,
            step.table_rows,
            step.positions[:rows],
            step.slots[:rows],
            self._cos,
            self._sin,
            self._buffers.attended[:rows].view(rows, mixer.heads, mixer.head_dim),
            self._buffers.decode,
            scale=mixer.scale,
            num_heads=mixer.heads,
            num_kv_heads=mixer.kv_heads,
            splits=splits,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            eps=self._norm.eps,
            bias=bias,
            window=mixer.window,
            chunked=mixer.chunked,
            softcap=mixer.softcap,
            sinks=self._weights.sinks,
            prefix=prefix,
            q=queries,
            kv_steps=self._kv_steps,
        )

    def _stored(self, qkv: Tensor, step: DeviceStep, bias: Tensor | None) -> Tensor:
        """Store the keys and values of the decode rows. Returns their rotated queries [R, H, D]."""
        mixer, rows = self._mixer, step.num_decodes
        q = self._buffers.q[:rows].view(rows, mixer.heads, mixer.head_dim)
        self._rotate_and_store(qkv, q, step.positions[:rows], step.slots[:rows], bias)
        return q

    def _rotate_and_store(
        self, qkv: Tensor, q: Tensor, positions: Tensor, slots: Tensor, bias: Tensor | None
    ) -> None:
        options: dict[str, Any] = {
            "num_heads": self._mixer.heads,
            "num_kv_heads": self._mixer.kv_heads,
            "q_norm": self._q_norm,
            "k_norm": self._k_norm,
            "eps": self._norm.eps,
            "bias": bias,
        }
        rope = positions, slots, self._cos, self._sin
        if self._kv_steps is None:
            rope_write(qkv, q, self._kv, *rope, **options)
        else:
            rope_write_eight(qkv, q, self._kv, self._kv_steps, *rope, **options)

    def _attend(self, qkv: Tensor, step: DeviceStep) -> None:
        """Compute buffers.attended for all rows, and write their keys and values to the cache."""
        bias = self._weights.qkv_bias
        if self._norms_apart:
            qkv, bias = self._normed(qkv, bias, step.positions), None
        if step.only_decodes:
            self.attend_decodes(qkv, step, bias)
            return
        mixer, decodes, tokens = self._mixer, step.num_decodes, step.num_tokens
        q = self._buffers.q[:tokens].view(tokens, mixer.heads, mixer.head_dim)
        attended = self._buffers.attended[:tokens].view_as(q)
        if decodes:
            self.attend_decodes(qkv[:decodes], step, bias)
        rest = slice(decodes, None)
        self._rotate_and_store(qkv[rest], q[rest], step.positions[rest], step.slots[rest], bias)
        assert step.prefill is not None
        prefill_attention(
            q,
            self._kv,
            step.tables,
            step.prefill,
            attended,
            self._buffers.prefill,
            scale=mixer.scale,
            window=mixer.window,
            chunked=mixer.chunked,
            softcap=mixer.softcap,
            sinks=self._weights.sinks,
            deterministic=self._deterministic,
            kv_steps=self._kv_steps,
        )

    def _normed(self, qkv: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
        mixer, w, scale = self._mixer, self._weights, self._mixer.query_scale
        out = self._buffers.qkv[: qkv.shape[-2]]
        norm_queries_keys(
            qkv,
            out,
            w.q_norm,
            w.k_norm,
            self._norm.eps,
            num_heads=mixer.heads,
            num_kv_heads=mixer.kv_heads,
            whole=mixer.qk_norm == "projection",
            layer_norm=self._norm.kind == "layer",
            bias=bias,
            positions=positions,
            query_scale=None if scale is None else (scale.weight, scale.every),
        )
        return out
