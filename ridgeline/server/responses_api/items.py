"""A request's input as plain items: each validated, with an id and its path in the body.

Alternative notations (a string, a message without a type, parts or text) are unified here; the store keeps
the plain items and the conversation is built from them. An invalid item is a 400 that names its path.
"""

from __future__ import annotations

import base64
import itertools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, cast

import msgspec
from msgspec import UNSET

from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.http.body_fields import fields_of
from ridgeline.server.responses_api.bodies import (
    CompactionItem,
    FileSearchCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from ridgeline.server.responses_api.protocol import InputItem, InputPart

Role = Literal["user", "assistant", "system", "developer"]
ROLES = ("user", "assistant", "system", "developer")
TEXT_TYPES = ("input_text", "output_text")

# Allowed fields by type; fields that are ignored everywhere are not listed.
FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("id", "role", "content"),
    "reasoning": ("id", "summary", "content", "encrypted_content"),
    "function_call": ("id", "call_id", "name", "arguments", "namespace"),
    "function_call_output": ("id", "call_id", "output", "name"),
    "file_search_call": ("id", "queries"),
    "compaction": ("id", "encrypted_content"),
    "item_reference": ("id",),
}
_NOT_OF = {
    kind: [
        name
        for name, about in fields_of(InputItem).items()
        if about.status == "supported" and name not in ("type", *own)
    ]
    for kind, own in FIELDS.items()
}


@dataclass(frozen=True, slots=True)
class Placed:
    """An item and its path, such as `input[3]`. Ids made here cannot be guessed."""

    item: Item
    path: str
    is_ours: bool = True


NewId = Callable[[str], str]  # prefix → id


def new_id(prefix: str) -> str:
    """Ids must be unguessable: knowing one gives access to what it names."""
    return f"{prefix}_{secrets.token_hex(24)}"


def salted_ids(salt: str) -> NewId:
    """Ids that a server with the same salt makes in the same order; random ones without a salt."""
    if not salt:
        return new_id
    numbers = itertools.count()

    def salted(prefix: str) -> str:
        return f"{prefix}_{blake2b(f'{salt}/{next(numbers)}'.encode(), digest_size=24).hexdigest()}"

    return salted


class _Sealed(msgspec.Struct, forbid_unknown_fields=True, tag="ridgeline.summary"):
    summary: str


def sealed(summary: str) -> str:
    """A summary as a compaction item carries it: encoded, not encrypted."""
    return base64.b64encode(msgspec.json.encode(_Sealed(summary))).decode()


def unsealed(content: str, path: str) -> str:
    """The summary in a compaction item. Raises 400 for one made by another server."""
    try:
        return msgspec.json.decode(base64.b64decode(content, validate=True), type=_Sealed).summary
    except (ValueError, msgspec.DecodeError):
        message = "this compaction item was made by another kind of server and cannot be read here"
        raise BadRequest(path, message) from None


def references(given: str | list[InputItem] | None) -> list[str]:
    """The ids of stored items that the input references."""
    return (
        []
        if given is None or isinstance(given, str)
        else [item.id for item in given if _type(item) == "item_reference" and item.id is not None]
    )


def placed_items(given: str | list[InputItem] | None, stored: Mapping[str, Item]) -> list[Placed]:
    """The input's items in order. `stored` are the referenced ones."""
    if given is None:
        return []
    if isinstance(given, str):
        text = InputText(text=given)
        message = MessageItem(id=new_id("msg"), status="completed", role="user", content=[text])
        return [Placed(message, "input")]
    return [_placed(item, f"input[{i}]", stored) for i, item in enumerate(given)]


def _type(item: InputItem) -> str:
    """The type may be omitted for a message and for a reference, which has only an id."""
    if item.type is not None:
        return item.type
    return "item_reference" if item.role is None and item.id is not None else "message"


