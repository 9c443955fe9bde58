"""A manifest comes from another machine: names and numbers that could do harm are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ridgeline.models.sources.file_hashes import file_sha256
from ridgeline.models.sources.link_speed import link_bytes_per_s
from ridgeline.models.sources.manifest import BadManifest, HeldFile, Manifest, is_safe, read_manifest
from ridgeline.models.sources.model_files import manifest_of

GOOD = "a" * 64


def encoded(name: str = "model.gguf", size: int = 5, sha256: str = GOOD, **more: object) -> bytes:
    manifest = Manifest("m", (HeldFile(name, size, sha256),))
    return msgspec.json.encode(msgspec.structs.replace(manifest, **more))


@pytest.mark.parametrize(
    "name",
    [
        *("../x.json", "/etc/x.json", "a/../../x.json", "a//x.json", "./x.json", ".hidden.json", "a/.x.json"),
        *("x\\..\\y.json", "", "a/b/c/d/e.json", "x\0.json", "x.json\n"),
    ],
)
def test_a_name_that_could_leave_the_folder_is_refused(name: str) -> None:
    assert not is_safe(name)
    with pytest.raises(BadManifest, match="could leave"):
        read_manifest(encoded(name))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded("model.pkl"), "not a kind of file"),
        (encoded("run.py"), "not a kind of file"),
        (encoded(sha256="A" * 64), "is not a sha256"),
        (encoded(sha256="../" + "a" * 61), "is not a sha256"),
        (encoded(size=-1), "cannot have -1 bytes"),
        (encoded(entry="other.gguf"), "is not among its files"),
        (encoded(format=2), "has format 2"),
        (encoded(files=()), "lists no file"),
        (b"<html>", "is not a manifest"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadManifest, match=why):
        read_manifest(data)


def test_a_model_offers_its_own_files_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    for name in (
        "config.json",
        "1_Pooling/config.json",
        "model.safetensors",
        "secret.env",
        "run.py",
        ".x.json",
    ):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    (model / "model.safetensors.manifest.json").write_text("{}")
    manifest, paths = manifest_of("org/m", model)
    assert {file.name for file in manifest.files} == {
        *("config.json", "1_Pooling/config.json", "model.safetensors")
    }
    assert read_manifest(msgspec.json.encode(manifest)) == manifest
    for file in manifest.files:
        assert paths[file.sha256] == model / file.name
    one, _ = manifest_of("m.gguf", model / "config.json")
    assert (one.entry, len(one.files)) == ("config.json", 1)


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "x.json"
    file.write_text("one")
    first = file_sha256(file)
    record = next((tmp_path / "cache" / "sha256").iterdir())
    record.write_text(record.read_text().replace(first, "remembered"))
    assert file_sha256(file) == "remembered"
    file.write_text("three")
    assert file_sha256(file) not in (first, "remembered")


def test_the_link_of_the_most_specific_route_counts(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "eth0\t00000000\t0102A8C0\t0003\t0\t0\t0\t00000000\n"
        "ib0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\n"
    )
    for device, speed in (("eth0", "1000"), ("ib0", "100000")):
        (tmp_path / device).mkdir()
        (tmp_path / device / "speed").write_text(f"{speed}\n")
    assert link_bytes_per_s("10.1.2.3", routes, tmp_path) == 12.5e9
    assert link_bytes_per_s("192.0.2.1", routes, tmp_path) == 125e6
    assert link_bytes_per_s("127.0.0.1", routes, tmp_path) is None
    (tmp_path / "eth0" / "speed").write_text("-1\n")
    assert link_bytes_per_s("192.0.2.1", routes, tmp_path) is None
