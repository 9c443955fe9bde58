"""From a body's messages, text or ids to token ids that fit."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.answering.validation import check_context, check_token_ids
from ridgeline.server.errors import BadRequest, ContextTooLong
from ridgeline.server.http.limits import MAX_DETOKENIZED
from ridgeline.server.openai_api.request_bodies import ChatRequest, CompletionRequest, TokenizeRequest

MAX_CHOICES = 1024
CHARACTERS_PER_TOKEN = 256  # the longest known tokens, runs of spaces, have half of this
RESERVED_VARIABLES = ("self", "messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one engine request. `text` is shown by an echo."""

    ids: list[int]
    text: str = ""


def rendered_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    body: ChatRequest | TokenizeRequest,
    own_variables: dict[str, Any] | None = None,
) -> str:
    """The conversation rendered by the model's template. The client's variables take precedence over ours."""
    variables = body.chat_template_kwargs or {}
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise BadRequest(
                f"chat_template_kwargs.{name}", "this name is reserved by the template; choose another"
            )
    opening = body.add_generation_prompt is not False
    given = {**(own_variables or {}), **variables}
    try:
        if isinstance(body, ChatRequest) and body.continue_final_message:
            return _continued(tokenizer, messages, tools, body, given)
        return tokenizer.render_chat(messages, tools, add_generation_prompt=opening, **given)
    except RecursionError:
        raise BadRequest("chat_template_kwargs", "nested too deeply") from None


def _continued(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    body: ChatRequest,
    variables: dict[str, Any],
) -> str:
    """Up to the end of the last message's text, without what the template writes after it."""
    *before, last = messages
    path = f"messages[{len(body.messages) - 1}]"
    if body.add_generation_prompt:
        raise BadRequest("add_generation_prompt", "cannot be combined with continue_final_message")
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        raise BadRequest(path, "only an assistant message without tool calls can be continued")
    mark = secrets.token_hex(16)  # cannot occur in the conversation
    marked = [*before, {**last, "content": last["content"] + mark}]
    rendered = tokenizer.render_chat(marked, tools, add_generation_prompt=False, **variables)
    head, _, _ = rendered.partition(mark)
    if rendered.count(mark) != 1 or not head.endswith(last["content"].lstrip()):
        raise BadRequest(
            path, "this model's template changes assistant messages, so they cannot be continued"
        )
    return head


def completion_prompts(client: AsyncClient, body: CompletionRequest) -> list[Prompt]:
    """One Prompt for a text or a list of ids, several for a list of either."""
    given = body.prompt
    if isinstance(given, str):
        return [_text_prompt(client, given, "prompt", body)]
    if not given:
        raise BadRequest("prompt", "the list is empty")
    if len(given) * (body.n or 1) > MAX_CHOICES and not isinstance(given[0], int):
        raise BadRequest("prompt", f"{len(given)} prompts × n choices; at most {MAX_CHOICES} in one request")
    if all(isinstance(item, int) for item in given):
        return [_id_prompt(client, given, "prompt", body)]
    if all(isinstance(item, str) for item in given):
        return [_text_prompt(client, str(item), f"prompt[{i}]", body) for i, item in enumerate(given)]
    if all(isinstance(item, list) for item in given):
        return [_id_prompt(client, item, f"prompt[{i}]", body) for i, item in enumerate(given)]
    raise BadRequest("prompt", "a list must hold only texts, only token ids, or only lists of token ids")


def text_ids(client: AsyncClient, text: str, field: str, add_special: bool) -> list[int]:
    """The ids of a prompt that may fit. A prompt that cannot fit is refused with an estimated token count,
    without encoding it.
    """
    context = client.hello.max_context
    if len(text) > context * CHARACTERS_PER_TOKEN:
        raise ContextTooLong(field, math.ceil(len(text) / CHARACTERS_PER_TOKEN), context)
    tokens = client.tokenizer.tokens_beyond(text, context)
    if tokens is not None:
        raise ContextTooLong(field, tokens, context)
    return client.tokenizer.encode(text, add_special=add_special)


def counted_ids(client: AsyncClient, text: str, field: str, add_special: bool) -> list[int]:
    """The ids of a text to be counted or shown; it may be longer than the context."""
    most = max(client.hello.max_context, MAX_DETOKENIZED)
    tokens = client.tokenizer.tokens_beyond(text, most)
    if tokens is not None:
        message = f"about {tokens} tokens; at most {most} are counted in one request"
        raise BadRequest(field, message, "context_length_exceeded")
    return client.tokenizer.encode(text, add_special=add_special)


def check_prompts(client: AsyncClient, prompts: list[Prompt], params: SamplingParams, field: str) -> None:
    for i, prompt in enumerate(prompts):
        where = field if len(prompts) == 1 else f"{field}[{i}]"
        check_context(len(prompt.ids), params, client.hello.max_context, where)


def _text_prompt(client: AsyncClient, text: str, field: str, body: CompletionRequest) -> Prompt:
    return Prompt(text_ids(client, text, field, body.add_special_tokens is not False), text)


def _id_prompt(client: AsyncClient, ids: Any, field: str, body: CompletionRequest) -> Prompt:
    check_token_ids(ids, field, client.hello.vocab_size)
    return Prompt(ids, client.tokenizer.decode(ids, skip_special=True) if body.echo else "")
