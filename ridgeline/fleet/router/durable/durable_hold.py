"""Holds requests with a key that arrive while no replica serves: each is journalled before it waits.

One router of a fleet has the journal (`DurableHold`). The others pass such requests on to it over a socket
(`HoldLink`): a key has one owner, and all journalled requests have one order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from ridgeline.fleet.queueing.durable import DurableQueue
from ridgeline.fleet.queueing.held_ledger import Answer, HeldRequest, KeyReused
from ridgeline.fleet.queueing.journal import JournalError
from ridgeline.fleet.router.asking import DEATHS
from ridgeline.fleet.router.durable.held_run import HeldRun, whole_answer
from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.fleet.router.refusals import Refusal, of_error
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.error_bodies import error_body
from ridgeline.proxy.errors import NoReplica, ProxyError, QueueRefused, RequestBroken
from ridgeline.proxy.http_client import NEVER, HttpClient, Timeouts
from ridgeline.proxy.origin import Origin
from ridgeline.proxy.request_head import Headers

HELD_PATH = "/fleet/held/"
KEY_HEADERS = (b"x-ridgeline-request-key", b"idempotency-key")
MAX_KEY = 255
POLL_S = 0.05
EXPIRE_S = 30.0  # seconds between two removals of expired answers
OWNER_S = 30.0  # seconds that a router waits for the one with the journal to start again
RETRY_S = 0.2
JSON = (b"content-type", b"application/json")

log = logging.getLogger("ridgeline.fleet")
T = TypeVar("T")


class Keeper(Protocol):
    """credentials: the client's header with its API key, for the router that has the journal.

    journal: None at a router without it.
    """

    journal: DurableQueue | None

    async def ask(self, request: FleetRequest, key: str, credentials: Headers) -> UpstreamAnswer: ...
    async def show(self, name: str, tenant: str, credentials: Headers) -> UpstreamAnswer: ...


def key_of(headers: dict[bytes, bytes]) -> str:
    """The client's key of the request; empty if it has none."""
    for name in KEY_HEADERS:
        if name in headers:
            key = headers[name].decode("latin-1")
            if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
                text = f"{name.decode()}: a key has 1 to {MAX_KEY} printable ASCII characters"
                raise Refusal(400, text, "invalid_key")
            return key
    return ""


