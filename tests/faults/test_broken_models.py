"""A model file that is truncated, altered, of the wrong kind or too big is refused by name, unserved."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.patience import PATIENCE_S


def serve_and_fail(model: str | Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "ridgeline.cli.main",
        "serve",
        str(model),
        f"--port={free_port()}",
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("kept", [100, 1_000_000, 50_000_000])
def test_a_truncated_gguf_is_refused_by_name(smollm2_path, tmp_path, kept):
    broken = tmp_path / "truncated.gguf"
    with smollm2_path.open("rb") as source:
        broken.write_bytes(source.read(kept))
    result = serve_and_fail(broken)
    assert result.returncode == 1
    assert "truncated.gguf" in result.stderr
    assert "truncated" in result.stderr.replace("truncated.gguf", "")
    assert "Traceback" not in result.stderr


def test_an_altered_scale_is_refused_by_tensor_name(smollm2_path, tmp_path):
    from ridgeline.models.files.gguf import GgufFile

    altered = tmp_path / "altered.gguf"
    shutil.copy(smollm2_path, altered)
    tensor = GgufFile(altered).tensors["blk.3.ffn_up.weight"]
    with altered.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\x00\x7e")  # NaN in half precision, as a block's scale
    result = serve_and_fail(altered)
    assert result.returncode == 1
    assert "altered.gguf" in result.stderr
    assert "blk.3.ffn_up.weight" in result.stderr


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "config.json").write_text("{}")
    result = serve_and_fail(tmp_path)
    assert result.returncode == 1
    assert "safetensors" in result.stderr


def test_a_plan_that_does_not_fit_says_which_limit_to_lower(smollm2_path):
    result = serve_and_fail(smollm2_path, "--kv-tokens", "100000000")
    assert result.returncode == 1
    assert "--kv-tokens" in result.stderr


def test_a_taken_port_is_said_at_once(smollm2_path, live_server):
    port = live_server.base_url.rpartition(":")[2]
    command = [sys.executable, "-m", "ridgeline.cli.main", "serve", str(smollm2_path), "--port", port]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 1
    assert port in result.stderr
    assert "--port" in result.stderr


def test_a_port_that_does_not_exist_is_said_by_its_flag(smollm2_path):
    result = serve_and_fail(smollm2_path, "--port", "99999")
    assert result.returncode == 1
    assert "99999" in result.stderr
    assert "--port" in result.stderr
    assert "bug" not in result.stderr
