"""ResumableStream: a stream that a peer can continue, or that continues another server's stream.

EventStream passes it every write, and Choices every chunk; it adds the markers. A continued stream first
replays the tokens that the client has: detokenizer, stop strings, parsers and shape reach the same state, and
their output is dropped. Then only the choices that have not ended run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.client.text import TextStream
from ridgeline.engine.schedule.request import FinishReason
from ridgeline.engine.schedule.step import SeqDelta, TokenLogprob
from ridgeline.replica.resume import (
    RESUME_FIELD,
    Failure,
    Finish,
    Head,
    Marker,
    Output,
    ResumeState,
    Tokens,
    encode_group,
)
from ridgeline.server.answering.job import Job
from ridgeline.server.answering.pieces import Choices, Piece
from ridgeline.server.errors import ApiError, BadRequest, ErrorReply
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.replica.version import ReplicaEpoch, replica_version
from ridgeline.server.served_models import ServedModels

if TYPE_CHECKING:
    from ridgeline.engine.schedule.request import SamplingParams


class Writer(Protocol):
    """The part of a shape that a replay drives."""

    def opening(self) -> bytes: ...

    def events(self, piece: Piece) -> bytes: ...


class ResumableStream:
    def __init__(self, served_models: ServedModels, context: RequestContext, job: Job) -> None:
        """Raises 400 for a state that cannot belong to this request, 409 for a state of another version."""
        version = replica_version(served_models, job.client)
        state = context.resume
        if state is not None:
            _check(state, job, version)
        seed = _seed(state, job.params)
        self.state = state
        self.has_markers = context.resumable
        self.seeds = prompt_seeds(seed, len(job.prompts)) if job.params.seed is None else None
        self._job = job
        epoch = served_models.part(ReplicaEpoch).value
        self._head: Head | None = Head(
            context.request_id, context.created, seed, version, epoch, context.salt
        )
        self._characters = 0
        self._tokens: list[Tokens] = []  # not in a marker yet
        self._calls: list[tuple[int, str]] = []
        self._cached: dict[int, int] = {}
        self.texts: dict[int, TextStream] = {}  # of the replayed choices

    @classmethod
    def of(cls, served_models: ServedModels, context: RequestContext, job: Job) -> ResumableStream | None:
        """None if the request asks neither for markers nor for a continuation."""
        if context.resume is not None and not job.stream:
            raise BadRequest("stream", f"{RESUME_FIELD} is allowed only with stream: true")
        if not job.stream or not (context.resumable or context.resume):
            return None
        return cls(served_models, context, job)

    # ── markers ──────────────────────────────────────────────────────────────────────────────────────────

    def note(self, choice: int, chunk: OutputChunk) -> None:
        """A chunk of this choice was turned into pieces."""
        if chunk.tokens or chunk.finish_reason is not None:
            reason = chunk.finish_reason
            finish = None if reason is None else Finish(reason.value, chunk.stop_reason)
            self._tokens.append(Tokens(choice, chunk.tokens, finish))

    def note_cached(self, prompt: int, tokens: int) -> None:
        self._cached[prompt] = tokens

    def note_pieces(self, pieces: Iterable[Piece]) -> None:
        """The shape has these pieces, whether or not it writes an event now."""
        for piece in pieces:
            self._characters += piece.num_characters
            self._calls += [(piece.index, id) for id in piece.call_ids]

    def group(self, events: bytes, end: bool = False) -> bytes:
        """Returns the bytes to send for these events."""
        return self._marked(events, end=end) if self.has_markers else events

    def failed(self, events: bytes, reply: ErrorReply) -> bytes:
        """The error event. A peer may continue a stream whose engine died; other errors end the request."""
        if not self.has_markers:
            return events
        self._tokens, self._calls = [], []  # the client has no event with these tokens
        return self._marked(events, failure=Failure(reply.status, reply.code or "", reply.status == 503))

    def _marked(self, events: bytes, end: bool = False, failure: Failure | None = None) -> bytes:
        marker = Marker(
            len(events),
            self._tokens,
            self._characters,
            self._calls,
            self._cached,
            self._head,
            end,
            failure,
        )
        self._tokens, self._calls, self._cached, self._head = [], [], {}, None
        return encode_group(marker, events)

    # ── continuing ───────────────────────────────────────────────────────────────────────────────────────

    def replay(self, choices: Choices, shape: Writer) -> None:
        """Bring parsers and shape to the client's state. Raises 409 if they show another text."""
        state = self.state
        assert state is not None
        choices.restore(state.cached, {choice: output.calls for choice, output in state.outputs.items()})
        shape.opening()
        pieces: list[Piece] = []
        for choice, output in sorted(state.outputs.items()):
            for chunk in self._replayed(choice, output):
                choices.replay(choice, chunk, pieces)
        choices.replayed()
        for piece in pieces:
            shape.events(piece)
            self._characters += piece.num_characters
        self._tokens = []
        self._cached = {}
        if self._characters != state.characters:
            message = (
                f"{RESUME_FIELD}: the tokens give {self._characters} characters here, but the client has "
                f"{state.characters}; the stream cannot be continued exactly"
            )
            raise ApiError(409, message, param=RESUME_FIELD, code="not_resumable")

    def _replayed(self, choice: int, output: Output) -> list[OutputChunk]:
        text = TextStream(self._job.client.tokenizer, self._job.params, 0)
        chunks = text.replay(_deltas(output, with_logprobs=self._job.params.logprobs is not None))
        if text.finished != (output.finish is not None):
            raise BadRequest(f"{RESUME_FIELD}.outputs", f"choice {choice} does not end where the state says")
        self.texts[choice] = text
        return chunks


