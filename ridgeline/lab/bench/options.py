"""BenchOptions: the command-line options of a run, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option


@dataclass(frozen=True, slots=True)
class BenchOptions:
    model: str | None = option(None, "ask for this model; default: the first that the server lists")
    api: Literal["completions", "chat"] = option(
        "completions",
        "choose the endpoint: completions sends token ids where the server accepts them, chat sends messages",
    )
    concurrency: int | None = option(
        None,
        "keep this many requests in flight (closed loop); default: 8, without a --rate or trace",
    )
    max_concurrency: int | None = option(
        None,
        "send at most this many requests at once; the others wait in the client, and their wait counts; "
        "without a --rate or trace: the same as --concurrency",
    )
    slo: str | None = option(None, "count goodput within these limits, in ms: ttft=400,tpot=50,e2e=5000")
    warmup: int = option(
        8, "send this many requests before the run, with other words; they count in no metric"
    )
    cache: Literal["cold", "as_is", "primed"] = option(
        "cold",
        "start with this prefix cache: cold (new words or salt), as_is, or primed (every prompt sent before)",
    )
    duration_s: float | None = option(
        None, "stop sending after this many seconds, and wait for the requests in flight"
    )
    deadline_s: float = option(600.0, "fail a request whose answer is not complete after this many seconds")
    first_byte_s: float = option(
        300.0, "fail a request without the first byte of its answer after this many seconds"
    )
    between_s: float = option(60.0, "fail a request whose answer pauses for this many seconds")
    connect_s: float = option(10.0, "fail a request without a connection after this many seconds")
    run_s: float | None = option(
        None, "end the whole run after this many seconds, with requests in flight or not"
    )
    temperature: float | None = option(0.0, "sample at this temperature")
    ignore_eos: bool = option(
        True, "ask for answers of exactly the planned length, where the server supports it"
    )
    server_timing: bool = option(True, "ask for the server's own timings, where it reports them")
    tokenizer: str | None = option(
        None,
        "count prompts, and answers without usage, with the tokenizer of this model (name, folder, .gguf); "
        "default: ask the server",
    )
    usd_per_hour: float | None = option(
        None, "compute $ per million tokens from this price of the server per hour"
    )
    body: str | None = option(None, "add the fields of this JSON object to every request")
    name: str | None = option(None, "name the run in its folder and report; default: the traffic's name")
    selftest: bool = option(True, "measure a server of known latencies first, at this load")
