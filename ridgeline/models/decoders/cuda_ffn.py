"""The feed-forward parts of the CUDA decoder's layers, each built once from its LayerSpec and weights.

`branch` computes what a part adds to the residual: a row per token, the partial sums of a split product, or
the outputs of a token's experts with their weights. Nothing here allocates, synchronizes or reads a value
from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from ridgeline.models.decoders.cuda_buffers import Buffers, part_of
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.models.spec.ffn import Dense, Experts, Ffn
from ridgeline.models.weights.torch_weights import DeviceLayer, Matrix, expert_matrices, matrix_of, there
from ridgeline.ops.cuda.activation import activated, gated
from ridgeline.ops.cuda.experts.experts import experts
from ridgeline.ops.cuda.experts.route import MOST_FEW, route, route_few
from ridgeline.ops.cuda.experts.scratch import ExpertsScratch
from ridgeline.ops.cuda.experts.sparsemixer import sparsemixer
from ridgeline.ops.cuda.linear.linear import gate_up, linear
from ridgeline.ops.cuda.norm import WeightedRows
from ridgeline.ops.low_bits import LowBits

Project = Callable[[Tensor, Matrix, Tensor], Tensor]  # x, weight, out → rows, or partial sums
GatedActivation = Literal["silu", "gelu_tanh"]  # those that products with a gate compute themselves
FUSED_ACTIVATIONS = ("silu", "gelu_tanh")


class FfnPart(Protocol):
    def branch(self, normed: Tensor, step: DeviceStep, project: Project) -> Tensor | WeightedRows: ...


def build_ffn(ffn: Ffn, weights: DeviceLayer, buffers: Buffers, *, deterministic: bool) -> FfnPart:
    if isinstance(ffn, Experts):
        return ExpertsPart(ffn, weights, buffers, deterministic)
    if not ffn.gated:
        return UngatedPart(ffn, weights, buffers)
    return GatedPart(ffn, weights, buffers, deterministic)


class GatedPart:
    """down(act(gate) · up). The consumer adds the bias of the last product, with the residual."""

    def __init__(self, ffn: Dense, weights: DeviceLayer, buffers: Buffers, deterministic: bool) -> None:
        self._gated = _Gated(ffn.activation, weights, buffers, deterministic)
        self._weights, self._buffers = weights, buffers

    def branch(self, normed: Tensor, step: DeviceStep, project: Project) -> Tensor:
        return project(self._gated(normed), matrix_of(self._weights.down), self._buffers.branch)


class UngatedPart:
    """down(act(up)). The consumer adds the bias of the last product, with the residual."""

    def __init__(self, ffn: Dense, weights: DeviceLayer, buffers: Buffers) -> None:
        self._activation, self._weights, self._buffers = ffn.activation, weights, buffers

    def branch(self, normed: Tensor, step: DeviceStep, project: Project) -> Tensor:
        w = self._weights
        inner = part_of(self._buffers.gated, len(normed), len(matrix_of(w.up)))
        activated(project(normed, matrix_of(w.up), inner), inner, self._activation, w.up_bias)
        return project(inner, matrix_of(w.down), self._buffers.branch)


class ExpertsPart:
    """Routed experts, and the part that all tokens use where the family has one."""

    def __init__(self, ffn: Experts, weights: DeviceLayer, buffers: Buffers, deterministic: bool) -> None:
        self._ffn, self._weights, self._buffers = ffn, weights, buffers
        self._deterministic = deterministic
        self._gated = _Gated(ffn.activation, weights, buffers, deterministic) if ffn.shared_size else None
        # Tokens that chose each expert so far, counted by the kernels that choose.
        self.tokens = torch.zeros(ffn.num, dtype=torch.int64, device=there(weights.router).device)

    def branch(self, normed: Tensor, step: DeviceStep, project: Project) -> Tensor | WeightedRows:
        out = self._buffers.branch[: len(normed)]
        self._route(normed, step.slots)
        branch = self._compute(normed, out, sums=self._gated is not None)
        if self._gated is not None:
            self._add_shared(normed, out)
        return branch

    def can_add(self) -> bool:
        """Whether `add` computes this kind, for up to MOST_FEW tokens."""
        plain = not isinstance(self._weights.experts_gate_up, LowBits)
        plain = plain and not isinstance(self._weights.experts_down, LowBits)
        sparse = self._ffn.router.scores == "sparsemixer"
        return plain and self._gated is None and not self._deterministic and not sparse

    def add(self, residual: Tensor, step: DeviceStep, eps: float) -> None:
        """The norm before the experts, and their sum added to the residual: three kernels."""
        normed = self._buffers.normed[: len(residual)]
        self._route(residual, step.slots, norm_weight=self._weights.ffn_norm, eps=eps, normed=normed)
        self._compute(normed, residual, adds=True)

    def _compute(self, normed: Tensor, out: Tensor, **options: bool) -> Tensor | WeightedRows:
        ffn, w, (chosen, shares) = self._ffn, self._weights, self._choice(len(normed))
        return experts(
            normed,
            chosen,
            shares,
            expert_matrices(w.experts_gate_up),
            expert_matrices(w.experts_down),
            out,
            ffn.activation,
            _scratch(self._buffers),
            gate_up_bias=w.experts_gate_up_bias,
            down_bias=w.experts_down_bias,
            clamp=ffn.clamp,
            scales_input=ffn.router.scales_input,
            deterministic=self._deterministic,
            low=self._buffers.low,
            **options,
        )

    def _choice(self, tokens: int) -> tuple[Tensor, Tensor]:
        scratch = _scratch(self._buffers)
        return scratch.chosen[:tokens], scratch.weights[:tokens]

    def _route(self, x: Tensor, slots: Tensor, **norm: Any) -> None:
        """`norm`: of the rows of x, which only `route_few` computes."""
        router, w, tokens, scratch = self._ffn.router, self._weights, len(x), _scratch(self._buffers)
        (chosen, shares), logits, matrix = self._choice(tokens), scratch.logits[:tokens], there(w.router)
        if router.scores == "sparsemixer":
            linear(x, matrix, logits, w.router_bias, deterministic=self._deterministic)
            sparsemixer(logits, chosen, shares, router.margin, counts=self.tokens, slots=slots)
            return
        options: dict[str, Any] = {
            "scores": router.scores,
            "normalized": router.normalized,
            "scale": router.scale,
            "choice_bias": w.choice_bias,
            "groups": router.groups,
            "top_groups": router.top_groups,
            "counts": self.tokens,
            "slots": slots,
        }
        if tokens <= MOST_FEW and not self._deterministic:
            few = {"router_bias": w.router_bias, **options, **norm}
            route_few(x, matrix, chosen, shares, logits, scratch.counter, **few)
            return
        linear(x, matrix, logits, w.router_bias, deterministic=self._deterministic)
        route(logits, chosen, shares, **options)

    def _add_shared(self, normed: Tensor, out: Tensor) -> None:
        assert self._gated is not None
        w, shared = self._weights, self._buffers.shared[: len(normed)]
        low = self._buffers.low
        linear(self._gated(normed), matrix_of(w.down), shared, deterministic=self._deterministic, low=low)
        if w.shared_scale is None:
            out.add_(shared)
            return
        scale = self._buffers.shared_scale[: len(normed)]
        linear(normed, there(w.shared_scale), scale, deterministic=self._deterministic)
        out.addcmul_(shared, scale.sigmoid_())


def _scratch(buffers: Buffers) -> ExpertsScratch:
    assert buffers.experts is not None
    return buffers.experts


class _Gated:
    """act(gate) · up, in buffers.gated."""

    def __init__(self, activation: str, weights: DeviceLayer, buffers: Buffers, deterministic: bool) -> None:
        self._activation = activation
        self._weights, self._buffers, self._deterministic = weights, buffers, deterministic

    def __call__(self, normed: Tensor) -> Tensor:
        w, tokens = self._weights, len(normed)
        width = len(matrix_of(w.gate_up))
        out = part_of(self._buffers.gated, tokens, width // 2)
        scratch = part_of(self._buffers.gate_up, tokens, width)
        if self._activation not in FUSED_ACTIVATIONS:
            linear(
                normed,
                matrix_of(w.gate_up),
                scratch,
                w.gate_up_bias,
                deterministic=self._deterministic,
                low=self._buffers.low,
            )
            gated(scratch, out, self._activation)
            return out
        gate_up(
            normed,
            matrix_of(w.gate_up),
            out,
            cast(GatedActivation, self._activation),
            bias=w.gate_up_bias,
            scratch=scratch,
            deterministic=self._deterministic,
            low=self._buffers.low,
        )
        return out
