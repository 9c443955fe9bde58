"""Forwarding: sends a request to an upstream, and the answer back to the client.

An upstream's answer reaches the client byte for byte, unless a dialect, a guard or usage that the client did
not ask for requires a change. The ledger has a request before its first byte is sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import Fields, raw, write_fields
from ridgeline.gateway.dialects.counts import usage_of
from ridgeline.gateway.dialects.error_bodies import translated_error
from ridgeline.gateway.dialects.families import Family
from ridgeline.gateway.dialects.streams.usage_reader import Hide, ask_for_usage
from ridgeline.gateway.dialects.translate import translate_answer, translate_request
from ridgeline.gateway.errors import BadRequest, ClientGone, GatewayError, UpstreamFailed, key_revoked
from ridgeline.gateway.objects.stored_responses import remember_response
from ridgeline.gateway.offload.offload import LARGE, is_large, plain, raw_fields
from ridgeline.gateway.pipeline.attempt_booking import AttemptBooking
from ridgeline.gateway.pipeline.cache_salt import FIELD, salted, takes_salt
from ridgeline.gateway.pipeline.endpoints import Endpoint
from ridgeline.gateway.pipeline.job import Job, Sent
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import ANONYMOUS, Headers, RequestState, Send
from ridgeline.gateway.pipeline.stream_relay import StreamRelay
from ridgeline.gateway.upstreams.errors import UpstreamBroken
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target

# Client headers that are forwarded; all others, above all keys and forged ones, are dropped.
PASSED_ON = (b"accept", b"openai-beta", b"anthropic-beta", b"anthropic-version", b"idempotency-key")
LONGEST_PASSED_ON = 512  # bytes of a value: these are protocol values, which no guard reads
# Upstream headers that are sent to the client.
PASSED_BACK = frozenset(
    {
        *(b"content-type", b"content-disposition", b"openai-processing-ms", b"openai-version"),
        *(b"x-ridgeline-schema-ignored", b"x-ridgeline-schema-checked"),
        *(b"x-ridgeline-held-position", b"x-ridgeline-held-estimate-s", b"x-ridgeline-held-s"),
    }
)
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "speech": "/v1/audio/speech",
    "transcriptions": "/v1/audio/transcriptions",
    "translations": "/v1/audio/translations",
}


def passed_on(request: RequestState) -> Headers:
    """The client's headers for its upstream."""
    headers: Headers = []
    for name in PASSED_ON:
        value = request.headers.get(name)
        if value is None:
            continue
        if len(value) > LONGEST_PASSED_ON:
            text = f"the header {name.decode()} is longer than {LONGEST_PASSED_ON} bytes"
            raise BadRequest(text, code="invalid_header")
        if name == b"idempotency-key":
            # To the upstream all tenants are one client: a key must not return another tenant's answer.
            value = sha256(request.tenant.encode() + b"\0" + value).hexdigest().encode()
        headers.append((name, value))
    return headers


class Whole(NamedTuple):
    """An upstream's complete answer, in the client's dialect."""

    status: int
    headers: Headers
    body: bytes


