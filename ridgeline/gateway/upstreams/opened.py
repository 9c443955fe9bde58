"""Opened: an answer that has begun, with its slot and credential. Attempt: one request that was sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from ridgeline.gateway.upstreams.errors import gateway_error
from ridgeline.gateway.upstreams.outgoing import Target
from ridgeline.gateway.upstreams.upstream import Upstream
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.breaker import Pass
from ridgeline.proxy.errors import ProxyError
from ridgeline.proxy.relay import relay

# retry: the same target again. rotation: again with another key, because one was refused.
# fallback: another target, because one failed. hedge: a second target beside a slow one.
AttemptKind = Literal["first", "retry", "rotation", "fallback", "hedge"]


class Attempt(msgspec.Struct, frozen=True):
    """One request that was sent, or was about to be."""

    kind: AttemptKind
    upstream: str
    model: str
    credential: str
    status: int  # 0: no answer
    cause: str  # why it failed: reset, first_byte_timeout, http_503, …; empty: it was answered
    waited_s: float  # before it was sent: backoff and queue
    took_s: float
    number: int = 0  # as in its Outgoing


class Opened:
    """The caller reads the body and then calls `close` or `abort`; the first call counts.

    The head and the state are those of `answer`; the body is read here, where a failure is an UpstreamBroken.
    """

    __slots__ = (
        "_place",
        "_tenant",
        "answer",
        "asked_at",
        "attempts",
        "credential",
        "first",
        "queue_s",
        "target",
    )

    def __init__(
        self,
        answer: UpstreamAnswer,
        target: Target,
        credential: str,
        attempts: list[Attempt],
        queue_s: float,
        place: Upstream,
        tenant: str,
        first: bytes,
    ) -> None:
        """place: the upstream where `tenant` holds a slot, which is released at the end."""
        self.answer, self.target, self.credential = answer, target, credential
        self.attempts, self.queue_s, self.first = attempts, queue_s, first
        self.asked_at = answer.asked_at
        self._place: Upstream | None = place
        self._tenant = tenant

    async def read(self, limit: int) -> bytes:
        """The whole body, of `limit` bytes at most."""
        try:
            return await self.answer.read(limit)
        except ProxyError as error:
            raise gateway_error(error) from None

    async def next(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        try:
            return await self.answer.next()
        except ProxyError as error:
            raise gateway_error(error) from None

    async def relay(
        self,
        convert: Callable[[bytes], bytes],
        *,
        is_full: Callable[[], bool],
        write: Callable[[bytes], object],
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Relay the body as it arrives: see `proxy.relay`."""
        try:
            await relay(self.answer, self.first, convert, is_full=is_full, write=write, send=send)
        except ProxyError as error:
            raise gateway_error(error) from None

    def close(self, ok: bool) -> None:
        """The answer is finished. ok: false if the upstream ended it early."""
        upstream = self._give_back()
        if upstream is not None and not ok:
            upstream.fail(Pass.YES)

    def abort(self) -> None:
        """Give it up: closes the socket at once if the answer is incomplete."""
        self._give_back()

    def _give_back(self) -> Upstream | None:
        upstream, self._place = self._place, None
        if upstream is not None:
            upstream.heard_at = max(upstream.heard_at, self.answer.last_at)
            self.answer.abort()
            upstream.queue.leave(self._tenant)
        return upstream
