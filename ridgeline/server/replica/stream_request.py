"""Reads a router's wishes for a stream: markers in it, or its continuation from a state in the body.

Called by `read_body` for every request. Without the two headers nothing changes.
"""

from __future__ import annotations

import secrets

import msgspec
from starlette.requests import Request

from ridgeline.replica.resume import (
    RESUMABLE_HEADER,
    RESUME_FIELD,
    RESUME_HEADER,
    ResumeState,
    split_state,
)
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.http.request_context import RequestContext, is_sane_id
from ridgeline.server.replica.feed import ReplicaFeeds
from ridgeline.server.served_models import ServedModels

# Paths whose prompts have names in the feed, and whose streams can be continued.
RESUMABLE_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/api/chat",
        "/api/generate",
    }
)


def take_state(request: Request, body: bytes) -> bytes:
    """Returns the client's body, and notes the router's wishes in the request's context."""
    headers, path = request.headers, request.url.path
    if path in RESUMABLE_PATHS and ServedModels.of(request).part(ReplicaFeeds).any_wanted:
        RequestContext.of(request).body = body
    wants_markers = headers.get(RESUMABLE_HEADER) == "1"
    if wants_markers and path in RESUMABLE_PATHS:
        context = RequestContext.of(request)
        context.resumable, context.salt = True, secrets.token_hex(24)
    if headers.get(RESUME_HEADER) != "1":
        return body
    if path not in RESUMABLE_PATHS:
        message = f"streams of {path} cannot be continued; only those of {', '.join(sorted(RESUMABLE_PATHS))}"
        raise ApiError(400, message, param=RESUME_FIELD, code="not_resumable")
    try:
        body, state = split_state(body)
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadRequest(RESUME_FIELD, f"cannot be read: {error}") from None
    _continue(RequestContext.of(request), state)
    return body


def _continue(context: RequestContext, state: ResumeState) -> None:
    """The events of the continuation have the ids and times of the first ones."""
    head = state.head
    if head is None:
        raise BadRequest(RESUME_FIELD, "has no head: send the request again without a state")
    if not is_sane_id(head.id):
        raise BadRequest(f"{RESUME_FIELD}.head.id", "is not a request id")
    if state.ended:
        raise BadRequest(RESUME_FIELD, "the stream is complete")
    context.resume = state
    context.request_id = head.id
    context.created = head.created
    context.salt = head.salt


def refuse_continuation(context: RequestContext, reason: str) -> None:
    """Called for a request whose stream cannot be continued: it gets no markers."""
    context.resumable = False
    if context.resume is not None:
        raise ApiError(400, f"{RESUME_FIELD}: {reason}", param=RESUME_FIELD, code="not_resumable")
