"""EngineLoop, the engine process: receive, schedule, execute, publish; a plain loop around EngineCore.

Started by the server's supervisor as `python -m ridgeline.engine.run.engine_loop`. It handles no text: token
ids in, token ids out. It exits when told to, or when the process that started it has exited.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import ridgeline.engine.start.one_blas_thread  # noqa: F401 (before what imports numpy)
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import EXIT_CANNOT_START, EngineError, InvalidRequest, QueueFull
from ridgeline.engine.link.messages import (
    Abort,
    CountExperts,
    DumpSteps,
    Embed,
    ExpertsCounted,
    Hello,
    Outputs,
    Ping,
    Pong,
    PrefixChanges,
    StepDump,
    Stop,
    Submit,
    ToEngine,
    WatchPrefixes,
    refusal,
)
from ridgeline.engine.link.transport import Closed, EngineSocket, Opened, Woken
from ridgeline.engine.schedule.request import Request
from ridgeline.engine.schedule.step import SeqDelta
from ridgeline.engine.start.build import BuiltEngine, StartupBudget, build_engine
from ridgeline.engine.start.progress import WeightsProgress
from ridgeline.models.errors import ModelError
from ridgeline.models.files.content_id import content_id
from ridgeline.models.spec.readers.encoder_config import is_encoder
from ridgeline.options import OptionError
from ridgeline.telemetry import logs

if TYPE_CHECKING:
    from ridgeline.engine.encoder.encoder_loop import EncoderLoop

log = logging.getLogger("ridgeline.engine")

IDLE_WAIT_S = 0.5
# Between two pieces of idle work the loop sleeps: a thread that never lets go of Python's lock would keep the
# socket's thread from reading a request, for milliseconds at a time.
PIECE_PAUSE_S = 0.001
SWITCH_S = 0.0005  # for which a thread may hold Python's lock while another one wants it (Python: 0.005)


class EngineLoop:
    """Owns the core and the socket. Internal request names are 'connection:request id'."""

    def __init__(
        self, built: BuiltEngine, socket: EngineSocket, model: str, parent: int, files: str = ""
    ) -> None:
        """files: names the content of the model's files."""
        self._built = built
        self._core = built.core
        self._socket = socket
        self._model = model
        self._files = files
        self._parent = parent  # the process that started this one; it may exit while the weights load
        self._owners: dict[str, tuple[int, str]] = {}  # open requests → connection, and their id there
        self._open_samples: dict[str, int] = {}  # open requests → unfinished samples
        self._index = built.core.scheduler.index
        self._watchers: set[int] = set()  # connections that are told of the prefix cache
        self._stopping = False
        self._idle_timeout_s = PIECE_PAUSE_S
        if self._core.grammars is not None:
            self._core.grammars.on_done = lambda: socket.arrivals.put((-1, Woken()))

    def run(self) -> None:
        while not self._stopping:
            self._receive()
            for name, error in self._core.admit_compiled():
                connection, request_id = self._owners.pop(name)
                self._socket.send(connection, refusal(request_id, error))
                del self._open_samples[name]
            if self._core.has_work:
                self._socket.step_began = time.monotonic()
                deltas = self._core.step()
                self._socket.step_began = 0.0
                self._publish(deltas)
                if self._index.journal:
                    self._publish_prefixes()
            else:
                self._idle_timeout_s = PIECE_PAUSE_S if self._core.idle() else IDLE_WAIT_S
                if os.getppid() != self._parent:
                    log.warning("the server process has exited; stopping")
                    return
        self._socket.flush(timeout_s=1.0)

    def _receive(self) -> None:
        """Handle everything that has arrived; block only when there is nothing else to do."""
        for connection, message in self._socket.arrived(
            None if self._core.has_work else self._idle_timeout_s
        ):
            self._handle(connection, message)

    def _handle(self, connection: int, message: ToEngine | Opened | Closed | Woken) -> None:
        match message:
            case Submit(request):
                self._submit(connection, request)
            case Embed(request_id):
                unsuitable = InvalidRequest(
                    "model", f"{self._model} generates text and cannot compute embeddings"
                )
                self._socket.send(connection, refusal(request_id, unsuitable))
            case Abort(request_id, index):
                self._publish(self._core.abort(f"{connection}:{request_id}", index))
            case Ping(id):
                self._socket.send(connection, Pong(id, self._core.stats()))
            case DumpSteps(id, since):
                self._socket.send(connection, StepDump(id, self._core.steps.dump(since)))
            case CountExperts(id):
                self._socket.send(connection, ExpertsCounted(id, self._core.expert_counts()))
            case WatchPrefixes(watch):
                self._watch_prefixes(connection, watch)
            case Stop():
                self._stopping = True
            case Opened():
                self._socket.send(connection, self._hello())
            case Closed():
                self._watch_prefixes(connection, False)
                for name in [name for name, (owner, _) in self._owners.items() if owner == connection]:
                    self._publish(self._core.abort(name))

    def _submit(self, connection: int, request: Request) -> None:
        name = f"{connection}:{request.request_id}"
        try:
            self._core.add(replace(request, request_id=name))
        except (InvalidRequest, QueueFull) as error:
            self._socket.send(connection, refusal(request.request_id, error))
        else:
            self._owners[name] = (connection, request.request_id)
            self._open_samples[name] = request.params.n

    def _publish(self, deltas: list[SeqDelta]) -> None:
        """One message per connection and step."""
        by_owner: dict[int, list[SeqDelta]] = {}
        for delta in deltas:
            owner = self._owners.get(delta.request_id)
            if owner is None:
                continue
            connection, public_id = owner
            by_owner.setdefault(connection, []).append(SeqDelta(public_id, *delta[1:]))
            if delta.finish_reason is not None:
                self._finish_sample(delta.request_id)
        if by_owner:
            stats = self._core.stats()
            for connection, own_deltas in by_owner.items():
                self._socket.send(connection, Outputs(own_deltas, stats))

    def _watch_prefixes(self, connection: int, watch: bool) -> None:
        if watch:
            self._watchers.add(connection)
            self._index.journal = self._index.journal or {}
            cached = b"".join(name for name, _ in self._index.entries())
            self._socket.send(connection, PrefixChanges(cached, whole=True))
        else:
            self._watchers.discard(connection)
            if not self._watchers:
                self._index.journal = None

    def _publish_prefixes(self) -> None:
        changes, self._index.journal = self._index.journal or {}, {}
        stored = b"".join(name for name, is_indexed in changes.items() if is_indexed)
        removed = b"".join(name for name, is_indexed in changes.items() if not is_indexed)
        for connection in self._watchers:
            self._socket.send(connection, PrefixChanges(stored, removed))

    def _finish_sample(self, name: str) -> None:
        self._open_samples[name] -= 1
        if self._open_samples[name] == 0:
            del self._open_samples[name], self._owners[name]

    def _hello(self) -> Hello:
        built = self._built
        return Hello(
            pid=os.getpid(),
            model=self._model,
            backend=built.summary,
            max_context=built.plan.max_context,
            max_running=built.core.scheduler.limits.max_running,
            kv_tokens=built.plan.kv_tokens,
            vocab_size=built.spec.vocab_size,
            block_size=built.core.scheduler.limits.block_size,
            seconds=built.budget.seconds,
            bytes=built.budget.bytes,
            limits=built.limits,
            notes=built.notes,
            sampling=built.sampling,
            counts_experts=bool(self._core.expert_counts()),
            files=self._files,
            prefix_salt=built.core.scheduler.limits.model_salt,
        )


