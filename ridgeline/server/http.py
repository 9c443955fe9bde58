"""uvicorn, set up as `server.main` wants it: no logs, no lifespan, no signals of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

LAST_WORDS_S = 3  # for streams that are told of the end to take that in


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_WORDS_S,
                server_header=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the front's: uvicorn would close the listener at once, without draining."""
        yield
