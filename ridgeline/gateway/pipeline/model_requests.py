"""Requests that name a model: checked, limited, guarded, routed, found in a cache or sent upstream.

Called by the app for every such endpoint: the one place that shows a request's steps in order.
"""

from __future__ import annotations

import asyncio
import math

import msgspec

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import check_names, field, read_fields
from ridgeline.gateway.caching.answers import CacheUse
from ridgeline.gateway.catalog import MAX_NAME, PublicModel, allows
from ridgeline.gateway.dialects.counts import AUDIO
from ridgeline.gateway.errors import BadRequest, Forbidden, out_of_time
from ridgeline.gateway.limits.limiter_types import NO_LIMITS, has_budget
from ridgeline.gateway.limits.subjects import subjects_of
from ridgeline.gateway.objects.audio_length import audio_length_s
from ridgeline.gateway.objects.forms import Form
from ridgeline.gateway.objects.references import check_references
from ridgeline.gateway.objects.stored_responses import continue_response
from ridgeline.gateway.objects.uploads import read_form
from ridgeline.gateway.offload.offload import LARGE, is_large, plain, raw_fields
from ridgeline.gateway.pipeline.booking import Booking
from ridgeline.gateway.pipeline.cascading import Cascading
from ridgeline.gateway.pipeline.forwarding import Forwarding
from ridgeline.gateway.pipeline.job import Job
from ridgeline.gateway.pipeline.most_used import GENERATING, MostUsed, most_used
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import Receive, RequestState, Send
from ridgeline.gateway.pipeline.usage_estimates import limit_tokens
from ridgeline.gateway.routing.routing_request import RoutingRequest
from ridgeline.gateway.settings import targets_of

A_MILLION = Usage(tokens_in=10**6, tokens_out=10**6, audio_ms=10**6, characters=10**6)


