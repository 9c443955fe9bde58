"""Resumable streams: the markers between a stream's events, and the state from which a peer continues it.

A server writes each group of events after a marker line, `:r {json}` (a comment for SSE clients). The router
reads groups with a GroupReader, forwards only complete ones and keeps a ResumeState. If the replica dies, the
router sends the request again with that state, and a peer writes the missing events. Pure data.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

RESUMABLE_HEADER = "x-ridgeline-resumable"  # request: write markers; response: this stream has them
RESUME_HEADER = "x-ridgeline-resume"  # request: the body has the field below
RESUME_FIELD = "ridgeline_resume"
ENGINE_DIED_HEADER = "x-ridgeline-engine-died"  # response, 503: the request was lost with its engine
MARK = b":r "  # three bytes
LONGEST_MARKER = 1 << 20


class BrokenMarkers(ValueError):
    """The stream does not consist of marked groups."""


class Head(msgspec.Struct, frozen=True):
    """The values that all events of a stream share. The first marker has it."""

    id: str  # id of the request, from which the ids in the events are made
    created: int
    seed: int  # the client's, or the one drawn in its place
    version: str  # version of model, software and settings: another version cannot continue the stream
    epoch: str  # id of the server process
    salt: str = ""  # salt of the ids that are made while the stream runs


class Finish(msgspec.Struct, frozen=True):
    """How the engine ended a choice. stop: the stop string or the token that ended it."""

    reason: str
    stop: str | int | None = None


class Failure(msgspec.Struct, frozen=True):
    """The group is an error event. elsewhere: a peer may continue the stream instead."""

    status: int
    code: str
    elsewhere: bool


class Tokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of a choice, and its end."""

    choice: int
    ids: list[int]
    finish: Finish | None = None


