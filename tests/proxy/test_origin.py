"""Where an upstream listens: which URLs are understood, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.options import OptionError
from ridgeline.proxy.origin import read_url


@pytest.mark.parametrize(
    ("url", "host", "port", "base", "authority"),
    [
        ("http://localhost:8000", "localhost", 8000, "", "localhost:8000"),
        ("http://127.0.0.1", "127.0.0.1", 80, "", "127.0.0.1"),
        ("https://api.example.com/v1", "api.example.com", 443, "", "api.example.com"),
        ("https://api.example.com/v1/", "api.example.com", 443, "", "api.example.com"),
        (
            "https://api.example.com:8443/openai/v1",
            "api.example.com",
            8443,
            "/openai",
            "api.example.com:8443",
        ),
        ("http://[::1]:9", "::1", 9, "", "[::1]:9"),
    ],
)
def test_urls(url: str, host: str, port: int, base: str, authority: str) -> None:
    origin = read_url(url)
    assert (origin.host, origin.port, origin.base, origin.authority) == (host, port, base, authority)
    assert (origin.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "missing"),
        ("localhost:8000", "http://"),
        ("ftp://host", "http://"),
        ("file:///etc/passwd", "http://"),
        ("http://", "no host"),
        ("http://user:secret@host", "key_env"),
        ("http://secret@host", "key_env"),
        ("http://host?key=secret", "query"),
        ("http://host/?", "query"),
        ("http://host#x", "query"),
        ("http://host:99999", "not a URL"),
        ("http://host:0", "port 0"),
        ("http://ho st", "printable"),
        ("http://host\r\nx: y", "printable"),
        ("http://ho\tst", "printable"),
        ("http://host/../x", "must not contain"),
        ("http://host/%2e%2e/x", "must not contain"),
        ("http://ho$st", "no host"),
        ("unix:socket", "absolute"),
        ("unix:/" + "x" * 200, "107"),
        ("unix:/etc", "not a socket"),
    ],
)
def test_urls_that_are_none(url: str, words: str) -> None:
    with pytest.raises(OptionError) as failure:
        read_url(url, where="[[upstreams]] a: url")
    assert words in str(failure.value)
    assert "secret" not in str(failure.value)


def test_a_file_of_authorities_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name in ("ca.pem", "absent.pem"):
        with pytest.raises(OptionError, match="ca_file"):
            read_url("https://host", tmp_path / name)
