"""The console's paths on a server: Chat, Live, Requests and Lab. They read; none of them changes anything."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.console import responses
from ridgeline.console.assets import ConsoleInfo
from ridgeline.console.events import EventHub, Topic
from ridgeline.console.reports import Report, Reports
from ridgeline.server.batches.conversion import converted
from ridgeline.server.console.lint import LintReport, LintRequest, lint_prompts
from ridgeline.server.console.live import LiveFigures
from ridgeline.server.console.request_log import request_log
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.http.body_fields import About, Body
from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.served_models import ServedModels
from ridgeline.version import __version__

Text = Annotated[str, Meta(max_length=1000)]


class EventsQuery(Body, kw_only=True, frozen=True):
    topics: Annotated[Text, About("comma-separated: metrics, requests")] = "metrics,requests"


class ReportQuery(Body, kw_only=True, frozen=True):
    signature: Annotated[Text, About("as in the list's `url`")] = ""


class ReportList(msgspec.Struct, frozen=True):
    is_set: Annotated[bool, About("whether --console-reports names a directory")]
    data: list[Report]


class ServerConsole:
    """Made by `ServedModels.part`: the hub of the event stream, and the requests it shows."""

    def __init__(self, served_models: ServedModels) -> None:
        config, figures = served_models.config, LiveFigures(served_models)
        self.requests = served_models.part(request_log)
        self.reports = Reports(config.console_reports)
        topics = {
            "metrics": Topic(figures.snapshot, frame=figures.frame),
            "requests": Topic(self.requests.all, changes=self.requests.changes),
        }
        self.hub = EventHub(topics, lambda: any(model.engine.draining for model in served_models.models))
        pages = ("chat", "live", "requests", *(["lab"] if self.reports.is_set else []))
        version = "" if config.needs_key else __version__
        self.info = ConsoleInfo(kind="server", pages=pages, needs_key=config.needs_key, version=version)

    @classmethod
    def of(cls, request: Request) -> ServerConsole:
        served_models = ServedModels.of(request)
        if not served_models.config.console:
            raise ApiError(404, "the console is off; start the server without --no-console", code="not_found")
        return served_models.part(cls)


async def page(request: Request) -> Response:
    return responses.page(ServerConsole.of(request).info)


async def asset(request: Request) -> Response:
    ServerConsole.of(request)
    found = responses.asset(request, request.path_params["name"])
    if found is None:
        raise ApiError(404, "no file of the console has this name; reload the page", code="not_found")
    return found


async def events(request: Request) -> Response:
    console = ServerConsole.of(request)
    query = converted(dict(request.query_params), EventsQuery)
    topics = frozenset(query.topics.split(","))
    if unknown := sorted(topics - console.hub.topics.keys()):
        known = ", ".join(console.hub.topics)
        raise BadRequest("topics", f"{unknown[0][:40]!r} is unknown; known: {known}")
    RequestContext.of(request).booked = True  # no client's request
    return responses.event_stream(request, console.hub, topics)


async def reports(request: Request) -> Response:
    found = ServerConsole.of(request).reports
    listed = ReportList(found.is_set, await asyncio.to_thread(found.list))
    return Response(msgspec.json.encode(listed), media_type="application/json")


async def report(request: Request) -> Response:
    query = converted(dict(request.query_params), ReportQuery)
    found = ServerConsole.of(request).reports
    answer = await asyncio.to_thread(found.show, request.path_params["path"], query.signature)
    if answer is None:
        raise ApiError(404, "no such report, or its address is from before the last start", code="not_found")
    return answer


ENDPOINTS = [
    Endpoint("GET", "/console", page, "The console's page", media_type="text/html", needs_key=False),
    Endpoint(
        "GET",
        "/console/assets/{name}",
        asset,
        "A file of the console, by the name with its hash",
        media_type="text/javascript",
        needs_key=False,
    ),
    Endpoint(
        "GET",
        "/console/events",
        events,
        "Figures of each second and changes of requests, for the console",
        query=EventsQuery,
        media_type="text/event-stream",
        is_endless=True,
    ),
    Endpoint(
        "POST",
        "/console/lint",
        lint_prompts,
        "Which part of a series of prompts breaks the prefix cache",
        request=LintRequest,
        response=LintReport,
        examples=({"requests": [{"messages": [{"role": "user", "content": "hello"}]}]},),
    ),
    Endpoint(
        "GET",
        "/console/reports",
        reports,
        "Lab reports in the directory of --console-reports",
        response=ReportList,
    ),
    Endpoint(
        "GET",
        "/console/reports/{path:path}",
        report,
        "One of these reports, by the address in the list",
        query=ReportQuery,
        media_type="text/html",
        needs_key=False,
    ),
]
