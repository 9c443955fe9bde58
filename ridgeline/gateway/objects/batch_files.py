"""Checks a batch's input file: each line must be a request that its key could have sent by itself.

All lines of a file use one model, as with OpenAI: so a batch has one price and one owner of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from ridgeline.gateway.accounting.prices import Prices
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import Fields, check_names, field, raw
from ridgeline.gateway.catalog import Catalog, allows
from ridgeline.gateway.errors import BadRequest, Forbidden
from ridgeline.gateway.guard.guards import Guard
from ridgeline.gateway.objects.batch_meta import BatchMeta
from ridgeline.gateway.objects.references import MOST, Reference, references
from ridgeline.gateway.pipeline.cache_salt import salted, takes_salt
from ridgeline.gateway.pipeline.endpoints import Endpoint, Place, find
from ridgeline.gateway.pipeline.most_used import most_used
from ridgeline.gateway.settings import GatewaySettings
from ridgeline.gateway.tenants.keys import Key

MAX_LINES = 100_000
BATCHED = frozenset({"chat", "completions", "responses", "embeddings"})


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class BatchFile:
    """meta: stored by the gateway with the file. references: each id once, with its first line."""

    meta: BatchMeta
    references: list[Reference]


@dataclass(frozen=True, slots=True)
class Uploader:
    """The uploader of a file, for the other process."""

    tenant: str
    key: Key
    guard: str  # a policy's name; empty: none


@dataclass(frozen=True, slots=True)
class BatchParts:
    """The parts that check a line."""

    settings: GatewaySettings
    catalog: Catalog
    prices: Prices


_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()


async def read_batch_file(
    content: Iterable[bytes],
    out: BinaryIO,
    uploader: Uploader,
    parts: BatchParts,
    upstream: str,
    guard: Guard | None,
) -> BatchFile:
    """Writes the file for the upstream: with the upstream's model names, the tenant's cache_salt, and texts
    after the guard.
    """
    lines = 0
    named_objects: dict[tuple[str, str], Reference] = {}
    public, there = "", ""
    endpoints: set[str] = set()
    most = Usage()
    cost_pusd = 0
    keeper = next(one for one in parts.settings.upstreams if one.name == upstream)
    for number, text in enumerate(content, start=1):
        if not text.strip():
            continue
        if lines == MAX_LINES:
            raise _bad(number, f"more than {MAX_LINES} requests")
        if len(text) > parts.settings.gateway.max_body_bytes:
            raise _bad(number, f"longer than {parts.settings.gateway.max_body_bytes} bytes")
        line = _read_line(text, number)
        endpoint = _checked_endpoint(line, uploader.key, number)
        endpoints.add(endpoint.name)
        name = field(line.body, "model", str, "")
        if public and name != public:
            raise _bad(number, f"model {name[:80]!r}: all lines of a file must use one model")
        if not public:
            public, there = name, _model_at(name, uploader.key, parts, upstream, number)
        for one in references(endpoint.kind, line.body):
            named_objects.setdefault(
                (one.what, one.id), one._replace(field=f"file: line {number}: {one.field}")
            )
            if len(named_objects) > MOST:
                raise _bad(number, f"the file names more than {MOST} objects")
        fields: Fields = line.body
        if guard is not None:
            fields = (await guard.request(endpoint.kind, fields, uploader.tenant)).fields
            named = {"custom_id": raw(line.custom_id)}
            if (await guard.request("batches", named, uploader.tenant)).fields != named:
                raise _bad(number, "custom_id contains what this key's policy blocks")
        if takes_salt(keeper, endpoint.kind):
            fields = salted(fields, fields, uploader.tenant, parts.catalog.find(public).config)
        used = _most_used(endpoint.kind, line, len(text), parts, number)
        most.tokens_in += used.tokens_in
        most.tokens_out += used.tokens_out
        cost_pusd += parts.prices.cost(public, upstream, there, used)[0]
        line.body = {**fields, "model": raw(there)}
        out.write(_encoder.encode(line) + b"\n")
        lines += 1
    if not lines:
        raise BadRequest("file: contains no requests", param="file")
    meta = BatchMeta(
        public, there, tuple(sorted(endpoints)), lines, most.tokens_in, most.tokens_out, cost_pusd
    )
    return BatchFile(meta, list(named_objects.values()))


def lines_of(path: str, begin: int, end: int, longest: int) -> Iterator[bytes]:
    """The lines of a part of a file, one at a time; a line that is too long has `longest` + 1 bytes."""
    with open(path, "rb") as file:
        file.seek(begin)
        while begin < end:
            line = file.readline(min(longest + 2, end - begin))
            if not line:
                return
            begin += len(line)
            yield line.removesuffix(b"\n")


def _most_used(kind: str, line: _Line, line_bytes: int, parts: BatchParts, number: int) -> Usage:
    """The line's estimated usage: a batch reserves the sum over its lines."""
    try:
        most = most_used(kind, line.body, line_bytes, parts.settings.gateway.output_estimate)
    except BadRequest as error:
        raise _bad(number, error.message) from None
    return Usage(tokens_in=most.tokens_in, tokens_out=most.tokens_out)


def _read_line(text: bytes, number: int) -> _Line:
    try:
        line = _decoder.decode(text)
        check_names(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, BadRequest) as error:
        raise _bad(number, str(error)) from None
    return line


def _checked_endpoint(line: _Line, key: Key, number: int) -> Endpoint:
    place = find(line.method, line.url)
    if not isinstance(place, Place) or place.endpoint.kind not in BATCHED:
        raise _bad(number, f"url {line.url[:80]!r} is not available in a batch")
    if key.endpoints and place.endpoint.name not in key.endpoints:
        raise Forbidden(
            f"file: line {number}: this key may not use the endpoint {place.endpoint.name!r}",
            code="endpoint_not_allowed",
        )
    return place.endpoint


def _model_at(name: str, key: Key, parts: BatchParts, upstream: str, number: int) -> str:
    """The model's name at the upstream that stores batches."""
    if not allows(key.models, name):
        raise Forbidden(
            f"file: line {number}: this key may not use the model {name[:80]!r}", code="model_not_allowed"
        )
    if name in parts.catalog.routes:
        raise _bad(number, f"{name!r} is a route; name a model in a batch")
    for target in parts.catalog.find(name).targets:
        if target.upstream == upstream:
            return target.model
    raise _bad(number, f"the upstream for batches does not serve the model {name[:80]!r}")


def _bad(number: int, what: str) -> BadRequest:
    return BadRequest(f"file: line {number}: {what}", param="file")
