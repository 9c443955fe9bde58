"""Converts Ollama's bodies to chat and completion requests: one path to the engine for all. Called by
`handlers`.

Errors in those are reported under the client's field names (`with_client_names`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ridgeline.server.errors import BadRequest, ContextTooLong
from ridgeline.server.ollama_api.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from ridgeline.server.openai_api.request_bodies import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    Message,
    MessageToolCall,
    ResponseFormat,
)
from ridgeline.server.served_models import ServedModels

T = TypeVar("T")

LATEST = ":latest"
EFFORTS = ("low", "medium", "high")
NO_LIMIT = 2**31 - 1  # the context is the limit
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
_RENAMED = (
    (re.compile(r"response_format(\.json_schema)?(\.schema)?"), "format"),
    (re.compile(r"guided_json"), "format"),
    (re.compile(r"max_(completion_)?tokens"), "options.num_predict"),
    (re.compile(r"repetition_penalty"), "options.repeat_penalty"),
    (re.compile(rf"({'|'.join(_SAME)})\b"), r"options.\1"),
    (re.compile(r"reasoning_effort|chat_template_kwargs"), "think"),
)


def own_name(served_models: ServedModels, name: str | None) -> str | None:
    """Clients write `name:latest` for a model served as `name`."""
    served = {each for model in served_models.models for each in model.names}
    return name if name is None or name in served else name.removesuffix(LATEST)


def with_client_names(work: Callable[[], T]) -> T:
    """Run `work`; report its errors under the client's field names."""
    try:
        return work()
    except ContextTooLong:
        raise
    except BadRequest as error:
        param = error.reply.param or ""
        for pattern, ours in _RENAMED:
            if pattern.match(param):
                told = error.reply.message.removeprefix(f"{param}: ")
                raise BadRequest(pattern.sub(ours, param, count=1), told, error.reply.code) from None
        raise


def chat_request(served_models: ServedModels, body: OllamaChatRequest) -> ChatRequest:
    return ChatRequest(
        messages=_messages(body.messages or []), tools=body.tools or None, **_common(served_models, body)
    )


def generate_request(served_models: ServedModels, body: OllamaGenerateRequest) -> ChatRequest:
    """The prompt as a user message, as in Ollama's templates."""
    system = [Message(role="system", content=body.system)] if body.system else []
    prompt = Message(role="user", content=body.prompt or "")
    return ChatRequest(messages=[*system, prompt], **_common(served_models, body))


def raw_request(served_models: ServedModels, body: OllamaGenerateRequest) -> CompletionRequest:
    if body.system:
        raise BadRequest("system", "cannot be combined with raw: true, which has no template for it")
    if body.think is not None:
        raise BadRequest("think", "cannot be combined with raw: true, which has no template for it")
    options = _options(body)
    limit = options.pop("max_completion_tokens")
    return CompletionRequest(
        model=own_name(served_models, body.model),
        prompt=body.prompt or "",
        stream=body.stream is not False,
        max_tokens=NO_LIMIT if limit is None else limit,
        guided_json=_schema(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        include_timing=True,
        **options,
    )


def _common(served_models: ServedModels, body: OllamaRequest) -> dict[str, Any]:
    schema = _schema(body)
    format = None
    if schema is not None:
        format = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=schema))
    return {
        "model": own_name(served_models, body.model),
        "stream": body.stream is not False,
        "response_format": format,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "include_timing": True,
        **_thinking(body),
        **_options(body),
    }


def _schema(body: OllamaRequest) -> dict[str, Any] | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return {"type": "object"}
        case dict(schema):
            return schema
    raise BadRequest("format", f"must be json or a JSON schema, not {body.format[:64]!r}")


def _thinking(body: OllamaRequest) -> dict[str, Any]:
    """Templates use several names for one switch and ignore the names they do not know."""
    think = body.think
    if think is None:
        return {}
    if think is False:
        return {"reasoning_effort": "none"}
    if think is True:
        return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    if think not in EFFORTS:
        raise BadRequest("think", f"must be true, false, {', '.join(EFFORTS)}, not {think[:64]!r}")
    return {"reasoning_effort": think}


def _options(body: OllamaRequest) -> dict[str, Any]:
    options = body.options or OllamaOptions()
    limit = options.num_predict
    return {
        **{name: getattr(options, name) for name in _SAME},
        "repetition_penalty": options.repeat_penalty,
        "max_completion_tokens": limit if limit is not None and limit > 0 else None,
    }


def _messages(messages: list[OllamaMessage]) -> list[Message]:
    made: list[Message] = []
    waiting: list[tuple[str, str]] = []  # calls without a result: id and name
    for number, message in enumerate(messages):
        calls = _calls(message, number)
        if calls:
            waiting = [(call.id, call.function.name if call.function else "") for call in calls]
        answers = _answered(message, waiting, f"messages[{number}]") if message.role == "tool" else None
        made.append(
            Message(
                role=message.role,
                content=None if calls and not message.content else message.content or "",
                reasoning_content=message.thinking,
                tool_calls=calls or None,
                tool_call_id=answers,
                name=message.tool_name or message.name,
            )
        )
    return made


def _calls(message: OllamaMessage, number: int) -> list[MessageToolCall]:
    return [
        MessageToolCall(
            id=call.id
            or f"c{number:05}{place:03}",  # 9 letters and digits: Mistral's template accepts no others
            type="function",
            function=CalledFunction(
                name=call.function.name, arguments=msgspec.json.encode(call.function.arguments or {}).decode()
            ),
        )
        for place, call in enumerate(message.tool_calls or ())
    ]


def _answered(message: OllamaMessage, waiting: list[tuple[str, str]], path: str) -> str:
    """The id of the call that this result answers: by id, tool name or position."""
    name = message.tool_name or message.name
    for call in waiting:
        if message.tool_call_id in (None, call[0]) and name in (None, call[1]):
            waiting.remove(call)
            return call[0]
    raise BadRequest(path, "no earlier call lacks a result; name the call with tool_name")
