"""UsageReader: reads a stream's usage from its bytes as they pass.

The pipeline feeds it everything that an upstream streams and sends on what it returns. Most events only pass
a few byte searches: only events that may hold counts, an error or the end are decoded.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from ridgeline.gateway.accounting.token_formula import weight
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import Fields, field, raw
from ridgeline.gateway.dialects.counts import Counts
from ridgeline.gateway.dialects.families import shape_of
from ridgeline.gateway.dialects.streams.events import (
    BOUNDARY,
    MAX_EVENT_BYTES,
    end_of_last,
    payload_of,
    split,
)

# Hidden from the client because only the gateway asked for it: the running counts in every chunk, or these
# and the final chunk of counts.
Hide = Literal["", "running", "all"]

_COUNTS = re.compile(rb'"usage"\s*:\s*\{')
_RESPONSE_NEWS = re.compile(rb'"type"\s*:\s*"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"')
# Occurs once in every event with text, and never inside the text: its quotes would be escaped.
_ORDINARY = {"chat": b'"choices"', "completions": b'"choices"', "messages": b'"content_block_'}
_USAGE_VALUE = re.compile(rb'"usage"\s*:\s*\{(?:[^{}]++|\{[^{}]*+\})*+\}')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
# The texts that an event adds to an answer. A response's last events repeat them under other names.
_NEW_TEXT = {
    "messages": rb"text|thinking|partial_json",
    "responses": rb"delta",
    "chat": rb"content|reasoning_content|reasoning|refusal|arguments",
    "completions": rb"text",
}
_WEIGHED_AT_ONCE = 64  # texts
_new_texts = {
    shape: re.compile(rb'"(?:' + names + rb')"\s*:\s*"((?:[^"\\]++|\\.)*+)')
    for shape, names in _NEW_TEXT.items()
}


class _Failure(msgspec.Struct):
    type: str | None = None
    code: str | int | None = None


class _Inner(msgspec.Struct):
    usage: Counts | None = None
    error: _Failure | None = None


class _Event(msgspec.Struct):
    """The fields of an event of any family that matter here."""

    type: str = ""
    code: str | int | None = None
    usage: Counts | None = None
    choices: list[msgspec.Raw] | None = None
    error: _Failure | str | None = None
    message: _Inner | str | None = None
    response: _Inner | None = None


_events = msgspec.json.Decoder(_Event)


class UsageReader:
    """`family`: of the input bytes. `hide`: the result of `ask_for_usage`. `count_texts`: estimate the
    answer's tokens from its texts, for a stream that may end without counts.
    """

    def __init__(self, kind: str, family: str, hide: Hide = "", *, count_texts: bool = True) -> None:
        self._shape = shape_of(kind, family)
        self._is_message = self._shape == "messages"
        self._is_openai = self._shape not in ("messages", "responses")
        self._ordinary = _ORDINARY.get(self._shape, b"")
        self._may_tell = None if self._is_message else (_COUNTS if self._is_openai else _RESPONSE_NEWS).search
        self._hide = hide
        self._rest = bytearray()
        self._latest = b""  # the last chunk with counts, not yet decoded
        self._counts: Counts | None = None
        self._is_final = False
        self._new_texts = _new_texts.get(self._shape) if count_texts else None
        self._unweighed: list[bytes] = []
        self._weight = 0.0  # tokens of the texts so far, by `estimate.weight`
        self.texts: list[bytes] | None = None  # the texts, if they are collected
        self.events = 0  # with data; comments do not count
        self.done = False  # the final event of a stream of this kind arrived
        self.error = ""  # code or type of an error in the stream

    def feed(self, data: bytes) -> bytes:
        """Takes more of the stream; returns the bytes to send on. An event is held back until it is complete
        only if something may have to be hidden.
        """
        if self._rest or data[-2:] != b"\n\n":
            return self._feed_piece(data)
        # The common case: whole events with only text.
        events = data.count(b"\ndata:") + (data[:5] == b"data:")
        self.events += events
        if self._ordinary and data.count(self._ordinary) != events:
            return self._told(data)
        if self._may_tell is not None and self._may_tell(data) is not None:
            return self._told(data)
        if self._new_texts is not None:
            self._weigh(data)
        return data

    def finish(self) -> bytes:
        """The stream has ended: returns the held bytes of an incomplete event."""
        rest = bytes(self._rest)
        self._rest.clear()
        if rest:
            rest = self._scan(rest)
        return rest if self._hide else b""

    @property
    def usage(self) -> Usage | None:
        """The usage so far: as the upstream reported it for a complete stream, else an estimate from the
        texts, with the reported input. A count of 0 then means unknown.
        """
        if self._latest:
            self._decode(self._latest)
            self._latest = b""
        if self._counts is None:
            if not self.events:
                return None
            return Usage(tokens_out=self._counted(), source="estimated")
        usage = self._counts.usage()
        if not self._is_final:
            usage.tokens_out = max(usage.tokens_out, self._counted())
            usage.source = "estimated"
        return usage

    def _counted(self) -> int:
        self._weigh_all()
        weighed = math.ceil(self._weight)
        if self._is_message:
            return weighed
        return max(self.events - 1, weighed)  # one token each, and the first one opens the answer; or several

    def _feed_piece(self, data: bytes) -> bytes:
        rest = self._rest
        seen = max(len(rest) - 2, 0)
        rest += data
        end = end_of_last(rest, seen)
        if end < 0:
            held = b""
            if len(rest) > MAX_EVENT_BYTES:  # relayed unread
                held = bytes(rest)
                rest.clear()
            return held if self._hide else data
        whole = bytes(rest[:end])
        del rest[:end]
        out = self._scan(whole)
        return out if self._hide else data

    def _scan(self, whole: bytes) -> bytes:
        """`feed` for events that arrive in several pieces."""
        self.events += whole.count(b"\ndata:") + (whole[:5] == b"data:")
        return self._told(whole)

    def _told(self, whole: bytes) -> bytes:
        """Decodes events that may matter; returns the bytes to send on."""
        if self._new_texts is not None:
            self._weigh(whole)
        if self._is_openai:
            return self._told_by_chunks(whole)
        self._read(whole)
        return whole

    def _told_by_chunks(self, whole: bytes) -> bytes:
        """Every chunk may hold running counts: the last ones win, and are decoded on demand."""
        done = whole.rfind(b"[DONE]")  # of the last one: a text may hold the word
        if done >= 0 and whole[:done].endswith((b"data: ", b"data:")):
            self.done = True
        if b'"error"' in whole:
            self._read(whole)
        if _COUNTS.search(whole) is None:
            return whole
        # The last event that may hold them, in most streams the only one; else search all.
        begin = whole.rfind(b"\n\n", 0, whole.rfind(b'"usage"')) + 2
        event = split(whole[begin:])[0] if begin >= 2 else b""
        if _COUNTS.search(event) is None:
            event = next(one for one in reversed(split(whole)) if _COUNTS.search(one) is not None)
        self._latest = payload_of(event)
        return self._hidden(whole) if self._hide else whole

    def _weigh(self, whole: bytes) -> None:
        assert self._new_texts is not None
        texts = self._new_texts.findall(whole)
        self._unweighed += texts
        if len(self._unweighed) >= _WEIGHED_AT_ONCE:
            self._weigh_all()
        if self.texts is not None:
            self.texts += texts

    def _weigh_all(self) -> None:
        self._weight += weight(b"".join(self._unweighed))
        self._unweighed.clear()

    def _read(self, whole: bytes) -> None:
        for event in split(whole):
            payload = payload_of(event)
            if payload == b"[DONE]":
                self.done = True
            elif payload[:1] == b"{":
                self._decode(payload)

    def _decode(self, payload: bytes) -> None:
        try:
            event = _events.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return  # unknown shape: sent on without reading
        self._take(event)

    def _take(self, event: _Event) -> None:
        told = _told(event.usage)
        if self._is_message:
            if event.type == "message_start" and isinstance(event.message, _Inner):
                told = _told(event.message.usage)
            self._is_final |= event.type == "message_delta" and told is not None
            self.done |= event.type == "message_stop"
        elif self._shape == "responses" and event.response is not None:
            told = _told(event.response.usage)
            self._is_final |= told is not None
            self.done = True
            if event.type == "response.failed" and event.response.error is not None:
                self.error = _named(event.response.error)
        elif told is not None:
            self._is_final = True  # running counts are reported by the upstream too
        if told is not None:
            known = self._counts if self._is_message else None
            self._counts = told if known is None else known.updated(told)
        if event.error is not None:
            self.error = _named(event.error)
        elif event.type == "error":
            self.error = str(event.code or "error")

    def _hidden(self, whole: bytes) -> bytes:
        counts = _COUNTS.search(whole)
        if counts is None:
            return whole
        # Skip everything before the first event with counts: nearly all of a fast stream.
        place = whole.rfind(b"\n\n", 0, counts.start()) + 2
        place = place if place >= 2 else 0
        kept = [whole[:place]]
        for boundary in BOUNDARY.finditer(whole, place):
            event, place = whole[place : boundary.end()], boundary.end()
            if _COUNTS.search(event) is not None:
                is_last = _NO_CHOICES.search(event) is not None
                if is_last and self._hide == "all":
                    continue
                if not is_last:
                    event = _USAGE_VALUE.sub(b'"usage":null', event)
            kept.append(event)
        kept.append(whole[place:])
        return b"".join(kept)


def _told(counts: Counts | None) -> Counts | None:
    return counts if counts is not None and counts.tells else None


def _named(error: _Failure | str) -> str:
    if isinstance(error, str):
        return "error"
    return str(error.code or error.type or "error")


def ask_for_usage(kind: str, fields: Fields, *, running: bool = False) -> Hide:
    """Make an OpenAI upstream's stream report its counts. Returns what to hide from the client: nothing if
    the client asked for counts. `running`: in every chunk, for servers that support the option.

    The options are encoded again: of a duplicate name, the upstream then reads the value read here.
    """
    if kind not in ("chat", "completions") or not field(fields, "stream", bool, False):
        return ""
    options: dict[str, Any] = field(fields, "stream_options", dict, {})
    wanted: dict[str, Any] = {**options, "include_usage": True}
    if running:
        wanted["continuous_usage_stats"] = True
    fields["stream_options"] = raw(wanted)
    if options.get("include_usage") and (not running or options.get("continuous_usage_stats")):
        return ""
    return "running" if options.get("include_usage") else "all"
