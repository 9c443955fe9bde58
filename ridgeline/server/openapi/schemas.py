"""Structs as JSON Schema: msgspec's schemas, with the descriptions of `About`, made as strict as decoding.

In a request body, a refused field admits only its accepted values; in a response body, every field that is
always sent is required. Called by `document`.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable
from typing import Any

import msgspec

from ridgeline.server.http.body_fields import Body, fields_of

REFERENCE = "#/components/schemas/{name}"
Schema = dict[str, Any]


class Schemas:
    """The schemas of all structs that the given types contain, by name."""

    def __init__(self, types: Iterable[Any]) -> None:
        wanted = list(dict.fromkeys(types))
        structs = structs_of(wanted)
        schemas, components = msgspec.json.schema_components([*wanted, *structs], ref_template=REFERENCE)
        self.components: dict[str, Schema] = components
        self._by_type: dict[Any, Schema] = dict(zip(wanted, schemas, strict=False))
        for struct, schema in zip(structs, schemas[len(wanted) :], strict=True):
            _complete(struct, components[schema["$ref"].rpartition("/")[2]])

    def of(self, kind: Any) -> Schema:
        """The schema of one of the given types: nearly always a reference."""
        return self._by_type[kind]


def _complete(struct: type[msgspec.Struct], schema: Schema) -> None:
    names = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    properties = schema.get("properties", {})
    if issubclass(struct, Body):
        for name, about in fields_of(struct).items():
            properties[names[name]] = _described(properties[names[name]], about)
        return
    tag = struct.__struct_config__.tag_field
    always = [encoded for name, encoded in names.items() if not _may_be_unset(struct, name)]
    schema["required"] = always if tag is None else [tag, *always]


def _described(schema: Schema, about: Any) -> Schema:
    if about.status == "refused":
        accepted = [None, *about.harmless]
        return {"enum": accepted, "description": f"refused: {about.doc}", "x-ridgeline-status": "refused"}
    if about.status == "ignored":
        return {**schema, "description": f"ignored: {about.doc}", "x-ridgeline-status": "ignored"}
    return {**schema, "description": about.doc}


def _may_be_unset(struct: type[msgspec.Struct], name: str) -> bool:
    if struct.__struct_config__.omit_defaults:
        return name not in _required(struct)
    return msgspec.UnsetType in typing.get_args(typing.get_type_hints(struct)[name])


@functools.cache
def _required(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(struct) if field.required)


def structs_of(types: Iterable[Any]) -> list[type[msgspec.Struct]]:
    """All structs that these types contain, at any depth."""
    found: dict[type[msgspec.Struct], None] = {}
    waiting = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        node = waiting.pop()
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls not in found:
                found[node.cls] = None
                waiting += [field.type for field in node.fields]
            continue
        for name in node.__struct_fields__:
            part = getattr(node, name)
            parts = part if isinstance(part, tuple | list) else [part]
            waiting += [child for child in parts if isinstance(child, msgspec.inspect.Type)]
    return list(found)
