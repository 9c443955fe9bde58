"""BenchOptions: the command-line options of a run, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option


@dataclass(frozen=True, slots=True)
class BenchOptions:
    model: str | None = option(None, "model name to request; default: the first that the server lists")
    api: Literal["completions", "chat"] = option(
        "completions", "completions sends token ids where the server takes them; chat sends messages"
    )
    concurrency: int | None = option(
        None,
        "closed loop: keep this many requests in flight; default 8 without --rate or a trace",
    )
    max_concurrency: int | None = option(
        None,
        "open loop: maximum requests in flight; others wait in the client, and the wait counts; without "
        "--rate or a trace, the same as --concurrency",
    )
    slo: str | None = option(None, "limits for goodput, in ms: ttft=400,tpot=50,e2e=5000")
    warmup: int = option(8, "requests sent before the run, with separate prompts; in no metric")
    cache: Literal["cold", "as_is", "primed"] = option(
        "cold",
        "prefix cache at the start: cold (own words or salt), as_is, or primed (all prompts sent before)",
    )
    duration_s: float | None = option(
        None, "stop sending after this many seconds; requests in flight are awaited"
    )
    deadline_s: float = option(600.0, "fail a request that is not complete after this many seconds")
    first_byte_s: float = option(300.0, "fail a request without a first byte after this many seconds")
    between_s: float = option(60.0, "fail a request that receives no data for this many seconds")
    connect_s: float = option(10.0, "fail a request without a connection after this many seconds")
    run_s: float | None = option(None, "end the whole run after this many seconds")
    temperature: float | None = option(0.0, "sampling temperature")
    ignore_eos: bool = option(
        True, "request answers of exactly the planned length, if the server supports it"
    )
    server_timing: bool = option(True, "request the server's own timings, if it reports them")
    tokenizer: str | None = option(
        None,
        "a model (name, folder, .gguf) whose tokenizer counts prompts, and answers that come without usage; "
        "default: the server is asked",
    )
    usd_per_hour: float | None = option(None, "price of the server in $ per hour, for $ per million tokens")
    body: str | None = option(None, "JSON object with fields to add to every request")
    name: str | None = option(None, "name of the run, for its folder and report; default: the traffic's")
    selftest: bool = option(True, "first measure a mock server with known latencies at this load")
