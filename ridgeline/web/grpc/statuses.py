"""Converts an error of the HTTP API to a gRPC status with details, as google.rpc defines them.

The status code comes from the HTTP status; an error inside a stream has none, so its code or type decides.
Details: ErrorInfo (the API's code), BadRequest (the field), RetryInfo (when to send it again).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from ridgeline.web.grpc.fields import FieldNames

DOMAIN = "ridgeline"
LONGEST_TEXT = 2000  # trailers are bounded: clients refuse more than 8 KiB of them by default

_Code = grpc.StatusCode
_BY_STATUS = {
    400: _Code.INVALID_ARGUMENT,
    401: _Code.UNAUTHENTICATED,
    403: _Code.PERMISSION_DENIED,
    404: _Code.NOT_FOUND,
    405: _Code.UNIMPLEMENTED,
    408: _Code.DEADLINE_EXCEEDED,
    409: _Code.ABORTED,
    413: _Code.RESOURCE_EXHAUSTED,
    422: _Code.FAILED_PRECONDITION,  # the model's answer cannot be returned: sending it again does not help
    429: _Code.RESOURCE_EXHAUSTED,
    499: _Code.CANCELLED,
    501: _Code.UNIMPLEMENTED,
    502: _Code.UNAVAILABLE,
    503: _Code.UNAVAILABLE,
    504: _Code.DEADLINE_EXCEEDED,
}
# Codes and types of errors inside a stream.
_BY_NAME = {
    "engine_died": 503,
    "not_ready": 503,
    "draining": 503,
    "shutting_down": 503,
    "timeout": 504,
    "upstream_timeout": 504,
    "schema_violation": 422,
    "grammar_too_complex": 422,
    "invalid_api_key": 401,
    "revoked_api_key": 401,
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "service_unavailable_error": 503,
    "upstream_error": 502,
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """The object `error` of a body or an event; other upstreams leave some fields out."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class RpcError(Exception):
    """Ends the RPC with this status."""

    code: Any  # a grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...] = ()


def broken_off() -> RpcError:
    """The answer is incomplete: never reported as success."""
    return RpcError(_Code.UNAVAILABLE, "the answer ended before it was complete; send the request again")


def refusal(status: int, body: bytes, headers: Mapping[str, str], names: FieldNames) -> RpcError:
    """The status for an HTTP error answer."""
    if not status:
        return broken_off()
    try:
        told = msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = ErrorDetail(f"the HTTP API answered with status {status}")
    return _error(status, told, names, headers.get("retry-after", ""))


def failure(told: ErrorDetail, names: FieldNames) -> RpcError:
    """The status for an error event in a stream."""
    status = next((_BY_NAME[name] for name in (told.code, told.type) if name in _BY_NAME), 500)
    return _error(status, told, names, "")


def _error(status: int, told: ErrorDetail, names: FieldNames, retry_after: str) -> RpcError:
    code = _BY_STATUS.get(status, _Code.INVALID_ARGUMENT if 400 <= status < 500 else _Code.INTERNAL)
    message = names.in_message(told.message, told.param)[:LONGEST_TEXT]
    field = None if told.param is None else names.of(told.param)
    retry_s = int(retry_after) if retry_after.isdecimal() and len(retry_after) < 10 else None
    details: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=str(told.code or told.type or status), domain=DOMAIN, metadata={"http_status": str(status)}
        )
    ]
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    trailers: list[tuple[str, str | bytes]] = []
    if retry_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = retry_s
        details.append(retry)
        # For a client with a retry policy; the number below is for people.
        trailers += [("grpc-retry-pushback-ms", str(1000 * retry_s)), ("retry-after", str(retry_s))]
    rich = status_pb2.Status(code=code.value[0], message=message, details=[_packed(one) for one in details])
    trailers.append(("grpc-status-details-bin", rich.SerializeToString()))
    return RpcError(code, message, tuple(trailers))


def _packed(message: Any) -> Any:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
