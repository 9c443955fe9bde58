"""Layers of a few decode rows on a CUDA device: products with the norm before them and the sum behind them.

A fused layer reads the residual and adds to it; nothing else passes from one layer to the next. It is built
once from its LayerSpec, where the layer is of a kind that it computes: `fused_layer` returns None for the
others, which take the plain pass. Nothing here allocates, synchronizes or reads a value from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from torch import Tensor

from ridgeline.models.decoders.cuda_buffers import Buffers, part_of
from ridgeline.models.decoders.cuda_ffn import GatedActivation
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import LayerWeights, there
from ridgeline.ops.cuda.experts.experts import experts
from ridgeline.ops.cuda.experts.route import Scores, route_few
from ridgeline.ops.cuda.linear.gemv import gemv

Attend = Callable[[Tensor], None]  # qkv, bias included → buffers.attended


class FusedFfn(Protocol):
    def add(self, residual: Tensor) -> None: ...


class FusedLayer:
    """Rows of one token each: QKV with its norm, attention, output projection and ffn onto the residual."""

    def __init__(self, weights: LayerWeights, buffers: Buffers, eps: float, ffn: FusedFfn) -> None:
        self._weights, self._buffers, self._eps, self._ffn = weights, buffers, eps, ffn

    def forward(self, residual: Tensor, attend: Attend) -> None:
        w, rows = self._weights, len(residual)
        qkv = self._buffers.qkv[:rows]
        gemv(residual, w.qkv, qkv, norm_weight=w.attn_norm, eps=self._eps, bias=w.qkv_bias)
        attend(qkv)
        gemv(self._buffers.attended[:rows], w.o, None, residual=residual, bias=w.o_bias)
        self._ffn.add(residual)


def fused_layer(
    spec: ModelSpec, number: int, w: LayerWeights, buffers: Buffers, *, deterministic: bool
) -> FusedLayer | None:
    """None for a layer of another kind, and in deterministic mode: fused products round differently."""
    layer = spec.layers[number]
    norms, ffn, eps = layer.norms, layer.ffn, spec.norm.eps
    plain = norms.before and not norms.after and not norms.parallel
    if deterministic or not plain or spec.norm.kind != "rms" or spec.residual_scale != 1.0:
        return None
    if isinstance(ffn, Dense) and ffn.gated and ffn.activation in ("silu", "gelu_tanh"):
        return FusedLayer(w, buffers, eps, FewDense(ffn, w, buffers, eps))
    if isinstance(ffn, Experts) and ffn.gated and not ffn.shared_size and ffn.latent_size is None:
        return FusedLayer(w, buffers, eps, FewExperts(ffn, w, buffers, eps))
    return None


class FewDense:
    def __init__(self, ffn: Dense, weights: LayerWeights, buffers: Buffers, eps: float) -> None:
        self._activation = cast(GatedActivation, ffn.activation)
        self._weights, self._buffers, self._eps = weights, buffers, eps

    def add(self, residual: Tensor) -> None:
        w, weight = self._weights, there(self._weights.gate_up)
        gates = part_of(self._buffers.gated, len(residual), len(weight) // 2)
        gemv(
            residual,
            weight,
            gates,
            norm_weight=w.ffn_norm,
            eps=self._eps,
            activation=self._activation,
            bias=w.gate_up_bias,
        )
        gemv(gates, there(w.down), None, residual=residual, bias=w.down_bias)


class FewExperts:
    """The router norms the rows, for the experts too; the experts' weighted sum is added to the residual."""

    def __init__(self, ffn: Experts, weights: LayerWeights, buffers: Buffers, eps: float) -> None:
        self._ffn, self._weights, self._buffers, self._eps = ffn, weights, buffers, eps

    def add(self, residual: Tensor) -> None:
        ffn, router, w, rows = self._ffn, self._ffn.router, self._weights, len(residual)
        scratch, normed = self._buffers.experts, self._buffers.normed[:rows]
        assert scratch is not None
        chosen, shares = scratch.chosen[:rows], scratch.weights[:rows]
        route_few(
            residual,
            there(w.router),
            chosen,
            shares,
            scratch.logits[:rows],
            scratch.counter,
            norm_weight=w.ffn_norm,
            eps=self._eps,
            normed=normed,
            router_bias=w.router_bias,
            scores=cast(Scores, router.scores),
            normalized=router.normalized,
            scale=router.scale,
            choice_bias=w.choice_bias,
            groups=router.groups,
            top_groups=router.top_groups,
        )
        experts(
            normed,
            chosen,
            shares,
            there(w.experts_gate_up),
            there(w.experts_down),
            residual,
            ffn.activation,
            scratch,
            gate_up_bias=w.experts_gate_up_bias,
            down_bias=w.experts_down_bias,
            clamp=ffn.clamp,
            scales_input=router.scales_input,
            adds=True,
        )
