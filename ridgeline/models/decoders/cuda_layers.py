"""The layers of the CUDA decoder, each built once at load from its LayerSpec and weights.

A layer is attention, an ffn and two joins. A join adds a part's branch to the residual and computes the norm
that the next part reads, in one launch; the join after the ffn already computes the next layer's norm.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.models.decoders.cuda_attention import AttentionPart
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.decoders.cuda_ffn import FfnPart, Project
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.models.spec.layer_spec import Norms
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import DeviceLayer
from ridgeline.ops.cuda.norm import WeightedRows, add_norm

Tile = tuple[int, int]


class NormWeights(NamedTuple):
    """Of one norm; without a weight there is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None


NO_NORM = NormWeights()


class Join:
    """residual += scale · post_norm(branch + bias), and the norm of the residual after or before the sum."""

    def __init__(
        self,
        spec: ModelSpec,
        bias: Tensor | None,
        post: NormWeights,
        following: NormWeights,
        *,
        of_the_old: bool = False,
    ) -> None:
        self._norm, self._scale = spec.norm, spec.residual_scale
        self._bias, self._post, self._following = bias, post, following
        self._of_the_old = of_the_old

    def __call__(
        self,
        branch: Tensor | WeightedRows | None,
        residual: Tensor,
        normed: Tensor,
        tile: Tile | None,
        rows: Tensor | None = None,
    ) -> None:
        add_norm(
            branch,
            residual,
            self._following.weight,
            self._norm.eps,
            normed,
            norm_bias=self._following.bias,
            layer_norm=self._norm.kind == "layer",
            bias=self._bias,
            post_weight=self._post.weight,
            post_bias=self._post.bias,
            scale=self._scale,
            of_the_old=self._of_the_old,
            rows=rows,
            tile=tile,
        )


class Layer:
    """`following`: the norm that the next layer's attention reads, or the final norm."""

    def __init__(
        self,
        spec: ModelSpec,
        norms: Norms,
        weights: DeviceLayer,
        attention: AttentionPart,
        ffn: FfnPart,
        following: NormWeights,
        buffers: Buffers,
    ) -> None:
        assert norms.before or not norms.parallel, "parallel parts read the norm of the layer's input"
        w = weights
        self.attention, self.ffn, self._buffers = attention, ffn, buffers
        self._reads_norm = norms.before
        # A parallel ffn reads the norm of the layer's input: attention's own, or one of the old residual.
        ffn_norm = NO_NORM if norms.shared else NormWeights(w.ffn_norm, w.ffn_norm_bias)
        after_attention = NormWeights(w.post_attn_norm, w.post_attn_norm_bias)
        after_ffn = NormWeights(w.post_ffn_norm, w.post_ffn_norm_bias)
        self._join_attention = Join(spec, w.o_bias, after_attention, ffn_norm, of_the_old=norms.parallel)
        self._join_ffn = Join(spec, w.down_bias, after_ffn, following)

    def forward(
        self, step: DeviceStep, project: Project, tile: Tile | None, rows: Tensor | None = None
    ) -> None:
        """buffers.residual and buffers.normed of the step's tokens: from the layer before to the next one.

        rows: the tokens whose norm is computed at the end; the residual is then not updated.
        """
        tokens, buffers = step.num_tokens, self._buffers
        residual, normed = buffers.residual[:tokens], buffers.normed[:tokens]
        x = normed if self._reads_norm else residual
        self._join_attention(self.attention.branch(x, step, project), residual, normed, tile)
        written = normed if rows is None else buffers.normed[: len(rows)]
        self._join_ffn(self.ffn.branch(x, step, project), residual, written, tile, rows)

    def norm_for_the_next(self, residual: Tensor, normed: Tensor, tile: Tile | None) -> None:
        """The norm at the end of the layer alone, where the rest was computed in another way."""
        self._join_ffn(None, residual, normed, tile)
