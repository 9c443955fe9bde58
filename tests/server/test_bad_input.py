"""Every way a body can be wrong: a 4xx by the name of its field, and the engine never sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from ridgeline.server.config import ServerConfig
from tests.patience import PATIENCE_S
from tests.server.scripted_client import MAX_CONTEXT, VOCAB_SIZE
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {**HELLO, **fields}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", **fields}


BAD_CHATS: list[tuple[str, dict[str, Any], str]] = [
    ("wrong type", chat(temperature="hot"), "temperature"),
    ("number in quotes", chat(max_tokens="5"), "max_tokens"),
    ("float for a count", chat(max_tokens=1.5), "max_tokens"),
    ("bool for a count", chat(n=True), "n"),
    ("absurd count", chat(top_k=10**30), "top_k"),
    ("zero tokens", chat(max_tokens=0), "max_tokens"),
    ("zero tokens, newer name", chat(max_completion_tokens=0), "max_completion_tokens"),
    ("negative temperature", chat(temperature=-1), "temperature"),
    ("top_p above 1", chat(top_p=1.5), "top_p"),
    ("top_p zero", chat(top_p=0), "top_p"),
    ("min_p below 0", chat(min_p=-0.1), "min_p"),
    ("presence beyond 2", chat(presence_penalty=3), "presence_penalty"),
    ("frequency beyond 2", chat(frequency_penalty=-3), "frequency_penalty"),
    ("repetition zero", chat(repetition_penalty=0), "repetition_penalty"),
    ("no samples", chat(n=0), "n"),
    ("more than 128 samples", chat(n=129), "n"),
    ("seed beyond 64 bits", chat(seed=2**64), "seed"),
    ("empty stop", chat(stop=""), "stop"),
    ("17 stops", chat(stop=[str(i) for i in range(17)]), "stop"),
    ("stop of a novel's length", chat(stop="x" * 1025), "stop"),
    ("stop of wrong type", chat(stop=["a", 1]), "stop[1]"),
    ("min above max", chat(min_tokens=5, max_tokens=2), "min_tokens"),
    ("min beyond the context", chat(min_tokens=MAX_CONTEXT), "min_tokens"),
    ("stop id outside the vocabulary", chat(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
    ("1025 stop ids", chat(stop_token_ids=[1] * 1025), "stop_token_ids"),
    ("bias of a word", chat(logit_bias={"hello": 1}), "logit_bias.hello"),
    ("bias of other digits", chat(logit_bias={"٣": 1}), "logit_bias.٣"),
    ("bias outside the vocabulary", chat(logit_bias={str(VOCAB_SIZE): 1}), f"logit_bias.{VOCAB_SIZE}"),
    ("bias too large", chat(logit_bias={"1": 101}), "logit_bias"),
    ("top_logprobs alone", chat(top_logprobs=2), "top_logprobs"),
    ("21 top_logprobs", chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    ("21 prompt_logprobs", chat(prompt_logprobs=21), "prompt_logprobs"),
    ("stream options without stream", chat(stream_options={"include_usage": True}), "stream_options"),
    ("empty cache salt", chat(cache_salt=""), "cache_salt"),
    ("huge cache salt", chat(cache_salt="x" * 1025), "cache_salt"),
    ("no messages", chat(messages=[]), "messages"),
    ("messages missing", {"model": "m"}, "messages"),
    ("messages a string", chat(messages="hi"), "messages"),
    ("unknown role", chat(messages=[USER, {"role": "wizard", "content": "x"}]), "messages[1].role"),
    ("result of no call", chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
    ("role of wrong type", chat(messages=[{"role": 1, "content": "x"}]), "messages[0].role"),
    ("role missing", chat(messages=[{"content": "x"}]), "messages[0].role"),
    ("no content", chat(messages=[{"role": "user"}]), "messages[0].content"),
    ("no parts", chat(messages=[{"role": "user", "content": []}]), "messages[0].content"),
    ("unknown field in a message", chat(messages=[{**USER, "contnt": "x"}]), "messages[0].contnt"),
    ("a user's calls", chat(messages=[{**USER, "tool_calls": [{"id": "1"}]}]), "messages[0].tool_calls"),
    (
        "a call of nothing",
        chat(messages=[USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        "messages[1].tool_calls[0].function",
    ),
    (
        "image part",
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]),
        "messages[0].content[1].type",
    ),
    (
        "image given",
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0].image_url",
    ),
    (
        "text part without text",
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        "messages[0].content[0].text",
    ),
    (
        "template variable of ours",
        chat(chat_template_kwargs={"messages": []}),
        "chat_template_kwargs.messages",
    ),
    ("template refuses", chat(chat_template_kwargs={"refuse": True}), "messages"),
    ("unknown field", chat(temprature=1), "temprature"),
    ("unknown nested field", chat(stream=True, stream_options={"usage": True}), "stream_options.usage"),
    ("a tool of no function", chat(tools=[{"type": "function"}]), "tools[0].function"),
    ("a tool of another kind", chat(tools=[{"type": "web_search"}]), "tools[0].type"),
    ("a tool's odd name", chat(tools=[tool("a b")]), "tools[0].function.name"),
    ("two tools of one name", chat(tools=[tool("f"), tool("f")]), "tools[1].function.name"),
    ("129 tools", chat(tools=[tool(f"f{i}") for i in range(129)]), "tools"),
    (
        "tools of a novel's length",
        chat(tools=[tool(f"f{i}", description="x" * 10_000) for i in range(30)]),
        "tools[26]",
    ),
    (
        "parameters of a list",
        chat(tools=[tool(parameters={"type": "array"})]),
        "tools[0].function.parameters.type",
    ),
    ("forced tool without tools", chat(tool_choice="required"), "tool_choice"),
    ("odd choice of tools", chat(tools=[tool()], tool_choice="maybe"), "tool_choice"),
    (
        "choice of an unknown tool",
        chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice.function.name",
    ),
    ("odd effort", chat(reasoning_effort="extreme"), "reasoning_effort"),
    ("budget of a model that does not reason", chat(thinking_token_budget=5), "thinking_token_budget"),
    ("a function's odd name", chat(functions=[{"name": "a b"}]), "functions[0].name"),
    ("a function's type", chat(functions=[{"type": "function", "function": {}}]), "functions[0].type"),
    ("functions and tools", chat(functions=[{"name": "f"}], tools=[tool()]), "functions"),
    (
        "a call of no function",
        chat(functions=[{"name": "f"}], function_call={"name": "g"}),
        "function_call.name",
    ),
    ("odd function_call", chat(functions=[{"name": "f"}], function_call="required"), "function_call"),
    (
        "a result of no call",
        chat(messages=[{"role": "function", "name": "f", "content": "1"}]),
        "messages[0].name",
    ),
    ("web search", chat(web_search_options={}), "web_search_options"),
    ("a schema of text", chat(response_format={"type": "text", "schema": {}}), "response_format.schema"),
    (
        "a bad schema beside json_object",
        chat(response_format={"type": "json_object", "schema": {"type": 3}}),
        "response_format.schema.type",
    ),
    ("audio", chat(modalities=["text", "audio"]), "modalities"),
    ("own template", chat(chat_template="{{ 1 }}"), "chat_template"),
    ("continued user", chat(continue_final_message=True), "messages[0]"),
]

BAD_COMPLETIONS: list[tuple[str, dict[str, Any], str]] = [
    ("prompt missing", {}, "prompt"),
    ("prompt null", completion(prompt=None), "prompt"),
    ("no prompts", completion(prompt=[]), "prompt"),
    ("no tokens", completion(prompt="", add_special_tokens=False), "prompt"),
    ("no tokens in the second", completion(prompt=[[1], []]), "prompt[1]"),
    ("mixed kinds", completion(prompt=["a", 1]), "prompt"),
    ("mixed lists", completion(prompt=[1, [1]]), "prompt"),
    ("token of wrong type", completion(prompt=[1, 1.5]), "prompt[1]"),
    ("token in a list of wrong type", completion(prompt=[[1, "a"]]), "prompt[0][1]"),
    ("token outside the vocabulary", completion(prompt=[1, VOCAB_SIZE]), "prompt"),
    ("negative token", completion(prompt=[[0], [-1]]), "prompt[1]"),
    ("absurd token", completion(prompt=[10**40]), "prompt"),
    ("too many choices", completion(prompt=["a"] * 1000, n=2), "prompt"),
    ("chat's logprobs", completion(logprobs=True), "logprobs"),
    ("21 logprobs", completion(logprobs=21), "logprobs"),
    ("suffix", completion(suffix="end"), "suffix"),
    ("best_of", completion(best_of=3), "best_of"),
    ("messages", completion(messages=[USER]), "messages"),
]


@pytest.mark.parametrize(("body", "param"), [case[1:] for case in BAD_CHATS], ids=[c[0] for c in BAD_CHATS])
async def test_a_bad_chat_request_is_refused_by_the_name_of_its_field(
    stage: Stage, body: dict[str, Any], param: str
) -> None:
    _assert_refused(await stage.post(CHAT, body), stage, param)


@pytest.mark.parametrize(
    ("body", "param"), [case[1:] for case in BAD_COMPLETIONS], ids=[c[0] for c in BAD_COMPLETIONS]
)
async def test_a_bad_completion_request_is_refused_by_the_name_of_its_field(
    stage: Stage, body: dict[str, Any], param: str
) -> None:
    _assert_refused(await stage.post(COMPLETIONS, body), stage, param)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} trailing', "not valid JSON"),
        (b"[]", "expected object"),
        (b"null", "expected object"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 12 is 0xff"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
        (b'{"prompt": "a", "user": ' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "cut", "trailing", "array", "null", "bad UTF-8", "BOM", "deep"],
)
async def test_a_body_that_is_no_json_object_is_refused(stage: Stage, raw: bytes, says: str) -> None:
    response = await stage.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert says in _assert_refused(response, stage, None)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
async def test_a_number_that_is_none_in_json_is_refused_by_the_name_of_its_field(
    stage: Stage, constant: str
) -> None:
    raw = json.dumps(completion(temperature=float(constant.lower()))).encode()
    assert constant.encode() in raw
    response = await stage.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert constant in _assert_refused(response, stage, "temperature")


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (r'"\ud800"', "messages[1].content"),
        (r'"a \uDC00 b"', "messages[1].content"),
        (r'"\ud83d\ud83d\ude00"', "messages[1].content"),
        (r'[{"type": "text", "text": "\ud800"}]', "messages[1].content[0].text"),
    ],
)
async def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(
    stage: Stage, content: str, param: str
) -> None:
    fine = r'{"role": "user", "content": "\ud83d\ude00"}'
    raw = f'{{"messages": [{fine}, {{"role": "user", "content": {content}}}]}}'
    response = await stage.post(CHAT, content=raw.encode(), headers={"content-type": "application/json"})
    assert "half of a surrogate pair" in _assert_refused(response, stage, param)


async def test_half_a_surrogate_pair_in_a_name_is_refused_too(stage: Stage) -> None:
    raw = rb'{"prompt": "a", "\ud800": NaN}'
    response = await stage.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert "half of a surrogate pair" in _assert_refused(response, stage, None)


@pytest.mark.parametrize("leaf", [b"NaN", rb'"\ud800"'])
async def test_a_bad_leaf_deep_inside_is_a_400_too(stage: Stage, leaf: bytes) -> None:
    raw = b'{"prompt": "a", "user": ' + b"[" * 700 + leaf + b"]" * 700 + b"}"
    response = await stage.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_name_of_a_megabyte_does_not_come_back_whole(stage: Stage) -> None:
    for body in (chat(**{"x" * (1 << 20): 1}), chat(model="x" * (1 << 20))):
        response = await stage.post(CHAT, body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 5000


async def test_a_number_beyond_floats_is_refused_by_the_name_of_its_field(stage: Stage) -> None:
    raw = b'{"prompt": "a", "temperature": 1e999}'
    response = await stage.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    _assert_refused(response, stage, "temperature")


async def test_an_unknown_field_is_answered_with_the_nearest_known_one(stage: Stage) -> None:
    message = _assert_refused(await stage.post(CHAT, chat(temprature=1)), stage, "temprature")
    assert "did you mean temperature?" in message
    nested = chat(stream=True, stream_options={"include_usag": True})
    message = _assert_refused(await stage.post(CHAT, nested), stage, "stream_options.include_usag")
    assert "did you mean include_usage?" in message


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(stage: Stage) -> None:
    response = await stage.post(COMPLETIONS, completion(prompt=[1] * MAX_CONTEXT, max_tokens=1))
    message = _assert_refused(response, stage, "prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    # Clients search for these words: LiteLLM, Roo Code, Cline.
    assert f"This model's maximum context length is {MAX_CONTEXT} tokens." in message
    assert f"resulted in {MAX_CONTEXT} tokens" in message


async def test_more_tokens_than_the_context_leaves_may_be_asked_for_but_not_as_min_tokens(
    stage: Stage,
) -> None:
    responses = {"input": "a" * 150, "max_output_tokens": 1000, "store": False}
    for path, body in (
        (COMPLETIONS, completion(prompt=[1] * 150, max_tokens=51)),
        (CHAT, chat(max_tokens=4096)),
        (CHAT, chat(max_completion_tokens=4096)),
        ("/v1/responses", responses),
    ):
        assert (await stage.post(path, body)).status_code == 200, path
    asked = len(stage.client.asked)
    body = completion(prompt=[1] * 150, max_tokens=60, min_tokens=51)
    response = await stage.post(COMPLETIONS, body)
    assert response.json()["error"]["param"] == "min_tokens"
    assert len(stage.client.asked) == asked


async def test_an_unknown_model_is_404_and_names_the_served_ones(stage: Stage) -> None:
    response = await stage.post(CHAT, chat(model="gpt-9"))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "m, alias" in error["message"]


async def test_null_and_absent_mean_the_default(stage: Stage) -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logprobs", "tools", "max_tokens"))
    assert (await stage.post(CHAT, chat(**nulls))).status_code == 200
    assert (await stage.post(CHAT, HELLO)).status_code == 200
    given, absent = (asked["params"] for asked in stage.client.asked)
    assert given == absent
    assert (given.temperature, given.n, given.max_tokens) == (1.0, 1, None)


async def test_harmless_fields_pass(stage: Stage) -> None:
    harmless = chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        verbosity="low",
        prediction={"type": "content", "content": "x"},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
    )
    assert (await stage.post(CHAT, harmless)).status_code == 200


async def test_a_body_announced_as_too_large_is_413_before_it_is_read() -> None:
    stage = Stage(config=ServerConfig(max_body_bytes=100))
    read = 0

    async def body() -> Any:
        nonlocal read
        read += 1
        yield b" " * 101

    headers = {"content-type": "application/json", "content-length": "101"}
    response = await stage.post(CHAT, content=body(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert read == 0


async def test_a_chunked_body_that_grows_too_large_is_413_while_it_is_read() -> None:
    stage = Stage(config=ServerConfig(max_body_bytes=100_000))
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 10_000
            yield b" " * 10_000

    async with stage.http() as http:
        response = await http.post(CHAT, content=endless(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert sent < 200_000


async def test_a_body_that_comes_too_slowly_is_408_and_the_connection_closed() -> None:
    stage = Stage(config=ServerConfig(upload_timeout_s=0.2))
    async with stage.served() as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            'content-length: 1000\r\n\r\n{"messages"'.encode()
        )
        answer = (await asyncio.wait_for(reader.read(), PATIENCE_S)).decode()  # to the end of the connection
        writer.close()
    assert answer.startswith("HTTP/1.1 408")
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "timeout"


async def test_a_body_that_is_not_declared_as_json_is_415(stage: Stage) -> None:
    """A web page of any origin may send text/plain to a server on the loopback; JSON it may not."""
    for headers in ({"content-type": "text/plain"}, {}):
        response = await stage.post(CHAT, content=json.dumps(HELLO).encode(), headers=headers)
        assert response.status_code == 415
    declared = {"content-type": "Application/JSON; charset=utf-8"}
    response = await stage.post(CHAT, content=json.dumps(HELLO).encode(), headers=declared)
    assert response.status_code == 200


def _assert_refused(response: httpx.Response, stage: Stage, param: str | None) -> str:
    """OpenAI's error shape with this param; returns the message. Nothing may have reached the engine."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error["message"]
    assert param is None or param in error["message"]
    assert stage.client.asked == []
    message: str = error["message"]
    return message
