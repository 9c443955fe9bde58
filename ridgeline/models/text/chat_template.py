"""Chat templates: render messages and tools as the prompt's text, as `transformers` does.

Called through `Tokenizer.encode_chat`, the only way from messages to token ids. Nothing here adds a
beginning-of-sequence token: if the model needs one, its template writes it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from ridgeline.models.errors import TemplateError
from ridgeline.models.text.template_budget import BudgetExceeded, render_budget
from ridgeline.models.text.template_sandbox import TemplateEnvironment

MISSING_TEMPLATE = (
    "this model has no chat template, so messages cannot be turned into a prompt: send plain text to the "
    "completions API, use an instruction-tuned model, or add a chat_template.jinja to its files"
)

# Keys for a message's reasoning; most templates read the first, gpt-oss reads the second.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

_environment = TemplateEnvironment()


class ChatTemplate:
    """A model's template, or its named templates, compiled once. Rendering is thread-safe.

    `special_tokens` (bos_token, eos_token, …) are passed to the template; a None stays undefined.
    """

    def __init__(self, source: str | Mapping[str, str], **special_tokens: str | None) -> None:
        named = {"default": source} if isinstance(source, str) else dict(source)
        self.source = source
        self._special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        self._templates = {name: _compile(name, text) for name, text in named.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt. Raises TemplateError with the template's own message if it rejects the messages."""
        if not messages:
            raise TemplateError("messages: a conversation needs at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise TemplateError(f"messages[{index}]: must be an object, got {type(message).__name__}")
        template = self._choose(has_tools=tools is not None)
        data = {
            **self._special_tokens,
            **_plain(variables),
            "messages": [_with_reasoning(_plain(message)) for message in messages],
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        return _render(template, data)

    def _choose(self, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        names = ", ".join(sorted(self._templates))
        raise TemplateError(f"the model has several chat templates ({names}) and none is named default")


def _compile(name: str, source: str) -> jinja2.Template:
    try:
        return _environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the {name} chat template has an error at line {error.lineno}: {error}"
        ) from error


def _render(template: jinja2.Template, data: dict[str, Any]) -> str:
    try:
        with render_budget(data):
            return template.render(data)
    except BudgetExceeded as error:
        raise TemplateError(f"the chat template exceeded its limits: {error}") from error
    except jinja2.TemplateError as error:  # raise_exception() and the sandbox give the reason
        raise TemplateError(f"the chat template rejected these messages: {error}") from error
    except Exception as error:  # a template can raise any Python error: None + "text", a missing key, …
        reason = f"{type(error).__name__}: {error}"
        raise TemplateError(f"the chat template failed on these messages: {reason}") from error


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy the reasoning to every key that templates read."""
    given = (message[name] for name in _REASONING_NAMES if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of JSON types only: the sandbox does not know the methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    numpy = sys.modules.get("numpy")  # a numpy number can only come from a program that imported numpy
    if numpy is not None and isinstance(value, numpy.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"<{type(value).__name__}>"
