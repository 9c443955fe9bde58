"""The decoder in torch: the reference for every family, configured by its ModelSpec.

The runner calls `forward` once per step, under torch.inference_mode. The decoder owns weights and rotary
tables; the caller owns the KV cache. The backend implements each op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.models.decoders.reference_layers import Layer, Rotation, StepContext, build_norm
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.spec.rope_tables import rope_tables
from ridgeline.models.weights.torch_weights import Weights, tensors_of
from ridgeline.ops.backend import Backend
from ridgeline.ops.inputs import StepInputs


class Decoder:
    """A model that turns StepInputs into logits. `max_context` bounds the positions it accepts."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, backend: Backend, max_context: int | None = None
    ) -> None:
        self.spec = spec
        self.weights = tensors_of(weights)
        self.max_context = spec.max_context if max_context is None else max_context
        device = weights.embed.device
        self.taps: tuple[int, ...] = ()  # inputs of these layers are kept, for a draft head; behind the last
        # layer: what the LM head reads
        self.tapped: Tensor | None = None  # [T, taps · hidden] of the last step
        self._rope_tables: dict[RopeSpec, Rotation] = {
            rope: (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for rope, (cos, sin) in rope_tables(spec, self.max_context, weights.rope_divisors).items()
        }
        self.use(backend)

    def use(self, backend: Backend) -> None:
        """Build the layers over the ops of this backend."""
        spec, weights = self.spec, self.weights
        self.ops = backend
        self._layers = [
            Layer(spec, layer, layer_weights, backend)
            for layer, layer_weights in zip(spec.layers, weights.layers, strict=True)
        ]
        self._final_norm = build_norm(backend, spec.norm, weights.final_norm, weights.final_norm_bias)

    def forward(self, inputs: StepInputs, kv_cache: list[Tensor]) -> Tensor:
        """Compute the step's tokens, write their KV, and return float32 logits [L, vocab] of logit_rows."""
        spec, weights, ops = self.spec, self.weights, self.ops
        rotations = {
            rope: (cos[inputs.positions], sin[inputs.positions])
            for rope, (cos, sin) in self._rope_tables.items()
        }
        windows = {(mixer.window, mixer.chunked) for mixer in spec.attentions}
        plans = {window: ops.plan_attention(inputs, *window) for window in windows}
        context = StepContext(inputs, rotations, plans)
        x = ops.embed(inputs.token_ids, weights.embed, spec.embedding_scale)
        if weights.positions is not None:
            x = x + weights.positions[inputs.positions]
        tapped: list[Tensor] = []
        for number, (layer, kv) in enumerate(zip(self._layers, kv_cache, strict=True)):
            if number in self.taps:
                tapped.append(x)
            x = layer.forward(x, kv, context)
        if len(self._layers) in self.taps:
            tapped.append(self._final_norm(x))
        self.tapped = torch.cat(tapped, 1) if tapped else None
        return self._logits(x[inputs.logit_rows])

    def expert_counts(self) -> dict[int, list[int]]:
        """For each layer with experts, the tokens that chose each of them."""
        parts = {number: layer.experts for number, layer in enumerate(self._layers)}
        return {number: part.tokens.tolist() for number, part in parts.items() if part is not None}

    def _logits(self, x: Tensor) -> Tensor:
        normed = self._final_norm(x)
        logits = self.ops.linear(normed, self.weights.lm_head, self.weights.lm_head_bias).float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
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
