"""Attempts: sends a request to one target until it answers or the target is given up.

    network error, 5xx, 408, 409    the same key again, after a backoff (or Retry-After, if that is longer)
    a kept-alive connection closed  the same key again, at once
    429                             another key, after a backoff; the first key pauses for its Retry-After
    401, 402, 403                   the key is dead (403: for this model), another one at once
    anything else                   is the answer

A request that creates an object upstream (`Call.repeatable` is false) is sent again only if it was certainly
not executed. Retries are paid from the retry budget that all requests share. Called by `Upstreams`; never
after a body's first byte.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.gateway.errors import BadRequest, GatewayError
from ridgeline.gateway.upstreams.call import Call, busy, down, exhausted, late, refused
from ridgeline.gateway.upstreams.config import RetryConfig
from ridgeline.gateway.upstreams.credentials import NO_KEY, Credential
from ridgeline.gateway.upstreams.errors import gateway_error
from ridgeline.gateway.upstreams.fleet import ask_fleet
from ridgeline.gateway.upstreams.opened import AttemptKind, Opened
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.upstreams.upstream import Upstream
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.backoff import backoff_s, retry_after_s
from ridgeline.proxy.breaker import Pass
from ridgeline.proxy.errors import ProxyError, QueueRefused, RequestBroken
from ridgeline.proxy.http_client import HttpClient
from ridgeline.proxy.request_head import Headers
from ridgeline.proxy.retry_budget import RetryBudget

# A client's own are never forwarded to an upstream.
SECRET_HEADERS = frozenset((b"authorization", b"x-api-key", b"api-key", b"cookie"))
PASSING = frozenset((408, 409))  # temporary, and not a fault of the upstream
REFUSED_KEY = frozenset((401, 402, 403))
# Not the upstream's.
NO_FAULT = frozenset(("busy", "aborted", "total_timeout", "stale", "upload_lost", "quarantined"))
UNSENT = frozenset(("busy", "refused", "unresolved", "unreachable", "connect_timeout", "tls"))
# The same target would only fail again, or take as long again.
NOT_REPEATED = frozenset(
    (
        *("busy", "aborted", "total_timeout", "upload_lost", "quarantined"),
        *("first_byte_timeout", "body_too_large", "head_too_large", "tls"),
    )
)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    """Parts that all requests of a worker share."""

    client: HttpClient
    config: RetryConfig
    budget: RetryBudget
    clock: Callable[[], float]
    rng: random.Random

    def backoff_s(self, retries: int) -> float:
        return backoff_s(self.config.backoff_ms, self.config.backoff_max_ms, retries, self.rng)


class Attempts:
    __slots__ = (
        "_call",
        "_credential",
        "_is_last",
        "_kind",
        "_means",
        "_number",
        "_retries",
        "_rotations",
        "_target",
        "_upstream",
        "_waited_s",
    )

    def __init__(
        self, means: Means, upstream: Upstream, target: Target, call: Call, kind: AttemptKind, is_last: bool
    ) -> None:
        """is_last: no other target is left, so wait for this one."""
        self._means, self._upstream, self._target, self._call = means, upstream, target, call
        self._kind: AttemptKind = kind
        self._is_last = is_last
        self._retries = self._rotations = 0
        self._waited_s = 0.0  # before the next attempt, or the current one
        self._credential: Credential | None = None  # to be used again
        self._number = 0  # of the current attempt, numbered by the caller

    async def run(self) -> Opened | None:
        """An answer that has begun; None once the target is given up, with the reason in the call."""
        upstream, call, clock = self._upstream, self._call, self._means.clock
        while True:
            if not upstream.breaker.may_admit():
                self._give_up(down(upstream.breaker.retry_in_s()))
                return None
            now = clock()
            if now >= call.deadline:
                raise late()
            timeout_s = min(upstream.config.queue_timeout_s, call.deadline - now)
            try:
                queued_s = await upstream.queue.enter(call.tenant, call.weight, call.priority, timeout_s)
            except QueueRefused as error:
                self._give_up(gateway_error(error))
                return None
            call.queue_s += queued_s
            self._waited_s += queued_s
            opened: Opened | float | None = None
            try:
                opened = await self._ask()
            finally:
                if not isinstance(opened, Opened):
                    upstream.queue.leave(call.tenant)
            if not isinstance(opened, float):
                return opened
            if opened:
                await asyncio.sleep(opened)
            self._waited_s += opened

    async def _ask(self) -> Opened | float | None:
        """One attempt, in a slot of the upstream. A number: try again after this many seconds."""
        upstream, target, now = self._upstream, self._target, self._means.clock()
        credential, self._credential = self._credential, None
        if credential is None:
            credential = upstream.credentials.pick(target.model, now)
        if credential is None:
            rest_s = upstream.credentials.rest_s(target.model, now)
            return self._give_up(exhausted()) if rest_s is None else self._after_rest(rest_s)
        given = upstream.breaker.admit()
        if given is Pass.NO:
            return self._give_up(down(upstream.breaker.retry_in_s()))
        self._number = 0
        try:
            outgoing = self._call.prepare(target)
            self._number = outgoing.number
            upstream.requests += 1
            answer = await self._send(outgoing, credential)
        except RequestBroken as error:
            return self._after_break(error, credential, given, now)
        except BadRequest as error:  # another target's dialect may support the field
            upstream.breaker.abandon(given)
            return self._give_up(error)
        except ProxyError as error:  # a header or path that cannot be sent
            upstream.breaker.abandon(given)
            return self._give_up(gateway_error(error))
        except BaseException:
            upstream.breaker.abandon(given)
            self._note(self._kind, credential, 0, "cancelled", now)
            raise
        return self._after_answer(answer, outgoing, credential, given)

    async def _send(self, outgoing: Outgoing, credential: Credential) -> UpstreamAnswer:
        upstream, call = self._upstream, self._call
        headers: Headers = [one for one in outgoing.headers if one[0] not in SECRET_HEADERS]
        if upstream.fleet is not None:
            return await ask_fleet(upstream.fleet, self._target.model, outgoing, headers, call)
        if upstream.config.kind == "anthropic" and not any(
            name == b"anthropic-version" for name, _ in headers
        ):
            headers.append((b"anthropic-version", upstream.config.anthropic_version.encode()))
        return await self._means.client.ask(
            upstream.origin,
            outgoing.method,
            outgoing.path,
            headers,
            outgoing.body,
            timeouts=upstream.timeouts,
            until=call.deadline,
            fixed=credential.lines,
            wait_for_body=True,
            stream=outgoing.stream,
        )

    # ── the outcome ──

    def _after_break(
        self, error: RequestBroken, credential: Credential, given: Pass, asked_at: float
    ) -> float | None:
        upstream, cause = self._upstream, error.cause
        self._note(self._kind, credential, 0, cause, asked_at)
        if cause in NO_FAULT:
            upstream.breaker.abandon(given)
        else:
            upstream.fail(given)
        if cause == "total_timeout":
            raise late()
        self._credential = credential
        if cause in NOT_REPEATED:
            return self._give_up(gateway_error(error))
        return self._retry(0.0, gateway_error(error), unsent=cause in UNSENT, at_once=cause == "stale")

    def _after_answer(
        self, answer: UpstreamAnswer, outgoing: Outgoing, credential: Credential, given: Pass
    ) -> Opened | float | None:
        upstream, status, kind = self._upstream, answer.status, self._kind
        upstream.heard_at = answer.last_at
        is_failure = status >= 500
        if is_failure:
            upstream.fail(given)
        else:
            upstream.breaker.success(given)
        asked_s = retry_after_s(answer) if status == 429 or status >= 500 else None
        if status < 300 or (400 <= status < 500 and status not in REFUSED_KEY and status != 429):
            wait_s = self._retry(0.0, None) if status in PASSING else None
            if wait_s is None:
                return self._opened(answer, outgoing, credential)
            self._credential = credential
        elif is_failure:
            self._credential = credential
            wait_s = self._retry(asked_s or 0.0, refused(status))
        elif status == 429:
            wait_s = self._rotate(credential, asked_s)
        elif status in REFUSED_KEY:
            wait_s = self._bury(credential, status)
        else:
            wait_s = self._give_up(refused(status))  # a redirect: only configured addresses are called
        self._note(kind, credential, status, f"http_{status}", answer.asked_at)
        answer.abort()
        return wait_s

    def _opened(self, answer: UpstreamAnswer, outgoing: Outgoing, credential: Credential) -> Opened:
        call = self._call
        self._note(self._kind, credential, answer.status, "", answer.asked_at)
        first = answer.take() if outgoing.stream else b""
        return Opened(
            answer,
            self._target,
            credential.name,
            call.attempts,
            call.queue_s,
            self._upstream,
            call.tenant,
            first,
        )

    # ── whether to try again ──

    def _bury(self, credential: Credential, status: int) -> float | None:
        """A key was refused: use another at once."""
        # 403 may concern only the model: one tenant's request must not disable the key for all others.
        model = self._target.model if status == 403 else None
        credential.kill(self._means.clock() + self._means.config.credential_dead_s, model)
        if credential.name == NO_KEY:
            message = "upstream %s answered %d to a request without a key: set its key_env or key_file"
            log.warning(message, self._upstream.name, status)
        else:
            log.warning("upstream %s: key %s was refused (%d)", self._upstream.name, credential.name, status)
        self._rotations += 1
        if self._rotations > len(self._upstream.credentials.keys):  # keys revive faster than they are refused
            return self._give_up(exhausted())
        self._kind = "rotation"
        return 0.0

    def _rotate(self, credential: Credential, asked_s: float | None) -> float | None:
        """A rate limit was hit: this key pauses, another is used after a backoff."""
        means, target = self._means, self._target
        now = means.clock()
        rest_s = means.backoff_s(self._retries) if asked_s is None else asked_s
        credential.rests_until = now + rest_s
        others_s = self._upstream.credentials.rest_s(target.model, now)
        if others_s is None:
            return self._give_up(exhausted())
        if others_s and not self._is_last:
            return self._give_up(busy(others_s))
        return self._retry(others_s, busy(others_s or rest_s))

    def _after_rest(self, rest_s: float) -> float | None:
        """All keys pause, and nothing was sent: wait, if no other target is left. Not a retry."""
        config = self._means.config
        late_s = self._means.clock() + rest_s >= self._call.deadline
        if not self._is_last or rest_s > config.retry_after_max_s or late_s or self._retries > config.retries:
            return self._give_up(busy(rest_s))
        self._retries += 1
        return rest_s * self._means.rng.uniform(1.0, 1.2) + 0.001

    def _retry(
        self, least_s: float, error: GatewayError | None, unsent: bool = False, at_once: bool = False
    ) -> float | None:
        """Seconds to wait, or None: give the target up, because of `error` if given.

        unsent: no byte of the request was written. at_once: without a backoff.
        """
        means = self._means
        wait_s = 0.0 if at_once else max(means.backoff_s(self._retries), least_s)
        if (
            self._retries < means.config.retries
            and (self._call.repeatable or unsent)
            and least_s <= means.config.retry_after_max_s
            and means.clock() + wait_s < self._call.deadline
            and self._upstream.breaker.may_admit()
            and means.budget.take()
        ):
            self._retries += 1
            self._kind = "retry"
            return wait_s
        return None if error is None else self._give_up(error)

    def _give_up(self, error: GatewayError) -> float | None:
        """Always returns None, for its callers to return."""
        self._call.gave_up(error)
        return None

    def _note(
        self, kind: AttemptKind, credential: Credential, status: int, cause: str, asked_at: float
    ) -> None:
        took_s = self._means.clock() - asked_at
        self._call.note(
            kind,
            self._upstream,
            self._target,
            credential.name,
            status,
            cause,
            self._waited_s,
            took_s,
            self._number,
        )
        self._waited_s = 0.0
