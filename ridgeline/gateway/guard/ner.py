"""NameFinder: names and places by Presidio's NER, in separate processes (`ner_worker.py`).

Importing Presidio takes seconds and its model hundreds of megabytes: too much for a worker of the gateway.
The processes start with the worker and are restarted when they die. Texts are sent in pieces, and requests
take turns piece by piece: a long text does not delay other requests, and a request that times out fails
alone while the process finishes its piece.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
from collections.abc import Iterator

import msgspec

from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.guard.errors import GuardFailed
from ridgeline.gateway.guard.scanner import Finding

MOST_WAITING = 64
PIECE_CHARS = 5000  # 0.1 s or less with spaCy's small models
OVERLAP_CHARS = 200  # of neighbouring pieces: a name across the boundary is whole in one of them
START_S = 90.0
HANG_S = 30.0  # for one piece; a process that takes longer is killed
RESTART_S = 1.0
_MOST_ANSWER_BYTES = 8 * 2**20

Spans = list[tuple[int, int, str]]
_decoder = msgspec.msgpack.Decoder(list[Spans] | None)
_encode = msgspec.msgpack.Encoder().encode

log = logging.getLogger("ridgeline.gateway")


class NameFinder:
    def __init__(self, config: GuardConfig) -> None:
        self._command = [
            sys.executable, "-m", "ridgeline.gateway.guard.ner_worker",
            config.ner_model, config.ner_language, ",".join(config.ner_kinds),
        ]  # fmt: skip
        self._config = config
        self._idle: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._running: set[asyncio.subprocess.Process] = set()  # their models are loaded
        self._keepers: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[list[Spans] | None]] = set()
        self._waiting = 0

    @property
    def is_ready(self) -> bool:
        return bool(self._running)

    async def start(self) -> None:
        """Start the processes and wait until one has loaded its model; GuardFailed if it cannot."""
        begun: list[asyncio.Future[None]] = []
        for _ in range(self._config.ner_processes):
            begun.append(asyncio.get_running_loop().create_future())
            self._keepers.append(asyncio.create_task(self._keep(begun[-1])))
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        next(one for one in begun if one.done()).result()

    async def find(self, texts: list[str]) -> dict[str, list[Finding]]:
        """Findings by text, in order and without overlaps; texts without findings are left out."""
        config = self._config
        size = sum(map(len, texts))
        if size > config.ner_max_chars:
            raise BadRequest(
                f"the request has {size} characters of text; this key's policy checks names in at "
                f"most {config.ner_max_chars}; send less text in one request",
                code="guard_text_too_long",
            )
        if self._waiting >= MOST_WAITING:
            raise GuardFailed("the check for names is overloaded; try again later")
        found: dict[str, Spans] = {}
        self._waiting += 1
        try:
            async with asyncio.timeout(config.ner_timeout_ms / 1000):
                for question in _questions(texts):
                    answer = await self._ask([piece for _, _, piece in question])
                    if answer is None or len(answer) != len(question):
                        raise GuardFailed("the check for names failed; nothing was forwarded")
                    for (text, offset, _), spans in zip(question, answer, strict=True):
                        found.setdefault(text, []).extend((a + offset, b + offset, c) for a, b, c in spans)
        except TimeoutError:
            raise GuardFailed(
                "the check for names exceeded its time limit (ner_timeout_ms); nothing was forwarded"
            ) from None
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):  # the process died
            raise GuardFailed("the check for names failed; nothing was forwarded") from None
        finally:
            self._waiting -= 1
        return {text: _apart(spans) for text, spans in found.items() if spans}

    async def close(self) -> None:
        """Stop the processes. `start` may be called again."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, *self._asking, return_exceptions=True)
        self._keepers.clear()

    async def _ask(self, texts: list[str]) -> list[Spans] | None:
        """Ask the next free process. A cancelled caller does not stop the process."""
        process = await self._idle.get()
        while process.returncode is not None:
            process = await self._idle.get()
        task = asyncio.create_task(self._answered(process, _encode(texts)))
        self._asking.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def _answered(self, process: asyncio.subprocess.Process, question: bytes) -> list[Spans] | None:
        try:
            async with asyncio.timeout(HANG_S):
                answer = await _exchange(process, question)
        except BaseException:
            _end(process)
            raise
        self._idle.put_nowait(process)
        return answer

    def _done(self, task: asyncio.Task[list[Spans] | None]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved even if the caller was cancelled, or asyncio logs the exception

    async def _keep(self, begun: asyncio.Future[None]) -> None:
        """One process, restarted whenever it ends."""
        pipe = asyncio.subprocess.PIPE
        while True:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=2**22
            )
            try:
                async with asyncio.timeout(START_S):
                    await _exchange(process, _encode([]))  # set when the model is loaded
                self._running.add(process)
                self._idle.put_nowait(process)
                if not begun.done():
                    begun.set_result(None)
                await process.wait()
                log.warning("an NER process ended; restarting it")
            except (OSError, EOFError, TimeoutError, msgspec.MsgspecError):
                message = f"NER did not start: is the spaCy model {self._config.ner_model} installed?"
                if not begun.done():
                    begun.set_exception(GuardFailed(message))
                log.error(message)
            finally:
                self._running.discard(process)
                _end(process)
                await process.wait()
            await asyncio.sleep(RESTART_S)


async def _exchange(process: asyncio.subprocess.Process, question: bytes) -> list[Spans] | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(struct.pack("<I", len(question)) + question)
    await process.stdin.drain()
    (length,) = struct.unpack("<I", await process.stdout.readexactly(4))
    if length > _MOST_ANSWER_BYTES:
        raise ValueError("the answer is too long")
    answer: list[Spans] | None = _decoder.decode(await process.stdout.readexactly(length))
    return answer


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


def _questions(texts: list[str]) -> Iterator[list[tuple[str, int, str]]]:
    """Texts in batches of about PIECE_CHARS: each part is (text, offset of the piece, the piece)."""
    question: list[tuple[str, int, str]] = []
    size = 0
    for text in texts:
        for start, end in pieces(text):
            if question and size + end - start > PIECE_CHARS:
                yield question
                question, size = [], 0
            question.append((text, start, text[start:end]))
            size += end - start
    if question:
        yield question


def pieces(text: str) -> Iterator[tuple[int, int]]:
    """Where to split: after a line, a sentence or a word, with an overlap."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        latest = start + PIECE_CHARS
        earliest = start + PIECE_CHARS // 2
        ends = (text.rfind(mark, earliest, latest) + len(mark) for mark in ("\n", ". ", " "))
        end = next((end for end in ends if end > earliest), latest)
        yield start, end
        before = end - OVERLAP_CHARS
        word = text.find(" ", before, end)
        start = before if word < 0 else word + 1
    yield start, len(text)


def _apart(spans: Spans) -> list[Finding]:
    """In order; of two overlapping findings, keep the one that begins first, then the longer one."""
    kept: list[Finding] = []
    for start, end, kind in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not kept or start >= kept[-1][1]:
            kept.append(Finding(start, end, kind))
    return kept
