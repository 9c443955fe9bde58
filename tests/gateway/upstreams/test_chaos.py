"""Many requests at once, to upstreams that fail in every way, by callers that leave at any moment."""

from __future__ import annotations

import asyncio
import random
import time

from ridgeline.gateway.errors import GatewayError
from tests.gateway.upstreams.several import gateway
from tests.proxy.scripted import Request, Wire


def unreliable(seed: int) -> list[object]:
    rng = random.Random(seed)

    async def script(request: Request, wire: Wire) -> None:
        what = rng.choice(["ok", "ok", "stream", "429", "500", "reset", "half", "slow", "late", "garbage"])
        if what in ("429", "500"):
            await wire.answer(int(what), b"no", "retry-after-ms: 3")
        elif what == "ok":
            await wire.answer(200, request.body)
        elif what in ("stream", "half"):
            await wire.begin_chunks()
            for _ in range(5):
                await wire.chunk(b"piece")
                await asyncio.sleep(0.001)
            if what == "half":
                await wire.send(b"5\r\npi")
                wire.reset()
            else:
                await wire.end_chunks()
        elif what == "slow":
            await asyncio.sleep(0.05)
            await wire.answer(200, b"slow")
        elif what == "late":
            await wire.gone()
            wire.close()
        elif what == "garbage":
            await wire.send(b"\x16\x03\x01 not for you")
            wire.close()
        else:
            wire.reset()

    return [script]


async def test_after_chaos_nothing_is_left() -> None:
    rng = random.Random(7)
    limits = {"max_concurrent": 5, "max_waiting": 20, "first_byte_timeout_s": 0.2, "queue_timeout_s": 0.3}
    settings = {"breaker_failures": 8, "breaker_open_s": 0.02, "breaker_open_max_s": 0.05}
    ends: dict[str, int] = {}
    async with gateway(unreliable(1), unreliable(2), retries=settings, **limits) as g:  # type: ignore[arg-type]

        async def one() -> None:
            hedge = rng.choice([None, None, 0.005])
            try:
                opened = await g.open(
                    stream=rng.random() < 0.5,
                    strategy=rng.choice(["ordered", "weighted"]),
                    deadline=time.monotonic() + 1,
                    hedge_after_s=hedge,
                )
            except GatewayError as error:
                ends[error.code] = ends.get(error.code, 0) + 1
                return
            try:
                if rng.random() < 0.2:
                    opened.abort()
                else:
                    await opened.read(1 << 20)
                    opened.close(True)
                ends["ok"] = ends.get("ok", 0) + 1
            except GatewayError:
                opened.close(False)
                ends["broken"] = ends.get("broken", 0) + 1
            finally:
                opened.abort()

        tasks = []
        for _ in range(250):
            task = asyncio.create_task(one())
            tasks.append(task)
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.uniform(0, 0.05), task.cancel)
            await asyncio.sleep(rng.uniform(0, 0.006))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.exception() for task in tasks if not task.cancelled() and task.exception()] == []
        await g.servers[0].until(lambda: g.is_at_rest)  # hedges that lost have been told
        kept = [
            g.upstreams._client.pool.idle_connections(one.origin) for one in g.upstreams._upstreams.values()
        ]
        for server, count in zip(g.servers, kept, strict=True):
            await server.until(lambda server=server, count=count: server.open <= count)  # type: ignore[misc]
    assert ends["ok"] > 50
    assert ends["broken"] > 0
