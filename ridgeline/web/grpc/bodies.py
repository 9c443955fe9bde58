"""Converts a message of the proto to the path and the JSON body of the HTTP API.

The one place that knows both. Nothing is refused here: a value that JSON does not have, or a text that is not
JSON, is written so that the API refuses it by its name, with the same checks and records as over HTTP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.web.grpc.fields import FieldNames
from ridgeline.web.sampling_fields import SAMPLING

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

# Sent as they are, under the same name.
_NUMBERS = (
    "max_tokens",
    "min_tokens",
    "n",
    *SAMPLING,
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
)
_CHAT_FIELDS = ("parallel_tool_calls", "thinking_token_budget", "continue_final_message")
_GUIDED = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
_STRUCTURE = frozenset(
    (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    )
)
_IN_CHAT = ("messages", "tools", "tool_choice", "reasoning_effort", *_CHAT_FIELDS)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the HTTP API."""

    path: str
    body: bytes
    names: FieldNames


def generate(request: Any, stream: bool) -> Asked:
    """The body of /v1/chat/completions or /v1/completions for a GenerateRequest."""
    kind = request.WhichOneof("input")
    body: dict[str, Any] = {}
    renamed = {name: request.WhichOneof("structure") or name for name in _STRUCTURE}
    if kind in ("prompt", "prompt_token_ids"):
        path = COMPLETIONS
        body["prompt"] = request.prompt if kind == "prompt" else list(request.prompt_token_ids.ids)
        renamed["prompt"] = kind
        if request.HasField("logprobs"):
            body["logprobs"] = request.logprobs
    else:
        path = CHAT
        renamed |= {name: f"chat.{name}" for name in _IN_CHAT}
        if kind is None:  # refused by the API: a field is missing
            renamed["messages"] = "input"
        else:
            body |= _chat(request.chat)
        if request.HasField("logprobs"):
            body |= {"logprobs": True, "top_logprobs": request.logprobs}
            renamed["top_logprobs"] = "logprobs"
    body |= _sampling(request)
    body |= _structure(request, path)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Asked(path, msgspec.json.encode(body), FieldNames(renamed, _STRUCTURE))


def embed(request: Any) -> Asked:
    texts: list[Any] = [*request.texts, *(list(one.ids) for one in request.token_ids)]
    body: dict[str, Any] = {"input": texts, "encoding_format": "base64"}
    if request.model:
        body["model"] = request.model
    for name in ("dimensions", "truncate", "truncate_prompt_tokens", "priority"):
        if request.HasField(name):
            body[name] = getattr(request, name)
    given = "token_ids" if request.token_ids and not request.texts else "texts"
    return Asked(EMBEDDINGS, msgspec.json.encode(body), FieldNames({"input": given}))


def _sampling(request: Any) -> dict[str, Any]:
    body = {name: _number(getattr(request, name)) for name in _NUMBERS if request.HasField(name)}
    if request.model:
        body["model"] = request.model
    if request.stop:
        body["stop"] = list(request.stop)
    if request.stop_token_ids:
        body["stop_token_ids"] = list(request.stop_token_ids)
    if request.logit_bias:
        body["logit_bias"] = {str(token): _number(bias) for token, bias in request.logit_bias.items()}
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.return_token_ids:
        body["return_token_ids"] = True
    return body


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity: write them as Python does, and the API's error names the field."""
    if isinstance(value, float) and not math.isfinite(value):
        return msgspec.Raw(b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity")
    return value


def _structure(request: Any, path: str) -> dict[str, Any]:
    kind = request.WhichOneof("structure")
    if kind is None:
        return {}
    if kind == "json_object":
        if not request.json_object:
            return {}
        if path == CHAT:
            return {"response_format": {"type": "json_object"}}
        return {"structured_outputs": {"json_object": True}}
    if kind == "choice":
        return {"guided_choice": list(request.choice.texts)}
    if kind == "json_schema" and path == CHAT and (schema := _json(request.json_schema)) is not None:
        # Every upstream of a gateway knows this form.
        return {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        }
    return {_GUIDED[kind]: getattr(request, kind)}


def _json(text: str) -> msgspec.Raw | None:
    """The text as a part of a body; None if it is not JSON."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(text.encode())


def _chat(chat: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [_message(one) for one in chat.messages]}
    if chat.tools:
        body["tools"] = [_tool(one) for one in chat.tools]
    if choice := chat.tool_choice.WhichOneof("choice"):
        named = {"type": "function", "function": {"name": chat.tool_choice.function}}
        body["tool_choice"] = chat.tool_choice.mode if choice == "mode" else named
    if chat.reasoning_effort:
        body["reasoning_effort"] = chat.reasoning_effort
    return body | {name: getattr(chat, name) for name in _CHAT_FIELDS if chat.HasField(name)}


def _message(message: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role}
    if message.HasField("content"):
        body["content"] = message.content
    for name in ("name", "reasoning_content", "tool_call_id"):
        if value := getattr(message, name):
            body[name] = value
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _tool(tool: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        parameters = _json(tool.parameters)
        function["parameters"] = tool.parameters if parameters is None else parameters
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
