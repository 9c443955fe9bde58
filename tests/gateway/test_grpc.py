"""gRPC through the gateway: its keys, limits and ledger bind RPCs as they bind HTTP requests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ridgeline.gateway.process.rpc import grpc_server
from ridgeline.gateway.tenants.keys import Limits
from ridgeline.web.grpc.v1 import inference_pb2 as pb
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.gateway.stage import CHAT, Staged, asking, staged
from tests.gateway.test_processes import Gateway
from tests.patience import PATIENCE_S
from tests.server.grpc.rpc_stage import details, joined, refused, streamed, unnamed
from tests.server.stage import until

Code = grpc.StatusCode


def question(model: str = "mock", **fields: Any) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.Message(role="user", content="Say something.")])
    return pb.GenerateRequest(model=model, chat=chat, **fields)


@contextlib.asynccontextmanager
async def channel_to(stage: Staged) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc_server(stage.app, stage.parts.settings.gateway, 1000)
    await server.start("127.0.0.1", 0, shared=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def rpc_to(stage: Staged) -> AsyncIterator[InferenceStub]:
    async with channel_to(stage) as channel:
        yield InferenceStub(channel)


def keyed(stage: Staged) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {stage.secret}"),)


def booked(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("key_id", "endpoint", "status", "outcome", "model", "tokens_in", "tokens_out", "cost_pusd")
    return {name: value for name, value in row.items() if name in kept}


async def test_an_rpc_is_answered_and_billed_as_its_http_form(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, rpc_to(stage) as stub:
        http = await stage.http.post(CHAT, json=asking("mock_out8"))
        whole = await stub.GenerateWhole(question("mock_out8"), metadata=keyed(stage))
        call = stub.Generate(question("mock_out8_pace5"), metadata=keyed(stage))
        stream = joined(await streamed(call))
        one, two, three = await stage.rows(3)
        given = dict(await call.initial_metadata())["x-request-id"]
    assert whole.choices[0].text == http.json()["choices"][0]["message"]["content"]
    whole.model = stream.model
    assert unnamed(stream) == unnamed(whole)
    assert whole.usage.completion_tokens == 8
    assert booked(one) == booked(two)
    assert {**booked(three), "model": ""} == {**booked(one), "model": ""}
    assert (three["request_id"], three["outcome"]) == (given, "ok")


async def test_a_key_is_needed_and_its_limits_bind(tmp_path: Path) -> None:
    async with (
        staged(tmp_path, key={"limits": Limits(requests_per_minute=2)}) as stage,
        rpc_to(stage) as stub,
    ):
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            error = await refused(stub.Generate(question(), metadata=metadata))
            assert error.code() is Code.UNAUTHENTICATED
        assert (await stage.http.post(CHAT, json=asking())).status_code == 200
        await stub.GenerateWhole(question(), metadata=keyed(stage))
        error = await refused(stub.Generate(question(), metadata=keyed(stage)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert details(error)["RetryInfo"].retry_delay.seconds >= 1
        assert (await stage.http.post(CHAT, json=asking())).status_code == 429
        assert len(stage.mock.books) == 2


async def test_a_refused_field_and_an_unknown_model_keep_their_names(tmp_path: Path) -> None:
    models = [{"name": "known", "targets": ("mock/mock",)}]
    async with staged(tmp_path, {"models": models}) as stage, rpc_to(stage) as stub:
        error = await refused(stub.Generate(question("other"), metadata=keyed(stage)))
        assert error.code() is Code.NOT_FOUND
        error = await refused(stub.Generate(pb.GenerateRequest(prompt="x"), metadata=keyed(stage)))
        assert error.code() is Code.INVALID_ARGUMENT
        assert details(error)["BadRequest"].field_violations[0].field == "model"


@pytest.mark.parametrize(
    ("model", "code"), [("mock_fail500", Code.UNAVAILABLE), ("mock_cut3", Code.UNAVAILABLE)]
)
async def test_an_upstream_that_fails_is_a_status(tmp_path: Path, model: str, code: grpc.StatusCode) -> None:
    async with staged(tmp_path) as stage, rpc_to(stage) as stub:
        error = await refused(stub.Generate(question(model), metadata=keyed(stage)))
        assert error.code() is code
        (row,) = await stage.rows(1)
        assert row["outcome"] == "upstream_failed"


@pytest.mark.parametrize("method", ["Generate", "GenerateWhole"])
async def test_a_cancelled_rpc_aborts_its_upstream_and_is_billed_what_it_used(
    tmp_path: Path, method: str
) -> None:
    async with staged(tmp_path) as stage, rpc_to(stage) as stub:
        model = "mock_out4000_pace5" if method == "Generate" else "mock_late60000"
        call = getattr(stub, method)(question(model), metadata=keyed(stage))
        if method == "Generate":
            await call.read()
        await until(lambda: stage.mock.books)
        call.cancel()
        await until(lambda: {book.status for book in stage.mock.books.values()} == {"aborted"})
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["status"]) == ("client_gone", 499)
        (book,) = stage.mock.books.values()
        assert row["tokens_out"] == book.tokens_out
        await until(lambda: not stage.parts.deadlines.live)


async def test_embeddings_pass(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, rpc_to(stage) as stub:
        http = await stage.http.post("/v1/embeddings", json={"model": "mock", "input": ["a", "b"]})
        answer = await stub.Embed(pb.EmbedRequest(model="mock", texts=["a", "b"]), metadata=keyed(stage))
    vectors = [one["embedding"] for one in http.json()["data"]]
    assert [list(one.values) for one in answer.embeddings] == [pytest.approx(one) for one in vectors]


async def test_health_follows_the_gateway_s_readiness(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, channel_to(stage) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="ridgeline.v1.Inference")
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        stage.parts.draining = True
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    running = Gateway(tmp_path, "grpc_port = 0", drain_s=PATIENCE_S)
    yield running
    running.end()


def test_a_reload_and_a_stop_finish_running_rpcs(gateway: Gateway) -> None:
    """Two workers share the port while one replaces the other; the supervisor keeps it for them."""
    key = gateway.client().headers["authorization"]
    found = re.search(rb"gRPC on port (\d+)", gateway.printed)
    assert found
    address = f"127.0.0.1:{int(found[1])}"

    def stub() -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return InferenceStub(grpc.insecure_channel(address, options))

    def ask(model: str) -> Any:
        return stub().Generate(question(model), metadata=(("authorization", key),), timeout=PATIENCE_S)

    before = ask("mock_out400_pace5")
    first = next(before)
    assert gateway.admin("POST", "/admin/reload").status_code == 200
    assert joined(ask("mock_out5")).choices[0].text == " river" * 5
    assert joined([first, *before]).choices[0].text == " river" * 400
    last = ask("mock_out400_pace5")
    next(last)
    os.kill(gateway.process.pid, signal.SIGTERM)
    assert joined(last).choices[0].finish_reason
    assert gateway.process.wait(PATIENCE_S) == 0
    with pytest.raises(grpc.RpcError) as refusal:
        list(ask("mock"))
    assert refusal.value.code() is Code.UNAVAILABLE  # type: ignore[attr-defined]
