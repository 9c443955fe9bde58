"""Grammars of calls: what they let through is read back as calls whose arguments validate."""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import pytest

from ridgeline.server.parsing.events import ParsedEvent, Tool, joined
from ridgeline.server.parsing.format_table import TOOL_FORMATS, detect
from ridgeline.server.parsing.grammars import UnsupportedSchema, reasoning_grammar
from ridgeline.server.parsing.reasoning import REASONING_FORMATS, THINK, ReasoningFormat
from ridgeline.server.parsing.tool_format import ToolFormat
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning
from tests.server.parsing.vocabulary import Vocabulary

BOOK = Tool(
    "book",
    "Book a table",
    {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "seats": {"type": "integer"},
            "area": {"type": "string", "enum": ["inside", "terrace"]},
            "options": {
                "type": "object",
                "properties": {"quiet": {"type": "boolean"}},
                "required": ["quiet"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["place", "options"],
        "additionalProperties": False,
    },
    strict=True,
)
NOW = Tool("now", "The time")
TOOLS = (BOOK, NOW)

FORMATS = sorted(TOOL_FORMATS)
COMPOSED = ("<|channel|>analysis<|message|>", "<|channel>thought\n")  # openers of several tokens


def reasoning_of(name: str) -> ReasoningFormat:
    return REASONING_FORMATS.get(name, THINK)


def vocabulary_of(spoken: ToolFormat, reasoning: ReasoningFormat, as_tokens: bool = True) -> Vocabulary:
    if not as_tokens:
        return Vocabulary()
    calls = [mark for mark in spoken.markers if mark not in (reasoning.opener, reasoning.closer)]
    thoughts = [mark for mark in (reasoning.opener, reasoning.closer) if mark not in COMPOSED]
    special = (calls if spoken.shows_special else []) + (thoughts if reasoning.shows_special else [])
    return Vocabulary(special, [mark for mark in calls + thoughts if mark not in special])


def read(
    spoken: ToolFormat, text: str, reasoning: ReasoningFormat, inside: bool = False
) -> list[ParsedEvent]:
    numbers = itertools.count()
    parser = spoken.parser(TOOLS, reasoning, inside, lambda: str(next(numbers)))
    return joined(parser.feed(text) + parser.finish())


def checked_calls(events: list[ParsedEvent]) -> list[str]:
    """The names of the calls, whose arguments are valid."""
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert len(names) == len(arguments)
    schemas = {tool.name: tool.parameters or {"maxProperties": 0} for tool in TOOLS}
    for name, given in zip(names, arguments, strict=True):
        jsonschema.validate(given, schemas[name])
    return names


def cases(name: str) -> list[tuple[ToolFormat, Vocabulary]]:
    spoken, reasoning = TOOL_FORMATS[name], reasoning_of(name)
    vocabularies = [vocabulary_of(spoken, reasoning)]
    if not spoken.shows_special:
        vocabularies.append(vocabulary_of(spoken, reasoning, as_tokens=False))
    return [(spoken, vocabulary) for vocabulary in vocabularies]


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_calls_and_nothing_else(name: str) -> None:
    random_source = random.Random(name)
    ended = booked = 0
    for spoken, vocabulary in cases(name):
        source = spoken.grammar(TOOLS, "required", True, special=vocabulary.ids)
        assert source is not None
        for _ in range(16):
            text = vocabulary.walk(source, random_source)
            if text is None:
                continue
            ended += 1
            events = read(spoken, text, reasoning_of(name))
            names = checked_calls(events)
            assert names, text
            booked += "book" in names
            assert not any(isinstance(event, Content) for event in events), text
    assert ended >= 6
    assert booked  # walks that came through the schema, not only through the tool without parameters


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_called_once(name: str) -> None:
    random_source = random.Random(name)
    for spoken, vocabulary in cases(name):
        source = spoken.grammar(TOOLS, NOW, True, special=vocabulary.ids)
        assert source is not None
        text = vocabulary.walk(source, random_source)
        assert text is not None
        assert checked_calls(read(spoken, text, reasoning_of(name))) == ["now"]


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_at_most_without_parallel_calls(name: str) -> None:
    random_source = random.Random(name)
    for spoken, vocabulary in cases(name):
        source = spoken.grammar((NOW,), "required", False, special=vocabulary.ids)
        assert source is not None
        text = vocabulary.walk(source, random_source)
        assert text is not None
        again = spoken.syntax.again or "\n"
        assert vocabulary.accepts(source, text)
        assert not vocabulary.accepts(source, text + again + text)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_strict_tools_leave_free_text_free_and_hold_calls_to_the_schema(name: str, parallel: bool) -> None:
    random_source = random.Random(name)
    for spoken, vocabulary in cases(name):
        source = spoken.grammar(TOOLS, "auto", parallel, special=vocabulary.ids)
        required = spoken.grammar(TOOLS, "required", False, special=vocabulary.ids)
        assert source is not None
        assert required is not None
        plain = "Hello <b>there</b>.\n{x} [y]\n"
        if name == "harmony":
            plain = f"<|channel|>final<|message|>{plain}"
        assert vocabulary.accepts(source, plain)
        for _ in range(4):
            call = vocabulary.walk(required, random_source)
            if call is None:
                continue
            assert vocabulary.accepts(source, call), call
            if spoken.syntax.opener and name != "harmony":
                assert vocabulary.accepts(source, f"First.\n{call}")
            wrong = call.replace("book", "cook").replace("now", "cow")
            assert not vocabulary.accepts(source, wrong), wrong


@pytest.mark.parametrize("name", ["json", "llama3"])
def test_free_text_cannot_become_a_call_that_is_not_held_to_the_schema(name: str) -> None:
    source = TOOL_FORMATS[name].grammar(TOOLS, "auto", True)
    assert source is not None
    vocabulary = Vocabulary()
    for text in (
        'x\n{"name": "book"}',
        'x\n```json\n [{"arguments": 1',
        '```tool_code\nbook(place="x")\n```',
    ):
        assert not vocabulary.accepts(source, text), text
    assert vocabulary.accepts(source, 'x\n```json\n{"place": "book"}\n```')


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inside", [True, False])
def test_reasoning_comes_before_required_calls(name: str, inside: bool) -> None:
    random_source = random.Random(name)
    spoken, reasoning = TOOL_FORMATS[name], reasoning_of(name)
    vocabulary = vocabulary_of(spoken, reasoning)
    source = spoken.grammar(TOOLS, NOW, True, reasoning, inside, vocabulary.ids)
    call = vocabulary.walk(spoken.grammar(TOOLS, NOW, True, special=vocabulary.ids) or "", random_source)
    assert source is not None
    assert call is not None
    opener = "" if inside else reasoning.opener
    closer = reasoning.closer + ("<|start|>assistant" if name == "harmony" else "\n")
    text = f"{opener}12345678{closer}{call}"
    assert vocabulary.accepts(source, text)
    assert not vocabulary.accepts(source, f"{opener}12345678{call}")
    assert vocabulary.accepts(source, call) is not inside
    events = read(spoken, text, reasoning, inside)
    assert events[0] == Reasoning("12345678")
    assert checked_calls(events) == ["now"]


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
@pytest.mark.parametrize("rest", ['rest: %json {"type": "integer"}', "rest: /[0-9]+/"])
def test_an_answer_follows_a_block_of_reasoning(name: str, rest: str) -> None:
    reasoning = REASONING_FORMATS[name]
    spoken = TOOL_FORMATS.get(name, TOOL_FORMATS["hermes"])
    vocabulary = vocabulary_of(spoken, reasoning)
    answer = "<|channel|>final<|message|>42" if name == "harmony" else "42"
    closer = reasoning.closer + ("<|start|>assistant" if name == "harmony" else "")
    source = reasoning_grammar(reasoning, False, rest, vocabulary.ids)
    assert vocabulary.accepts(source, answer)
    assert vocabulary.accepts(source, f"{reasoning.opener}abc{closer}{answer}")
    assert not vocabulary.accepts(source, answer + "x")
    inside = reasoning_grammar(reasoning, True, rest, vocabulary.ids)
    assert vocabulary.accepts(inside, f"abc{closer}{answer}")
    assert not vocabulary.accepts(inside, "a" * 9)


def test_reasoning_may_end_with_a_mark_of_several_tokens() -> None:
    plain = Vocabulary()
    source = reasoning_grammar(THINK, True, "rest: /[0-9]+/")
    assert plain.accepts(source, "abc </b></think>\n\n42")
    assert not plain.accepts(source, "abc</think>x")


def test_nothing_is_enforced_where_nothing_was_asked() -> None:
    loose = Tool("book", None, BOOK.parameters)
    for spoken in TOOL_FORMATS.values():
        assert spoken.grammar((loose, NOW), "auto", True) is None
        assert spoken.grammar((loose, NOW), "auto", False) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_calls_can_be_held_to_a_schema(name: str) -> None:
    for spoken, vocabulary in cases(name):
        content = 'rest: %json {"type": "integer"}'
        source = spoken.grammar((NOW,), "auto", True, special=vocabulary.ids, content=content)
        call = vocabulary.walk(
            spoken.grammar((NOW,), "required", False, special=vocabulary.ids) or "", random.Random(1)
        )
        assert source is not None
        assert call is not None
        answer = "<|channel|>final<|message|>42" if name == "harmony" else "42"
        assert vocabulary.accepts(source, answer)
        assert vocabulary.accepts(source, call)
        assert not vocabulary.accepts(source, answer + "x")


@pytest.mark.parametrize("name", ["qwen_xml", "dsml", "gemma"])
def test_what_a_way_of_writing_cannot_be_held_to_is_refused_for_strict_tools(name: str) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string", "pattern": "^a"}}}
    with pytest.raises(UnsupportedSchema, match="pattern") as refused:
        TOOL_FORMATS[name].grammar((Tool("book", None, schema, strict=True),), "required", True)
    assert refused.value.tool_name == "book"
    assert TOOL_FORMATS[name].grammar((Tool("book", None, schema),), "required", True) is not None


def test_a_strict_schema_is_enforced_in_every_keyword_or_refused() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(UnsupportedSchema, match=r"properties\.tags\.uniqueItems"):
        TOOL_FORMATS["hermes"].grammar((Tool("book", None, schema, strict=True),), "auto", True)
    source = TOOL_FORMATS["hermes"].grammar((Tool("book", None, schema),), "required", True)
    call = '<tool_call>\n{"name": "book", "arguments": {"tags": [1, 1]}}\n</tool_call>'
    assert source is not None
    assert Vocabulary().accepts(source, call)


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
def test_a_schema_is_never_taken_for_another_notation(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["::=", "x"]}}, "required": ["a"]}
    source = TOOL_FORMATS[name].grammar((Tool("book", None, schema),), "required", True)
    assert source is not None
    assert "::=" not in source
    call = '<tool_call>\n{"name": "book", "arguments": {"a": "::="}}\n</tool_call>'
    if name == "qwen_xml":
        call = "<tool_call>\n<function=book>\n<parameter=a>\n::=\n</parameter>\n</function>\n</tool_call>"
    assert Vocabulary().accepts(source, call)


def test_arguments_that_are_no_object_are_refused() -> None:
    with pytest.raises(UnsupportedSchema, match="'array'"):
        TOOL_FORMATS["hermes"].grammar((Tool("book", None, {"type": "array"}),), "required", True)


@pytest.mark.parametrize(
    ("template", "call"),
    [
        ("{{ tools }}[TOOL_CALLS]", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        ("{{ tools }}[TOOL_CALLS]x[ARGS]", "[TOOL_CALLS]now[ARGS]{}"),
        ("{{ tools }}[TOOL_CALLS]x[CALL_ID]y[ARGS]", "[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}"),
        (
            "{{ tools }}<｜tool▁call▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "{{ tools }}<｜DSML｜ function_calls",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',  # noqa: E501
        ),
    ],
)
def test_models_of_a_family_are_held_to_the_way_of_their_own_template(template: str, call: str) -> None:
    spoken, _ = detect(template)
    assert spoken is not None
    vocabulary = Vocabulary(special=spoken.markers)
    source = spoken.grammar((NOW,), "required", True, special=vocabulary.ids)
    assert source is not None
    assert vocabulary.accepts(source, call)
    assert checked_calls(read(spoken, call, THINK)) == ["now"]
