"""gRPC and HTTP of one real server: the same answers, and a cancel that frees its blocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio

from ridgeline import AsyncClient
from ridgeline.telemetry.stats import EngineStats
from ridgeline.web.grpc.v1 import inference_pb2 as pb
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.conftest import LiveServer
from tests.faults.conftest import metric
from tests.patience import PATIENCE_S
from tests.server.grpc.rpc_stage import joined, refused, rpc_served, streamed, unnamed
from tests.server.stage import Stage, until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
RUNNING, WAITING = "ridgeline:num_requests_running", "ridgeline:num_requests_waiting"


@pytest.fixture
async def stub(live_server: LiveServer) -> AsyncIterator[InferenceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{live_server.grpc_port}") as channel:
        yield InferenceStub(channel)


def chat(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(**one) for one in QUESTION]), **fields)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "n": 2}])
async def test_http_whole_and_streamed_give_one_answer(
    live_server: LiveServer, stub: InferenceStub, sampling: dict[str, float]
) -> None:
    request = chat(max_tokens=16, logprobs=2, return_token_ids=True, **sampling)
    body = {"messages": QUESTION, "max_tokens": 16, "logprobs": True, "top_logprobs": 2, **sampling}
    url = f"{live_server.base_url}/v1/chat/completions"
    over_http = httpx.post(url, json={**body, "return_token_ids": True}, timeout=PATIENCE_S).json()
    whole = await stub.GenerateWhole(request)
    stream = joined(await streamed(stub.Generate(request)))
    assert unnamed(stream) == unnamed(whole)
    for told, choice in zip(over_http["choices"], whole.choices, strict=True):
        assert choice.text == told["message"]["content"]
        assert list(choice.token_ids) == told["token_ids"]
        assert [one.logprob for one in choice.logprobs] == [
            one["logprob"] for one in told["logprobs"]["content"]
        ]
        assert choice.finish_reason == told["finish_reason"]
    assert whole.usage.completion_tokens == over_http["usage"]["completion_tokens"]


async def test_token_ids_in_and_out_continue_a_text(live_server: LiveServer, stub: InferenceStub) -> None:
    text = "The capital of France is"
    url = f"{live_server.base_url}/tokenize"
    ids = httpx.post(url, json={"prompt": text}, timeout=PATIENCE_S).json()["tokens"]
    greedy = {"temperature": 0.0, "max_tokens": 4, "return_token_ids": True}
    by_text = await stub.GenerateWhole(pb.GenerateRequest(prompt=text, **greedy))
    by_ids = await stub.GenerateWhole(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=ids), **greedy))
    assert by_text.choices[0].text.startswith(" Paris")
    assert unnamed(by_ids) == unnamed(by_text)
    further = pb.TokenIds(ids=[*ids, *by_ids.choices[0].token_ids[:2]])
    rest = await stub.GenerateWhole(pb.GenerateRequest(prompt_token_ids=further, **greedy))
    assert list(rest.choices[0].token_ids[:2]) == list(by_ids.choices[0].token_ids[2:])


async def test_a_schema_binds_the_answer(stub: InferenceStub) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    request = chat(max_tokens=30, temperature=0.0, json_schema=json.dumps(schema))
    answer = joined(await streamed(stub.Generate(request)))
    assert json.loads(answer.choices[0].text)["city"] in ("Paris", "Rome")


async def test_a_deadline_ends_the_request_on_the_server_too(
    live_server: LiveServer, stub: InferenceStub
) -> None:
    error = await refused(stub.Generate(chat(max_tokens=4000, ignore_eos=True), timeout=0.5))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: metric(live_server, RUNNING) + metric(live_server, WAITING) == 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm2_path: Path) -> AsyncIterator[AsyncClient]:
    """A separate engine: two requests at a time, long prompts in many steps, no cached prefixes."""
    flags = {"max_running": 2, "prefill_chunk": 8, "prefix_cache": False, "kv_tokens": 8192}
    async with await AsyncClient.start(str(smollm2_path), **flags) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("moment", ["queued", "in prefill", "mid-stream"])
async def test_a_cancelled_rpc_frees_its_blocks_within_one_step(engine: AsyncClient, moment: str) -> None:
    """The engine takes messages in order, between steps, and answers a ping at once: what its answer shows as
    held was not freed by the abort."""
    stage = Stage()
    stage.supervisor.client = engine  # type: ignore[assignment]
    long = pb.GenerateRequest(model="m", prompt="Once upon a time", max_tokens=4000, ignore_eos=True)
    async with rpc_served(stage) as stub:
        others = [stub.Generate(long) for _ in range(2 if moment == "queued" else 0)]
        await _until_stats(engine, lambda stats: stats.running == len(others))
        if moment == "in prefill":
            long.prompt = "lighthouse keeper " * 1500
        made = engine.stats.output_tokens
        leaving = stub.Generate(long)
        if moment == "queued":
            await _until_stats(engine, lambda stats: stats.waiting == 1)
        elif moment == "in prefill":
            await _until_stats(engine, lambda stats: stats.kv_blocks_held > 4)
            assert engine.stats.output_tokens == made
        else:
            await leaving.read()
        assert (await engine.ping()).running + (await engine.ping()).waiting == len(others) + 1
        leaving.cancel()
        await until(lambda: 'finished_reason="abort"' in stage.metrics_text())
        after = await engine.ping()
        assert (after.waiting, after.running) == (0, len(others))
        assert others or after.kv_blocks_held == 0
        for call in others:
            call.cancel()
        await _until_stats(engine, lambda stats: stats.running == 0)
        assert (await engine.ping()).kv_blocks_held == 0


async def _until_stats(engine: AsyncClient, condition: Callable[[EngineStats], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await engine.ping()):
            await asyncio.sleep(0)
