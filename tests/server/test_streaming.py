"""Streams over real sockets: errors after the first byte, clients that leave or stall, silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import EngineDied, QueueFull, RequestFailed
from ridgeline.server.config import ServerConfig
from tests.patience import PATIENCE_S
from tests.server.events import chunks, events
from tests.server.scripted_client import Script, fail, flood, hang, last_chunk, say, timing
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage, until

STREAM: dict[str, Any] = {**HELLO, "stream": True}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDied("gone"), "engine_died"),
        (RequestFailed("broke"), "request_failed"),
        (KeyError("bug"), "internal_error"),
    ],
)
async def test_a_stream_that_fails_ends_with_an_error_event_and_a_broken_body(
    error: Exception, code: str
) -> None:
    stage = Stage(fail(error, after="half"))
    found = await _events_of_a_broken_stream(stage)
    assert "[DONE]" not in found
    assert found[-2]["choices"][0]["delta"] == {"content": "half"}
    assert found[-1]["error"]["code"] == code
    assert set(found[-1]["error"]) == {"message", "type", "param", "code"}
    assert 'finished_reason="error"' in stage.metrics_text()
    assert "request_refused_total{" not in stage.metrics_text()  # it was accepted, and ended once
    assert not any(choice["finish_reason"] for part in found[:-1] for choice in part["choices"])


async def test_a_refusal_that_comes_after_the_headers_is_told_and_counted_as_one() -> None:
    begun = asyncio.Event()

    async def late(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        await begun.wait()
        raise QueueFull(512, 1.0)
        yield OutputChunk(0)

    stage = Stage(late, ServerConfig(stream_headers_s=0.01))
    assert (await _events_of_a_broken_stream(stage, begun))[-1]["error"]["code"] == "queue_full"
    assert 'reason="queue_full",status="429"' in stage.metrics_text()
    assert "request_success_total{" not in stage.metrics_text()


async def test_an_engine_that_just_stops_sending_is_an_error_too() -> None:
    async def cut_short(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        yield OutputChunk(0, "half", [1])

    stage = Stage(cut_short)
    response = await stage.post(CHAT, HELLO)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("after", ["", "some"], ids=["queued", "running"])
async def test_a_client_that_leaves_aborts_its_request(after: str, stream: bool) -> None:
    stage = Stage(hang(after))
    async with stage.served() as http:
        task = asyncio.create_task(http.post(CHAT, json={**HELLO, "stream": stream}))
        await until(lambda: stage.client.asked)
        await asyncio.sleep(0.05)
        assert stage.client.aborted == []
        task.cancel()
        await until(lambda: stage.client.aborted)
    assert stage.client.aborted == [stage.client.asked[0]["request_id"]]
    assert 'finished_reason="abort"' in stage.metrics_text()


async def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_every_prompt() -> None:
    stage = Stage(say("x" * 100, pause_s=0.02))
    async with stage.served() as http:
        body = {"prompt": ["a", "b", "c"], "stream": True, "max_tokens": 100}
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            await anext(response.aiter_text())
        await until(lambda: len(stage.client.aborted) == 3)


async def test_an_aborted_request_is_counted_with_the_tokens_it_got() -> None:
    async def three_tokens(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        record = timing(prompt, 1)
        yield OutputChunk(0, "a", [97], timing=record)
        for _ in range(2):
            record.token_times.append(time.monotonic())
            yield OutputChunk(0, "a", [97])
        await asyncio.Event().wait()

    stage = Stage(three_tokens)
    async with stage.served() as http:
        async with http.stream("POST", CHAT, json=STREAM) as response:
            await anext(response.aiter_text())
            await asyncio.sleep(0.05)
        await until(lambda: stage.client.aborted)
    text = stage.metrics_text()
    assert 'finished_reason="abort"' in text
    for name in (
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
    ):
        assert f'ridgeline:{name}_count{{model_name="m"}} 1.0' in text
    assert 'ridgeline:request_generation_tokens_sum{model_name="m"} 3.0' in text
    assert 'ridgeline:inter_token_latency_seconds_count{model_name="m"} 2.0' in text


async def test_one_prompt_that_fails_aborts_the_others() -> None:
    async def second_fails(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        if prompt[-1] == ord("b"):
            raise RequestFailed("broke")
        await asyncio.Event().wait()
        yield OutputChunk(0)

    stage = Stage(second_fails)
    response = await stage.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert response.status_code == 500
    assert len(stage.client.aborted) == 2


async def test_a_reader_that_stalls_is_cut_and_counted_while_others_are_served() -> None:
    stage = Stage(flood(2000, 50_000), ServerConfig(stream_stall_s=0.3, stream_buffer_chunks=8))
    async with stage.served() as http:
        host, port = http.base_url.host, http.base_url.port
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        await _request_by_hand(writer, STREAM)
        await until(lambda: stage.client.asked)
        stage.client.script = say("quick")
        answer = await http.post(CHAT, json=HELLO)
        assert answer.json()["choices"][0]["message"]["content"] == "quick"
        await until(lambda: stage.client.aborted)
        assert stage.client.aborted == [stage.client.asked[0]["request_id"]]
        assert 'slow_readers_cut_total{model_name="m"} 1.0' in stage.metrics_text()
        received = await reader.read()
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert not received.endswith(b"0\r\n\r\n")  # the end of a chunked body
        assert b"[DONE]" not in received
        writer.close()


async def test_a_reader_that_falls_too_far_behind_is_cut_before_it_has_stalled_for_long() -> None:
    """Its buffered data is bounded by the sockets' buffers and the maximum of waiting chunks."""
    taken = 0

    async def counting(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        nonlocal taken
        async for chunk in flood(5000, 50_000)(prompt, params):
            taken += 1
            yield chunk

    stage = Stage(counting, ServerConfig(stream_stall_s=600, stream_buffer_chunks=8))
    async with stage.served() as http:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port, limit=1024)
        await _request_by_hand(writer, STREAM)
        await until(lambda: stage.client.aborted)
        assert 8 < taken < 1000  # not all 5000
        assert 'slow_readers_cut_total{model_name="m"} 1.0' in stage.metrics_text()
        writer.close()


