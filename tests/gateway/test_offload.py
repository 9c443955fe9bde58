"""Large inputs are read, guarded, routed and translated in other processes, in turns of tenants."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.body import Fields
from ridgeline.gateway.errors import BadRequest, GatewayError, Unavailable
from ridgeline.gateway.guard.guards import Guard
from ridgeline.gateway.offload.offload import LARGE, Offload
from ridgeline.gateway.pipeline import forwarding, model_requests, most_used
from ridgeline.gateway.routing import router
from ridgeline.gateway.settings import make_settings
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.stage import staged
from tests.patience import PATIENCE_S


@pytest.fixture
async def offload() -> AsyncIterator[Offload]:
    made = Offload(make_settings({"guards": [{"timeout_ms": 600_000}]}))
    yield made
    await made.close()


def long_body(texts: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Call me at 415-555-{1000 + at % 9000}."} for at in range(texts)]
    return {"model": "auto", "messages": messages, "max_tokens": 8, **fields}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Bytes that each function has worked on in this process."""
    seen: dict[str, list[int]] = {}

    def watch(owner: Any, name: str, size: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.setdefault(name, []).append(size(*arguments))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    def total(fields: Fields) -> int:
        return sum(len(bytes(value)) for value in fields.values())

    watch(model_requests, "read_fields", len)
    watch(most_used, "_prompts", lambda value: len(bytes(value or b"")))
    watch(Guard, "_checked", lambda guard, kind, fields, names: total(fields))
    watch(router, "read", lambda kind, fields: total(fields))
    watch(forwarding, "translate_request", lambda kind, fields, *_: total(fields))
    watch(forwarding, "usage_of", lambda kind, family, body: len(body))
    return seen


async def test_no_step_on_the_loop_works_on_a_large_request(
    tmp_path: Path, sizes: dict[str, list[int]]
) -> None:
    settings: dict[str, Any] = {
        "models": [{"name": "mock", "targets": ("hosted/*",), "price_in": 1.0, "price_out": 2.0}],
        "routes": [{"name": "auto", "models": ("mock",)}],
        "guards": [{"timeout_ms": 600_000, "restore": False}],
    }
    async with staged(tmp_path) as first:
        settings["upstreams"] = [{"name": "hosted", "kind": "openai", "url": first.mock.url, "probe_s": 0.0}]
        key = {"limits": Limits(tokens_per_minute=10**9, daily_usd=100.0)}
        async with staged(tmp_path / "second", settings, key) as stage:
            path, large = "/v1/messages", long_body(1_500)  # of Anthropic's: encoded again for the upstream
            assert len(json.dumps(large)) > LARGE
            for body in (long_body(1), large):
                assert (await stage.http.post(path, json=body)).status_code == 200
            sent = json.loads(first.mock.last_body)
            assert len(sent["messages"]) == 1_500
            assert sent["messages"][-1]["content"] == "Call me at <PHONE_1500>."
            for count in (1, 30_000):
                body = {"model": "mock", "input": ["a text"] * count}
                assert (await stage.http.post("/v1/embeddings", json=body)).status_code == 200
    assert len(sizes) == 6  # the small request passed each of them
    assert max(map(max, sizes.values())) <= LARGE


async def test_a_tenant_with_many_large_requests_leaves_a_process_to_others(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(long_body(500)).encode()
    fields = await offload.run("a", "fields", body)
    turns: list[str] = []
    process_for = offload._process

    async def noted(tenant: str) -> Any:
        process = await process_for(tenant)
        turns.append(tenant)
        return process

    async def check(tenant: str) -> None:
        await offload.run(tenant, "guard", "default", "chat", fields, {})

    monkeypatch.setattr(offload, "_process", noted)
    many = [asyncio.create_task(check("a")) for _ in range(12)]
    await asyncio.sleep(0)
    await check("b")
    assert turns.index("b") <= 4  # behind neither all of them nor most
    await asyncio.gather(*many)


async def test_an_error_of_a_job_is_the_requests_own(offload: Offload) -> None:
    with pytest.raises(BadRequest, match="not a JSON object"):
        await offload.run("a", "fields", b"[1]")
    with pytest.raises(GatewayError) as failed:
        await offload.run("a", "guard", "no such policy", "chat", {}, {})
    assert "no such policy" not in failed.value.message


async def test_a_process_that_dies_fails_one_job_and_is_replaced(offload: Offload) -> None:
    body = json.dumps(long_body(5)).encode()
    await offload.run("a", "fields", body)
    for process in list(offload._alive):
        process.kill()
        await process.wait()
    failures = 0
    for _ in range(4):
        try:
            await offload.run("a", "fields", body)
        except Unavailable:
            failures += 1
    assert failures <= 2
    assert len(await offload.run("a", "fields", body)) == 3


async def test_no_large_request_takes_the_loop_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time of the gateway's own steps: it does not depend on what else the machine does."""
    taken: list[float] = []
    run = asyncio.events.Handle._run  # type: ignore[attr-defined]

    def watched(handle: Any) -> None:
        task = getattr(handle._callback, "__self__", None)
        is_ours = isinstance(task, asyncio.Task) and "run_asgi" in str(task.get_coro())
        began = time.thread_time()
        run(handle)
        if is_ours:
            taken.append(time.thread_time() - began)

    monkeypatch.setattr(asyncio.events.Handle, "_run", watched)
    bodies = [
        ("/v1/chat/completions", long_body(20_000, model="mock")),
        ("/v1/chat/completions", {**long_body(1, model="mock"), **{f"f{at}": at for at in range(100_000)}}),
        ("/v1/embeddings", {"model": "mock", "input": ["a"] * 400_000}),
    ]
    gc.collect()
    gc.freeze()  # the collector does not look through what other tests have left
    try:
        async with staged(tmp_path, {"guards": [{"timeout_ms": 600_000}]}) as stage:
            for path, body in bodies:
                await stage.http.post(
                    path,
                    content=json.dumps(body),
                    headers={"content-type": "application/json"},
                    timeout=10 * PATIENCE_S,  # 100,000 texts are guarded
                )
    finally:
        gc.unfreeze()
    assert len(taken) > len(bodies)
    assert max(taken) < 0.05  # seconds; a guard alone would take more than one
