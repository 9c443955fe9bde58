"""Events of text alone are made from a template; byte for byte they are what the struct encodes to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.server.openai_api.response_bodies import (
    ChatChunk,
    ChatChunkChoice,
    CompletionChoice,
    Delta,
    Event,
    TextCompletion,
    TextEvents,
    event,
)
from tests.server.events import events
from tests.server.scripted_client import say
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage

HEAD: dict[str, Any] = {"id": "chatcmpl-r", "created": 1, "model": 'a "\x00" b', "system_fingerprint": "fp"}


def chat_event(index: int, text: str) -> Event:
    return ChatChunk(**HEAD, choices=[ChatChunkChoice(index, Delta(content=text))], usage=None)


def completion_event(index: int, text: str) -> Event:
    return TextCompletion(**HEAD, choices=[CompletionChoice(index, text)])


@pytest.mark.parametrize("event_of", [chat_event, completion_event])
@given(text=st.text(), index=st.integers(0, 1000))
def test_a_template_filled_is_the_struct_encoded(event_of, text, index):
    assert TextEvents(event_of).of(index, text) == event(event_of(index, text))


def test_choices_do_not_share_their_templates():
    made = TextEvents(chat_event)
    assert made.of(0, "a") != made.of(1, "a") == event(chat_event(1, "a"))
    assert made.of(0, "b") == event(chat_event(0, "b"))


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HELLO), (COMPLETIONS, {"model": "m", "prompt": "hello"})], ids=["chat", "text"]
)
@pytest.mark.parametrize("usage", [False, True])
async def test_streamed_events_decode_to_the_declared_structs(path, body, usage):
    """Every event of a stream, by whichever way it was made, has all the fields the struct has."""
    stage = Stage(say('é "quoted" \\ 🦊\n'))
    asked = body | {"stream": True, "n": 2, "stream_options": {"include_usage": usage}}
    response = await stage.post(path, asked)
    kind = ChatChunk if path == CHAT else TextCompletion
    told = [msgspec.convert(each, kind) for each in events(response.text) if each != "[DONE]"]
    shown = {0: "", 1: ""}
    for each in told:
        for choice in each.choices:
            text = choice.delta.content if path == CHAT else choice.text
            shown[choice.index] += text if isinstance(text, str) else ""
    assert set(shown.values()) == {'é "quoted" \\ 🦊\n'}
    keys = [set(each) for each in events(response.text) if each != "[DONE]" and each["choices"]]
    assert all(each == keys[0] for each in keys)
    assert ("usage" in keys[0]) is usage
