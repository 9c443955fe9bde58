"""What cannot be known of an upstream, and decides how a request is translated for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import check_range, option


@dataclass(frozen=True, slots=True)
class DialectConfig:
    default_max_tokens: int = option(
        8192, "sent to an Anthropic upstream, which needs a limit, for a client that named none"
    )
    thinking: Literal["adaptive", "budget"] = option(
        "adaptive",
        "how reasoning_effort is written for Anthropic: adaptive with an effort, or a budget of tokens as"
        " models before Claude 4.6 take it",
    )
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = option(
        "max_completion_tokens", "what an OpenAI upstream calls the limit; older servers take max_tokens"
    )
    send_reasoning: bool = option(
        False, "send earlier thinking to an OpenAI upstream as reasoning_content; the hosted one refuses it"
    )

    def __post_init__(self) -> None:
        check_range(self, "[dialects]", 1, 10_000_000, "default_max_tokens")
