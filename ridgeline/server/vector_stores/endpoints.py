"""The endpoints of this package, for the table in `server.app`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.vector_stores import bodies, protocol

ONE = "/v1/vector_stores/{vector_store_id}"
FILE = ONE + "/files/{file_id}"
BATCH = ONE + "/file_batches/{batch_id}"
_ID = "file-0123456789abcdef0123456789abcdef"
_FILTER: dict[str, Any] = {"type": "eq", "key": "year", "value": 2026}
_SIZES = {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 50}


def _handler(module: str, name: str) -> Callable[[Request], Awaitable[Response]]:
    """A handler of this package, imported when it is first called: it brings numpy."""

    async def handle(request: Request) -> Response:
        handler = getattr(import_module(f"ridgeline.server.vector_stores.{module}"), name)
        answer: Response = await handler(request)
        return answer

    return handle


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/vector_stores",
        _handler("stores", "create_store"),
        "A store of files that can be searched",
        request=protocol.VectorStoreRequest,
        response=bodies.VectorStoreBody,
        examples=({"name": "manuals"}, {"expires_after": {"anchor": "last_active_at", "days": 7}}),
    ),
    Endpoint(
        "GET",
        "/v1/vector_stores",
        _handler("stores", "list_stores"),
        "The stores",
        query=protocol.PageQuery,
        response=bodies.VectorStoreList,
    ),
    Endpoint(
        "GET",
        ONE,
        _handler("stores", "show_store"),
        "A store and its files by status",
        response=bodies.VectorStoreBody,
    ),
    Endpoint(
        "POST",
        ONE,
        _handler("stores", "change_store"),
        "Change a store's name, metadata or expiry",
        request=protocol.VectorStoreUpdate,
        response=bodies.VectorStoreBody,
        errors=(409,),
        examples=({"name": "old manuals"},),
    ),
    Endpoint(
        "DELETE",
        ONE,
        _handler("stores", "delete_store"),
        "Forget a store; its files stay",
        response=bodies.VectorStoreDeleted,
    ),
    Endpoint(
        "POST",
        ONE + "/search",
        _handler("search", "search_store"),
        "The chunks that fit a query best, with their places in the files",
        request=protocol.SearchRequest,
        response=bodies.SearchPage,
        errors=(409, 429),
        examples=({"query": "How is tea made?"}, {"query": ["tea", "coffee"], "filters": _FILTER}),
    ),
    Endpoint(
        "POST",
        ONE + "/files",
        _handler("files", "add_file"),
        "Make a file searchable; answers at once, while the work goes on",
        request=protocol.StoreFileRequest,
        response=bodies.StoreFileBody,
        errors=(409,),
        examples=({"file_id": _ID, "chunking_strategy": {"type": "static", "static": _SIZES}},),
    ),
    Endpoint(
        "GET",
        ONE + "/files",
        _handler("files", "list_files"),
        "A store's files",
        query=protocol.FilesQuery,
        response=bodies.StoreFileList,
    ),
    Endpoint("GET", FILE, _handler("files", "show_file"), "How far a file is", response=bodies.StoreFileBody),
    Endpoint(
        "POST",
        FILE,
        _handler("files", "change_file"),
        "Replace a file's attributes",
        request=protocol.AttributesRequest,
        response=bodies.StoreFileBody,
        errors=(409,),
        examples=({"attributes": {"year": 2026}},),
    ),
    Endpoint(
        "DELETE",
        FILE,
        _handler("files", "remove_file"),
        "Take a file out of a store",
        response=bodies.StoreFileDeleted,
    ),
    Endpoint(
        "GET",
        FILE + "/content",
        _handler("files", "file_content"),
        "A file's parsed text, which results and citations refer to",
        response=bodies.FileContent,
        errors=(409,),
    ),
    Endpoint(
        "POST",
        ONE + "/file_batches",
        _handler("files", "create_batch"),
        "Make up to 2000 files searchable",
        request=protocol.FileBatchRequest,
        response=bodies.FileBatchBody,
        errors=(409,),
        examples=({"file_ids": [_ID]}, {"files": [{"file_id": _ID, "attributes": {"year": 2026}}]}),
    ),
    Endpoint(
        "GET",
        BATCH,
        _handler("files", "show_batch"),
        "How far a batch of files is",
        response=bodies.FileBatchBody,
    ),
    Endpoint(
        "POST",
        BATCH + "/cancel",
        _handler("files", "cancel_batch"),
        "End a batch early; files that are done stay",
        response=bodies.FileBatchBody,
        errors=(409,),
    ),
    Endpoint(
        "GET",
        BATCH + "/files",
        _handler("files", "list_batch_files"),
        "A batch's files",
        query=protocol.FilesQuery,
        response=bodies.StoreFileList,
    ),
]
