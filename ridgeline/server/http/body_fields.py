"""Body: the base of every request body, a JSON object with a closed set of fields, each with an About.

`decoding` reads the descriptions to refuse fields, `openapi` and the tables of docs/http-api.md print them.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec


@dataclass(frozen=True, slots=True)
class About:
    """What a field means. A refused field is still accepted where its value is null or in `harmless`."""

    doc: str
    status: Literal["supported", "ignored", "refused"] = "supported"
    harmless: tuple[Any, ...] = ()


def ignored(doc: str) -> About:
    return About(doc, "ignored")


def refused(doc: str, *harmless: Any) -> About:
    return About(doc, "refused", harmless)


@functools.cache
def fields_of(body: type[msgspec.Struct]) -> dict[str, About]:
    """Every field of a body with its description, in the order of declaration."""
    hints = typing.get_type_hints(body, include_extras=True)
    return {
        name: next(part for part in hints[name].__metadata__ if isinstance(part, About))
        for name in body.__struct_fields__
    }


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object with a closed set of fields."""
