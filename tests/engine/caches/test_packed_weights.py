"""Packed weights from a peer: installed under this machine's paths, or refused with what differs."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.engine.caches import packed_weights, shipping
from ridgeline.engine.caches.shipping import cache_of, fetch_cache, held_cache, offered
from ridgeline.engine.config import EngineConfig
from ridgeline.machine import cache_dir
from ridgeline.models.sources import file_hashes
from ridgeline.models.sources.holders import FolderStore
from ridgeline.models.sources.manifest import HeldCache, Manifest
from ridgeline.models.sources.model_files import manifest_of
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights import packed_cache
from ridgeline.models.weights.packed import load_packed
from tests.models.tiny_checkpoints import tiny_model
from tests.patience import PATIENCE_S

CONFIG = EngineConfig(model="tiny", backend="native")


class Machine:
    """One machine: a copy of the model, and an empty cache."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self._cache, self._patch = folder / "some" / "model", folder / "cache", monkeypatch
        self.model.parent.mkdir(parents=True)
        self.use()

    def use(self) -> None:
        self._patch.setenv("RIDGELINE_CACHE", str(self._cache))

    def load(self) -> bool:
        """Whether the packed weights were there."""
        self.use()
        return load_packed(self.model, read_spec(self.model)).from_cache


class Store(FolderStore):
    """A folder whose manifest tests change."""

    def __init__(self, folder: Path, *caches: HeldCache) -> None:
        super().__init__(folder)
        self.label, self.caches = "peer chat-1", caches

    def manifest(self, wait_s: float = 0.0) -> Manifest:
        return Manifest("tiny", (), caches=self.caches)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Machine]:
    monkeypatch.setattr(packed_cache, "MIN_ENTRY_BYTES", 0)
    first, second = (Machine(tmp_path / name, monkeypatch) for name in ("one", "another-name"))
    model = tiny_model("llama")
    for machine in (first, second):
        model.save_pretrained(machine.model)
    return first, second


@pytest.fixture
def store(machines: tuple[Machine, Machine], tmp_path: Path) -> Store:
    """What the first machine gives."""
    first, _ = machines
    assert not first.load()
    archive = offered(first.model, CONFIG)
    assert archive is not None
    held = held_cache(archive)
    (tmp_path / "store").mkdir()
    archive.write(tmp_path / "store" / held.name)
    return Store(tmp_path / "store", held)


def test_a_second_machine_packs_nothing(machines: tuple[Machine, Machine], store: Store) -> None:
    _, second = machines
    second.use()
    done = fetch_cache(second.model, CONFIG, [store])
    assert done is not None
    assert (done.kind, done.source) == ("packed weights", "peer chat-1")
    assert done.bytes == store.caches[0].bytes
    assert second.load()
    again = fetch_cache(second.model, CONFIG, [store])
    assert again is not None
    assert (again.source, again.bytes) == ("local", 0)
    payloads = []
    for machine in machines:
        machine.use()
        entry = packed_weights.entry_of(machine.model, "auto")
        assert entry is not None
        payloads.append(entry.read_bytes()[-4096:])
    assert payloads[0] == payloads[1]


def test_what_a_killed_process_left_is_removed(machines: tuple[Machine, Machine], store: Store) -> None:
    _, second = machines
    second.use()
    folder = cache_dir() / "archives"
    for fetch in range(2):  # the second one finds the cache
        (folder / ".unpacked-1").mkdir(parents=True)
        (folder / ".unpacked-1" / "entry.packed").write_bytes(b"x")
        (folder / f".old.tar.{'0' * 16}.partial").write_bytes(b"x")
        done = fetch_cache(second.model, CONFIG, [store])
        assert done is not None
        assert done.source == ("local" if fetch else "peer chat-1")
        assert [path.name for path in folder.iterdir()] == [".lock"]


