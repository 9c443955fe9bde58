"""The console's files: what is vendored, how large it is, what the browser may do with it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from ridgeline.console.assets import STATIC, THEME, ConsoleInfo, assets

MANIFEST = json.loads((STATIC / "vendor" / "manifest.json").read_text())
INFO = ConsoleInfo(kind="server", pages=("chat",), needs_key=False)


def test_every_vendored_file_is_the_one_in_the_manifest() -> None:
    files = {path.name for path in (STATIC / "vendor").iterdir()} - {"manifest.json", "LICENSES.txt"}
    assert files == {entry["file"] for entry in MANIFEST}
    for entry in MANIFEST:
        assert hashlib.sha256((STATIC / "vendor" / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        licences = (STATIC / "vendor" / "LICENSES.txt").read_text()
        assert f"==== {entry['package']}-{entry['version']} ====" in licences


@pytest.mark.slow
def test_vendored_files_are_those_of_the_npm_tarballs(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    for package in {f"{entry['package']}@{entry['version']}" for entry in MANIFEST}:
        subprocess.run([npm, "pack", "--silent", package], cwd=tmp_path, check=True, capture_output=True)
    for entry in MANIFEST:
        tarball = (tmp_path / f"{entry['package']}-{entry['version']}.tgz").read_bytes()
        assert hashlib.sha256(tarball).hexdigest() == entry["tarball_sha256"]
        with tarfile.open(fileobj=io.BytesIO(tarball)) as archive:
            member = archive.extractfile(entry["member"])
            assert member is not None
            assert hashlib.sha256(member.read()).hexdigest() == entry["sha256"]


def test_all_files_together_and_the_first_view_stay_within_their_sizes() -> None:
    found, page = assets(), gzip.compress(assets().page(INFO), 9)
    everything = sum(len(asset.packed) for asset in found.by_name.values()) + len(page)
    first = sum(len(asset.packed) for asset in found.first_view()) + len(page)
    assert everything <= 150_000
    assert first <= 60_000
    own = [*STATIC.glob("*.js"), *STATIC.glob("pages/*.js"), *STATIC.glob("*.css")]
    assert sum(len(path.read_text().splitlines()) for path in own) <= 3000


def test_a_file_s_name_holds_its_hash_and_its_gzip_is_the_same_file() -> None:
    for name, asset in assets().by_name.items():
        assert f".{hashlib.sha256(asset.body).hexdigest()[:12]}." in name
        assert gzip.decompress(asset.packed) == asset.body


def test_the_policy_allows_the_two_inline_scripts_and_nothing_foreign() -> None:
    page, policy = assets().page(INFO).decode(), assets().policy
    inline = re.findall(r"<script(?: type=\"importmap\")?>(.*?)</script>", page)
    assert inline == [THEME, assets().import_map]
    for script in inline:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_every_import_has_an_address_in_the_map() -> None:
    known = assets().modules
    for path in [*STATIC.glob("*.js"), *STATIC.glob("pages/*.js")]:
        text = path.read_text()
        for name in re.findall(r"(?:from|import|import\.meta\.resolve)\s*\(?\"([^\"]+)\"", text):
            assert name in known, f"{path.name} imports {name}"
    for url in known.values():
        assert url.removeprefix("/console/assets/") in assets().by_name


def test_the_page_states_what_is_served_as_text() -> None:
    info = ConsoleInfo(kind='"><script>', pages=("chat",), needs_key=True)
    assert b'"><script>' not in assets().page(info).split(b"<body>")[1]
