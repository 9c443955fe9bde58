# ruff: noqa: E501 - texts stand as a model writes them
"""What each format's calls, broken calls and text around calls are read as."""

from __future__ import annotations

import itertools

import pytest

from ridgeline.server.parsing.events import ParsedEvent, Tool, joined, short_call_id
from ridgeline.server.parsing.events import call_id as new_call_id
from ridgeline.server.parsing.format_table import TOOL_FORMATS
from ridgeline.server.parsing.reasoning import REASONING_FORMATS, THINK
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning
from tests.server.parsing.texts import TOOLS


def read(name: str, text: str, tools: tuple[Tool, ...] = TOOLS, inside: bool = False) -> list[ParsedEvent]:
    numbers = itertools.count()
    reasoning = REASONING_FORMATS.get(name, THINK)
    parser = TOOL_FORMATS[name].parser(tools, reasoning, inside, lambda: f"id{next(numbers)}")
    return joined(parser.feed(text) + parser.finish())


def call(index: int, name: str, arguments: str) -> list[ParsedEvent]:
    return [CallStart(f"id{index}", name, index), CallArguments(arguments, index)]


BOTH = [*call(0, "get_weather", '{"city": "Rom"}'), *call(1, "now", "{}")]

TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRom\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rom"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rom"}, "id": "abc123def"}, '
    '{"name": "now", "arguments": {}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Rom"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
    'Rom</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Rom"}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>',
    "gemma": '<|tool_call>call:get_weather{city:<|"|>Rom<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "json": '[{"name": "get_weather", "arguments": {"city": "Rom"}}, {"name": "now", "arguments": {}}]',
}
SAME_CALLS = [
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rom"}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}'),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rom"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rom"}}\n{"name": "now"}'),
    ("llama3", '<|python_tag|>get_weather.call(city="Rom")<|python_tag|>now.call()'),
    (
        "json",
        '```json\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n```\n```\n{"name": "now"}\n```',
    ),
    ("json", '```tool_code\nprint(get_weather(city="Rom"))\n```\n```tool_code\nnow()\n```'),
    ("hermes", '<tool_call>[{"name":"get_weather","arguments":{"city": "Rom"}},{"name":"now"}]</tool_call>'),
]


@pytest.mark.parametrize(("name", "text"), [*TWO_CALLS.items(), *SAME_CALLS])
def test_two_calls_are_read(name: str, text: str) -> None:
    assert read(name, text) == BOTH


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"harmony"}))
def test_text_around_calls_is_content_without_the_white_space_between(name: str) -> None:
    text = f"Let me see. \n\n{TWO_CALLS[name]}\n\n"
    assert read(name, text) == [Content("Let me see."), *BOTH]
    if name not in ("llama3", "json"):  # their calls end with their line
        assert read(name, f"{text}That is all.\n") == [Content("Let me see."), *BOTH, Content("That is all.")]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_call_of_no_tool_of_the_request_is_content(name: str) -> None:
    text = TWO_CALLS[name]
    others = (Tool("other"),)
    assert read(name, text, others) == [Content(text)]
    if name != "harmony":
        assert read(name, text, ()) == [Content(text)]


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"harmony", "gemma", "mistral"}))
def test_calls_inside_reasoning_are_reasoning(name: str) -> None:
    text = TWO_CALLS[name]
    assert read(name, f"<think>\n{text}\n</think>\n\nNo.") == [Reasoning(text), Content("No.")]
    assert read(name, f"\n{text}\n\n</think>\n\n{text}", inside=True) == [Reasoning(text), *BOTH]
    assert read(name, f"\n{text}", inside=True) == [Reasoning(text)]


def test_channels_are_reasoning_content_and_calls() -> None:
    text = "<|channel|>analysis<|message|>\nhm\n<|end|><|start|>assistant" + TWO_CALLS["harmony"]
    assert read("harmony", text) == [Reasoning("hm"), *BOTH]
    text = "<|channel>thought\nhm\n<channel|>" + TWO_CALLS["gemma"]
    assert read("gemma", text) == [Reasoning("hm"), *BOTH]
    assert read("mistral", f"[THINK]hm[/THINK]{TWO_CALLS['mistral']}") == [Reasoning("hm"), *BOTH]


