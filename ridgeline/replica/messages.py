"""The lines of a replica's feed, GET /replica/feed: NDJSON, one message a line, told apart by `type`.

A feed begins with Started and Snapshot (or, after a reconnect with ?epoch=…&after=…, with the events missed);
then prefix events as they happen and a Load at least every LOAD_EVERY_S. `seq` counts prefix events: a reader
that finds a gap reconnects and gets a Snapshot. Another `epoch` means another process: its cache is empty.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LOAD_EVERY_S = 0.25
FEED_PATH = "/replica/feed"


class Started(msgspec.Struct, frozen=True, tag_field="type", tag="started"):
    """The first line. segments: seconds of each part of the start, in order."""

    epoch: str  # random, one for each server process
    pid: int
    model: str
    names: tuple[str, ...]
    version: str  # fingerprint of weights and settings: KV of another version is refused
    max_running: int
    kv_blocks: int
    block_size: int
    segments: dict[str, float]
    weight_bytes: int = 0
    limits: dict[str, float] = {}  # physical limits, as in /v1/models


class Snapshot(msgspec.Struct, frozen=True, tag_field="type", tag="snapshot"):
    """Every prompt block in the cache, after event `seq`."""

    seq: int
    blocks: tuple[int, ...]


class Stored(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """Blocks of one prompt, first to last, that are now in the cache."""

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
    steps: int  # a count that stands still while requests run means no progress
    accepted: int  # requests
    ended: int
    prompt_tokens: int
    output_tokens: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int
    adapters: tuple[str, ...] = ()  # loaded now


FeedLine = Started | Snapshot | Stored | Removed | Load
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[FeedLine] = msgspec.json.Decoder(FeedLine)


def encode_line(line: FeedLine) -> bytes:
    return _encoder.encode(line) + b"\n"


def decode_line(line: bytes) -> FeedLine:
    return _decoder.decode(line)
