"""Packed weights cached on disk: a hit equals a miss bit for bit; bad entries are packed again."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.safetensors_file import SafetensorsFile
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights import packed_cache, packed_writer
from ridgeline.models.weights.packed import PackedDecoder, load_packed, plan_packed
from ridgeline.models.weights.packed_file import PackedImage, huge_memory, read_image
from tests.models.test_weights import rewrite
from tests.models.tiny_checkpoints import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for every test, which stores even tiny models."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "MIN_ENTRY_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(path: Path, weights: str = "auto") -> PackedDecoder:
    return load_packed(path, read_spec(path), weights)


def assert_same(one: PackedDecoder, other: PackedDecoder) -> None:
    assert one.image.header.sections == other.image.header.sections
    for section in one.image.header.sections:
        assert np.array_equal(one.image._bytes(section), other.image._bytes(section)), section.name


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_the_second_start_reads_what_the_first_one_packed(model: Path, cache: Path) -> None:
    first, second = load(model), load(model)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.notes == first.notes == ("23 tensors stored as F32 are rounded to bfloat16",)
    assert_same(first, second)
    assert not second.embedding.data.flags.writeable
    (entry,) = entries(cache)
    assert entry.name.startswith("model.auto.")


def test_planning_reads_no_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is planned from what is free before they are there; else they would be counted twice."""
    packed = load(model)
    with monkeypatch.context() as patch:
        patch.setattr(packed_cache, "read_image", lambda path: pytest.fail("the weights were read"))
        plan = plan_packed(model, read_spec(model))
    assert (plan.from_cache, plan.nbytes) == (True, packed.nbytes)
    assert_same(plan.load(None), packed)


def test_an_entry_that_goes_between_plan_and_loading_is_packed_again(model: Path, cache: Path) -> None:
    packed = load(model)
    plan = plan_packed(model, read_spec(model))
    entries(cache)[0].unlink()
    again = plan.load(None)
    assert not again.from_cache
    assert_same(again, packed)
    assert entries(cache)


def test_weights_from_the_cache_are_those_packed_in_memory(model: Path) -> None:
    load(model, "int4")
    assert_same(load(model, "int4"), load_packed(model, read_spec(model), "int4", keep=False))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_weights_are_read_into_private_memory() -> None:
    """Shared memory has no huge pages unless an administrator allows it; small ones make decoding slower."""
    memory = huge_memory(8 << 20)
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if begin <= memory.ctypes.data < end:
            assert line.split()[1] == "rw-p"
            return
    pytest.fail("the memory is in no mapping")


