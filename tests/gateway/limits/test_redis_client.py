"""Our Redis client: what leaves in one write, answers however they are cut, URLs, TLS."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.gateway.limits.redis_client import RedisClient, RedisError, RedisUnavailable
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.options import OptionError
from tests.conftest import free_port
from tests.gateway.limits.shared_redis import PATIENT, call, config, run
from tests.patience import PATIENCE_S


def test_calls_of_one_moment_leave_in_one_write_and_are_answered_in_order(redis_url: str) -> None:
    async def scenario() -> None:
        client = RedisClient(config(redis_url))
        await client.start()
        assert client._connection is not None
        writes: list[bytes] = []
        transport = client._connection._transport
        assert transport is not None

        class Spy:
            def write(self, data: bytes) -> None:
                writes.append(data)
                transport.write(data)

            def abort(self) -> None:
                transport.abort()

        client._connection._transport = Spy()  # type: ignore[assignment]
        answers = await asyncio.gather(*(client.call("ECHO", f"{number}") for number in range(100)))
        assert answers == [f"{number}".encode() for number in range(100)]
        assert len(writes) == 1
        await client.close()

    run(scenario())


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 90), max_size=8))
def test_answers_are_read_whole_however_they_are_cut(cuts: list[int]) -> None:
    stream = b"$5\r\nhe\r\no\r\n:42\r\n*3\r\n$-1\r\n*2\r\n:-1\r\n+OK\r\n$0\r\n\r\n-ERR no\r\n*0\r\n*-1\r\n"

    async def scenario() -> None:
        from ridgeline.gateway.limits.redis_client import _Connection

        class Transport:
            def write(self, data: bytes) -> None: ...

            def abort(self) -> None: ...

        connection = _Connection(asyncio.get_running_loop(), 60.0, lambda gone: None)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answers: list[Any] = []
        for _ in range(6):
            connection.submit(b"", answers.append)
        edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
        for start, end in itertools.pairwise(edges):
            connection.data_received(stream[start:end])
        assert isinstance(answers[3], RedisError)
        assert answers[:3] + answers[4:] == [b"he\r\no", 42, [None, [-1, b"OK"], b""], [], None]
        connection.drop("the test has ended")

    run(scenario())


def test_a_database_and_a_password_are_taken_from_the_url(redis_url: str) -> None:
    async def scenario() -> None:
        base = redis_url.rpartition("/")[0]
        other = config(f"{base}/3")
        await call(other, "SET", f"{other.prefix}:there", "1")
        assert await call(other, "DEL", f"{other.prefix}:there") == 1
        assert await call(config(f"{base}/0"), "EXISTS", f"{other.prefix}:there") == 0
        refused = RedisClient(config(base.replace("redis://", "redis://:wrong@") + "/0"))
        await refused.start()  # Redis has no password: it refuses this one
        assert not refused.available
        with pytest.raises(RedisUnavailable):
            await refused.call("PING")
        await refused.close()

    run(scenario())


def test_a_connection_with_tls_checks_the_servers_certificate(tmp_path: Path) -> None:
    program, openssl = shutil.which("redis-server"), shutil.which("openssl")
    if program is None or openssl is None:
        pytest.skip("redis-server and openssl are not both installed")
    certificate, key, port = tmp_path / "cert.pem", tmp_path / "key.pem", free_port()
    make = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    make += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*make, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    command = [program, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    command += ["--tls-ca-cert-file", str(certificate), "--requirepass", "p@ss"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    (tmp_path / "password").write_text("p@ss\n")

    async def scenario() -> None:
        url = f"rediss://:p%40ss@127.0.0.1:{port}/0"
        client = RedisClient(RedisConfig(url=url, ca_file=certificate, **PATIENT))
        await client.start()
        while not client.available:
            await asyncio.sleep(0.02)
        assert await client.call("PING") == b"PONG"
        await client.close()
        by_file = RedisConfig(f"rediss://127.0.0.1:{port}", tmp_path / "password", certificate, **PATIENT)
        assert await call(by_file, "PING") == b"PONG"
        stranger = RedisClient(RedisConfig(url=url, **PATIENT))  # a self-signed certificate
        await stranger.start()
        assert not stranger.available
        await stranger.close()

    try:
        run(scenario())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://host:port/0", "redis://host/zero"])
def test_a_url_that_is_none_is_refused_without_saying_it(url: str) -> None:
    with pytest.raises(OptionError, match="redis://") as refused:
        RedisClient(RedisConfig(url=url))
    assert url not in str(refused.value)


def test_without_a_url_there_is_no_client() -> None:
    with pytest.raises(OptionError, match="url is missing"):
        RedisClient(RedisConfig())


def test_a_client_closed_in_the_moment_of_a_refusal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = RedisClient(config("redis://127.0.0.1:1"))

        async def refused() -> None:
            await asyncio.sleep(0)
            assert client._task is not None
            asyncio.get_running_loop().call_soon(client._task.cancel)
            raise ConnectionRefusedError

        monkeypatch.setattr(client, "_connect", refused)
        await client.start()
        assert client._task is not None
        ended, _ = await asyncio.wait([client._task], timeout=PATIENCE_S)
        assert ended

    run(scenario())
