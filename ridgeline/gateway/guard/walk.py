"""Walk: passes every string of a JSON value, at any depth, through one function.

Skips only what the protocol needs unchanged: names of models and types, ids that look like ids, and base64 of
pictures, sound and files, which the guard cannot read. In free-form values (tool inputs, metadata, schemas)
nothing is skipped, and field names and numbers are checked as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ridgeline.gateway.guard.secrets import is_key

_FREE = frozenset((
    "metadata", "parameters", "input_schema", "schema", "json_schema", "arguments", "properties", "variables",
    "structured_content", "additional_drop_params", "extra_body",
))  # fmt: skip
_NAMES = frozenset((
    "model", "role", "type", "object", "id", "tool_call_id", "tool_use_id", "call_id", "item_id",
    "response_id", "previous_response_id", "conversation", "finish_reason", "stop_reason", "service_tier",
    "system_fingerprint", "status", "encoding_format", "detail", "media_type", "format", "obfuscation",
))  # fmt: skip
_BLOBS = frozenset((
    "data", "url", "image_url", "file_data", "signature", "encrypted_content", "b64_json", "embedding",
    "result", "partial_image_b64", "image",
))  # fmt: skip
_TOKENS = frozenset(("input", "prompt", "query", "queries", "documents", "text_1", "text_2", "texts"))
_IDENTIFIER = re.compile(r"(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_.:/+-]{1,256}")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z_]{0,47}")
_BASE64 = re.compile(
    r"(?:data:[a-z]+/[a-z0-9.+-]+(?:;[a-z0-9=._-]+)*;base64,)?[A-Za-z0-9+/_\s-]{64,}={0,2}\s*", re.I
)
_TEXT_DATA = re.compile(r"data:(?:text/|application/(?:json|xml|x-yaml))", re.I)


class Walk:
    """`text(string, name of its field)` and `json_text(string)` return the replacement of a string."""

    def __init__(
        self,
        text: Callable[[str, str], str],
        json_text: Callable[[str], str],
        thinking: Callable[[str], str],
        tokens: Callable[[str], None] = lambda name: None,
        dropped: frozenset[str] = frozenset(),
    ) -> None:
        self._text = text
        self._json_text = json_text
        self._thinking = thinking  # signed texts, returned unchanged
        self._tokens = tokens  # called for a list of token ids in place of a text
        self._dropped = dropped  # fields whose value becomes null

    def value(self, value: Any, name: str, free: bool = False) -> Any:
        if isinstance(value, str):
            return self._string(value, name, free)
        if isinstance(value, dict):
            return self._object(value, free or name in _FREE or name == "input")
        if isinstance(value, list):
            if not free and name in _TOKENS and any(isinstance(item, int) for item in value):
                self._tokens(name)
            return [self.value(item, name, free) for item in value]
        if free and isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._number(value, name)
        return value

    def name(self, name: str) -> str:
        return name if _FIELD.fullmatch(name) else self._text(name, "")

    def _object(self, members: dict[str, Any], free: bool) -> dict[str, Any]:
        return {
            self.name(name): None if name in self._dropped and not free else self.value(value, name, free)
            for name, value in members.items()
        }

    def _string(self, value: str, name: str, free: bool) -> str:
        if free:
            return self._text(value, name)
        if name in _NAMES and _IDENTIFIER.fullmatch(value) and not is_key(value):
            return value
        if name == "thinking":
            return self._thinking(value)
        if name == "arguments" or name == "partial_json":
            return self._json_text(value)
        if name in _BLOBS and len(value) >= 64 and _BASE64.fullmatch(value) and not _TEXT_DATA.match(value):
            return value
        return self._text(value, "")

    def _number(self, value: int | float, name: str) -> Any:
        text = repr(value)
        if len(text) < 7:
            return value
        changed = self._text(text, name)
        return value if changed == text else changed
