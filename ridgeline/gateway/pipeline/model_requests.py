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
from ridgeline.gateway.config import targets_of
from ridgeline.gateway.dialects.counts import AUDIO
from ridgeline.gateway.errors import BadRequest, Forbidden, out_of_time
from ridgeline.gateway.limits.limiter import has_budget
from ridgeline.gateway.objects.audio_length import audio_length_s
from ridgeline.gateway.objects.forms import Form
from ridgeline.gateway.objects.references import check_references
from ridgeline.gateway.objects.stored_responses import continue_response
from ridgeline.gateway.objects.uploads import read_form
from ridgeline.gateway.offload.offload import LARGE, is_large, plain, raw_fields
from ridgeline.gateway.pipeline.cascading import Cascading
from ridgeline.gateway.pipeline.estimating import limit_tokens
from ridgeline.gateway.pipeline.exchange import GatewayExchange, Receive, Send
from ridgeline.gateway.pipeline.finishing import Booking
from ridgeline.gateway.pipeline.forwarding import Forwarding
from ridgeline.gateway.pipeline.job import Job
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.reservations import GENERATING, NO_LIMITS, MostUsed, most_used, subjects_of
from ridgeline.gateway.routing.routing_request import RoutingRequest

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

    async def answer(self, exchange: GatewayExchange, receive: Receive, send: Send) -> None:
        await self._admit(exchange)
        job = await self._read(exchange, receive)
        exchange.wait_until(exchange.arrived + self._config.request_timeout_s, out_of_time)
        catalog, asked = self._parts.catalog, exchange.row.model_asked
        job.model = None if asked in catalog.routes else catalog.find(asked)
        if is_large(exchange.fields):
            exchange.prompt_counts = await self._parts.offload.run(
                exchange.tenant, "prompt_counts", exchange.place.endpoint.kind, plain(exchange.fields)
            )
        await self._reserve(exchange, job.model)
        await self._guard(exchange, job)
        if job.model is None:
            await self._route(exchange, job)
        assert job.model is not None
        exchange.row.model = job.model.name
        if exchange.place.endpoint.kind == "responses":
            await continue_response(self._parts, exchange, job)
        await check_references(self._parts, exchange, job)
        if is_large(
            exchange.fields
        ):  # a hash over megabytes, which releases the interpreter's lock in a thread
            job.cache = await asyncio.to_thread(CacheUse.of, self._parts, exchange, job.model)
        else:
            job.cache = CacheUse.of(self._parts, exchange, job.model)
        if job.cache is not None and await self._forwarding.answer_from_cache(exchange, job, send):
            return
        if job.decision is not None and job.decision.cascade is not None and not exchange.row.stream:
            await self._cascading.forward(exchange, job, send)
        else:
            await self._forwarding.forward(exchange, job, send)

    # ---- reading ----

    async def _read(self, exchange: GatewayExchange, receive: Receive) -> Job:
        """Parse the body, and check whether this key may use this model."""
        config, endpoint, row = self._config, exchange.place.endpoint, exchange.row
        content_type = exchange.headers.get(b"content-type", b"")
        form: Form | None = None
        if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            message = "Content-Encoding: compressed bodies are not supported; send the body uncompressed"
            raise BadRequest(message, status=415, code="unsupported_media_type")
        if endpoint.multipart:
            form = await read_form(self._parts, exchange, receive)
            check_names(form.names)
            asked = form.text("model")
            if sound := form.reader("file"):
                seconds, exchange.audio_told = await asyncio.to_thread(audio_length_s, *sound)
                exchange.audio_ms = math.ceil(seconds * 1000)
        else:
            if content_type.partition(b";")[0].strip().lower() != b"application/json":
                # A web page may send text/plain to any site without a preflight request, but not JSON.
                message = "send the header Content-Type: application/json"
                raise BadRequest(message, status=415, code="unsupported_media_type")
            exchange.body = await exchange.read_body(
                receive, config.max_body_bytes, config.upload_timeout_s, self._parts.body_bytes
            )
            if len(exchange.body) <= LARGE:
                exchange.fields = read_fields(exchange.body)
            else:
                found = await self._parts.offload.run(exchange.tenant, "fields", exchange.body)
                exchange.fields = raw_fields(found)
            asked = field(exchange.fields, "model", str, "")
            if endpoint.kind in GENERATING:
                row.stream = field(exchange.fields, "stream", bool, False)
                check_names(field(exchange.fields, "stream_options", dict, {}), "stream_options.")
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
        assert exchange.key is not None
        if not allows(exchange.key.models, asked):
            message = f"this key may not use the model {asked!r}"
            raise Forbidden(message, code="model_not_allowed", param="model")
        return Job(form)

    # ---- limits ----

    async def _admit(self, exchange: GatewayExchange) -> None:
        """Before the body is read: a key without quota cannot make the gateway hold a body."""
        key = exchange.key
        assert key is not None
        subjects = subjects_of(key, exchange.team)
        if any(subject.limits != NO_LIMITS for subject in subjects):
            # A key without money may still use a free model.
            exchange.reservation = await self._parts.limiter.admit(
                subjects, key.when_limits_unknown, costs=self._all_cost
            )

    async def _reserve(self, exchange: GatewayExchange, model: PublicModel | None) -> None:
        """Reserve tokens and money of the key, its team and the requested model."""
        parts, key = self._parts, exchange.key
        assert key is not None
        subjects = subjects_of(key, exchange.team, model)
        if all(subject.limits == NO_LIMITS for subject in subjects):
            return
        kind = exchange.place.endpoint.kind
        size, estimate = len(exchange.body), self._config.output_estimate
        most = most_used(kind, exchange.fields, size, estimate, exchange.prompt_counts)
        if kind in AUDIO:
            most = MostUsed(limit_tokens(self._estimates.audio(exchange)), 0)
        cost = 0
        if any(has_budget(subject) for subject in subjects):
            dearest = [model] if model is not None else self._route_models(exchange.row.model_asked)
            guess = Usage(tokens_in=most.tokens_in, tokens_out=most.tokens_out)
            cost = max(
                parts.prices.cost(
                    one.name,
                    target.upstream,
                    target.model,
                    self._estimates.input(exchange, one.name, target) if kind in AUDIO else guess,
                )[0]
                for one in dearest
                for target in one.targets
            )
        exchange.reservation = await parts.limiter.reserve(
            subjects, most.tokens_in + most.tokens_out, cost, key.when_limits_unknown, exchange.reservation
        )
        exchange.limit_headers = [
            (name.encode(), value.encode()) for name, value in exchange.reservation.headers.items()
        ]

    def _route_models(self, route: str) -> list[PublicModel]:
        names = next(one.models for one in self._parts.settings.routes if one.name == route)
        return [self._parts.catalog.find(name) for name in names]

    # ---- guard and routing ----

    async def _guard(self, exchange: GatewayExchange, job: Job) -> None:
        """Fails closed: after any exception here, nothing has been sent."""
        assert exchange.key is not None
        guard = self._parts.guards.policy(exchange.key.guard)
        if guard is None:
            return
        kind = exchange.place.endpoint.kind
        if job.form is not None:
            guard.refuse_unreadable(kind)
            return
        guarded = await guard.request(kind, exchange.fields, exchange.tenant)
        if guarded.findings:
            exchange.row.guard = msgspec.json.encode(
                {"policy": guard.config.name, "action": guarded.action, "found": guarded.findings}
            ).decode()
        if guarded.fields is not exchange.fields:
            exchange.fields = guarded.fields
        self._parts.metrics.guard_found(guarded.findings, guarded.action)
        job.restorer = guarded.restorer

    async def _route(self, exchange: GatewayExchange, job: Job) -> None:
        parts, key = self._parts, exchange.key
        assert parts.router is not None
        assert key is not None
        job.routing_request = RoutingRequest(
            exchange.row.model_asked,
            exchange.place.endpoint.kind,
            exchange.fields,
            exchange.tenant,
            key.id,
            exchange.header(b"x-ridgeline-conversation")[:256],
        )
        # A key that may use a route may use every model of it.
        job.decision = decision = await parts.router.decide(job.routing_request)
        exchange.why = decision.why
        job.model = parts.catalog.find(decision.model)


def _some_name(pattern: str) -> str:
    """A name that matches only this [[models]] name."""
    return pattern[:-1] + "\0" if pattern.endswith("*") else pattern