class DurableHold:
    """In the router that has the journal. queue: None if the journal cannot be used.

    read: makes the request of a journalled one. Call `start` before the first request, and `stop` before
    the router's.
    """

    def __init__(
        self, router: FleetRouter, queue: DurableQueue | None, read: Callable[[HeldRequest], FleetRequest]
    ) -> None:
        self._router, self._queue, self._read = router, queue, read
        self.journal = queue
        self._runs: dict[str, HeldRun] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = asyncio.Event()  # the router has a table: held requests may run, in their order

    def start(self) -> None:
        if self._queue is None:
            return
        waiting = self._queue.waiting()
        if waiting:
            log.info("held requests were read from the journal and wait again", extra={"count": len(waiting)})
        for held in waiting:
            self._begin(held, is_replayed=True)
        self._spawn(self._await_table())
        self._spawn(self._expire())

    async def stop(self) -> None:
        """Stop; requests that wait stay in the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._queue is not None:
            await asyncio.to_thread(self._queue.close)

    async def ask(self, request: FleetRequest, key: str, credentials: Headers) -> UpstreamAnswer:
        """The answer: from the run or the journal if the key is known, else from the router."""
        router, queue = self._router, self._queue
        if not router.has_table:
            await router.await_table(request.until)
        entry = router.book.models.get(request.model)
        is_cold = entry is not None and entry.durable and router.is_cold(entry.name, request.residency)
        if queue is None:
            if is_cold and request.repeatable:
                raise _unusable()
            return await router.ask(request)
        await self._open.wait()  # journalled requests go first
        assert isinstance(request.body, bytes)
        try:
            known = queue.find(request.tenant, key, request.path, request.body)
            if known is None:
                if entry is None or not is_cold or not request.repeatable:
                    return await router.ask(request)
                if max(queue.count(entry.name), router.held.count(entry.name)) >= entry.max_held:
                    raise QueueRefused("queue_full", router.held.retry_after_s(entry.name))
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers]
            place = (key, entry.name if entry is not None else "", request.path, request.body, headers)
            holding = queue.hold(*place, request.tenant, request.priority)
            # Its client may disconnect during the write: a journalled request runs all the same.
            id = await asyncio.shield(self._spawn(self._accept(queue, holding)))
        except KeyReused as error:
            raise Refusal(422, str(error), "key_reused") from None
        except JournalError as error:
            log.error("a request could not be journalled: %s", error)
            raise _unusable() from None
        return await self._answer(queue, id, request.stream)

    async def show(self, name: str, tenant: str, credentials: Headers) -> UpstreamAnswer:
        queue = self._queue
        if queue is None:
            raise _unusable()
        id = queue.id_of(tenant, name)
        if id is None:
            raise Refusal(404, f"no held request has the id or key {name[:MAX_KEY]!r}", "held_not_found")
        if queue.answer(id) is not None:
            return await self._answer(queue, id, False)
        state = {"id": id, "state": "waiting", "position": queue.position(id)}
        return whole_answer(202, [JSON, (b"retry-after", b"1")], msgspec.json.encode(state))

    async def _answer(self, queue: DurableQueue, id: str, is_stream: bool) -> UpstreamAnswer:
        more = [(b"x-ridgeline-held-id", id.encode())]
        stored = queue.answer(id)
        if stored is not None:
            if _is_failure(stored.status):
                with contextlib.suppress(JournalError):
                    await queue.drop(id, "failed")  # the same key starts a new request
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in stored.headers]
            return whole_answer(stored.status, [*headers, *more], stored.body, is_stream)
        run = self._runs.get(id)
        if run is None:  # it has just failed, and its client was told
            raise NoReplica("the held request has just failed; send it again", 1.0)
        return await run.follow(more, is_stream)

    # ── runs ──

    async def _accept(self, queue: DurableQueue, holding: Coroutine[Any, Any, str]) -> str:
        id = await holding
        held = queue.request(id)
        if held is not None and id not in self._runs:
            self._begin(held)
        return id

    def _begin(self, held: HeldRequest, is_replayed: bool = False) -> None:
        run = self._runs[held.id] = HeldRun()
        self._spawn(self._run(held, run, is_replayed))

    async def _run(self, held: HeldRequest, run: HeldRun, is_replayed: bool) -> None:
        """is_replayed: the router before this one has reported it as demand."""
        queue, answer = self._queue, None
        assert queue is not None
        try:
            await self._open.wait()
            answer = await self._router.ask(replace(self._read(held), is_counted=is_replayed))
            run.begin(answer.status, answer.headers)
            while (piece := await answer.next()) is not None:
                run.feed(piece)
                if run.size > self._router.tuning.max_answer_bytes:
                    raise RequestBroken("body_too_large")
            headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in run.headers)
            await self._store(queue, run, Answer(held.id, run.status, headers, run.body))
            run.complete()
        except asyncio.CancelledError:
            run.fail(NoReplica("the router is shutting down; the request is kept: send its key again", 1.0))
            raise
        except Exception as error:
            if not isinstance(error, ProxyError):
                log.exception("a held request failed")
            told = error if isinstance(error, ProxyError) else RequestBroken("aborted")
            await self._store(queue, run, _refused(held, of_error(told)))
            run.fail(told)
        finally:
            self._runs.pop(held.id, None)
            if answer is not None:
                answer.abort()

    async def _store(self, queue: DurableQueue, run: HeldRun, answer: Answer) -> None:
        """A failure that reached a client is not kept: the same key starts a new request."""
        try:
            if _is_failure(answer.status) and run.has_clients:
                await queue.drop(answer.id, "failed")
            else:
                await queue.answered(answer.id, answer.status, answer.headers, answer.body)
        except JournalError as error:
            log.error("an answer could not be journalled; its request may run again: %s", error)

    async def _await_table(self) -> None:
        while not self._router.has_table:
            await asyncio.sleep(POLL_S)
        self._open.set()

    async def _expire(self) -> None:
        assert self._queue is not None
        while True:
            await asyncio.sleep(EXPIRE_S)
            try:
                await self._queue.expire()
            except JournalError as error:
                log.error("old answers could not be removed: %s", error)

    def _spawn(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class HoldLink:
    """In a router without the journal: passes requests on to the router that has it."""

    def __init__(self, router: FleetRouter, client: HttpClient, owner: Origin, connect_s: float) -> None:
        self._router, self._client, self._owner = router, client, owner
        self.journal: DurableQueue | None = None
        self._timeouts = Timeouts(connect_s, NEVER, NEVER)  # the request's deadline applies

    async def ask(self, request: FleetRequest, key: str, credentials: Headers) -> UpstreamAnswer:
        if not self._router.has_table:
            await self._router.await_table(request.until)
        entry = self._router.book.models.get(request.model)
        if entry is None or not entry.durable or not request.repeatable:
            return await self._router.ask(request)
        headers = [*request.headers, *credentials]
        assert isinstance(request.body, bytes)
        return await self._pass_on("POST", request.path, headers, request.body, request.until, request.stream)

    async def show(self, name: str, tenant: str, credentials: Headers) -> UpstreamAnswer:
        path = HELD_PATH + quote(name, safe="")
        until = time.monotonic() + 2 * OWNER_S
        return await self._pass_on("GET", path, credentials, b"", until, False)

    async def _pass_on(
        self, method: str, path: str, headers: Headers, body: bytes, until: float, is_stream: bool
    ) -> UpstreamAnswer:
        """The owner's answer. Asks again while the owner restarts: the key names the same request."""
        down_since: float | None = None
        while True:
            asked_at = time.monotonic()
            try:
                answer = await self._client.ask(
                    self._owner, method, path, headers, body,
                    timeouts=self._timeouts, until=until, wait_for_body=True, stream=is_stream,
                )  # fmt: skip
                answer.headers = [one for one in answer.headers if one[0] != b"content-length"]
                return answer
            except RequestBroken as error:
                now = time.monotonic()
                if down_since is None or error.cause not in ("refused", "unreachable"):
                    down_since = now
                if error.cause not in DEATHS and error.cause != "stale":
                    raise
                if now - down_since > OWNER_S:
                    raise NoReplica(
                        "the router with the journal of held requests does not answer", 5.0
                    ) from None
            await asyncio.sleep(max(RETRY_S - (time.monotonic() - asked_at), RETRY_S / 4))


def _is_failure(status: int) -> bool:
    return status >= 500 or status == 429


def _refused(held: HeldRequest, refusal: Refusal) -> Answer:
    family = "anthropic" if held.path.startswith("/v1/messages") else "openai"
    if held.path.startswith("/api/"):
        family = "ollama"
    body = error_body(family, refusal.status, refusal.type, refusal.message, refusal.param, refusal.code)
    headers = (("content-type", "application/json"), *refusal.headers.items())
    return Answer(held.id, refusal.status, headers, body)


def _unusable() -> Refusal:
    text = "the journal of held requests cannot be used; the router's log says why"
    return Refusal(503, text, "held_unavailable", type="service_unavailable_error")
