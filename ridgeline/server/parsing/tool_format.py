"""ToolFormat: one tool-call format: its parser, its grammar, and how to prepare messages for its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.server.parsing.events import IdMaker, OutputParser, Tool, call_id
from ridgeline.server.parsing.grammars import CallSyntax, Choice, call_grammar
from ridgeline.server.parsing.parser import Parser
from ridgeline.server.parsing.prepare import DEFAULT_PREPARATION, Preparation
from ridgeline.server.parsing.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. One instance per format, and one per template that differs in detail."""

    name: str
    parser_type: type[Parser]
    syntax: CallSyntax
    # Markers that the model may write as special tokens, which plain text omits.
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
        """A parser for one choice. Without tools it reads reasoning and treats calls as content."""
        return self.parser_type(tools, reasoning, inside_reasoning, new_id or self.new_id)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        reasoning: ReasoningFormat | None = None,
        inside_reasoning: bool = False,
        special: Mapping[str, int] | None = None,
        content: str | None = None,
    ) -> str | None:
        """The grammar that enforces calls; see `call_grammar`."""
        return call_grammar(
            self.syntax, tools, choice, parallel, reasoning, inside_reasoning, special, content
        )
