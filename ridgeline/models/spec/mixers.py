"""Mixers: how a layer mixes tokens. Softmax attention over keys and values, over latents, or compressed.

A mixer is a part of a LayerSpec, filled in by the readers. All kinds have the same methods: `input_matrix`
and `output_matrix` (weights before and after the mixing of tokens), `vectors` (norms, biases) and `flops` of
the mixing itself. `cache_layout` has their bytes. Holds no tensors and reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.models.errors import ImpossibleShape
from ridgeline.models.spec.recurrences import LinearAttention, Mamba2
from ridgeline.models.spec.rope import RopeSpec

# The norm of q and k before the rotation. head: of each head, with one weight for all heads; heads: of each
# head, with its own weights; projection: of all heads together; unit: of each head, after the rotation,
# without weights.
QkNorm = Literal["", "head", "heads", "projection", "unit"]


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + weight · log(1 + ⌊(p + 1) / every⌋)."""

    weight: float
    every: float


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """Small heads that score all tokens, so that attention reads only the best `top` of them."""

    heads: int
    head_dim: int
    top: int  # tokens
    owns_weights: bool = True  # False: this layer reuses the choice of an earlier one
    wide_keys: bool = False  # index keys at 16 bits; otherwise at 8, whatever the cache's type is

    def flops(self, tokens: int, context: int) -> int:
        pair = 2 * self.heads * self.head_dim if self.owns_weights else 0
        return pair * attended_pairs(tokens, context, None)


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention over keys and values, whole or within a window."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None = head_dim
    rope: RopeSpec | None = None  # None: queries and keys are not rotated
    scale: float = 0.0  # multiplies q·k; 0 becomes head_dim^-0.5
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    window: int | None = None  # sliding window in tokens; None = full attention
    chunked: bool = False  # the window does not slide: it restarts every `window` tokens
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = ""
    query_scale: QueryScale | None = None  # instead of a QK-norm
    output_gate: bool = False  # q is twice as wide: half of it gates the output
    head_gate: bool = False  # one gate per head
    keys_are_values: bool = False  # no projection for values
    sinks: bool = False  # a learned logit per head, which takes part in the softmax without a value
    index: SparseIndex | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ImpossibleShape(f"{self.heads} heads is not a multiple of {self.kv_heads} KV heads")
        if self.rope is not None and (self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim):
            raise ImpossibleShape(
                f"rotary size {self.rope.dim} must be even and at most head_dim {self.head_dim}"
            )
        if self.qk_norm and self.query_scale is not None:
            raise ImpossibleShape("queries that are normed are not scaled by their position")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    def input_matrix(self, hidden: int) -> int:
        queries = self.heads * self.head_dim * (2 if self.output_gate else 1)
        values = 0 if self.keys_are_values else self.kv_heads * self.value_width
        gates = self.heads if self.head_gate else 0
        index = (self.index.heads + 1) * self.index.head_dim if self.index else 0
        return hidden * (queries + self.kv_heads * self.head_dim + values + gates + index)

    def output_matrix(self, hidden: int) -> int:
        return hidden * self.heads * self.value_width

    def vectors(self, hidden: int) -> int:
        keys, values = self.kv_heads * self.head_dim, self.kv_heads * self.value_width
        total = (self.heads * self.head_dim + keys + values) if self.qkv_bias else 0
        total += hidden if self.output_bias else 0
        if self.qk_norm not in ("", "unit"):
            total += 2 * self.head_dim if self.qk_norm == "head" else self.heads * self.head_dim + keys
        total += 2 * self.index.head_dim if self.index else 0
        return total + (self.heads if self.sinks else 0)

    def tokens_held(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def tokens_seen(self, context: int) -> int:
        """The tokens that the newest of `context` tokens attends to, itself included."""
        if self.chunked and self.window is not None:
            return (context - 1) % self.window + 1 if context else 0
        return self.tokens_held(context)

    def flops(self, tokens: int, context: int) -> int:
        """q·k and p·v of the causal pairs."""
        pair = 2 * self.heads * (self.head_dim + self.value_width)
        if self.chunked and self.window is not None:
            return pair * (
                _chunked_pairs(context + tokens, self.window) - _chunked_pairs(context, self.window)
            )
        if self.index is not None:
            scores = self.index.flops(tokens, context)
            return pair * attended_pairs(tokens, context, self.index.top) + scores
        return pair * attended_pairs(tokens, context, self.window)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads come from one cached latent vector."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index: SparseIndex | None = None
    output_gate: bool = False  # a gate as wide as all heads' values

    @property
    def expansion(self) -> int:
        """From the latent to every head's key and value; or absorbed into query and output."""
        return self.kv_lora_rank * self.heads * (self.nope_dim + self.value_dim)

    def input_matrix(self, hidden: int) -> int:
        query_width = self.heads * (self.nope_dim + self.rope_dim)
        if self.q_lora_rank is None:
            queries = hidden * query_width
        else:
            queries = self.q_lora_rank * (hidden + query_width)
        gate = hidden * self.heads * self.value_dim if self.output_gate else 0
        index = 0
        if self.index is not None and self.index.owns_weights:
            from_query = (self.q_lora_rank or hidden) * self.index.heads * self.index.head_dim
            index = from_query + hidden * (self.index.head_dim + self.index.heads)
        return queries + hidden * (self.kv_lora_rank + self.rope_dim) + self.expansion + gate + index

    def output_matrix(self, hidden: int) -> int:
        return hidden * self.heads * self.value_dim

    def vectors(self, hidden: int) -> int:
        del hidden
        index = 2 * self.index.head_dim if self.index is not None and self.index.owns_weights else 0
        return (self.q_lora_rank or 0) + self.kv_lora_rank + index

    def flops(self, tokens: int, context: int) -> int:
        """The cheaper of the two ways: expanding the cached latents again, or working in the latent space."""
        chosen = None if self.index is None else self.index.top
        index = 0 if self.index is None else self.index.flops(tokens, context)
        absorbed = 2 * self.heads * (2 * self.kv_lora_rank + self.rope_dim)
        in_latent = absorbed * attended_pairs(tokens, context, chosen) + index
        expanded = 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)
        expanded = expanded * attended_pairs(tokens, context, None) + 2 * context * self.expansion + index
        return min(in_latent, expanded)


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """A window of plain tokens, and before it one entry for every `ratio` tokens; keys are the values."""

    heads: int
    head_dim: int
    q_lora_rank: int
    window: int
    ratio: int  # 0: only the window
    output_groups: int
    output_rank: int
    index: SparseIndex | None = None  # chooses among the entries; its `top` counts entries
    overlapping: bool = False  # an entry covers its own tokens and those before

    @property
    def _spread(self) -> int:
        """Input features per feature of an entry."""
        return 2 if self.overlapping else 1

    def input_matrix(self, hidden: int) -> int:
        queries = self.q_lora_rank * (hidden + self.heads * self.head_dim)
        total = queries + hidden * self.head_dim
        if self.ratio:
            total += 2 * hidden * self._spread * self.head_dim
        if self.index is not None:
            total += 2 * hidden * self._spread * self.index.head_dim
            total += self.q_lora_rank * self.index.heads * self.index.head_dim + hidden * self.index.heads
        return total

    def output_matrix(self, hidden: int) -> int:
        return self.output_rank * (self.heads * self.head_dim + self.output_groups * hidden)

    def vectors(self, hidden: int) -> int:
        del hidden
        total = self.q_lora_rank + self.head_dim + self.heads
        if self.ratio:
            total += self.ratio * self._spread * self.head_dim + self.head_dim
        if self.index is not None:
            total += self.ratio * self._spread * self.index.head_dim + self.index.head_dim
        return total

    def entries(self, context: float) -> float:
        return context / self.ratio if self.ratio else 0.0

    def flops(self, tokens: int, context: int) -> int:
        pair = 4 * self.heads * self.head_dim
        total = pair * attended_pairs(tokens, context, self.window)
        if self.ratio:
            reach = self.index.top * self.ratio if self.index else None
            total += pair * attended_pairs(tokens, context, reach) // self.ratio
        if self.index is not None:
            total += self.index.flops(tokens, context) // self.ratio
        return total


Mixer = Attention | LatentAttention | LinearAttention | Mamba2 | CompressedAttention


def attended_pairs(tokens: int, context: int, window: int | None) -> int:
    """Σ i=1…tokens min(context + i, window), in closed form."""
    growing = tokens if window is None else max(0, min(tokens, window - context))
    full = (tokens - growing) * (window or 0)
    return growing * context + growing * (growing + 1) // 2 + full


def _chunked_pairs(tokens: int, chunk: int) -> int:
    """Causal pairs among the first `tokens` tokens when attention restarts every `chunk` of them."""
    whole, left = divmod(tokens, chunk)
    return whole * chunk * (chunk + 1) // 2 + left * (left + 1) // 2
