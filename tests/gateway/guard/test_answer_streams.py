"""Streamed answers through the guard: the same texts as whole, for every split of bytes and of deltas."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.gateway.body import read_fields
from ridgeline.gateway.guard.answers import Restorer
from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.guard.errors import Blocked, GuardFailed
from ridgeline.gateway.guard.guards import Guard
from tests.gateway.guard import events

PASSWORD = 'q"7\\zz9'  # what must be escaped in JSON
ASKED = f"mail ann@x.org, password = '{PASSWORD}', call +49 30 1234567"
REQUEST = {"messages": [{"role": "user", "content": ASKED}]}
TEXT = (
    "Hi <EMAIL_1>! I wrote to <email_1>, and zed@zed.com too; card 4111 1111 1111 1111, <PHONE_1>."
    " Ünïcode <b>."
)
ARGUMENTS = json.dumps(
    {"to": "<EMAIL_1>", "cc": ["zed@zed.com"], "card": 4111111111111111, "pw": "<SECRET_1>\n"}
)


def restorer(**config) -> Restorer:
    guard = Guard(GuardConfig(**config))
    made = asyncio.run(guard.request("chat", read_fields(json.dumps(REQUEST).encode()))).restorer
    assert made is not None
    return made


def through(data: bytes, cuts: list[int], **config) -> bytes:
    stream = restorer(**config).stream("chat")
    out, at = b"", 0
    for cut in sorted({min(cut, len(data)) for cut in cuts}):
        out += stream.feed(data[at:cut])
        at = cut
    return out + stream.feed(data[at:]) + stream.finish()


def parts(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def whole_chat(text: str, arguments: str, **config) -> tuple[str, str]:
    call = {"id": "call_1", "type": "function", "function": {"name": "send", "arguments": arguments}}
    body = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text, "tool_calls": [call]}}]
    }
    answer = json.loads(restorer(**config).answer("chat", json.dumps(body).encode()))
    message = answer["choices"][0]["message"]
    return message["content"], message["tool_calls"][0]["function"]["arguments"]


POLICIES = [
    {},
    {"answers_redact": ("email", "card")},
    {"restore": False, "answers_redact": ("email", "card")},
]
CUTS = st.lists(st.integers(0, 4000), max_size=10)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_whole_answer_is_restored_and_redacted_as_the_policy_says(policy):
    text, arguments = whole_chat(TEXT, ARGUMENTS, **policy)
    restored, redacted = policy.get("restore", True), "answers_redact" in policy
    assert ("ann@x.org! I wrote to ann@x.org" in text) == restored
    assert ("zed@zed.com" not in text + arguments) == redacted
    assert ("4111" not in text + arguments) == redacted
    read = json.loads(arguments)
    assert read["pw"] == (PASSWORD + "\n" if restored else "<SECRET_1>\n")


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(CUTS, CUTS, CUTS)
def test_streamed_is_whole_in_every_dialect_and_for_every_split(policy, bytes_at, text_at, arguments_at):
    expected = whole_chat(TEXT, ARGUMENTS, **policy)
    texts, arguments = parts(TEXT, text_at), parts(ARGUMENTS, arguments_at)
    chat = through(events.chat(texts, arguments), bytes_at, **policy)
    assert events.chat_texts(chat) == expected
    assert chat.endswith(b"data: [DONE]\n\n")
    unfinished = through(events.chat(texts, arguments, finished=False), bytes_at, **policy)
    assert events.chat_texts(unfinished) == expected
    assert events.completions_text(through(events.completions(texts), bytes_at, **policy)) == expected[0]
    messages = through(events.messages(texts, arguments, texts), bytes_at, **policy)
    assert events.messages_texts(messages)[:2] == expected
    responses = through(events.responses(texts, arguments), bytes_at, **policy)
    assert events.responses_texts(responses) == expected


@settings(max_examples=40, deadline=None)
@given(CUTS)
def test_the_bytes_that_come_out_do_not_depend_on_the_split_of_the_bytes_that_go_in(cuts):
    policy = {"answers_redact": ("email", "card")}
    data = events.chat(parts(TEXT, [5, 9, 30]), parts(ARGUMENTS, [3, 12])) + events.responses(
        [TEXT], [ARGUMENTS]
    )
    assert through(data, cuts, **policy) == through(data, [], **policy)


def test_an_answer_without_placeholders_comes_out_byte_for_byte():
    data = events.chat(["plain ", "text"], ['{"a": 1}']) + b": a comment\n\nevent: ping\ndata: {}\n\n"
    assert through(data, [7, 50]) == data


def test_events_keep_their_order_and_numbers_when_one_is_put_in():
    data = through(events.responses(["mail <EMAIL", "_1", ">", " <EM"], ['{"a":"<EMA', 'IL_1>"}']), [])
    read = events.read(data)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    assert [event["type"] for event in read][-1] == "response.completed"
    done = next(event for event in read if event["type"] == "response.output_text.done")
    assert done["text"] == events.responses_texts(data)[0] == "mail ann@x.org <EM"
    assert read[-1]["response"]["output"][0]["content"][0]["text"] == "mail ann@x.org <EM"


def test_what_is_held_back_comes_before_the_event_that_ends_its_block():
    data = through(events.messages(["say <EM"], ["{}"], ["hm <EMAIL_1>"]), [])
    kinds = [(event["type"], event.get("index")) for event in events.read(data)]
    assert kinds.index(("content_block_stop", 1)) > kinds.index(("content_block_delta", 1))
    assert events.messages_texts(data) == ("say <EM", "{}", "hm <EMAIL_1>")  # thinking is signed, and stays


def test_two_choices_and_two_calls_do_not_mix_their_texts():
    def chunk(index, text, finish=None):
        return {"id": "c", "choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}

    made = events.sse(
        [chunk(0, "<EMA"), chunk(1, "<PHO"), chunk(0, "IL_1>"), chunk(1, "NE_1>"), chunk(0, "", "stop")]
    )
    texts = {0: "", 1: ""}
    for event in events.read(through(made, [])):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"]["content"]
    assert texts == {0: "ann@x.org", 1: "+49 30 1234567"}


def test_a_blocked_answer_ends_and_nothing_more_comes_out():
    stream = restorer(answers_block=("card",)).stream("chat")
    out = stream.feed(events.sse([{"choices": [{"index": 0, "delta": {"content": "fine so far, "}}]}]))
    with pytest.raises(Blocked) as blocked:
        stream.feed(events.chat(["4111 1111 1111 1111 it is"], []))
    assert b"4111" not in out
    assert "4111" not in blocked.value.message
    with pytest.raises(GuardFailed):
        stream.feed(b"data: {}\n\n")
    with pytest.raises(GuardFailed):
        stream.finish()


def test_an_event_that_cannot_be_read_fails_the_stream():
    with pytest.raises(GuardFailed):
        through(b'data: {"choices": [{"delta": {"content": "<EMAIL_1\n\n', [])


def test_pieces_of_a_text_are_not_told_beside_it_where_answers_are_redacted():
    logprobs = {"content": [{"token": "zed", "logprob": -0.1}, {"token": "@zed.com", "logprob": -0.2}]}
    chunk = {"choices": [{"index": 0, "delta": {"content": "zed@zed.com"}, "logprobs": logprobs}]}
    assert b"zed" not in through(events.sse([chunk]), [], answers_redact=("email",))
    assert b"logprob" in through(events.sse([chunk]), [])


def test_findings_of_the_answer_are_counted():
    made = restorer(answers_log=("email",))
    stream = made.stream("chat")
    assert b"zed@zed.com" in stream.feed(events.chat(["to zed@", "zed.com "], [])) + stream.finish()
    assert made.findings == {"email": 1}
