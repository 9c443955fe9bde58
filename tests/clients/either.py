"""One test body for a blocking and an asynchronous client: both are awaited, iterated and entered alike."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


async def settled(value: Any) -> Any:
    """What a call came to: the blocking client has it already, the other's is awaited."""
    return await value if inspect.isawaitable(value) else value


async def each(stream: Any) -> AsyncIterator[Any]:
    if hasattr(stream, "__aiter__"):
        async for part in stream:
            yield part
    else:
        for part in stream:
            yield part


async def parts_of(call: Any) -> list[Any]:
    """All that a streamed call sends."""
    return [part async for part in each(await settled(call))]


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    if hasattr(manager, "__aenter__"):
        async with manager as inside:
            yield inside
    else:
        with manager as inside:
            yield inside
