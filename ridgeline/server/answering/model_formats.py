"""A model's output formats: how it writes tool calls and reasoning, detected once from its chat template.

--tool-parser and --reasoning-parser override the detection. Read by `chat_job`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.options import OptionError
from ridgeline.server.answering.tools import ToolUse
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import BadRequest
from ridgeline.server.parsing.events import OutputParser, Tool
from ridgeline.server.parsing.format_table import NO_PARSER, TOOL_FORMATS, detect, plain_parser
from ridgeline.server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from ridgeline.server.parsing.tool_format import ToolFormat

VLLM_NAMES = {"deepseek_r1": "think", "qwen3": "think", "glm45": "think", "openai_gptoss": "harmony"}
PROMPT_TAIL = 64  # characters at a prompt's end that show whether a reasoning block is open


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """A model's formats; None where it has none, or none that is known here."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All markers of its calls and its reasoning."""
        of_tools = self.tools.markers if self.tools else ()
        return of_tools + ((self.reasoning.opener, self.reasoning.closer) if self.reasoning else ())

    def prepared(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages and tools in the form that the model's template expects."""
        if self.tools is not None:
            return self.tools.prepare(messages, use.shown)
        if use.shown:
            raise BadRequest("tools", NO_PARSER, "unsupported_field")
        return [dict(message) for message in messages], None

    def new_parser(self, tools: Sequence[Tool], inside_reasoning: bool) -> Callable[[], OutputParser] | None:
        """A factory of parsers, one per choice; None if the text needs no parsing."""
        if self.tools is not None and (tools or self.reasoning is not None or self.tools.shows_special):
            return functools.partial(self.tools.parser, tools, self.reasoning, inside_reasoning)
        if self.reasoning is not None:
            return functools.partial(plain_parser, self.reasoning, inside_reasoning)
        return None


@functools.lru_cache(maxsize=64)
def marker_tokens(tokenizer: Tokenizer, formats: ModelFormats) -> dict[str, int]:
    """The model's single tokens that its markers consist of, by text."""
    marks = formats.marks
    return {text: id for text, id in tokenizer.added_tokens.items() if any(text in mark for mark in marks)}


def needs_special(tokenizer: Tokenizer, formats: ModelFormats) -> bool:
    """Whether the parser needs special tokens in the text to find its markers."""
    return not tokenizer.special_ids.isdisjoint(marker_tokens(tokenizer, formats).values())


def formats_of(tokenizer: Tokenizer, config: ServerConfig) -> ModelFormats:
    template = tokenizer.chat_template
    source = "" if template is None else template.source
    named = source if isinstance(source, str) else "\n".join(source.values())
    return _formats(named, config.tool_parser, config.reasoning_parser)


@functools.lru_cache(maxsize=64)
def _formats(source: str, tool_parser: str | None, reasoning_parser: str | None) -> ModelFormats:
    tools, reasoning = detect(source) if source else (None, None)
    if tool_parser is not None:
        tools = _chosen("--tool-parser", tool_parser, TOOL_FORMATS)
    if reasoning_parser is not None:
        name = VLLM_NAMES.get(reasoning_parser, reasoning_parser)
        reasoning = _chosen("--reasoning-parser", name, REASONING_FORMATS)
    return ModelFormats(tools, reasoning)


def check_parsers(config: ServerConfig) -> None:
    """Refuse an unknown parser name before the server starts."""
    _formats("", config.tool_parser, config.reasoning_parser)


def _chosen(flag: str, name: str, known: Mapping[str, Any]) -> Any:
    if name == "none":
        return None
    if name not in known:
        raise OptionError(f"{flag} {name}: known are {', '.join(sorted(known))} and none")
    return known[name]
