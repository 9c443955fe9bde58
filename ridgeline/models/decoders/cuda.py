"""The decoder on a CUDA device: a forward pass as a short chain of fused kernels over preallocated buffers.

The runner calls `forward` once per step, eagerly or while a graph is captured: nothing here allocates,
synchronizes or reads a value from the device. It computes the same as `reference`; the kernels depend only on
the number of tokens: fused layers for one, split matrix products for a decode batch, cuBLAS beyond, and one
fixed arithmetic for all of them in deterministic mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.decoders.cuda_few import FusedLayer, fused_layer
from ridgeline.models.decoders.cuda_ffn import build_ffn
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.spec.rope_tables import rope_tables
from ridgeline.models.weights.torch_weights import DecoderWeights, LayerWeights, there
from ridgeline.ops.cuda.attention.decode_attention import decode_attention, decode_splits
from ridgeline.ops.cuda.attention.prefill_attention import prefill_attention
from ridgeline.ops.cuda.attention.prefill_plan import PrefillViews
from ridgeline.ops.cuda.attention.rope_kv import rope_write
from ridgeline.ops.cuda.attention.shared_prefix import SharedPrefix, shared_prefix_attention
from ridgeline.ops.cuda.linear.gemv import gemv
from ridgeline.ops.cuda.linear.linear import branch_splits, linear, uses_gemv
from ridgeline.ops.cuda.norm import add_norm, embed_norm, norm_tile


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step's inputs on the device. The first `num_decodes` tokens are rows of one token each."""

    token_ids: Tensor  # [T] int32, as are all of these
    positions: Tensor  # [T]
    slots: Tensor  # [T]: slot of the token's KV; -1 is padding
    tables: Tensor  # [rows, blocks]
    table_rows: Tensor  # [num_decodes] rows of `tables`
    num_decodes: int
    num_logits: int  # rows of logits needed: for the first num_logits entries of `logit_rows`
    logit_rows: Tensor | None = None  # [≥ num_logits] tokens whose last hidden state is needed; None: all
    prefill: PrefillViews | None = None  # the other rows
    prefix: SharedPrefix | None = None  # decode rows that share their first blocks

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == self.num_tokens


