"""Certificates for tests of TLS: an authority made with the openssl command, and what it signs."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

RSA_KEY = ("-newkey", "rsa:2048", "-nodes")
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl here to make certificates with")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.file, self._key = folder / "ca.pem", folder / "ca.key"
        made = ("-out", self.file, "-keyout", self._key)
        _openssl("req", "-x509", *KEY, "-days", "2", "-subj", "/CN=test authority", *made)

    def issue(self, name: str, key_options: tuple[str, ...] = KEY) -> tuple[Path, Path]:
        """A certificate for localhost and 127.0.0.1 with its key; `name` is its common name."""
        paths = [self._folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext")]
        certificate, key, request, extensions = paths
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *key_options, "-subj", f"/CN={name}", "-out", request, "-keyout", key)
        signer = ("-CA", self.file, "-CAkey", self._key, "-CAcreateserial")
        made = ("-extfile", extensions, "-out", certificate)
        _openssl("x509", "-req", "-in", request, *signer, "-days", "2", *made)
        return certificate, key

    def trusting(self) -> ssl.SSLContext:
        """What a client that trusts this authority connects with."""
        return ssl.create_default_context(cafile=str(self.file))


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
