"""FieldNames: the names that a request's fields have in the proto, for errors of the HTTP API.

Nearly all are the same. The others are listed when a request is converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_HEAD = re.compile(r"[^.\[]*")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """renamed: the body's top-level field → the proto's. whole: those of which the proto knows no parts."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()

    def of(self, param: str) -> str:
        match = _HEAD.match(param)
        head = match[0] if match else param
        rest = "" if head in self.whole else param[len(head) :].replace(".function", "")
        return self.renamed.get(head, head) + rest

    def in_message(self, message: str, param: str | None) -> str:
        """Messages begin with the field's name; one that does not is given it."""
        if param is None:
            return message
        name = self.of(param)
        if message.startswith(param):
            return name + message[len(param) :]
        return message if name in message else f"{name}: {message}"
