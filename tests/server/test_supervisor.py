"""The supervisor against engines that die, lie and dawdle: a stub process in place of the real one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ridgeline.engine.client.launch import EngineCannotStart
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import EngineDied
from ridgeline.models.errors import BrokenModel
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.config import ServerConfig
from ridgeline.server.process import supervisor as module
from ridgeline.server.process.main import Supervised, _start_all
from ridgeline.server.process.setup import ModelSetup
from ridgeline.server.process.supervisor import Supervisor
from ridgeline.server.process.weights import ReadyFiles
from tests.patience import PATIENCE_S

STUB = Path(__file__).with_name("stub_engine.py")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module, "RESTART_PAUSES_S", (0.0, 0.05))
    monkeypatch.setattr(module, "PING_EVERY_S", 0.05)
    monkeypatch.setattr(module, "STOP_S", 2.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)


def supervisor_of(behaviours: str) -> Supervisor:
    supervisor = Supervisor(
        EngineConfig(), Path("no-model"), ServerConfig(), program=(sys.executable, str(STUB), behaviours)
    )
    supervisor._tokenizer = object()  # type: ignore[assignment]  # the stub has no text
    return supervisor


def children() -> list[int]:
    """The stub engines that are alive: this process may have other children, a live server for one."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if str(STUB) in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(int(pid))
    return found


def open_files() -> int:
    """Without those of garbage, which the collector may close at any moment."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def until(condition, what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


async def test_the_tokenizer_is_read_before_whatever_the_caller_does_next(smollm2_path):
    """Building it takes memory for a moment, which the imports of the HTTP stack then fill."""
    supervisor = Supervisor(
        EngineConfig(), smollm2_path, ServerConfig(), program=(sys.executable, str(STUB), "never ready")
    )
    await supervisor.begin()
    assert isinstance(supervisor._tokenizer, Tokenizer)
    await supervisor.stop()


async def test_a_model_without_a_tokenizer_is_said_and_leaves_nothing(tmp_path):
    supervisor = Supervisor(
        EngineConfig(), tmp_path, ServerConfig(), program=(sys.executable, str(STUB), "never ready")
    )
    with pytest.raises(BrokenModel, match="has no tokenizer"):
        await supervisor.start()
    await supervisor.stop()
    assert children() == []
    assert not supervisor._folder.exists()


async def test_starts_that_fail_in_every_way_are_followed_by_another_until_one_succeeds():
    """A crash, a stated reason, a process that says no Hello: each is ended, and none stops the row."""
    supervisor = supervisor_of("ok,exit:1,exit:3,rude,ok")
    dead_figures = []
    supervisor.on_restart = lambda: dead_figures.append(supervisor.client and supervisor.client.stats.steps)
    await supervisor.start()
    await until(lambda: supervisor.client.stats.steps == 5, "the engine never answered a ping")
    sockets = open_files()
    os.kill(supervisor._process.pid, signal.SIGKILL)
    await until(lambda: supervisor.restarts == 4 and supervisor.ready()[0], "no engine was started again")
    assert dead_figures == [5, None, None, None], "a dead engine's figures are for the totals once"
    assert len(children()) == 1
    assert open_files() == sockets, "the dead engine's socket stayed open"
    await supervisor.stop()
    assert children() == []
    assert not supervisor._folder.exists()


async def test_an_engine_whose_answers_cannot_be_read_is_replaced():
    supervisor = supervisor_of("garbled,ok")
    await supervisor.start()
    await until(lambda: supervisor.restarts == 1 and supervisor.ready()[0], "the garbled engine was kept")
    assert len(children()) == 1
    await supervisor.stop()


async def test_a_start_that_cannot_even_fork_is_tried_again(monkeypatch):
    supervisor = supervisor_of("ok")
    await supervisor.start()
    real, failures = asyncio.create_subprocess_exec, []

    async def short_of_memory(*args, **kwargs):
        if len(failures) < 2:
            failures.append(1)
            raise OSError(12, "Cannot allocate memory")
        return await real(*args, **kwargs)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", short_of_memory)
    os.kill(supervisor._process.pid, signal.SIGKILL)
    await until(lambda: supervisor.restarts == 3 and supervisor.ready()[0], "the watch gave up")
    await supervisor.stop()


async def test_where_a_stuck_engine_is_is_one_record_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(module, "STACK_S", 0.1)
    supervisor = supervisor_of("stuck")
    supervisor._stall_s = 0.5
    await supervisor.start()
    told = lambda: [record for record in caplog.records if "stub_engine.py" in record.getMessage()]  # noqa: E731
    await until(told, "the engine's stack was not logged")
    assert told()[0].levelname == "ERROR"
    os.kill(supervisor._process.pid, signal.SIGKILL)
    await supervisor.stop()


@pytest.mark.parametrize(("code", "error"), [(3, EngineCannotStart), (1, EngineDied)])
async def test_a_first_start_that_fails_is_said_and_leaves_nothing(code, error):
    supervisor = supervisor_of(f"exit:{code}")
    with pytest.raises(error):
        await supervisor.start()
    await supervisor.stop()
    assert children() == []
    assert not supervisor._folder.exists()


async def test_stopping_during_the_first_start_leaves_nothing():
    supervisor = supervisor_of("never ready")
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: supervisor._process is not None, "no process was started")
    starting.cancel()
    await asyncio.wait([starting])
    await supervisor.stop()
    assert children() == []
    assert not supervisor._folder.exists()


async def test_stopping_during_a_restart_leaves_nothing():
    supervisor = supervisor_of("ok,never ready")
    await supervisor.start()
    first = supervisor._process.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor._process.pid != first, "no second process was started")
    assert not supervisor.ready()[0]
    await supervisor.stop()
    assert children() == []
    assert not supervisor._folder.exists()


async def test_a_front_that_must_leave_at_once_takes_its_engine_along():
    supervisor = supervisor_of("ok")
    await supervisor.start()
    engine = supervisor._process
    supervisor.abandon()
    assert not supervisor._folder.exists()
    await supervisor.stop()
    assert engine.returncode == -signal.SIGKILL


async def test_the_death_of_an_engine_leaves_no_task_with_an_unread_error():
    unread = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
    supervisor = supervisor_of("ok")
    for restarts in range(3):
        if restarts == 0:
            await supervisor.start()
        os.kill(supervisor._process.pid, signal.SIGSTOP)  # so that a ping is under way when it dies
        await asyncio.sleep(0.15)
        os.kill(supervisor._process.pid, signal.SIGKILL)
        await until(
            lambda wanted=restarts + 1: supervisor.restarts == wanted and supervisor.ready()[0], "no restart"
        )
    await supervisor.stop()
    await asyncio.sleep(0.05)
    gc.collect()
    assert unread == []


async def test_the_first_of_several_that_cannot_start_is_said_at_once():
    broken, slow = supervisor_of("exit:1"), supervisor_of("never ready")
    async with asyncio.timeout(PATIENCE_S):  # the slow one alone would take minutes
        with pytest.raises(EngineDied, match="while starting"):
            await _start_all([slow, broken])
    for supervisor in (broken, slow):
        await supervisor.stop()
    assert children() == []


async def test_an_engine_that_died_while_others_started_is_named_as_such():
    supervisor = supervisor_of("ok")
    setup = ModelSetup(EngineConfig(), ("small",))
    assert "small · its engine died" in Supervised(setup, supervisor, ReadyFiles(Path())).startup_lines()
