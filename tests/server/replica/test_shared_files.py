"""GET /replica/files: a replica's own model files for its peers, by sha256 and range, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.models.sources.download import download
from ridgeline.models.sources.holders import HolderFailed, Peer
from ridgeline.models.sources.manifest import FETCH_HEADER, read_manifest
from ridgeline.server.app import app_over
from ridgeline.server.config import ServerConfig
from ridgeline.server.replica import shared_files
from ridgeline.server.replica.shared_files import Pace, Places
from ridgeline.server.served_models import ModelFiles, ServedModels
from tests.server.stage import Stage

WEIGHTS = bytes(range(256)) * 5000  # several chunks
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
KEY = {"authorization": "Bearer fleet"}
FILES = "/replica/files"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    (folder / "notes.md").write_text("private")
    (tmp_path / "outside.json").write_text("private")
    return folder


@pytest.fixture
def sharing(model: Path) -> Stage:
    return staged(model, ServerConfig(share_weights=True, api_keys=("fleet",), share_transfers=1))


def staged(model: Path, config: ServerConfig) -> Stage:
    stage = Stage(config=config)
    files = ModelFiles("org/m", model, EngineConfig(model="org/m", backend="torch"))
    served = replace(stage.served_models.models[0], files=files)
    stage.served_models = ServedModels(config, [served])
    stage.app = app_over(stage.served_models)
    return stage


async def test_the_manifest_lists_the_models_files_and_they_are_sent_by_range(sharing: Stage) -> None:
    async with sharing.http(headers=KEY) as http:
        manifest = read_manifest((await http.get(FILES)).content)
        assert {file.name for file in manifest.files} == {"model.safetensors", "config.json"}
        assert (manifest.model, manifest.caches) == ("org/m", ())
        whole = await http.get(f"{FILES}/{SHA256}")
        assert (whole.status_code, whole.content) == (200, WEIGHTS)
        for asked, start, end in (
            ("bytes=0-0", 0, 1),
            ("bytes=5-9", 5, 10),
            ("bytes=1279990-", 1279990, 1280000),
            ("bytes=1279999-2000000", 1279999, 1280000),
        ):
            part = await http.get(f"{FILES}/{SHA256}", headers={"range": asked})
            assert (part.status_code, part.content) == (206, WEIGHTS[start:end])
            assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{len(WEIGHTS)}"
        for wrong in ("bytes=1280000-", "bytes=9-5", "bytes=-5", "bytes=0-1,3-4", "items=0-1"):
            refused = await http.get(f"{FILES}/{SHA256}", headers={"range": wrong})
            assert refused.status_code == 416, wrong


async def test_a_peer_gets_the_model_that_it_asks_for(sharing: Stage, model: Path) -> None:
    second = model.with_name("second")
    second.mkdir()
    (second / "config.json").write_text("[]")
    first = sharing.served_models.models[0]
    assert first.files is not None
    files = replace(first.files, source="/models/second", path=second)
    other = replace(first, names=("second",), files=files)
    sharing.served_models = ServedModels(sharing.served_models.config, [first, other])
    sharing.app = app_over(sharing.served_models)
    async with sharing.served() as http:
        for asked, source in (
            ("/models/second", "/models/second"),
            ("second", "/models/second"),
            ("hf:org/m", "org/m"),
            ("", "org/m"),
            ("/other/second", "org/m"),
        ):
            peer = Peer("a", str(http.base_url), "fleet", asked)
            assert (await asyncio.to_thread(peer.manifest)).model == source


async def test_without_the_key_nothing_is_given(sharing: Stage) -> None:
    for headers in ({}, {"authorization": "Bearer other"}):
        async with sharing.http(headers=headers) as http:
            for path in (FILES, f"{FILES}/{SHA256}"):
                assert (await http.get(path)).status_code == 401


@pytest.mark.parametrize(
    "name",
    ["../outside.json", "%2e%2e%2foutside.json", "config.json", "notes.md", "0" * 64, "/etc/passwd"],
)
async def test_no_name_and_no_path_is_a_file(name: str, sharing: Stage) -> None:
    async with sharing.http(headers=KEY) as http:
        await http.get(FILES)
        assert (await http.get(f"{FILES}/{name}")).status_code == 404
        private = hashlib.sha256(b"private").hexdigest()
        assert (await http.get(f"{FILES}/{private}")).status_code == 404


async def test_a_server_shares_nothing_unless_told(model: Path) -> None:
    async with staged(model, ServerConfig()).http() as http:
        for path in (FILES, f"{FILES}/{SHA256}"):
            refused = await http.get(path)
            assert refused.status_code == 404
            assert "--share-weights" in refused.json()["error"]["message"]


async def test_a_file_that_changed_is_cut_off_and_not_sent_again(sharing: Stage, model: Path) -> None:
    async with sharing.served() as http:
        await http.get(FILES, headers=KEY)
        (model / "model.safetensors").write_bytes(WEIGHTS[::-1])
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(f"{FILES}/{SHA256}", headers=KEY)


async def test_a_real_peer_fetches_over_http(sharing: Stage, tmp_path: Path) -> None:
    async with sharing.served() as http:
        peer = Peer("chat-1", str(http.base_url), "fleet")
        manifest = await asyncio.to_thread(peer.manifest)
        held = manifest.file(SHA256)
        assert held is not None
        target = tmp_path / "fetched"
        assert await asyncio.to_thread(download, peer, held, target) == len(WEIGHTS)
        assert target.read_bytes() == WEIGHTS
        wrong = Peer("chat-1", str(http.base_url), "guessed")
        with pytest.raises(HolderFailed, match="status 401"):
            await asyncio.to_thread(wrong.manifest)


async def test_more_peers_than_places_are_told_to_wait(sharing: Stage) -> None:
    async with sharing.http(headers=KEY) as http:
        await http.get(FILES)
        assert sharing.served_models.part(shared_files.SharedFiles).places.enter("first")
        refused = await http.get(f"{FILES}/{SHA256}", headers={FETCH_HEADER: "second"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await http.get(f"{FILES}/{SHA256}", headers={FETCH_HEADER: "first"})).status_code == 200


def test_a_place_is_kept_between_two_ranges_and_freed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    places = Places(1)
    assert places.enter("a")
    assert places.enter("a")
    assert not places.enter("b")
    places.leave("a")
    places.leave("a")
    assert not places.enter("b")
    now += shared_files.LINGER_S + 1
    assert places.enter("b")
    assert not places.enter("a")


async def test_a_busy_server_sends_at_its_rate_and_an_idle_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    busy = True

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(shared_files.asyncio, "sleep", sleep)
    pace = Pace(1000.0, lambda: busy)
    for _ in range(3):
        await pace.take(500)
    assert slept == [0.5, 1.0]
    busy = False
    await pace.take(500)
    assert slept == [0.5, 1.0]


async def test_requests_that_run_make_the_server_busy(
    sharing: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = sharing.served_models.part(shared_files.SharedFiles)
    assert not shared._is_busy()
    monkeypatch.setattr(type(sharing.client), "open_requests", 1)
    assert shared._is_busy()
