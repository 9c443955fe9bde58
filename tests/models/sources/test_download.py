"""A file from a peer or a store: in parallel ranges, resumed, verified, or not there at all."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.models.sources import download as module
from ridgeline.models.sources.download import download
from ridgeline.models.sources.holders import MANIFEST_S, FolderStore, HolderFailed, HttpStore, Peer
from ridgeline.models.sources.http_opener import CONNECT_S
from tests.models.sources.small_store import SmallStore, serving

PIECE = 1000
DATA = random.Random(7).randbytes(10 * PIECE + 123)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(module, "_WAIT_S", (0.01,))


@pytest.fixture
def store() -> Iterator[SmallStore]:
    with serving(SmallStore({"model.gguf": DATA})) as made:
        yield made


def fetch(store: SmallStore, target: Path) -> int:
    return download(HttpStore(store.url), store.held("model.gguf"), target)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_in_ranges_and_nothing_else_is_left(store: SmallStore, tmp_path: Path) -> None:
    assert fetch(store, tmp_path / "model.gguf") == len(DATA)
    assert (tmp_path / "model.gguf").read_bytes() == DATA
    assert left_in(tmp_path) == ["model.gguf"]
    assert len(store.asked) == 11


def test_an_answer_that_is_cut_is_continued_where_it_stopped(store: SmallStore, tmp_path: Path) -> None:
    store.cut_after, store.cuts = 600, 3
    fetch(store, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == DATA
    assert store.sent == len(DATA)  # no byte twice


def test_a_truncated_file_fails_and_the_next_try_fetches_only_the_rest(
    store: SmallStore, tmp_path: Path
) -> None:
    store.files["model.gguf"] = DATA[: 4 * PIECE]  # the holder lost the end of its copy
    whole = SmallStore({"model.gguf": DATA}).held("model.gguf")
    with pytest.raises(HolderFailed):
        download(HttpStore(store.url), whole, tmp_path / "model.gguf")
    assert "model.gguf" not in left_in(tmp_path)
    store.files["model.gguf"], store.sent = DATA, 0
    assert download(HttpStore(store.url), whole, tmp_path / "model.gguf") <= len(DATA) - 3 * PIECE
    assert (tmp_path / "model.gguf").read_bytes() == DATA
    assert left_in(tmp_path) == ["model.gguf"]


def test_one_wrong_byte_is_refused_and_nothing_is_kept(store: SmallStore, tmp_path: Path) -> None:
    held = store.held("model.gguf")
    store.files["model.gguf"] = DATA[:5000] + bytes([DATA[5000] ^ 1]) + DATA[5001:]
    with pytest.raises(HolderFailed, match=r"has the sha256 .* nothing of it is used"):
        # By name, as a peer would refuse a sha256 that it does not have.
        download(HttpStore(store.url), held, tmp_path / "model.gguf")
    assert left_in(tmp_path) == []


def test_wrong_bytes_of_an_earlier_try_are_fetched_again(store: SmallStore, tmp_path: Path) -> None:
    held, good = store.held("model.gguf"), store.files["model.gguf"]
    store.files["model.gguf"] = bytes(3 * PIECE)  # zeros, and then nothing
    with pytest.raises(HolderFailed):
        download(HttpStore(store.url), held, tmp_path / "model.gguf")
    assert left_in(tmp_path) != []
    store.files["model.gguf"] = good
    download(HttpStore(store.url), held, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == DATA


def test_a_wrong_key_is_refused_at_once(store: SmallStore, tmp_path: Path) -> None:
    store.key = "right"
    with pytest.raises(HolderFailed, match="status 401"):
        download(Peer("a", store.url, "wrong"), store.held("model.gguf"), tmp_path / "model.gguf")
    assert len(store.asked) <= module.STREAMS  # no second try
    assert download(Peer("a", store.url, "right"), store.held("model.gguf"), tmp_path / "x") == len(DATA)


XML = """<?xml version="1.0"?><Error><Code>%s</Code><Message>The request signature we calculated
does not match.</Message><AWSAccessKeyId>AKIASECRET</AWSAccessKeyId>
<StringToSign>AWS4-SECRET</StringToSign>"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (XML % "SignatureDoesNotMatch" + "SECRET" * 500_000, "status 403, code SignatureDoesNotMatch"),
        ('{"error": {"code": 403, "message": "SECRET"}}', "status 403, code 403"),
        ('{"error": {"message": "SECRET", "code": "invalid_api_key"}}', "status 403, code invalid_api_key"),
        ("<html>SECRET\x1b[2J\n</html>", "status 403"),
        (XML % ("SECRET" * 20), "status 403"),
        (XML % "SECRET\nforged line", "status 403"),
        ("", "status 403"),
    ],
)
def test_of_an_error_body_only_its_code_is_told(store: SmallStore, body: str, said: str) -> None:
    store.refusal = body.encode()
    with pytest.raises(HolderFailed) as refused:
        HttpStore(store.url).manifest()
    assert str(refused.value) == said


