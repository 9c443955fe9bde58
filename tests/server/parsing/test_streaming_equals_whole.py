"""For every split of a text into chunks the joined events are the same, for every parser."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.server.parsing.events import OutputParser, ParsedEvent, joined
from ridgeline.server.parsing.format_table import TOOL_FORMATS, plain_parser
from ridgeline.server.parsing.reasoning import REASONING_FORMATS, THINK, ReasoningFormat
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning
from tests.server.parsing.texts import PIECES, TEXTS, TOOLS

FORMATS = sorted(TOOL_FORMATS)
SPLITS_PER_PARSER = 20_000


def reasoning_of(name: str) -> ReasoningFormat:
    return REASONING_FORMATS.get(name, THINK)


def fresh(name: str, inside: bool = False) -> OutputParser:
    numbers = itertools.count()
    return TOOL_FORMATS[name].parser(TOOLS, reasoning_of(name), inside, lambda: f"call_{next(numbers)}")


def read(parser: OutputParser, chunks: Iterable[str]) -> list[ParsedEvent]:
    events: list[ParsedEvent] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    return joined(events + parser.finish())


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def random_texts(name: str, random_source: random.Random, count: int) -> list[str]:
    return [
        "".join(random_source.choices(PIECES[name], k=random_source.randint(2, 12))) for _ in range(count)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_the_events_do_not_depend_on_how_the_text_is_split(name: str) -> None:
    random_source = random.Random(name)
    texts = [*TEXTS[name], *random_texts(name, random_source, 150)]
    splits = 0
    for round_number in itertools.count():
        for text, inside in itertools.product(texts, (False, True)):
            whole = read(fresh(name, inside), [text])
            if round_number == 0:
                cut_sets: list[Iterable[int]] = [range(1, len(text)), *([cut] for cut in range(1, len(text)))]
            else:
                cut_sets = [
                    random_source.sample(range(1, len(text)), min(random_source.randint(2, 9), len(text) - 1))
                    for _ in range(20)
                    if len(text) > 1
                ]
            for cuts in cut_sets:
                chunks = pieces_of(text, cuts)
                assert read(fresh(name, inside), chunks) == whole, (inside, chunks)
                splits += 1
        if splits >= SPLITS_PER_PARSER:
            break
        texts = random_texts(name, random_source, 150)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_that_a_model_writes_makes_a_parser_fail(name: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(PIECES[name]), st.text(max_size=6)), max_size=25), st.data())
    def check(parts: list[str], data: st.DataObject) -> None:
        text = "".join(parts)
        whole = read(fresh(name), [text])
        assert read(fresh(name), list(text)) == whole
        assert read(fresh(name), parts) == whole
        check_shape(whole)
        without = joined(TOOL_FORMATS[name].parser(()).feed(text))
        assert not any(isinstance(event, CallStart | CallArguments) for event in without)

    check()


def check_shape(events: list[ParsedEvent]) -> None:
    """Calls count from 0, arguments follow their own call, and every text can be sent."""
    calls = 0
    for event in events:
        match event:
            case CallStart():
                assert event.index == calls
                assert event.name in {tool.name for tool in TOOLS}
                calls += 1
            case CallArguments():
                assert event.index == calls - 1
                event.text.encode()
            case Content() | Reasoning():
                assert event.text
                event.text.encode()


@pytest.mark.parametrize("name", FORMATS)
def test_without_calls_and_reasoning_no_character_is_lost(name: str) -> None:
    text = "  A {\"b\": [1]}, <c> [d] `e`\n\n```python\nprint('f')\n```\nend \n"
    assert read(fresh(name), [text]) == [Content(text)]


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_without_a_format_has_its_reasoning_read(inside: bool) -> None:
    text = "hm\n</think>\n\nHi <think>\n" if inside else "<think>\nhm\n</think>\n\nHi <think>\n"
    expected = [Reasoning("hm"), Content("Hi <think>\n")]
    for cut in range(len(text)):
        assert read(plain_parser(THINK, inside), [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_long_adversarial_texts_are_read_in_steps_that_do_not_grow(name: str) -> None:
    """Counted, not timed: what a parser keeps unread stays as short as a marker, however long the text."""
    for piece in PIECES[name]:
        parser = fresh(name)
        unread = 0
        for _ in range(2000):
            parser.feed(piece)
            unread = max(unread, len(parser.cursor._text) - parser.cursor._at)  # type: ignore[attr-defined]
        parser.finish()
        assert unread <= 40, piece
