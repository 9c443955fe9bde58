"""relay: sends an answer's body to a client as it arrives, with backpressure.

Bytes are written in the same iteration of the event loop, without waking a task for each piece. While the
client's buffer is full, the upstream's socket is not read, and a task waits for room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ridgeline.proxy.answer import UpstreamAnswer


async def relay(
    answer: UpstreamAnswer,
    first: bytes,
    convert: Callable[[bytes], bytes],
    *,
    is_full: Callable[[], bool],
    write: Callable[[bytes], object],
    send: Callable[[bytes], Awaitable[None]],
) -> None:
    """Return once the answer has ended and was sent. Raises RequestBroken, and what `convert` raises.

    first:   body bytes that were already read.
    convert: what the client gets for these bytes; may be empty.
    is_full: whether the client's buffer has no room now.
    write:   send without waiting; called only while there is room.
    send:    send, and wait for room.
    """
    held: list[bytes] = []
    waiting: asyncio.Task[None] | None = None

    async def send_held() -> None:
        nonlocal waiting
        while held:
            out = b"".join(held)
            held.clear()
            await send(out)
        waiting = None
        answer.resume()

    def sink(data: bytes) -> None:
        nonlocal waiting
        out = convert(data)
        if not out:
            return
        if waiting is None and not is_full():
            write(out)
            return
        held.append(out)
        if waiting is None:
            answer.pause()
            waiting = asyncio.get_running_loop().create_task(send_held())

    try:
        if first:
            sink(first)
        await answer.relay(sink)
        if waiting is not None:
            await waiting
    except Exception:
        if waiting is not None:
            await waiting  # the client still gets the bytes before the failure
        raise
    finally:
        if waiting is not None:
            waiting.cancel()