def test_an_archive_needs_space_for_its_contents_too(
    machines: tuple[Machine, Machine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = packed_cache.LEFT_FREE_BYTES + 2 * store.caches[0].bytes - 1

    _, second = machines
    second.use()
    monkeypatch.setattr(shipping.shutil, "disk_usage", lambda path: Usage)
    done = fetch_cache(second.model, CONFIG, [store])
    assert done is not None
    assert "and a reserve of 1 GiB" in done.refused
    Usage.free += 1
    done = fetch_cache(second.model, CONFIG, [store])
    assert done is not None
    assert done.source == "peer chat-1"


def test_replicas_that_start_together_fetch_once(machines: tuple[Machine, Machine], store: Store) -> None:
    _, second = machines
    second.use()
    barrier = threading.Barrier(2)
    listed = store.manifest

    def together(wait_s: float = 0.0) -> Manifest:
        barrier.wait(PATIENCE_S)  # both have seen that the cache is missing
        return listed()

    store.manifest = together  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(fetch_cache, second.model, CONFIG, [store]) for _ in range(2)]
    assert sorted(done.source for task in tasks if (done := task.result())) == ["local", "peer chat-1"]


def test_an_archive_is_hashed_once_while_its_files_are_the_same(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = machines
    first.load()
    archive = offered(first.model, CONFIG)
    assert archive is not None
    entry = packed_weights.entry_of(first.model, "auto")
    assert entry is not None
    before = entry.stat().st_mtime_ns
    other = first.model.parent / "other"
    other.touch()
    while other.stat().st_mtime_ns <= before:  # until the clock of files has its next tick
        other.touch()
    assert first.load()
    assert entry.stat().st_mtime_ns > before  # for the order of use
    with monkeypatch.context() as patched:
        patched.setattr(file_hashes, "_READ_BYTES", 0)  # a file that is read again has another hash
        assert offered(first.model, CONFIG, archive) is archive
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    changed = offered(first.model, CONFIG, archive)
    assert changed is not None
    assert changed.sha256 != archive.sha256


@pytest.mark.parametrize("field", ["instruction set", "native library", "packing", "ridgeline", "files"])
def test_another_key_is_refused_by_name(
    field: str, machines: tuple[Machine, Machine], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    _, second = machines
    second.use()
    held = store.caches[0]
    store.caches = (HeldCache(held.kind, {**held.key, field: "other"}, held.name, held.bytes, held.sha256),)
    with caplog.at_level(logging.WARNING, "ridgeline.server"):
        done = fetch_cache(second.model, CONFIG, [store])
    assert done is not None
    assert done.source == ""
    assert f"{field} is other there and {held.key[field]} here" in done.refused
    assert len(caplog.records) == 1
    assert not second.load()


def test_a_key_that_lies_outside_the_archive_does_not_help(
    machines: tuple[Machine, Machine], store: Store, tmp_path: Path
) -> None:
    """The manifest of the holder says the right key, the archive itself another one."""
    first, second = machines
    first.use()
    own = cache_of(first.model, CONFIG)
    entry = packed_weights.entry_of(first.model, "auto")
    assert own is not None
    assert entry is not None
    other = shipping.Archive(own.kind, {**own.key, "packing": "0"}, {packed_weights.MEMBER: entry})
    other.write(tmp_path / "store" / "other.tar")
    store.caches = (HeldCache(own.kind, own.key, "other.tar", other.size, other.sha256),)
    second.use()
    done = fetch_cache(second.model, CONFIG, [store])
    assert done is not None
    assert "packing is 0 there" in done.refused
    assert packed_weights.entry_of(second.model, "auto") is None


def test_a_broken_archive_installs_nothing_and_the_engine_packs_itself(
    machines: tuple[Machine, Machine], store: Store, tmp_path: Path
) -> None:
    _, second = machines
    second.use()
    path = tmp_path / "store" / store.caches[0].name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = fetch_cache(second.model, CONFIG, [store])
    assert done is not None
    assert "sha256" in done.refused
    assert packed_weights.entry_of(second.model, "auto") is None
    assert not second.load()
    assert second.load()


def test_a_torch_backend_has_no_cache_to_ship(machines: tuple[Machine, Machine]) -> None:
    first, _ = machines
    assert cache_of(first.model, EngineConfig(model="tiny", backend="torch")) is None
    assert offered(first.model, EngineConfig(model="tiny", backend="torch")) is None
    assert manifest_of("tiny", first.model)[0].caches == ()