def test_the_key_goes_to_peers_alone_and_not_along_a_redirect(store: SmallStore, tmp_path: Path) -> None:
    fetch(store, tmp_path / "model.gguf")
    assert not any("authorization" in headers for headers in store.headers)
    with serving(SmallStore({"model.gguf": DATA})) as elsewhere:
        store.redirect = elsewhere.url
        with pytest.raises(HolderFailed, match="status 302"):
            Peer("a", store.url, "secret").manifest()
        assert elsewhere.asked == []


def test_a_busy_peer_is_waited_for(store: SmallStore, tmp_path: Path) -> None:
    store.busy = 2
    assert download(Peer("a", store.url, ""), store.held("model.gguf"), tmp_path / "m") == len(DATA)


def test_a_busy_peer_cannot_ask_for_more_than_the_longest_wait(
    store: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    wait = threading.Event.wait

    def short(self: threading.Event, timeout: float | None = None) -> bool:
        waits.extend([] if timeout is None else [timeout])
        return wait(self, timeout if timeout is None else min(timeout, 0.01))

    monkeypatch.setattr(threading.Event, "wait", short)
    monkeypatch.setattr(module, "BUSY_S", 0.2)
    store.busy, store.retry_after = 10**6, "86400"
    with pytest.raises(HolderFailed, match="status 503"):
        fetch(store, tmp_path / "m")
    assert waits
    assert max(waits) <= module.BUSY_S


def test_connecting_has_a_short_timeout_and_the_answer_a_long_one(
    store: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[float, socket.socket]] = []
    connect = socket.create_connection

    def recorded(address: tuple[str, int], timeout: float, *rest: object) -> socket.socket:
        made.append((timeout, connect(address, timeout)))
        return made[-1][1]

    monkeypatch.setattr(socket, "create_connection", recorded)
    for holder in (Peer("a", store.url, ""), HttpStore(store.url)):
        holder.manifest()
        timeout, connection = made.pop()
        assert (timeout, connection.gettimeout()) == (CONNECT_S, MANIFEST_S)


def test_a_peer_is_asked_for_the_model_and_an_older_one_gives_its_first(store: SmallStore) -> None:
    Peer("a", store.url, "", "org/tiny@v 1").manifest()
    assert [path for path, _ in store.asked] == ["/replica/files?model=org%2Ftiny%40v+1"]
    content, store.asked = store.content, []
    store.content = lambda path: None if "?" in path else content(path)  # type: ignore[method-assign]
    assert Peer("a", store.url, "", "org/tiny").manifest().model == "org/tiny"
    assert [path for path, _ in store.asked] == ["/replica/files?model=org%2Ftiny", "/replica/files"]


def test_a_server_without_ranges_is_named(store: SmallStore, tmp_path: Path) -> None:
    store.has_ranges = False
    with pytest.raises(HolderFailed, match="does not serve ranges"):
        fetch(store, tmp_path / "model.gguf")


def test_a_token_in_the_url_is_sent_and_never_shown(store: SmallStore, tmp_path: Path) -> None:
    holder = HttpStore(f"{store.url.replace('://', '://user:pw@')}/?token=abc")
    assert "abc" not in holder.label
    assert "pw" not in holder.label
    holder = HttpStore(f"{store.url}?token=abc")
    assert holder.manifest().model == "org/tiny"
    download(holder, store.held("model.gguf"), tmp_path / "m")
    assert {path for path, _ in store.asked} == {"/manifest.json?token=abc", "/model.gguf?token=abc"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a b", "http://u:s3cret@h:x/", "http://h:s3cret/"])
def test_a_url_that_is_not_valid_is_not_shown(url: str) -> None:
    with pytest.raises(HolderFailed) as refused:
        HttpStore(f"{url}?token=abc").manifest()
    assert str(refused.value) == "cannot be reached: its URL is not valid"


def test_a_folder_is_a_store(tmp_path: Path) -> None:
    source = SmallStore({"model.gguf": DATA})
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "model.gguf").write_bytes(DATA)
    (tmp_path / "store" / "manifest.json").write_bytes(source.manifest())
    holder = FolderStore(tmp_path / "store")
    download(holder, holder.manifest().files[0], tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == DATA
    (tmp_path / "store" / "model.gguf").write_bytes(DATA[:-1])
    with pytest.raises(HolderFailed, match="truncated"):
        download(holder, holder.manifest().files[0], tmp_path / "n")
