"""A JSON body as top-level fields whose values are still the client's bytes.

Only changed fields are encoded again, so a large body costs a copy and not a parse; and an upstream reads
the same values that were checked here, even of duplicate fields. Raises InvalidBody, which names the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from ridgeline.proxy.errors import InvalidBody

Fields = dict[str, msgspec.Raw]
MAX_FIELDS = 1000
MAX_OBJECT = 64 << 10  # bytes of a field that is decoded, such as stream_options
T = TypeVar("T")

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
_values: dict[Any, msgspec.json.Decoder[Any]] = {}


# Fields that a gateway or a router reads: for routing, limits, guards, caches, prices, the answer's form.
READ_HERE = frozenset((
    "model", "stream", "stream_options", "include_usage", "continuous_usage_stats", "stream_format",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "logprobs", "top_logprobs",
    "messages", "system", "prompt", "suffix", "input", "instructions", "tools", "tool_choice", "functions",
    "function_call", "documents", "query", "queries", "text", "texts", "text_1", "text_2",
    "store", "background", "conversation", "previous_response_id", "input_file_id", "metadata", "user",
    "temperature", "top_p", "seed", "thinking", "reasoning", "response_format", "voice", "cache_salt",
))  # fmt: skip


def read_fields(body: bytes) -> Fields:
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"the body is not a JSON object: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidBody("the body is nested too deeply", code="invalid_json") from None
    if len(fields) > MAX_FIELDS:
        raise InvalidBody(f"the body has {len(fields)} fields; no request has more than {MAX_FIELDS}")
    check_names(fields)
    return fields


def check_names(fields: Iterable[str], within: str = "") -> None:
    """InvalidBody for a name that an upstream may take for a field of READ_HERE: Go's encoding/json ignores
    case, and takes ſ for s and the Kelvin sign for k.
    """
    for name in fields:
        if (
            not (name.isascii() and name.islower())
            and (known := name.casefold()) in READ_HERE
            and name != known
        ):
            full = within + name
            raise InvalidBody(f"{full}: write {known!r}, in lower case", code="invalid_field", param=full)


def field(fields: Fields, name: str, kind: type[T], default: T) -> T:
    """One field's value; InvalidBody with its name if it has a wrong type. null means the default."""
    raw = fields.get(name)
    if raw is None:
        return default
    if kind is dict and memoryview(raw).nbytes > MAX_OBJECT:
        raise InvalidBody(f"{name}: larger than {MAX_OBJECT} bytes", param=name)
    decoder = _values.get(kind)
    if decoder is None:
        decoder = _values[kind] = msgspec.json.Decoder(kind | None)
    try:
        value = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"{name}: {error}", code="invalid_type", param=name) from None
    return default if value is None else value


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


def write_fields(fields: Fields) -> bytes:
    return _encoder.encode(fields)
