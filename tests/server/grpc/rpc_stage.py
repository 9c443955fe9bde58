"""A gRPC port over an app, with a real grpcio client; and what a client makes of a stream's messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from ridgeline.server.process.rpc import grpc_server
from ridgeline.web.grpc.v1 import inference_pb2 as pb
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.server.stage import Stage

HELLO = pb.GenerateRequest(model="m", chat=pb.Chat(messages=[pb.Message(role="user", content="hello")]))


@contextlib.asynccontextmanager
async def rpc_served(stage: Stage) -> AsyncIterator[InferenceStub]:
    """A stub for the stage's app behind a real port."""
    async with channel_to(stage) as channel:
        yield InferenceStub(channel)


@contextlib.asynccontextmanager
async def channel_to(stage: Stage) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc_server(stage.app, stage.config)
    await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
    finally:
        await server.stop(0)


def hello(**fields: Any) -> pb.GenerateRequest:
    """A chat request, with these fields too."""
    request = pb.GenerateRequest()
    request.CopyFrom(HELLO)
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


async def streamed(call: Any) -> list[pb.GenerateResponse]:
    return [message async for message in call]


def joined(messages: Iterable[pb.GenerateResponse]) -> pb.GenerateResponse:
    """A stream's messages as the whole answer that they add up to."""
    whole = pb.GenerateResponse()
    by_index: dict[int, pb.Choice] = {}
    for message in messages:
        whole.id, whole.model, whole.created = message.id, message.model, message.created
        if message.HasField("usage"):
            whole.usage.CopyFrom(message.usage)
        for part in message.choices:
            choice = by_index.setdefault(part.index, pb.Choice(index=part.index))
            text, reasoning = choice.text + part.text, choice.reasoning + part.reasoning
            choice.MergeFrom(part)
            choice.text, choice.reasoning = text, reasoning
    whole.choices.extend(by_index[index] for index in sorted(by_index))
    return whole


def unnamed(answer: pb.GenerateResponse) -> pb.GenerateResponse:
    """Without what differs between two requests."""
    answer.id, answer.created = "", 0
    answer.usage.cached_tokens = 0
    return answer


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error of a unary call or of a stream, which must have one."""
    try:
        if hasattr(call, "__aiter__"):
            await streamed(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The google.rpc details of an error, by the name of their type."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = {}
    for packed in status.details:
        message = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        assert packed.Unpack(message)
        found[packed.TypeName().rpartition(".")[2]] = message
    return found
