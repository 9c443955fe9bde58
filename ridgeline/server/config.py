"""ServerConfig: every setting of the HTTP face, declared once. Flags, file and docs come from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.options import OptionError, option


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    ssl_certfile: Path | None = option(
        None, "PEM file of the certificate, with its chain, to serve https; read again when it changes"
    )
    ssl_keyfile: Path | None = option(None, "PEM file of its key; default: in ssl_certfile")
    served_model_name: tuple[str, ...] = option(
        (), "names clients may ask for the first model by; default: its own"
    )
    alias: tuple[str, ...] = option((), "NAME=MODEL: another name for a served model; may be repeated")
    state_dir: Path | None = option(
        None, "where files, batches and responses are kept; default: ~/.local/state/ridgeline/<port>"
    )
    tool_parser: str | None = option(
        None, "how the model writes tool calls; default: found in its chat template; none: no tool calls"
    )
    reasoning_parser: str | None = option(
        None, "how the model marks its reasoning; default: found in its chat template; none: it does not"
    )
    api_keys: tuple[str, ...] | None = option(
        None, "accepted bearer key; may be repeated; without a key here or in a file, none is needed"
    )
    api_key_file: Path | None = option(None, "file with one accepted key per line; # starts a comment")
    allowed_hosts: tuple[str, ...] = option(
        (), "without keys: a name clients may reach this server by, *.NAME for all below it, * for any"
    )
    cors_origins: tuple[str, ...] = option((), "web origins whose pages may call this server; * for all")
    max_body_bytes: int = option(8 << 20, "largest request body; a larger one is answered 413")
    max_file_bytes: int = option(512 << 20, "largest file of /v1/files; a larger one is answered 413")
    max_stored_bytes: int = option(10 << 30, "most bytes of files that are kept at once")
    response_retention_s: float = option(
        30 * 86400.0, "a stored response is kept so long after it, or one that goes on from it, was made"
    )
    response_store_count: int = option(20_000, "stored responses; the longest unused makes room")
    response_store_bytes: int = option(1 << 30, "bytes of stored responses; the longest unused makes room")
    background_responses: int = option(
        256, "background responses under way at once; one more is answered 429"
    )
    upload_timeout_s: float = option(
        60.0, "longest time for a request body to arrive; then it is answered 408"
    )
    max_head_bytes: int = option(
        64 << 10, "largest first line and headers of a request; larger ones are answered 431"
    )
    head_timeout_s: float = option(10.0, "longest time for a request's headers to arrive; then 408")
    max_connections: int = option(4096, "connections open at once; one more is answered 503 and closed")
    max_connections_per_address: int | None = option(
        None, "of these, from one address; default: no limit of its own, as all may come through one proxy"
    )
    websocket_requests: int = option(16, "requests under way at once on one WebSocket")
    websocket_ping_s: float = option(
        20.0, "a WebSocket is pinged so often, and closed if no answer comes in as long again"
    )
    request_timeout_s: float | None = option(None, "longest time for a whole answer; default: no limit")
    stream_buffer_chunks: int = option(
        4096, "chunks that may wait while a reader takes nothing; one that falls further behind is cut"
    )
    stream_stall_s: float = option(10.0, "a stream whose reader takes nothing for so long is cut")
    stream_headers_s: float = option(
        5.0, "a stream's headers wait so long for its first token, so that errors have their own status"
    )
    stream_keepalive_s: float = option(15.0, "silence on a stream after which a comment line is sent")
    drain_s: float = option(30.0, "after SIGTERM, how long running requests may take to finish")
    stall_s: float = option(
        15.0, "an engine that makes no progress for so long is not ready; 8 times: killed"
    )
    record_traffic: Path | None = option(
        None, "file for the moments, lengths and block hashes of requests (no content); off by default"
    )
    record_traffic_bytes: int = option(1 << 30, "largest such file; what comes after is not recorded")
    otlp_endpoint: str | None = option(
        None, "where traces go, by OTLP over HTTP, e.g. http://127.0.0.1:4318; off by default"
    )
    trace_sample: float = option(
        0.0,
        "share of requests traced that carry no traceparent, 0 to 1; those that do are traced if they say so",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe line that is logged"
    )
    log_format: Literal["auto", "text", "json"] = option("auto", "auto: text on a terminal, JSON elsewhere")

    def __post_init__(self) -> None:
        if self.api_keys is not None and not all(key.strip() for key in self.api_keys or ("",)):
            # An unset variable in a script must neither open the server nor shut out every client.
            raise OptionError("api_keys holds an empty key or no key: give a key, or drop the option")
        if not 0 <= self.trace_sample <= 1:
            raise OptionError(f"trace_sample must be between 0 and 1, got {self.trace_sample:g}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise OptionError(f"otlp_endpoint must be an http:// or https:// URL, got {self.otlp_endpoint!r}")

    @property
    def needs_key(self) -> bool:
        return self.api_keys is not None or self.api_key_file is not None

    def accepted_keys(self) -> tuple[str, ...]:
        """The keys given directly and those of the key file; an unreadable or empty file is an error."""
        given = self.api_keys or ()
        if self.api_key_file is None:
            return given
        try:
            text = self.api_key_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"api_key_file {self.api_key_file} cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            # An empty file must not silently open the server to everybody.
            raise OptionError(f"{self.api_key_file} holds no key: write one per line, or drop the option")
        return given + keys
