"""Makes the PromptView of a request from its JSON fields: its blocks, size, adapter and session."""

from __future__ import annotations

import msgspec

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.proxy.errors import InvalidBody
from ridgeline.proxy.json_fields import Fields, field
from ridgeline.replica.prompt_blocks import FIELDS, prefix_root, prompt_blocks

BYTES_PER_TOKEN = 4
MOST_OUTPUT = 1 << 20  # a client may send any number; a replica refuses those beyond its context
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SESSIONS = ("prompt_cache_key", "user")  # of OpenAI's bodies: the same conversation or the same person
_number = msgspec.json.Decoder(int)


def prompt_view(fields: Fields, model: str, entry: ModelEntry, tenant: str, priority: int) -> PromptView:
    """model: as the client wrote it: a name, an alias or an adapter."""
    adapter = model if model in entry.adapters else ""
    salt = field(fields, "cache_salt", str, "") if "cache_salt" in fields else ""
    size = sum(memoryview(fields[name]).nbytes for name in FIELDS if name in fields)
    texts = {name: fields[name] for name in FIELDS if name in fields}
    session = next((text for name in SESSIONS if (text := _text(fields, name))), "")
    return PromptView(
        model=model,
        blocks=prompt_blocks(texts, prefix_root(entry.name, adapter, salt)),
        tokens=size // BYTES_PER_TOKEN + 1,
        output_tokens=next((count for name in LIMITS if (count := _count(fields, name))), 0),
        adapter=adapter,
        session=f"{tenant}\0{session}" if session else "",
        tenant=tenant,
        priority=priority,
    )


def _text(fields: Fields, name: str) -> str:
    """Of a field that the replica checks: a wrong type is refused there."""
    if name not in fields:
        return ""
    try:
        return field(fields, name, str, "")
    except InvalidBody:
        return ""


def _count(fields: Fields, name: str) -> int:
    if name not in fields:
        return 0
    try:
        return min(max(_number.decode(fields[name]), 0), MOST_OUTPUT)
    except msgspec.DecodeError:
        return 0
