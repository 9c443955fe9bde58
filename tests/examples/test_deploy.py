"""The commands and settings in deploy/systemd, and the settings on the migration page, are accepted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
KEYS = {"RIDGELINE_SERVER_KEY": "key", "OPENAI_API_KEY": "key"}


def ridgeline(*arguments: str, **variables: str) -> str:
    command = [sys.executable, "-m", "ridgeline.cli.main", *arguments]
    done = subprocess.run(
        command,
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def exec_start(unit: str, **folders: str) -> list[str]:
    """The arguments after `ridgeline` of a unit's command, with /etc/ridgeline read from deploy/systemd."""
    line = re.search(r"^ExecStart=(.*)$", (SYSTEMD / unit).read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    text = line[1].replace("/etc/ridgeline", str(SYSTEMD))
    for name, folder in folders.items():
        text = text.replace(f"${{{name}}}", folder)
    assert "$" not in text
    program, *arguments = shlex.split(text)
    assert program == "/opt/ridgeline/.venv/bin/ridgeline"
    return arguments


def test_the_server_s_unit_starts_a_server_with_its_settings(tmp_path: Path) -> None:
    (tmp_path / "api-keys").write_text("key\n", encoding="utf-8")
    arguments = exec_start(
        "ridgeline.service", STATE_DIRECTORY=str(tmp_path), CREDENTIALS_DIRECTORY=str(tmp_path)
    )
    settings = tomllib.loads(ridgeline(*arguments, "--print-config"))
    assert settings["server"]["port"] == 8000
    assert settings["server"]["api_key_file"] == str(tmp_path / "api-keys")
    assert settings["engine"]["model"] == "smollm2-135m"


def test_the_gateway_s_unit_starts_a_gateway_with_its_settings(tmp_path: Path) -> None:
    arguments = exec_start("ridgeline-gateway.service", STATE_DIRECTORY=str(tmp_path))
    assert "1 upstream, 1 model; the configuration is valid" in ridgeline(*arguments, "--check", **KEYS)


@pytest.mark.parametrize("page", ["migrate-from-litellm.md"])
def test_a_page_s_gateway_file_is_accepted(page: str, tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert block
    file = tmp_path / "gateway.toml"
    file.write_text(block[1].replace("postgresql://…", "postgresql://127.0.0.1/ridgeline"), encoding="utf-8")
    assert "2 upstreams, 1 model; the configuration is valid" in ridgeline(
        "gateway", "--config", str(file), "--check", **KEYS
    )
