"""Usage: the usage of one request, and the source of the count."""

from __future__ import annotations

from typing import Literal

import msgspec

# reported: the upstream's own count, in its answer or asked for afterwards. counted: the billed quantity was
# measured here (seconds of audio, characters of speech). estimated: the upstream reported nothing, or only a
# part: docs/gateway-accounting.md has the formula. none: nothing was computed.
UsageSource = Literal["none", "reported", "counted", "estimated"]


class Usage(msgspec.Struct):
    """Tokens, unless a name says otherwise. `cached`, `cache_write` and `audio_in` are parts of `tokens_in`,
    `reasoning` and `audio_out` of `tokens_out`.
    """

    tokens_in: int = 0
    tokens_cached: int = 0  # read from the upstream's prefix cache
    tokens_cache_write: int = 0  # written to it, if that has its own price
    tokens_out: int = 0
    tokens_reasoning: int = 0
    source: UsageSource = "none"
    audio_in: int = 0
    audio_out: int = 0
    audio_ms: int = 0  # of sound that was read, in milliseconds
    characters: int = 0  # of text that was spoken
