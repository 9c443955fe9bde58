"""ChatSource: reads OpenAI's chat completions and their chunks into steps. Reads only the first choice:
clients of other families cannot ask for more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ridgeline.gateway.dialects.counts import Counts
from ridgeline.gateway.dialects.error_bodies import Told
from ridgeline.gateway.dialects.streams.events import payload_of
from ridgeline.gateway.dialects.streams.steps import (
    Begin,
    Counted,
    Done,
    End,
    Failed,
    Ping,
    Reason,
    Step,
    unreadable,
)
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning

_REASONS: dict[str, Reason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "refusal",
}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    """A message, or a chunk's delta."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the newer name, used by vLLM and others
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Said | None = None
    delta: _Said | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # of ridgeline and vLLM: the stop string that matched


class _Body(msgspec.Struct):
    """A completion, a chunk of one, or an error."""

    id: str | None = None
    model: str | None = None
    created: int | float | None = None
    choices: list[_Choice] | None = None
    usage: Counts | None = None
    error: Told | str | None = None


_bodies = msgspec.json.Decoder(_Body)


class ChatSource:
    def __init__(self) -> None:
        self._calls = _Calls()
        self._late: list[Step] = []  # text in the middle of a call; sent after it
        self._begun = False
        self._refused = False
        self._ended = False

    def whole(self, body: bytes) -> list[Step]:
        read = _read(body)
        if not read.choices or read.choices[0].message is None:
            raise unreadable()
        return [*self._steps(read), Done()]

    def event(self, event: bytes) -> list[Step]:
        payload = payload_of(event)
        if not payload:
            return [Ping()] if event.startswith(b":") else []
        if payload == b"[DONE]":
            return [Done()]
        read = _read(payload)
        match read.error:
            case Told() as told:
                return [Failed(told)]
            case str(message):
                return [Failed(Told(message))]
        return self._steps(read)

    def _steps(self, read: _Body) -> list[Step]:
        # Counts first: with running counts, an answer can begin with the count of its prompt.
        steps: list[Step] = [] if read.usage is None else [Counted(read.usage.usage())]
        if not self._begun and (read.choices or read.usage is not None):
            self._begun = True  # some servers send an extra chunk before the first
            created = None if read.created is None else int(read.created)
            steps.append(Begin((read.id or "").removeprefix("chatcmpl-"), read.model or "", created))
        for choice in read.choices or ():
            if choice.index == 0:
                self._choice(choice, steps)
        return steps

    def _choice(self, choice: _Choice, steps: list[Step]) -> None:
        said = choice.delta or choice.message or _Said()
        words: list[Step] = []
        if reasoning := said.reasoning_content or said.reasoning:
            words.append(Reasoning(reasoning))
        if said.content:
            words.append(Content(said.content))
        if said.refusal:
            self._refused = True
            words.append(Content(said.refusal))
        if words:
            where = steps if self._calls.may_be_interrupted() else self._late
            where += words
        for place, call in enumerate(said.tool_calls or ()):
            self._calls.add(call, place if choice.delta is None else None, steps)
        if choice.finish_reason and not self._ended:
            self._ended = True
            self._calls.end(steps)
            steps += [*self._late, self._end(choice)]

    def _end(self, choice: _Choice) -> End:
        reason: Reason = _REASONS.get(choice.finish_reason or "", "stop")
        if reason == "stop" and self._refused:
            return End("refusal")
        if reason == "stop" and isinstance(choice.stop_reason, str):
            return End("stop_sequence", choice.stop_reason)
        if reason == "stop" and self._calls.any:
            return End("tool_calls")  # the reason for forced calls; some servers give it for all calls
        return End(reason)


def _read(payload: bytes) -> _Body:
    try:
        return _bodies.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        raise unreadable() from None


@dataclass(slots=True)
class _OpenCall:
    id: str = ""
    name: str = ""
    held: list[str] = field(default_factory=list)  # arguments not sent yet
    told: list[str] = field(default_factory=list)
    started: bool = False

    @property
    def is_whole(self) -> bool:
        try:
            msgspec.json.decode("".join((*self.told, *self.held)), type=msgspec.Raw)
        except msgspec.DecodeError:
            return False
        return True


class _Calls:
    """Calls in order. Chunks of several calls may interleave; then the first one is sent as it grows, and the
    others wait until it is complete.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _OpenCall] = {}
        self._head = 0  # index, in order of arrival, of the call that is being sent
        self._last = 0

    @property
    def any(self) -> bool:
        return bool(self._calls)

    def add(self, delta: _Call, place: int | None, steps: list[Step]) -> None:
        index = delta.index if delta.index is not None else place
        if index is None:  # some servers do not number calls: a new id is a new call
            known = self._calls.get(self._last)
            is_new = known is None or (delta.id and delta.id != known.id)
            index = len(self._calls) if is_new else self._last
        elif delta.id and index in self._calls and self._calls[index].id not in ("", delta.id):
            index = 1 + max(self._calls)  # others number every call 0
        self._last = index
        call = self._calls.setdefault(index, _OpenCall())
        call.id = call.id or delta.id or ""
        if delta.function is not None:
            call.name = call.name or delta.function.name or ""
            if delta.function.arguments:
                call.held.append(delta.function.arguments)
        self._tell(steps)

    def may_be_interrupted(self) -> bool:
        """Whether another step may be sent now. If so, the call that was being sent is complete."""
        calls = list(self._calls.values())
        if self._head == len(calls) or not calls[self._head].started:
            return True
        if not calls[self._head].is_whole:
            return False
        self._head += 1
        return True

    def end(self, steps: list[Step]) -> None:
        """The answer has ended: send all waiting calls."""
        while self._head < len(self._calls):
            self._tell_head(steps)
            self._head += 1

    def _tell(self, steps: list[Step]) -> None:
        while self._head < len(self._calls):
            call = list(self._calls.values())[self._head]
            if not call.name:
                return
            self._tell_head(steps)
            if self._head + 1 == len(self._calls) or not call.is_whole:
                return
            self._head += 1

    def _tell_head(self, steps: list[Step]) -> None:
        call = list(self._calls.values())[self._head]
        if not call.started:
            call.started = True
            steps.append(CallStart(call.id or f"call_{self._head}", call.name))
        steps += [CallArguments(text) for text in call.held]
        call.told += call.held
        call.held = []
