"""The kinds of attention as counts: weights, bytes kept per sequence, bytes read and FLOPs per step.

Used by `shapes.shape`, filled in by the readers. All kinds have the same methods: `input_matrix` and
`output_matrix` (weights before and after the mixing of tokens), `vectors` (norms, biases), `kept_bytes`,
`read_bytes` and `flops` of the mixing itself. Holds no tensors and reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.models.spec.model_spec import attended_pairs

INDEX_SCALE_BYTES = 4  # for each 8-bit index key of sparse attention
STATE_BYTES = 4  # recurrent states are float32 unless the config says otherwise
CONVOLUTION_BYTES = 2


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """Small heads that score all tokens, so that attention reads only the best `top` of them."""

    heads: int
    head_dim: int
    top: int  # tokens
    owns_weights: bool = True  # False: this layer reuses the choice of an earlier one
    wide_keys: bool = False  # index keys at 16 bits; otherwise at 8, whatever the cache's type is

    @property
    def key_bytes(self) -> int:
        if not self.owns_weights:
            return 0
        return 2 * self.head_dim if self.wide_keys else self.head_dim + INDEX_SCALE_BYTES

    def flops(self, tokens: int, context: int) -> int:
        pair = 2 * self.heads * self.head_dim if self.owns_weights else 0
        return pair * attended_pairs(tokens, context, None)


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Softmax attention over keys and values, whole or within a window."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None = head_dim
    window: int | None = None
    chunked: bool = False  # the window does not slide: it restarts every `window` tokens
    qkv_bias: bool = False
    output_bias: bool = False
    # One norm shared by all heads, or one as wide as all of them.
    qk_norm: Literal["", "head", "projection"] = ""
    output_gate: bool = False  # q is twice as wide: half of it gates the output
    head_gate: bool = False  # one gate per head
    keys_are_values: bool = False  # no projection for values
    sinks: bool = False  # a learned logit per head
    index: SparseIndex | None = None

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kv_elements(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_width)

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
        total += {"": 0, "head": 2 * self.head_dim, "projection": self.heads * self.head_dim + keys}[
            self.qk_norm
        ]
        total += 2 * self.index.head_dim if self.index else 0
        return total + (self.heads if self.sinks else 0)

    def tokens_held(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def tokens_seen(self, context: int) -> int:
        """The tokens that the newest of `context` tokens attends to, itself included."""
        if self.chunked and self.window is not None:
            return (context - 1) % self.window + 1 if context else 0
        return self.tokens_held(context)

    def kept_bytes(self, context: int, kv_bytes: float) -> float:
        index = context * self.index.key_bytes if self.index else 0
        return self.tokens_held(context) * self.kv_elements * kv_bytes + index

    def read_bytes(self, context: int, kv_bytes: float) -> float:
        if self.index is not None:
            chosen = min(context, self.index.top)
            return chosen * self.kv_elements * kv_bytes + context * self.index.key_bytes
        return self.tokens_seen(context) * self.kv_elements * kv_bytes

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
    def kv_elements(self) -> int:
        return self.kv_lora_rank + self.rope_dim

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

    def kept_bytes(self, context: int, kv_bytes: float) -> float:
        return context * (self.kv_elements * kv_bytes + (self.index.key_bytes if self.index else 0))

    def read_bytes(self, context: int, kv_bytes: float) -> float:
        if self.index is None:
            return context * self.kv_elements * kv_bytes
        return min(context, self.index.top) * self.kv_elements * kv_bytes + context * self.index.key_bytes

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
class LinearAttention:
    """Gated delta net: every token updates a matrix per head; no growing cache."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: int  # taps
    state_bytes: int = STATE_BYTES
    decay_rank: int | None = None  # Kimi: every key channel has its own decay, through a matrix this narrow

    @property
    def kv_elements(self) -> int:
        return 0

    @property
    def channels(self) -> int:
        """The channels of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def input_matrix(self, hidden: int) -> int:
        gate = self.value_heads * self.value_dim
        plain = hidden * (self.channels + gate + self.value_heads)
        if self.decay_rank is None:
            return plain + hidden * self.value_heads
        return plain + self.decay_rank * (hidden + self.value_heads * self.key_dim)

    def output_matrix(self, hidden: int) -> int:
        return hidden * self.value_heads * self.value_dim

    def vectors(self, hidden: int) -> int:
        del hidden
        decays = self.value_heads * (1 if self.decay_rank is None else self.key_dim)
        return self.channels * self.convolution + self.value_heads + decays + self.value_dim

    def kept_bytes(self, context: int, kv_bytes: float) -> float:
        del context, kv_bytes
        state = self.value_heads * self.key_dim * self.value_dim * self.state_bytes
        return state + self.channels * (self.convolution - 1) * CONVOLUTION_BYTES

    def read_bytes(self, context: int, kv_bytes: float) -> float:
        """The state is read and written back."""
        return 2 * self.kept_bytes(context, kv_bytes)

    def flops(self, tokens: int, context: int) -> int:
        """A token decays the state, reads it at its key, corrects it, and reads it at its query."""
        del context
        return tokens * self.value_heads * 7 * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A selective state space: per head a state of head_dim · state_size, updated by every token."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    convolution: int  # taps
    convolution_bias: bool = True
    projection_bias: bool = False
    state_bytes: int = STATE_BYTES

    @property
    def kv_elements(self) -> int:
        return 0

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    def input_matrix(self, hidden: int) -> int:
        return hidden * (self.inner + self.channels + self.heads)

    def output_matrix(self, hidden: int) -> int:
        return hidden * self.inner

    def vectors(self, hidden: int) -> int:
        convolution = self.channels * (self.convolution + (1 if self.convolution_bias else 0))
        biases = (self.inner + self.channels + self.heads + hidden) if self.projection_bias else 0
        return convolution + 3 * self.heads + self.inner + biases

    def kept_bytes(self, context: int, kv_bytes: float) -> float:
        del context, kv_bytes
        state = self.inner * self.state_size * self.state_bytes
        return state + self.channels * (self.convolution - 1) * CONVOLUTION_BYTES

    def read_bytes(self, context: int, kv_bytes: float) -> float:
        """The state is read and written back."""
        return 2 * self.kept_bytes(context, kv_bytes)

    def flops(self, tokens: int, context: int) -> int:
        """A token decays the state, adds to it, and reads it."""
        del context
        return tokens * 5 * self.inner * self.state_size


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
    def kv_elements(self) -> int:
        return self.head_dim

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

    def kept_bytes(self, context: int, kv_bytes: float) -> float:
        tokens = min(context, self.window) + self.entries(context)
        index = self.entries(context) * self.index.key_bytes if self.index else 0.0
        return tokens * self.head_dim * kv_bytes + index

    def read_bytes(self, context: int, kv_bytes: float) -> float:
        entries = self.entries(context)
        chosen = min(entries, self.index.top) if self.index else entries
        index = entries * self.index.key_bytes if self.index else 0.0
        return (min(context, self.window) + chosen) * self.head_dim * kv_bytes + index

    def flops(self, tokens: int, context: int) -> int:
        pair = 4 * self.heads * self.head_dim
        total = pair * attended_pairs(tokens, context, self.window)
        if self.ratio:
            reach = self.index.top * self.ratio if self.index else None
            total += pair * attended_pairs(tokens, context, reach) // self.ratio
        if self.index is not None:
            total += self.index.flops(tokens, context) // self.ratio
        return total


Attention = FullAttention | LatentAttention | LinearAttention | Mamba2 | CompressedAttention


def _chunked_pairs(tokens: int, chunk: int) -> int:
    """Causal pairs among the first `tokens` tokens when attention restarts every `chunk` of them."""
    whole, left = divmod(tokens, chunk)
    return whole * chunk * (chunk + 1) // 2 + left * (left + 1) // 2
