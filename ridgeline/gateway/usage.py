"""Usage: what one request used, as its upstream counted it, and who says so."""

from __future__ import annotations

from typing import Literal

import msgspec

# reported: the upstream's own count, in its answer or asked for afterwards. counted: what came through here
# was counted, for upstreams that say nothing of an answer that was broken off. none: nothing was computed.
UsageSource = Literal["none", "reported", "counted"]


class Usage(msgspec.Struct):
    """Tokens. `cached` and `cache_write` are parts of `tokens_in`, `reasoning` is a part of `tokens_out`."""

    tokens_in: int = 0
    tokens_cached: int = 0  # read from the upstream's prefix cache
    tokens_cache_write: int = 0  # written to it, where that has a price of its own
    tokens_out: int = 0
    tokens_reasoning: int = 0
    source: UsageSource = "none"
