"""How RPCs end: errors as statuses with the field, cancels and deadlines that free what was held, drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import EngineDied, QueueFull, RequestFailed, SchemaViolation
from ridgeline.server.config import ServerConfig
from ridgeline.web.grpc.v1 import inference_pb2 as pb
from tests.server.grpc.rpc_stage import HELLO, details, hello, refused, rpc_served, streamed
from tests.server.scripted_client import fail, hang, say
from tests.server.stage import Stage, until

Code = grpc.StatusCode

BAD = [
    (hello(temperature=-1.0), "temperature"),
    (hello(temperature=float("nan")), "temperature"),
    (hello(top_p=float("-inf")), "top_p"),
    (hello(logprobs=21), "logprobs"),
    (hello(stop=["x"] * 17), "stop"),
    (hello(json_schema="{no json"), "json_schema"),
    (hello(json_schema='{"type": "nothing"}'), "json_schema"),
    (hello(logit_bias={5000: 1.0}), "logit_bias.5000"),
    (pb.GenerateRequest(prompt="a", logprobs=21), "logprobs"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[999])), "prompt_token_ids"),
    (pb.GenerateRequest(prompt="x" * 300), "prompt"),
    (pb.GenerateRequest(), "input"),
    (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="bot")])), "chat.messages[0].role"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="user")])), "chat.messages[0].content"),
    (
        hello(chat=pb.Chat(tools=[pb.Tool(name="t", parameters="{")])),
        "chat.tools[0].parameters",
    ),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD)])
async def test_a_bad_field_is_an_invalid_argument_that_names_it(
    request_: pb.GenerateRequest, field: str
) -> None:
    stage = Stage(say("hi"))
    async with rpc_served(stage) as stub:
        for call in (stub.Generate(request_), stub.GenerateWhole(request_)):
            error = await refused(call)
            assert error.code() is Code.INVALID_ARGUMENT
            assert str(error.details()).startswith(field), error.details()
            (violation,) = details(error)["BadRequest"].field_violations
            assert violation.field == field
    assert 'status="400"' in stage.metrics_text()


async def test_an_unknown_model_is_not_found_and_a_wrong_key_unauthenticated() -> None:
    async with rpc_served(Stage(config=ServerConfig(api_keys=("right",)))) as stub:
        keyed = (("authorization", "Bearer right"),)
        assert (await stub.GenerateWhole(HELLO, metadata=keyed)).choices
        error = await refused(stub.GenerateWhole(hello(model="other"), metadata=keyed))
        assert error.code() is Code.NOT_FOUND
        assert details(error)["BadRequest"].field_violations[0].field == "model"
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            error = await refused(stub.Generate(HELLO, metadata=metadata))
            assert error.code() is Code.UNAUTHENTICATED
            assert details(error)["ErrorInfo"].reason == "invalid_api_key"


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with rpc_served(Stage(fail(QueueFull("full", 7)))) as stub:
        error = await refused(stub.Generate(HELLO))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert details(error)["RetryInfo"].retry_delay.seconds == 7
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "7000"


async def test_a_draining_server_is_unavailable_with_a_time() -> None:
    stage = Stage(say("hi"))
    stage.supervisor.draining, stage.supervisor.reason = True, "draining"
    async with rpc_served(stage) as stub:
        error = await refused(stub.Generate(HELLO))
    assert (error.code(), error.details()) == (Code.UNAVAILABLE, "draining")
    assert details(error)["RetryInfo"].retry_delay.seconds == 10


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (EngineDied("the engine died"), Code.UNAVAILABLE),
        (RequestFailed("sampling failed"), Code.INTERNAL),
        (SchemaViolation("a is not an integer"), Code.FAILED_PRECONDITION),
        (KeyError("secret"), Code.INTERNAL),
    ],
)
@pytest.mark.parametrize("after", ["", "some"], ids=["before", "within"])
async def test_a_failure_is_a_status_before_and_within_a_stream(
    cause: Exception, code: grpc.StatusCode, after: str
) -> None:
    async with rpc_served(Stage(fail(cause, after))) as stub:
        call, text = stub.Generate(HELLO), ""
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                text += "".join(choice.text for choice in message.choices)
        assert text == after
        assert await call.code() is code
        assert "secret" not in await call.details()
        assert (await refused(stub.GenerateWhole(HELLO))).code() is code


async def test_an_answer_that_breaks_off_is_never_a_clean_end() -> None:
    """An app that ends a stream without its last event, as an upstream that vanishes does."""
    stage = Stage()

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        event = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
        await send({"type": "http.response.body", "body": event, "more_body": False})

    stage.app = cut
    async with rpc_served(stage) as stub:
        error = await refused(stub.Generate(HELLO))
    assert error.code() is Code.UNAVAILABLE
    assert "ended before it was complete" in str(error.details())


@pytest.mark.parametrize("method", ["Generate", "GenerateWhole"])
@pytest.mark.parametrize("after", ["", "some"], ids=["queued", "running"])
async def test_a_cancelled_rpc_aborts_its_request(method: str, after: str) -> None:
    stage = Stage(hang(after))
    async with rpc_served(stage) as stub:
        call = getattr(stub, method)(HELLO)
        if method == "Generate" and after:
            await call.read()
        await until(lambda: stage.client.asked)
        assert stage.client.aborted == []
        call.cancel()
        await until(lambda: stage.client.aborted)
        await until(lambda: 'finished_reason="abort"' in stage.metrics_text())
    assert stage.client.aborted == [stage.client.asked[0]["request_id"]]


@pytest.mark.parametrize("method", ["Generate", "GenerateWhole"])
async def test_a_deadline_that_passes_aborts_the_request(method: str) -> None:
    stage = Stage(hang("some"))
    async with rpc_served(stage) as stub:
        for timeout_s in (0.3, 3.0, 30.0):  # until the server has seen one before its deadline
            error = await refused(getattr(stub, method)(HELLO, timeout=timeout_s))
            assert error.code() is Code.DEADLINE_EXCEEDED
            if stage.client.asked:
                break
        await until(lambda: stage.client.aborted)


async def test_the_server_s_own_time_limit_is_a_deadline_exceeded() -> None:
    async with rpc_served(Stage(hang("some"), ServerConfig(request_timeout_s=0.2))) as stub:
        error = await refused(stub.GenerateWhole(HELLO))
    assert error.code() is Code.DEADLINE_EXCEEDED
    assert "this server's limit" in str(error.details())


async def test_a_request_larger_than_the_limit_is_refused() -> None:
    stage = Stage(config=ServerConfig(max_body_bytes=10_000))
    async with rpc_served(stage) as stub:
        error = await refused(stub.GenerateWhole(pb.GenerateRequest(prompt="x" * 20_000)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        # Small as a message, too large as the body that it stands for.
        ids = pb.TokenIds(ids=[100] * 4000)
        error = await refused(stub.GenerateWhole(pb.GenerateRequest(prompt_token_ids=ids)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert details(error)["ErrorInfo"].reason == "body_too_large"
    assert stage.client.asked == []


async def test_a_client_that_does_not_read_is_cut_and_the_others_are_not() -> None:
    async def endless(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        while True:
            await asyncio.sleep(0.001)
            yield OutputChunk(0, "x" * 20_000, [120])

    stage = Stage(endless, ServerConfig(stream_stall_s=0.3))
    async with rpc_served(stage) as stub:
        stuck = stub.Generate(hello(max_tokens=190))
        await stuck.read()  # then no further read: flow control stops the server
        await until(lambda: stage.client.aborted)
        stage.client.script = say("hi")
        assert (await stub.GenerateWhole(HELLO)).choices[0].text == "hi"
        stuck.cancel()
    assert 'finished_reason="slow_reader"' in stage.metrics_text()


async def test_many_streams_at_once_each_get_their_own_answer() -> None:
    async def echo(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        async for chunk in say(bytes(prompt[1:]).decode() * 3, pause_s=0.001)(prompt, params):
            yield chunk

    async with rpc_served(Stage(echo)) as stub:
        prompts = [f"prompt {number}" for number in range(40)]
        calls = [streamed(stub.Generate(pb.GenerateRequest(prompt=text))) for text in prompts]
        answers = await asyncio.gather(*calls)
    for text, messages in zip(prompts, answers, strict=True):
        assert "".join(one.text for message in messages for one in message.choices) == text * 3
