"""The tool-call formats by name, and the detection of a chat template's format.

The server calls `detect` once per model, and asks the format for a parser, a grammar and prepared messages in
every request. A template whose calls no parser reads has no format: a request with tools is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ridgeline.server.parsing.argument_grammars import dsml_arguments, gemma_arguments, qwen_arguments
from ridgeline.server.parsing.events import OutputParser, short_call_id
from ridgeline.server.parsing.formats import deepseek, dsml, gemma, harmony, hermes, llama3, mistral, qwen_xml
from ridgeline.server.parsing.formats.generic_json import BareJsonParser
from ridgeline.server.parsing.grammars import CallSyntax
from ridgeline.server.parsing.parser import PlainParser
from ridgeline.server.parsing.prepare import Preparation
from ridgeline.server.parsing.reasoning import (
    GEMMA_THOUGHT,
    HARMONY_ANALYSIS,
    MISTRAL_THINK,
    THINK,
    ReasoningFormat,
)
from ridgeline.server.parsing.tool_format import ToolFormat

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

_DEEPSEEK_INTRODUCTION = (
    "## Tools\nYou can call functions. These are available, one JSON object per line:\n{tools}\n\n"
    f"To call functions, write\n{deepseek.CALLS_BEGIN}{deepseek.CALL_BEGIN}"
)
_DEEPSEEK_END = f"{deepseek.CALL_END}{deepseek.CALLS_END}"
DEEPSEEK_LESSON = (
    f"{_DEEPSEEK_INTRODUCTION}function{deepseek.SEPARATOR}<function name>\n"
    f'```json\n{{"<parameter>": <value>}}\n```{_DEEPSEEK_END}'
)
DEEPSEEK_V31_LESSON = (
    f'{_DEEPSEEK_INTRODUCTION}<function name>{deepseek.SEPARATOR}{{"<parameter>": <value>}}{_DEEPSEEK_END}'
)


HERMES = ToolFormat(
    "hermes",
    hermes.HermesParser,
    CallSyntax(
        hermes.OPEN,
        '\n{"name": "$name", "arguments": ',
        f"}}\n{hermes.CLOSE}",
        again=f"\n{hermes.OPEN}",
    ),
    markers=(hermes.OPEN, hermes.CLOSE),
)
QWEN_XML = ToolFormat(
    "qwen_xml",
    qwen_xml.QwenXmlParser,
    CallSyntax(
        qwen_xml.CALL_OPEN,
        "\n<function=$name>\n",
        f"{qwen_xml.FUNCTION_CLOSE}\n{qwen_xml.CALL_CLOSE}",
        again=f"\n{qwen_xml.CALL_OPEN}",
        arguments=qwen_arguments,
    ),
    markers=(qwen_xml.CALL_OPEN, qwen_xml.CALL_CLOSE),
)
LLAMA3 = ToolFormat(
    "llama3",
    llama3.Llama3Parser,
    CallSyntax("", '{"name": "$name", "parameters": ', "}", again="; "),
    markers=(llama3.PYTHON_TAG,),
    shows_special=True,
    prepare=Preparation(one_call_per_message=True),
)
MISTRAL = ToolFormat(
    "mistral",
    mistral.MistralParser,
    CallSyntax(mistral.OPEN, f"$name{mistral.ARGS}", "", again=mistral.OPEN, is_special=True),
    markers=(mistral.OPEN, mistral.ARGS, mistral.CALL_ID),
    shows_special=True,
    prepare=Preparation(short_ids=True),
    new_id=short_call_id,
)
DEEPSEEK = ToolFormat(
    "deepseek",
    deepseek.DeepSeekParser,
    CallSyntax(
        deepseek.CALLS_BEGIN,
        f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}$name\n{deepseek.FENCE}json\n",
        f"\n{deepseek.FENCE}{deepseek.CALL_END}",
        again="\n",
        close=deepseek.CALLS_END,
    ),
    markers=(
        deepseek.CALLS_BEGIN,
        deepseek.CALL_BEGIN,
        deepseek.SEPARATOR,
        deepseek.CALL_END,
        deepseek.CALLS_END,
    ),
    shows_special=True,
    prepare=Preparation(no_content=None, lesson=DEEPSEEK_LESSON),
)
DSML = ToolFormat(
    "dsml",
    dsml.DsmlParser,
    CallSyntax(
        dsml.OPENERS[1],
        f'{dsml.INVOKE}$name">\n',
        f"{dsml.INVOKE_CLOSE}\n",
        again="",
        first="\n",
        close=dsml.CLOSERS[1],
        arguments=dsml_arguments,
    ),
    markers=(dsml.DSML,),
    shows_special=True,
)
HARMONY = ToolFormat(
    "harmony",
    harmony.HarmonyParser,
    CallSyntax(
        harmony.CHANNEL,
        f"commentary to=functions.$name {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        "",
        again=None,  # its end token also ends the answer
        is_special=True,
    ),
    markers=(
        harmony.START,
        harmony.CHANNEL,
        harmony.CONSTRAIN,
        harmony.MESSAGE,
        harmony.END,
        harmony.CALL,
        harmony.RETURN,
    ),
    shows_special=True,
    prepare=Preparation(one_call_per_message=True, fills_descriptions=True, content_or_reasoning=True),
)
GEMMA = ToolFormat(
    "gemma",
    gemma.GemmaParser,
    CallSyntax(
        gemma.OPEN,
        "call:$name{",
        f"}}{gemma.CLOSE}",
        again=gemma.OPEN,
        arguments=gemma_arguments,
        is_special=True,
    ),
    markers=(gemma.OPEN, gemma.CLOSE, gemma.QUOTE, gemma.CHANNEL, gemma.CHANNEL_END, gemma.RESPONSE),
    shows_special=True,
)
JSON = ToolFormat(
    "json",
    BareJsonParser,
    CallSyntax("", '{"name": "$name", "arguments": ', "}", again="\n", lists=True),
    prepare=Preparation(shows_tools=False, shows_calls=False, lesson=GENERIC_LESSON),
)

TOOL_FORMATS = {f.name: f for f in (HERMES, QWEN_XML, LLAMA3, MISTRAL, DEEPSEEK, DSML, HARMONY, GEMMA, JSON)}


def plain_parser(reasoning: ReasoningFormat | None, inside_reasoning: bool = False) -> OutputParser:
    """For a model without a call format."""
    return PlainParser((), reasoning, inside_reasoning)


def detect(template_source: str | Mapping[str, str]) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The call format (None: no parser reads it) and the reasoning format of a chat template."""
    source = template_source if isinstance(template_source, str) else "\n".join(template_source.values())
    return _tool_format(source), _reasoning_format(source)


