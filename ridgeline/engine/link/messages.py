"""Messages between the server (the front) and the engine process: frozen types, msgpack, length-prefixed.

Requests and results are the engine's own dataclasses; these structs are their envelopes.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from ridgeline.engine.errors import EngineError, InvalidRequest, QueueFull
from ridgeline.engine.schedule.request import Request
from ridgeline.engine.schedule.step import SeqDelta
from ridgeline.models.files.generation_config import NO_DEFAULTS, SamplingDefaults
from ridgeline.telemetry.stats import EngineStats, StepRecord

FRAME_HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: run this request. Answered by Outputs with its deltas, or by Refused."""

    request: Request


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Front → encoder engine: compute these texts. Answered by one or more Embedded, or by Refused.

    want: a vector per text, a vector per token, or (for a cross-encoder) a score per text.
    """

    request_id: str
    tokens: bytes  # int32, texts concatenated
    lengths: list[int]  # of the texts, in tokens
    types: bytes = b""  # one per token; empty: all 0
    want: Literal["vector", "tokens", "score"] = "vector"
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: abort this request, or one sample of it.

    Answered by the deltas of its end, unless it had already ended.
    """

    request_id: str
    index: int | None = None


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: answered by Pong from the engine's own loop, so an answer means progress."""

    id: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: answered by Beating at once, also in the middle of a step."""

    id: int


class DumpSteps(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: answered by StepDump, with the steps after number `since`."""

    id: int
    since: int = -1


class CountExperts(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: answered by ExpertsCounted."""

    id: int


class WatchPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: send PrefixChanges from now on, first with all cached blocks; or stop."""

    watch: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Front → engine: stop the loop and exit with status 0."""


ToEngine = Submit | Embed | Abort | Ping | Beat | DumpSteps | CountExperts | WatchPrefixes | Stop


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Engine → front, once per connection: the engine is ready, with its capabilities."""

    pid: int
    model: str
    backend: str
    max_context: int
    max_running: int
    kv_tokens: int
    vocab_size: int
    block_size: int
    seconds: dict[str, float]  # start-up budget: import, weights, warm-up, …
    bytes: dict[str, int]  # memory receipt: weights, kv, rest
    limits: dict[str, float]  # physical limits to compare figures with; empty if unknown
    notes: tuple[str, ...] = ()  # why this backend, what a setting costs; for the start-up message
    task: Literal["generate", "embed"] = "generate"
    vector_size: int = 0  # encoders only
    sampling: SamplingDefaults = NO_DEFAULTS  # for requests that do not set them
    scores_pairs: bool = False  # a cross-encoder: trained to score pairs of texts
    counts_experts: bool = False  # the model has routed experts, and the backend counts their tokens
    files: str = ""  # names the content of the model's files
    prefix_salt: str = ""  # of the hashes in PrefixChanges


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: one message per step: everything the step added, and the engine's statistics."""

    deltas: list[SeqDelta]
    stats: EngineStats


class Embedded(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: some rows of an Embed's answer, in any order; complete when all rows have arrived."""

    request_id: str
    row: int  # index of the first row
    values: bytes  # float32, rows concatenated
    stats: EngineStats


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the request was rejected. kind: 'invalid' or 'full'; 'failed' if computing its texts
    failed."""

    request_id: str
    kind: str
    field: str = ""
    message: str = ""
    waiting: int = 0
    retry_after_s: float = 0.0


class Pong(msgspec.Struct, frozen=True, tag=True):
    id: int
    stats: EngineStats


class Beating(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: the process runs. It says nothing of progress: a step may never end."""

    id: int
    step_s: float  # age of the step under way; 0: none is


class StepDump(msgspec.Struct, frozen=True, tag=True):
    id: int
    steps: list[StepRecord]


class ExpertsCounted(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: for each layer with experts, the tokens that chose each of them since the start."""

    id: int
    tokens: dict[int, list[int]]


class PrefixChanges(msgspec.Struct, frozen=True, tag=True):
    """Engine → front: hashes of KV blocks, each of HASH_BYTES, that entered or left the prefix cache.

    whole: `stored` is everything that is cached now
    """

    stored: bytes
    removed: bytes = b""
    whole: bool = False


Question = Ping | Beat | DumpSteps | CountExperts
Answer = Pong | Beating | StepDump | ExpertsCounted
ToFront = Hello | Outputs | Embedded | Refused | Pong | Beating | StepDump | ExpertsCounted | PrefixChanges


def refusal(request_id: str, error: EngineError) -> Refused:
    """The message that rejects a request for this error; other errors are not the request's."""
    match error:
        case QueueFull():
            return Refused(request_id, "full", waiting=error.waiting, retry_after_s=error.retry_after_s)
        case InvalidRequest():
            return Refused(request_id, "invalid", error.field, error.message)
    raise error


_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToEngine | ToFront) -> bytes:
    """The message in wire format: four bytes of length, then msgpack."""
    body = _encoder.encode(message)
    return FRAME_HEADER.pack(len(body)) + body


def decode_to_engine(body: bytes | bytearray | memoryview) -> ToEngine:
    return _to_engine.decode(body)


def decode_to_front(body: bytes | bytearray | memoryview) -> ToFront:
    return _to_front.decode(body)
