"""A Usage in the form of each family."""

from __future__ import annotations

from typing import Any

from ridgeline.gateway.accounting.usage import Usage


def chat_usage(usage: Usage) -> dict[str, Any]:
    inner = {"cached_tokens": usage.tokens_cached}
    if usage.tokens_cache_write:
        inner["cache_write_tokens"] = usage.tokens_cache_write
    return {
        "prompt_tokens": usage.tokens_in,
        "completion_tokens": usage.tokens_out,
        "total_tokens": usage.tokens_in + usage.tokens_out,
        "prompt_tokens_details": inner,
        "completion_tokens_details": {"reasoning_tokens": usage.tokens_reasoning},
    }


def message_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": max(usage.tokens_in - usage.tokens_cached - usage.tokens_cache_write, 0),
        "cache_creation_input_tokens": usage.tokens_cache_write,
        "cache_read_input_tokens": usage.tokens_cached,
        "output_tokens": usage.tokens_out,
        "output_tokens_details": {"thinking_tokens": usage.tokens_reasoning},
    }


def response_usage(usage: Usage) -> dict[str, Any]:
    inner = {"cached_tokens": usage.tokens_cached, "cache_write_tokens": usage.tokens_cache_write}
    return {
        "input_tokens": usage.tokens_in,
        "input_tokens_details": inner,
        "output_tokens": usage.tokens_out,
        "output_tokens_details": {"reasoning_tokens": usage.tokens_reasoning},
        "total_tokens": usage.tokens_in + usage.tokens_out,
    }