def prompt_seeds(seed: int, prompts: int) -> list[int]:
    """One seed for each prompt: equal prompts get different answers."""
    digests = (blake2b(f"{seed}:{number}".encode(), digest_size=8).digest() for number in range(1, prompts))
    return [seed, *(int.from_bytes(digest, "little") >> 1 for digest in digests)]


def _seed(state: ResumeState | None, params: SamplingParams) -> int:
    if params.seed is not None:
        return params.seed
    return secrets.randbits(63) if state is None or state.head is None else state.head.seed


def _check(state: ResumeState, job: Job, version: str) -> None:
    assert state.head is not None  # checked when it was read
    if state.head.version != version:
        message = (
            f"{RESUME_FIELD}: the stream has version {state.head.version} and this server {version}; "
            "only a server of the same version can continue it exactly"
        )
        raise ApiError(409, message, param=RESUME_FIELD, code="not_resumable")
    count, vocabulary = len(job.prompts) * job.params.n, job.client.hello.vocab_size
    for choice, output in state.outputs.items():
        path = f"{RESUME_FIELD}.outputs[{choice}]"
        if not 0 <= choice < count:
            raise BadRequest(path, f"the request has {count} choices")
        if not output.tokens:
            raise BadRequest(f"{path}.tokens", "are missing")
        if min(output.tokens) < 0 or max(output.tokens) >= vocabulary:
            raise BadRequest(f"{path}.tokens", f"must be at least 0 and less than {vocabulary}")


def _deltas(output: Output, with_logprobs: bool) -> list[SeqDelta]:
    """The deltas that the engine sent. Log-probabilities are placeholders: only their number counts."""
    chunks = output.chunks()
    deltas = []
    for place, ids in enumerate(chunks):
        logprobs = [TokenLogprob(id, 0.0, 1) for id in ids] if with_logprobs else []
        delta = SeqDelta("", 0, ids, logprobs)
        if place == len(chunks) - 1 and output.finish is not None:
            stop = output.finish.stop
            delta = delta._replace(
                finish_reason=FinishReason(output.finish.reason),
                stop_token=stop if isinstance(stop, int) else None,
            )
        deltas.append(delta)
    return deltas
