"""Reads an answer of JSON lines as it arrives: the controller's table and a replica's feed."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import RequestBroken

MAX_LINE_BYTES = 64 << 20  # a snapshot of a large cache, or a table of many replicas


async def lines_of(answer: UpstreamAnswer) -> AsyncIterator[list[bytes]]:
    """Yield the complete lines that arrived together. Ends with the answer; RequestBroken if it breaks."""
    rest = bytearray()
    while (piece := await answer.next()) is not None:
        rest += piece
        end = rest.rfind(b"\n")
        if end < 0:
            if len(rest) > MAX_LINE_BYTES:
                answer.abort()
                raise RequestBroken("body_too_large")
            continue
        lines = bytes(rest[:end]).split(b"\n")
        del rest[: end + 1]
        yield [line for line in lines if line]
