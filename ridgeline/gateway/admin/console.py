"""The console on the admin listener: Spend and Keys over the admin API with the administrator's key, and Chat
over the public API with a client's key.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ridgeline.console import responses
from ridgeline.console.assets import ASSETS, PATH, ConsoleInfo
from ridgeline.gateway.errors import NotFound


def console_routes(public_url: str = "") -> Sequence[BaseRoute]:
    """public_url: where clients reach the gateway; without it there is no Chat."""
    info = ConsoleInfo(
        kind="gateway",
        pages=("spend", "keys", *(["chat"] if public_url else [])),
        needs_key=True,
        key_name="Admin key",
        events=False,
        api_url=public_url,
    )

    async def page(request: Request) -> Response:
        return responses.page(info)

    return [
        Route(PATH, page, methods=["GET"]),
        Route(ASSETS + "{name}", _asset, methods=["GET"]),
    ]


async def _asset(request: Request) -> Response:
    found = responses.asset(request, request.path_params["name"])
    if found is None:
        raise NotFound("no file of the console has this name; reload the page")
    return found
