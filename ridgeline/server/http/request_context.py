"""RequestContext: one HTTP request as handlers see it: its id, arrival and client.

Created by the gate, read by the handlers. Independent of models and endpoints.
"""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from ridgeline.replica.resume import ResumeState
from ridgeline.telemetry.traces import TraceContext
from ridgeline.web.grpc.scope import RPC

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST_PATH = 200  # of a path in a log line; served paths are shorter
_STATE_KEY = "ridgeline.request_context"
PRIORITY_KEY = "ridgeline.priority"  # scope key: set inside this process, never by a client


@dataclass(slots=True)
class RequestContext:
    request_id: str
    path: str  # as it is logged
    arrival: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    client: str = ""  # its address, or its key where keys are set
    booked: bool = False  # recorded in metrics and log
    trace: TraceContext | None = None  # parent of its span; None: not traced
    least_priority: int = -(2**31)  # lower bound of its priority; a batch's lines are served after all others
    resumable: bool = False  # the stream carries markers, from which a peer can continue it
    resume: ResumeState | None = None  # continue another server's stream from here
    salt: str = ""  # of a resumable stream: a peer makes the same ids
    body: bytes = b""  # kept while a fleet follows this server's prefix cache

    @classmethod
    def begin(cls, scope: Scope, asked_id: str | None) -> RequestContext:
        """Keep the client's id if it is short and plain; it appears in headers and log lines."""
        sane = asked_id is not None and is_sane_id(asked_id)
        path = scope.get(RPC, scope["path"])[:_LONGEST_PATH]
        context = cls(asked_id if asked_id and sane else uuid.uuid4().hex, path)
        context.client = (scope.get("client") or ("",))[0]
        context.least_priority = scope.get(PRIORITY_KEY, context.least_priority)
        scope[_STATE_KEY] = context
        return context

    @classmethod
    def of(cls, request: Request) -> RequestContext:
        context: RequestContext = request.scope[_STATE_KEY]
        return context


def is_sane_id(id: str) -> bool:
    return _SANE_ID.fullmatch(id) is not None
