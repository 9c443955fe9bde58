"""/v1/vector_stores: create, list, show, change, delete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.retrieval.errors import BadInput, NamespaceNotFound, SpecMismatch, StoreUnavailable
from ridgeline.retrieval.ingest.records import Page, StoreFile, VectorStoreRow, new_id
from ridgeline.server.batches.conversion import converted
from ridgeline.server.batches.endpoints import Batches
from ridgeline.server.errors import ApiError, BadRequest, NotReady
from ridgeline.server.http.body_fields import Body
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.off_loop import LONG_BYTES, off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.served_models import ServedModels
from ridgeline.server.vector_stores.bodies import VectorStoreBody, VectorStoreDeleted, VectorStoreList
from ridgeline.server.vector_stores.protocol import (
    PageQuery,
    VectorStoreRequest,
    VectorStoreUpdate,
    strategy_of,
)
from ridgeline.server.vector_stores.service import VectorStores

B = TypeVar("B", bound=Body)


async def create_store(request: Request) -> Response:
    stores = await VectorStores.of(request)
    body = await body_of(request, VectorStoreRequest)
    embedder = stores.embedder()  # a server without an embedding model says so now
    if body.dimensions is not None and body.dimensions > embedder.dimensions:
        message = f"the vectors of {embedder.model} have {embedder.dimensions} numbers; got {body.dimensions}"
        raise BadRequest("dimensions", message)
    now = stores.catalog.now()
    row = VectorStoreRow(
        id=new_id("vs"),
        name=body.name or "",
        description=body.description,
        metadata=body.metadata or {},
        created_at=now,
        active_at=now,
        expires_days=body.expires_after.days if body.expires_after else None,
        dimensions=body.dimensions,
    )
    strategy = strategy_of(body.chunking_strategy)
    files = []
    for i, file_id in enumerate(dict.fromkeys(body.file_ids or ())):
        file = await Batches.of(request).store.file(file_id, f"file_ids[{i}]")
        files.append(
            StoreFile(
                store_id=row.id, file_id=file.id, filename=file.filename, created_at=now, strategy=strategy
            )
        )
    await stores.catalog.add_store(row)
    stores.take_up(await stores.catalog.add_files(files))
    return await shown_store(stores, row.id)


async def list_stores(request: Request) -> Response:
    stores, query = await VectorStores.of(request), query_of(request, PageQuery)
    with named_errors():
        found = await stores.catalog.stores(page_of(query))
    rows = [VectorStoreBody.of(row, *(await stores.catalog.counts(row.id))) for row in found]
    return await json_answer(VectorStoreList(*listed(rows, query.limit)))


async def show_store(request: Request) -> Response:
    stores = await VectorStores.of(request)
    return await shown_store(stores, request.path_params["vector_store_id"])


async def change_store(request: Request) -> Response:
    stores = await VectorStores.of(request)
    row = await stores.usable(request.path_params["vector_store_id"])
    body = await body_of(request, VectorStoreUpdate)
    changes: dict[str, Any] = {"active_at": stores.catalog.now()}
    if body.name is not UNSET:
        changes["name"] = body.name or ""
    if body.metadata is not UNSET:
        changes["metadata"] = body.metadata or {}
    if body.expires_after is not UNSET:
        changes["expires_days"] = None if body.expires_after is None else body.expires_after.days
    await stores.catalog.change_store(msgspec.structs.replace(row, **changes))
    return await shown_store(stores, row.id)


async def delete_store(request: Request) -> Response:
    stores = await VectorStores.of(request)
    row = await stores.found(request.path_params["vector_store_id"])
    await stores.forget_store(row.id)
    return await json_answer(VectorStoreDeleted(row.id))


# ── shared by the handlers of this package ───────────────────────────────────────────────────────────────


async def shown_store(stores: VectorStores, store_id: str) -> Response:
    row = await stores.found(store_id)
    return await json_answer(VectorStoreBody.of(row, *(await stores.catalog.counts(row.id))))


async def body_of(request: Request, kind: type[B]) -> B:
    raw = await read_body(request, ServedModels.of(request).config)
    return await off_loop(len(raw), lambda: decode(raw, kind))


def query_of(request: Request, kind: type[B]) -> B:
    return converted({name: value for name, value in request.query_params.items() if value}, kind)


def page_of(query: PageQuery) -> Page:
    return Page(limit=query.limit, order=query.order, after=query.after, before=query.before)


def listed(found: list[Any], limit: int) -> tuple[list[Any], str | None, str | None, bool]:
    """`found` has one item more than `limit` if the list continues."""
    data = found[:limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return data, first, last, len(found) > limit


async def json_answer(body: msgspec.Struct) -> Response:
    return Response(await off_loop(LONG_BYTES + 1, lambda: encode(body)), media_type="application/json")


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Errors of retrieval as HTTP's."""
    try:
        yield
    except BadInput as error:
        raise BadRequest(error.field, str(error).removeprefix(f"{error.field}: ")) from None
    except NamespaceNotFound as error:
        raise ApiError(404, str(error), code="not_found") from None
    except SpecMismatch as error:
        raise ApiError(409, str(error)) from None
    except StoreUnavailable as error:
        raise NotReady(str(error)) from None
