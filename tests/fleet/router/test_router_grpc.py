"""gRPC through the fleet's router: streams survive a replica, a cancel frees it, keys and drains bind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ridgeline.fleet.router.app import RouterApp
from ridgeline.fleet.router.config import RouterConfig
from ridgeline.web.grpc.listener import GrpcServer, RpcLimits
from ridgeline.web.grpc.v1 import inference_pb2 as pb
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.conftest import free_port
from tests.fleet.router.conftest import Stage, until
from tests.fleet.router.scripted_replica import MODEL, ScriptedReplica
from tests.fleet.router.served import router_process
from tests.patience import PATIENCE_S
from tests.server.grpc.rpc_stage import joined, refused, streamed

EVENT = b'data: {"id":"x","model":"counter","choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n'
QUESTION = pb.GenerateRequest(model=MODEL, chat=pb.Chat(messages=[pb.Message(role="user", content="count")]))
TEXT = "01234567"


async def replicas(stage: Stage, count: int) -> list[ScriptedReplica]:
    made = await stage.add(count)
    for one in made:
        one.event = EVENT
    return made


@asynccontextmanager
async def channel_to(stage: Stage, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    app = RouterApp(await stage.router(), RouterConfig(**options))
    server = GrpcServer(app, RpcLimits(1 << 20, 64 << 10, 100))
    await server.start("127.0.0.1", 0, shared=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_a_stream_goes_on_when_its_replica_dies(stage: Stage) -> None:
    made = await replicas(stage, 2)
    for one in made:
        one.gate = asyncio.Event()
    async with channel_to(stage) as channel:
        call = aiter(InferenceStub(channel).Generate(QUESTION))
        first = await anext(call)
        (running,) = [one for one in made if one.running]
        for one in made:
            if one is not running:
                one.gate = None
        await running.die()
        assert joined([first, *await streamed(call)]).choices[0].text == TEXT
    assert sum(len(one.states) for one in made) == 1


async def test_health_and_keys(stage: Stage) -> None:
    await replicas(stage, 1)
    async with channel_to(stage, keys=("right",)) as channel:
        stub = InferenceStub(channel)
        assert (await refused(stub.Generate(QUESTION))).code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.Generate(QUESTION, metadata=(("authorization", "Bearer right"),))
        assert joined(await streamed(call)).choices[0].text == TEXT
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_missing_and_an_unknown_model_are_told(stage: Stage) -> None:
    await replicas(stage, 1)
    async with channel_to(stage) as channel:
        stub = InferenceStub(channel)
        error = await refused(stub.Generate(pb.GenerateRequest(prompt="x")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(error.details()).startswith("model:")
        error = await refused(stub.GenerateWhole(pb.GenerateRequest(prompt="x", model="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["Generate", "GenerateWhole"])
async def test_a_cancelled_rpc_frees_its_replica(stage: Stage, method: str) -> None:
    (only,) = await replicas(stage, 1)
    only.gate = asyncio.Event()
    async with channel_to(stage) as channel:
        call = getattr(InferenceStub(channel), method)(QUESTION)
        book = stage.routers[-1].book
        await until(lambda: only.running and book.in_flight() == 1, "the request at the replica")
        call.cancel()
        await until(lambda: book.in_flight() == 0, "the end of the request")


async def test_a_router_process_finishes_rpcs_on_sigterm(stage: Stage) -> None:
    (only,) = await replicas(stage, 1)
    only.gate = asyncio.Event()
    port = free_port()
    config = RouterConfig(drain_s=PATIENCE_S, grpc_port=port)
    with router_process(stage.controller.path, config) as (process, _):
        await until(lambda: stage.controller.demands, "a report of the process")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = InferenceStub(channel)
            call = aiter(stub.Generate(QUESTION, wait_for_ready=True, timeout=PATIENCE_S))
            first = await anext(call)
            os.kill(process.pid, signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert process.poll() is None
            only.gate.set()
            assert joined([first, *await streamed(call)]).choices[0].text == TEXT
        await until(lambda: process.poll() is not None, "the end of the process")
        assert process.returncode == 0
