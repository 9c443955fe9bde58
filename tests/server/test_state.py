"""The server's state directory: where it is by default, and what is said when it cannot be used."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from ridgeline.machine import cache_dir
from ridgeline.options import OptionError
from ridgeline.server.records.state import open_state


@pytest.fixture
def no_user_directories(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "RIDGELINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_home_that_cannot_be_written_names_the_flag_and_the_caches_variable(
    tmp_path: Path, no_user_directories: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    no_user_directories.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(OptionError, match=r"/8000 cannot be used.*--state-dir.*RIDGELINE_CACHE"):
        open_state(None, 8000)
    open_state(tmp_path / "state", 8000).close()


def test_a_user_without_a_home_is_told_what_to_set(no_user_directories: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    no_user_directories.delenv("HOME", raising=False)
    no_user_directories.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(OptionError, match=r"home directory is unknown.*--state-dir"):
        open_state(None, 8000)
    with pytest.raises(OptionError, match=r"home directory is unknown.*RIDGELINE_CACHE"):
        cache_dir()
