"""Mixers with a state of constant size per sequence: linear attention and state spaces.

Used by `mixers`, filled in by the readers; the methods are those of all mixers. Planned, not served.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE_BYTES = 4  # recurrent states are float32 unless the config says otherwise


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

    def flops(self, tokens: int, context: int) -> int:
        """A token decays the state, adds to it, and reads it."""
        del context
        return tokens * 5 * self.inner * self.state_size
