"""Converts the HTTP API's JSON to messages of the proto: whole answers, and the events of a stream.

One set of structs reads chat and completions, whole and streamed: a field that one of them lacks is absent.
Unknown fields are ignored, because other upstreams of a gateway add some.
"""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Iterable, Iterator

import msgspec

from ridgeline.web.grpc.fields import FieldNames
from ridgeline.web.grpc.statuses import ErrorDetail, RpcError, failure
from ridgeline.web.grpc.v1 import inference_pb2 as pb

MESSAGE_BYTES = 256 << 10  # bytes of the events in one message: clients refuse messages of more than 4 MiB


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True):
    index: int | None = None
    id: str | None = None
    function: _Function = _Function()


class _Text(msgspec.Struct, frozen=True):
    """A message, or a part of one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name that some upstreams use
    tool_calls: list[_ToolCall] | None = None


class _Top(msgspec.Struct, frozen=True):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None


class _Token(_Top, frozen=True):
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct, frozen=True):
    """`content` of a chat, or the four lists of a completion."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = 0


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Answer(msgspec.Struct, frozen=True):
    """A whole answer, or an event."""

    id: str = ""
    model: str = ""
    created: int = 0
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: ErrorDetail | None = None


class _Vector(msgspec.Struct, frozen=True):
    embedding: str | list[float]
    index: int = 0


class _Vectors(msgspec.Struct, frozen=True):
    data: list[_Vector]
    model: str = ""
    usage: _Usage = _Usage()


_answer = msgspec.json.Decoder(_Answer)
_vectors = msgspec.json.Decoder(_Vectors)


def whole(body: bytes) -> pb.GenerateResponse:
    return _response([_answer.decode(body)])


def embeddings(body: bytes) -> pb.EmbedResponse:
    told = _vectors.decode(body)
    response = pb.EmbedResponse(model=told.model, usage=_usage(told.usage))
    for one in sorted(told.data, key=lambda vector: vector.index):
        response.embeddings.add().values.extend(_floats(one.embedding))
    return response


class StreamReader:
    """Reads server-sent events; `is_done` after [DONE]."""

    def __init__(self, names: FieldNames) -> None:
        self.is_done = False
        self._names = names
        self._rest = b""  # bytes of an event that has not arrived completely

    def feed(self, data: bytes) -> Iterator[pb.GenerateResponse]:
        """Yield the events in `data`, as many in one message as its size allows. Raises RpcError for an error
        event, after the events before it.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        waiting: list[_Answer] = []
        size = 0
        try:
            for event in events:
                if size + len(event) > MESSAGE_BYTES:
                    yield from _shown(waiting)
                    waiting, size = [], 0
                size += len(event)
                waiting += self._answers(event)
        except RpcError:
            yield from _shown(waiting)
            raise
        yield from _shown(waiting)

    def _answers(self, event: bytes) -> Iterator[_Answer]:
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue  # a comment, for proxies
            value = line[5:].strip()
            if value == b"[DONE]":
                self.is_done = True
                continue
            answer = _answer.decode(value)
            if answer.error is not None:
                raise failure(answer.error, self._names)
            yield answer


def _shown(answers: list[_Answer]) -> Iterator[pb.GenerateResponse]:
    """One message, unless it would be empty."""
    if answers:
        response = _response(answers)
        if response.choices or response.HasField("usage"):
            yield response


def _response(answers: list[_Answer]) -> pb.GenerateResponse:
    """The answers of one stream that have arrived together, as one message."""
    first = answers[0]
    response = pb.GenerateResponse(id=first.id, model=first.model, created=first.created)
    for answer in answers:
        if answer.usage is not None:
            response.usage.CopyFrom(_usage(answer.usage))
        for choice in answer.choices:
            _add_choice(response, choice)
    return response


def _add_choice(response: pb.GenerateResponse, told: _Choice) -> None:
    text = told.delta or told.message or _Text(content=told.text)
    choice = pb.Choice(
        index=told.index,
        text=text.content or "",
        reasoning=text.reasoning_content or text.reasoning or "",
        token_ids=told.token_ids or (),
        finish_reason=told.finish_reason or "",
    )
    for place, call in enumerate(text.tool_calls or ()):
        choice.tool_calls.add(
            index=place if call.index is None else call.index,
            id=call.id or "",
            name=call.function.name or "",
            arguments=call.function.arguments or "",
        )
    if told.logprobs is not None:
        choice.logprobs.extend(_logprobs(told.logprobs))
    if told.finish_reason and isinstance(told.stop_reason, str):
        choice.stop_string = told.stop_reason
    elif told.finish_reason and isinstance(told.stop_reason, int):
        choice.stop_token_id = told.stop_reason
    shows = choice.text or choice.reasoning or choice.token_ids or choice.tool_calls or choice.logprobs
    if shows or choice.finish_reason:  # the opening of a chat's choice shows nothing
        response.choices.append(choice)


def _logprobs(told: _Logprobs) -> Iterator[pb.TokenLogprob]:
    for token in told.content or ():
        top = [
            pb.TopLogprob(token=one.token, logprob=one.logprob, token_bytes=bytes(one.bytes or ()))
            for one in token.top_logprobs
        ]
        raw = bytes(token.bytes or ())
        yield pb.TokenLogprob(token=token.token, logprob=token.logprob, token_bytes=raw, top=top)
    tokens = told.tokens or []
    tops = told.top_logprobs or [None] * len(tokens)
    for name, value, candidates in zip(tokens, told.token_logprobs, tops, strict=True):
        top = [pb.TopLogprob(token=text, logprob=number) for text, number in (candidates or {}).items()]
        yield pb.TokenLogprob(token=name, logprob=0.0 if value is None else value, top=top)


def _usage(told: _Usage) -> pb.Usage:
    prompt, completion = told.prompt_tokens_details, told.completion_tokens_details
    return pb.Usage(
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens or 0,
        total_tokens=told.total_tokens,
        cached_tokens=(prompt.cached_tokens or 0) if prompt else 0,
        reasoning_tokens=(completion.reasoning_tokens or 0) if completion else 0,
    )


def _floats(told: str | list[float]) -> Iterable[float]:
    if not isinstance(told, str):
        return told
    values = array.array("f", base64.b64decode(told))
    if sys.byteorder == "big":
        values.byteswap()
    return values
