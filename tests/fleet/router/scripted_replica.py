"""A replica whose every byte a test decides: feed, marked streams, whole answers, faults.

It stands in where a real server cannot be made to fail at a chosen byte. Its "model" counts: the tokens of a
stream are 0, 1, 2 … and a resumed stream goes on after the tokens of the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from ridgeline.fleet.messages import ReplicaEntry
from ridgeline.replica.messages import Load, Snapshot, Started, encode_line
from ridgeline.replica.resume import Head, Marker, ResumeState, Tokens, encode_group, split_state
from tests.fleet.router.small_http import Asked, SmallHttp

MODEL = "counter"


class ScriptedReplica:
    def __init__(
        self, id: str, *, epoch: str = "", version: str = "v1", max_running: int = 4, region: str = ""
    ) -> None:
        self.id, self.epoch, self.version, self.max_running = id, epoch or f"epoch-{id}", version, max_running
        self.region = region
        self.feeds: list[str] = []  # paths of feed requests
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.states: list[ResumeState] = []  # of resumed streams
        self.steps = self.unanswered = 0
        self.running = 0
        self.moves = True  # whether its steps go on
        self.is_alive, self.beats, self.step_s = True, 0, 0.0  # whether its engine's process answers
        self.sends_load = True
        self.is_cut_off = False  # connections are accepted, and nothing is ever answered
        self.status = 200
        self.status_lines: tuple[str, ...] = ()  # further headers of an answer with another status
        self.tokens = 8
        self.event = b'data: {"token":%d}\n\n'
        self.pause_s = 0.0
        self.gate: asyncio.Event | None = None  # streams stop at `gate_at` until it is set
        self.gate_at = 4
        self.fault: Callable[[Asked, int], Awaitable[bool]] | None = None  # before each token; True: ended
        self.events: asyncio.Queue[bytes] = asyncio.Queue()  # further lines of the feed
        self.extra: dict[str, object] = {}  # further fields of a whole answer
        self.adopted: tuple[str, ...] = ()  # responses that it stores and another replica began
        self.ending = b"data: [DONE]\n\n"
        self._http = SmallHttp(self._answer)

    async def start(self, port: int = 0) -> ScriptedReplica:
        self._http = SmallHttp(self._answer)
        await self._http.start(port=port)
        return self

    async def stop(self) -> None:
        await self._http.stop()

    async def die(self) -> None:
        """As kill -9 does: the listener is gone, connections break."""
        await self.stop()

    def entry(self, **changes: object) -> ReplicaEntry:
        values = {
            "id": self.id,
            "model": MODEL,
            "url": f"http://127.0.0.1:{self._http.port}",
            "state": "ready",
            "epoch": self.epoch,
            "version": self.version,
            "region": self.region,
        }
        return ReplicaEntry(**{**values, **changes})

    async def _answer(self, asked: Asked) -> None:
        if self.is_cut_off:
            self.unanswered += 1
            await asyncio.Event().wait()
        if asked.path.startswith("/replica/feed"):
            await self._feed(asked)
            return
        self.headers.append(asked.headers)
        body, state = asked.body, ResumeState()
        if "x-ridgeline-resume" in asked.headers:
            body, state = split_state(asked.body)
            self.states.append(state)
            if state.head is not None and state.head.version != self.version:
                asked.whole(409, b'{"error":{"message":"another version"}}')
                return
        fields = msgspec.json.decode(body)
        self.bodies.append(fields)
        self.running += 1
        try:
            if self.status != 200:
                lines = ("content-type: application/json", *self.status_lines)
                asked.whole(self.status, b'{"error":{"message":"scripted"}}', *lines)
            elif fields.get("stream"):
                await self._stream(asked, state)
            else:
                if self.gate is not None:
                    await self.gate.wait()
                answer = {"replica": self.id, "text": "".join(map(str, range(self.tokens))), **self.extra}
                asked.whole(200, msgspec.json.encode(answer), "content-type: application/json")
        finally:
            self.running -= 1

    async def _stream(self, asked: Asked, state: ResumeState) -> None:
        asked.head(200, "content-type: text/event-stream", "x-ridgeline-resumable: 1")
        done = state.num_tokens
        head = None if done else Head("id-1", 1, 7, self.version, self.epoch)
        for token in range(done, self.tokens):
            if self.gate is not None and token == self.gate_at:
                await self.gate.wait()
            if self.is_cut_off:
                await asyncio.Event().wait()
            if self.fault is not None and await self.fault(asked, token):
                return
            event = self.event % token
            marker = Marker(len(event), [Tokens(0, [token])], head=head)
            head = None
            group = encode_group(marker, event)
            half = len(group) // 2
            await asked.piece(group[:half])  # a group in two pieces: only complete ones may pass
            await asyncio.sleep(self.pause_s)
            await asked.piece(group[half:])
        end = self.ending
        await asked.piece(encode_group(Marker(len(end), end=True), end))
        asked.end()

    async def _feed(self, asked: Asked) -> None:
        self.feeds.append(asked.path)
        asked.head(200, "content-type: application/x-ndjson")
        if f"epoch={self.epoch}&" not in asked.path:
            started = Started(
                self.epoch, 1, MODEL, (MODEL, "alias"), self.version, self.max_running, 64, 16, {}
            )
            started = msgspec.structs.replace(started, adopted=self.adopted)
            await asked.piece(encode_line(started))
            await asked.piece(encode_line(Snapshot(0, ())))
        while True:
            if self.is_cut_off:
                await asyncio.Event().wait()
            if self.sends_load:
                self.steps += self.moves
                self.beats += self.is_alive
                await asked.piece(encode_line(self.load()))
            try:
                await asked.piece(await asyncio.wait_for(self.events.get(), 0.02))
            except TimeoutError:
                continue

    def load(self) -> Load:
        counts = (self.running, 0, 0, 0, 0, self.steps, 0, 0, 0, 0, 0, 0)
        return Load(0, "ready", *counts, (), self.beats, self.step_s, adopted=self.adopted)
