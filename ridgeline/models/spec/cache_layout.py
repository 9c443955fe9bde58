"""CacheLayout: what a sequence keeps between steps, by groups of layers. KV bytes are computed here only.

A group is the layers with the same mixer: keys and values for every token (paged) or for a window of them,
latent vectors, compressed entries, or a state of constant size. The memory plan, the planner, `models
inspect` and the benchmarks ask here. Pure arithmetic: holds no tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ridgeline.models.spec.mixers import Attention, CompressedAttention, LatentAttention, Mixer, SparseIndex
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.recurrences import LinearAttention, Mamba2

INDEX_SCALE_BYTES = 4  # for each 8-bit index key of sparse attention
CONVOLUTION_BYTES = 2

CacheKind = Literal["paged", "window", "latent", "compressed", "state"]


@dataclass(frozen=True, slots=True)
class CacheElement:
    """How a backend stores a key or a value."""

    bytes: float = 2
    scale_bytes: int = 0  # for each token, KV head, and key or value
    multiple: int = 1  # heads are padded to a multiple of this width

    def head_bytes(self, width: int) -> float:
        padded = -(-width // self.multiple) * self.multiple
        return padded * self.bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers with one mixer."""

    mixer: Mixer
    layers: int
    element: CacheElement = CacheElement()

    @property
    def kind(self) -> CacheKind:
        if isinstance(self.mixer, Attention):
            return "paged" if self.mixer.window is None else "window"
        if isinstance(self.mixer, LatentAttention):
            return "latent"
        return "compressed" if isinstance(self.mixer, CompressedAttention) else "state"

    @property
    def token_bytes(self) -> float:
        """Written for one token, in all layers of the group; 0 for states."""
        return self.layers * self._token_bytes()

    def kept(self, context: int, *, whole_windows: bool = False) -> float:
        """Kept for a sequence of `context` tokens. `whole_windows`: windowed layers keep all of them."""
        mixer = self.mixer
        if isinstance(mixer, Attention):
            held = context if whole_windows else mixer.tokens_held(context)
            kept = held * self._token_bytes() + context * index_key_bytes(mixer.index)
        elif isinstance(mixer, LatentAttention):
            kept = context * (self._token_bytes() + index_key_bytes(mixer.index))
        elif isinstance(mixer, CompressedAttention):
            entries = mixer.entries(context)
            tokens = min(context, mixer.window) + entries
            kept = tokens * self._token_bytes() + entries * index_key_bytes(mixer.index)
        else:
            kept = _state_bytes(mixer)
        return self.layers * kept

    def read(self, context: int) -> float:
        """Read by the decode step of a sequence of `context` tokens, the new one included."""
        mixer = self.mixer
        if isinstance(mixer, Attention | LatentAttention):
            seen = mixer.tokens_seen(context) if isinstance(mixer, Attention) else context
            chosen = seen if mixer.index is None else min(context, mixer.index.top)
            read = chosen * self._token_bytes() + context * index_key_bytes(mixer.index)
        elif isinstance(mixer, CompressedAttention):
            entries = mixer.entries(context)
            chosen_entries = min(entries, mixer.index.top) if mixer.index else entries
            tokens = min(context, mixer.window) + chosen_entries
            read = tokens * self._token_bytes() + entries * index_key_bytes(mixer.index)
        else:
            read = 2 * _state_bytes(mixer)  # read and written back
        return self.layers * read

    def _token_bytes(self) -> float:
        mixer, element = self.mixer, self.element
        if isinstance(mixer, Attention):
            heads = element.head_bytes(mixer.head_dim) + element.head_bytes(mixer.value_width)
            return mixer.kv_heads * heads
        if isinstance(mixer, LatentAttention):
            return element.head_bytes(mixer.kv_lora_rank + mixer.rope_dim)
        return element.head_bytes(mixer.head_dim) if isinstance(mixer, CompressedAttention) else 0.0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[CacheGroup, ...]

    @classmethod
    def of(cls, spec: ModelSpec, element: CacheElement | float = 2) -> CacheLayout:
        """`element`: or the bytes of one number."""
        stored = element if isinstance(element, CacheElement) else CacheElement(element)
        counts = Counter(layer.mixer for layer in spec.layers if layer.mixer is not None)
        return cls(tuple(CacheGroup(mixer, layers, stored) for mixer, layers in counts.items()))

    @property
    def token_bytes(self) -> int:
        """Added by one more token while every window has room: growing caches only, no constant state."""
        return round(self._kept(2) - self._kept(1))

    def block_bytes(self, block_tokens: int) -> int:
        return block_tokens * self.token_bytes

    def kept(self, context: int, *, whole_windows: bool = False) -> int:
        """Kept for a sequence of `context` tokens: caches, latents, and states of constant size, kept(0).

        `whole_windows`: for engines that keep windowed layers in full, like this one.
        """
        return round(self._kept(context, whole_windows))

    def read(self, context: int) -> int:
        """Read by the decode step of a sequence of `context` tokens, the new one included."""
        return round(sum(group.read(context) for group in self.groups))

    def _kept(self, context: int, whole_windows: bool = False) -> float:
        return sum(group.kept(context, whole_windows=whole_windows) for group in self.groups)


def index_key_bytes(index: SparseIndex | None) -> int:
    """Of the small key with which sparse attention scores a token."""
    if index is None or not index.owns_weights:
        return 0
    return 2 * index.head_dim if index.wide_keys else index.head_dim + INDEX_SCALE_BYTES


def _state_bytes(mixer: LinearAttention | Mamba2) -> int:
    if isinstance(mixer, LinearAttention):
        state = mixer.value_heads * mixer.key_dim * mixer.value_dim
    else:
        state = mixer.inner * mixer.state_size
    return state * mixer.state_bytes + mixer.channels * (mixer.convolution - 1) * CONVOLUTION_BYTES
