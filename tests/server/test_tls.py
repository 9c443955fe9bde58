"""The server over TLS, with certificates of a real authority, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from ridgeline.cli.main import main
from ridgeline.engine.client.output import OutputChunk
from ridgeline.options import OptionError
from ridgeline.server.config import ServerConfig
from ridgeline.web import listener, tls_listener
from ridgeline.web.tls import Certificate
from tests.certificates import RSA_KEY, Authority
from tests.patience import PATIENCE_S
from tests.server.events import chunks
from tests.server.scripted_client import Script, flood, hang, say
from tests.server.stage import CHAT, HELLO, Stage, until

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on a loop of this kind: `ridgeline serve` uses uvloop."""

    def on_loop(work: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(work, 2 * PATIENCE_S))

    return on_loop


def staged(authority: Authority, script: Script, **config: Any) -> Stage:
    certfile, keyfile = authority.issue("server")
    return Stage(script, ServerConfig(ssl_certfile=certfile, ssl_keyfile=keyfile, **config))


def test_sdks_and_websockets_work_over_tls(authority: Authority, run: Run) -> None:
    stage = staged(authority, say("hé!"))

    async def talk() -> None:
        async with stage.served(authority.trusting()) as http:
            client = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", http_client=http)
            whole = await client.chat.completions.create(**HELLO)
            assert whole.choices[0].message.content == "hé!"
            stream = await client.chat.completions.create(**HELLO, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(parts) == "hé!"
            url = str(http.base_url).replace("https", "wss").rstrip("/") + CHAT
            async with connect(url, ssl=authority.trusting(), open_timeout=PATIENCE_S) as socket:
                await socket.send('{"messages": [{"role": "user", "content": "hi"}]}')
                assert "chat.completion.chunk" in str(await socket.recv())
            with pytest.raises(httpx.ConnectError):  # a client that does not know the authority
                async with httpx.AsyncClient() as stranger:
                    await stranger.get(f"{http.base_url}/health")
            with pytest.raises(httpx.RemoteProtocolError):
                async with httpx.AsyncClient() as plain:
                    await plain.get(str(http.base_url).replace("https", "http"))
            assert (await http.get("/health")).status_code == 200

    run(talk())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_noticed_over_tls(authority: Authority, run: Run, stream: bool) -> None:
    stage = staged(authority, hang("begun"))

    async def leave() -> None:
        async with stage.served(authority.trusting()) as http:
            asking = asyncio.create_task(http.post(CHAT, json={**HELLO, "stream": stream}))
            await until(lambda: stage.client.asked)
            asking.cancel()
            await until(lambda: stage.client.aborted)

    run(leave())


def test_a_reader_that_falls_behind_is_cut_over_tls(authority: Authority, run: Run) -> None:
    """Its buffered data is bounded, as without TLS."""
    taken = 0

    async def counting(prompt: list[int], params: Any) -> AsyncIterator[OutputChunk]:
        nonlocal taken
        async for chunk in flood(5000, 50_000)(prompt, params):
            taken += 1
            yield chunk

    stage = staged(authority, counting, stream_stall_s=600, stream_buffer_chunks=8)

    async def stall() -> None:
        async with (
            stage.served(authority.trusting()) as http,
            http.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer,
        ):
            assert answer.status_code == 200
            await until(lambda: stage.client.aborted)
            assert 8 < taken < 1000  # not all 5000
            assert 'slow_readers_cut_total{model_name="m"} 1.0' in stage.metrics_text()

    run(stall())


def test_a_new_certificate_is_shown_without_dropping_open_connections(
    authority: Authority, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "REFRESH_S", 0.1)
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(name: str, *key_options: tuple[str, ...]) -> None:
        for new, path in zip(authority.issue(name, *key_options), (certfile, keyfile), strict=True):
            shutil.copy(new, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)

    install("first")
    finish = asyncio.Event()
    stage = Stage(_until_told(finish), ServerConfig(ssl_certfile=certfile, ssl_keyfile=keyfile))

    async def replace() -> None:
        async with stage.served(authority.trusting()) as http:
            host, port = http.base_url.host, http.base_url.port
            asking = asyncio.create_task(http.post(CHAT, json={**HELLO, "stream": True}))
            await until(lambda: stage.client.asked)
            assert await _shown(host, port, authority) == "first"
            install("second", RSA_KEY)  # of another type, which a context keeps beside the first
            async with asyncio.timeout(PATIENCE_S):
                while await _shown(host, port, authority) != "second":
                    await asyncio.sleep(0.1)
            keyfile.write_text("no key")
            await asyncio.sleep(0.5)
            assert await _shown(host, port, authority) == "second"
            finish.set()
            assert len(chunks((await asking).text)) > 1

    run(replace())


def _until_told(finish: asyncio.Event) -> Script:
    async def script(prompt: list[int], params: Any) -> Any:
        await finish.wait()
        async for chunk in say("done")(prompt, params):
            yield chunk

    return script


async def _shown(host: str, port: int | None, authority: Authority) -> str:
    """The common name of the certificate that a new connection gets."""
    _, writer = await asyncio.open_connection(host, port, ssl=authority.trusting())
    found = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    return dict(part[0] for part in found["subject"])["commonName"]


def test_a_handshake_that_does_not_come_is_not_waited_for(authority: Authority, run: Run) -> None:
    stage = staged(authority, say("x"), head_timeout_s=0.3)

    async def wait() -> None:
        async with stage.served(authority.trusting()) as http:
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()

    run(wait())


def test_silent_connections_before_their_handshake_count_as_connections_of_their_address(
    authority: Authority, run: Run
) -> None:
    stage = staged(authority, say("x"), max_connections_per_address=3, head_timeout_s=600)

    async def crowd() -> None:
        async with stage.served(authority.trusting()) as http:
            where = (http.base_url.host, http.base_url.port)
            most = 3 + tls_listener.REFUSED_AT_ONCE
            silent = [await asyncio.open_connection(*where) for _ in range(most + 20)]
            for reader, _ in silent[most:]:  # closed at once, long before their handshake is late
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            assert not any(reader.at_eof() for reader, _ in silent[:most])
            silent[most - 1][1].close()  # room for a handshake, but for no connection
            async with asyncio.timeout(PATIENCE_S):
                while (refused := await _status(http)) == 0:
                    await asyncio.sleep(0.01)
            assert refused == 503
            for _, writer in silent:
                writer.close()
            async with asyncio.timeout(PATIENCE_S):
                while await _status(http) != 200:
                    await asyncio.sleep(0.01)

    run(crowd())


async def _status(http: httpx.AsyncClient) -> int:
    """Of an answer; 0: the connection was closed without one."""
    try:
        return (await http.get("/health")).status_code
    except httpx.TransportError:
        return 0


def test_certificates_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    certfile, keyfile = authority.issue("server")
    _, other = authority.issue("other")
    empty = tmp_path / "empty"
    empty.touch()
    joined = tmp_path / "joined.pem"
    joined.write_text(certfile.read_text() + keyfile.read_text())
    Certificate(joined, None)
    for pair, reason in [
        ((certfile, other), "the key does not belong to the certificate"),
        ((tmp_path / "none.pem", keyfile), "ssl_certfile: .*none.pem: No such file"),
        ((certfile, tmp_path / "none.key"), "ssl_keyfile: .*none.key: No such file"),
        ((empty, keyfile), "no certificate"),
        ((certfile, None), "no certificate .* with its key"),
    ]:
        with pytest.raises(OptionError, match=reason):
            Certificate(*pair)


def test_a_bad_certificate_ends_the_command_before_a_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", str(tmp_path / "none.gguf"), "--log-format", "text"]
    assert main([*words, "--ssl-certfile", str(tmp_path / "no.pem")]) == 2
    assert "no.pem: No such file" in capsys.readouterr().err
    assert main([*words, "--ssl-keyfile", str(tmp_path / "no.key")]) == 2
    assert "needs ssl_certfile" in capsys.readouterr().err
