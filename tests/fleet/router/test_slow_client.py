"""A client that does not read: its stream is paused, then cut. Buffers stay small, others are not delayed."""

from __future__ import annotations

import asyncio
import json
import socket

from tests.fleet.router.conftest import Stage, until
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.test_router_app import CHAT, front
from tests.patience import PATIENCE_S

EVENT = b"data: {%d " + b"x" * 16_000 + b"}\n\n"
EVENTS = 16_000  # 256 MB


async def test_a_client_that_reads_nothing_is_paused_and_cut_and_others_are_served(stage: Stage) -> None:
    (replica,) = await stage.add()
    sent = 0

    async def count(asked: object, token: int) -> bool:
        nonlocal sent
        sent = max(sent, token)
        return False

    async with front(stage, stream_stall_s=1.5) as client:
        router = stage.routers[0]
        replica.event, replica.tokens, replica.fault = EVENT, EVENTS, count
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((client.base_url.host, client.base_url.port or 80))
            body = json.dumps(CHAT | {"stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
            slow.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            await until(lambda: router.book.in_flight(model=MODEL) == 1 and sent > 10, "the stream")
            whole = await client.post("/v1/chat/completions", json=CHAT)  # beside the one that stands
            assert whole.status_code == 200
            await until(lambda: router.book.in_flight(model=MODEL) == 0, "its end")
        # 16 kB each, in the buffers of sockets, up to 20 MB, and of the router: far from the whole answer.
        assert sent < EVENTS // 4
        await until(lambda: replica.running == 0, "the replica is free again")
        assert router.books[MODEL].outcomes == {"ok": 1, "cancelled": 1}
        assert not router.replicas[replica.id].running
        replica.tokens, replica.fault = 3, None
        again = await asyncio.wait_for(
            client.post("/v1/chat/completions", json=CHAT | {"stream": True}), PATIENCE_S
        )
        assert again.content.endswith(b"data: [DONE]\n\n")
