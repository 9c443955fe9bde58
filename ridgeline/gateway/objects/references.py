"""Ids in a body: of files, responses, items, vector stores and containers that an upstream stores.

To the upstream all tenants are one client: a request that names an id may read the object. So the owner of
every id in the body is checked before a request is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from ridgeline.gateway.body import Fields
from ridgeline.gateway.errors import BadRequest, NotFound
from ridgeline.gateway.offload.offload import is_large, plain
from ridgeline.gateway.pipeline.job import Job
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import RequestState

What = Literal["file", "response", "item", "vector store", "container", "conversation"]

KINDS = frozenset({"chat", "responses", "messages", "count_tokens"})  # kinds whose bodies may hold ids
MAX_ID = 128
MOST = 1000  # ids in one body
LONGEST_PLACE = 200  # most characters of an id's field name; the rest is dropped
# Their values are the client's own text, in which an id is not a reference.
_FREE = frozenset(("metadata", "parameters", "input_schema", "schema", "json_schema", "arguments"))
_TOOL_USES = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
_ONE: Mapping[str, What] = {
    "file_id": "file",
    "previous_response_id": "response",
    "vector_store_id": "vector store",
    "container_id": "container",
    "container": "container",
    "conversation": "conversation",
}
_SEVERAL: Mapping[str, What] = {"file_ids": "file", "vector_store_ids": "vector store"}
_OWNED: Mapping[What, str] = {  # objects that a tenant can create through the gateway, and their kinds
    "file": "file",
    "response": "response",
    "vector store": "vector_store",
}
# A value with an id holds one of these byte strings; a name may be written with escapes.
_SIGNS = (b"file_id", b"response_id", b"vector_store", b"container", b"item_reference", b"\\u")

_decode = msgspec.json.Decoder().decode


class Reference(NamedTuple):
    field: str  # its path: input[0].content[1].file_id
    what: What
    id: str


def references(kind: str, fields: Fields) -> list[Reference]:
    """Every id in the body that an upstream would look up."""
    if kind not in KINDS:
        return []
    found: list[Reference] = []
    for name, raw in fields.items():
        plain_name = name.lower()
        if plain_name in _FREE or not (plain_name in _ONE or plain_name in _SEVERAL or _may_hold(name, raw)):
            continue
        try:
            _look({name: _decode(raw)}, "", found, in_items=False)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BadRequest("the body is not valid JSON", code="invalid_json") from None
        except RecursionError:
            raise BadRequest("the body is nested too deeply", code="invalid_json") from None
    return found


async def check_references(parts: Parts, request: RequestState, job: Job) -> None:
    """NotFound for an id of another tenant; sends the request to the upstream of its objects."""
    kind = request.place.endpoint.kind
    if is_large(request.fields) and kind in KINDS:
        found = await parts.offload.run(request.tenant, "references", kind, plain(request.fields))
    else:
        found = references(kind, request.fields)
    assert job.model is not None
    for reference in found:
        upstream = await owner_of(parts, request.tenant, reference)
        targets = [one for one in job.targets or job.model.targets if one.upstream == upstream]
        if not targets:
            where = f"stored at an upstream without the model {job.model.name!r}"
            message = f"{reference.field}: the {reference.what} is {where}"
            raise NotFound(message, param=reference.field)
        job.targets = targets


async def owner_of(parts: Parts, tenant: str, reference: Reference) -> str:
    """The upstream that stores the tenant's object."""
    field, what, id = reference
    owned = await parts.owned.owner(id) if what in _OWNED and len(id) <= MAX_ID else None
    if owned is None or owned.tenant != tenant or owned.kind != _OWNED[what]:
        hint = "; send the item itself, or continue with previous_response_id" if what == "item" else ""
        raise NotFound(f"{field}: no {what} is named {id[:MAX_ID]!r}{hint}", param=field)
    return owned.upstream


def _may_hold(name: str, raw: msgspec.Raw) -> bool:
    data = bytes(raw).lower()
    return any(sign in data for sign in _SIGNS) or (name.lower() == "input" and b'"id"' in data)


def _look(value: Any, at: str, found: list[Reference], in_items: bool) -> None:
    """in_items: in the `input` of /v1/responses, where an object with only an id refers to an item."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            _look(one, _within(at, f"[{number}]"), found, in_items)
        return
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    is_id_alone = in_items and kind is None and value.keys() <= {"id", "type"}
    if kind == "item_reference" or is_id_alone:
        _add(found, _within(at, ".id"), "item", value.get("id"))
    for name, inner in value.items():
        plain_name = name.lower()
        if plain_name in _FREE or (plain_name == "input" and kind in _TOOL_USES):
            continue
        place = _within(at, f".{name}" if at else name)
        if plain_name in _ONE:
            _add(found, place, _ONE[plain_name], inner.get("id") if isinstance(inner, dict) else inner)
        elif plain_name in _SEVERAL and isinstance(inner, list):
            for one in inner:
                _add(found, place, _SEVERAL[plain_name], one)
        _look(inner, place, found, in_items=not at and plain_name == "input")


def _within(at: str, step: str) -> str:
    """Truncated: each id holds its own copy, and a client's field name may have megabytes."""
    return (at + step[:LONGEST_PLACE])[:LONGEST_PLACE]


def _add(found: list[Reference], field: str, what: What, id: Any) -> None:
    if not isinstance(id, str) or (not id and what != "item"):
        return
    if len(found) == MOST:
        raise BadRequest(f"{field}: the body names more than {MOST} objects", param=field)
    found.append(Reference(field, what, id))
