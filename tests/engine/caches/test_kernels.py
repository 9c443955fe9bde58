"""Kernels that Triton compiled, shipped to another folder: Triton finds them there, and compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.engine.caches import kernels, shipping
from ridgeline.engine.caches.keys import kernels_key
from ridgeline.engine.caches.shipping import fetch_cache, held_cache, offered
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.start.gpu_probe import Gpu
from ridgeline.models.sources.archive import Archive, BadArchive, differences, unpack
from ridgeline.models.sources.holders import FolderStore
from ridgeline.models.sources.manifest import Manifest
from ridgeline.version import __version__

GPU = Gpu("NVIDIA H200", 141 << 30, (9, 0), (12, 8))
# Compiles for a GPU that is not here, and says whether Triton found the kernel in its cache.
KERNEL = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + places, 2 * tl.load(x + places, mask=places < n), mask=places < n)

triton.knobs.compilation.listener = lambda *, cache_hit, **more: print("found" if cache_hit else "compiled")
source = ASTSource(double, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {(2,): 128})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def compiled(tmp_path: Path, folder: Path) -> str:
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_triton_finds_kernels_that_were_shipped(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed; kernels cannot be compiled")
    first, second = tmp_path / "first", tmp_path / "second"
    assert compiled(tmp_path, first) == "compiled"
    key = kernels_key(GPU)
    files = kernels.compiled_files(first)
    assert any(name.endswith(".cubin") for name in files)
    Archive("kernels", key, files).write(tmp_path / "kernels.tar")
    unpack(tmp_path / "kernels.tar", "kernels", key, tmp_path / "unpacked")
    assert kernels.install(tmp_path / "unpacked", second, key) == len({name.split("/")[0] for name in files})
    first.rename(tmp_path / "gone")  # the paths of the first machine do not exist on the second
    assert compiled(tmp_path, second) == "found"
    assert kernels.holds(second, key)


def kernel_at(folder: Path, name: str = "KERNEL1") -> Path:
    """As Triton writes one: files, and a list of them with their absolute paths."""
    kernel = folder / name
    kernel.mkdir(parents=True)
    (kernel / "k.cubin").write_bytes(b"\x7fELF")
    (kernel / "k.json").write_text("{}")
    paths = {file: str(kernel / file) for file in ("k.cubin", "k.json")}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    (kernel / "lock").touch()
    return kernel


def test_what_triton_still_writes_is_not_shipped(tmp_path: Path) -> None:
    kernel_at(tmp_path / "triton")
    unfinished = kernel_at(tmp_path / "triton", "KERNEL2")
    (unfinished / "tmp.pid_1_x").mkdir()
    (tmp_path / "triton" / "KERNEL1" / "link").symlink_to("/etc/passwd")
    found = kernels.compiled_files(tmp_path / "triton")
    assert sorted(found) == ["KERNEL1/__grp__k.json", "KERNEL1/k.cubin", "KERNEL1/k.json"]


def test_a_kernel_that_is_there_stays_and_new_ones_are_added(tmp_path: Path) -> None:
    kernel_at(tmp_path / "unpacked", "KERNEL1")
    kernel_at(tmp_path / "unpacked", "KERNEL2")
    own = kernel_at(tmp_path / "triton", "KERNEL1")
    (own / "k.cubin").write_bytes(b"own")
    assert kernels.install(tmp_path / "unpacked", tmp_path / "triton", {"GPU": "x"}) == 1
    assert (own / "k.cubin").read_bytes() == b"own"
    listed = json.loads((tmp_path / "triton" / "KERNEL2" / "__grp__k.json").read_text())["child_paths"]
    assert listed["k.cubin"] == str(tmp_path / "triton" / "KERNEL2" / "k.cubin")


@pytest.mark.parametrize("group", ["[]", "{", '{"child_paths": 3}', '{"child_paths": {"a": "/x/missing"}}'])
def test_a_kernel_without_its_files_installs_nothing(group: str, tmp_path: Path) -> None:
    kernel_at(tmp_path / "unpacked", "KERNEL1")
    kernel_at(tmp_path / "unpacked", "KERNEL2")
    (tmp_path / "unpacked" / "KERNEL2" / "__grp__k.json").write_text(group)
    with pytest.raises(BadArchive):
        kernels.install(tmp_path / "unpacked", tmp_path / "triton", {"GPU": "x"})
    assert not (tmp_path / "triton").exists()
    assert not kernels.holds(tmp_path / "triton", {"GPU": "x"})


def test_the_key_has_everything_that_a_kernel_depends_on(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("570.124.06\n")
    key = kernels_key(GPU, tmp_path / "version")
    assert (key["GPU"], key["compute capability"], key["driver"]) == ("NVIDIA H200", "9.0", "570.124.06")
    assert key["ridgeline"] == __version__
    assert all(key[name] for name in ("CUDA", "torch", "triton", "python", "libc"))
    assert kernels_key(GPU, tmp_path / "none")["driver"] == "for CUDA 12.8"
    other = kernels_key(Gpu("NVIDIA H100", 80 << 30, (9, 0), (12, 8)), tmp_path / "version")
    assert differences(other, key) == ["GPU is NVIDIA H100 there and NVIDIA H200 here"]


def test_a_gpu_replica_fetches_kernels_for_its_own_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model="m", backend="cuda")
    monkeypatch.setattr(shipping, "find_gpu", lambda: GPU)
    monkeypatch.setattr(shipping, "why_not_gpu", lambda config, probe: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    assert offered(tmp_path, config) is None  # nothing is compiled yet
    kernel_at(tmp_path / "first")
    archive = offered(tmp_path, config)
    assert archive is not None
    held = held_cache(archive)
    (tmp_path / "store").mkdir()
    archive.write(tmp_path / "store" / held.name)
    store = FolderStore(tmp_path / "store")
    monkeypatch.setattr(FolderStore, "manifest", lambda self, wait_s: Manifest("m", (), caches=(held,)))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    monkeypatch.setattr(shipping, "find_gpu", lambda: replace(GPU, name="NVIDIA H100"))
    refused = fetch_cache(tmp_path, config, [store])
    assert refused is not None
    assert "GPU is NVIDIA H200 there and NVIDIA H100 here" in refused.refused
    assert not (tmp_path / "second").exists()

    monkeypatch.setattr(shipping, "find_gpu", lambda: GPU)
    done = fetch_cache(tmp_path, config, [store])
    assert done is not None
    assert (done.kind, done.source, done.bytes) == ("kernels", store.label, held.bytes)
    names = sorted(path.name for path in (tmp_path / "second").iterdir())
    assert names == [".lock", "KERNEL1", kernels.KEY_FILE]
    again = fetch_cache(tmp_path, config, [store])
    assert again is not None
    assert again.source == "local"
