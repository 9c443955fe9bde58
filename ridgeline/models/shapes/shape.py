"""ModelShape: a model's costs, layer by layer, for every model the planner supports, servable or not.

Made by `shapes.read_shape`. A ModelSpec says how a model is computed; a shape says how much of everything
there is: parameters, bytes, cache, FLOPs. Pure arithmetic: holds no tensors and reads no files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ridgeline.models.shapes.attention import Attention
from ridgeline.models.shapes.ffn import Experts, Ffn
from ridgeline.models.shapes.precision import Precision, as_precision, bytes_of


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: mixes tokens, or has a feed-forward part, or both."""

    attention: Attention | None
    ffn: Ffn | None
    norms: int = 2  # as wide as the residual stream
    other: int = 0  # parameters that belong to neither half

    def parameters(self, hidden: int) -> int:
        return self.projections(hidden) + self.dense(hidden) + self.experts(hidden) + self.small(hidden)

    def projections(self, hidden: int) -> int:
        """Matrices around the mixing of tokens."""
        if self.attention is None:
            return 0
        return self.attention.input_matrix(hidden) + self.attention.output_matrix(hidden)

    def dense(self, hidden: int) -> int:
        """Matrices of a dense FFN, or of the part shared by all tokens next to experts; no router."""
        if self.ffn is None:
            return 0
        return self.ffn.matrix(hidden) - (hidden * self.ffn.num if isinstance(self.ffn, Experts) else 0)

    def experts(self, hidden: int) -> int:
        """All routed experts."""
        return self.ffn.num * self.ffn.one_expert(hidden) if isinstance(self.ffn, Experts) else 0

    def small(self, hidden: int) -> int:
        """Norms, biases, the router: they stay at 16 bits when the rest is quantized."""
        total = self.norms * hidden + self.other
        if self.attention is not None:
            total += self.attention.vectors(hidden)
        if self.ffn is not None:
            total += self.ffn.vectors(hidden)
        if isinstance(self.ffn, Experts):
            total += hidden * self.ffn.num
        return total


@dataclass(frozen=True, slots=True)
class ExtraWeights:
    """Weights outside the decode path, counted separately."""

    name: str  # "vision tower", "MTP"
    parameters: int
    resident: bool  # in memory whenever the model is served; otherwise only on request


