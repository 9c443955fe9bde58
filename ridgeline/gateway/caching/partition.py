"""The cache key of an answer: one untruncated hash of the tenant and of the whole request.

`partition` and `wanted` are called once per request. Two requests share an answer only if their tenant,
model, endpoint and every top-level field are the same; the order of the fields alone does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

import msgspec

from ridgeline.gateway.body import Fields
from ridgeline.gateway.caching.config import CacheConfig
from ridgeline.gateway.errors import BadRequest

Mode = Literal["off", "exact", "semantic"]
HEADER = b"x-ridgeline-cache"

_LEVELS: dict[str, int] = {"off": 0, "exact": 1, "semantic": 2}
_MODES: tuple[Mode, ...] = ("off", "exact", "semantic")
# These are never sampled.
_COMPUTED = frozenset({"embeddings", "rerank", "score", "count_tokens"})
_DRAWN = frozenset({"chat", "completions", "messages", "responses"})
_ZEROS = frozenset({b"0", b"0.0", b"0.00", b"0e0"})
_FALSE = msgspec.Raw(b"false")


def wanted(config: CacheConfig, key_cache: str, header: bytes, kind: str, fields: Fields) -> Mode:
    """Which cache this request may use. `header`: the client's x-ridgeline-cache, empty without one.

    A header may ask for less than the key allows, or for as much as [cache] header allows every key.
    """
    if header:
        asked = _LEVELS.get(header.decode("latin-1").strip().lower())
        if asked is None:
            raise BadRequest("x-ridgeline-cache must be off, exact or semantic", code="invalid_header")
        level = min(asked, max(_LEVELS.get(key_cache, 0), _LEVELS[config.header]))
    else:
        level = _LEVELS.get(key_cache, 0)
    if level == 0 or not _repeatable(kind, fields):
        return "off"
    if kind in _DRAWN and not header and not config.sampled:
        temperature = fields.get("temperature")
        if temperature is None or bytes(temperature) not in _ZEROS:
            return "off"
    return _MODES[level]


def partition(tenant: str, model: str, kind: str, fields: Fields, variants: Sequence[str] = ()) -> bytes:
    """model: the public name. variants: other inputs of the answer: the guard's policy, beta headers.

    `fields` are the client's own, before any guard: two texts may be redacted to the same text.
    """
    parts = [tenant.encode(), model.encode(), kind.encode(), b"%d" % len(variants)]
    parts += [variant.encode() for variant in variants]
    for name in sorted(fields):
        parts.append(name.encode("utf-8", "surrogatepass"))
        parts.append(bytes(fields[name]))
    return digest(parts)


def digest(parts: Sequence[bytes]) -> bytes:
    """Hash of a list, not of its concatenation: the length of every part precedes it."""
    return sha256(b"".join([b"%d:%b" % (len(part), part) for part in parts])).digest()


def _repeatable(kind: str, fields: Fields) -> bool:
    """Whether repeating the request has no effect except another answer."""
    if kind in _COMPUTED:
        return True
    if kind not in _DRAWN:
        return False
    if kind == "responses":  # a stored or background response creates an object
        if b"file_search" in bytes(fields.get("tools", _FALSE)):
            return False  # the files may change
        return fields.get("store") == _FALSE and fields.get("background", _FALSE) == _FALSE
    return fields.get("store", _FALSE) == _FALSE
