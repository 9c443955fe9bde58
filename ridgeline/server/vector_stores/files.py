"""The files of a vector store and batches of them: add, list, show, change, remove, read, cancel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.retrieval.ingest.records import FileBatch, StoreFile, VectorStoreRow, new_id
from ridgeline.retrieval.types import Attribute, check_attributes
from ridgeline.server.batches.endpoints import Batches
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.vector_stores.bodies import (
    FileBatchBody,
    FileContent,
    ShownProgress,
    StoreFileBody,
    StoreFileDeleted,
    StoreFileList,
    TextContent,
)
from ridgeline.server.vector_stores.protocol import (
    AttributesRequest,
    FileBatchRequest,
    FilesQuery,
    StoreFileRequest,
    strategy_of,
)
from ridgeline.server.vector_stores.service import VectorStores, namespace_of
from ridgeline.server.vector_stores.stores import (
    body_of,
    json_answer,
    listed,
    named_errors,
    page_of,
    query_of,
)


async def add_file(request: Request) -> Response:
    stores = await VectorStores.of(request)
    store = await stores.usable(request.path_params["vector_store_id"])
    body = await body_of(request, StoreFileRequest)
    (file,) = await _journalled(request, store, [body])
    return await json_answer(StoreFileBody.of(file))


async def list_files(request: Request) -> Response:
    return await _listed(request, None)


async def show_file(request: Request) -> Response:
    return await json_answer(_shown(*(await _file(request))))


async def change_file(request: Request) -> Response:
    stores, file = await _file(request)
    body = await body_of(request, AttributesRequest)
    attributes = _attributes(body.attributes, "attributes")
    with named_errors():
        await stores.runner.change_attributes(file, attributes)
    return await json_answer(_shown(*(await _file(request))))


async def remove_file(request: Request) -> Response:
    """Out of the vector store; the uploaded file stays."""
    stores, file = await _file(request)
    await stores.forget_file(file)
    return await json_answer(StoreFileDeleted(file.file_id))


async def file_content(request: Request) -> Response:
    stores, file = await _file(request)
    if file.status != "completed":
        raise ApiError(409, f"file_id: this file is {file.status}; it has no text here", param="file_id")
    with named_errors():
        document = await stores.store.document(namespace_of(file.store_id), file.file_id)
    assert document is not None
    return await json_answer(FileContent([TextContent(document.text)]))


# ── batches of files ─────────────────────────────────────────────────────────────────────────────────────


async def create_batch(request: Request) -> Response:
    stores = await VectorStores.of(request)
    store = await stores.usable(request.path_params["vector_store_id"])
    body = await body_of(request, FileBatchRequest)
    if (body.file_ids is None) == (body.files is None):
        raise BadRequest("file_ids", "give either file_ids or files", "missing_field")
    batch = FileBatch(id=new_id("vsfb"), store_id=store.id, created_at=stores.catalog.now())
    if body.files is not None:
        if body.attributes is not None or body.chunking_strategy is not None:
            field = "attributes" if body.attributes is not None else "chunking_strategy"
            raise BadRequest(field, "with files, each file has its own")
        await _journalled(request, store, body.files, batch, _place_in_files)
    else:
        asked = [
            StoreFileRequest(
                file_id=file_id, attributes=body.attributes, chunking_strategy=body.chunking_strategy
            )
            for file_id in body.file_ids or ()
        ]
        await _journalled(request, store, asked, batch, lambda i: (f"file_ids[{i}]", ""))
    return await _shown_batch(stores, batch)


async def show_batch(request: Request) -> Response:
    stores, batch = await _batch(request)
    return await _shown_batch(stores, batch)


async def cancel_batch(request: Request) -> Response:
    stores, batch = await _batch(request)
    counts, _ = await stores.catalog.counts(batch.store_id, batch.id)
    if not counts.in_progress:
        raise ApiError(409, "batch_id: no file of this batch is in progress", param="batch_id")
    await stores.catalog.cancel_batch(batch.store_id, batch.id)
    return await show_batch(request)


async def list_batch_files(request: Request) -> Response:
    _, batch = await _batch(request)
    return await _listed(request, batch.id)


# ── inside ───────────────────────────────────────────────────────────────────────────────────────────────


async def _journalled(
    request: Request,
    store: VectorStoreRow,
    asked: Sequence[StoreFileRequest],
    batch: FileBatch | None = None,
    places: Callable[[int], tuple[str, str]] = lambda i: ("file_id", ""),
) -> list[StoreFile]:
    """The files in the journal and in work. places: the path of a file's id, and the prefix of its fields."""
    stores, uploads = await VectorStores.of(request), Batches.of(request).store
    now, files, seen = stores.catalog.now(), [], set[str]()
    for i, one in enumerate(asked):
        id_place, prefix = places(i)
        if one.file_id in seen:
            raise BadRequest(id_place, f"{one.file_id!r} is there twice")
        seen.add(one.file_id)
        uploaded = await uploads.file(one.file_id, id_place)
        files.append(
            StoreFile(
                store_id=store.id,
                file_id=uploaded.id,
                filename=uploaded.filename,
                created_at=now,
                attributes=_attributes(one.attributes, f"{prefix}attributes"),
                strategy=strategy_of(one.chunking_strategy, f"{prefix}chunking_strategy"),
                batch_id=None if batch is None else batch.id,
            )
        )
    with named_errors():
        await stores.check_embedder(store)
    added = await stores.catalog.add_files(files, batch)
    stores.take_up(added)
    return added


def _place_in_files(number: int) -> tuple[str, str]:
    return f"files[{number}].file_id", f"files[{number}]."


def _attributes(given: dict[str, str | float | bool] | None, field: str) -> dict[str, Attribute]:
    with named_errors():
        return check_attributes(given or {}, field)


async def _file(request: Request) -> tuple[VectorStores, StoreFile]:
    stores = await VectorStores.of(request)
    store = await stores.found(request.path_params["vector_store_id"])
    file_id = request.path_params["file_id"]
    file = await stores.catalog.file(store.id, file_id)
    if file is None:
        message = f"file_id: there is no file {file_id[:64]!r} in {store.id}"
        raise ApiError(404, message, param="file_id", code="not_found")
    return stores, file


def _shown(stores: VectorStores, file: StoreFile) -> StoreFileBody:
    pieces = stores.runner.pieces_done(file)
    return StoreFileBody.of(file, None if pieces is None else ShownProgress(pieces.done, pieces.total))


async def _batch(request: Request) -> tuple[VectorStores, FileBatch]:
    stores = await VectorStores.of(request)
    store = await stores.found(request.path_params["vector_store_id"])
    batch_id = request.path_params["batch_id"]
    batch = await stores.catalog.batch(store.id, batch_id)
    if batch is None:
        message = f"batch_id: there is no batch {batch_id[:64]!r} of files in {store.id}"
        raise ApiError(404, message, param="batch_id", code="not_found")
    return stores, batch


async def _shown_batch(stores: VectorStores, batch: FileBatch) -> Response:
    counts, _ = await stores.catalog.counts(batch.store_id, batch.id)
    return await json_answer(FileBatchBody.of(batch, counts))


async def _listed(request: Request, batch_id: str | None) -> Response:
    stores, query = await VectorStores.of(request), query_of(request, FilesQuery)
    store = await stores.found(request.path_params["vector_store_id"])
    with named_errors():
        found = await stores.catalog.files(store.id, page_of(query), query.filter, batch_id)
    bodies = [_shown(stores, file) for file in found]
    return await json_answer(StoreFileList(*listed(bodies, query.limit)))
