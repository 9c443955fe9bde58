"""The required form of an answer as one grammar: the requested format, required calls, reasoning before both.

Called by `chat_job`. Combines `structured`, which knows schemas and expressions, with `parsing`, which knows
how a model writes calls and reasoning.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from ridgeline.engine.grammar import Grammar
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.answering.model_formats import ModelFormats, marker_tokens
from ridgeline.server.answering.structured import check_strict_schema, embedded, requested_grammar
from ridgeline.server.answering.tools import ToolUse
from ridgeline.server.errors import BadRequest
from ridgeline.server.openai_api.request_bodies import ChatRequest
from ridgeline.server.parsing.grammars import Choice, UnsupportedSchema, reasoning_grammar
from ridgeline.server.parsing.lark import quoted

_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar, if any, and the body's field to name in an error if the grammar cannot be used."""

    grammar: Grammar | None = None
    field: str = "grammar"


def answer_grammar(
    body: ChatRequest, formats: ModelFormats, use: ToolUse, inside_reasoning: bool, tokenizer: Tokenizer
) -> AnswerGrammar:
    """Required calls exclude a format; optional calls are the alternative to it."""
    asked = requested_grammar(body)
    if use.choice in ("required", "named"):
        asked = None
    if asked is None and not use.shown:
        return AnswerGrammar()
    if asked is not None and not use.shown and _stands_alone(asked[0], formats, inside_reasoning):
        return AnswerGrammar(*asked)
    content = None if asked is None else _fragment(*asked)
    special = marker_tokens(tokenizer, formats)
    if use.shown:
        source = _call_grammar(formats, use, inside_reasoning, special, content)
        is_its_own = len(use.tools) == 1 and asked is None
        field = "tools[0].function.parameters" if is_its_own else "tools"
        return AnswerGrammar(None if source is None else _around(asked, source), field)
    assert asked is not None
    assert content is not None
    assert formats.reasoning is not None  # otherwise there is nothing to combine
    source = reasoning_grammar(formats.reasoning, inside_reasoning, content, special)
    return AnswerGrammar(_around(asked, source), asked[1])


def _around(asked: tuple[Grammar, str] | None, source: str) -> Grammar:
    """A grammar that contains the requested one; the schema is checked as if it stood alone."""
    return Grammar("lark", source) if asked is None else replace(asked[0], kind="lark", source=source)


def _call_grammar(
    formats: ModelFormats,
    use: ToolUse,
    inside_reasoning: bool,
    special: dict[str, int],
    content: str | None,
) -> str | None:
    assert formats.tools is not None  # otherwise the tools were refused earlier
    for place, tool in enumerate(use.tools):
        if tool.strict:  # an unenforceable keyword is refused with its path
            check_strict_schema(tool.parameters or {}, f"tools[{place}].function.parameters")
    choice: Choice = "required" if use.choice == "required" else "auto"
    if use.choice == "named":
        (choice,) = use.callable
    try:
        return formats.tools.grammar(
            use.tools, choice, use.parallel, formats.reasoning, inside_reasoning, special, content
        )
    except UnsupportedSchema as error:
        place = [tool.name for tool in use.tools].index(error.tool_name)
        raise BadRequest(f"tools[{place}].function.parameters", str(error)) from None


def _stands_alone(grammar: Grammar, formats: ModelFormats, inside_reasoning: bool) -> bool:
    """Whether nothing precedes the grammar. A client's grammar is the whole answer wherever possible."""
    if formats.reasoning is None:
        return True
    return grammar.kind == "lark" and not inside_reasoning


def _fragment(grammar: Grammar, field: str) -> str:
    """The grammar as rules that begin with `rest`, for use beside others."""
    match grammar.kind:
        case "json_object" | "json_schema":
            return f"rest: %json {embedded(grammar)}"
        case "regex":
            return f"rest: /{_between_slashes(grammar.source)}/"
        case "choice":
            return "rest: " + " | ".join(quoted(text) for text in json.loads(grammar.source))
        case _:
            raise BadRequest(field, "a custom grammar cannot be combined with tools or reasoning")


def _between_slashes(expression: str) -> str:
    """Escape slashes for a Lark expression and remove the prefix by which the engine detects another
    notation.
    """
    escaped = _ESCAPED_OR_SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], expression)
    return escaped.replace("::=", r":\x3a=")
