"""Requests for objects that an upstream stores: files, batches, stored responses, vector stores. Only their
owner sees them.

The gateway stores the tenant and the upstream of each object; for other tenants it does not exist. A batch's
file is checked on upload: every line must be a request that its key could have sent by itself.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TypeVar

import msgspec

from ridgeline.gateway.body import field, read_fields, write_fields
from ridgeline.gateway.catalog import allows
from ridgeline.gateway.errors import (
    BadRequest,
    Forbidden,
    GatewayError,
    NotFound,
    Unavailable,
    UpstreamFailed,
    out_of_time,
)
from ridgeline.gateway.guard.guards import Guard
from ridgeline.gateway.limits.subjects import reserve_request
from ridgeline.gateway.objects.batch_booking import BatchBooking
from ridgeline.gateway.objects.batch_meta import BatchMeta, meta_of
from ridgeline.gateway.objects.batch_orders import drop_order, order_batch, with_reason
from ridgeline.gateway.objects.listing import own_files, page, shown_in
from ridgeline.gateway.objects.uploads import checked_batch_file, read_form
from ridgeline.gateway.objects.vector_store_requests import (
    FILE_FIELDS,
    MOST_BODY,
    check_files,
    check_list_query,
    vector_store_path,
)
from ridgeline.gateway.offload.offload import LARGE
from ridgeline.gateway.pipeline.endpoints import FILES, VECTOR_STORES, Place
from ridgeline.gateway.pipeline.forwarding import PASSED_BACK, passed_on
from ridgeline.gateway.pipeline.own_requests import answer_json
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import Headers, Receive, RequestState, Send
from ridgeline.gateway.tenants.owned import Meta
from ridgeline.gateway.upstreams.attempts import UNSENT
from ridgeline.gateway.upstreams.errors import UpstreamBroken
from ridgeline.gateway.upstreams.opened import Attempt
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.body import StoredBody, Stretch

T = TypeVar("T")

MAX_ID = 128
MAX_PAGE = 100
MAX_BATCH_BODY = LARGE  # bytes of POST /v1/batches: parsed on the event loop; OpenAI's metadata fits
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
UPLOAD_FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
KINDS = {
    "files": "file",
    "batches": "batch",
    "stored_responses": "response",
    "vector_stores": "vector_store",
}


class _Made(msgspec.Struct):
    id: str = ""


class ObjectRequests:
    def __init__(self, parts: Parts, batches: BatchBooking) -> None:
        self._parts, self._batches = parts, batches
        self._config = parts.settings.gateway

    async def answer(self, request: RequestState, receive: Receive, send: Send) -> None:
        request.wait_until(request.arrived + self._config.request_timeout_s, out_of_time)
        assert request.key is not None
        request.reservation = await reserve_request(self._parts.limiter, request.key, request.team)
        place = request.place
        if place.endpoint is VECTOR_STORES and request.method == "POST":
            await self._vector_store(request, receive, send)
        elif place.object_id:
            await self._one(request, send)
        elif request.method == "GET":
            await self._list(request, send)
        elif place.endpoint is FILES:
            await self._upload(request, receive, send)
        else:
            await self._batch(request, receive, send)

    # ---- reading ----

    async def _one(self, request: RequestState, send: Send) -> None:
        """Another tenant's object and a missing object get the same answer."""
        place = request.place
        kind = KINDS[place.endpoint.kind]
        find = self._parts.owned.fresh if kind == "batch" else self._parts.owned.owner
        owned = await find(place.object_id) if len(place.object_id) <= MAX_ID else None
        if owned is None or owned.tenant != request.tenant or owned.kind != kind:
            raise NotFound(f"no {kind} is named {place.object_id[:MAX_ID]!r}")
        if request.method == "DELETE" and "batch" in owned.meta:
            await self._batches.book_before_deletion(str(owned.meta["batch"]))
        answer = await self._ask(request, owned.upstream, request.method, _path(request), b"", [])
        is_gone = kind in ("file", "vector_store") and answer.status == 404
        if not _is_within(place) and ((request.method == "DELETE" and answer.status < 300) or is_gone):
            await self._parts.owned.forget(place.object_id)
        if kind == "batch":
            body = await self._read(request, answer)
            if answer.status < 300:
                await own_files(self._parts, owned, body)
                body = with_reason(body, owned)
            await self._send(request, answer, body, send)
        else:
            await self._relay(request, answer, send)

    async def _list(self, request: RequestState, send: Send) -> None:
        """This tenant's objects, newest first."""
        asked = _query(request.query)
        if request.place.endpoint is VECTOR_STORES:
            check_list_query(asked)
        self._upstream()  # raises if no upstream stores objects
        listed = await page(
            self._parts,
            request.tenant,
            KINDS[request.place.endpoint.kind],
            _limit(asked.get("limit", "20")),
            asked.get("after", ""),
        )
        request.end_as("ok", 200)
        request.started = True
        await answer_json(send, 200, listed, [(b"x-request-id", request.id.encode())])

    # ---- creating ----

    async def _upload(self, request: RequestState, receive: Receive, send: Send) -> None:
        form = await read_form(self._parts, request, receive)
        meta: Meta = {}
        changes: dict[str, bytes | Stretch] = {}
        guard = self._guard(request)
        unknown = form.names - UPLOAD_FIELDS
        if unknown:
            name = min(unknown)
            raise BadRequest(f"{name}: unknown field; known: {', '.join(sorted(UPLOAD_FIELDS))}", param=name)
        for name in form.names - {"file"}:
            if not _WORD.fullmatch(form.text(name)):
                raise BadRequest(f"{name}: must be a word or a number", param=name)
        if form.text("purpose") == "batch":
            content = form.content("file")
            if content is None:
                raise BadRequest("file: this field is required", code="missing_field", param="file")
            changes["file"], batch = await checked_batch_file(
                self._parts, request, content, self._upstream(), guard
            )
            meta = batch.stored()
        elif guard is not None:
            guard.refuse_unreadable("files")
        content_type, body = form.written(changes, with_filenames=guard is None)
        request.stay()
        answer = await self._ask(
            request, self._upstream(), "POST", "/v1/files", body, [(b"content-type", content_type)]
        )
        await self._relay_made(request, answer, "file", meta, send)

    async def _batch(self, request: RequestState, receive: Receive, send: Send) -> None:
        config = self._config
        request.body = await request.read_body(
            receive,
            min(MAX_BATCH_BODY, config.max_body_bytes),
            config.upload_timeout_s,
            self._parts.body_bytes,
        )
        request.wait_until(request.arrived + config.request_timeout_s, out_of_time)
        request.fields = read_fields(request.body)
        file_id = field(request.fields, "input_file_id", str, "")
        owned = await self._parts.owned.owner(file_id) if 0 < len(file_id) <= MAX_ID else None
        if owned is None or owned.tenant != request.tenant or owned.kind != "file":
            raise NotFound(f"input_file_id: no file is named {file_id[:MAX_ID]!r}", param="input_file_id")
        if not meta_of(owned).model:
            raise BadRequest(
                "input_file_id: the file was not uploaded with purpose batch", param="input_file_id"
            )
        self._check_scope(request, meta_of(owned))
        guard = self._guard(request)
        if guard is not None:
            own = {name: value for name, value in request.fields.items() if name != "input_file_id"}
            guarded = (await guard.request("batches", own, request.tenant)).fields
            request.fields = {**guarded, "input_file_id": request.fields["input_file_id"]}
        request.stay()  # a created batch without a record would never be booked
        order = await order_batch(self._parts, request, owned)
        headers: Headers = [(b"content-type", b"application/json")]
        sent, tried = write_fields(request.fields), list[Attempt]()
        try:
            answer = await self._ask(
                request, owned.upstream, "POST", "/v1/batches", sent, headers, attempts=tried
            )
        except GatewayError:
            if all(400 <= one.status < 500 or one.cause in UNSENT for one in tried):
                with contextlib.suppress(GatewayError):  # the order stays and is dropped later
                    await drop_order(self._parts, order)
            raise
        body = await self._read(request, answer)
        if answer.status >= 400:
            await drop_order(self._parts, order)
        elif not await self._parts.owned.rename(order.id, _read_json(body, _Made).id, "batch"):
            raise UpstreamFailed("the upstream returned an id that is already in use")
        await self._send(request, answer, body, send)

    async def _vector_store(self, request: RequestState, receive: Receive, send: Send) -> None:
        """Make, change or search a vector store: it and the files in the body are the tenant's."""
        place, config = request.place, self._config
        request.body = await request.read_body(
            receive, min(MOST_BODY, config.max_body_bytes), config.upload_timeout_s, self._parts.body_bytes
        )
        request.wait_until(request.arrived + config.request_timeout_s, out_of_time)
        upstream = self._upstream()
        if place.object_id:
            owned = await self._parts.owned.owner(place.object_id) if len(place.object_id) <= MAX_ID else None
            if owned is None or owned.tenant != request.tenant or owned.kind != "vector_store":
                raise NotFound(f"no vector store is named {place.object_id[:MAX_ID]!r}")
            upstream = owned.upstream
        request.fields = read_fields(request.body) if request.body.strip() else {}
        await check_files(self._parts, request.tenant, request.fields, upstream)
        if (guard := self._guard(request)) is not None:
            kept = {name: value for name, value in request.fields.items() if name in FILE_FIELDS}
            own = {name: value for name, value in request.fields.items() if name not in FILE_FIELDS}
            request.fields = {**(await guard.request("vector_stores", own, request.tenant)).fields, **kept}
        headers: Headers = [(b"content-type", b"application/json")]
        sent = write_fields(request.fields)
        if not place.object_id:
            request.stay()  # a vector store without an owner could never be used or deleted
            answer = await self._ask(request, upstream, "POST", "/v1/vector_stores", sent, headers)
            await self._relay_made(request, answer, "vector_store", {}, send)
        else:
            answer = await self._ask(request, upstream, "POST", _path(request), sent, headers)
            await self._relay(request, answer, send)

    def _check_scope(self, request: RequestState, meta: BatchMeta) -> None:
        """Another key of the team, with a wider scope, may have uploaded the file."""
        key = request.key
        assert key is not None
        if not allows(key.models, meta.model):
            message = f"input_file_id: this key may not use the model {meta.model!r}"
            raise Forbidden(message, code="model_not_allowed", param="input_file_id")
        for name in meta.endpoints:
            if key.endpoints and name not in key.endpoints:
                message = f"input_file_id: this key may not use the endpoint {name!r}"
                raise Forbidden(message, code="endpoint_not_allowed", param="input_file_id")

    # ---- calling the upstream ----

    def _upstream(self) -> str:
        upstream = self._parts.settings.objects_upstream
        if upstream is None:
            raise Unavailable(
                "this gateway has no upstream for files and batches", status=501, code="not_supported"
            )
        return upstream

    def _guard(self, request: RequestState) -> Guard | None:
        assert request.key is not None
        return self._parts.guards.policy(request.key.guard)

    async def _ask(
        self,
        request: RequestState,
        upstream: str,
        method: str,
        path: str,
        body: bytes | StoredBody,
        headers: Headers,
        attempts: list[Attempt] | None = None,
    ) -> UpstreamAnswer:
        key, team = request.key, request.team
        assert key is not None
        headers = [(b"x-request-id", request.id.encode()), *passed_on(request), *headers]
        outgoing = Outgoing(method, path, headers, body, False)
        if request.opened is not None:
            request.opened.abort()
        request.opened = opened = await self._parts.upstreams.open(
            [Target(upstream, "")],
            lambda target: outgoing,
            tenant=request.tenant,
            weight=team.weight if team is not None else 1.0,
            priority=key.priority,
            strategy="ordered",
            deadline=request.deadline,
            attempts=attempts,
            repeatable=method == "GET",
            residency=request.residency,
        )
        request.row.upstream, request.row.attempts = upstream, len(opened.attempts)
        return opened.answer

    async def _read(self, request: RequestState, answer: UpstreamAnswer) -> bytes:
        try:
            body: bytes = await request.answering.read(self._config.max_answer_bytes)
        except UpstreamBroken as error:
            raise UpstreamFailed("the upstream's answer ended early", code="upstream_broken") from error
        request.answering.close(answer.status < 500)
        return body

    async def _relay_made(
        self, request: RequestState, answer: UpstreamAnswer, kind: str, meta: Meta, send: Send
    ) -> None:
        """Store the owner before the client gets the id."""
        body = await self._read(request, answer)
        if answer.status < 300:
            made = _read_json(body, _Made)
            if kind == "file":
                meta = shown_in(meta, body)
            if not await self._parts.owned.remember(
                made.id, request.tenant, request.row.upstream, kind=kind, meta=meta
            ):
                raise UpstreamFailed("the upstream returned an id that is already in use")
        await self._send(request, answer, body, send)

    async def _relay(self, request: RequestState, answer: UpstreamAnswer, send: Send) -> None:
        """Relay in pieces: a file's content may be too large for memory."""
        request.end_as("ok" if answer.status < 400 else "refused", answer.status)
        request.started = True
        headers = [one for one in answer.headers if one[0] in PASSED_BACK or one[0] == b"content-length"]
        headers.append((b"x-request-id", request.id.encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        total = request.deadline
        try:
            while (data := await request.answering.next()) is not None:
                request.wait_until(min(time.monotonic() + self._config.stream_stall_s, total), out_of_time)
                await send({"type": "http.response.body", "body": data, "more_body": True})
                request.wait_until(total, out_of_time)
        except UpstreamBroken as error:
            # Not ended: the server closes the connection, so the client sees an incomplete body.
            raise UpstreamFailed("the upstream's answer ended early", code="upstream_broken") from error
        request.answering.close(answer.status < 500)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, request: RequestState, answer: UpstreamAnswer, body: bytes, send: Send) -> None:
        request.end_as("ok" if answer.status < 400 else "refused", answer.status)
        request.started = True
        headers = [one for one in answer.headers if one[0] in PASSED_BACK]
        headers += [(b"x-request-id", request.id.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _path(request: RequestState) -> str:
    """Built from the parsed path and query, never from the client's text."""
    place = request.place
    if place.endpoint is VECTOR_STORES:
        return vector_store_path(place, _query(request.query))
    base = {"files": "/v1/files", "batches": "/v1/batches", "stored_responses": "/v1/responses"}[
        place.endpoint.kind
    ]
    return f"{base}/{place.object_id}" + (f"/{place.action}" if place.action else "")


def _is_within(place: Place) -> bool:
    """Whether the request is for an object of a vector store, not for the store itself."""
    return place.endpoint is VECTOR_STORES and bool(place.action)


def _read_json(body: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        raise UpstreamFailed("the upstream's answer is malformed") from None


def _query(query: bytes) -> dict[str, str]:
    from urllib.parse import parse_qsl

    return dict(parse_qsl(query.decode("latin-1")[:2048]))


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PAGE:
        raise BadRequest(f"limit: must be 1 to {MAX_PAGE}", param="limit")
    return int(text)
