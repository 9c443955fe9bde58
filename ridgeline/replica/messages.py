"""The lines of a replica's feed, GET /replica/feed: NDJSON, one message a line, told apart by `type`.

A feed begins with Started and Snapshot (or, after a reconnect with ?epoch=…&after=…, with the events missed);
then prefix events as they happen and Load lines at the pace of LoadPace. `seq` counts prefix events: a reader
that finds a gap reconnects and gets a Snapshot. A new `epoch` means a new process with an empty cache.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LONGEST_STEP_S = 60.0  # a longer step is taken for one that never ends
FEED_PATH = "/replica/feed"
MOST_ADOPTED = 4096  # ids of adopted responses that are kept, the newest


class CacheFrom(msgspec.Struct, frozen=True):
    """A cache that shortens the start: packed weights or kernels. source: as in WeightsFrom, or empty."""

    kind: str
    source: str
    bytes: int = 0
    seconds: float = 0.0
    refused: str = ""  # why the one that was offered is not used


class WeightsFrom(msgspec.Struct, frozen=True):
    """Where the weights came from: local, `peer NAME`, `store URL` or hub. bytes, seconds: transferred."""

    source: str
    bytes: int = 0
    seconds: float = 0.0
    limit_bytes_per_s: float | None = None  # of the link, where it is known
    cache: CacheFrom | None = None


class Started(msgspec.Struct, frozen=True, tag_field="type", tag="started"):
    """The first line. segments: seconds of each part of the start, in order."""

    epoch: str  # random, one for each server process
    pid: int
    model: str
    names: tuple[str, ...]
    version: str  # fingerprint of weights and settings
    max_running: int
    kv_blocks: int
    block_size: int
    segments: dict[str, float]
    weight_bytes: int = 0
    limits: dict[str, float] = {}  # physical limits, as in /v1/models
    weights: WeightsFrom | None = None
    hardware: str = ""  # the processor's or the GPU's name
    adopted: tuple[str, ...] = ()  # responses that another server began and this one stores


class Snapshot(msgspec.Struct, frozen=True, tag_field="type", tag="snapshot"):
    """Every prompt block in the cache, after event `seq`."""

    seq: int
    blocks: tuple[int, ...]


class Stored(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """Blocks of one prompt, in order, that are now in the cache."""

    seq: int
    blocks: tuple[int, ...]


class Removed(msgspec.Struct, frozen=True, tag_field="type", tag="removed"):
    seq: int
    blocks: tuple[int, ...]


class Load(msgspec.Struct, frozen=True, tag_field="type", tag="load"):
    """Gauges now, and counters since the start."""

    seq: int
    state: Literal["starting", "ready", "draining"]
    running: int
    waiting: int
    queued_tokens: int  # prompt tokens of accepted requests that are not computed yet
    kv_blocks_held: int
    kv_blocks_cached: int
    steps: int  # a count that does not rise while requests run means no progress
    accepted: int  # requests
    ended: int
    prompt_tokens: int
    output_tokens: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int
    adapters: tuple[str, ...] = ()  # loaded now
    beats: int = 0  # answers of the engine's process, also in the middle of a step
    step_s: float = 0.0  # age of the step under way at the last beat; 0: none was
    turns: int = 0  # answers of the engine's loop, between two steps
    adopted: tuple[str, ...] = ()  # as in Started: those since the line before
    busy_s: float = 0.0  # seconds of the steps that `steps` counts
    prefill_tokens: int = 0  # prompt tokens that these steps computed


def makes_progress(before: Load | None, line: Load, longest_step_s: float) -> bool:
    """Whether the replica has moved since the line before, or is idle.

    A long step counts while the engine's process answers, up to `longest_step_s`: a process that was stopped
    does not answer, and a step that never ends is none.
    """
    if before is None or line.steps != before.steps:
        return True
    # The engine's own figures are as old as its last answer: a request in its first step is not in them.
    if not (line.running or line.waiting) and (line.accepted == line.ended or line.turns != before.turns):
        return True
    return line.beats != before.beats and 0.0 < line.step_s <= longest_step_s


FeedLine = Started | Snapshot | Stored | Removed | Load
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[FeedLine] = msgspec.json.Decoder(FeedLine)


def encode_line(line: FeedLine) -> bytes:
    return _encoder.encode(line) + b"\n"


def decode_line(line: bytes) -> FeedLine:
    return _decoder.decode(line)
