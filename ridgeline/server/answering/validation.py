"""Converts a decoded body to what the engine takes: messages, sampling parameters, lengths that fit.

Everything the engine would refuse is refused here first, under the client's field name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.link.messages import Hello
from ridgeline.engine.schedule.request import MAX_TOP_LOGPROBS, SamplingParams
from ridgeline.server.answering.tools import check_calls
from ridgeline.server.errors import BadRequest, ContextTooLong
from ridgeline.server.http.limits import (
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_IDS,
)
from ridgeline.server.openai_api.request_bodies import GenerationRequest, Message
from ridgeline.web.sampling_fields import SAMPLING

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation as the chat template expects it: plain roles, plain text."""
    if not messages:
        raise BadRequest("messages", "at least one message is needed")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise BadRequest(f"{path}.role", f"unknown role {message.role[:64]!r}; known are {', '.join(ROLES)}")
    check_calls(message, path)
    if message.function_call is not None:
        message_text = "is not accepted here; write it as tool_calls"
        raise BadRequest(f"{path}.function_call", message_text, "unsupported_field")
    # An assistant message with tool calls may have no text.
    silent = message.content is None and message.tool_calls
    rendered: dict[str, Any] = {
        "role": ROLES[message.role],
        "content": None if silent else _text(message, path),
    }
    if message.name is not None:
        rendered["name"] = message.name
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
            for call in message.tool_calls
        ]
    return rendered


def _text(message: Message, path: str) -> str:
    if message.content is None:
        raise BadRequest(f"{path}.content", "this field is required", "missing_field")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            where = f"{path}.content[{i}].type"
            raise BadRequest(
                where, f"{part.type!r} parts are not supported yet; only text is", "unsupported_field"
            )
        if part.text is None:
            raise BadRequest(f"{path}.content[{i}].text", "this field is required", "missing_field")
        texts.append(part.text)
    if not texts:
        raise BadRequest(f"{path}.content", "at least one part is needed")
    return "\n".join(texts)


def sampling_params(
    body: GenerationRequest,
    *,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
    logprobs_field: str,
    prompt_logprobs: int | None,
    engine: Hello,
    grammar: Grammar | None = None,
    show_special: bool = False,
) -> SamplingParams:
    """The body's options; absent and null mean the model's default, else the engine's.

    The named fields differ between endpoints.
    """
    vocab_size = engine.vocab_size
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise BadRequest("stop", f"at most {MAX_STOPS} stop strings, got {len(stops)}")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise BadRequest("stop", f"at most {MAX_STOP_CHARACTERS} characters each")
    stop_ids = tuple(body.stop_token_ids or ())
    if len(stop_ids) > MAX_TOKEN_IDS:
        raise BadRequest("stop_token_ids", f"at most {MAX_TOKEN_IDS} token ids, got {len(stop_ids)}")
    check_token_ids(stop_ids, "stop_token_ids", vocab_size)
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest(logprobs_field, f"must be between 0 and {MAX_TOP_LOGPROBS}, got {logprobs}")
    given = {**engine.sampling.values(), "max_tokens": max_tokens}
    for name in _SAME_NAME:
        if (value := getattr(body, name)) is not None:  # null is OpenAI's way to say "default"
            given[name] = value
    if given.get("top_k") == -1:  # vLLM's way to turn it off
        given["top_k"] = 0
    try:
        return SamplingParams(
            **given,
            logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
            stop=stops,
            stop_token_ids=stop_ids,
            include_stop=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            show_special=show_special or body.skip_special_tokens is False,
            grammar=grammar,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except InvalidRequest as error:
        field = max_tokens_field if error.field == "max_tokens" else error.field
        raise BadRequest(field, error.message) from None


_SAME_NAME = ("n", "min_tokens", *SAMPLING)


def with_default_length(params: SamplingParams, engine: Hello) -> SamplingParams:
    """For a request without a limit: the model's limit, and at least min_tokens. The engine stops at its
    context.
    """
    limit = engine.sampling.max_tokens
    if limit is None or params.max_tokens is not None:
        return params
    return replace(params, max_tokens=max(limit, params.min_tokens))


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(biases) > MAX_TOKEN_IDS:
        raise BadRequest("logit_bias", f"at most {MAX_TOKEN_IDS} tokens, got {len(biases)}")
    by_id = {}
    for key, bias in biases.items():
        # str.isdecimal alone accepts digits of other scripts.
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise BadRequest(f"logit_bias.{key}", f"{key!r} is not a token id")
        check_token_ids([int(key)], f"logit_bias.{key}", vocab_size)
        by_id[int(key)] = bias
    return by_id


def check_token_ids(ids: Sequence[int], param: str, vocab_size: int) -> None:
    for id in (min(ids), max(ids)) if ids else ():  # a client may send millions
        if not 0 <= id < vocab_size:
            raise BadRequest(param, f"token id {id} is not in the vocabulary (0 to {vocab_size - 1})")


def check_context(prompt_tokens: int, params: SamplingParams, max_context: int, prompt_field: str) -> None:
    """The prompt must leave room for one token and for `min_tokens`. The engine lowers `max_tokens` to the
    remaining context; the answer then ends with the finish reason `length`.
    """
    if prompt_tokens == 0:
        raise BadRequest(prompt_field, "the prompt has no tokens")
    if prompt_tokens >= max_context:
        raise ContextTooLong(prompt_field, prompt_tokens, max_context)
    if prompt_tokens + params.min_tokens > max_context:
        message = f"{params.min_tokens} tokens do not fit: the context leaves {max_context - prompt_tokens}"
        raise BadRequest("min_tokens", message, "context_length_exceeded")


def check_stream_options(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options", "only allowed together with stream: true")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise BadRequest("stream_options.continuous_usage_stats", "only allowed together with include_usage")
    if body.cache_salt == "":
        raise BadRequest("cache_salt", "must not be empty; leave it out to share the common cache")
    if body.cache_salt is not None and len(body.cache_salt) > MAX_SALT_CHARACTERS:
        raise BadRequest("cache_salt", f"at most {MAX_SALT_CHARACTERS} characters")
