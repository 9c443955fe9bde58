"""Starts an engine process, for the server's supervisor, and for `AsyncClient.start`.

Only what the engine process needs to start is imported here. The server imports the rest while the engine
loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import EXIT_CANNOT_START, EngineDied, EngineError
from ridgeline.models.errors import ModelError

if TYPE_CHECKING:
    from ridgeline.models.text.tokenizer import Tokenizer

# -P: do not import modules such as a user's random.py from the current directory.
ENGINE_PROGRAM = (sys.executable, "-P", "-m", "ridgeline.engine.run.engine_loop")
POLL_S = 0.01
LONGEST_SOCKET_FOLDER = 80
STOP_S = 5.0  # seconds from the stop message until the engine is killed

Connected = TypeVar("Connected")


class EngineCannotStart(EngineError):
    """The engine reported why it cannot start; a restart would not help."""


async def launch(
    config: EngineConfig,
    path: Path,
    socket_path: Path,
    log_flags: tuple[str, ...] = (),
    program: tuple[str, ...] = ENGINE_PROGRAM,
) -> asyncio.subprocess.Process:
    """Start the process. It opens its socket when it is warm; see `connect_when_ready`."""
    return await asyncio.create_subprocess_exec(
        *program,
        f"--socket={socket_path}",
        f"--stacks={stack_file(socket_path)}",
        f"--path={path}",
        f"--config={json.dumps(asdict(config))}",
        f"--parent={os.getpid()}",
        f"--started={time.monotonic()}",
        *log_flags,
        stdin=asyncio.subprocess.DEVNULL,
    )


async def connect_when_ready(
    process: asyncio.subprocess.Process, socket_path: Path, connect: Callable[[], Awaitable[Connected]]
) -> Connected:
    """Wait for the engine's socket while the process is alive, then return the result of `connect`."""
    while process.returncode is None:
        if socket_path.exists():
            with contextlib.suppress(ConnectionError, FileNotFoundError, asyncio.IncompleteReadError):
                return await connect()
        await asyncio.sleep(POLL_S)
    if process.returncode == EXIT_CANNOT_START:
        raise EngineCannotStart("the engine cannot start; its reason is above")
    raise EngineDied(f"the engine died while starting ({exit_reason(process.returncode)})")


def stack_file(socket_path: Path) -> Path:
    """The file for an engine process's thread stacks, written on SIGUSR1."""
    return socket_path.with_suffix(".stack")


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises UnsupportedModel for a model that is not served, whatever its tokenizer is."""
    from ridgeline.models.text.tokenizer import Tokenizer  # it also imports the chat templates' library

    try:
        return Tokenizer.load(path)
    except ModelError:
        from ridgeline.models.servable import refuse_unsupported

        refuse_unsupported(path)
        raise


def socket_folder() -> Path:
    """A private folder for an engine's socket. The path must stay under about 100 characters."""
    folder = tempfile.mkdtemp(prefix="ridgeline-")
    if len(folder) > LONGEST_SOCKET_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="ridgeline-", dir="/tmp")
    return Path(folder)


def exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


async def end_process(process: asyncio.subprocess.Process, folder: Path, timeout_s: float = 0.0) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), timeout_s)
    if process.returncode is None:
        process.kill()
        await process.wait()
    shutil.rmtree(folder, ignore_errors=True)
