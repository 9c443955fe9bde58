"""The blocking client against real sockets: every status is an answer, and no key leaves for elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import BrokenOff, Unreachable
from tests.patience import PATIENCE_S
from tests.proxy.scripted import refusing_port

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers each connection with the same bytes, and closes it; `requests` are the bytes it was sent."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end of the test
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    self.requests.append(_whole(connection))
                    connection.sendall(self.answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _whole(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := connection.recv(65536)):
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while sizes and len(body) < int(sizes[0].partition(b":")[2]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextlib.contextmanager
def serving(answer: bytes) -> Iterator[Server]:
    server = Server(answer)
    yield server
    server.close()


def client_of(url: str, **options: object) -> BlockingClient:
    return BlockingClient(url, timeout_s=PATIENCE_S, **options)  # type: ignore[arg-type]


def test_a_request_carries_its_path_query_key_and_body() -> None:
    with serving(OK) as server:
        answer = client_of(server.url + "/v1/", api_key="k").ask("POST", "/v1/x", b"{}", {"a": "b c"})
    assert (answer.status, answer.headers, answer.body) == (200, {"content-length": "2"}, b"ok")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = [line.lower() for line in head.split(b"\r\n")]
    assert lines[0] == b"post /v1/x?a=b+c http/1.1"
    assert b"authorization: bearer k" in lines
    assert b"content-type: application/json" in lines
    assert body == b"{}"


@pytest.mark.parametrize("status", [204, 301, 401, 404, 500, 503])
def test_every_status_is_an_answer(status: int) -> None:
    with serving(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status) as server:
        assert client_of(server.url).ask("GET", "/").status == status
        assert not client_of(server.url).is_ready("/")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_so_a_key_goes_nowhere_else(status: int) -> None:
    with serving(OK) as other:
        head = b"HTTP/1.1 %d Moved\r\nlocation: %s/x\r\ncontent-length: 0\r\n\r\n"
        with serving(head % (status, other.url.encode())) as server:
            answer = client_of(server.url, api_key="secret").ask("GET", "/x")
        assert (answer.status, answer.headers["location"]) == (status, f"{other.url}/x")
        assert other.requests == []


def test_lines_are_read_as_they_arrive() -> None:
    with (
        serving(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\na\nb\nc\r\n0\r\n\r\n") as server,
        client_of(server.url).open("GET", "/") as answer,
    ):
        assert list(answer.lines()) == [b"a\n", b"b\n", b"c"]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhe",
    ],
)
def test_an_answer_that_is_not_whole_is_told(raw: bytes) -> None:
    with serving(raw) as server, pytest.raises(BrokenOff):
        client_of(server.url).ask("GET", "/")


@pytest.mark.parametrize("raw", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 x OK\r\n\r\n"])
def test_what_is_not_http_is_no_answer(raw: bytes) -> None:
    with serving(raw) as server, pytest.raises(Unreachable):
        client_of(server.url).ask("GET", "/")


def test_nobody_listens() -> None:
    client = client_of(f"http://127.0.0.1:{refusing_port()}")
    with pytest.raises(Unreachable, match="refused"):
        client.ask("GET", "/")
    assert not client.is_ready("/")


def test_no_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("secret")
    for url in (f"file://{tmp_path}", "ftp://127.0.0.1", "127.0.0.1:80", "http://[::1"):
        with pytest.raises(Unreachable):
            client_of(url).ask("GET", "/x")


@pytest.mark.parametrize(("path", "key"), [("/a b", ""), ("/a\r\nx: y", ""), ("/", "k\r\nx: y")])
def test_no_value_begins_a_line_of_its_own(path: str, key: str) -> None:
    with serving(OK) as server:
        with pytest.raises(Unreachable):
            client_of(server.url, api_key=key).ask("GET", path)
        assert server.requests == []


def test_an_environments_proxy_is_used_unless_the_client_is_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(OK) as server, serving(OK) as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy.url)
        client_of(server.url, direct=True).ask("GET", "/")
        assert (len(server.requests), len(proxy.requests)) == (1, 0)
        client_of(server.url).ask("GET", "/")
        assert (len(server.requests), len(proxy.requests)) == (1, 1)
