"""Settings for translating requests to an upstream, which cannot be detected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import check_range, option


@dataclass(frozen=True, slots=True)
class DialectConfig:
    default_max_tokens: int = option(
        8192, "max_tokens for an Anthropic upstream, which requires it, if the client gave none"
    )
    thinking: Literal["adaptive", "budget"] = option(
        "adaptive",
        "how reasoning_effort is sent to Anthropic: adaptive with an effort, or a budget of tokens, as"
        " models before Claude 4.6 need",
    )
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = option(
        "max_completion_tokens", "what an OpenAI upstream calls the limit; older servers take max_tokens"
    )
    send_reasoning: bool = option(
        False, "send earlier thinking to an OpenAI upstream as reasoning_content; api.openai.com refuses it"
    )

    def __post_init__(self) -> None:
        check_range(self, "[dialects]", 1, 10_000_000, "default_max_tokens")