def main() -> int:
    args = _arguments()
    logs.setup(args.log_level, args.log_format)
    # The server decides when the engine stops; Ctrl-C, and SIGTERM from `timeout` or a service manager, reach
    # the whole process group. Running answers finish first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stacks = Path(args.stacks).open("w")  # noqa: SIM115 (open to the end; the supervisor logs what it holds)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    config = msgspec.json.decode(args.config, type=EngineConfig)
    budget = StartupBudget()
    budget.seconds["import"] = time.monotonic() - args.started
    path = Path(args.path)
    loop: EngineLoop | EncoderLoop | None = None
    try:
        if is_encoder(path):
            loop = _encoder_loop(config, path, budget, args)
        else:
            built = build_engine(config, path, budget, WeightsProgress(), untrusted_grammars=True)
    except (ModelError, EngineError, OptionError) as error:
        logs.fail(f"ridgeline: {error}")
        return EXIT_CANNOT_START
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # objects created so far stay alive; scanning them again would delay a step
    if loop is None:
        socket = EngineSocket(Path(args.socket))
        loop = EngineLoop(built, socket, config.model, args.parent, content_id(path))
    loop.run()
    return 0


def _encoder_loop(
    config: EngineConfig, path: Path, budget: StartupBudget, args: argparse.Namespace
) -> EncoderLoop:
    from ridgeline.engine.encoder.build import build_encoder
    from ridgeline.engine.encoder.encoder_loop import EncoderLoop

    built = build_encoder(config, path, budget)
    return EncoderLoop(built, EngineSocket(Path(args.socket)), config.model, args.parent)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run one engine behind a Unix socket (started by ridgeline serve)"
    )
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    parser.add_argument(
        "--stacks", default=os.devnull, help="file for the stacks of all threads, written on SIGUSR1"
    )
    parser.add_argument("--path", required=True, help="model directory or GGUF file")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument(
        "--parent", type=int, required=True, help="process id of the server; exit when it exits"
    )
    parser.add_argument("--started", type=float, required=True, help="monotonic time of the start")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
