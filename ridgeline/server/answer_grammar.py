"""What an answer must look like, as one grammar: the asked-for format, required calls, reasoning before both.

Called by `chat_job`. `structured` knows schemas and expressions, `parsing` knows how a model writes calls and
reasoning; here the two are put together.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from ridgeline.engine.grammar import Grammar
from ridgeline.models.tokenizer import Tokenizer
from ridgeline.server.errors import BadRequest
from ridgeline.server.parsing.grammars import UnsupportedSchema, reasoning_grammar
from ridgeline.server.protocol import ChatRequest
from ridgeline.server.speech import Speech
from ridgeline.server.structured import asked_grammar, embedded
from ridgeline.server.tools import ToolUse


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar, if there is any, and the field of the body that is to blame if it cannot be used."""

    grammar: Grammar | None = None
    field: str = "grammar"


def answer_grammar(
    body: ChatRequest, speech: Speech, use: ToolUse, inside_reasoning: bool, tokenizer: Tokenizer
) -> AnswerGrammar:
    asked = asked_grammar(body)
    budget = _budget(body, speech)
    if asked is None and budget is None and not use.shown:
        return AnswerGrammar()
    special = special_tokens(tokenizer)
    if use.shown:
        if asked is not None and use.choice == "auto":
            message = "cannot be combined with tools unless tool_choice is none, required or a function"
            raise BadRequest(asked[1], message, "unsupported_field")
        source = _call_grammar(speech, use, inside_reasoning, budget, special)
        if source is not None:
            return AnswerGrammar(Grammar("lark", source), "tools")
    if asked is not None and use.choice in ("none", "auto"):
        grammar, field = asked
        if speech.reasoning is None:
            return AnswerGrammar(grammar, field)
        rest = _fragment(grammar)
        if rest is None and (inside_reasoning or budget is not None):
            raise BadRequest(
                field, "a grammar of one's own cannot follow this model's reasoning; use a schema"
            )
        if rest is None:
            return AnswerGrammar(grammar, field)
        source = reasoning_grammar(speech.reasoning, inside_reasoning, budget, rest, special)
        return AnswerGrammar(Grammar("lark", source), field)
    if budget is not None:
        assert speech.reasoning is not None  # or `_budget` would have refused it
        source = reasoning_grammar(speech.reasoning, inside_reasoning, budget, None, special)
        return AnswerGrammar(Grammar("lark", source), "thinking_token_budget")
    return AnswerGrammar()


def _budget(body: ChatRequest, speech: Speech) -> int | None:
    budget = body.thinking_token_budget
    if budget is None:
        return None
    if budget < 1:
        raise BadRequest("thinking_token_budget", f"must be at least 1, got {budget}")
    if speech.reasoning is None:
        raise BadRequest("thinking_token_budget", "this model marks no reasoning that could be limited")
    return budget


def _call_grammar(
    speech: Speech, use: ToolUse, inside_reasoning: bool, budget: int | None, special: dict[str, int]
) -> str | None:
    assert speech.tools is not None  # or the tools would have been refused
    is_free = use.choice == "auto" and use.parallel and not any(tool.strict for tool in use.tools)
    if is_free and budget is None:
        return None
    choice = use.callable[0] if use.choice == "named" else use.choice
    try:
        return speech.tools.grammar(
            use.tools, choice, use.parallel, speech.reasoning, inside_reasoning, budget, special
        )
    except UnsupportedSchema as error:
        place = [tool.name for tool in use.tools].index(error.tool_name)
        raise BadRequest(f"tools[{place}].function.parameters", str(error)) from None


def _fragment(grammar: Grammar) -> str | None:
    """The grammar as rules that begin with `rest`; None where it is not ours to rewrite."""
    match grammar.kind:
        case "json_object" | "json_schema":
            return f"rest: %json {embedded(grammar)}"
        case "regex":
            return "rest: /" + grammar.source.replace("/", r"\/") + "/"
        case "choice":
            return "rest: " + " | ".join(json.dumps(text) for text in json.loads(grammar.source))
        case _:
            return None


@functools.lru_cache(maxsize=64)
def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens by their text."""
    return {tokenizer.token_text(id): id for id in tokenizer.special_ids}
