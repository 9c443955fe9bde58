"""AsyncClient: streams text from an engine process, over its Unix socket, for asyncio programs.

The HTTP server is its main user; other programs may connect too. Tokenization and detokenization happen
here, in the caller's process. Closing a stream aborts its request in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ridgeline.engine.client import launch
from ridgeline.engine.client.inbox import Inbox
from ridgeline.engine.client.open_request import OpenRequest
from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.client.text import TextStream
from ridgeline.engine.config import engine_config
from ridgeline.engine.errors import EngineDied, EngineError, InvalidRequest, QueueFull, RequestFailed
from ridgeline.engine.link.messages import (
    FRAME_HEADER,
    Abort,
    Answer,
    Beat,
    Beating,
    CountExperts,
    DumpSteps,
    Embedded,
    ExpertsCounted,
    Hello,
    Outputs,
    Ping,
    Pong,
    PrefixChanges,
    Question,
    Refused,
    StepDump,
    Stop,
    Submit,
    ToEngine,
    ToFront,
    WatchPrefixes,
    decode_to_front,
    frame,
)
from ridgeline.engine.link.packed_texts import PackedTexts, pack_texts
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.telemetry.stats import EngineStats, StepRecord

if TYPE_CHECKING:
    from ridgeline.engine.client.open_embedding import Floats, OpenEmbedding


class AsyncClient:
    """One connection to one engine.

    `await AsyncClient.start(model)` starts an engine process, which ends with the client;
    `await AsyncClient.connect(socket_path, tokenizer)` connects to a running one. Use with `async with`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokenizer: Tokenizer, hello: Hello
    ) -> None:
        self.tokenizer = tokenizer
        self.hello = hello
        self.stats = EngineStats()
        self.heard_at = time.monotonic()  # when the engine's loop last sent a message
        self._reader = reader
        self._writer = writer
        self.requests: dict[str, OpenRequest] = {}
        self._embeddings: dict[str, OpenEmbedding] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._serials = itertools.count()
        self.accepted = 0  # requests since the start
        self.on_accepted: Callable[[], None] = lambda: None
        self.on_prefixes: Callable[[PrefixChanges], None] = lambda changes: None
        self._end_reason = "the engine process ended unexpectedly"
        self.closed = asyncio.Event()
        self.on_close: Callable[[], Awaitable[None]] | None = None  # stops an engine started by this client
        self._reading = asyncio.create_task(self._read())

    @staticmethod
    async def start(model: str = "smollm2-135m", **options: Any) -> AsyncClient:
        """Start an engine for `model`; `options` are the fields of EngineConfig (weights, kv_tokens, …).

        The model is fetched if need be. Closing the client ends the engine.
        """
        from ridgeline.models.files.pull import ensure

        config = engine_config(model, options)
        path = (await asyncio.to_thread(ensure, model)).path
        folder = launch.socket_folder()
        socket_path = folder / "engine.sock"
        process = await launch.launch(config, path, socket_path, ("--log-level=warning",))
        try:
            tokenizer = await asyncio.to_thread(launch.load_tokenizer, path)
            client = await launch.connect_when_ready(
                process, socket_path, lambda: AsyncClient.connect(socket_path, tokenizer)
            )
        except BaseException:
            await launch.end_process(process, folder)
            raise

        async def end_engine() -> None:
            client.stop_engine()
            await launch.end_process(process, folder, launch.STOP_S)

        client.on_close = end_engine
        return client

    @classmethod
    async def connect(cls, socket_path: str | Path, tokenizer: Tokenizer) -> AsyncClient:
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        try:
            hello = await _read_message(reader)
            if not isinstance(hello, Hello):
                raise EngineDied(
                    f"the engine at {socket_path} closed the connection before its Hello message"
                )
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, tokenizer, hello)

    # ---- asking for text ----

    def get_default_sampling_params(self) -> SamplingParams:
        """As recommended by the model's generation_config.json; the server uses the same defaults."""
        return SamplingParams(**self.hello.sampling.values())

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "request",
        arrival: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
    ) -> AsyncIterator[OutputChunk]:
        """Stream the n samples of a prompt, interleaved as they grow.

        Without `params`, those of `get_default_sampling_params`; given ones are used unchanged.
        `request_id` appears in the engine's log; it need not be unique. Raises InvalidRequest or QueueFull
        before the first chunk, EngineDied or RequestFailed at any time.
        """
        inbox = Inbox()
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = self.submit(
            prompt_ids,
            params or self.get_default_sampling_params(),
            inbox,
            request_id=request_id,
            arrival=arrival,
            priority=priority,
            cache_namespace=cache_namespace,
        )
        try:
            while (arrivals := await inbox.take()) is not None:
                for _, chunk in arrivals:
                    yield chunk
        finally:
            request.close()

    def chat(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[OutputChunk]:
        """Stream the answer to a conversation, rendered with the model's own chat template."""
        return self.generate(self.tokenizer.encode_chat(messages), params, **options)

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        inbox: Inbox,
        number: int = 0,
        *,
        request_id: str = "request",
        arrival: float | None = None,
        priority: int = 0,
        cache_namespace: str = "",
        output_ids: Sequence[int] = (),
        text: TextStream | None = None,
    ) -> OpenRequest:
        """Request the samples of a prompt; their chunks arrive in `inbox` under `number`, errors too.

        output_ids: generated elsewhere, for a single sample that continues them; `text` has replayed them.
        Close the returned request when no caller waits for it.
        """
        request = Request(
            # Never reused: late messages for an aborted request must not reach another.
            f"{request_id}.{next(self._serials)}",
            prompt_ids,
            params,
            time.monotonic() if arrival is None else arrival,
            priority,
            cache_namespace=cache_namespace,
            output_ids=list(output_ids),
        )
        if text is None:
            streams = [TextStream(self.tokenizer, params, index) for index in range(params.n)]
        else:
            streams = [text]
        opened = OpenRequest(self, request, streams, inbox, number)
        self.accepted += 1
        self.requests[request.request_id] = opened
        self.on_accepted()
        if self.closed.is_set():
            opened.fail(EngineDied("the engine is not running"))
        else:
            self.send(Submit(request))
        return opened

    # ---- asking for vectors ----

    async def embed(
        self,
        texts: Sequence[Sequence[int]] | PackedTexts,
        *,
        want: Literal["vector", "tokens", "score"] = "vector",
        types: Sequence[Sequence[int]] | None = None,
        request_id: str = "request",
        priority: int = 0,
    ) -> Floats:
        """Texts as token ids to a float32 array: a row per text [texts, vector_size], with want="tokens" a
        row per token, from a cross-encoder with want="score" [texts, 1] (logits).

        Raises as `generate` does. Cancelling aborts it in the engine. Nothing is truncated or padded: the
        caller adds special tokens, as `tokenizer.encode` does.
        """
        from ridgeline.engine.client.open_embedding import OpenEmbedding  # numpy: only for embeddings

        if self.closed.is_set():
            raise EngineDied("the engine is not running")
        width = 1 if want == "score" else self.hello.vector_size
        packed = texts if isinstance(texts, PackedTexts) else pack_texts(texts, types)
        opened = OpenEmbedding(f"{request_id}.{next(self._serials)}", packed, want, priority, width)
        if not opened.rows_left:
            return opened.values
        self.accepted += 1
        self._embeddings[opened.request_id] = opened
        self.on_accepted()
        self.send(opened.message())
        try:
            return await opened.done
        except asyncio.CancelledError:
            self.send(Abort(opened.request_id))
            raise
        finally:
            del self._embeddings[opened.request_id]

    async def ping(self) -> EngineStats:
        """Answered by the engine's loop between two steps: an answer means progress."""
        answer = await self._ask(Ping(next(self._serials)))
        assert isinstance(answer, Pong)
        return answer.stats

    async def step_age(self) -> float:
        """Seconds that the step under way has taken; 0: none is. Answered also in the middle of a step."""
        answer = await self._ask(Beat(next(self._serials)))
        assert isinstance(answer, Beating)
        return answer.step_s

    async def dump_steps(self, since: int = -1) -> list[StepRecord]:
        """The step records that the engine still has, after number `since`."""
        answer = await self._ask(DumpSteps(next(self._serials), since))
        assert isinstance(answer, StepDump)
        return answer.steps

    async def count_experts(self) -> dict[int, list[int]]:
        """For each layer with experts, the tokens that chose each of them since the engine started."""
        answer = await self._ask(CountExperts(next(self._serials)))
        assert isinstance(answer, ExpertsCounted)
        return answer.tokens

    def watch_prefixes(self, watch: bool) -> None:
        """Have `on_prefixes` called with the cached blocks, then with every change; or no longer."""
        self.send(WatchPrefixes(watch))

    def stop_engine(self) -> None:
        """Tell the engine to stop and exit. Open requests then end with that reason."""
        self._end_reason = "the engine was stopped before this request was complete"
        self.send(Stop())

    async def close(self) -> None:
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            await on_close()
        self._reading.cancel()
        self._end_everything("the connection was closed")
        self._writer.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def open_requests(self) -> int:
        return len(self.requests) + len(self._embeddings)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests that have no output yet."""
        return sum(request.queued_tokens for request in self.requests.values())

    async def _ask(self, question: Question) -> Answer:
        if self.closed.is_set():
            raise EngineDied("the engine is not running")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[question.id] = answer
        self.send(question)
        try:
            return await answer
        finally:
            self._answers.pop(question.id, None)

    # ---- the socket ----

    def send(self, message: ToEngine) -> None:
        # Nothing is sent to an engine that has just died; `_read` is about to fail every stream.
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(await _read_message(self._reader))
        except (OSError, EOFError):
            self._end_everything(self._end_reason)
        except Exception as error:  # an invalid message: what follows cannot be trusted either
            self._end_everything(f"cannot read the engine's message: {error}")
            self._writer.close()

    def _dispatch(self, message: ToFront) -> None:
        if isinstance(message, Beating):  # not from the loop: no progress
            self._answer(message.id, message)
            return
        self.heard_at = time.monotonic()
        match message:
            case Outputs(deltas, stats):
                self.stats = stats
                for delta in deltas:
                    request = self.requests.get(delta.request_id)
                    if request is not None:
                        request.push(delta, stats.last_step_end)
            case Embedded(request_id, row, values, stats):
                self.stats = stats
                embedding = self._embeddings.get(request_id)
                if embedding is not None:
                    embedding.push(row, values)
            case Refused():
                refused = self.requests.get(message.request_id) or self._embeddings.get(message.request_id)
                if refused is not None:
                    refused.fail(_refusal(message))
            case Pong(id, stats):
                self.stats = stats
                self._answer(id, message)
            case PrefixChanges():
                self.on_prefixes(message)
            case StepDump(id, _) | ExpertsCounted(id, _):
                self._answer(id, message)

    def _answer(self, id: int, message: Answer) -> None:
        future = self._answers.get(id)
        if future is not None and not future.done():
            future.set_result(message)

    def _end_everything(self, reason: str) -> None:
        """Fail every open stream: none ends as if it were complete."""
        self.closed.set()
        for request in list(self.requests.values()):
            request.fail(EngineDied(reason))
        for embedding in self._embeddings.values():
            embedding.fail(EngineDied(reason))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDied(reason))


async def _read_message(reader: asyncio.StreamReader) -> ToFront:
    header = await reader.readexactly(FRAME_HEADER.size)
    return decode_to_front(await reader.readexactly(FRAME_HEADER.unpack(header)[0]))


def _refusal(message: Refused) -> EngineError:
    if message.kind == "full":
        return QueueFull(message.waiting, message.retry_after_s)
    if message.kind == "failed":
        return RequestFailed(message.message)
    return InvalidRequest(message.field, message.message)
