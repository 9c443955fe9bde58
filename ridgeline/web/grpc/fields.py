"""FieldNames: the proto's names of a request's fields, for errors of the HTTP API.

Nearly all names are the same. The converted request lists the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_HEAD = re.compile(r"[^.\[]*")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """renamed: the body's top-level field → the proto's. whole: fields without parts in the proto."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()

    def of(self, param: str) -> str:
        match = _HEAD.match(param)
        head = match[0] if match else param
        rest = "" if head in self.whole else param[len(head) :].replace(".function", "")
        return self.renamed.get(head, head) + rest

    def in_message(self, message: str, param: str | None) -> str:
        """Rename the field at the beginning of a message, or add its name."""
        if param is None:
            return message
        name = self.of(param)
        if message.startswith(param):
            return name + message[len(param) :]
        return message if name in message else f"{name}: {message}"