@dataclass(frozen=True)
class ModelShape:
    name: str
    family: str
    hidden_size: int
    vocab_size: int
    max_context: int
    tied_embeddings: bool
    layers: tuple[LayerShape, ...]
    weight_format: str  # as stored
    stored: Precision  # the same by part
    extra_parameters: tuple[ExtraWeights, ...] = ()
    other: int = 0  # parameters besides layers, embeddings and final norm

    @cached_property
    def kinds(self) -> tuple[tuple[LayerShape, int], ...]:
        """Each different layer with the number of times it occurs."""
        return tuple(Counter(self.layers).items())

    # ---- parameters ----

    @cached_property
    def parameters(self) -> int:
        """All parameters without extras: embeddings, layers, final norm, LM head unless tied."""
        matrices = self.projection_parameters + self.dense_parameters + self.expert_parameters
        return self.embedding_parameters + matrices + self.small_parameters

    @cached_property
    def active_parameters(self) -> int:
        """`parameters` with only the experts that one token uses."""
        chosen = sum(
            count * layer.ffn.per_token * layer.ffn.one_expert(self.hidden_size)
            for layer, count in self.kinds
            if isinstance(layer.ffn, Experts)
        )
        return self.parameters - self.expert_parameters + chosen

    @property
    def embedding_parameters(self) -> int:
        return (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size

    @cached_property
    def projection_parameters(self) -> int:
        """Matrices of attention, linear attention and state-space layers."""
        return sum(count * layer.projections(self.hidden_size) for layer, count in self.kinds)

    @cached_property
    def dense_parameters(self) -> int:
        """Matrices of dense FFNs and shared experts."""
        return sum(count * layer.dense(self.hidden_size) for layer, count in self.kinds)

    @cached_property
    def expert_parameters(self) -> int:
        return sum(count * layer.experts(self.hidden_size) for layer, count in self.kinds)

    @cached_property
    def small_parameters(self) -> int:
        """Norms, biases, routers and the like."""
        layers = sum(count * layer.small(self.hidden_size) for layer, count in self.kinds)
        return layers + self.hidden_size + self.other

    @property
    def is_mixture(self) -> bool:
        return self.expert_parameters > 0

    # ---- bytes of weights ----

    def weight_bytes(self, precision: Precision | str) -> int:
        """In memory when served: all parameters, and the resident extras at 16 bits."""
        kept = as_precision(precision)
        rest = self.embedding_parameters + self.small_parameters
        resident = sum(extra.parameters for extra in self.extra_parameters if extra.resident)
        return round(
            self.projection_parameters * bytes_of(kept.attention)
            + self.dense_parameters * bytes_of(kept.linear)
            + self.expert_parameters * bytes_of(kept.experts)
            + (rest + resident) * bytes_of(kept.rest)
        )

    def weight_bytes_read(self, precision: Precision | str, batch_tokens: float) -> float:
        """Read by one forward pass over `batch_tokens` tokens.

        Dense weights and LM head once, one row of the embeddings per token, and as many of each layer's
        experts as the tokens are expected to use: E · (1 − (1 − k/E)^tokens).
        """
        kept = as_precision(precision)
        head = self.vocab_size * self.hidden_size
        rows = min(batch_tokens, self.vocab_size) * self.hidden_size
        experts = sum(
            count * layer.ffn.expected_distinct(batch_tokens) * layer.ffn.one_expert(self.hidden_size)
            for layer, count in self.kinds
            if isinstance(layer.ffn, Experts)
        )
        return (
            self.projection_parameters * bytes_of(kept.attention)
            + self.dense_parameters * bytes_of(kept.linear)
            + experts * bytes_of(kept.experts)
            + (head + rows + self.small_parameters) * bytes_of(kept.rest)
        )

    # ---- what a sequence keeps ----

    def kv_bytes_per_token(self, kv_bytes: float = 2) -> int:
        """Added by one more token while every window has room: growing caches only, no constant state."""
        return round(self._kept(2, kv_bytes) - self._kept(1, kv_bytes))

    def kv_bytes(self, context: int, kv_bytes: float = 2, *, whole_windows: bool = False) -> int:
        """Kept for a sequence of `context` tokens: caches, latents, and states of constant size.

        `whole_windows`: for engines that keep windowed layers in full, like this one.
        """
        if whole_windows:
            return round(self._kept(0, kv_bytes) + context * self.kv_bytes_per_token(kv_bytes))
        return round(self._kept(context, kv_bytes))

    def kv_bytes_read(self, context: int, kv_bytes: float = 2) -> int:
        """Read by the decode step of a sequence of `context` tokens, the new one included."""
        return round(
            sum(
                count * layer.attention.read_bytes(context, kv_bytes)
                for layer, count in self.kinds
                if layer.attention is not None
            )
        )

    @property
    def state_bytes(self) -> int:
        """Kept per sequence at any length: linear attention and state-space layers."""
        return round(self._kept(0, 2))

    def _kept(self, context: int, kv_bytes: float) -> float:
        return sum(
            count * layer.attention.kept_bytes(context, kv_bytes)
            for layer, count in self.kinds
            if layer.attention is not None
        )

    # ---- FLOPs: a multiplication and an addition count as two ----

    @cached_property
    def matmul_parameters(self) -> int:
        """Weights one token is multiplied with in the layers: active experts, no embeddings or LM head."""
        hidden = self.hidden_size
        total = self.projection_parameters + self.dense_parameters
        for layer, count in self.kinds:
            if isinstance(layer.ffn, Experts):
                chosen = layer.ffn.per_token * layer.ffn.expert_matrix(hidden)
                total += count * (chosen + hidden * layer.ffn.num)
        return total

    @property
    def lm_head_flops(self) -> int:
        return 2 * self.hidden_size * self.vocab_size

    def attention_flops(self, new_tokens: int, context: int = 0) -> int:
        """Only the mixing of tokens, for `new_tokens` after `context` cached ones."""
        return sum(
            count * layer.attention.flops(new_tokens, context)
            for layer, count in self.kinds
            if layer.attention is not None
        )

    def flops(self, new_tokens: int, context: int = 0) -> int:
        """A forward pass of `new_tokens` after `context` cached ones, the LM head once."""
        return (
            2 * new_tokens * self.matmul_parameters
            + self.attention_flops(new_tokens, context)
            + self.lm_head_flops
        )
