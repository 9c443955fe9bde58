"""One line of a batch: sent to the app until it has a final answer.

"Come back later" (429, 503) is retried without limit. After an engine death the line is sent again, unless
the engine dies of this line every time. Everything else is the final answer, good or bad.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec

from ridgeline.server.batches.bodies import LineResponse, OutputLine
from ridgeline.server.batches.inner import Reply
from ridgeline.server.batches.store import DONE, FAILED, LineUsage

MAX_DEATHS = 4  # engine deaths with one line; then the line is considered the cause
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0


Post = Callable[[str, bytes, str], Awaitable[Reply]]  # path, body, request id


class LineSender:
    def __init__(self, post: Post) -> None:
        self._post = post

    async def ask(self, name: str, custom_id: str, url: str, body: bytes) -> tuple[int, bytes, LineUsage]:
        """The outcome (DONE or FAILED), the line of the output file, and the tokens it used."""
        reply = await self.reply(name, url, body)
        outcome = DONE if reply.status < 400 else FAILED
        return outcome, answer_line(name, custom_id, reply), usage_in(reply)

    async def reply(self, name: str, url: str, body: bytes) -> Reply:
        deaths, pause_s = 0, FIRST_PAUSE_S
        while True:
            reply = await self._post(url, body, name)
            if _error_code(reply) == "engine_died":
                deaths += 1
            if reply.status not in (429, 503) or deaths > MAX_DEATHS:
                return reply
            # Spread out in time, but not before the app's retry-after.
            wait_s = max(pause_s, float(reply.headers.get("retry-after", 0)))
            await asyncio.sleep(min(wait_s, LONGEST_PAUSE_S) * random.uniform(0.7, 1.3))
            pause_s *= 2


def answer_line(name: str, custom_id: str, reply: Reply) -> bytes:
    response = LineResponse(reply.status, name, msgspec.Raw(bytes(reply.body)))
    return msgspec.json.encode(OutputLine(name, custom_id, response, None))


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Counts(msgspec.Struct, frozen=True):
    """Token counts under the field names of every endpoint that a line may use."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Used(msgspec.Struct, frozen=True):
    usage: _Counts | None = None


_used = msgspec.json.Decoder(_Used)
_NO_DETAILS = _Details()


def usage_in(reply: Reply) -> LineUsage:
    try:
        counts = _used.decode(reply.body).usage or _Counts()
    except msgspec.DecodeError:
        return LineUsage()
    inner_in = counts.prompt_tokens_details or counts.input_tokens_details or _NO_DETAILS
    inner_out = counts.completion_tokens_details or counts.output_tokens_details or _NO_DETAILS
    return LineUsage(
        counts.prompt_tokens or counts.input_tokens,
        inner_in.cached_tokens,
        counts.completion_tokens or counts.output_tokens,
        inner_out.reasoning_tokens,
    )


class _Error(msgspec.Struct, frozen=True):
    code: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


_error_body = msgspec.json.Decoder(_ErrorBody)


def _error_code(reply: Reply) -> str | None:
    if reply.status != 503:
        return None
    try:
        return _error_body.decode(reply.body).error.code
    except msgspec.DecodeError:
        return None
