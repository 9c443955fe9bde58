"""/v1/files and /v1/batches: the handlers over the store and the runner."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ridgeline.server.batches.bodies import (
    DAY_S,
    OVER,
    Batch,
    BatchList,
    BatchQuery,
    BatchRequest,
    File,
    FileDeleted,
    FileList,
    FileQuery,
    UploadForm,
)
from ridgeline.server.batches.conversion import converted
from ridgeline.server.batches.runner import BatchRunner
from ridgeline.server.batches.store import BatchStore, new_id
from ridgeline.server.batches.upload import KEEP_FILES_S, receive_file
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.http.body_fields import Body
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.http.read_body import read_body
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.served_models import ServedModels

Q = TypeVar("Q", bound=Body)
MAX_OPEN_BATCHES = 1000


class Batches:
    """Files and batches of one server. `runner` starts when there is an engine."""

    def __init__(self, served_models: ServedModels) -> None:
        if served_models.state is None:
            raise ApiError(404, "this server stores no files: it has no state directory", code="not_found")
        self.store = BatchStore(served_models.state)
        self.runner = BatchRunner(self.store, served_models.config.max_body_bytes)

    @classmethod
    def of(cls, request: Request) -> Batches:
        return ServedModels.of(request).part(cls)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────


async def upload_file(request: Request) -> Response:
    return _json(await receive_file(request, Batches.of(request).store, ServedModels.of(request).config))


async def list_files(request: Request) -> Response:
    query = _query(request, FileQuery)
    found = await Batches.of(request).store.files(query)
    return _json(FileList(*_listed(found, query.limit)))


async def show_file(request: Request) -> Response:
    return _json(await Batches.of(request).store.file(request.path_params["file_id"]))


async def delete_file(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    await Batches.of(request).store.delete_file(file_id)
    return _json(FileDeleted(file_id))


async def file_content(request: Request) -> Response:
    store = Batches.of(request).store
    file = await store.file(request.path_params["file_id"])
    return FileResponse(store.path(file.id), media_type="application/octet-stream", filename=file.filename)


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────


async def create_batch(request: Request) -> Response:
    batches = Batches.of(request)
    body = decode(await read_body(request, ServedModels.of(request).config), BatchRequest)
    file = await batches.store.file(body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise BadRequest("input_file_id", f"the purpose of this file is {file.purpose!r}, not 'batch'")
    now = int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        status="validating",
        created_at=now,
        expires_at=now + DAY_S,
        metadata=body.metadata,
    )
    keep_s = body.output_expires_after.seconds if body.output_expires_after else KEEP_FILES_S
    await batches.store.add_batch(batch, keep_s, MAX_OPEN_BATCHES)
    batches.runner.take_up(batch.id)
    return _json(batch)


async def list_batches(request: Request) -> Response:
    query = _query(request, BatchQuery)
    found = await Batches.of(request).store.batches(query)
    return _json(BatchList(*_listed(found, query.limit)))


async def show_batch(request: Request) -> Response:
    return _json(await Batches.of(request).store.batch(request.path_params["batch_id"]))


async def cancel_batch(request: Request) -> Response:
    batches = Batches.of(request)
    batch_id = request.path_params["batch_id"]
    batch = await batches.store.batch(batch_id)
    if batch.status in OVER:
        message = f"batch_id: this batch is already {batch.status}"
        raise ApiError(409, message, param="batch_id")
    return _json(await batches.runner.cancel(batch_id))


# ── queries and answers ──────────────────────────────────────────────────────────────────────────────────


def _json(body: msgspec.Struct) -> Response:
    return Response(encode(body), media_type="application/json")


def _listed(found: list[Any], limit: int) -> tuple[list[Any], str | None, str | None, bool]:
    """`found` has one item more than `limit` if the list continues."""
    data = found[:limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return data, first, last, len(found) > limit


def _query(request: Request, query: type[Q]) -> Q:
    return converted({name: value for name, value in request.query_params.items() if value}, query)


_CREATE = {
    "input_file_id": "file-0123456789abcdef0123456789abcdef",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}

ENDPOINTS = [
    Endpoint(
        "POST", "/v1/files", upload_file, "Keep a file, a batch's input", form=UploadForm, response=File
    ),
    Endpoint("GET", "/v1/files", list_files, "The files that are kept", query=FileQuery, response=FileList),
    Endpoint("GET", "/v1/files/{file_id}", show_file, "What is known of a file", response=File),
    Endpoint(
        "DELETE", "/v1/files/{file_id}", delete_file, "Forget a file", response=FileDeleted, errors=(409,)
    ),
    Endpoint(
        "GET",
        "/v1/files/{file_id}/content",
        file_content,
        "A file's content",
        media_type="application/octet-stream",
    ),
    Endpoint(
        "POST",
        "/v1/batches",
        create_batch,
        "Answer every line of a file, in the gaps of other traffic",
        request=BatchRequest,
        response=Batch,
        errors=(429,),
        examples=(_CREATE,),
    ),
    Endpoint(
        "GET", "/v1/batches", list_batches, "The batches, newest first", query=BatchQuery, response=BatchList
    ),
    Endpoint("GET", "/v1/batches/{batch_id}", show_batch, "How far a batch is", response=Batch),
    Endpoint(
        "POST",
        "/v1/batches/{batch_id}/cancel",
        cancel_batch,
        "End a batch early; what is answered is kept",
        response=Batch,
        errors=(409,),
    ),
]
