"""EncoderLoop, an encoder's engine process: receive, compute, publish; with a decoder's program and socket.

`engine.run.engine_loop` runs it when the model is an encoder. Token ids come in, vectors go out.
"""

from __future__ import annotations

import logging
import os
import time

from ridgeline.engine.encoder.build import BuiltEncoder
from ridgeline.engine.encoder.core import EncodedRows
from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.link.messages import (
    Abort,
    CountExperts,
    DumpSteps,
    Embed,
    Embedded,
    ExpertsCounted,
    Hello,
    Ping,
    Pong,
    Refused,
    StepDump,
    Stop,
    Submit,
    ToEngine,
    refusal,
)
from ridgeline.engine.link.transport import Closed, EngineSocket, Opened, Woken

log = logging.getLogger("ridgeline.engine")

IDLE_WAIT_S = 0.5


class EncoderLoop:
    """Owns the core and the socket. Internal request names are 'connection:request id'."""

    def __init__(self, built: BuiltEncoder, socket: EngineSocket, model: str, parent: int) -> None:
        self._built = built
        self._core = built.core
        self._socket = socket
        self._model = model
        self._parent = parent
        self._owners: dict[str, tuple[int, str]] = {}
        self._stopping = False

    def run(self) -> None:
        while not self._stopping:
            self._receive()
            if self._core.has_work:
                self._socket.step_began = time.monotonic()
                answers = self._core.step()
                self._socket.step_began = 0.0
                self._publish(answers)
            elif os.getppid() != self._parent:
                log.warning("the server process has exited; stopping")
                return
        self._socket.flush(timeout_s=1.0)

    def _receive(self) -> None:
        """Handle everything that has arrived; block only when there is nothing else to do."""
        for connection, message in self._socket.arrived(None if self._core.has_work else IDLE_WAIT_S):
            self._handle(connection, message)

    def _handle(self, connection: int, message: ToEngine | Opened | Closed | Woken) -> None:
        match message:
            case Embed():
                self._embed(connection, message)
            case Submit(request):
                unsuitable = InvalidRequest("model", "computes embeddings and cannot generate text")
                self._socket.send(connection, refusal(request.request_id, unsuitable))
            case Abort(request_id, _):
                self._forget(f"{connection}:{request_id}")
            case Ping(id):
                self._socket.send(connection, Pong(id, self._core.stats()))
            case DumpSteps(id, since):
                self._socket.send(connection, StepDump(id, self._core.steps.dump(since)))
            case CountExperts(id):
                self._socket.send(connection, ExpertsCounted(id, {}))
            case Stop():
                self._stopping = True
            case Opened():
                self._socket.send(connection, self._hello())
            case Closed():
                for name in [name for name, (owner, _) in self._owners.items() if owner == connection]:
                    self._forget(name)

    def _embed(self, connection: int, message: Embed) -> None:
        name = f"{connection}:{message.request_id}"
        try:
            self._core.add(name, message)
        except (InvalidRequest, QueueFull) as error:
            self._socket.send(connection, refusal(message.request_id, error))
        else:
            self._owners[name] = (connection, message.request_id)

    def _publish(self, answers: list[EncodedRows]) -> None:
        stats = self._core.stats()
        for answer in answers:
            owner = self._owners.get(answer.name)
            if owner is None:
                continue
            connection, public_id = owner
            if answer.error is not None:
                self._socket.send(connection, Refused(public_id, "failed", message=answer.error))
            else:
                self._socket.send(connection, Embedded(public_id, answer.row, answer.values, stats))
            if answer.is_last:
                del self._owners[answer.name]

    def _forget(self, name: str) -> None:
        self._core.abort(name)
        self._owners.pop(name, None)

    def _hello(self) -> Hello:
        built, limits = self._built, self._core.limits
        return Hello(
            pid=os.getpid(),
            model=self._model,
            backend=built.summary,
            max_context=limits.max_text_tokens,
            max_running=limits.step_tokens,
            kv_tokens=0,
            vocab_size=limits.vocab_size,
            block_size=0,
            seconds=built.budget.seconds,
            bytes=built.budget.bytes,
            limits=built.limits,
            notes=built.notes,
            task="embed",
            vector_size=1 if built.spec.output == "score" else built.spec.hidden_size,
            scores_pairs=built.spec.output == "score",
        )