class CudaDecoder:
    """`kv` is [layers, num_blocks, kv_heads, 2, block_size, head_dim]: for each head keys, then values."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        kv: Tensor,
        buffers: Buffers,
        max_context: int,
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.kv = kv
        self.buffers = buffers
        self.deterministic = deterministic
        self._ffns = [
            build_ffn(layer.ffn, w, buffers, deterministic=deterministic)
            for layer, w in zip(spec.layers, weights.layers, strict=True)
            if layer.ffn is not None
        ]
        self._fused = [
            fused_layer(spec, number, w, buffers, deterministic=deterministic)
            for number, w in enumerate(weights.layers)
        ]
        device = weights.embed.device
        self._ropes: dict[RopeSpec | None, tuple[Tensor, Tensor]] = {
            rope: (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for rope, (cos, sin) in rope_tables(spec, max_context, weights.rope_divisors).items()
        }

    def forward(self, step: DeviceStep) -> Tensor:
        """Compute the step's tokens, write their KV, and return logits [num_logits, vocab] in the model's
        dtype, valid until the next call. The hidden states of all `logit_rows` are then in buffers.normed.
        """
        spec, weights, buffers, eps = self.spec, self.weights, self.buffers, self.spec.norm.eps
        tokens = step.num_tokens
        residual, normed = buffers.residual[:tokens], buffers.normed[:tokens]
        # In deterministic mode a sum over a row must not depend on the number of rows.
        tile = norm_tile(1, spec.hidden_size) if self.deterministic else None
        scale, first = spec.embedding_scale, there(weights.layers[0].attn_norm)
        embed_norm(step.token_ids, weights.embed, scale, first, eps, residual, normed, tile=tile)
        next_norms = [*(there(layer.attn_norm) for layer in weights.layers[1:]), weights.final_norm]
        few = step.only_decodes and uses_gemv(tokens, deterministic=self.deterministic)
        fused: list[FusedLayer | None] = self._fused if few else [None] * spec.num_layers
        for number, (mixer, w) in enumerate(zip(spec.attentions, weights.layers, strict=True)):
            if layer := fused[number]:
                layer.forward(residual, partial(self._attend_fused, number, step))
                if number + 1 < spec.num_layers and not fused[number + 1]:
                    add_norm(None, residual, next_norms[number], eps, normed)
                continue
            qkv = self._project(normed, w.qkv, buffers.qkv, step)
            self._attend(qkv, mixer, w, self.kv[number], step)
            branch = self._project(buffers.attended[:tokens], w.o, buffers.branch, step)
            add_norm(
                branch,
                residual,
                there(w.ffn_norm),
                eps,
                normed,
                bias=w.o_bias,
                post_weight=w.post_attn_norm,
                tile=tile,
            )
            branch = self._ffns[number].branch(normed, partial(self._project, step=step))
            rows = step.logit_rows if number == spec.num_layers - 1 else None
            add_norm(
                branch,
                residual,
                next_norms[number],
                eps,
                buffers.normed[: tokens if rows is None else len(rows)],
                bias=w.down_bias,
                post_weight=w.post_ffn_norm,
                rows=rows,
                tile=tile,
            )
        if fused[-1]:
            logits = buffers.logits[:tokens]
            gemv(residual, weights.lm_head, logits, norm_weight=weights.final_norm, eps=eps)
            return self._capped(logits)
        return self.logits(buffers.normed[: step.num_logits])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states [L, hidden]; the buffer bounds L."""
        out = self.buffers.logits[: len(hidden)]
        if not len(hidden):  # a chunk in the middle of a prompt
            return out
        linear(hidden, self.weights.lm_head, out, deterministic=self.deterministic)
        return self._capped(out)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    # ── the parts ────────────────────────────────────────────────────────────────────────────────────────

    def _project(self, x: Tensor, weight: Tensor, out: Tensor, step: DeviceStep) -> Tensor:
        """x · weightᵀ: in `out`'s first rows, or as partial sums [S, T, N] in float32 for a decode batch."""
        tokens, width = len(x), len(weight)
        result = out[:tokens]
        splits = 0
        if step.only_decodes:
            splits = branch_splits(tokens, width, x.shape[1], dtype=x.dtype, deterministic=self.deterministic)
        if splits:
            result = self.buffers.partials[: splits * tokens * width].view(splits, tokens, width)
        linear(x, weight, result, deterministic=self.deterministic)
        return result

    def _attend(self, qkv: Tensor, mixer: Attention, w: LayerWeights, kv: Tensor, step: DeviceStep) -> None:
        """Compute buffers.attended for all rows, and write their keys and values to the cache."""
        if step.only_decodes:
            self._attend_decodes(qkv, mixer, w, kv, step, bias=w.qkv_bias)
            return
        spec, decodes, tokens = self.spec, step.num_decodes, step.num_tokens
        q = self.buffers.q[:tokens].view(tokens, spec.num_heads, spec.head_dim)
        attended = self.buffers.attended[:tokens].view_as(q)
        cos, sin = self._ropes[mixer.rope]
        if decodes:
            self._attend_decodes(qkv[:decodes], mixer, w, kv, step, bias=w.qkv_bias)
        rope_write(
            qkv[decodes:],
            q[decodes:],
            kv,
            step.positions[decodes:],
            step.slots[decodes:],
            cos,
            sin,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            q_norm=w.q_norm,
            k_norm=w.k_norm,
            eps=spec.norm.eps,
            bias=w.qkv_bias,
        )
        assert step.prefill is not None
        prefill_attention(
            q,
            kv,
            step.tables,
            step.prefill,
            attended,
            self.buffers.prefill,
            scale=mixer.scale,
            window=mixer.window,
            softcap=mixer.softcap,
            deterministic=self.deterministic,
        )

    def _attend_fused(self, number: int, step: DeviceStep, qkv: Tensor) -> None:
        """Attention of a fused layer, whose QKV linear has added its bias."""
        mixer, w = self.spec.attentions[number], self.weights.layers[number]
        self._attend_decodes(qkv, mixer, w, self.kv[number], step, bias=None)

    def _attend_decodes(
        self,
        qkv: Tensor,
        mixer: Attention,
        w: LayerWeights,
        kv: Tensor,
        step: DeviceStep,
        bias: Tensor | None,
    ) -> None:
        spec, rows = self.spec, step.num_decodes
        cos, sin = self._ropes[mixer.rope]
        splits = decode_splits(rows, spec.num_kv_heads)
        prefix = step.prefix if mixer.window is None else None
        if prefix is not None:
            shared_prefix_attention(
                qkv,
                kv,
                step.tables,
                step.table_rows,
                step.positions[:rows],
                cos,
                sin,
                self.buffers.decode,
                prefix,
                scale=mixer.scale,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                splits=splits,
                q_norm=w.q_norm,
                eps=spec.norm.eps,
                bias=bias,
                softcap=mixer.softcap,
            )
        decode_attention(
            qkv,
            kv,
            step.tables,
            step.table_rows,
            step.positions[:rows],
            step.slots[:rows],
            cos,
            sin,
            self.buffers.attended[:rows].view(rows, spec.num_heads, spec.head_dim),
            self.buffers.decode,
            scale=mixer.scale,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            splits=splits,
            q_norm=w.q_norm,
            k_norm=w.k_norm,
            eps=spec.norm.eps,
            bias=bias,
            window=mixer.window,
            softcap=mixer.softcap,
            prefix=prefix,
        )
