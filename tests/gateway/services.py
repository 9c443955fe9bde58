"""Real Redis and PostgreSQL for the tests: those that CI has started, or their own ones.

RIDGELINE_TEST_REDIS and RIDGELINE_TEST_POSTGRES are URLs of servers that are already there, on loopback.
Without them, and for tests that stop and start a server, one is started from the Debian packages' programs;
without these the tests skip, and say so.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.ports import free_port


def _wait_for_port(port: int, process: subprocess.Popen[bytes], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended at once with {process.returncode}")
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"{what} did not listen within {PATIENCE_S:g} s")


class OwnRedis:
    """A Redis of the test's own, empty, in memory; it may be stopped and started again on its port."""

    def __init__(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed (Debian: redis-server)")
        self._program, self.port = program, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            self._program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--daemonize",
            "no",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tempfile.gettempdir())
        _wait_for_port(self.port, self._process, "redis-server")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing: worse than being gone."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class OwnPostgres:
    """A PostgreSQL cluster of the test's own; it may be stopped and started again, and keeps what it has."""

    def __init__(self) -> None:
        programs = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))
        if not programs:
            pytest.skip("PostgreSQL's server is not installed (Debian: postgresql)")
        self._bin, self.port = Path(programs[-1]).parent, free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="ridgeline-postgres-"))
        self._as_user: list[str] = []
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(self._folder, "postgres", "postgres")
            self._as_user = ["runuser", "-u", "postgres", "--"]
        data = str(self._folder / "data")
        command = [
            "initdb",
            "-D",
            data,
            "-U",
            "ridgeline",
            "-A",
            "trust",
            "-N",
            "--no-instructions",
            "-E",
            "UTF8",
        ]
        self._run(*command)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "ridgeline", "ridgeline")

    @property
    def url(self) -> str:
        return f"postgresql://ridgeline@127.0.0.1:{self.port}/ridgeline"

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [*self._as_user, str(self._bin / "postgres"), "-D", str(self._folder / "data"), *options]
        self._process = subprocess.Popen(
            command,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _wait_for_port(self.port, self._process, "postgres")
        self._until_ready()

    def stop(self) -> None:
        """At once, as when its machine is lost; what was committed is there after the next start."""
        if self._process is not None:
            self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "stop")
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _until_ready(self) -> None:
        until = time.monotonic() + PATIENCE_S
        asked = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(asked, check=False).returncode != 0:
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("PostgreSQL accepts no connections")
            time.sleep(0.05)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._bin / program), *arguments]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr}")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis that the tests of this process share: use keys with a prefix of your own."""
    given = os.environ.get("RIDGELINE_TEST_REDIS")
    if given:
        yield given
        return
    own = OwnRedis()
    yield own.url
    own.stop()


@pytest.fixture(scope="session")
def _postgres_server() -> Iterator[str]:
    given = os.environ.get("RIDGELINE_TEST_POSTGRES")
    if given:
        yield given
        return
    own = OwnPostgres()
    yield own.url
    own.remove()


@pytest.fixture
def postgres_url(_postgres_server: str) -> Iterator[str]:
    """An empty database of the test's own on the shared server; the URL's user may create databases."""
    import asyncio

    import asyncpg

    name = f"test_{uuid.uuid4().hex}"

    async def say(statement: str) -> None:
        connection = await asyncpg.connect(_postgres_server)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(say(f"CREATE DATABASE {name}"))
    yield _postgres_server.rpartition("/")[0] + "/" + name
    asyncio.run(say(f"DROP DATABASE {name} WITH (FORCE)"))
