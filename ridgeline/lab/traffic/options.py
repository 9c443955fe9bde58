"""TrafficOptions: traffic as the command line and config files describe it, declared once; `source` makes it.

Apart from what makes it, so that a parser of flags imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.options import option

DEFAULT_INPUT, DEFAULT_OUTPUT = "512", "128"
DEFAULT_REQUESTS = 100  # of synthetic traffic; plans take enough for their percentiles


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
    speed: float | None = option(None, "play a trace so many times as fast")
    window_start_s: float | None = option(None, "leave out what a trace has before this second")
    window_s: float | None = option(None, "of a trace only so many seconds")
    sample: float | None = option(None, "keep this share of a trace's requests, each at its moment")
    max_context: int | None = option(None, "cut prompts so that prompt and answer fit so many tokens")
    shared_prefix: int | None = option(None, "prompts begin with the same so many tokens, as a system prompt")
    shared_prefix_share: float = option(1.0, "of how many of the prompts that is true, 0 to 1")
    seed: int = option(0, "root of all random numbers; arrivals, lengths and words have streams of their own")
    skip_bad_rows: bool = option(False, "go on without rows of a trace that cannot be read; they are counted")
