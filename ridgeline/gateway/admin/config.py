"""AdminConfig: the administrators' listener, and the file with their keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import OptionError, option


@dataclass(frozen=True)
class AdminConfig:
    host: str = option("127.0.0.1", "address that the admin API listens on, apart from the gateway's own")
    port: int = option(8081, "port of the admin API")
    ssl_certfile: Path | None = option(
        None,
        "PEM file of the certificate, with its chain, to serve this over https; read again when it changes",
    )
    ssl_keyfile: Path | None = option(None, "PEM file of its key; default: in ssl_certfile")
    key_file: Path | None = option(
        None,
        "file with admin keys, one in a line, each with a name before it if there are several; "
        "unset: admin-key in the state directory, made at the first start",
    )
    metrics_without_key: bool = option(False, "let everybody who reaches the admin port read /metrics")
    wrong_key_delay_s: float = option(
        0.5, "how long the answer to a wrong admin key takes; doubled each time, up to 8 s"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"admin.port must be from 0 to 65535, got {self.port}")
        if not 0 <= self.wrong_key_delay_s <= 8:
            raise OptionError(f"admin.wrong_key_delay_s must be from 0 to 8, got {self.wrong_key_delay_s:g}")
