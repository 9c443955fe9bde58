"""POST /v1/chat/completions: its events and its whole answer, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ridgeline.server.answering.answer import answer
from ridgeline.server.answering.chat_job import chat_job
from ridgeline.server.answering.job import Job
from ridgeline.server.answering.pieces import Piece
from ridgeline.server.errors import BadRequest, ErrorReply
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.openai_api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from ridgeline.server.openai_api.old_functions import in_older_names, with_tools
from ridgeline.server.openai_api.request_bodies import ChatRequest
from ridgeline.server.openai_api.response_bodies import (
    DONE,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Delta,
    FunctionDelta,
    PromptLogprobs,
    TextEvents,
    ToolCall,
    ToolCallDelta,
    Usage,
    event,
    failure_event,
)
from ridgeline.server.parsing.events import ParsedEvent
from ridgeline.server.served_models import ServedModels
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning


async def chat_completions(request: Request) -> ASGIApp:
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    raw = await read_body(request, served_models.config)
    job, has_functions = await off_loop(len(raw), lambda: _job(served_models, decode(raw, ChatRequest)))
    return answer(served_models, context, job, ChatShape(context, job, has_functions))


def _job(served_models: ServedModels, body: ChatRequest) -> tuple[Job, bool]:
    """The engine's job, and whether the answer uses `function_call` instead of `tool_calls`."""
    if body.functions is None:
        return chat_job(served_models, with_tools(body)), False
    try:
        return chat_job(served_models, with_tools(body)), True
    except BadRequest as error:
        raise in_older_names(error) from None


class ChatShape:
    """Pieces as chat events, or as one chat completion. `has_functions`: calls use the older shape."""

    def __init__(self, context: RequestContext, job: Job, has_functions: bool = False) -> None:
        self._has_functions = has_functions
        self._head = job.head(context, "chatcmpl")
        self._names = TokenNames(job.client.tokenizer)
        self._params = job.params
        self._include_usage = job.include_usage
        # If usage is requested, every chunk has the field; it is null except on the last.
        self._usage_so_far = None if job.include_usage else UNSET
        self._return_token_ids = job.return_token_ids
        self._prompt_told = False
        self._text_events = TextEvents(
            lambda index, text: self._chunk(ChatChunkChoice(index, Delta(content=text)))
        )

    def opening(self) -> bytes:
        return b""  # every choice opens with its first piece

    def events(self, piece: Piece) -> bytes:
        if (
            piece.is_text_alone
            and self._params.logprobs is None
            and len(piece.events) == 1
            and not piece.usage
        ):
            only = piece.events[0]
            if type(only) is Content:  # the common case
                return self._text_events.of(piece.index, only.text)
        return b"".join([event(chunk) for chunk in self._chunks(piece)])

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return event(ChatChunk(**self._head, choices=[], usage=usage)) + DONE

    def failure(self, reply: ErrorReply) -> bytes:
        return failure_event(reply)

    def whole(self, pieces: list[Piece], usage: Usage) -> ChatCompletion:
        told = [self._prompt_logprobs(piece) for piece in pieces]
        by_choice: list[list[Piece]] = [[] for _ in range(self._params.n)]
        for piece in pieces:
            by_choice[piece.index].append(piece)
        choices = [self._choice(index, parts) for index, parts in enumerate(by_choice)]
        prompt = next((part for part in told if part is not UNSET), UNSET)
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_logprobs=prompt)

    def _chunks(self, piece: Piece) -> list[ChatChunk]:
        chunks = []
        if piece.prompt is not None:
            opening = ChatChunkChoice(piece.index, Delta(role="assistant", content=""))
            chunks.append(self._chunk(opening, self._prompt_logprobs(piece), piece.usage))
        deltas = [self._delta(part) for part in piece.events]
        if not deltas and (piece.logprobs or piece.finish_reason or piece.token_ids):
            deltas = [Delta()]
        for place, delta in enumerate(deltas):
            is_last = place == len(deltas) - 1
            choice = ChatChunkChoice(
                piece.index,
                delta,
                self._logprobs(chat_logprobs(self._names, piece.logprobs)) if not place else None,
                self._reason(piece) if is_last else None,
                piece.stop_reason if is_last and piece.finish_reason else UNSET,
                self._token_ids([] if place else [piece]),
            )
            chunks.append(self._chunk(choice, usage=piece.usage))
        return chunks

    def _choice(self, index: int, pieces: list[Piece]) -> ChatChoice:
        tokens = [token for piece in pieces for token in piece.logprobs]
        return ChatChoice(
            index,
            chat_message([part for piece in pieces for part in piece.events], self._has_functions),
            self._logprobs(chat_logprobs(self._names, tokens)),
            self._reason(pieces[-1]) or "",
            pieces[-1].stop_reason,
            self._token_ids(pieces),
        )

    def _token_ids(self, pieces: Sequence[Piece]) -> list[int] | UnsetType:
        return [id for piece in pieces for id in piece.token_ids] if self._return_token_ids else UNSET

    def _reason(self, piece: Piece) -> str | None:
        is_call = self._has_functions and piece.finish_reason == "tool_calls"
        return "function_call" if is_call else piece.finish_reason

    def _delta(self, part: ParsedEvent) -> Delta:
        delta = _delta(part)
        if not self._has_functions or delta.tool_calls is UNSET:
            return delta
        call = delta.tool_calls[0]
        return Delta() if call.index else Delta(function_call=call.function)  # the older shape has one call

    def _chunk(
        self,
        choice: ChatChunkChoice,
        prompt: PromptLogprobs | UnsetType = UNSET,
        usage: Usage | None = None,
    ) -> ChatChunk:
        told = usage or self._usage_so_far
        return ChatChunk(**self._head, choices=[choice], usage=told, prompt_logprobs=prompt)

    def _logprobs(self, content: list[ChatLogprob]) -> ChatLogprobs | None:
        return None if self._params.logprobs is None else ChatLogprobs(content)

    def _prompt_logprobs(self, piece: Piece) -> PromptLogprobs | UnsetType:
        """The prompt is the same for all choices, so it is sent once, with the first piece of any."""
        asked = self._params.prompt_logprobs
        if asked is None or piece.prompt is None or self._prompt_told:
            return UNSET
        self._prompt_told = True
        return prompt_logprobs(self._names, piece.prompt, piece.prompt_logprobs, asked)


def chat_message(events: Sequence[ParsedEvent], has_functions: bool = False) -> ChatMessage:
    """The message that a choice's events add up to. A message of calls without text has null content."""
    content = "".join(part.text for part in events if isinstance(part, Content))
    reasoning = "".join(part.text for part in events if isinstance(part, Reasoning))
    calls = [
        ToolCall(id=start.id, function=CalledFunction(start.name, _arguments(events, start.index)))
        for start in events
        if isinstance(start, CallStart)
    ]
    return ChatMessage(
        content=None if calls and not content else content,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls if calls and not has_functions else UNSET,
        function_call=calls[0].function if calls and has_functions else UNSET,
    )


def _arguments(events: Sequence[ParsedEvent], index: int) -> str:
    return "".join(part.text for part in events if isinstance(part, CallArguments) and part.index == index)


def _delta(part: ParsedEvent) -> Delta:
    match part:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case CallStart(id, name, index):
            return Delta(tool_calls=[ToolCallDelta(index, id, "function", FunctionDelta(name, ""))])
        case CallArguments(text, index):
            return Delta(tool_calls=[ToolCallDelta(index, function=FunctionDelta(arguments=text))])
