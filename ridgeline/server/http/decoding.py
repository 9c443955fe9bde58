"""Decodes a request body to a typed struct, or raises a 400 that names the JSON path and the fix.

Nothing is guessed or coerced: a number in quotes is a wrong type, and an unknown field is reported with the
nearest known one. Only what decodes here reaches validation.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import json
import re
import typing
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import msgspec

from ridgeline.server.errors import BadRequest, ErrorCode
from ridgeline.server.http.body_fields import Body, fields_of
from ridgeline.server.http.off_loop import LONG_BYTES
from ridgeline.server.http.weight import check_weight

B = TypeVar("B", bound=Body)

_OUT_OF_BOUNDS = re.compile(r"` (?:[<>]=? |of length )")  # the right type, but out of bounds
_QUOTED = re.compile(r"`([^`]*)`")
_NEAR_JSON = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]")  # accepted by Python, but not JSON
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST_NAME = 64  # of a field name worth a suggestion
_LONGEST_SEARCHED = 1 << 20  # of a body that is parsed again to find the field


def decode(raw: bytes, body: type[B]) -> B:
    """The body as its struct; every error is a BadRequest. Refused fields are refused here."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}"
        raise BadRequest(None, message, "invalid_json") from None
    check_weight(raw)
    try:
        with _gc_paused(len(raw)):
            decoded: B = _decoder(body).decode(raw)
    except msgspec.ValidationError as error:
        _refuse_shape(str(error), body)
    except msgspec.DecodeError as error:
        _refuse_leaf(raw)
        raise BadRequest(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise BadRequest(None, "the body is nested too deeply", "invalid_json") from None
    _refuse_unsupported(decoded, "")
    return decoded


@contextlib.contextmanager
def _gc_paused(size_bytes: int) -> Iterator[None]:
    """Decoded data is not garbage; collecting repeatedly during decoding would delay all streams."""
    if size_bytes <= LONG_BYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@functools.cache
def _decoder(body: type[B]) -> msgspec.json.Decoder[B]:
    return msgspec.json.Decoder(body)


def _refuse_shape(message: str, body: type[Body]) -> NoReturn:
    """Split msgspec's one-line error into the path and a sentence."""
    what, _, where = message.rpartition(" - at `") if message.endswith("`") else (message, "", "")
    if not where.startswith(("$", "key` in `$")):  # no path given: the whole text is the message
        what, where = message, ""
    # For objects with arbitrary keys, msgspec does not name the key.
    path = where.rpartition("$")[2].removesuffix("`").removeprefix(".").replace("[...]", "")
    name = _QUOTED.search(what)
    if what.startswith("Object contains unknown field") and name:
        known = fields_of(_struct_at(path, body))
        nearest = difflib.get_close_matches(name[1], known, n=1) if len(name[1]) <= _LONGEST_NAME else []
        hint = f"; did you mean {nearest[0]}?" if nearest else "; see docs/http-api.md for the known ones"
        raise BadRequest(_join(path, name[1]), f"unknown field{hint}", "unknown_field")
    if what.startswith("Object missing required field") and name:
        raise BadRequest(_join(path, name[1]), "this field is required", "missing_field")
    sentence = (what[:1].lower() + what[1:]).replace("`", "")
    code: ErrorCode | None = None if _OUT_OF_BOUNDS.search(what) else "invalid_type"
    raise BadRequest(path or None, sentence if path else f"the body is invalid: {sentence}", code)


def _struct_at(path: str, body: type[Body]) -> type[Body]:
    """The struct at a path like messages[2].content[0]; the first one of a union."""
    for name in re.sub(r"\[[^\]]*\]", "", path).split("."):
        hints = typing.get_type_hints(body)
        inner = next(iter(_structs_in(hints[name])), None) if name in hints else None
        if inner is None:
            return body
        body = inner
    return body


def _structs_in(hint: Any) -> list[type[Body]]:
    """The body structs that a type contains, through unions, lists and dicts."""
    if isinstance(hint, type) and issubclass(hint, Body):
        return [hint]
    return [found for part in typing.get_args(hint) for found in _structs_in(part)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_leaf(raw: bytes) -> None:
    """Python clients send NaN and lone surrogates, which are not JSON: name the field instead of a byte."""
    if len(raw) > _LONGEST_SEARCHED or not _NEAR_JSON.search(raw):
        return
    try:
        tree = json.loads(raw, parse_constant=_Constant)
    except (ValueError, RecursionError):
        return
    for path, leaf in _leaves(tree):
        if isinstance(leaf, _Constant):
            raise BadRequest(path or None, f"{leaf.name} is not a JSON number", "invalid_json")
        if isinstance(leaf, str) and (lone := _LONE_SURROGATE.search(leaf)):
            what = f"\\u{ord(lone[0]):04x} at position {lone.start()} is half of a surrogate pair"
            raise BadRequest(path or None, f"{what}, which is not a character", "invalid_json")


class _Constant:
    def __init__(self, name: str) -> None:
        self.name = name


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """All values that are not objects or lists, with their paths. Keys count as leaves of their object."""
    waiting = [("", tree)]  # iterative: the tree may be as deep as Python's stack
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, dict):
            waiting += [(_join(path, key), child) for key, child in node.items()]
            waiting += [(path, key) for key in node]  # keys first: a path cannot contain a bad key
        elif isinstance(node, list):
            waiting += [(f"{path}[{i}]", child) for i, child in enumerate(node)]
        else:
            yield path, node


def _refuse_unsupported(body: Body, path: str) -> None:
    """Known but unsupported fields: null and harmless values pass, everything else is refused."""
    for name, about in fields_of(type(body)).items():
        value = getattr(body, name)
        if value is None:
            continue
        if about.status == "refused" and value not in about.harmless:
            raise BadRequest(_join(path, name), about.doc, "unsupported_field")
        if isinstance(value, Body):
            _refuse_unsupported(value, _join(path, name))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Body):
                    _refuse_unsupported(item, f"{_join(path, name)}[{i}]")
