"""The admin port takes connections as soon as its address is known."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from ridgeline.gateway.admin.listener import AdminListener
from ridgeline.gateway.settings import make_settings
from ridgeline.proxy.origin import read_url


async def test_a_connection_waits_for_a_server_that_has_not_run_yet(tmp_path: Path) -> None:
    async def nothing() -> Any:
        return ""

    settings = make_settings(
        {
            "gateway": {"state_dir": tmp_path},
            "admin": {"port": 0},
            "upstreams": [{"name": "u", "url": "http://127.0.0.1:1"}],
            "models": [{"name": "*", "targets": ("u/*",)}],
        }
    )
    admin = AdminListener(settings, nothing, nothing, nothing)
    await admin.start()
    try:
        origin = read_url(admin.url)
        socket.create_connection((origin.host, origin.port), timeout=10).close()  # the loop has not turned
    finally:
        await admin.stop()