class Forwarding:
    def __init__(self, parts: Parts, attempts: AttemptBooking) -> None:
        self._parts = parts
        self._attempts = attempts
        self._config = parts.settings.gateway
        self._upstreams = {one.name: one for one in parts.settings.upstreams}

    async def forward(self, request: RequestState, job: Job, send: Send) -> None:
        await self.open(request, job)
        if request.row.stream and request.answering.answer.status < 400:
            headers = self.headers(request, job, request.answering.answer.headers)
            await StreamRelay(self._parts, request, job).run(headers, send)
        else:
            await self.deliver(request, job, await self.whole(request, job), send)

    async def open(self, request: RequestState, job: Job) -> None:
        """Try targets until one answers; then `request.opened` is the begun answer."""
        model, key, team, row = job.model, request.key, request.team, request.row
        assert model is not None
        assert key is not None
        if row.gateway_ms is None:
            row.gateway_ms = (time.monotonic() - request.arrived) * 1000
        request.attempts = []
        targets = job.targets or model.targets
        if is_large(request.fields):
            await self._translate_large(request, job, targets)
        try:
            request.opened = opened = await self._parts.upstreams.open(
                targets,
                lambda target: self._prepare(request, job, target),
                tenant=request.tenant,
                weight=team.weight if team is not None else 1.0,
                priority=key.priority,
                strategy=model.strategy,
                deadline=request.deadline,
                hedge_after_s=model.hedge_after_s,
                attempts=request.attempts,
                residency=request.residency,
            )
        finally:
            row.attempts = len(request.attempts)
            if request.attempts and request.opened is None:
                row.upstream = request.attempts[-1].upstream
        request.first_at = time.monotonic()
        row.upstream, row.upstream_model = opened.target.upstream, opened.target.model
        row.credential = opened.credential
        row.queue_ms = opened.queue_s * 1000
        row.ttft_ms = (request.first_at - opened.asked_at) * 1000

    # ---- out ----

    def _prepare(self, request: RequestState, job: Job, target: Target) -> Outgoing:
        """The request for this target, written ahead to the ledger."""
        endpoint, row = request.place.endpoint, request.row
        if request.key is not ANONYMOUS and self._parts.keys.table.key(row.key_id) is None:
            # Revoked or expired while it waited for a limit, a slot or a retry.
            raise key_revoked()
        if request.gone:
            raise ClientGone  # failed while read for its usage: nothing is sent again
        row.upstream, row.upstream_model = target.upstream, target.model
        headers: Headers = [(b"x-request-id", row.request_id.encode()), *passed_on(request)]
        if request.trace is not None:
            headers.append((b"traceparent", request.trace.traceparent(target.upstream)))
        if job.form is not None:
            content_type, form = job.form.written({"model": target.model.encode()})
            headers.append((b"content-type", content_type))
            number = self._attempts.begin(request, target)
            return Outgoing("POST", PATHS[endpoint.kind], headers, form, False, number)
        headers.append((b"content-type", b"application/json"))
        path, fields = self._fields_for(request, job, target)
        # Each value is the client's bytes; only duplicate fields are merged.
        body = write_fields(fields)
        number = self._attempts.begin(request, target)
        return Outgoing("POST", path, headers, body, row.stream, number, fields)

    def _fields_for(self, request: RequestState, job: Job, target: Target) -> tuple[str, Fields]:
        endpoint, row, fields = request.place.endpoint, request.row, request.fields
        kind, path = endpoint.kind, PATHS[endpoint.kind]
        hide: Hide = ""
        family = self._family(endpoint, target)
        is_translated = family != endpoint.family
        has_salt = takes_salt(self._upstreams[target.upstream], kind)
        if is_translated:
            other, fields = self._translated(request, job, (family, has_salt))
            path = other or path
        fields = {**fields, "model": raw(target.model)}
        if has_salt:
            assert job.model is not None
            fields = salted(fields, request.fields, request.tenant, job.model.config)
        if row.stream and family != "anthropic":
            fields = dict(fields)
            hide = ask_for_usage("chat" if is_translated else kind, fields)
        job.note(target, Sent(family, is_translated, hide))
        return path, fields

    async def _translate_large(self, request: RequestState, job: Job, targets: Sequence[Target]) -> None:
        """Translate before the first attempt: the code that writes the request cannot wait."""
        endpoint = request.place.endpoint
        for target in targets:
            family = self._family(endpoint, target)
            form = family, takes_salt(self._upstreams[target.upstream], endpoint.kind)
            if family == endpoint.family or form in job.translated:
                continue
            own = plain(_unsalted(request.fields, form))
            try:
                path, fields = await self._parts.offload.run(
                    request.tenant, "translate", endpoint.kind, own, family
                )
                job.translated[form] = path, raw_fields(fields)
            except GatewayError as error:  # reported if no other target is left
                job.translated[form] = error

    def _translated(self, request: RequestState, job: Job, form: tuple[Family, bool]) -> tuple[str, Fields]:
        done = job.translated.get(form)
        if done is None:
            kind, dialects = request.place.endpoint.kind, self._parts.settings.dialects
            return translate_request(kind, _unsalted(request.fields, form), form[0], dialects)
        if isinstance(done, GatewayError):
            raise done
        return done

    def _family(self, endpoint: Endpoint, target: Target) -> Family:
        """A ridgeline server speaks both dialects; other upstreams only their own."""
        upstream = self._upstreams[target.upstream]
        if upstream.is_ours:
            return endpoint.family
        if upstream.kind == "anthropic":
            return "anthropic"
        return "chat" if endpoint.kind == "responses" and not upstream.has_responses else "openai"

    # ---- back ----

    async def whole(self, request: RequestState, job: Job) -> Whole:
        opened, endpoint = request.answering, request.place.endpoint
        answer = opened.answer
        try:
            body = await opened.read(self._config.max_answer_bytes)
        except UpstreamBroken as error:
            raise UpstreamFailed("the upstream's answer ended early", code="upstream_broken") from error
        opened.close(answer.status < 500)
        sent = job.sent_to(opened.target, endpoint.family)
        if answer.status < 400:
            request.answer = body  # for an estimate, if the request ends before its usage is read
            request.usage = await self._usage(request, sent, body)
            if request.usage is not None:
                request.answer = None
            request.late_usage = False
            body = await self._in_clients_dialect(request, sent, body)
        else:
            request.late_usage = False
            if sent.is_translated:
                body = translated_error(endpoint.kind, answer.status, body, request.id)
        return Whole(answer.status, answer.headers, body)

    async def _usage(self, request: RequestState, sent: Sent, body: bytes) -> Usage | None:
        kind, family = request.place.endpoint.kind, sent.family
        if len(body) <= LARGE:
            return usage_of(kind, family, body)
        usage: Usage | None = await self._parts.offload.run(request.tenant, "usage", kind, family, body)
        return usage

    async def _in_clients_dialect(self, request: RequestState, sent: Sent, body: bytes) -> bytes:
        kind, family = request.place.endpoint.kind, sent.family
        if not sent.is_translated:
            return body
        if len(body) <= LARGE:
            return translate_answer(kind, body, family, request.fields)
        run, own = self._parts.offload.run, plain(request.fields)
        translated: bytes = await run(request.tenant, "translate_answer", kind, body, family, own)
        return translated

    async def _restored(self, request: RequestState, job: Job, body: bytes) -> bytes:
        kind, restorer = request.place.endpoint.kind, job.restorer
        if len(body) <= LARGE:
            return bytes(restorer.answer(kind, body))
        body, found = await self._parts.offload.run(
            request.tenant, "restore", restorer.policy, kind, body, restorer.vault_pieces()
        )
        restorer.findings = found
        return body

    async def deliver(self, request: RequestState, job: Job, whole: Whole, send: Send) -> None:
        endpoint, body = request.place.endpoint, whole.body
        if whole.status < 400:
            request.end_as("ok", whole.status)
            if endpoint.kind == "responses":
                await remember_response(self._parts, request, body)
            if job.cache is not None:
                await job.cache.keep(whole.status, whole.headers, body, request.usage)
        else:
            request.end_as("refused", whole.status, "upstream_refused")
        if job.restorer is not None:  # an error may quote the request
            body = await self._restored(request, job, body)
        headers = self.headers(request, job, whole.headers)
        headers.append((b"content-length", str(len(body)).encode()))
        request.started = True
        await send({"type": "http.response.start", "status": whole.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def answer_from_cache(self, request: RequestState, job: Job, send: Send) -> bool:
        """Whether a cache had the answer; if so, it was sent."""
        hit = await job.cache.find() if job.cache is not None else None
        if hit is None:
            return False
        row, kind, stored = request.row, request.place.endpoint.kind, hit.answer
        body = stored.body
        if job.restorer is not None:
            if row.stream:
                stage = job.restorer.stream(kind)
                body = stage.feed(body) + stage.finish()
            else:
                body = job.restorer.answer(kind, body)
        row.cache = "exact" if hit.similarity is None else "semantic"
        row.similarity = hit.similarity
        row.gateway_ms = (time.monotonic() - request.arrived) * 1000
        request.end_as("cached", stored.status)
        headers = [(b"x-request-id", request.id.encode()), *request.limit_headers, *hit.headers]
        headers.append((b"content-length", str(len(body)).encode()))
        request.started = True
        await send({"type": "http.response.start", "status": stored.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return True

    def headers(self, request: RequestState, job: Job, upstream: Headers) -> Headers:
        name = request.id.encode()
        headers = [(b"x-request-id", name), *request.limit_headers]
        if request.place.endpoint.family == "anthropic":
            headers.append((b"request-id", name))
        if job.decision is not None and job.model is not None:
            headers.append((b"x-ridgeline-model", job.model.name.encode("latin-1", "replace")))
        if job.cache is not None:
            headers.append((b"x-ridgeline-cache", b"miss"))
        headers += [one for one in upstream if one[0] in PASSED_BACK]
        return headers


def _unsalted(fields: Fields, form: tuple[Family, bool]) -> Fields:
    """For an upstream with salts, the salt is added after the translation."""
    return {name: value for name, value in fields.items() if name != FIELD} if form[1] else fields
