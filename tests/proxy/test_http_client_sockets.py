"""Sockets that the HTTP client opens (IPv6, Unix, TLS), and bytes that it refuses to send."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from ridgeline.proxy.errors import InvalidHead, RequestBroken
from ridgeline.proxy.http_client import HttpClient
from ridgeline.proxy.origin import read_url
from tests.proxy.asking import PATIENT, ask
from tests.proxy.scripted import (
    replies,
    scripted,
    streams,
)

# ── where it connects to ──


async def test_ipv6(client: HttpClient) -> None:
    try:
        context = scripted(replies(200, b"six"), host="::1")
        async with context as upstream:
            assert await (await ask(client, upstream)).read(10) == b"six"
            assert upstream.requests[0].headers["host"] == f"[::1]:{upstream.port}"
    except OSError:
        pytest.skip("no IPv6 here")


async def test_a_unix_socket(client: HttpClient, tmp_path: Path) -> None:
    async with scripted(replies(200, b"near"), unix=tmp_path / "s") as upstream:
        assert await (await ask(client, upstream)).read(10) == b"near"
        assert upstream.requests[0].headers["host"] == "localhost"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of its own authority, for the name localhost alone."""
    folder = tmp_path_factory.mktemp("tls")
    file = folder / "both.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=here"
    )
    made = [*command.split(), "-addext", "subjectAltName=DNS:localhost"]
    made += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(made, check=True, capture_output=True)
    file.write_bytes((folder / "cert.pem").read_bytes() + (folder / "key.pem").read_bytes())
    return file


def tls_server(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_tls_with_a_certificate_that_is_trusted(client: HttpClient, certificate: Path) -> None:
    async with scripted(replies(200, b"safe"), streams(b"a", b"b"), tls=tls_server(certificate)) as upstream:
        origin = read_url(f"https://localhost:{upstream.port}", ca_file=certificate)
        assert await (await ask(client, origin)).read(10) == b"safe"
        assert await (await ask(client, origin)).read(10) == b"ab"
        assert upstream.connections == 1


@pytest.mark.parametrize("fault", ["unknown authority", "another name"])
async def test_tls_with_a_certificate_that_is_not(client: HttpClient, certificate: Path, fault: str) -> None:
    async with scripted(replies(200), tls=tls_server(certificate)) as upstream:
        name = "127.0.0.1" if fault == "another name" else "localhost"
        trusted = certificate if fault == "another name" else None
        with pytest.raises(RequestBroken) as failure:
            await ask(client, read_url(f"https://{name}:{upstream.port}", ca_file=trusted))
        assert failure.value.cause == "tls"
        assert not upstream.requests


# ── nothing gets in ──


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"a", b"b\r\nx-evil: 1"),
        (b"a", b"b\nx-evil: 1"),
        (b"a", b"b\rx"),
        (b"a", b"\0"),
        (b"a", b"\x7f"),
        (b"a\r\nx-evil", b"1"),
        (b"a b", b"1"),
        (b"a:", b"1"),
        (b"", b"1"),
        (b"\xc3\xa4", b"1"),
    ],
)
async def test_a_header_cannot_begin_a_line_of_its_own(client: HttpClient, name: bytes, value: bytes) -> None:
    async with scripted(replies(200)) as upstream:
        with pytest.raises(InvalidHead):
            await client.ask(read_url(upstream.url), "POST", "/", [(name, value)], timeouts=PATIENT)
        assert upstream.connections == 0


@pytest.mark.parametrize(
    "path",
    [
        "",
        "v1",
        "/a b",
        "/a\r\nx: y",
        "/ä",
        "/a#b",
        "/../x",
        "/a/..",
        "/a/%2e%2E/b",
        "/a%2f..",
        "/a/./b",
        "/a\\..\\b",
    ],
)
async def test_a_path_cannot_leave_its_place(client: HttpClient, path: str) -> None:
    async with scripted(replies(200)) as upstream:
        with pytest.raises(InvalidHead):
            await client.ask(read_url(upstream.url), "GET", path, [], timeouts=PATIENT)
        assert upstream.connections == 0


async def test_framing_headers_are_the_clients_own(client: HttpClient) -> None:
    spoofed = [
        (b"Host", b"evil"),
        (b"content-length", b"0"),
        (b"Transfer-Encoding", b"chunked"),
        (b"te", b"x"),
    ]
    async with scripted(replies(200)) as upstream:
        await client.ask(read_url(upstream.url), "POST", "/", spoofed, b"abc", timeouts=PATIENT)
        got = upstream.requests[0]
    assert got.headers == {"host": f"127.0.0.1:{upstream.port}", "content-length": "3"}
    assert got.body == b"abc"
