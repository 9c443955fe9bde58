"""The formats of tool calls by name, and which one a chat template speaks.

The server asks `detect` once per model and then its format for a parser, a grammar and the messages of every
request. A template whose calls none of the parsers reads has no format: a request with tools is then refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.server.parsing.events import IdMaker, OutputParser, Tool, call_id
from ridgeline.server.parsing.generic_json import BareJsonParser
from ridgeline.server.parsing.hermes import HermesParser
from ridgeline.server.parsing.parser import Parser, PlainParser
from ridgeline.server.parsing.prepare import DEFAULT_PREPARATION, Preparation
from ridgeline.server.parsing.reasoning import (
    GEMMA_THOUGHT,
    HARMONY_ANALYSIS,
    MISTRAL_THINK,
    THINK,
    ReasoningFormat,
)

NO_PARSER = (
    "the model's chat template writes tool calls in a format that no parser here reads; start the server "
    "with --tool-parser to choose one"
)

GENERIC_LESSON = (
    "You can call functions. These are available, one JSON object per line:\n{tools}\n\n"
    "To call a function, answer with nothing but a JSON object of the form "
    '{"name": "<function name>", "arguments": {"<parameter>": <value>}}. '
    "To call several, answer with a JSON list of such objects. "
    "If no function is needed, answer in plain text."
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes its calls: who reads them, and what its template must be given."""

    name: str
    parser_type: type[Parser]
    # Marks that the model may write as special tokens, which plain text leaves out.
    markers: tuple[str, ...] = ()
    shows_special: bool = False
    prepare: Preparation = DEFAULT_PREPARATION
    new_id: IdMaker = call_id

    def parser(
        self,
        tools: Sequence[Tool],
        reasoning: ReasoningFormat | None = None,
        inside_reasoning: bool = False,
        new_id: IdMaker | None = None,
    ) -> OutputParser:
        """One parser per choice. Without tools it reads reasoning and takes calls for content."""
        return self.parser_type(tools, reasoning, inside_reasoning, new_id or self.new_id)


HERMES = ToolFormat("hermes", HermesParser, markers=("<tool_call>", "</tool_call>"))
JSON = ToolFormat(
    "json",
    BareJsonParser,
    prepare=Preparation(shows_tools=False, shows_calls=False, lesson=GENERIC_LESSON),
)

TOOL_FORMATS = {f.name: f for f in (HERMES, JSON)}


def plain_parser(reasoning: ReasoningFormat | None, inside_reasoning: bool = False) -> OutputParser:
    """For a model without a format of calls."""
    return PlainParser((), reasoning, inside_reasoning)


def detect(template_source: str | Mapping[str, str]) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The format of calls (None: no parser reads it) and of reasoning that a chat template speaks."""
    source = template_source if isinstance(template_source, str) else "\n".join(template_source.values())
    return _tool_format(source), _reasoning_format(source)


_HERMES_CALL = re.compile(r"<tool_call>[^<{]{0,24}\{[^<{]{0,24}name")
_READS_TOOLS = re.compile(r"\btools\b")


def _tool_format(source: str) -> ToolFormat | None:
    if _HERMES_CALL.search(source):
        return HERMES
    if _READS_TOOLS.search(source):
        return None
    refuses_system = "System role not supported" in source
    return replace(JSON, prepare=replace(JSON.prepare, has_system_role=not refuses_system))


def _reasoning_format(source: str) -> ReasoningFormat | None:
    for reasoning in (HARMONY_ANALYSIS, GEMMA_THOUGHT, MISTRAL_THINK, THINK):
        if reasoning.opener.rstrip("\n") in source or reasoning.closer in source:
            return reasoning
    return None
