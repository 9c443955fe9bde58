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
        "a trace: azure:FILE, mooncake:FILE, recorded:FILE or burstgpt:FILE; or prompts:FILE, JSON lines "
        "with prompt or messages, and optional max_tokens; default: from --input …",
    )
    input: str | None = option(
        None,
        "prompt tokens: N, uniform:LOW,HIGH, normal:MEAN,SD, lognormal:MEAN,SIGMA or cdf:FILE; "
        f"default {DEFAULT_INPUT}",
    )
    output: str | None = option(None, f"answer tokens, likewise; default {DEFAULT_OUTPUT}")
    arrivals: str | None = option(
        None, "constant, poisson, gamma:CV or closed; default: a trace's own, else poisson, or closed"
    )
    burstiness: float | None = option(
        None, "CV of the gaps of --arrivals gamma: 1 is poisson, more is burstier (vLLM's figure is 1/CV²)"
    )
    rate: float | None = option(
        None,
        "arrivals per second; a trace is stretched to it; default: the trace's own (plan without a trace: "
        "what one replica serves)",
    )
    end_rate: float | None = option(
        None, "arrivals per second at the end: the rate changes evenly from --rate"
    )
    requests: int | None = option(
        None,
        f"how many, or how many conversations; default: all of a trace, else {DEFAULT_REQUESTS} (plan: of a "
        "minute, 200 to 3000)",
    )
    turns: str | None = option(None, "turns of each conversation, as --input; default: single requests")
    turn_input: str | None = option(None, "new tokens of each later turn, as --input; default: as --input")
    think_s: str | None = option(None, "seconds between an answer and the next turn, as --input; default 0")
    speed: float | None = option(None, "play a trace this many times as fast")
    window_start_s: float | None = option(None, "skip the part of a trace before this second")
    window_s: float | None = option(None, "use only this many seconds of a trace")
    sample: float | None = option(None, "keep this share of a trace's requests, at their times")
    max_context: int | None = option(None, "clip prompts so that prompt and answer fit this many tokens")
    shared_prefix: int | None = option(
        None, "begin prompts with this many common tokens, like a system prompt"
    )
    shared_prefix_share: float = option(1.0, "share of the prompts with the common prefix, 0 to 1")
    seed: int = option(0, "seed of all random numbers; arrivals, lengths and words use separate streams")
    skip_bad_rows: bool = option(False, "skip and count unreadable rows of a trace")
