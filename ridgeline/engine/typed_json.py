"""Dataclasses to JSON and back, as strict as a message between processes: a wrong type is an error.

For files that the in-process engine reads without the message layer's library. Unknown keys are ignored, so
that a newer version's file can be read; any other mismatch is a ValueError.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def encode(value: Any, indent: int | None = None) -> str:
    """The dataclass as JSON; compact without `indent`."""
    separators = (",", ":") if indent is None else None
    return json.dumps(
        asdict(value), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False
    )


def decode(text: str | bytes, kind: type[T]) -> T:
    """Raises ValueError that names the missing or mistyped field."""
    decoded: T = _convert(json.loads(text, parse_constant=_refuse), kind, kind.__name__)
    return decoded


def _convert(value: Any, kind: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _object(_checked(value, dict, where), kind, where)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(_convert(each, item, f"{where}[]") for each in _checked(value, list, where))
    if get_origin(kind) is dict:
        item = get_args(kind)[1]
        return {key: _convert(each, item, where) for key, each in _checked(value, dict, where).items()}
    if kind is float and type(value) is int:
        return float(value)
    return _checked(value, kind, where)


def _object(value: dict[str, Any], kind: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    given = {}
    for field in fields(kind):
        if field.name in value:
            given[field.name] = _convert(value[field.name], hints[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}.{field.name} is missing")
    return kind(**given)


def _checked(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:  # not isinstance: True is not a number here
        raise ValueError(f"{where} is {value!r:.40}, but must be a {kind.__name__}")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
