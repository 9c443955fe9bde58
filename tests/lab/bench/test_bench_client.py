"""The client against servers that misbehave, one kind of fault each: a record with its cause, no hang."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.lab.bench.client.client import Address, Client, SentRequest
from ridgeline.lab.bench.client.timer import now
from ridgeline.lab.bench.config import RequestDeadlines
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.traffic.request import PlannedRequest
from tests.conftest import free_port
from tests.lab.bench.faulty_server import HEAD, Behaviour, Call, faulty_server
from tests.patience import PATIENCE_S

PLENTY = RequestDeadlines(
    connect_s=PATIENCE_S, first_byte_s=PATIENCE_S, between_s=PATIENCE_S, request_s=PATIENCE_S
)
BODY = b'{"max_tokens":4}'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)


async def send(address: Address, deadlines: RequestDeadlines = PLENTY, times: int = 1) -> list[RequestRecord]:
    """So many requests, one after the other, over one client."""
    done: asyncio.Queue[SentRequest] = asyncio.Queue()
    client = Client(address, deadlines, done.put_nowait)
    origin = now()
    records = []
    try:
        for number in range(times):
            client.send(SentRequest(number, PlannedRequest(0.0, 4, 2), now()), REQUEST)
            records.append((await asyncio.wait_for(done.get(), PATIENCE_S)).record(origin))
        assert not client.live
    finally:
        client.close()
    return records


async def sent_to(behave: Behaviour, deadlines: RequestDeadlines = PLENTY) -> RequestRecord:
    async with faulty_server(behave) as (address, _):
        return (await send(address, deadlines))[0]


async def test_a_good_answer_is_ok_with_its_counts_and_stamps_in_order() -> None:
    async def good(call: Call) -> None:
        await call.raw(HEAD)
        await asyncio.sleep(0.02)
        await call.text()
        await asyncio.sleep(0.02)
        await call.text()
        await asyncio.sleep(0.02)
        await call.end(2)

    record = await sent_to(good)
    assert (record.status, record.cause, record.http_status) == ("ok", "", 200)
    assert (record.n_in, record.n_out, record.counted_by, record.split_by) == (4, 2, "usage", "one_each")
    assert record.chunk_tokens == [1, 1]
    stamps = [record.t_send, record.t_first, record.t_last, record.t_end]
    assert None not in stamps
    assert stamps == sorted(stamps)  # type: ignore[type-var]
    assert record.t_last is not None
    assert record.t_end is not None
    assert record.t_last < record.t_end  # the last content, not [DONE]


async def test_nobody_listening_is_refused() -> None:
    port = free_port()
    record = (await send(Address("127.0.0.1", "127.0.0.1", port, None)))[0]
    assert (record.status, record.cause, record.t_send) == ("failed", "refused", None)


async def test_a_connection_cut_hard_is_reset() -> None:
    async def cut(call: Call) -> None:
        call.reset()

    record = await sent_to(cut)
    assert (record.status, record.cause) == ("failed", "reset")


async def test_a_connection_closed_without_a_word_is_reset() -> None:
    async def closed(call: Call) -> None:
        call.close()

    record = await sent_to(closed)
    assert (record.status, record.cause) == ("failed", "reset")
    assert "before an answer" in record.error


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_refusal_has_its_status_and_the_servers_words(status: int) -> None:
    async def refuse(call: Call) -> None:
        await call.reply(status, b'{"error":{"message":"too much of it"}}')

    record = await sent_to(refuse)
    assert (record.status, record.cause, record.http_status) == ("failed", f"http_{status}", status)
    assert "too much of it" in record.error


async def test_bytes_that_are_no_http_are_garbage() -> None:
    async def garbage(call: Call) -> None:
        await call.raw(b"\x00\xff\xfehello\r\n\r\n" * 10)

    record = await sent_to(garbage)
    assert (record.status, record.cause) == ("failed", "garbage")


@pytest.mark.parametrize("line", [b"{not json}", b"[1, 2]", b'{"choices": 3}', b'"\xff\xfe"'])
async def test_events_that_are_no_completions_are_garbage(line: bytes) -> None:
    async def garbage(call: Call) -> None:
        await call.raw(HEAD)
        await call.text()
        await call.events(line)
        await call.end(2)

    record = await sent_to(garbage)
    assert (record.status, record.cause) == ("failed", "garbage")
    assert "data:" in record.error  # shows what came


async def test_a_page_instead_of_a_stream_is_garbage() -> None:
    async def page(call: Call) -> None:
        await call.reply(200, b"<html><body>\nwelcome\n</body></html>\n")

    assert (await sent_to(page)).cause == "garbage"


async def test_a_whole_answer_that_was_not_streamed_is_garbage_and_not_an_answer() -> None:
    async def whole(call: Call) -> None:
        await call.reply(200, b'{"choices":[{"text":"all at once","finish_reason":"stop"}]}')

    record = await sent_to(whole)
    assert (record.status, record.cause) == ("failed", "garbage")


async def test_a_stream_that_ends_without_a_finish_is_truncated_however_clean_its_end() -> None:
    async def short(call: Call) -> None:
        await call.raw(HEAD)
        await call.text()
        await call.raw(b"0\r\n\r\n")

    record = await sent_to(short)
    assert (record.status, record.cause) == ("failed", "truncated")


async def test_a_stream_cut_in_the_middle_is_truncated() -> None:
    async def cut(call: Call) -> None:
        await call.raw(HEAD)
        await call.text()
        call.close()

    record = await sent_to(cut)
    assert (record.status, record.cause) == ("failed", "truncated")
    assert len(record.chunk_at) == 1  # what came is kept


async def test_an_error_event_fails_the_answer_with_the_servers_words() -> None:
    async def broken(call: Call) -> None:
        await call.raw(HEAD)
        await call.text()
        await call.events({"error": {"message": "the engine died", "code": 500}})
        call.close()

    record = await sent_to(broken)
    assert (record.status, record.cause, record.error) == ("failed", "server_error", "the engine died")


async def test_an_answer_without_a_token_is_empty() -> None:
    async def silent(call: Call) -> None:
        await call.raw(HEAD)
        await call.end()

    assert (await sent_to(silent)).cause == "empty"


async def test_a_server_that_never_answers_is_given_up_at_the_first_byte_deadline() -> None:
    async def hang(call: Call) -> None:
        await asyncio.sleep(600)

    record = await sent_to(hang, replace(PLENTY, first_byte_s=0.3))
    assert (record.status, record.cause) == ("timeout", "first_byte_timeout")


async def test_a_stream_that_stalls_is_given_up_between_chunks() -> None:
    async def stall(call: Call) -> None:
        await call.raw(HEAD)
        await call.text()
        await asyncio.sleep(600)

    record = await sent_to(stall, replace(PLENTY, between_s=0.3))
    assert (record.status, record.cause) == ("timeout", "stalled")
    assert record.chunk_tokens == [1]


async def test_a_stream_that_drips_comments_for_ever_is_given_up_at_the_requests_deadline() -> None:
    async def drip(call: Call) -> None:
        await call.raw(HEAD)
        while True:
            await call.raw(b"d\r\n: waiting...\n\r\n")
            await asyncio.sleep(0.05)

    record = await sent_to(drip, replace(PLENTY, request_s=0.6))
    assert (record.status, record.cause) == ("timeout", "request_timeout")


async def test_a_listener_that_does_not_speak_tls_is_a_failure_of_tls() -> None:
    async def good(call: Call) -> None:
        await call.answer()

    async with faulty_server(good) as (address, _):
        secured = Address("localhost", address.ip, address.port, ssl.create_default_context())
        record = (await send(secured, replace(PLENTY, connect_s=1)))[0]
    assert record.cause in ("tls", "reset", "connect_timeout")
    assert record.status != "ok"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For localhost, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


async def test_tls_is_spoken_and_certificates_are_checked(certificate: tuple[Path, Path]) -> None:
    async def good(call: Call) -> None:
        await call.answer()

    key, cert = certificate
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))
    async with faulty_server(good, own) as (address, server):
        known = Address("localhost", address.ip, address.port, trusting)
        records = await send(known, times=3)
        strange = (await send(Address("localhost", address.ip, address.port, ssl.create_default_context())))[
            0
        ]
        assert server.connections == 1
    assert [record.status for record in records] == ["ok"] * 3
    assert (strange.status, strange.cause) == ("failed", "tls")


async def test_one_connection_serves_one_request_after_the_other() -> None:
    async def good(call: Call) -> None:
        await call.answer()

    async with faulty_server(good) as (address, server):
        records = await send(address, times=5)
    assert [record.status for record in records] == ["ok"] * 5
    assert server.connections == 1
    assert [record.connect_s > 0 for record in records] == [True, False, False, False, False]


async def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    """The server takes the second request of a connection as a reason to close it, as after its idle time."""

    async def once(call: Call) -> None:
        if call.number == 1:
            call.close()
        else:
            await call.answer()

    async with faulty_server(once) as (address, server):
        records = await send(address, times=2)
    assert [record.status for record in records] == ["ok", "ok"]
    assert server.calls == 3


async def test_a_kept_connection_that_is_just_closing_is_no_failure_either() -> None:
    async def good(call: Call) -> None:
        await call.answer()

    async with faulty_server(good) as (address, server):
        done: asyncio.Queue[SentRequest] = asyncio.Queue()
        client = Client(address, PLENTY, done.put_nowait)
        for number in range(2):
            client.send(SentRequest(number, PlannedRequest(0.0, 4, 2), now()), REQUEST)
            assert (await asyncio.wait_for(done.get(), PATIENCE_S)).status == "ok"
            if number == 0:
                (kept,) = client._idle
                assert kept._transport is not None
                kept._transport.close()  # its end is known to the loop, but not yet told
        client.close()
        assert (server.connections, client.retried) == (2, 1)


async def test_a_refusal_that_ends_with_its_connection_keeps_its_status() -> None:
    async def refuse(call: Call) -> None:
        await call.raw(b"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\n\r\n<html>no upstream</html>")
        call.close()

    record = await sent_to(refuse)
    assert (record.status, record.cause) == ("failed", "http_502")
    assert "no upstream" in record.error
