"""The decoder on a CUDA device: a forward pass as a short chain of fused kernels over preallocated buffers.

The runner calls `forward` once per step, eagerly or while a graph is captured: nothing here allocates,
synchronizes or reads a value from the device. It computes the same as `reference`; the kernels depend only on
the number of tokens: fused layers for one, split matrix products for a decode batch, cuBLAS beyond, and one
fixed arithmetic for all of them in deterministic mode.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from ridgeline.models.decoders.cuda_attention import AttentionPart, RopeTables
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.decoders.cuda_ffn import ExpertsPart, build_ffn
from ridgeline.models.decoders.cuda_fused_layers import fused_layer
from ridgeline.models.decoders.cuda_layers import Layer, NormWeights
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.spec.rope_tables import rope_tables
from ridgeline.models.weights.torch_weights import (
    MATRICES,
    DeviceLayer,
    Matrix,
    Weights,
    device_tensors_of,
    there,
)
from ridgeline.ops.cuda.linear.gemv import gemv
from ridgeline.ops.cuda.linear.linear import branch_splits, linear, uses_gemv
from ridgeline.ops.cuda.low_bits.products import low_splits
from ridgeline.ops.cuda.norm import embed_norm, norm_tile
from ridgeline.ops.low_bits import LowBits


class CudaDecoder:
    """`kv` is [layers, num_blocks, kv_heads, 2, block_size, head_dim]: for each head keys, then values.

    In 8 bits it has `kv_steps` [layers, num_blocks, kv_heads, 2, block_size] beside it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kv: Tensor,
        buffers: Buffers,
        max_context: int,
        deterministic: bool = False,
        kv_steps: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.stored = weights
        self.weights = tensors = device_tensors_of(weights)
        self.kv, self.kv_steps = kv, kv_steps
        self.buffers = buffers
        self.deterministic = deterministic
        # In deterministic mode a sum over a row must not depend on the number of rows.
        self._tile = norm_tile(1, spec.hidden_size) if deterministic else None
        # A scale of the logits is one of the final norm and of the head's bias.
        self._final_norm = NormWeights(
            _scaled(tensors.final_norm, spec.logit_scale), _scaled(tensors.final_norm_bias, spec.logit_scale)
        )
        self._head_bias = _scaled(tensors.lm_head_bias, spec.logit_scale)
        self.tapped: Tensor | None = None  # [T, taps · hidden]: inputs of the layers `tap` was given
        self._taps: tuple[int, ...] = ()
        self._layers = self._build_layers(max_context)
        self._fused = [
            fused_layer(spec, number, w, layer.ffn, buffers, deterministic=deterministic)
            for number, (w, layer) in enumerate(zip(tensors.layers, self._layers, strict=True))
        ]

    def _build_layers(self, max_context: int) -> list[Layer]:
        spec, weights, buffers = self.spec, self.weights, self.buffers
        device = there(weights.embed).device
        nothing = torch.empty(1, 0, device=device)
        ropes: dict[RopeSpec | None, RopeTables] = {
            rope: (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for rope, (cos, sin) in rope_tables(spec, max_context, weights.rope_divisors).items()
        }
        ropes[None] = nothing, nothing
        first = [NormWeights(w.attn_norm, w.attn_norm_bias) for w in weights.layers]
        layers = []
        for number, (layer, mixer, w) in enumerate(
            zip(spec.layers, spec.attentions, weights.layers, strict=True)
        ):
            kv, rope = self.kv[number], ropes[mixer.rope]
            steps = None if self.kv_steps is None else self.kv_steps[number]
            attention = AttentionPart(mixer, spec.norm, w, kv, buffers, rope, self.deterministic, steps)
            assert layer.ffn is not None
            ffn = build_ffn(layer.ffn, w, buffers, deterministic=self.deterministic)
            following = [*first[1:], self._final_norm][number]
            layers.append(Layer(spec, layer.norms, w, attention, ffn, following, buffers))
        return layers

    def forward(self, step: DeviceStep) -> Tensor:
        """Compute the step's tokens, write their KV, and return logits [num_logits, vocab] in the model's
        dtype, valid until the next call. The hidden states of all `logit_rows` are then in buffers.normed,
        except in a step of one decode row.
        """
        pieces = self.pieces(step)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                logits: Tensor = end.value
                return logits

    def pieces(self, step: DeviceStep, only: Sequence[int] | None = None) -> Generator[None, None, Tensor]:
        """As `forward`, but yields after every layer. `only`: the numbers of the layers that are computed, to
        launch each kernel once; the result is then worth nothing."""
        self._embed(step)
        numbers = range(len(self._layers)) if only is None else only
        if self._is_few(step):
            yield from self._few_pieces(step, numbers)
            return self.head(step)
        project, last = partial(self._project, step=step), len(self._layers) - 1
        for number in numbers:
            self._keep(number, step)
            rows = step.logit_rows if number == last and not self._taps_final else None
            self._layers[number].forward(step, project, self._tile, rows)
            yield
        if self._taps_final:
            self._keep_final(step)
            if step.logit_rows is not None:
                self._move_logit_rows(step.logit_rows)
        return self.head(step)

    @property
    def kinds_of_layers(self) -> list[int]:
        """Numbers of layers that together launch every kernel: the first of each kind, and the last."""
        kinds = [(layer, _formats(w)) for layer, w in zip(self.spec.layers, self.weights.layers, strict=True)]
        first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
        return sorted({*first.values(), len(self._layers) - 1})

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep the inputs of these layers for a draft head; behind the last layer: what the LM head reads.
        Before any graph."""
        if any(not 0 <= layer <= len(self._layers) for layer in layers):
            raise ValueError(f"layers {layers} of {len(self._layers)} cannot be tapped")
        residual = self.buffers.residual
        self._taps = layers
        self.tapped = residual.new_zeros(len(residual), len(layers) * residual.shape[1])

    @property
    def _taps_final(self) -> bool:
        return len(self._layers) in self._taps

    def _keep(self, number: int, step: DeviceStep) -> None:
        if number in self._taps:
            self._kept(number, step).copy_(self.buffers.residual[: step.num_tokens])

    def _keep_final(self, step: DeviceStep) -> None:
        self._kept(len(self._layers), step).copy_(self.buffers.normed[: step.num_tokens])

    def _kept(self, number: int, step: DeviceStep) -> Tensor:
        assert self.tapped is not None
        first, hidden = self._taps.index(number), self.buffers.residual.shape[1]
        return self.tapped[: step.num_tokens, first * hidden : (first + 1) * hidden]

    def _move_logit_rows(self, rows: Tensor) -> None:
        """To the front, where the head reads them. Rows that are padding name a token of the step, too."""
        normed = self.buffers.normed
        normed[: len(rows)].copy_(normed.index_select(0, rows))

    def head(self, step: DeviceStep) -> Tensor:
        """Logits of the step, from what its layers left in the buffers."""
        if self._fused[-1] is None or not self._is_few(step):
            return self.logits(self.buffers.normed[: step.num_logits])
        residual, logits = (part[: step.num_tokens] for part in (self.buffers.residual, self.buffers.logits))
        norm, eps = self._final_norm.weight, self.spec.norm.eps
        gemv(residual, there(self.weights.lm_head), logits, norm_weight=norm, eps=eps, bias=self._head_bias)
        return self._capped(logits)

    def _is_few(self, step: DeviceStep) -> bool:
        return step.only_decodes and uses_gemv(step.num_tokens, deterministic=self.deterministic)

    def _few_pieces(self, step: DeviceStep, numbers: Sequence[int]) -> Generator[None]:
        """A few decode rows: layers that can be fused are. A fused layer reads the residual alone."""
        buffers, rows, last = self.buffers, step.num_tokens, len(self._layers) - 1
        residual, project = buffers.residual[:rows], partial(self._project, step=step)
        for number in numbers:
            layer, fused = self._layers[number], self._fused[number]
            self._keep(number, step)
            if fused is None:
                layer.forward(step, project, self._tile, step.logit_rows if number == last else None)
            else:
                attend = partial(layer.attention.attend_decodes, step=step, bias=None)
                fused.forward(residual, step, attend)
                if (number < last and self._fused[number + 1] is None) or (
                    number == last and self._taps_final
                ):
                    layer.norm_for_the_next(residual, buffers.normed[:rows], self._tile)
            yield
        if self._taps_final:
            self._keep_final(step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states [L, hidden]; the buffer bounds L."""
        out = self.buffers.logits[: len(hidden)]
        if not len(hidden):  # a chunk in the middle of a prompt
            return out
        linear(hidden, self.weights.lm_head, out, self._head_bias, deterministic=self.deterministic)
        return self._capped(out)

    def expert_counts(self) -> dict[int, Tensor]:
        """For each layer with experts, the device's counters of the tokens that chose each of them."""
        ffns = {number: layer.ffn for number, layer in enumerate(self._layers)}
        return {number: ffn.tokens for number, ffn in ffns.items() if isinstance(ffn, ExpertsPart)}

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, step: DeviceStep) -> None:
        """The residual, and the norm that the first layer reads."""
        spec, weights, tokens = self.spec, self.weights, step.num_tokens
        first = weights.layers[0]
        embed_norm(
            step.token_ids,
            there(weights.embed),
            spec.embedding_scale,
            first.attn_norm,
            spec.norm.eps,
            self.buffers.residual[:tokens],
            self.buffers.normed[:tokens],
            norm_bias=first.attn_norm_bias,
            layer_norm=spec.norm.kind == "layer",
            learned=weights.positions,
            positions=step.positions,
            tile=self._tile,
        )

    def _project(self, x: Tensor, weight: Matrix, out: Tensor, step: DeviceStep) -> Tensor:
        """x · weightᵀ: in `out`'s first rows, or, if all rows are of one kind, as partial sums [S, T, N] in
        float32."""
        tokens, width = len(x), len(weight)
        result = out[:tokens]
        splits = 0
        if step.only_decodes or not step.num_decodes:
            splits = self._splits(x, weight)
        if splits:
            result = self.buffers.partials[: splits * tokens * width].view(splits, tokens, width)
        linear(x, weight, result, deterministic=self.deterministic, low=self.buffers.low)
        return result

    def _splits(self, x: Tensor, weight: Matrix) -> int:
        tokens, width = len(x), len(weight)
        if not isinstance(weight, LowBits):
            return branch_splits(tokens, width, x.shape[1], dtype=x.dtype, deterministic=self.deterministic)
        splits = low_splits(tokens, weight, deterministic=self.deterministic)
        room = len(self.buffers.partials) // (tokens * width)
        return splits if splits <= room else 0


def _formats(layer: DeviceLayer) -> tuple[object, ...]:
    """Of a layer's matrices in 8 and 4 bits."""
    held = ((name, getattr(layer, name)) for name in sorted(MATRICES - {"embed", "lm_head"}))
    return tuple((name, m.format, m.order is None) for name, m in held if isinstance(m, LowBits))


def _scaled(vector: Tensor | None, scale: float) -> Tensor | None:
    return vector if vector is None or scale == 1.0 else vector * scale
