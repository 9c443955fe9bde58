"""Streams as many servers write them, translated: the same for any split, with nothing of a call lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.gateway.body import raw
from ridgeline.gateway.dialects import StreamTranslator, translate_answer
from ridgeline.gateway.errors import UpstreamFailed
from tests.server.events import events
from tests.server.messages import joined

THINKING = {"thinking": raw({"type": "adaptive"})}
USAGE = {"include_usage": True}
WITH_USAGE = {"stream_options": raw(USAGE)}


def delta(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "created": 5, "model": "m", "choices": [choice], "usage": None}


def calls(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return delta(tool_calls=list(parts), **more)


def part(index: int | None, arguments: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {"name": fields.pop("name", None), "arguments": arguments}
    return {"index": index, "function": function, **fields}


def chat_stream(*chunks: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + end


def message_stream(*parts: dict[str, Any]) -> bytes:
    return b"".join(
        b"event: " + part["type"].encode() + b"\ndata: " + json.dumps(part).encode() + b"\n\n"
        for part in parts
    )


def start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def grow(index: int, **grown: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": grown}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


BEGIN = {"type": "message_start", "message": {"id": "msg_1", "model": "m", "usage": {"input_tokens": 3}}}
END = (
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
    {"type": "message_stop"},
)
MESSAGE = message_stream(
    BEGIN,
    {"type": "ping"},
    start(0, type="thinking", thinking="", signature=""),
    grow(0, type="thinking_delta", thinking="hm"),
    grow(0, type="signature_delta", signature="sig"),
    stop(0),
    start(1, type="text", text=""),
    grow(1, type="text_delta", text="Let “me” see"),
    stop(1),
    start(2, type="tool_use", id="toolu_1", name="f", input={}),
    grow(2, type="input_json_delta", partial_json=""),
    grow(2, type="input_json_delta", partial_json='{"a": 1.10, '),
    grow(2, type="input_json_delta", partial_json='"b": "\\u00e9"}'),
    stop(2),
    start(3, type="tool_use", id="toolu_2", name="g", input={}),
    stop(3),
    *END,
)
CHAT = chat_stream(
    delta(role="assistant", content=""),
    delta(reasoning_content="hm"),
    delta(content="Let “me” see"),
    calls(part(0, "", id="call_1", name="f")),
    calls(part(0, '{"a": 1.10, ')),
    calls(part(0, '"b": "\\u00e9"}')),
    calls(part(1, "", id="call_2", name="g")),
    delta("tool_calls"),
    {"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
)


def translated(kind: str, family: Any, data: bytes, step: int = 10**9, **fields: Any) -> bytes:
    translator = StreamTranslator(kind, family, fields)
    pieces = [data[place : place + step] for place in range(0, len(data), step)]
    return b"".join([*(translator.feed(piece) for piece in pieces), translator.finish()])


def to_message(data: bytes) -> dict[str, Any]:
    parts = events(translated("messages", "openai", data, **THINKING).decode())
    return joined([part for part in parts if isinstance(part, dict)])


def inputs(message: dict[str, Any]) -> list[tuple[str, str, Any]]:
    return [(b["id"], b["name"], b["input"]) for b in message["content"] if b["type"] == "tool_use"]


def to_chat_calls(data: bytes) -> list[tuple[str, str, str]]:
    found: dict[int, list[str]] = {}
    for chunk in events(translated("chat", "anthropic", data).decode()):
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            for call in choice["delta"].get("tool_calls", ()):
                whole = found.setdefault(call["index"], ["", "", ""])
                whole[0] += call.get("id", "")
                whole[1] += call["function"].get("name", "")
                whole[2] += call["function"]["arguments"]
    return [(id, name, arguments) for id, name, arguments in found.values()]


@given(cuts=st.lists(st.integers(0, 3000), max_size=15), crlf=st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_split_of_the_upstreams_bytes_gives_the_same(cuts: list[int], crlf: bool) -> None:
    for kind, family, data, fields in (
        ("chat", "anthropic", MESSAGE, WITH_USAGE),
        ("messages", "openai", CHAT, THINKING),
    ):
        given = data.replace(b"\n", b"\r\n") if crlf else data
        translator = StreamTranslator(kind, family, fields)  # type: ignore[arg-type]
        places = [0, *sorted(cut % len(given) for cut in cuts), len(given)]
        out = b"".join(translator.feed(given[a:b]) for a, b in itertools.pairwise(places))
        without_time = [
            {**part, "created": 0} if isinstance(part, dict) and "created" in part else part
            for part in events((out + translator.finish()).decode())
        ]
        expected = events(translated(kind, family, data, **fields).decode())
        assert without_time == [
            {**part, "created": 0} if isinstance(part, dict) and "created" in part else part
            for part in expected
        ]


def test_input_that_comes_as_deltas_arrives_as_arguments() -> None:
    expected = [("toolu_1", "f", '{"a": 1.10, "b": "\\u00e9"}'), ("toolu_2", "g", "{}")]
    assert to_chat_calls(MESSAGE) == expected


def test_input_that_comes_with_the_start_of_its_block_arrives_too() -> None:
    data = message_stream(BEGIN, start(0, type="tool_use", id="t", name="f", input={"a": [1]}), stop(0), *END)
    ((_, _, arguments),) = to_chat_calls(data)
    assert json.loads(arguments) == {"a": [1]}


def test_arguments_that_come_as_deltas_arrive_as_input() -> None:
    message = to_message(CHAT)
    assert inputs(message) == [("call_1", "f", {"a": 1.1, "b": "é"}), ("call_2", "g", {})]
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["input_tokens"] == 3
    assert message["usage"]["output_tokens"] == 9


def test_a_whole_call_in_one_delta_loses_nothing() -> None:
    data = chat_stream(
        calls(part(0, '{"a": 1}', id="x", name="f"), part(1, '{"b": 2}', id="y", name="g")), delta("stop")
    )
    message = to_message(data)
    assert inputs(message) == [("x", "f", {"a": 1}), ("y", "g", {"b": 2})]
    assert message["stop_reason"] == "tool_use"  # though the server said stop


def test_a_delta_with_text_and_a_call_keeps_both() -> None:
    data = chat_stream(
        calls(part(0, "", id="x", name="f"), content="First:"),
        calls(part(0, "{}")),
        delta("tool_calls"),
    )
    message = to_message(data)
    assert message["content"][0]["text"] == "First:"
    assert inputs(message) == [("x", "f", {})]


def test_text_beside_an_empty_list_of_calls_is_text() -> None:
    message = to_message(chat_stream(calls(content="only"), calls(content=" text"), delta("stop")))
    assert [block["text"] for block in message["content"]] == ["only text"]


def test_an_answer_that_begins_with_a_call_has_no_empty_blocks_or_deltas() -> None:
    data = chat_stream(
        delta(role="assistant", content=""),
        calls(part(0, "", id="x", name="f")),
        calls(part(0, '{"a":1}')),
        delta("tool_calls"),
    )
    parts = [
        part for part in events(translated("messages", "openai", data).decode()) if isinstance(part, dict)
    ]
    kinds = [part["content_block"]["type"] for part in parts if part["type"] == "content_block_start"]
    assert kinds == ["tool_use"]
    written = [part["delta"]["partial_json"] for part in parts if part["type"] == "content_block_delta"]
    assert "".join(written) == '{"a":1}'
    assert all(written)


@pytest.mark.parametrize("numbers", [(0, 1), (None, None), (0, 0)])
def test_calls_are_told_apart_whether_or_not_a_server_numbers_them(numbers: tuple[int | None, ...]) -> None:
    data = chat_stream(
        calls(part(numbers[0], '{"n": 1}', id="x", name="f")),
        calls(part(numbers[1], '{"n": 2}', id="y", name="f")),
        delta("tool_calls"),
    )
    assert inputs(to_message(data)) == [("x", "f", {"n": 1}), ("y", "f", {"n": 2})]


def test_calls_whose_deltas_come_mixed_are_told_one_after_the_other() -> None:
    data = chat_stream(
        calls(part(0, "", id="x", name="f"), part(1, "", id="y", name="g")),
        calls(part(1, '{"b":')),
        calls(part(0, '{"a":')),
        calls(part(1, "2}")),
        delta(content="by the way"),
        calls(part(0, "1}")),
        delta("tool_calls"),
    )
    message = to_message(data)
    assert inputs(message) == [("x", "f", {"a": 1}), ("y", "g", {"b": 2})]
    assert message["content"][-1]["text"] == "by the way"


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    size=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_arguments_survive_the_way_there_and_back(value: Any, size: int) -> None:
    arguments = json.dumps({"v": value}, ensure_ascii=False)
    texts = [arguments[place : place + size] for place in range(0, len(arguments), size)]
    data = chat_stream(
        calls(part(0, "", id="x", name="f")), *(calls(part(0, text)) for text in texts), delta("tool_calls")
    )
    ((_, _, back),) = to_chat_calls(translated("messages", "openai", data))
    assert json.loads(back) == {"v": value}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", {}),
        ('{"a": 1', {"invalid_json": '"a": 1'}),
        ("[1]", {"invalid_json": "[1]"}),
        ('{"a": "x', {"a": "x", "invalid_json": ""}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_arguments_that_are_no_object_become_one_streamed_and_whole(written: str, read: Any) -> None:
    streamed = to_message(chat_stream(calls(part(0, written, id="x", name="f")), delta("tool_calls")))
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": written}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {
        "id": "c",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }
    whole = json.loads(translate_answer("messages", json.dumps(body).encode(), "openai"))
    assert streamed["content"][0]["input"] == read
    assert whole["content"][0]["input"] == read


def test_comments_become_pings_and_pings_comments() -> None:
    assert translated("messages", "openai", b": waiting\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert translated("chat", "anthropic", message_stream({"type": "ping"})) == b": ping\n\n"


def test_an_error_is_the_last_that_is_told() -> None:
    told = chat_stream(
        delta(content="a"), {"error": {"message": "too much", "type": "rate_limit_error"}}, delta(content="b")
    )
    parts = events(translated("messages", "openai", told).decode())
    assert isinstance(parts[-1], dict)
    assert parts[-1]["error"] == {"type": "rate_limit_error", "message": "too much"}
    failing = message_stream(
        BEGIN, {"type": "error", "error": {"type": "overloaded_error", "message": "o"}}, *END
    )
    last = events(translated("chat", "anthropic", failing).decode())[-1]
    assert isinstance(last, dict)
    assert last["error"]["type"] == "service_unavailable_error"


def test_a_stream_that_ends_early_is_not_ended_for_the_client() -> None:
    early = MESSAGE[: MESSAGE.index(b"event: message_delta")]
    assert b"[DONE]" not in translated("chat", "anthropic", early)
    assert b"message_stop" not in translated("messages", "openai", chat_stream(delta(content="a"), end=b""))


def test_what_is_no_event_of_the_family_is_the_upstreams_failure() -> None:
    with pytest.raises(UpstreamFailed):
        translated("messages", "openai", b"data: nonsense\n\n")
    with pytest.raises(UpstreamFailed):
        translate_answer("chat", b"<html>", "anthropic")
    with pytest.raises(UpstreamFailed):
        translate_answer("messages", b'{"choices":[]}', "openai")


CALLS = st.lists(
    st.tuples(
        st.sampled_from("fgh"), st.dictionaries(st.text(max_size=5), st.integers() | st.text(), max_size=3)
    ),
    max_size=3,
)


@given(content=st.text(max_size=30), reasoning=st.text(max_size=30), made=CALLS, size=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_a_streamed_completion_becomes_the_message_that_the_whole_one_becomes(
    content: str, reasoning: str, made: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    named = [(f"c{number}", name, json.dumps(arguments)) for number, (name, arguments) in enumerate(made)]
    reason = "tool_calls" if named else "stop"
    tool_calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in named
    ]
    said = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}
    counts = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    choice = {"index": 0, "message": said, "finish_reason": reason}
    body = {"id": "chatcmpl-1", "created": 5, "model": "m", "choices": [choice], "usage": counts}
    whole = json.loads(translate_answer("messages", json.dumps(body).encode(), "openai", THINKING))
    parts = [delta(role="assistant", content="")]
    parts += [delta(reasoning_content=text) for text in cut(reasoning, size)]
    parts += [delta(content=text) for text in cut(content, size)]
    for number, (id, name, arguments) in enumerate(named):
        parts.append(calls(part(number, "", id=id, name=name)))
        parts += [calls(part(number, text)) for text in cut(arguments, size)]
    parts += [delta(reason), {"id": "chatcmpl-1", "choices": [], "usage": counts}]
    streamed = to_message(chat_stream(*parts))
    assert streamed == whole
    assert inputs(whole) == [(f"c{number}", *call) for number, call in enumerate(made)]


def cut(text: str, size: int) -> list[str]:
    return [text[place : place + size] for place in range(0, len(text), size)]


@given(texts=st.lists(st.text(min_size=1, max_size=20), max_size=3), made=CALLS, size=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_a_streamed_message_becomes_the_completion_that_the_whole_one_becomes(
    texts: list[str], made: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": "hm", "signature": "sig"}]
    blocks += [{"type": "text", "text": text} for text in texts]
    parts = [
        BEGIN,
        start(0, type="thinking", thinking="", signature=""),
        grow(0, type="thinking_delta", thinking="hm"),
        grow(0, type="signature_delta", signature="sig"),
        stop(0),
    ]
    for index, text in enumerate(texts, 1):
        parts.append(start(index, type="text", text=""))
        parts += [grow(index, type="text_delta", text=piece) for piece in cut(text, size)] + [stop(index)]
    for index, (name, value) in enumerate(made, 1 + len(texts)):
        blocks.append({"type": "tool_use", "id": f"t{index}", "name": name, "input": value})
        parts.append(start(index, type="tool_use", id=f"t{index}", name=name, input={}))
        pieces = cut(json.dumps(value), size)
        parts += [grow(index, type="input_json_delta", partial_json=piece) for piece in pieces] + [
            stop(index)
        ]
    usage = {"input_tokens": 3, "output_tokens": 9}
    body = {"id": "msg_1", "model": "m", "content": blocks, "stop_reason": "tool_use", "usage": usage}
    whole = json.loads(translate_answer("chat", json.dumps(body).encode(), "anthropic"))
    data = message_stream(*parts, *END)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "thinking_blocks": []}
    chunks = [
        chunk
        for chunk in events(translated("chat", "anthropic", data, 11, **WITH_USAGE).decode())
        if isinstance(chunk, dict)
    ]
    for said in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        message["content"] += said.get("content") or ""
        message["reasoning_content"] += said.get("reasoning_content", "")
        message["thinking_blocks"] += said.get("thinking_blocks", [])
    expected = whole["choices"][0]["message"]
    assert message["content"] == (expected["content"] or "") == "".join(texts)
    assert message["reasoning_content"] == expected["reasoning_content"] == "hm"
    assert message["thinking_blocks"] == expected["thinking_blocks"]
    assert to_chat_calls(data) == [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in expected.get("tool_calls", ())
    ]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"
