"""Accounting routes of the admin API: sums by key, team, model, day; one request's row.

Mounted by the admin app, which has checked the administrator's key.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.accounting.store.reader import LedgerReader, usage_reader
from ridgeline.gateway.accounting.store.reports import (
    FILTERS,
    MAX_LINES,
    UsageLine,
    UsageQuery,
    total,
    usage_query,
)
from ridgeline.gateway.errors import BadRequest, NotFound

__all__ = ["csv_of", "report_of", "usage_reader", "usage_routes"]

_PARAMETERS = ("by", "since", "until", "zone", "format", *FILTERS)


def usage_routes(reader: LedgerReader) -> Sequence[BaseRoute]:
    async def usage(request: Request) -> Response:
        query = _query(request)
        lines, waiting = await reader.usage(query)
        if request.query_params.get("format") == "csv":
            headers = {"x-ridgeline-waiting-rows": str(waiting)}
            return Response(csv_of(query.by, lines), media_type="text/csv", headers=headers)
        return _json(report_of(query.by, lines, waiting))

    async def one(request: Request) -> Response:
        row = await reader.row(request.path_params["request_id"])
        if row is None:
            raise NotFound("no row has this request id (it may still be in a write-ahead file)")
        return _json(row)

    return [
        Route("/admin/usage", usage, methods=["GET"]),
        Route("/admin/usage/{request_id}", one, methods=["GET"]),
    ]


def report_of(by: tuple[str, ...], lines: list[UsageLine], waiting: int) -> dict[str, object]:
    """The JSON form, here and in `ridgeline gateway usage --json`."""
    return {
        "object": "usage",
        "by": by,
        "data": lines,
        "total": total(lines),
        "waiting_rows": waiting,
        "is_cut": len(lines) == MAX_LINES,
    }


def csv_of(by: tuple[str, ...], lines: Sequence[UsageLine]) -> str:
    names = [name for name in UsageLine.__struct_fields__ if name not in ("group", "cost_pusd")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*by, *names])
    for line in lines:
        writer.writerow([*(_cell(line.group[name]) for name in by), *(getattr(line, n) for n in names)])
    return text.getvalue()


def _cell(text: str) -> str:
    """Escapes a name that a spreadsheet would take for a formula."""
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _query(request: Request) -> UsageQuery:
    given = request.query_params
    for name in given:
        if name not in _PARAMETERS:
            raise BadRequest(f"{name}: unknown; known are {', '.join(_PARAMETERS)}", param=name)
    if given.get("format", "json") not in ("json", "csv"):
        raise BadRequest("format: must be json or csv", param="format")
    only = {name: given[name] for name in FILTERS if name in given}
    try:
        return usage_query(
            given.get("by", "key"), given.get("since"), given.get("until"), only, given.get("zone")
        )
    except LedgerError as error:
        raise BadRequest(str(error), param=str(error).partition(":")[0]) from None


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
