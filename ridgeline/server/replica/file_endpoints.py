"""GET /replica/files: the manifest of a model's files for its peers; GET /replica/files/{sha256}: a range.

Only with --share-weights, and with the server's API keys as everywhere. Read-only.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.models.sources.manifest import FETCH_HEADER, MANIFEST_PATH, Manifest
from ridgeline.models.sources.model_files import plain_name
from ridgeline.server.batches.conversion import converted
from ridgeline.server.errors import ApiError
from ridgeline.server.http.body_fields import About, Body
from ridgeline.server.http.endpoint import JSON, Endpoint, Generating
from ridgeline.server.http.field_types import Name
from ridgeline.server.http.read_body import while_connected
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.replica.shared_files import CHUNK_BYTES, SharedFile, SharedFiles, read_chunk
from ridgeline.server.served_models import Model, ServedModels

BUSY_RETRY_S = 1
BINARY = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")


class FilesQuery(Body, kw_only=True, frozen=True):
    model: Annotated[
        Name | None, About("MODEL of `ridgeline serve`, or a served name; default: the first")
    ] = None


async def show_manifest(request: Request) -> Response:
    served_models = ServedModels.of(request)
    _check_shared(served_models)
    given = {name: value for name, value in request.query_params.items() if name == "model"}
    model = _named(served_models, converted(given, FilesQuery).model)
    if model.files is None:
        raise _not_shared()
    RequestContext.of(request).booked = True  # no client's request
    manifest = await served_models.part(SharedFiles).manifest(model)
    return Response(msgspec.json.encode(manifest), media_type=JSON)


async def send_file(request: Request) -> ASGIApp:
    served_models = ServedModels.of(request)
    _check_shared(served_models)
    shared = served_models.part(SharedFiles)
    file = shared.find(request.path_params["sha256"])
    if file is None:
        raise ApiError(404, "no shared file has this sha256; GET /replica/files lists them", code="not_found")
    start, end = _bounds(request.headers.get("range"), file.size)
    RequestContext.of(request).booked = True
    peer = request.headers.get(FETCH_HEADER) or "other"
    if not shared.places.enter(peer[:64]):
        raise ApiError(
            503,
            "this replica gives its files to other peers at the moment",
            code="too_many_requests",
            headers={"retry-after": str(BUSY_RETRY_S)},
        )
    return FileRange(shared, file, start, end, peer[:64], is_part="range" in request.headers)


class FileRange:
    """One range of a file as a response."""

    def __init__(
        self, shared: SharedFiles, file: SharedFile, start: int, end: int, peer: str, *, is_part: bool
    ) -> None:
        self._shared, self._file, self._peer = shared, file, peer
        self._start, self._end, self._is_part = start, end, is_part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = [
                (b"content-type", BINARY.encode()),
                (b"content-length", b"%d" % (self._end - self._start)),
                (b"accept-ranges", b"bytes"),
            ]
            if self._is_part:
                given = b"bytes %d-%d/%d" % (self._start, self._end - 1, self._file.size)
                headers.append((b"content-range", given))
            status = 206 if self._is_part else 200
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await while_connected(receive, self._write(send))
        finally:
            self._shared.places.leave(self._peer)

    async def _write(self, send: Send) -> None:
        at = self._start
        while at < self._end:
            size = min(CHUNK_BYTES, self._end - at)
            await self._shared.pace.take(size)
            # A file that changed raises here: the answer stays incomplete, and the peer notices.
            body = await read_chunk(self._file, at, size)
            at += size
            await send({"type": "http.response.body", "body": body, "more_body": at < self._end})
        if self._start == self._end:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _bounds(asked: str | None, size: int) -> tuple[int, int]:
    """Start and end of a range header with one range; the whole file without one."""
    if asked is None:
        return 0, size
    match = _RANGE.fullmatch(asked.strip())
    if match is not None:
        start, end = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
        if start < end:
            return start, end
    raise ApiError(
        416,
        f"the range {asked[:80]!r} is not in this file of {size} bytes; send one range, as bytes=0-1023",
        headers={"content-range": f"bytes */{size}"},
    )


def _named(served_models: ServedModels, asked: str | None) -> Model:
    """Peers ask by the MODEL that they start with: each server has its own names for it."""
    for model in served_models.models:
        if asked and model.files is not None and plain_name(model.files.source) == plain_name(asked):
            return model
    return served_models.served(asked).model


def _check_shared(served_models: ServedModels) -> None:
    if not served_models.config.share_weights:
        raise _not_shared()


def _not_shared() -> ApiError:
    return ApiError(404, "this server does not share its files; --share-weights does", code="not_found")


ENDPOINTS = [
    Endpoint(
        "GET",
        MANIFEST_PATH,
        show_manifest,
        "The model's files with their sha256, for peers of a fleet",
        query=FilesQuery,
        response=Manifest,
    ),
    Endpoint(
        "GET",
        MANIFEST_PATH + "/{sha256}",
        Generating(send_file),
        "A file of the model by its sha256, whole or a range",
        media_type=BINARY,
        errors=(416,),
    ),
]
