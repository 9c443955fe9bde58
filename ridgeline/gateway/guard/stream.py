"""GuardedStream: changes the texts of a streamed answer in the client's dialect.

Server-sent events are assembled from pieces of any size. Each text that grows by deltas (a choice, a block,
a tool call's arguments) has its own channel; the text that a channel holds back comes with the event that
ends the text, or in an extra event right before it. No event is dropped or moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ridgeline.gateway.guard.errors import GuardFailed
from ridgeline.gateway.guard.json_text import TextChannel

Key = tuple[Any, ...]
Event = dict[str, Any]

LONGEST_EVENT = 32 * 2**20
MOST_CHANNELS = 4096
_END = re.compile(rb"\r?\n\r?\n")
_CHAT_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
_BLOCK_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_ARGUMENTS = ("response.function_call_arguments", "response.mcp_call_arguments")
_NO_TEXT = ("response.audio", "response.output_audio")

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Texts:
    """How a stream changes texts: made once per answer by `guards.py`."""

    def __init__(
        self,
        text: Callable[[], TextChannel],
        arguments: Callable[[], TextChannel],
        thinking: Callable[[], TextChannel],
        whole: Callable[[Any], Any],
        untouched: Callable[[bytes], bool],
        restart: Callable[[], None],
    ) -> None:
        self.text = text
        self.arguments = arguments
        self.thinking = thinking  # of Anthropic's blocks, which are signed
        self.whole = whole  # every string of a value
        self.untouched = untouched  # whether no channel would change these bytes of an event
        self.restart = restart  # a new piece: restarts the time limit


class GuardedStream:
    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._buffer = b""
        self._searched = 0  # no event ends before this offset
        self._channels: dict[Key, TextChannel] = {}
        self._flush: dict[Key, Callable[[str], Event]] = {}  # by channel: the event for held text
        self._shift = 0  # inserted events, in dialects that number them
        self._next = 0  # the number of the next event, in dialects that number them

    def feed(self, data: bytes) -> bytes:
        plain = not self._buffer and not self._flush and not self._shift and data.endswith(b"\n\n")
        if plain and self._texts.untouched(data):  # the common case
            return data
        self._texts.restart()
        self._buffer += data
        out = []
        start, at = 0, self._searched
        while (end := _END.search(self._buffer, at)) is not None:
            out.append(self._event(self._buffer[start : end.end()]))
            start = at = end.end()
        self._buffer = self._buffer[start:]
        self._searched = max(len(self._buffer) - 3, 0)
        if len(self._buffer) > LONGEST_EVENT:
            raise GuardFailed("an event of the answer exceeds the guard's size limit")
        return b"".join(out)

    def finish(self) -> bytes:
        """The rest, once the answer has ended."""
        self._texts.restart()
        rest, self._buffer = self._buffer, b""
        out = self._event(rest) if rest.strip() else rest
        return out + self._written(self._flushed(lambda key: True))

    def _event(self, raw: bytes) -> bytes:
        if not self._flush and not self._shift and self._texts.untouched(raw):
            return raw
        lines = raw.splitlines()
        data = b"\n".join(line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:"))
        if not data:
            return raw
        if data.strip() == b"[DONE]":
            return self._written(self._flushed(lambda key: True)) + raw
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise GuardFailed("an event of the answer is not valid JSON") from None
        before: list[Event] = []
        changed = self._guarded(event, before)
        number = event.get("sequence_number") if isinstance(event, dict) else None
        if isinstance(number, int):
            self._next = number + self._shift
        written = self._written(before)
        if isinstance(number, int):
            changed = {**changed, "sequence_number": self._next}
            self._next += 1
        if changed == event:
            return written + raw
        others = [line for line in lines if line and not line.startswith(b"data:")]
        return written + b"\n".join([*others, b"data: " + _encode(changed)]) + b"\n\n"

    def _guarded(self, event: Any, before: list[Event]) -> Any:
        """The changed event, and the events to insert before it."""
        if not isinstance(event, dict):
            return self._texts.whole(event)
        if isinstance(event.get("choices"), list):
            return self._chunk(event)
        kind = event.get("type")
        if isinstance(kind, str):
            if kind.startswith("content_block_") and isinstance(event.get("index"), int):
                return self._block(event, kind, before)
            if kind.startswith("response."):
                return self._response(event, kind, before)
            if kind == "message_stop":
                before += self._flushed(lambda key: True)
        return self._texts.whole(event)

    # ---- OpenAI: chat, completions ----

    def _chunk(self, event: Event) -> Event:
        head = {name: value for name, value in event.items() if name not in ("choices", "usage")}
        changed = self._texts.whole({name: value for name, value in event.items() if name != "choices"})
        choices = [self._choice(choice, head) for choice in event["choices"]]
        return {name: choices if name == "choices" else changed[name] for name in event}

    def _choice(self, choice: Any, head: Event) -> Any:
        if not isinstance(choice, dict):
            return self._texts.whole(choice)
        index = choice.get("index", 0)
        delta, text = choice.get("delta"), choice.get("text")
        parts = {name: value for name, value in choice.items() if name not in ("delta", "text")}
        out = self._texts.whole(parts)
        if isinstance(text, str):
            key = ("text", index)
            out["text"] = self._piece(key, text, lambda rest: _chunk_of(head, index, text=rest))
        if isinstance(delta, dict):
            out["delta"] = self._delta(delta, index, head)
        if choice.get("finish_reason") is not None:
            self._end_choice(out, index)
        return {name: out[name] for name in choice if name in out} | out

    def _delta(self, delta: Event, index: Any, head: Event) -> Event:
        out: Event = {}
        for name, value in delta.items():
            if name in _CHAT_TEXTS and isinstance(value, str):
                flush = _ChatFlush(head, index, name)
                out[name] = self._piece(("delta", index, name), value, flush)
            elif name == "tool_calls" and isinstance(value, list):
                out[name] = [self._call(call, index, place, head) for place, call in enumerate(value)]
            elif name == "function_call" and isinstance(value, dict):
                out[name] = self._function(value, ("function", index), lambda rest: _chunk_of(
                    head, index, delta={"function_call": {"arguments": rest}}
                ))  # fmt: skip
            else:
                out[name] = self._texts.whole({name: value})[name]
        return out

    def _call(self, call: Any, index: Any, place: int, head: Event) -> Any:
        if not isinstance(call, dict):
            return self._texts.whole(call)
        number = call.get("index", place)
        out = self._texts.whole(
            {name: value for name, value in call.items() if name not in ("function", "custom")}
        )
        if isinstance(call.get("function"), dict):
            flush = _CallFlush(head, index, number, "function", "arguments")
            out["function"] = self._function(call["function"], ("call", index, number), flush)
        if isinstance(call.get("custom"), dict):
            custom, flush = call["custom"], _CallFlush(head, index, number, "custom", "input")
            out["custom"] = self._texts.whole(
                {name: value for name, value in custom.items() if name != "input"}
            )
            if isinstance(custom.get("input"), str):
                out["custom"]["input"] = self._piece(("custom", index, number), custom["input"], flush)
        return out

    def _function(self, function: Event, key: Key, flush: Callable[[str], Event]) -> Event:
        out: Event = self._texts.whole(
            {name: value for name, value in function.items() if name != "arguments"}
        )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            out["arguments"] = self._piece(key, arguments, flush, self._texts.arguments)
        elif "arguments" in function:
            out["arguments"] = self._texts.whole({"arguments": arguments})["arguments"]
        return out

    def _end_choice(self, out: Event, index: Any) -> None:
        """The rest of a choice's texts goes into the chunk that ends it."""
        for chunk in self._flushed(lambda key: len(key) > 1 and key[1] == index):
            choice = chunk["choices"][0]
            if "text" in choice:
                out["text"] = (out.get("text") or "") + choice["text"]
            for name, value in (choice.get("delta") or {}).items():
                delta = out["delta"] = out.get("delta") or {}
                if isinstance(value, str):
                    delta[name] = (delta.get(name) or "") + value
                elif isinstance(value, list):
                    delta[name] = [*(delta.get(name) or []), *value]
                else:
                    held = delta.get(name) or {}
                    delta[name] = {**held, "arguments": (held.get("arguments") or "") + value["arguments"]}

    # ---- Anthropic: messages ----

    def _block(self, event: Event, kind: str, before: list[Event]) -> Event:
        index = event["index"]
        if kind == "content_block_stop":
            before += self._flushed(lambda key: key == ("block", index))
            return self._whole(event)
        if kind == "content_block_start":
            return self._begun(event, index)
        delta: Any = event.get("delta")
        name = _BLOCK_TEXTS.get(delta.get("type", "")) if isinstance(delta, dict) else None
        if kind != "content_block_delta" or name is None or not isinstance(delta.get(name), str):
            return self._whole(event)
        make = {"text": self._texts.text, "thinking": self._texts.thinking}.get(name, self._texts.arguments)
        flush = _BlockFlush(event, name)
        piece = self._piece(("block", index), delta[name], flush, make)
        return {**event, "delta": {**delta, name: piece}}

    def _begun(self, event: Event, index: int) -> Event:
        """A block's start may already hold text."""
        out, block = self._whole(event), event.get("content_block")
        for name in ("text", "thinking"):
            if isinstance(block, dict) and isinstance(block.get(name), str) and block[name]:
                delta = {"type": f"{name}_delta", name: ""}
                flush = _BlockFlush({"type": "content_block_delta", "index": index, "delta": delta}, name)
                make = self._texts.text if name == "text" else self._texts.thinking
                out["content_block"][name] = self._piece(("block", index), block[name], flush, make)
        return out

    # ---- OpenAI: responses ----

    def _response(self, event: Event, kind: str, before: list[Event]) -> Event:
        base, _, end = kind.rpartition(".")
        place = tuple(event.get(name) for name in ("output_index", "content_index", "summary_index"))
        key = ("response", base, *place)
        delta = event.get("delta")
        if end == "delta" and isinstance(delta, str):
            if base in _NO_TEXT:
                return event
            make = self._texts.arguments if base in _ARGUMENTS else self._texts.text
            piece = self._piece(key, delta, lambda rest: {**event, "delta": rest}, make)
            rest = self._whole({name: value for name, value in event.items() if name != "delta"})
            return {name: piece if name == "delta" else rest[name] for name in event}
        if end == "done":
            before += self._flushed(lambda held: held == key)
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            before += self._flushed(lambda held: True)
        return self._whole(event)

    # ---- channels ----

    def _whole(self, event: Event) -> Event:
        changed: Event = self._texts.whole(event)
        return changed

    def _piece(
        self,
        key: Key,
        piece: str,
        flush: Callable[[str], Event],
        make: Callable[[], TextChannel] | None = None,
    ) -> str:
        channel = self._channels.get(key)
        if channel is None:
            if len(self._channels) >= MOST_CHANNELS:
                raise GuardFailed("the answer has more parallel texts than the guard allows")
            channel = self._channels[key] = (make or self._texts.text)()
        out = channel.feed(piece)
        if channel.holds:
            self._flush[key] = flush
        else:
            self._flush.pop(key, None)
        return out

    def _flushed(self, wanted: Callable[[Key], bool]) -> list[Event]:
        """Events with the text that these channels still hold; their texts have ended."""
        events = []
        for key in [key for key in self._channels if wanted(key)]:
            rest = self._channels.pop(key).finish()
            flush = self._flush.pop(key, None)
            if rest and flush is not None:
                events.append(flush(rest))
        return events

    def _written(self, events: list[Event]) -> bytes:
        return b"".join(self._encoded(events)) if events else b""

    def _encoded(self, events: list[Event]) -> Iterator[bytes]:
        for event in events:
            if "sequence_number" in event:
                event = {**event, "sequence_number": self._next}
                self._next += 1
                self._shift += 1
            name = event.get("type")
            head = b"event: " + name.encode() + b"\n" if isinstance(name, str) else b""
            yield head + b"data: " + _encode(event) + b"\n\n"


def _chunk_of(head: Event, index: Any, **texts: Any) -> Event:
    return {**head, "choices": [{"index": index, **texts, "finish_reason": None}]}


class _ChatFlush:
    def __init__(self, head: Event, index: Any, name: str) -> None:
        self._head, self._index, self._name = head, index, name

    def __call__(self, rest: str) -> Event:
        return _chunk_of(self._head, self._index, delta={self._name: rest})


class _CallFlush:
    def __init__(self, head: Event, index: Any, number: Any, outer: str, inner: str) -> None:
        self._head, self._index, self._number, self._outer, self._inner = head, index, number, outer, inner

    def __call__(self, rest: str) -> Event:
        call = {"index": self._number, self._outer: {self._inner: rest}}
        return _chunk_of(self._head, self._index, delta={"tool_calls": [call]})


class _BlockFlush:
    def __init__(self, event: Event, name: str) -> None:
        self._event, self._name = event, name

    def __call__(self, rest: str) -> Event:
        return {**self._event, "delta": {**self._event["delta"], self._name: rest}}