class ModelRequests:
    def __init__(self, parts: Parts, booking: Booking) -> None:
        self._parts = parts
        self._config = parts.settings.gateway
        self._estimates = booking.estimates
        self._forwarding = Forwarding(parts, booking.attempts)
        self._cascading = Cascading(parts, self._forwarding, booking)
        self._all_cost = all(
            parts.prices.cost(_some_name(model.name), target.upstream, target.model, A_MILLION)[0] > 0
            for model in parts.settings.models
            for target in targets_of(model)
        )

    async def answer(self, request: RequestState, receive: Receive, send: Send) -> None:
        await self._admit(request)
        job = await self._read(request, receive)
        request.wait_until(request.arrived + self._config.request_timeout_s, out_of_time)
        catalog, asked = self._parts.catalog, request.row.model_asked
        job.model = None if asked in catalog.routes else catalog.find(asked)
        if is_large(request.fields):
            request.prompt_counts = await self._parts.offload.run(
                request.tenant, "prompt_counts", request.place.endpoint.kind, plain(request.fields)
            )
        await self._reserve(request, job.model)
        await self._guard(request, job)
        if job.model is None:
            await self._route(request, job)
        assert job.model is not None
        request.row.model = job.model.name
        if request.place.endpoint.kind == "responses":
            await continue_response(self._parts, request, job)
        await check_references(self._parts, request, job)
        if is_large(
            request.fields
        ):  # a hash over megabytes, which releases the interpreter's lock in a thread
            job.cache = await asyncio.to_thread(CacheUse.of, self._parts, request, job.model)
        else:
            job.cache = CacheUse.of(self._parts, request, job.model)
        if job.cache is not None and await self._forwarding.answer_from_cache(request, job, send):
            return
        if job.decision is not None and job.decision.cascade is not None and not request.row.stream:
            await self._cascading.forward(request, job, send)
        else:
            await self._forwarding.forward(request, job, send)

    # ---- reading ----

    async def _read(self, request: RequestState, receive: Receive) -> Job:
        """Parse the body, and check whether this key may use this model."""
        config, endpoint, row = self._config, request.place.endpoint, request.row
        content_type = request.headers.get(b"content-type", b"")
        form: Form | None = None
        if request.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            message = "Content-Encoding: compressed bodies are not supported; send the body uncompressed"
            raise BadRequest(message, status=415, code="unsupported_media_type")
        if endpoint.multipart:
            form = await read_form(self._parts, request, receive)
            check_names(form.names)
            asked = form.text("model")
            if sound := form.reader("file"):
                seconds, request.audio_told = await asyncio.to_thread(audio_length_s, *sound)
                request.audio_ms = math.ceil(seconds * 1000)
        else:
            if content_type.partition(b";")[0].strip().lower() != b"application/json":
                # A web page may send text/plain to any site without a preflight request, but not JSON.
                message = "send the header Content-Type: application/json"
                raise BadRequest(message, status=415, code="unsupported_media_type")
            request.body = await request.read_body(
                receive, config.max_body_bytes, config.upload_timeout_s, self._parts.body_bytes
            )
            if len(request.body) <= LARGE:
                request.fields = read_fields(request.body)
            else:
                found = await self._parts.offload.run(request.tenant, "fields", request.body)
                request.fields = raw_fields(found)
            asked = field(request.fields, "model", str, "")
            if endpoint.kind in GENERATING:
                row.stream = field(request.fields, "stream", bool, False)
                check_names(field(request.fields, "stream_options", dict, {}), "stream_options.")
        if not asked:
            raise BadRequest(
                "model: this field is required; GET /v1/models lists the names",
                code="missing_field",
                param="model",
            )
        if len(asked) > MAX_NAME or not asked.isprintable():
            raise BadRequest(
                f"model: a name has at most {MAX_NAME} printable characters",
                param="model",
            )
        row.model_asked = asked
        assert request.key is not None
        if not allows(request.key.models, asked):
            message = f"this key may not use the model {asked!r}"
            raise Forbidden(message, code="model_not_allowed", param="model")
        return Job(form)

    # ---- limits ----

    async def _admit(self, request: RequestState) -> None:
        """Before the body is read: a key without quota cannot make the gateway hold a body."""
        key = request.key
        assert key is not None
        subjects = subjects_of(key, request.team)
        if any(subject.limits != NO_LIMITS for subject in subjects):
            # A key without money may still use a free model.
            request.reservation = await self._parts.limiter.admit(
                subjects, key.when_limits_unknown, costs=self._all_cost
            )

    async def _reserve(self, request: RequestState, model: PublicModel | None) -> None:
        """Reserve tokens and money of the key, its team and the requested model."""
        parts, key = self._parts, request.key
        assert key is not None
        subjects = subjects_of(key, request.team, model)
        if all(subject.limits == NO_LIMITS for subject in subjects):
            return
        kind = request.place.endpoint.kind
        size, estimate = len(request.body), self._config.output_estimate
        most = most_used(kind, request.fields, size, estimate, request.prompt_counts)
        if kind in AUDIO:
            most = MostUsed(limit_tokens(self._estimates.audio(request)), 0)
        cost = 0
        if any(has_budget(subject) for subject in subjects):
            dearest = [model] if model is not None else self._route_models(request.row.model_asked)
            guess = Usage(tokens_in=most.tokens_in, tokens_out=most.tokens_out)
            cost = max(
                parts.prices.cost(
                    one.name,
                    target.upstream,
                    target.model,
                    self._estimates.input(request, one.name, target) if kind in AUDIO else guess,
                )[0]
                for one in dearest
                for target in one.targets
            )
        request.reservation = await parts.limiter.reserve(
            subjects, most.tokens_in + most.tokens_out, cost, key.when_limits_unknown, request.reservation
        )
        request.limit_headers = [
            (name.encode(), value.encode()) for name, value in request.reservation.headers.items()
        ]

    def _route_models(self, route: str) -> list[PublicModel]:
        names = next(one.models for one in self._parts.settings.routes if one.name == route)
        return [self._parts.catalog.find(name) for name in names]

    # ---- guard and routing ----

    async def _guard(self, request: RequestState, job: Job) -> None:
        """Fails closed: after any exception here, nothing has been sent."""
        assert request.key is not None
        guard = self._parts.guards.policy(request.key.guard)
        if guard is None:
            return
        kind = request.place.endpoint.kind
        if job.form is not None:
            guard.refuse_unreadable(kind)
            return
        guarded = await guard.request(kind, request.fields, request.tenant)
        if guarded.findings:
            request.row.guard = msgspec.json.encode(
                {"policy": guard.config.name, "action": guarded.action, "found": guarded.findings}
            ).decode()
        if guarded.fields is not request.fields:
            request.fields = guarded.fields
        self._parts.metrics.guard_found(guarded.findings, guarded.action)
        job.restorer = guarded.restorer

    async def _route(self, request: RequestState, job: Job) -> None:
        parts, key = self._parts, request.key
        assert parts.router is not None
        assert key is not None
        job.routing_request = RoutingRequest(
            request.row.model_asked,
            request.place.endpoint.kind,
            request.fields,
            request.tenant,
            key.id,
            request.header(b"x-ridgeline-conversation")[:256],
        )
        # A key that may use a route may use every model of it.
        job.decision = decision = await parts.router.decide(job.routing_request)
        request.why = decision.why
        job.model = parts.catalog.find(decision.model)


def _some_name(pattern: str) -> str:
    """A name that matches only this [[models]] name."""
    return pattern[:-1] + "\0" if pattern.endswith("*") else pattern
