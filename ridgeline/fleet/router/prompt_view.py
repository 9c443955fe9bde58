"""Makes the PromptView of a request from its JSON fields: its blocks, size, adapter and session."""

from __future__ import annotations

import msgspec

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.placement.regions import Rules
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.proxy.errors import InvalidBody
from ridgeline.proxy.json_fields import Fields, field
from ridgeline.replica.prompt_blocks import FIELDS, prefix_root, prompt_blocks

BYTES_PER_TOKEN = 4
MOST_OUTPUT = 1 << 20  # a client may send any number; a replica refuses one beyond its context
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SESSIONS = ("prompt_cache_key", "user")  # fields of OpenAI's bodies that name the conversation or the user
_number = msgspec.json.Decoder(int)


def prompt_view(
    fields: Fields,
    model: str,
    entry: ModelEntry,
    tenant: str,
    priority: int,
    region: str = "",
    residency: Rules = (),
) -> PromptView:
    """model: a name, an alias or an adapter, as the client wrote it. region: the router's."""
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
        region=region,
        residency=residency,
    )


def _text(fields: Fields, name: str) -> str:
    """A text field, or empty. The replica refuses a wrong type."""
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
