"""Vector stores behind the gateway: what may be in their paths, queries and bodies.

A store and the files in it belong to one tenant and lie at one upstream. So each file of a body is the
tenant's own and at the store's upstream; what stands in a path within a store is the store's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from ridgeline.gateway.body import Fields
from ridgeline.gateway.errors import BadRequest, NotFound
from ridgeline.gateway.objects.references import Reference, owner_of
from ridgeline.gateway.pipeline.endpoints import Place
from ridgeline.gateway.pipeline.parts import Parts

MOST_BODY = 4 << 20  # bytes; 2000 files with an id, attributes and a strategy each
MOST_FILES = 2000  # of one body
FILE_FIELDS = frozenset(
    ("file_id", "file_ids", "files")
)  # names of files, which a guard would take for numbers
_WORD = re.compile(r"[A-Za-z0-9_-]{1,128}")
_QUERY = frozenset(("limit", "order", "after", "before", "filter"))


def vector_store_path(place: Place, query: Mapping[str, str]) -> str:
    steps = [step for step in place.action.split("/") if step]
    if not all(_WORD.fullmatch(step) for step in steps):
        raise NotFound(f"no such object in the vector store: {place.action[:128]!r}")
    path = "/".join(("/v1/vector_stores", place.object_id, *steps))
    asked = {name: value for name, value in query.items() if name in _QUERY}
    for name, value in asked.items():
        if not _WORD.fullmatch(value):
            raise BadRequest(f"{name}: must be a word or a number", param=name)
    return f"{path}?{urlencode(asked)}" if asked else path


def check_list_query(query: Mapping[str, str]) -> None:
    """The list of a tenant's stores is the gateway's own: newest first, by cursor."""
    if query.get("before"):
        raise BadRequest("before: not available through the gateway; use after", param="before")
    if query.get("order", "desc") != "desc":
        raise BadRequest("order: not available through the gateway; the newest is first", param="order")


async def check_files(parts: Parts, tenant: str, fields: Fields, upstream: str) -> None:
    """NotFound for a file that is not the tenant's, or lies at another upstream than the store."""
    for reference in _files(fields):
        if await owner_of(parts, tenant, reference) != upstream:
            message = f"{reference.field}: the file is stored at another upstream than the vector store"
            raise NotFound(message, param=reference.field)


def _files(fields: Fields) -> list[Reference]:
    found = []
    for field, name in _names(fields):
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{field}: must be the id of a file", param=field)
        found.append(Reference(field, "file", name))
        if len(found) > MOST_FILES:
            raise BadRequest(f"{field}: at most {MOST_FILES} files are allowed", param=field)
    return found


def _names(fields: Fields) -> list[tuple[str, Any]]:
    values: dict[str, Any] = {}
    for name in FILE_FIELDS & fields.keys():
        try:
            values[name] = msgspec.json.decode(fields[name])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BadRequest(f"{name}: is not valid JSON", code="invalid_json", param=name) from None
        # What is sent is what was checked: a field that is there twice is sent once.
        fields[name] = msgspec.Raw(msgspec.json.encode(values[name]))
    names: list[tuple[str, Any]] = []
    if (one := values.get("file_id")) is not None:
        names.append(("file_id", one))
    for name in ("file_ids", "files"):
        several = values.get(name)
        if several is None:
            continue
        if not isinstance(several, list):
            raise BadRequest(f"{name}: must be a list", param=name)
        for i, one in enumerate(several):
            if name == "files":
                if not isinstance(one, dict):
                    raise BadRequest(f"files[{i}]: must be an object", param=f"files[{i}]")
                names.append((f"files[{i}].file_id", one.get("file_id")))
            else:
                names.append((f"file_ids[{i}]", one))
    return names