class Marker(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The marker of one group. Its tokens are those of its events, and earlier ones that showed no text."""

    n: Annotated[int, msgspec.Meta(ge=0)]  # bytes of the events that follow
    t: list[Tokens] = []
    c: int = 0  # characters shown since the beginning, in all choices
    calls: list[tuple[int, str]] = []  # choice and id of each tool call that begins
    cached: dict[int, int] = {}  # prompt number → its tokens found in the prefix cache
    head: Head | None = None
    end: bool = False  # the stream is complete
    failure: Failure | None = None


class Output(msgspec.Struct):
    """The part of one choice that the client has. bursts: place and number of tokens that came together."""

    tokens: list[int] = []
    bursts: list[tuple[int, int]] = []
    finish: Finish | None = None
    calls: list[str] = []

    def add(self, tokens: Tokens) -> None:
        ids = tokens.ids
        if len(ids) > 1:
            self.bursts.append((len(self.tokens), len(ids)))
        self.tokens += ids
        if tokens.finish is not None:
            self.finish = tokens.finish

    def chunks(self) -> list[list[int]]:
        """The tokens in the groups in which they came."""
        sizes, chunks, place = dict(self.bursts), list[list[int]](), 0
        while place < len(self.tokens):
            size = max(1, sizes.get(place, 1))
            chunks.append(self.tokens[place : place + size])
            place += size
        return chunks


class ResumeState(msgspec.Struct):
    """What a peer needs to continue a stream, besides the request."""

    head: Head | None = None
    outputs: dict[int, Output] = {}  # by choice
    characters: int = 0
    cached: dict[int, int] = {}
    ended: bool = False
    failure: Failure | None = None

    def add(self, marker: Marker) -> None:
        """Add a group whose events the client has."""
        for tokens in marker.t:
            output = self.outputs.get(tokens.choice)
            if output is None:
                output = self.outputs[tokens.choice] = Output()
            output.add(tokens)
        if marker.c > self.characters:
            self.characters = marker.c
        if marker.head is not None and self.head is None:
            self.head = marker.head
        if marker.calls:
            for choice, id in marker.calls:
                self.outputs.setdefault(choice, Output()).calls.append(id)
        if marker.cached:
            self.cached.update(marker.cached)
        self.ended = self.ended or marker.end
        self.failure = marker.failure

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs.values())

    @property
    def may_continue(self) -> bool:
        """Whether a peer can take over: the head has arrived, and the end has not."""
        refused = self.failure is not None and not self.failure.elsewhere
        return self.head is not None and not self.ended and not refused


class Group(msgspec.Struct, frozen=True, gc=False):
    """One complete group: the bytes for the client."""

    marker: Marker
    events: bytes

    @property
    def tokens(self) -> list[Tokens]:
        return self.marker.t


class GroupReader:
    """Splits a stream into complete groups, however its bytes are divided.

    An incomplete group stays in the buffer: if the replica dies, it was never sent. The usual read holds
    complete groups: it is split in place, without the buffer.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._marker: Marker | None = None  # of the group at the start of the buffer

    def feed(self, data: bytes) -> list[Group]:
        """The groups that these bytes complete. Raises BrokenMarkers for a stream without markers."""
        marker = self._marker
        if self._buffer:
            joined = self._joined(data)
            if joined is None:
                return []
            data = joined
        groups, at, size = [], 0, len(data)
        while marker is not None or at < size:
            if marker is None:
                end = data.find(b"\n", at)
                if end < 0:
                    break
                if data[at : at + 3] != MARK:
                    raise _not_a_marker(data[at:])
                marker = decode_marker(data[at + 3 : end])
                at = end + 1
            end = at + marker.n
            if end > size:
                break
            groups.append(Group(marker, data[at:end]))
            marker, at = None, end
        self._marker = marker
        if at < size:
            self._keep(data[at:])
        return groups

    def _joined(self, data: bytes) -> bytes | None:
        """The buffer with these bytes; None if they complete nothing."""
        buffer, marker = self._buffer, self._marker
        if len(buffer) + len(data) < marker.n if marker is not None else b"\n" not in data:
            self._keep(data)
            return None
        buffer += data
        whole = bytes(buffer)
        buffer.clear()
        return whole

    def _keep(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        if self._marker is None:
            if not MARK.startswith(buffer[: len(MARK)]):
                raise _not_a_marker(buffer)
            if len(buffer) >= LONGEST_MARKER:
                raise BrokenMarkers(f"a marker has more than {LONGEST_MARKER} bytes")

    @property
    def incomplete_bytes(self) -> int:
        return len(self._buffer)


def _not_a_marker(data: bytes | bytearray) -> BrokenMarkers:
    return BrokenMarkers(f"expected a marker, got {bytes(data[:80])!r}")


_encoder = msgspec.json.Encoder()
_markers: msgspec.json.Decoder[Marker] = msgspec.json.Decoder(Marker)
_fields: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_states: msgspec.json.Decoder[ResumeState] = msgspec.json.Decoder(ResumeState)


def encode_group(marker: Marker, events: bytes) -> bytes:
    """Write the marker line and its events. `marker.n` must be their length."""
    if marker.n != len(events):
        raise ValueError(f"the marker announces {marker.n} bytes, but there are {len(events)}")
    return b"%b%b\n%b" % (MARK, _encoder.encode(marker), events)


def decode_marker(line: bytes) -> Marker:
    """Read the JSON of a marker line. Raises BrokenMarkers."""
    try:
        return _markers.decode(line)
    except msgspec.MsgspecError as error:
        raise BrokenMarkers(f"cannot read the marker {line[:80]!r}: {error}") from None


def with_state(body: bytes, state: ResumeState) -> bytes:
    """Add the state from which to continue to the request's JSON body."""
    fields: dict[str, Any] = {**_fields.decode(body), RESUME_FIELD: state}
    return _encoder.encode(fields)


def split_state(body: bytes) -> tuple[bytes, ResumeState]:
    """Split the client's body and the state. Raises ValueError if the state is missing or malformed."""
    fields = _fields.decode(body)
    raw = fields.pop(RESUME_FIELD, None)
    if raw is None:
        raise ValueError(f"{RESUME_FIELD}: this field is required")
    return _encoder.encode(fields), _states.decode(raw)
