"""Layers of a few decode rows on a CUDA device: products with the norm before them and the sum behind them.

A fused layer reads the residual and adds to it; nothing else passes from one layer to the next. It is built
once from its LayerSpec, where it computes the kind of the layer: `fused_layer` returns None for the
others, which take the plain pass. Nothing here allocates, synchronizes or reads a value from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from torch import Tensor

from ridgeline.models.decoders.cuda_attention import norms_apart
from ridgeline.models.decoders.cuda_buffers import Buffers, part_of
from ridgeline.models.decoders.cuda_ffn import FUSED_ACTIVATIONS, ExpertsPart, FfnPart, GatedActivation
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.models.spec.ffn import Dense
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import DeviceLayer, matrix_of
from ridgeline.ops.cuda.linear.linear import fused_gemv

Attend = Callable[[Tensor], None]  # qkv, bias included → buffers.attended


class FusedFfn(Protocol):
    def add(self, residual: Tensor, step: DeviceStep, eps: float) -> None: ...


class FusedLayer:
    """Rows of one token each: QKV with its norm, attention, the output projection and the FFN."""

    def __init__(self, weights: DeviceLayer, buffers: Buffers, eps: float, ffn: FusedFfn) -> None:
        self._weights, self._buffers, self._eps, self._ffn = weights, buffers, eps, ffn

    def forward(self, residual: Tensor, step: DeviceStep, attend: Attend) -> None:
        w, rows = self._weights, len(residual)
        qkv = self._buffers.qkv[:rows]
        fused_gemv(residual, w.qkv, qkv, norm_weight=w.attn_norm, eps=self._eps, bias=w.qkv_bias)
        attend(qkv)
        fused_gemv(self._buffers.attended[:rows], w.o, None, residual=residual, bias=w.o_bias)
        self._ffn.add(residual, step, self._eps)


def fused_layer(
    spec: ModelSpec, number: int, w: DeviceLayer, ffn_part: FfnPart, buffers: Buffers, *, deterministic: bool
) -> FusedLayer | None:
    """None for a layer of another kind, and in deterministic mode: fused products round differently."""
    layer = spec.layers[number]
    norms, ffn, eps = layer.norms, layer.ffn, spec.norm.eps
    plain = norms.before and not norms.after and not norms.parallel
    plain = plain and not norms_apart(spec.attentions[number], spec.norm)
    if deterministic or not plain or spec.norm.kind != "rms" or spec.residual_scale != 1.0:
        return None
    if isinstance(ffn, Dense) and ffn.gated and ffn.activation in FUSED_ACTIVATIONS:
        return FusedLayer(w, buffers, eps, FewDense(ffn, w, buffers))
    if isinstance(ffn_part, ExpertsPart) and ffn_part.can_add():
        return FusedLayer(w, buffers, eps, ffn_part)
    return None


class FewDense:
    def __init__(self, ffn: Dense, weights: DeviceLayer, buffers: Buffers) -> None:
        self._activation = cast(GatedActivation, ffn.activation)
        self._weights, self._buffers = weights, buffers

    def add(self, residual: Tensor, step: DeviceStep, eps: float) -> None:
        w, gate_up = self._weights, matrix_of(self._weights.gate_up)
        gates = part_of(self._buffers.gated, len(residual), len(gate_up) // 2)
        fused_gemv(
            residual,
            gate_up,
            gates,
            norm_weight=w.ffn_norm,
            eps=eps,
            activation=self._activation,
            bias=w.gate_up_bias,
        )
        fused_gemv(gates, matrix_of(w.down), None, residual=residual, bias=w.down_bias)