async def test_a_reader_that_takes_what_comes_is_never_too_far_behind() -> None:
    """However much comes at once: only what waits while the socket is full counts."""

    async def burst(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        for _ in range(50):
            for _ in range(100):
                yield OutputChunk(0, "x", [120])
            await asyncio.sleep(0)
        yield last_chunk(0, prompt, 5000)

    stage = Stage(burst, ServerConfig(stream_buffer_chunks=8))
    async with stage.served() as http:
        answer = await http.post(CHAT, json=STREAM)
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in chunks(answer.text))
    assert text == "x" * 5000


async def test_a_reader_that_pauses_for_less_than_the_limit_gets_everything() -> None:
    stage = Stage(flood(40, 50_000), ServerConfig(stream_stall_s=PATIENCE_S))
    async with stage.served() as http, http.stream("POST", CHAT, json=STREAM) as response:
        received = ""
        async for text in response.aiter_text():
            if not received:
                await asyncio.sleep(0.5)  # the sockets fill up meanwhile
            received += text
    assert received.count("x" * 50_000) == 40
    assert "[DONE]" in received


async def test_chunks_that_wait_together_are_sent_together() -> None:
    async def burst(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        for letter in "abcdef":
            yield OutputChunk(0, letter, [ord(letter)])
        yield last_chunk(0, prompt, 6)

    stage = Stage(burst)
    bodies: list[bytes] = []

    async def counting_app(scope: Any, receive: Any, send: Any) -> None:
        async def counting_send(message: Any) -> None:
            if message["type"] == "http.response.body":
                bodies.append(message["body"])
            await send(message)

        await stage.app(scope, receive, counting_send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(counting_app), base_url="http://localhost"
    ) as http:
        response = await http.post(CHAT, json=STREAM)
    assert len(chunks(response.text)) == 8
    assert len(bodies) == 2  # everything that was waiting, then [DONE]


async def test_a_silent_stream_sends_headers_and_then_signs_of_life() -> None:
    config = ServerConfig(stream_headers_s=0.05, stream_keepalive_s=0.05)
    stage = Stage(hang(), config)
    async with stage.served() as http, http.stream("POST", CHAT, json=STREAM) as response:
        assert response.status_code == 200
        received = ""
        async for text in response.aiter_text():
            received += text
            if received.count(": waiting\n\n") >= 2:
                break
    assert events(received) == []


async def test_a_stream_over_its_deadline_ends_with_an_error_event() -> None:
    stage = Stage(hang(after="so far"), ServerConfig(request_timeout_s=1.0))
    assert (await _events_of_a_broken_stream(stage))[-1]["error"]["code"] == "timeout"
    assert len(stage.client.aborted) == 1


@pytest.mark.parametrize(
    "script", [say("ok"), fail(RequestFailed("x")), hang()], ids=["ends", "fails", "left"]
)
async def test_nothing_is_left_running_after_a_request(script: Script) -> None:
    stage = Stage(script)
    async with stage.served() as http:
        await http.get("/health")
        before = len(asyncio.all_tasks())
        task = asyncio.create_task(http.post(CHAT, json=STREAM))
        await until(lambda: stage.client.asked)
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_stream_has_headers_that_keep_proxies_from_holding_it(stage: Stage) -> None:
    response = await stage.post(CHAT, STREAM)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert float(response.headers["x-ridgeline-ttft-ms"]) >= 0


async def _request_by_hand(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """A client that sends a request and then does not read."""
    raw = httpx.Request("POST", "http://x" + CHAT, json=body).read()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    writer.write(head.encode() + raw)
    await writer.drain()


async def _events_of_a_broken_stream(stage: Stage, begun: asyncio.Event | None = None) -> list[Any]:
    """All events of a stream whose connection ends before its body does, as it must. `begun` is set once its
    headers are there."""
    received = ""
    async with stage.served() as http, http.stream("POST", CHAT, json=STREAM) as response:
        assert response.status_code == 200
        if begun is not None:
            begun.set()
        try:
            async for text in response.aiter_text():
                received += text
        except httpx.RemoteProtocolError:
            return events(received)
    pytest.fail(f"the stream looks as if it had ended well: {received}")
