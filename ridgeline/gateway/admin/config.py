"""AdminConfig: the administrators' listener, and the file with their keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import OptionError, option


@dataclass(frozen=True)
class AdminConfig:
    host: str = option("127.0.0.1", "address for the admin API, separate from the gateway's")
    port: int = option(8081, "port of the admin API")
    console: bool = option(True, "serve the web console at /console of the admin port")
    ssl_certfile: Path | None = option(
        None,
        "PEM file of the certificate and its chain, to serve it over https; reloaded when it changes",
    )
    ssl_keyfile: Path | None = option(None, "PEM file of the certificate's key; default: in ssl_certfile")
    key_file: Path | None = option(
        None,
        "file with admin keys, one per line, each after a name if there are several; "
        "unset: admin-key in the state directory, created at the first start",
    )
    metrics_without_key: bool = option(False, "serve /metrics on the admin port without a key")
    wrong_key_delay_s: float = option(
        0.5, "delay in seconds of the answer to a wrong admin key; doubled each time, up to 8 s"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"admin.port must be from 0 to 65535, got {self.port}")
        if not 0 <= self.wrong_key_delay_s <= 8:
            raise OptionError(f"admin.wrong_key_delay_s must be from 0 to 8, got {self.wrong_key_delay_s:g}")
