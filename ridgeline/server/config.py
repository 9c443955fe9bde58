"""ServerConfig: every setting of the HTTP server, declared once. Flags, file and docs come from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.options import OptionError, option
from ridgeline.replica.weight_sources import check_peers, check_sources
from ridgeline.retrieval.stores.choice import check_address
from ridgeline.server.effort import effort_budgets


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    grpc_port: int | None = option(
        None, "also serve gRPC on this port (needs ridgeline[grpc]); 0 picks a free one; default: off"
    )
    ssl_certfile: Path | None = option(
        None, "PEM file of the certificate, with its chain, to serve https; read again when it changes"
    )
    ssl_keyfile: Path | None = option(None, "PEM file of the certificate's key; default: ssl_certfile")
    served_model_name: tuple[str, ...] = option(
        (),
        "names under which clients may request the first model; may be repeated; default: its short name or "
        "hub id, or its file's or folder's name",
    )
    alias: tuple[str, ...] = option((), "NAME=MODEL: another name for a served model; may be repeated")
    state_dir: Path | None = option(
        None, "directory of files, batches, responses, vector stores; default ~/.local/state/ridgeline/<port>"
    )
    tool_parser: str | None = option(
        None,
        "format of the model's tool calls; default: detected from its chat template; none: no tool calls",
    )
    reasoning_parser: str | None = option(
        None, "format of the model's reasoning; default: detected from its chat template; none: no reasoning"
    )
    reasoning_budget: str | None = option(
        None,
        "tokens of thinking by effort, such as low=1024,medium=8192,high=none; default=N: without an effort",
    )
    api_keys: tuple[str, ...] | None = option(
        None, "accepted bearer key; may be repeated; with no key here or in a file, requests need none"
    )
    api_key_file: Path | None = option(None, "file with one accepted key per line; # starts a comment")
    allowed_hosts: tuple[str, ...] = option(
        (), "without keys: accept this Host header; *.NAME for all subdomains, * for any; may be repeated"
    )
    cors_origins: tuple[str, ...] = option((), "web origins whose pages may call this server; * for all")
    max_body_bytes: int = option(8 << 20, "maximum size of a request body; larger ones get 413")
    max_file_bytes: int = option(512 << 20, "maximum size of a file of /v1/files; larger ones get 413")
    max_stored_bytes: int = option(10 << 30, "maximum total size of stored files")
    response_retention_s: float = option(
        30 * 86400.0, "keep a stored response for this many seconds after it was created or last continued"
    )
    response_store_count: int = option(
        20_000, "maximum number of stored responses; the least recently used are removed"
    )
    response_store_bytes: int = option(
        1 << 30, "maximum size of stored responses; the least recently used are removed"
    )
    background_responses: int = option(
        256, "maximum number of background responses at a time; further ones get 429"
    )
    retrieval_wait_s: float = option(
        10.0, "seconds that a search waits for files of its vector store that are still in progress"
    )
    file_search_tokens: int = option(
        4096, "most tokens of found passages in a prompt of file_search; at most half of the model's context"
    )
    retrieval_store: str = option(
        "sqlite",
        "where chunks of vector stores are kept: sqlite (in state_dir), postgresql://… with pgvector, or the "
        "http(s):// URL of a Qdrant",
    )
    retrieval_store_key_file: Path | None = option(None, "file with the API key of retrieval_store (Qdrant)")
    upload_timeout_s: float = option(60.0, "maximum seconds for a request body to arrive; then 408")
    max_head_bytes: int = option(
        64 << 10, "maximum size of a request's first line and headers; larger ones get 431"
    )
    head_timeout_s: float = option(10.0, "maximum seconds for a request's headers to arrive; then 408")
    max_connections: int = option(
        4096, "maximum number of open connections; further ones get 503 and are closed"
    )
    max_connections_per_address: int | None = option(
        None,
        "maximum number of open connections from one address; default: no limit, for clients behind a proxy",
    )
    websocket_requests: int = option(16, "maximum number of concurrent requests on one WebSocket")
    websocket_ping_s: float = option(
        20.0,
        "ping a WebSocket at this interval in seconds; close it if no pong arrives within another interval",
    )
    request_timeout_s: float | None = option(None, "maximum seconds for a whole answer; default: no limit")
    stream_buffer_chunks: int = option(
        4096, "close a stream when more than this many chunks wait for its client to read"
    )
    stream_stall_s: float = option(10.0, "close a stream whose client has not read for this many seconds")
    stream_headers_s: float = option(
        5.0,
        "wait up to this many seconds for a first token before sending headers; errors keep their status",
    )
    stream_keepalive_s: float = option(
        15.0, "send a comment line after this many seconds without an event on a stream"
    )
    drain_s: float = option(30.0, "seconds that running requests have to finish after SIGTERM")
    stall_s: float = option(
        15.0,
        "report an engine as not ready after this many seconds without progress; kill it after 8 times that",
    )
    weight_sources: tuple[str, ...] = option(
        (),
        "where weights come from, in this order: local, peers, http(s):// or file:// URLs of folders with a "
        "manifest, hub; may be repeated; default: local and hub",
    )
    weight_peers: tuple[str, ...] = option(
        (), "NAME=URL of a server that shares the files of the same model; may be repeated"
    )
    weight_caches: bool = option(
        True, "also fetch packed weights or compiled kernels from weight_peers and stores, if they match"
    )
    share_weights: bool = option(False, "give the models' files to clients with a key, at /replica/files")
    share_transfers: int = option(2, "peers that may fetch files at a time; further ones get 503 and wait")
    share_mb_per_s: float = option(
        100.0, "MB/s of all file transfers together while requests run; without requests there is no limit"
    )
    record_traffic: Path | None = option(
        None,
        "record arrival times, lengths and block hashes of requests (no content) in this file; default: off",
    )
    record_traffic_bytes: int = option(
        1 << 30, "maximum size of the record_traffic file; later requests are not recorded"
    )
    record_texts: bool = option(
        False,
        "also record the texts of prompts and answers, which are users' content, in the record_traffic file: "
        "calibration text for `ridgeline quantize`",
    )
    console: bool = option(True, "serve the web console at /console")
    console_reports: Path | None = option(
        None, "directory of lab results (plans, benchmarks, tuning, evaluations) that the console lists"
    )
    otlp_endpoint: str | None = option(
        None, "send traces to this OTLP/HTTP endpoint, e.g. http://127.0.0.1:4318; default: off"
    )
    trace_sample: float = option(
        0.0,
        "share of requests without a traceparent to trace, 0 to 1; others follow their traceparent's flag",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "minimum severity of logged lines"
    )
    log_format: Literal["auto", "text", "json"] = option("auto", "auto: text on a terminal, JSON elsewhere")

    def __post_init__(self) -> None:
        effort_budgets(self.reasoning_budget)  # raises OptionError
        check_sources(self.weight_sources, "weight_sources")
        check_peers(self.weight_peers, "weight_peers")
        check_address(self.retrieval_store, "retrieval_store")
        if self.record_texts and self.record_traffic is None:
            raise OptionError("record_texts needs record_traffic: name the file that gets the texts")
        if self.share_transfers < 1 or self.share_mb_per_s <= 0:
            raise OptionError("share_transfers and share_mb_per_s must be more than 0; --no-share-weights")
        if self.share_weights and not self.needs_key:
            raise OptionError(
                "share_weights needs api_keys or api_key_file: only clients with a key get files"
            )
        if self.api_keys is not None and not all(key.strip() for key in self.api_keys or ("",)):
            # An unset variable in a script must neither open the server nor shut out every client.
            raise OptionError("api_keys contains an empty key or no key: give a key, or drop the option")
        if not 0 <= self.trace_sample <= 1:
            raise OptionError(f"trace_sample must be between 0 and 1, got {self.trace_sample:g}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise OptionError(f"otlp_endpoint must be an http:// or https:// URL, got {self.otlp_endpoint!r}")

    @property
    def needs_key(self) -> bool:
        return self.api_keys is not None or self.api_key_file is not None

    def retrieval_store_key(self) -> str | None:
        """The key in its file; an unreadable or empty file is an error."""
        file = self.retrieval_store_key_file
        if file is None:
            return None
        try:
            key = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"retrieval_store_key_file {file} cannot be read: {error}") from error
        if not key:
            raise OptionError(f"retrieval_store_key_file {file} is empty")
        return key

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
            # An empty file must not silently disable the key check.
            raise OptionError(f"{self.api_key_file} contains no key: write one per line, or drop the option")
        return given + keys
