"""A model's files from the nearest source: the order, the fallbacks, and what is never used."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.models.errors import ModelNotFound
from ridgeline.models.files import hub, pull, registry
from ridgeline.models.files.known_models import KnownModel
from ridgeline.models.files.pull import PullFailed
from ridgeline.models.sources import obtain as module
from ridgeline.models.sources.holders import Peer
from ridgeline.models.sources.manifest import Manifest
from ridgeline.models.sources.obtain import find_local, holders_of, obtain, target_folder
from tests.models.sources.small_store import SmallStore, serving

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": os.urandom(5000),
    "1_Pooling/config.json": b"{}",
}
MODEL = "org/tiny"
TINY = b"GGUF" + bytes(3000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "complete_snapshot", lambda model: None)
    return tmp_path / "cache"


@pytest.fixture
def holder() -> Iterator[SmallStore]:
    with serving(SmallStore(dict(FILES), MODEL)) as made:
        yield made


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """The only short name."""
    known = KnownModel(
        name="tiny-1b",
        aliases=(),
        about="",
        licence="",
        file_name="tiny.gguf",
        bytes=len(TINY),
        sha256=hashlib.sha256(TINY).hexdigest(),
        parts=(),
    )
    monkeypatch.setattr(registry, "KNOWN_MODELS", (known,))
    return known


def files_in(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


def test_the_first_source_that_has_the_files_gives_them_and_the_next_start_needs_none(
    holder: SmallStore, caplog: pytest.LogCaptureFixture
) -> None:
    sources = ("local", "peers", f"{holder.url}/", "hub")
    holders = holders_of(sources, ["chat-1=http://127.0.0.1:9", f"chat-2={holder.url}"], "")
    assert [one.label for one in holders] == ["peer chat-1", "peer chat-2", f"store {holder.url}/"]
    with caplog.at_level(logging.INFO, "ridgeline.server"):
        found = obtain(MODEL, sources, holders)
    assert (found.source, found.bytes) == ("peer chat-2", sum(map(len, FILES.values())))
    assert files_in(found.path) == FILES
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no weights from peer chat-1: cannot be reached" in warnings[0]
    assert warnings[0].endswith("the next source is peer chat-2")
    asked = len(holder.asked)
    assert obtain(MODEL, sources, holders).source == "local"
    assert len(holder.asked) == asked


def test_a_store_takes_over_from_a_peer_that_sends_other_bytes(holder: SmallStore, tmp_path: Path) -> None:
    class Liar(SmallStore):
        def content(self, path: str) -> bytes | None:
            data = super().content(path)
            return data and data.replace(b"llama", b"LLAMA")

    with serving(Liar(dict(FILES), MODEL)) as liar:
        store = tmp_path / "store"
        for name, data in FILES.items():
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            (store / name).write_bytes(data)
        (store / "manifest.json").write_bytes(holder.manifest())
        sources = ("local", "peers", f"file://{store}")
        found = obtain(MODEL, sources, holders_of(sources, [f"a={liar.url}"], ""))
    assert found.source == f"store {store}"
    assert files_in(found.path) == FILES


def test_without_a_source_the_error_says_what_was_tried(holder: SmallStore) -> None:
    holder.key = "secret"
    sources = ("local", "peers")
    with pytest.raises(ModelNotFound, match=r"peer a: status 401.*hub is not among the sources"):
        obtain(MODEL, sources, holders_of(sources, [f"a={holder.url}"], "wrong"))
    assert find_local(MODEL) is None


def test_a_peer_with_another_model_is_not_used(holder: SmallStore) -> None:
    holder.model = "org/other"
    with pytest.raises(ModelNotFound, match="it holds org/other"):
        obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])


def test_an_altered_file_is_fetched_again(holder: SmallStore) -> None:
    found = obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])
    (found.path / "tokenizer.json").write_bytes(b"[]")
    assert find_local(MODEL) is None
    again = obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])
    assert (again.source, files_in(again.path)) == ("peer a", FILES)


def test_an_interrupted_folder_does_not_count_as_complete(holder: SmallStore) -> None:
    holder.files["model.safetensors"] = FILES["model.safetensors"]
    listed = msgspec.json.decode(holder.manifest())
    listed["files"][2]["sha256"] = "0" * 64  # a file that the holder lacks
    holder.manifest = lambda **_: msgspec.json.encode(listed)  # type: ignore[method-assign]
    with pytest.raises(ModelNotFound, match="status 404"):
        obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])
    assert (target_folder(MODEL) / "config.json").is_file()
    assert find_local(MODEL) is None


def test_complete_files_are_not_fetched_again_after_an_interruption(holder: SmallStore) -> None:
    weights = holder.files.pop("model.safetensors")
    listed = [SmallStore(dict(FILES), MODEL).held(name) for name in FILES]
    holder.manifest = lambda **_: msgspec.json.encode(Manifest(MODEL, tuple(listed)))  # type: ignore[method-assign]
    with pytest.raises(ModelNotFound, match="status 404"):
        obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])
    holder.files["model.safetensors"], holder.sent = weights, 0
    found = obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])
    assert (found.bytes, holder.sent, files_in(found.path)) == (len(weights), len(weights), FILES)


def test_only_what_is_missing_needs_space(holder: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = module.LEFT_FREE_BYTES + 100

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(PullFailed, match="free some space"):
        obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])
    held, target = holder.held("model.safetensors"), target_folder(MODEL) / "model.safetensors"
    partial = target.with_name(f".{target.name}.{held.sha256[:16]}.partial")
    partial.write_bytes(bytes(held.bytes))  # all of it is on the disk
    assert obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")]).source == "peer a"
    (target_folder(MODEL) / module.COMPLETE).unlink()
    Usage.free = 0
    assert obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")]).bytes == 0


def test_partial_files_of_other_contents_are_removed(holder: SmallStore) -> None:
    folder = target_folder(MODEL)
    (folder / "1_Pooling").mkdir(parents=True)
    old = [folder / f".model.safetensors.{'0' * 16}{suffix}" for suffix in (".partial", ".pieces")]
    old.append(folder / "1_Pooling" / f".config.json.{'0' * 16}.partial")
    for path in old:
        path.write_bytes(b"old")
    obtain(MODEL, ("local", "peers"), [Peer("a", holder.url, "")])
    assert not any(path.exists() for path in old)


def test_a_folder_with_the_same_last_part_is_another_model(holder: SmallStore, tmp_path: Path) -> None:
    holder.model = "/v1/final"
    model = str(tmp_path / "v2" / "final")
    with pytest.raises(ModelNotFound, match="it holds /v1/final"):
        obtain(model, ("local", "peers"), [Peer("a", holder.url, "")])
    holder.model = model
    fetched = obtain(model, ("local", "peers"), [Peer("a", holder.url, "")]).path
    assert (fetched, find_local(model)) == (target_folder(model), fetched)
    Path(model).mkdir(parents=True)
    (Path(model) / "config.json").write_text("{}")
    assert find_local(model) == Path(model)  # the folder itself goes before a copy


def test_an_altered_short_name_is_pulled_again(
    cache: Path, tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = registry.cached_file(tiny)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"altered")

    def fetch(known: KnownModel, partial: object, target: Path, report: object) -> None:
        target.write_bytes(TINY)
        registry.write_manifest(target, known.sha256)

    monkeypatch.setattr(pull, "_fetch", fetch)  # pip's part: there is no wheel of this model
    found = obtain("tiny-1b", ("local", "hub"), [])
    assert (found.source, found.path, file.read_bytes()) == ("hub", file, TINY)


@pytest.mark.parametrize("model", ["org/tiny", "hf:org/tiny", "org/tiny@v1", "/v2/tiny"])
def test_models_rm_removes_the_fetched_copy(
    model: str, holder: SmallStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "cached_repo", lambda name: None)  # nothing in the hub's own cache
    holder.model = model
    obtain(model, ("local", "peers"), [Peer("a", holder.url, "")])
    assert main(["models", "rm", "org/tinier"]) == 1
    assert find_local(model) is not None
    name = model if model.startswith("/") else "org/tiny"
    assert main(["models", "rm", name]) == 0
    assert f"removed {name}" in capsys.readouterr().err
    assert find_local(model) is None
    assert files_in(target_folder(model)) == {}
    assert main(["models", "rm", name]) == 1


def test_models_rm_removes_incomplete_downloads_of_every_revision(
    holder: SmallStore, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "cached_repo", lambda name: None)
    holder.cut_after, holder.cuts = 500, 1000
    models = ("org/tiny@v1", "hf:org/tiny@refs/pr/7", "org/tiny-er@v1")
    for model in models:
        holder.model = model
        with pytest.raises(ModelNotFound, match="truncated"):
            obtain(model, ("local", "peers"), [Peer("a", holder.url, "")])
    left = [target_folder(model) for model in models]
    assert all(list(folder.glob(".*.partial")) for folder in left)
    assert main(["models", "rm", "org/tiny"]) == 0
    assert "removed org/tiny" in capsys.readouterr().err
    assert [sorted(path.name for path in folder.iterdir()) for folder in left[:2]] == [[".lock"]] * 2
    assert list(left[2].glob(".*.partial"))  # another model
    assert main(["models", "rm", "org/tiny"]) == 1


def test_our_table_decides_what_a_short_name_is(holder: SmallStore, cache: Path, tiny: KnownModel) -> None:
    holder.files = {"other-name.gguf": b"GGUF" + bytes(2999) + b"x"}
    with pytest.raises(ModelNotFound, match=r"does not hold tiny\.gguf"):
        obtain("tiny-1b", ("local", "peers"), [Peer("a", holder.url, "")])
    holder.files = {"other-name.gguf": TINY}
    found = obtain("tiny-1b", ("local", "peers"), [Peer("a", holder.url, "")])
    assert found.path == cache / "models" / "tiny-1b" / "tiny.gguf"
    assert found.path.read_bytes() == TINY
    assert registry.resolve("tiny-1b").path == found.path  # every other command finds it too


def test_a_path_that_exists_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert obtain(str(tmp_path / "m"), ("local", "hub"), []).source == "local"
