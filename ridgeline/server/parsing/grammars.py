"""Grammars that enforce a model's calls: required, named or strict ones, one or several, after reasoning.

A `CallSyntax` describes how a format writes calls; `call_grammar` makes the source that the engine enforces
from it. The format's parser reads every text that such a grammar allows as the intended calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.server.parsing.argument_grammars import ArgumentGrammar, UnsupportedSchema, json_arguments
from ridgeline.server.parsing.events import Tool
from ridgeline.server.parsing.formats import harmony
from ridgeline.server.parsing.formats.generic_json import FENCE, PYTHON_FENCE
from ridgeline.server.parsing.lark import Lark, either
from ridgeline.server.parsing.reasoning import HARMONY_ANALYSIS, ReasoningFormat

__all__ = [
    "CallSyntax",
    "Choice",
    "UnsupportedSchema",
    "call_grammar",
    "reasoning_grammar",
]

Choice = Literal["auto", "required"] | Tool

# A bare call at the start of a line, as the parser recognizes it: free text must not match this.
_LIKE_A_CALL = (
    r"(?s:(.*\n)?[ \t\r\n]*(```[A-Za-z_]*[ \t\r\n]*)?\[?[ \t\r\n]*\{[ \t\r\n]*"
    r'"(name|arguments|parameters|type|id)".*)'
)
_CALL_ID = "/[a-zA-Z0-9]{9}/"
_NEW_ASSISTANT = f"{harmony.START}assistant"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written: the opener, calls with `again` between them, `close`."""

    opener: str
    before: str  # with $name for the tool's name, and $id for an id
    after: str
    again: str | None  # None: at most one call
    first: str = ""  # between the opener and the first call
    close: str = ""
    arguments: ArgumentGrammar = json_arguments
    # The markers are special tokens, which free text cannot contain.
    is_special: bool = False
    # Several calls may also stand in a JSON list.
    lists: bool = False


def call_grammar(
    syntax: CallSyntax,
    tools: Sequence[Tool],
    choice: Choice,
    parallel: bool,
    reasoning: ReasoningFormat | None = None,
    inside_reasoning: bool = False,
    special: Mapping[str, int] | None = None,
    content: str | None = None,
) -> str | None:
    """The source of a grammar, or None if nothing has to be enforced.

    `special`: the ids of markers that are one token. `content`: rules beginning with `rest` for an answer
    without calls; otherwise any text.
    """
    is_free = choice == "auto" and parallel and not any(tool.strict for tool in tools)
    if is_free and content is None:
        return None
    lark = Lark(special or {})
    callable_tools = [choice] if isinstance(choice, Tool) else list(tools)
    by_schema = choice != "auto"
    call = _call(lark, syntax, callable_tools, by_schema)
    repeats = parallel and syntax.again is not None and not isinstance(choice, Tool)
    calls = call
    if repeats:
        again = lark.text(syntax.again or "")
        calls = lark.rule("calls", f"{call} ( {again} {call} )*")
        if syntax.lists:
            calls = either([calls, f'"[" {call} ( ", " {call} )* "]"'])
    calls = " ".join(filter(None, (lark.text(syntax.first), calls, lark.text(syntax.close))))
    opener = lark.text(syntax.opener)
    lead = _lead(lark, reasoning, inside_reasoning)
    if syntax.opener == harmony.CHANNEL:
        body = _harmony_body(lark, calls, choice, content)
    elif choice != "auto":
        body = f"{opener} {calls}"
    elif content is not None:
        body = either(["rest", f"{opener} {calls}"])
    else:
        body = _text_or_calls(lark, syntax, calls, repeats)
    lark.rule("start", f"{lead} {body}".strip())
    return lark.source() + ("" if content is None else content + "\n")


def reasoning_grammar(
    reasoning: ReasoningFormat,
    inside: bool,
    rest: str,
    special: Mapping[str, int] | None = None,
) -> str:
    """Reasoning, then `rest`: rules beginning with `rest`."""
    lark = Lark(special or {})
    lead = _lead(lark, reasoning, inside)
    body = _harmony_rest(lark, rest) if reasoning is HARMONY_ANALYSIS else "rest"
    lark.rule("start", f"{lead} {body}".strip())
    return f"{lark.source()}{rest}\n"


def _call(lark: Lark, syntax: CallSyntax, tools: Sequence[Tool], by_schema: bool) -> str:
    """One call of any of the tools."""
    written: list[str] = []
    for index, tool in enumerate(tools):
        arguments = syntax.arguments(lark, tool, f"arguments_{index}", by_schema or tool.strict)
        before, has_id, after_id = (
            part.replace("$name", tool.name) for part in syntax.before.partition("$id")
        )
        call_id = _CALL_ID if has_id else ""
        parts = (lark.text(before), call_id, lark.text(after_id), arguments, lark.text(syntax.after))
        written.append(lark.rule(f"call_{index}", " ".join(filter(None, parts))))
    return lark.rule("call", " | ".join(written))


def _text_or_calls(lark: Lark, syntax: CallSyntax, calls: str, repeats: bool) -> str:
    """Free text that becomes calls when the opener is written, and only as the grammar allows."""
    if not syntax.opener:
        text = lark.any_text("TEXT", (f"{FENCE}{PYTHON_FENCE}",), _LIKE_A_CALL)
        return either([text, calls])
    is_token = syntax.opener in lark.tokens
    kept_out = (syntax.opener,) if is_token and not syntax.is_special else ()
    head = lark.text_until(syntax.opener, "head", syntax.is_special)
    text = lark.any_text("TEXT", kept_out)
    return f"( {head} {calls} )* {text}" if repeats else either([text, f"{head} {calls}"])


def _lead(lark: Lark, reasoning: ReasoningFormat | None, inside: bool) -> str:
    """The reasoning block before everything else: required if the prompt has opened it, else optional."""
    if reasoning is None:
        return ""
    thought = lark.text_until(reasoning.closer, "thought", reasoning.shows_special)
    ending = lark.text(_NEW_ASSISTANT) if reasoning is HARMONY_ANALYSIS else "/\\n{0,2}/"
    block = f"{thought} {ending}"
    if inside:
        return block
    return f"( {lark.text(reasoning.opener)} {block} )?"


def _harmony_body(lark: Lark, calls: str, choice: Choice, content: str | None) -> str:
    """A call, or messages that are not calls: a preamble may precede either."""
    channel = lark.text(harmony.CHANNEL)
    call = f"{channel} {calls}"
    if choice != "auto":
        return call
    return either([call, _harmony_rest(lark, None if content is None else "")])


def _harmony_rest(lark: Lark, rest: str | None) -> str:
    """The final message, which is `rest` or any text, optionally after a preamble."""
    text = lark.any_text("TEXT")
    preamble = (
        f"{lark.text(f'{harmony.CHANNEL}commentary{harmony.MESSAGE}')} "
        f"{lark.text_until(harmony.END, 'preamble', is_special=True)} {lark.text(_NEW_ASSISTANT)}"
    )
    final = f"{lark.text(f'{harmony.CHANNEL}final{harmony.MESSAGE}')} {text if rest is None else 'rest'}"
    return f"( {preamble} )? {final}"
