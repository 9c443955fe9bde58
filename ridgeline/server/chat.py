"""POST /v1/chat/completions."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ridgeline.engine.request import SamplingParams
from ridgeline.server.choices import Piece, Prompt
from ridgeline.server.course import Job
from ridgeline.server.decoding import decode
from ridgeline.server.errors import BadRequest
from ridgeline.server.exchange import Exchange, off_loop, read_body
from ridgeline.server.front import Front
from ridgeline.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from ridgeline.server.prompts import chat_ids, check_prompts
from ridgeline.server.protocol import ChatRequest
from ridgeline.server.bodies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Delta,
    PromptLogprobs,
    TextEvents,
    Usage,
    event,
)
from ridgeline.server.sse import answer
from ridgeline.server.validation import check_stream_options, sampling_params


async def chat_completions(request: Request) -> ASGIApp:
    front, exchange = Front.of(request), Exchange.of(request)
    raw = await read_body(request, front.config)
    job = await off_loop(len(raw), lambda: _job(front, raw))
    return answer(front, exchange, job, ChatShape(exchange, job))


def _job(front: Front, raw: bytes) -> Job:
    """From the body's bytes to what the engine takes; a bad request ends here."""
    body = decode(raw, ChatRequest)
    model = front.served_name(body.model)
    check_stream_options(body)
    client = front.ready_client()
    params = _params(body, client.hello.vocab_size)
    prompts = [Prompt(chat_ids(client.tokenizer, body.messages, body))]
    check_prompts(client, prompts, params, "messages")
    return Job.of(body, client, model, prompts, params)


def _params(body: ChatRequest, vocab_size: int) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs", "only allowed together with logprobs: true")
    newer = body.max_completion_tokens
    return sampling_params(
        body,
        max_tokens=body.max_tokens if newer is None else newer,
        max_tokens_field="max_tokens" if newer is None else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logprobs_field="top_logprobs",
        prompt_logprobs=body.prompt_logprobs,
        vocab_size=vocab_size,
    )


class ChatShape:
    """Pieces as chat events, or as one chat completion."""

    def __init__(self, exchange: Exchange, job: Job) -> None:
        self._head = job.head(exchange, "chatcmpl")
        self._names = TokenNames(job.client.tokenizer)
        self._params = job.params
        # With include_usage every event has the field, null but on the last.
        self._usage_so_far = None if job.include_usage else UNSET
        self._prompt_told = False
        self._text_events = TextEvents(
            lambda index, text: self._chunk(ChatChunkChoice(index, Delta(content=text)))
        )

    def events(self, piece: Piece) -> bytes:
        if piece.is_text_alone and self._params.logprobs is None:
            return self._text_events.of(piece.index, piece.text)
        return b"".join([event(chunk) for chunk in self._chunks(piece)])

    def _chunks(self, piece: Piece) -> list[ChatChunk]:
        chunks = []
        if piece.prompt is not None:
            opening = ChatChunkChoice(piece.index, Delta(role="assistant", content=""))
            chunks.append(self._chunk(opening, self._prompt_logprobs(piece)))
        if piece.text or piece.logprobs or piece.finish_reason:
            choice = ChatChunkChoice(
                piece.index,
                Delta(content=piece.text) if piece.text else Delta(),
                self._logprobs(chat_logprobs(self._names, piece.logprobs)),
                piece.finish_reason,
                piece.stop_reason if piece.finish_reason else UNSET,
            )
            chunks.append(self._chunk(choice))
        return chunks

    def usage_event(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self._head, choices=[], usage=usage)

    def whole(self, pieces: list[Piece], usage: Usage) -> ChatCompletion:
        told = [self._prompt_logprobs(piece) for piece in pieces]
        by_choice: list[list[Piece]] = [[] for _ in range(self._params.n)]
        for piece in pieces:
            by_choice[piece.index].append(piece)
        choices = [self._choice(index, parts) for index, parts in enumerate(by_choice)]
        prompt = next((part for part in told if part is not UNSET), UNSET)
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_logprobs=prompt)

    def _choice(self, index: int, pieces: list[Piece]) -> ChatChoice:
        tokens = [token for piece in pieces for token in piece.logprobs]
        return ChatChoice(
            index,
            ChatMessage(content="".join(piece.text for piece in pieces)),
            self._logprobs(chat_logprobs(self._names, tokens)),
            pieces[-1].finish_reason or "",
            pieces[-1].stop_reason,
        )

    def _chunk(self, choice: ChatChunkChoice, prompt: PromptLogprobs | UnsetType = UNSET) -> ChatChunk:
        return ChatChunk(**self._head, choices=[choice], usage=self._usage_so_far, prompt_logprobs=prompt)

    def _logprobs(self, content: list[ChatLogprob]) -> ChatLogprobs | None:
        return None if self._params.logprobs is None else ChatLogprobs(content)

    def _prompt_logprobs(self, piece: Piece) -> PromptLogprobs | UnsetType:
        """The prompt is the same for all choices, so it is told once, with the first piece of any."""
        asked = self._params.prompt_logprobs
        if asked is None or piece.prompt is None or self._prompt_told:
            return UNSET
        self._prompt_told = True
        return prompt_logprobs(self._names, piece.prompt, piece.prompt_logprobs, asked)