def test_two_messages_of_one_channel_stand_on_lines_of_their_own() -> None:
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d"
    )
    assert read("harmony", text) == [Reasoning("a"), Content("b"), Reasoning("\nc"), Content("\nd")]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "}{\\"<b>"}', '{"a": "}{\\"<b>"}'),
        ('  {"a" : [ 1 ]} ', '{"a" : [ 1 ]}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('""', "{}"),
        ("null", "{}"),
        ("[1, 2]", "[1, 2]"),
        ("17", "17"),
        ('{"a": oops}', '{"a": oops}'),
        ('{"a": "\\u00e9\\ud83d"}', '{"a": "\\u00e9\\ud83d"}'),
        ('"\\ud83d"', "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_json_arguments_are_passed_on_as_they_were_written(written: str, arguments: str) -> None:
    expected = call(0, "now", arguments)
    assert read("hermes", f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>') == expected
    assert read("hermes", f'<tool_call>{{"arguments": {written}, "name": "now"}}</tool_call>') == expected
    assert read("json", f'{{"name": "now", "arguments": {written}}}') == expected


@pytest.mark.parametrize(
    ("parameter", "written", "json_text"),
    [
        ("city", "Rom\nand more", '"Rom\\nand more"'),
        ("city", "12", '"12"'),
        ("city", '"quoted"', '"\\"quoted\\""'),
        ("days", "12", "12"),
        ("days", "1.5", '"1.5"'),
        ("days", "soon", '"soon"'),
        ("metric", "True", "true"),
        ("where", '{"lat": 1}', '{"lat": 1}'),
        ("where", '{"lat": NaN}', '"{\\"lat\\": NaN}"'),
        ("note", "null", "null"),
        ("note", "12", '"12"'),
        ("unheard", "[1]", "[1]"),
        ("unheard", "plain", '"plain"'),
    ],
)
def test_values_between_tags_get_the_types_of_the_schema(
    parameter: str, written: str, json_text: str
) -> None:
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>"
    )
    assert read("qwen_xml", text) == call(0, "get_weather", f'{{"{parameter}": {json_text}}}')


def test_a_cut_call_keeps_what_was_written_of_it() -> None:
    whole = TWO_CALLS["hermes"]
    cut = whole[: whole.index("Rom") + 2]
    assert read("hermes", cut) == call(0, "get_weather", '{"city": "Ro')
    before = whole[: whole.index('"arguments"') + 4]
    assert read("hermes", before) == [Content(before)]
    cut = TWO_CALLS["gemma"][: TWO_CALLS["gemma"].index("Rom") + 2]
    assert read("gemma", cut) == call(0, "get_weather", '{"city": "Ro')
    cut = TWO_CALLS["qwen_xml"][: TWO_CALLS["qwen_xml"].index("Rom") + 2]
    assert read("qwen_xml", cut) == call(0, "get_weather", '{"city": "Ro')


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "gemma"])
@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_closing_mark_that_a_limit_cut_is_not_content(name: str, cut: int) -> None:
    assert read(name, TWO_CALLS[name][:-cut]) == BOTH


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    good = '<tool_call>{"name": "now"}</tool_call>'
    assert read("hermes", f"<tool_call>{{oops}}</tool_call>{good}") == [
        Content("<tool_call>{oops}</tool_call>"),
        *call(0, "now", "{}"),
    ]
    assert read("hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": 1</tool_call>{good}') == [
        *call(0, "now", '{"a": 1'),
        *call(1, "now", "{}"),
    ]


@pytest.mark.parametrize("text", ['{"city": "Rom"}', '{"name": "now", "why": 1}', "[1, 2]", "```\n{}\n```"])
def test_an_answer_that_is_json_itself_is_content(text: str) -> None:
    assert read("json", text) == [Content(text)]
    assert read("llama3", text) == [Content(text)]


def test_the_name_and_the_arguments_come_as_soon_as_they_are_known() -> None:
    parser = TOOL_FORMATS["hermes"].parser(TOOLS, None, False, lambda: "id0")
    assert parser.feed('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    assert parser.feed('{"ci') == [CallStart("id0", "get_weather"), CallArguments('{"ci')]
    assert parser.feed('ty": "R') == [CallArguments('ty": "R')]
    parser = TOOL_FORMATS["hermes"].parser(TOOLS, None, False, lambda: "id0")
    assert parser.feed("Hello <tool") == [Content("Hello")]
    assert parser.feed("box>") == [Content(" <toolbox>")]


def test_ids_are_those_that_clients_and_templates_take() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(id.startswith("call_") and id[5:].isalnum() for id in ids)
    short = short_call_id()
    assert len(short) == 9
    assert short.isalnum()
    assert TOOL_FORMATS["mistral"].new_id is short_call_id
