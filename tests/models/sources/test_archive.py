"""An archive of cache files: whole, for the same machine and under safe names, or nothing of it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ridgeline.models.sources.archive import Archive, ArchivedFile, ArchiveManifest, BadArchive, unpack

KEY = {"GPU": "H200", "driver": "570.1"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def made_of(tmp_path: Path, files: dict[str, bytes]) -> Archive:
    paths = {}
    for name, data in files.items():
        paths[name] = tmp_path / "source" / name
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        paths[name].write_bytes(data)
    return Archive("kernels", KEY, paths)


def test_an_archive_is_a_tar_that_any_range_can_be_read_of(tmp_path: Path) -> None:
    files = {"K1/a.cubin": b"x" * 513, "K1/empty.json": b"", "K2/b.cubin": bytes(range(256)) * 40}
    archive = made_of(tmp_path, files)
    target = tmp_path / "a.tar"
    archive.write(target)
    whole = target.read_bytes()
    assert (len(whole), hashlib.sha256(whole).hexdigest()) == (archive.size, archive.sha256)
    for start in range(0, archive.size, 501):
        assert archive.read(start, 777) == whole[start : start + 777]
    with tarfile.open(target) as tar:
        assert tar.getnames() == ["manifest.json", *sorted(files)]
    unpack(target, "kernels", KEY, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert made_of(tmp_path, files).sha256 == archive.sha256  # the same on every machine


def test_another_key_is_refused_by_what_differs(tmp_path: Path) -> None:
    archive = made_of(tmp_path, {"K/a": b"x"})
    archive.write(tmp_path / "a.tar")
    ours = {"GPU": "H200", "driver": "580.2", "libc": "2"}
    with pytest.raises(BadArchive) as refused:
        unpack(tmp_path / "a.tar", "kernels", ours, tmp_path / "out")
    assert str(refused.value) == (
        "it is for another machine: driver is 570.1 there and 580.2 here; libc is not given there and 2 here"
    )
    with pytest.raises(BadArchive, match="it is kernels"):
        unpack(tmp_path / "a.tar", "packed weights", KEY, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def tar_with(
    path: Path, listed: list[ArchivedFile], add: Callable[[tarfile.TarFile], None], key: dict[str, str] = KEY
) -> None:
    manifest = msgspec.json.encode(ArchiveManifest("kernels", key, tuple(listed)))
    with tarfile.open(path, "w") as tar:
        _add(tar, "manifest.json", manifest)
        add(tar)


def _add(tar: tarfile.TarFile, name: str, data: bytes, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(data), kind, link
    tar.addfile(member, io.BytesIO(data))


def _add_sparse(tar: tarfile.TarFile, name: str, size: int) -> None:
    """A file of zeros that takes no space in the archive."""
    member = tarfile.TarInfo(name)
    data = b"1\n%d\n0\n" % size
    member.size = 512
    member.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(size),
    }
    tar.addfile(member, io.BytesIO(data.ljust(512, b"\0")))


def listed(name: str, data: bytes) -> ArchivedFile:
    return ArchivedFile(name, len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("files", "add", "why"),
    [
        ([listed("../x", b"1")], lambda tar: _add(tar, "../x", b"1"), "could leave the cache"),
        ([listed("/tmp/x", b"1")], lambda tar: _add(tar, "/tmp/x", b"1"), "could leave the cache"),
        ([], lambda tar: _add(tar, "../x", b"1"), "does not list"),
        (
            [listed("K/a", b"")],
            lambda tar: _add(tar, "K/a", b"", tarfile.SYMTYPE, "/etc"),
            "not a plain file",
        ),
        ([listed("K/a", b"")], lambda tar: _add(tar, "K/a", b"", tarfile.LNKTYPE, "/x"), "not a plain file"),
        ([listed("K/a", b"1")], lambda tar: _add(tar, "K/a", b"2"), "another sha256"),
        ([listed("K/a", b"1")], lambda tar: _add(tar, "K/a", b"11"), "not a plain file of 1 bytes"),
        ([listed("K/a", bytes(1 << 20))], lambda tar: _add_sparse(tar, "K/a", 1 << 20), "not a plain file"),
        ([listed("K/a", b"1")], lambda tar: None, "K/a is missing"),
        ([listed("K/a", b"1")] * 2, lambda tar: None, "lists a file twice"),
    ],
)
def test_what_an_archive_must_not_have(
    files: list[ArchivedFile], add: Callable[[tarfile.TarFile], None], why: str, tmp_path: Path
) -> None:
    tar_with(tmp_path / "a.tar", files, add)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadArchive, match=why):
        unpack(tmp_path / "a.tar", "kernels", KEY, tmp_path / "out")
    assert not (tmp_path / "x").exists()
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("cut", [0, 100, 700, 1600, 2500])
def test_a_cut_archive_is_refused(cut: int, tmp_path: Path) -> None:
    archive = made_of(tmp_path, {"K/a.cubin": b"x" * 1500, "K/b.cubin": b"y" * 1500})
    archive.write(tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[:cut])
    with pytest.raises(BadArchive):
        unpack(tmp_path / "a.tar", "kernels", KEY, tmp_path / "out")
