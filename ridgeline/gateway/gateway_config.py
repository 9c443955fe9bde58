"""GatewayConfig: the [gateway] section, whose keys are flags too. Imports nothing heavy, for `--help`."""

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
    ssl_certfile: Path | None = option(
        None, "PEM file of the certificate, with its chain, to serve https; read again when it changes"
    )
    ssl_keyfile: Path | None = option(None, "PEM file of its key; default: in ssl_certfile")
    workers: int = option(1, "processes that answer; more than one needs [redis] for exact limits")
    state_dir: Path | None = option(
        None, "where keys, ledger and write-ahead files are kept; default: ~/.local/state/ridgeline/gateway"
    )
    require_keys: bool = option(
        True, "false: a request without a key is answered; only on a loopback address"
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "without keys: a name clients may reach the gateway by, *.NAME for all below it, * for any"
    )
    objects_upstream: str | None = option(
        None,
        "the upstream that keeps files and batches; default: the first that is of kind ridgeline or openai",
    )
    max_body_bytes: int = option(8 << 20, "largest JSON body; a larger one is answered 413")
    max_upload_bytes: int = option(
        512 << 20, "largest body of /v1/files and audio; a larger one is answered 413"
    )
    max_held_bytes: int = option(
        512 << 20,
        "bytes of bodies in memory at once in one worker, all requests together; more are answered 503",
    )
    max_held_bytes_per_key: int = option(
        128 << 20, "of these, of the requests of one key; more are answered 429"
    )
    max_spooled_bytes: int = option(
        8 << 30, "bytes of uploads on disk at once for one worker, all together; more are answered 503"
    )
    max_spooled_bytes_per_key: int = option(2 << 30, "of these, of one key; more are answered 429")
    max_answer_bytes: int = option(64 << 20, "largest answer that is not streamed; a larger one is a 502")
    upload_timeout_s: float = option(60.0, "longest time for a body to arrive; then it is answered 408")
    request_timeout_s: float = option(600.0, "longest time for a whole answer; then 504")
    stream_stall_s: float = option(30.0, "a stream whose reader takes nothing for so long is cut")
    max_head_bytes: int = option(64 << 10, "largest first line and headers of a request; larger ones get 431")
    head_timeout_s: float = option(10.0, "longest time for a request's headers to arrive; then 408")
    max_connections: int = option(8192, "connections open at once in one worker; one more gets 503")
    max_connections_per_address: int | None = option(
        None, "of these, from one address; default: a quarter. Raise it behind a proxy or load balancer"
    )
    output_estimate: int = option(
        512, "tokens that are reserved for an answer whose request names no limit of its own"
    )
    batch_poll_s: float = option(
        5.0, "seconds between two looks at a running batch, which is held to its budget then"
    )
    drain_s: float = option(30.0, "after SIGTERM, how long running requests may take to finish")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe line that is logged"
    )
    log_format: Literal["auto", "text", "json"] = option("auto", "auto: text on a terminal, JSON elsewhere")

    def __post_init__(self) -> None:
        check_range(self, "[gateway]", 0, 65_535, "port")
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