def _placed(item: InputItem, path: str, stored: Mapping[str, Item]) -> Placed:
    kind = _type(item)
    _check_fields(item, kind, path)
    match kind:
        case "message":
            made: Item = _message(item, path)
        case "reasoning":
            made = _reasoning(item, path)
        case "function_call":
            made = FunctionCallItem(
                id=item.id or new_id("fc"),
                call_id=_needed(item.call_id, f"{path}.call_id"),
                name=_needed(item.name, f"{path}.name"),
                namespace=item.namespace or UNSET,
                arguments=_needed(item.arguments, f"{path}.arguments"),
                status="completed",
            )
        case "function_call_output":
            made = _output(item, path)
        case "file_search_call":
            queries = item.queries or []
            made = FileSearchCallItem(id=item.id or new_id("fs"), status="completed", queries=queries)
        case "compaction":
            content = _needed(item.encrypted_content, f"{path}.encrypted_content")
            unsealed(content, f"{path}.encrypted_content")  # raises if it cannot be read
            made = CompactionItem(id=item.id or new_id("cmp"), encrypted_content=content)
        case _:
            id = _needed(item.id, f"{path}.id")
            if id not in stored:
                message = f"{path}.id: no item {id[:64]!r} is stored here"
                raise ApiError(404, message, param=f"{path}.id", code="not_found")
            return Placed(stored[id], path)
    return Placed(made, path, is_ours=item.id is None)


def _check_fields(item: InputItem, kind: str, path: str) -> None:
    if kind not in FIELDS:
        raise refused_type(f"{path}.type", kind, "items", tuple(FIELDS))
    for name in _NOT_OF[kind]:
        if getattr(item, name) is not None:
            raise BadRequest(f"{path}.{name}", f"a {kind} has no such field", "unknown_field")


def refused_type(path: str, kind: str, what: str, served: tuple[str, ...]) -> BadRequest:
    message = f"{kind[:64]!r} {what} are not supported; supported: {', '.join(served)}"
    return BadRequest(path, message, "unsupported_field")


def _needed(value: str | None, path: str) -> str:
    if value is None:
        raise BadRequest(path, "this field is required", "missing_field")
    return value


def _message(item: InputItem, path: str) -> MessageItem:
    role = _needed(item.role, f"{path}.role")
    if role not in ROLES:
        raise BadRequest(f"{path}.role", f"unknown role {role[:64]!r}; known are {', '.join(ROLES)}")
    if item.content is None:
        raise BadRequest(f"{path}.content", "this field is required", "missing_field")
    texts = [item.content] if isinstance(item.content, str) else _texts(item.content, f"{path}.content")
    content: list[InputText | OutputText] = (
        [OutputText(text=text, annotations=[], logprobs=[]) for text in texts]
        if role == "assistant"
        else [InputText(text=text) for text in texts]
    )
    return MessageItem(
        id=item.id or new_id("msg"), status="completed", role=cast(Role, role), content=content
    )


def _reasoning(item: InputItem, path: str) -> ReasoningItem:
    if isinstance(item.content, str):
        raise BadRequest(f"{path}.content", "expected a list of reasoning_text parts", "invalid_type")
    content = _texts(item.content, f"{path}.content", ("reasoning_text",)) if item.content else []
    summary = _texts(item.summary, f"{path}.summary", ("summary_text",)) if item.summary else []
    return ReasoningItem(
        id=item.id or new_id("rs"),
        summary=[SummaryText(text=text) for text in summary],
        content=[ReasoningText(text=text) for text in content],
        status="completed",
    )


def _output(item: InputItem, path: str) -> FunctionCallOutputItem:
    if item.output is None:
        raise BadRequest(f"{path}.output", "this field is required", "missing_field")
    output: str | list[InputText] = (
        item.output
        if isinstance(item.output, str)
        else [InputText(text=text) for text in _texts(item.output, f"{path}.output")]
    )
    call_id = _needed(item.call_id, f"{path}.call_id")
    return FunctionCallOutputItem(
        id=item.id or new_id("fco"), call_id=call_id, output=output, status="completed"
    )


def _texts(parts: list[InputPart], path: str, types: tuple[str, ...] = TEXT_TYPES) -> list[str]:
    if not parts:
        raise BadRequest(path, "at least one part is needed")
    texts = []
    for i, part in enumerate(parts):
        if part.type not in types:
            raise refused_type(f"{path}[{i}].type", part.type, "parts", types)
        texts.append(_needed(part.text, f"{path}[{i}].text"))
    return texts
