"""How much of a traffic's prompts occurred before, and how much of that a cache would have kept.

Pure functions. `decision_gates` uses it for the prefix cache, `break_even` for a provider's discount.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from ridgeline.lab.traffic.request import PlannedRequest, Traffic


@dataclass(frozen=True, slots=True)
class Sharing:
    """Of `input_tokens`, those whose KV an earlier request had computed."""

    known: bool  # the traffic has prefix information; otherwise 0 means "unknown"
    input_tokens: int
    shared_tokens: int

    @property
    def share(self) -> float:
        return self.shared_tokens / self.input_tokens if self.input_tokens else 0.0


def sharing(traffic: Traffic, *, kept_s: float = math.inf, cache_tokens: float = math.inf) -> Sharing:
    """Replay the prompts through a cache that evicts entries unused for `kept_s` or beyond its capacity.

    The cache holds prompts, not answers, except within a conversation: its next prompt contains them.
    """
    known = is_known(traffic)
    cache = _Cache(kept_s, cache_tokens, traffic.prefix_block_tokens)
    shared = sum(cache.take(request) for request in traffic.requests)
    return Sharing(known, traffic.input_tokens, shared)


def is_known(traffic: Traffic) -> bool:
    """Whether the traffic has prefix information."""
    return traffic.prefix_block_tokens > 0 or any(r.conversation is not None for r in traffic.requests)


class _Cache:
    def __init__(self, kept_s: float, most_tokens: float, block_tokens: int) -> None:
        self.kept_s, self.most_tokens, self.block_tokens = kept_s, most_tokens, block_tokens
        self.used_at: OrderedDict[object, tuple[float, int]] = (
            OrderedDict()
        )  # last use and tokens, oldest first
        self.tokens = 0

    def take(self, request: PlannedRequest) -> int:
        """Tokens of the prompt found; the whole prompt is cached afterwards."""
        found = self._found_blocks(request)
        if request.conversation is not None:
            before = self.used_at.get(request.conversation)
            if before is not None and self._is_kept(before, request.at) and request.turn > 0:
                found = max(found, before[1])
            self._keep(request.conversation, request.at, request.input_tokens + request.output_tokens)
        return min(found, max(0, request.input_tokens - 1))  # the last token is always computed

    def _found_blocks(self, request: PlannedRequest) -> int:
        found, beginning, is_alike = 0, 0, True
        for block in request.prefix:
            beginning = hash((beginning, block))
            before = self.used_at.get(beginning)
            is_alike = is_alike and before is not None and self._is_kept(before, request.at)
            found += self.block_tokens if is_alike else 0
            self._keep(beginning, request.at, self.block_tokens)
        return found

    def _is_kept(self, before: tuple[float, int], now: float) -> bool:
        return now - before[0] <= self.kept_s

    def _keep(self, key: object, now: float, tokens: int) -> None:
        _, held = self.used_at.pop(key, (0.0, 0))
        self.used_at[key] = (now, tokens)
        self.tokens += tokens - held
        while self.tokens > self.most_tokens and self.used_at:
            _, (_, gone) = self.used_at.popitem(last=False)
            self.tokens -= gone
