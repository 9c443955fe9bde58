"""TrafficOptions: traffic as the command line and config files describe it, declared once; `source` builds
it.

A separate module, so that the flag parser imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.options import option

DEFAULT_INPUT, DEFAULT_OUTPUT = "512", "128"
DEFAULT_REQUESTS = 100  # of synthetic traffic; plans use enough for their percentiles


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    traffic: str | None = option(
        None,
        "replay a trace: azure:FILE, mooncake:FILE, recorded:FILE or burstgpt:FILE; or send prompts:FILE, "
        "JSON lines with prompt or messages, and optional max_tokens; default: from --input and --output",
    )
    input: str | None = option(
        None,
        "draw prompt tokens from N, uniform:LOW,HIGH, normal:MEAN,SD, lognormal:MEAN,SIGMA or cdf:FILE; "
        f"default: {DEFAULT_INPUT}",
    )
    output: str | None = option(None, f"draw answer tokens, as --input; default: {DEFAULT_OUTPUT}")
    arrivals: str | None = option(
        None,
        "space arrivals as constant, poisson, gamma:CV or closed; default: a trace's own; else poisson with "
        "a --rate, closed without",
    )
    burstiness: float | None = option(
        None,
        "set the CV of the gaps of --arrivals gamma: 1 is poisson, more is burstier (vLLM's figure is 1/CV²)",
    )
    rate: float | None = option(
        None,
        "send this many requests per second; a trace is stretched to it; default: the trace's own rate (plan "
        "without a trace: what one replica serves)",
    )
    end_rate: float | None = option(
        None, "change the rate evenly from --rate to this many requests per second"
    )
    requests: int | None = option(
        None,
        f"send this many requests, or conversations; default: all of a trace, else {DEFAULT_REQUESTS} (plan: "
        "those of a minute, 200 to 3000)",
    )
    turns: str | None = option(
        None, "draw the turns of each conversation, as --input; default: single requests"
    )
    turn_input: str | None = option(
        None, "draw the new tokens of each later turn, as --input; default: the same as --input"
    )
    think_s: str | None = option(
        None, "draw the seconds between an answer and the next turn, as --input; default: 0"
    )
    speed: float | None = option(None, "replay a trace this many times as fast")
    window_start_s: float | None = option(None, "skip a trace before this second")
    window_s: float | None = option(None, "replay only this many seconds of a trace")
    sample: float | None = option(None, "replay this share of a trace's requests, each at its moment")
    max_context: int | None = option(None, "shorten prompts until prompt and answer fit this many tokens")
    shared_prefix: int | None = option(
        None, "begin prompts with this many equal tokens, as a system prompt does"
    )
    shared_prefix_share: float = option(1.0, "share of the prompts that begin with --shared-prefix, 0 to 1")
    seed: int = option(0, "seed all random numbers; arrivals, lengths and words have separate streams")
    skip_bad_rows: bool = option(False, "skip rows of a trace that cannot be read, and count them")
