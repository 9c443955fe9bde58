"""`ridgeline gateway` and its admin API over TLS, with the commands that talk to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from ridgeline.cli.main import main
from tests.certificates import Authority
from tests.gateway.test_processes import Gateway


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class TlsGateway(Gateway):
    """Both listeners over TLS; clients know the authority by SSL_CERT_FILE."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.certfile, self.keyfile = authority.issue("gateway")
        super().__init__(folder)

    def write_config(self, *lines: str, **names: Any) -> None:
        tls = (f'ssl_certfile = "{self.certfile}"', f'ssl_keyfile = "{self.keyfile}"')
        super().write_config(*tls, *lines, **names)
        text = self.config.read_text()
        self.config.write_text(text.replace("[admin]", "\n".join(["[admin]", *tls])))


def test_keys_are_made_and_used_over_tls(tmp_path: Path, authority: Authority) -> None:
    gateway = TlsGateway(tmp_path, authority)
    try:
        assert (gateway.url[:6], gateway.admin_url[:6]) == ("https:", "https:")
        program = [sys.executable, "-m", "ridgeline.cli.main"]
        trusting = os.environ | {"SSL_CERT_FILE": str(authority.file)}
        admin = ["--admin-url", gateway.admin_url, "--admin-key-file", str(tmp_path / "state" / "admin-key")]
        words = [*program, "keys", "create", "--name", "app", *admin]
        stranger = subprocess.run(words, capture_output=True, text=True, check=False)
        assert stranger.returncode == 1
        assert "is not trusted" in stranger.stderr
        assert "SSL_CERT_FILE" in stranger.stderr
        secret = subprocess.run(
            words, env=trusting, capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        with httpx.Client(verify=authority.trusting()) as http:
            client = OpenAI(base_url=f"{gateway.url}/v1", api_key=secret, http_client=http)
            asked: Any = {"model": "mock_out2", "messages": [{"role": "user", "content": "hi"}]}
            assert client.chat.completions.create(**asked).usage.completion_tokens == 2  # type: ignore[union-attr]
            parts = list(client.chat.completions.create(**asked, stream=True))
            assert parts[-1].choices[0].finish_reason
        said = [
            *program,
            "run",
            "--url",
            gateway.url,
            "--model",
            "mock_out2",
            "--api-key",
            secret,
            "--json",
            "hi",
        ]
        done = subprocess.run(said, env=trusting, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["stats"]["output_tokens"] == 2
    finally:
        gateway.end()


def test_a_certificate_that_cannot_be_used_is_named_with_its_section(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    certfile, _ = authority.issue("one")
    _, keyfile = authority.issue("two")
    for section in ("gateway", "admin"):
        config = tmp_path / f"{section}.toml"
        tables = ["[[upstreams]]", 'name = "up"', 'kind = "openai"', 'url = "http://127.0.0.1:1"']
        tables += ["[[models]]", 'name = "*"', 'targets = ["up/*"]']
        pair = [f"[{section}]", f'ssl_certfile = "{certfile}"', f'ssl_keyfile = "{keyfile}"']
        config.write_text("\n".join([*pair, *tables]))
        assert main(["gateway", "--config", str(config), "--check"]) == 2
        assert f"[{section}] ssl_certfile: the key does not belong" in capsys.readouterr().err
