"""A stand-in for the engine's client, for what a real engine cannot be made to do on command: die between
two tokens, refuse, fail, flood a stream. Its tokens are UTF-8 bytes, so half characters come for free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

from ridgeline.engine.client.inbox import Inbox
from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.link.messages import Hello
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.models.errors import TemplateError
from ridgeline.models.text.chat_template import ChatTemplate
from ridgeline.telemetry.stats import EngineStats, StepRecord
from ridgeline.telemetry.timing import TimingRecord

BEGIN, END = 256, 257
SPECIAL = {BEGIN: b"<s>", END: b"</s>"}
VOCAB_SIZE = 258
MAX_CONTEXT = 200

Script = Callable[[list[int], SamplingParams], AsyncIterator[OutputChunk]]


class ByteTokenizer:
    vocab_size = VOCAB_SIZE
    special_ids = frozenset(SPECIAL)
    added_tokens: ClassVar = {text.decode(): id for id, text in SPECIAL.items()}

    def __init__(self, template: str = "{{ messages }}") -> None:
        """template: where the server looks for the formats of calls and reasoning; nothing is rendered."""
        self.chat_template = ChatTemplate(template)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        begins = add_special or text.startswith("<s>")
        return ([BEGIN] if begins else []) + list(text.removeprefix("<s>").encode())

    def tokens_beyond(self, text: str, limit: int) -> int | None:
        tokens = len(text.encode())
        return tokens if tokens > max(limit, 16_384) else None  # as the real one: short texts are encoded

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        kept = [b"" if skip_special and id in SPECIAL else self.token_bytes(id) for id in ids]
        return b"".join(kept).decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        if variables.get("refuse"):
            raise TemplateError("the chat template rejected these messages: as told")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return "<s>" + text + ("assistant: " if add_generation_prompt else "")

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        return SPECIAL.get(id) or bytes([id])


class ScriptedClient:
    """Plays `script` for every request; remembers what was asked, and which requests were closed early."""

    open_requests = 0

    def __init__(self, script: Script, template: str = "{{ messages }}") -> None:
        self.tokenizer = ByteTokenizer(template)
        self.hello = Hello(1, "scripted", "none", MAX_CONTEXT, 8, 4096, VOCAB_SIZE, 16, {}, {}, {})
        self.stats = EngineStats()
        self.closed = asyncio.Event()
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        inbox: Inbox,
        number: int,
        *,
        request_id: str,
        **options: Any,
    ) -> ScriptedRequest:
        self.asked.append({"prompt": prompt, "params": params, "request_id": request_id, **options})
        return ScriptedRequest(self, self.script(prompt, params), inbox, number, request_id)

    async def dump_steps(self, since: int = -1) -> list[StepRecord]:
        steps = [StepRecord(number, 0.5, 10 * number, 1, 100, 0, 0, 0.25, 0.001) for number in (1, 2)]
        return [step for step in steps if step.step_id > since]

    async def count_experts(self) -> dict[int, list[int]]:
        return {1: [6, 2, 0, 0], 3: [2, 2, 2, 2], 5: [0, 0, 0, 0]}


class ScriptedRequest:
    """A script under way, putting its chunks into an inbox."""

    def __init__(
        self,
        client: ScriptedClient,
        chunks: AsyncIterator[OutputChunk],
        inbox: Inbox,
        number: int,
        request_id: str,
    ) -> None:
        self._client = client
        self._inbox = inbox
        self._number = number
        self._request_id = request_id
        inbox.open_requests += 1
        self._playing = asyncio.create_task(self._play(chunks))

    async def _play(self, chunks: AsyncIterator[OutputChunk]) -> None:
        try:
            async for chunk in chunks:
                self._inbox.put(self._number, chunk)
        except Exception as error:
            self._inbox.fail(error)
        self._inbox.end_request()

    def close(self) -> None:
        if not self._playing.done():
            self._playing.cancel()
            self._client.aborted.append(self._request_id)


class ScriptedSupervisor:
    def __init__(self, client: ScriptedClient | None) -> None:
        self.client = client
        self.draining = False
        self.reason = "" if client else "the engine is being started"

    def ready(self) -> tuple[bool, str]:
        return not self.reason, self.reason or "ready"


def timing(prompt: list[int], output_tokens: int) -> TimingRecord:
    now = time.monotonic()
    return TimingRecord(
        now,
        admitted=now,
        first_prefill=now,
        token_times=[now] * output_tokens,
        end=now,
        prompt_tokens=len(prompt),
        cached_tokens=len(prompt) // 2,
        end_reason="stop",
    )


def logprob(token: int, alternatives: int) -> TokenLogprob:
    top = [((token + i) % 256, -0.5 - i) for i in range(alternatives)]
    return TokenLogprob(token, -0.5, 1, top)


def last_chunk(index: int, prompt: list[int], output_tokens: int) -> OutputChunk:
    return OutputChunk(
        index, finish_reason=FinishReason.STOP, stop_reason=END, timing=timing(prompt, output_tokens)
    )


def say(text: str, pause_s: float = 0.0) -> Script:
    """Every sample says `text`, a byte at a time, interleaved, with the log-probabilities asked for."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        raw = text.encode()
        if params.prompt_logprobs is not None:  # in two chunks, as chunked prefill sends them
            told = [logprob(token, params.prompt_logprobs) for token in prompt[1:]]
            half = len(told) // 2
            yield OutputChunk(0, prompt_logprobs=told[:half])
            await asyncio.sleep(0.01)  # an endpoint that does not wait for the rest would answer now
            yield OutputChunk(0, prompt_logprobs=told[half:])
        shown = 0
        for position in range(len(raw)):
            await asyncio.sleep(pause_s)
            whole = raw[: position + 1].decode(errors="ignore")
            for index in range(params.n):
                token = raw[position]
                known = [] if params.logprobs is None else [logprob(token, params.logprobs)]
                yield OutputChunk(index, whole[shown:], [token], known)
            shown = len(whole)
        for index in range(params.n):
            yield last_chunk(index, prompt, len(raw))

    return script


def fail(error: Exception, after: str = "") -> Script:
    """Says `after` in one chunk, then raises."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        if after:
            yield OutputChunk(0, after, list(after.encode()))
        raise error

    return script


def hang(after: str = "", said: asyncio.Event | None = None) -> Script:
    """Says `after`, sets `said`, then nothing for ever: a request that waits, queued or between tokens."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        if after:
            yield OutputChunk(0, after, list(after.encode()))
        if said is not None:
            said.set()
        await asyncio.Event().wait()

    return script


def flood(chunks: int, characters: int) -> Script:
    """Many large chunks, as fast as they are taken."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        for _ in range(chunks):
            await asyncio.sleep(0)
            yield OutputChunk(0, "x" * characters, [120])
        yield last_chunk(0, prompt, chunks)

    return script
