"""GET /replica/feed: one model's load and prefix events as NDJSON, for the routers of a fleet."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.replica.messages import FEED_PATH, FeedLine, encode_line
from ridgeline.server.batches.conversion import converted
from ridgeline.server.errors import NotReady
from ridgeline.server.http.body_fields import About, Body
from ridgeline.server.http.endpoint import NDJSON, Endpoint, Generating
from ridgeline.server.http.field_types import Id, Name
from ridgeline.server.http.read_body import while_connected
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.replica.feed import ReplicaFeed, ReplicaFeeds
from ridgeline.server.served_models import ServedModels


class FeedQuery(Body, kw_only=True, frozen=True):
    epoch: Annotated[Id, About("epoch of the server process that the reader last read")] = ""
    after: Annotated[int, About("number of the last event that the reader has"), Meta(ge=0, le=2**53)] = 0
    model: Annotated[Name | None, About("a served name; default: the first model")] = None


async def feed(request: Request) -> ASGIApp:
    served_models = ServedModels.of(request)
    given = {name: value for name, value in request.query_params.items() if name in FeedQuery.__annotations__}
    query = converted(given, FeedQuery)
    model = served_models.served(query.model).model
    if model.engine.client is None:
        raise NotReady(model.engine.ready()[1])
    RequestContext.of(request).booked = True  # no client's request
    return FeedStream(served_models.part(ReplicaFeeds).of(model), query)


class FeedStream:
    def __init__(self, replica: ReplicaFeed, query: FeedQuery) -> None:
        self._feed = replica
        self._query = query

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await while_connected(receive, self._write(send))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        async for lines in self._feed.lines(self._query.epoch, self._query.after):
            body = b"".join(map(encode_line, lines))
            await send({"type": "http.response.body", "body": body, "more_body": True})


ENDPOINTS = [
    Endpoint(
        "GET",
        FEED_PATH,
        Generating(feed),
        "Load and prefix events of a model, for the routers of a fleet",
        query=FeedQuery,
        lines=FeedLine,
        media_type=NDJSON,
        is_endless=True,
    ),
]