_READS_TOOLS = re.compile(r"\btools\b")
_KNOWS_TOOLS = re.compile(r"\btools\b|\bfunctions\b")
_HERMES_CALL = re.compile(r"<tool_call>[^<]{0,40}\{\\*\"name")
_LLAMA3_CALL = re.compile(r"\{\"name\": function name, \"parameters\"")
_JOINS_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*\+")
# Jinja's tojson refuses this, so such a template cannot show tools.
_LISTS_A_GENERATOR = re.compile(r"tools\s*\|\s*map\([^)]*\)\s*\|\s*tojson")
# This macro loops forever on a type without a name, and null has none.
_NAMES_PYTHON_TYPES = "json_to_python_type"
_JOINS_DESCRIPTION = re.compile(r"\+\s*tool\.description")

# A template uses the first format with one of its signs in the source; each sign belongs to one format.
_SIGNS: tuple[tuple[ToolFormat, re.Pattern[str]], ...] = (
    (DSML, re.compile(dsml.DSML)),
    (DEEPSEEK, re.compile(deepseek.CALL_BEGIN)),
    (HARMONY, re.compile(r"to=[^<]{0,40}functions\.[^>]{0,80}<\|channel\|>commentary", re.DOTALL)),
    (GEMMA, re.compile(r"<\|tool_call>call:")),
    (MISTRAL, re.compile(re.escape(mistral.OPEN))),
    (QWEN_XML, re.compile(r"<tool_call>[^<]{0,8}<function=")),
    (HERMES, _HERMES_CALL),
    (LLAMA3, _LLAMA3_CALL),
)


def _tool_format(source: str) -> ToolFormat | None:
    reads_tools = _READS_TOOLS.search(source) is not None
    for tool_format, sign in _SIGNS:
        if sign.search(source):
            prepare = _ways(tool_format.prepare, source, reads_tools)
            return replace(tool_format, prepare=prepare, syntax=_syntax(tool_format, source))
    if _KNOWS_TOOLS.search(source):
        return None
    refuses_system = "System role not supported" in source
    return replace(JSON, prepare=replace(JSON.prepare, has_system_role=not refuses_system))


def _ways(prepare: Preparation, source: str, reads_tools: bool) -> Preparation:
    """The format's usual preparation, adjusted to this template."""
    if prepare.lesson == DEEPSEEK_LESSON and deepseek.FENCE not in source:
        prepare = replace(prepare, lesson=DEEPSEEK_V31_LESSON)
    return replace(
        prepare,
        arguments="text" if _JOINS_ARGUMENTS.search(source) else prepare.arguments,
        shows_tools=reads_tools and not _LISTS_A_GENERATOR.search(source),
        fills_descriptions=prepare.fills_descriptions or _JOINS_DESCRIPTION.search(source) is not None,
        without_null=_NAMES_PYTHON_TYPES in source,
        results_in_calls="'tool_responses'" in source and "'tool_call_id'" not in source,
    )


def _syntax(tool_format: ToolFormat, source: str) -> CallSyntax:
    """The format's usual syntax, or this template's where models of a family differ."""
    syntax = tool_format.syntax
    if tool_format is MISTRAL and mistral.CALL_ID in source:
        return replace(syntax, before=f"$name{mistral.CALL_ID}$id{mistral.ARGS}")
    if tool_format is MISTRAL and mistral.ARGS not in source:
        before = '{"name": "$name", "arguments": '
        return replace(syntax, before=before, after="}", again=", ", first="[", close="]")
    if tool_format is DEEPSEEK and deepseek.FENCE not in source:
        before = f"{deepseek.CALL_BEGIN}$name{deepseek.SEPARATOR}"
        return replace(syntax, before=before, after=deepseek.CALL_END, again="")
    if tool_format is DSML and dsml.BLOCKS[0] in source:
        return replace(syntax, opener=dsml.OPENERS[0], close=dsml.CLOSERS[0])
    return syntax


def _reasoning_format(source: str) -> ReasoningFormat | None:
    for reasoning in (HARMONY_ANALYSIS, GEMMA_THOUGHT, MISTRAL_THINK):
        if reasoning.opener.rstrip("\n") in source:
            return reasoning
    # Granite 3.3 also marks what comes after the reasoning, which no format here reads.
    if (THINK.opener in source or THINK.closer in source) and "<response></response>" not in source:
        return THINK
    return None
