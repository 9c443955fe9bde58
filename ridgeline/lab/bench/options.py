"""BenchOptions: a run as the command line describes it, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option


@dataclass(frozen=True, slots=True)
class BenchOptions:
    model: str | None = option(None, "name for the server; default: the first that it lists")
    api: Literal["completions", "chat"] = option(
        "completions", "completions sends token ids where the server takes them; chat sends messages"
    )
    concurrency: int | None = option(
        None,
        "closed loop: so many requests under way at all times; default 8 where there is no --rate or trace",
    )
    max_concurrency: int | None = option(
        None,
        "cap of an open loop: requests beyond it wait in the client, and their wait counts; without --rate "
        "or a trace, the same as --concurrency",
    )
    slo: str | None = option(None, "limits for goodput, in ms: ttft=400,tpot=50,e2e=5000")
    warmup: int = option(8, "requests sent before the run, with words of their own; in no metric")
    cache: Literal["cold", "as_is", "primed"] = option(
        "cold",
        "prefix cache at the start: cold (words or salt of its own), as_is, or primed (all sent before)",
    )
    duration_s: float | None = option(
        None, "send nothing after so many seconds; what is under way is awaited"
    )
    deadline_s: float = option(600.0, "a request that is not whole after so many seconds has failed")
    first_byte_s: float = option(300.0, "likewise, without the answer's first byte")
    between_s: float = option(60.0, "likewise, with nothing new within an answer")
    connect_s: float = option(10.0, "likewise, without a connection")
    run_s: float | None = option(None, "end the whole run after so many seconds, whatever is under way")
    temperature: float | None = option(0.0, "sampling temperature")
    ignore_eos: bool = option(True, "ask for answers of exactly the planned length, where the server can")
    server_timing: bool = option(True, "ask for the server's own timings, where it has them")
    tokenizer: str | None = option(
        None,
        "a model (name, folder, .gguf) whose tokenizer counts prompts, and answers that come without usage; "
        "default: the server is asked",
    )
    usd_per_hour: float | None = option(None, "what the server costs an hour, for $ per million tokens")
    body: str | None = option(None, "JSON object with fields for every request")
    name: str | None = option(None, "name of the run, for its folder and report; default: the traffic's")
    selftest: bool = option(True, "measure a server of known latencies first, at this load")
