"""GatewayConfig: the [gateway] section, whose keys are also flags. Imports nothing heavy, for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.options import check_range, option

GIGABYTE = 1 << 30
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8080, "port to listen on; 0 picks a free one")
    grpc_port: int | None = option(
        None, "also serve gRPC on this port (needs ridgeline[grpc]); 0 picks a free one; default: off"
    )
    ssl_certfile: Path | None = option(
        None, "PEM file of the certificate and its chain, to serve https; reloaded when it changes"
    )
    ssl_keyfile: Path | None = option(None, "PEM file of the certificate's key; default: in ssl_certfile")
    workers: int = option(1, "worker processes; more than one needs [redis] for exact limits")
    state_dir: Path | None = option(
        None, "directory for keys, ledger and write-ahead files; default: ~/.local/state/ridgeline/gateway"
    )
    region: str = option(
        "", "region of this gateway: an upstream of kind fleet prefers replicas there, then the nearest"
    )
    require_keys: bool = option(True, "false: serve requests without a key; only on a loopback address")
    allowed_hosts: tuple[str, ...] = option(
        (), "without keys: host names that clients may use, *.NAME for subdomains, * for any"
    )
    objects_upstream: str | None = option(
        None,
        "upstream that stores files and batches; default: the first of kind ridgeline or openai",
    )
    max_body_bytes: int = option(8 << 20, "largest JSON body in bytes; a larger one gets 413")
    max_upload_bytes: int = option(
        512 << 20, "largest body of /v1/files and audio in bytes; a larger one gets 413"
    )
    max_held_bytes: int = option(
        512 << 20,
        "most bytes of bodies in one worker's memory; requests beyond this get 503",
    )
    max_held_bytes_per_key: int = option(
        128 << 20, "most of these bytes for one key; requests beyond this get 429"
    )
    max_spooled_bytes: int = option(
        8 << 30, "most bytes of one worker's uploads on disk; requests beyond this get 503"
    )
    max_spooled_bytes_per_key: int = option(
        2 << 30, "most of these bytes for one key; requests beyond this get 429"
    )
    max_answer_bytes: int = option(
        64 << 20, "largest answer in bytes that is not streamed; a larger one becomes a 502"
    )
    upload_timeout_s: float = option(60.0, "time limit in seconds for a body to arrive; then 408")
    request_timeout_s: float = option(600.0, "time limit in seconds for a whole answer; then 504")
    stream_stall_s: float = option(30.0, "close a stream whose client has not read for this many seconds")
    max_head_bytes: int = option(
        64 << 10, "most bytes of a request's first line and headers; larger ones get 431"
    )
    head_timeout_s: float = option(10.0, "time limit in seconds for a request's headers to arrive; then 408")
    max_connections: int = option(8192, "most open connections of one worker; further ones get 503")
    max_connections_per_address: int | None = option(
        None, "most of these from one address; default: a quarter. Raise it behind a proxy or load balancer"
    )
    output_estimate: int = option(512, "tokens reserved for an answer whose request sets no limit")
    batch_poll_s: float = option(5.0, "seconds between checks of a running batch against its budget")
    drain_s: float = option(30.0, "seconds for running requests to finish after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe level that is logged"
    )
    log_format: Literal["auto", "text", "json"] = option("auto", "auto: text on a terminal, JSON elsewhere")

    def __post_init__(self) -> None:
        check_range(self, "[gateway]", 0, 65_535, "port", "grpc_port")
        check_range(self, "[gateway]", 1, 256, "workers")
        check_range(self, "[gateway]", 1, GIGABYTE, "max_body_bytes", "max_answer_bytes", "max_head_bytes")
        held = ("max_held_bytes", "max_held_bytes_per_key")
        spooled = ("max_upload_bytes", "max_spooled_bytes", "max_spooled_bytes_per_key")
        check_range(self, "[gateway]", 1, 1024 * GIGABYTE, *held, *spooled)
        waits = ("upload_timeout_s", "request_timeout_s", "stream_stall_s", "head_timeout_s")
        check_range(self, "[gateway]", 0.01, DAY_S, *waits)
        check_range(self, "[gateway]", 0, DAY_S, "drain_s")
        check_range(self, "[gateway]", 0.01, 3600, "batch_poll_s")
        check_range(self, "[gateway]", 1, 1_000_000, "max_connections", "max_connections_per_address")
        check_range(self, "[gateway]", 0, 10_000_000, "output_estimate")
