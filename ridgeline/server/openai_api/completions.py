"""POST /v1/completions: the older endpoint; text or token ids in, several prompts at once, echo."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ridgeline.engine.grammar import Grammar
from ridgeline.engine.link.messages import Hello
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.server.answering.answer import answer
from ridgeline.server.answering.job import Job
from ridgeline.server.answering.pieces import Piece
from ridgeline.server.answering.prompts import check_prompts, completion_prompts
from ridgeline.server.answering.structured import requested_grammar
from ridgeline.server.answering.validation import check_stream_options, sampling_params
from ridgeline.server.errors import ErrorReply
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.openai_api.logprobs import (
    TextOffsets,
    TokenNames,
    completion_logprobs,
    echoed_logprobs,
    extend,
    prompt_logprobs,
)
from ridgeline.server.openai_api.request_bodies import CompletionRequest
from ridgeline.server.openai_api.response_bodies import (
    DONE,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    TextCompletion,
    TextEvents,
    Usage,
    event,
    failure_event,
)
from ridgeline.server.served_models import ServedModels

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def completions(request: Request) -> ASGIApp:
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    raw = await read_body(request, served_models.config)
    body = await off_loop(len(raw), lambda: decode(raw, CompletionRequest))
    job = await off_loop(len(raw), lambda: completion_job(served_models, body))
    return answer(served_models, context, job, CompletionShape(context, job, body))


def completion_job(served_models: ServedModels, body: CompletionRequest) -> Job:
    """The engine's job from the body; invalid requests are refused here."""
    served = served_models.served(body.model, "generate")
    check_stream_options(body)
    client = served.ready_client()
    grammar, grammar_field = requested_grammar(body) or (None, "grammar")
    params = _params(body, client.hello, grammar)
    prompts = completion_prompts(client, body)
    check_prompts(client, prompts, params, "prompt")
    return Job.of(body, client, served, prompts, params, grammar_field=grammar_field)


def _params(body: CompletionRequest, engine: Hello, grammar: Grammar | None) -> SamplingParams:
    echoed = body.logprobs if body.echo else None  # an echoed prompt has its log-probabilities too
    asked = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    return sampling_params(
        body,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        max_tokens_field="max_tokens",
        logprobs=body.logprobs,
        logprobs_field="logprobs",
        prompt_logprobs=max(asked, default=None),
        engine=engine,
        grammar=grammar,
    )


class CompletionShape:
    """Pieces as completion events, or as one completion."""

    def __init__(self, context: RequestContext, job: Job, body: CompletionRequest) -> None:
        self._head = job.head(context, "cmpl")
        self._names = TokenNames(job.client.tokenizer)
        self._body = body
        self._include_usage = job.include_usage
        self._usage_so_far = None if job.include_usage else UNSET
        self._offsets: dict[int, TextOffsets] = {}
        self._text_events = TextEvents(lambda index, text: self._event(CompletionChoice(index, text)))

    def events(self, piece: Piece) -> bytes:
        if piece.is_text_alone and self._body.logprobs is None and not piece.usage:
            return self._text_events.of(piece.index, piece.text)
        return event(self._event(self._choice(piece), piece.usage))

    def _event(self, choice: CompletionChoice, usage: Usage | None = None) -> TextCompletion:
        return TextCompletion(**self._head, choices=[choice], usage=usage or self._usage_so_far)

    def opening(self) -> bytes:
        return b""

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return event(TextCompletion(**self._head, choices=[], usage=usage)) + DONE

    def failure(self, reply: ErrorReply) -> bytes:
        return failure_event(reply)

    def whole(self, pieces: list[Piece], usage: Usage) -> TextCompletion:
        """The stream's choices, joined: whole and streamed cannot differ."""
        parts: dict[int, list[CompletionChoice]] = {}
        for piece in pieces:
            parts.setdefault(piece.index, []).append(self._choice(piece))
        choices = [_joined(parts[index]) for index in sorted(parts)]
        return TextCompletion(**self._head, choices=choices, usage=usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        echo = piece.prompt.text if piece.prompt is not None and self._body.echo else ""
        return CompletionChoice(
            piece.index,
            echo + piece.text,
            self._logprobs(piece),
            piece.finish_reason,
            piece.stop_reason if piece.finish_reason else UNSET,
            self._prompt_logprobs(piece),
            piece.token_ids if self._body.return_token_ids else UNSET,
        )

    def _prompt_logprobs(self, piece: Piece) -> PromptLogprobs | UnsetType:
        asked = self._body.prompt_logprobs
        if asked is None or piece.prompt is None:
            return UNSET
        return prompt_logprobs(self._names, piece.prompt, piece.prompt_logprobs, asked)

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        echoed = piece.prompt if self._body.echo else None
        if piece.prompt is not None:
            start = len(piece.prompt.text) if self._body.echo else 0
            self._offsets[piece.index] = TextOffsets(self._names, start)
        made = completion_logprobs(self._names, piece.logprobs, self._offsets[piece.index])
        if echoed is None:
            return made
        shaped = echoed_logprobs(self._names, echoed, piece.prompt_logprobs, self._body.logprobs)
        extend(shaped, made)
        return shaped


def _joined(parts: list[CompletionChoice]) -> CompletionChoice:
    first, last = parts[0], parts[-1]
    logprobs = None
    if first.logprobs is not None:
        logprobs = CompletionLogprobs()
        for part in parts:
            if part.logprobs is not None:
                extend(logprobs, part.logprobs)
    return CompletionChoice(
        first.index,
        "".join(part.text for part in parts),
        logprobs,
        last.finish_reason,
        last.stop_reason,
        first.prompt_logprobs,
        UNSET if first.token_ids is UNSET else [id for part in parts for id in part.token_ids or ()],
    )