def test_dropping_the_checkpoints_pages_while_packing_changes_no_weight(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_packed(model, read_spec(model), keep=False)
    drops = []
    dropped = SafetensorsFile.drop_pages
    monkeypatch.setattr(packed_writer, "DROPPED_WEIGHTS", 0)
    monkeypatch.setattr(SafetensorsFile, "drop_pages", lambda file: drops.append(dropped(file)))
    assert_same(load(model), expected)
    assert drops


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_embedding_that_is_not_the_head_is_mapped(name: str, tmp_path: Path) -> None:
    """Only the rows of tokens that occur take memory; a head is multiplied whole, and is read."""
    tiny_model(name).save_pretrained(tmp_path / "model")
    spec = read_spec(tmp_path / "model")
    first, second = (load_packed(tmp_path / "model", spec) for _ in range(2))
    mapped = 0 if spec.tied_embeddings else first.embedding.data.nbytes
    assert spec.tied_embeddings == (name == "gemma2")
    for packed in (first, second):
        assert packed.image.mapped_bytes == mapped
        assert packed.image.payload.nbytes == packed.image.header.payload_bytes - mapped
    in_memory = load_packed(tmp_path / "model", spec, keep=False)
    assert_same(second, in_memory)
    assert in_memory.image.mapped_bytes == 0


def test_a_plan_found_in_the_cache_knows_its_size_and_reports_progress_once(model: Path) -> None:
    spec = read_spec(model)
    packed = load(model)
    plan = plan_packed(model, spec)
    seen: list[tuple[int, int]] = []
    plan.load(lambda done, total: seen.append((done, total)))
    assert (plan.from_cache, plan.nbytes) == (True, packed.nbytes)
    assert seen == [(spec.parameters, spec.parameters)]


def test_each_setting_of_a_model_has_an_entry_of_its_own(model: Path, cache: Path) -> None:
    load(model, "int8")
    load(model, "int4")
    assert len(entries(cache)) == 2
    assert load(model, "int8").from_cache
    assert load(model, "int4").from_cache


def test_models_smaller_than_is_worth_keeping_are_packed_every_time(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "MIN_ENTRY_BYTES", 100 << 20)
    load(model)
    assert not load(model).from_cache
    assert not cache.exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings here")
def test_the_checkpoint_is_let_go_once_it_is_packed(model: Path) -> None:
    """Its pages would count twice: a plan may be kept for as long as the weights are."""
    plan = plan_packed(model, read_spec(model))
    packed = plan.load(None)
    mappings = Path("/proc/self/maps").read_text()
    assert str(model) not in mappings  # other tests of this process may keep their own checkpoints
    assert packed.nbytes == plan.nbytes


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings here")
def test_the_checkpoint_is_let_go_before_the_packed_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, mapped = packed_cache.load_entry, []

    def load_entry(key: packed_cache.Key) -> PackedImage | None:
        mapped.append(str(model) in Path("/proc/self/maps").read_text())
        return read(key)

    plan = plan_packed(model, read_spec(model))
    monkeypatch.setattr(packed_cache, "load_entry", load_entry)
    plan.load(None)
    assert mapped[-1:] == [False]


def test_an_entry_that_cannot_be_read_back_leaves_the_weights_packed_in_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(model)
    shutil.rmtree(packed_cache.packed_dir())
    monkeypatch.setattr(packed_cache, "load_entry", lambda key: None)
    packed = load(model)
    assert "could not be stored on disk" in " ".join(packed.notes)
    assert_same(packed, expected)


# ---- what is stale is not used ----


def test_a_changed_checkpoint_is_packed_anew_and_its_old_entry_removed(model: Path, cache: Path) -> None:
    load(model)
    rewrite(model, {"model.norm.weight": torch.full((64,), 2.0)})
    changed = load(model)
    assert not changed.from_cache
    assert (changed.final_norm == 2.0).all()
    assert len(entries(cache)) == 1


def test_a_checkpoint_changed_behind_its_size_and_time_is_noticed_by_its_ends(model: Path) -> None:
    """As a copy that keeps times would: same size, same modification time, other tensors at the end."""
    file = model / "model.safetensors"
    before = file.stat()
    load(model)
    content = bytearray(file.read_bytes())
    content[-4:] = np.array([0.125], "<f4").tobytes()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not load(model).from_cache


def test_a_touched_configuration_is_reason_enough_to_pack_anew(model: Path) -> None:
    load(model)
    os.utime(model / "config.json", ns=(0, 0))
    assert not load(model).from_cache


def test_every_shard_counts(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    load(tmp_path / "sharded")
    assert load(tmp_path / "sharded").from_cache
    os.utime(sorted((tmp_path / "sharded").glob("*.safetensors"))[2], ns=(0, 0))
    assert not load(tmp_path / "sharded").from_cache


def test_the_same_files_elsewhere_are_another_model(model: Path, tmp_path: Path, cache: Path) -> None:
    load(model)
    shutil.copytree(model, tmp_path / "other" / "model")
    assert not load(tmp_path / "other" / "model").from_cache
    assert len(entries(cache)) == 2


@pytest.mark.parametrize("version", ["PACKED_VERSION", "ABI_VERSION"])
def test_another_version_uses_no_entry_of_this_one(
    version: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model)
    monkeypatch.setattr(packed_cache, version, 99)
    assert not load(model).from_cache


# ---- what is damaged is not used ----


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("at", [0, 8, 20, 60, 1000])
def test_a_damaged_header_is_noticed_and_the_entry_packed_anew(at: int, model: Path, cache: Path) -> None:
    first = load_packed(model, read_spec(model), keep=False)
    load(model)
    flip(*entries(cache), at)
    again = load(model)
    assert not again.from_cache
    assert_same(again, first)
    assert load(model).from_cache


@pytest.mark.parametrize("keep", [0, 30, 5000, -1])
def test_a_truncated_entry_is_noticed_and_packed_anew(keep: int, model: Path, cache: Path) -> None:
    first = load_packed(model, read_spec(model), keep=False)
    load(model)
    (entry,) = entries(cache)
    entry.write_bytes(entry.read_bytes()[:keep])
    again = load(model)
    assert not again.from_cache
    assert_same(again, first)


def test_an_entry_with_more_than_it_should_have_is_not_used(model: Path, cache: Path) -> None:
    load(model)
    with entries(cache)[0].open("ab") as file:
        file.write(b"x")
    assert not load(model).from_cache


def test_an_entry_under_another_entrys_name_is_not_used(model: Path, cache: Path) -> None:
    load(model, "int8")
    (other,) = entries(cache)
    key = packed_cache.source_key(model, read_spec(model), "int4")
    other.rename(packed_cache.entry_path(key))
    packed = load(model, "int4")
    assert not packed.from_cache
    assert "int4 (Q4_1)" in packed.bytes_by_format


def test_a_broken_checkpoint_leaves_nothing_behind(model: Path, cache: Path) -> None:
    rewrite(model, {"lm_head.weight": torch.full((131, 64), torch.nan)})
    with pytest.raises(BrokenModel, match=r"lm_head\.weight has a value that is not finite"):
        load(model)
    assert entries(cache) == []


# ---- a cache that cannot be had ----


def test_a_cache_that_cannot_be_written_is_said_and_the_weights_serve_from_memory(
    model: Path, cache: Path
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the directory should be")
    packed = load(model)
    assert not packed.from_cache
    assert "packed weights could not be stored on disk" in packed.notes[-1]
    assert str(cache) in packed.notes[-1]
    assert_same(packed, load_packed(model, read_spec(model), keep=False))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A file system that refuses to write beyond `size`, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_up_is_said_and_no_half_file_stays(model: Path, cache: Path) -> None:
    with largest_file(20_000):
        packed = load(model)
    assert "packed weights could not be stored on disk (File too large" in packed.notes[-1]
    assert entries(cache) == []
    assert_same(packed, load_packed(model, read_spec(model), keep=False))


def test_a_disk_that_is_nearly_full_is_left_alone(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "LEFT_FREE_BYTES", shutil.disk_usage(model).total)
    packed = load(model)
    assert "packed weights could not be stored on disk (No space left on device" in packed.notes[-1]
    assert entries(cache) == []
    assert not load(model).from_cache


# ---- room ----


def test_the_least_recently_used_entries_make_room(
    tmp_path: Path, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, "int8")
    load(model, "int4")
    used, unused = (packed_cache.entry_path(key(model, weights)) for weights in ("int8", "int4"))
    os.utime(used, ns=(0, 10**9))
    os.utime(unused, ns=(0, 2 * 10**9))
    load(model, "int8")  # a hit: now the one used last
    sizes = sum(entry.stat().st_size for entry in entries(cache))
    monkeypatch.setattr(packed_cache, "MAX_CACHE_BYTES", sizes)
    tiny_model("qwen2").save_pretrained(tmp_path / "new")
    load(tmp_path / "new", "int4")
    assert set(entries(cache)) == {used, packed_cache.entry_path(key(tmp_path / "new", "int4"))}


def key(path: Path, weights: str) -> packed_cache.Key:
    return packed_cache.source_key(path, read_spec(path), weights)


def test_an_entry_larger_than_the_whole_bound_is_kept_alone(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, "int4")
    monkeypatch.setattr(packed_cache, "MAX_CACHE_BYTES", 1)
    load(model, "int8")
    assert [entry.name.split(".")[1] for entry in entries(cache)] == ["int8"]


def test_entries_of_models_that_are_gone_are_removed(model: Path, tmp_path: Path, cache: Path) -> None:
    load(model)
    shutil.rmtree(model)
    tiny_model("qwen2").save_pretrained(tmp_path / "new")
    load(tmp_path / "new")
    assert [entry.name.split(".")[0] for entry in entries(cache)] == ["new"]


def test_files_that_a_killed_process_left_unfinished_are_removed(model: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    abandoned, current = cache / "x.packed.1.1.tmp", cache / "y.packed.2.2.tmp"
    for file in (abandoned, current):
        file.write_bytes(b"half")
    os.utime(abandoned, ns=(0, 0))
    load(model)
    assert not abandoned.exists()
    assert current.exists()


def test_an_entry_that_is_removed_once_it_is_loaded_still_serves(model: Path, cache: Path) -> None:
    packed = load(model)
    expected = load_packed(model, read_spec(model), keep=False)
    entries(cache)[0].unlink()
    assert_same(packed, expected)


def test_two_that_start_at_once_do_not_disturb_each_other(model: Path, cache: Path) -> None:
    results: list[PackedDecoder] = []
    threads = [threading.Thread(target=lambda: results.append(load(model, "int8"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        assert_same(result, results[0])
    (entry,) = entries(cache)
    assert_same(PackedDecoder(results[0].spec, read_image(entry), True, ()), results[0])
