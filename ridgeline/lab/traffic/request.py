"""PlannedRequest and Traffic: what to send when. Plain data, read by bench, simulator and planner.

Only lengths and times; `prompts` makes the words. Times are seconds from the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One planned request.

    at:            when it is due; 0 in closed loops. Later turns of a conversation carry the moment of its
                   first, and are due `think_s` after the answer before them
    prefix:        ids of the prompt's first blocks, `Traffic.prefix_block_tokens` tokens each, from the
                   beginning: equal ids up to a place = equal tokens up to there. All else is its own
    conversation:  requests with the same number are turns of one conversation, in their order; each prompt
                   then holds the prompts and answers before it, and `input_tokens` counts all of that
    said:          the prompt itself, or its messages, where the user gave them; `input_tokens` is then 0: the
                   server counts them
    """

    at: float
    input_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    conversation: int | None = None
    turn: int = 0
    think_s: float = 0.0
    said: str | tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in time order, and their source."""

    name: str
    requests: tuple[PlannedRequest, ...]
    prefix_block_tokens: int = 0  # 0: no prefixes are known
    notes: tuple[str, ...] = field(default=())  # what was left out, clipped or spread

    @property
    def duration_s(self) -> float:
        """From the start to the last arrival."""
        return max((request.at for request in self.requests), default=0.0)

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)
