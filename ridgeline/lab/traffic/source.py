"""Builds Traffic from TrafficOptions: a trace or distributions, never both.

Options that the chosen source does not use are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic import operations
from ridgeline.lab.traffic.arrivals import Arrivals, parse_arrivals
from ridgeline.lab.traffic.lengths import parse_lengths, parse_seconds
from ridgeline.lab.traffic.options import (
    DEFAULT_INPUT,
    DEFAULT_OUTPUT,
    DEFAULT_REQUESTS,
    TrafficOptions,
)
from ridgeline.lab.traffic.own_prompts import read_prompts
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.specs import split_kind, unknown_kind
from ridgeline.lab.traffic.synthetic import conversations, synthetic
from ridgeline.lab.traffic.traces import READERS

__all__ = ["TrafficOptions", "build_traffic"]


PROMPTS = "prompts"


def build_traffic(options: TrafficOptions) -> Traffic:
    """The traffic of the options. Raises BadInput naming the option."""
    for name in ("rate", "end_rate", "speed", "window_s"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise BadInput(f"{_flag(name)} must be more than 0, got {value:g}")
    traffic = _synthetic(options) if options.traffic is None else _replayed(options, options.traffic)
    if options.max_context is not None:
        traffic = operations.clipped(traffic, options.max_context)
    if options.shared_prefix is not None:
        traffic = operations.with_shared_prefix(
            traffic, options.shared_prefix, options.shared_prefix_share, options.seed
        )
    return traffic


def _synthetic(options: TrafficOptions) -> Traffic:
    _refuse(
        options, ("speed", "window_start_s", "window_s", "sample"), "applies to traces: give --traffic too"
    )
    arrivals = _arrivals(options)
    count = DEFAULT_REQUESTS if options.requests is None else options.requests
    inputs = options.input or DEFAULT_INPUT
    outputs = options.output or DEFAULT_OUTPUT
    name = f"input {inputs}, output {outputs}"
    rate = 1.0 if options.rate is None else options.rate
    if options.turns is None:
        _refuse(options, ("turn_input", "think_s"), "applies to conversations: give --turns too")
        return synthetic(
            count,
            input_tokens=parse_lengths(inputs, "--input"),
            output_tokens=parse_lengths(outputs, "--output"),
            arrivals=arrivals,
            rate=rate,
            end_rate=options.end_rate,
            seed=options.seed,
            name=name,
        )
    return conversations(
        count,
        turns=parse_lengths(options.turns, "--turns"),
        input_tokens=parse_lengths(inputs, "--input"),
        output_tokens=parse_lengths(outputs, "--output"),
        later_input_tokens=None
        if options.turn_input is None
        else parse_lengths(options.turn_input, "--turn-input"),
        think_s=None if options.think_s is None else parse_seconds(options.think_s, "--think-s"),
        arrivals=arrivals,
        rate=rate,
        end_rate=options.end_rate,
        seed=options.seed,
        name=f"conversations, {name}, turns {options.turns}",
    )


def _arrivals(options: TrafficOptions) -> Arrivals:
    """Poisson if a rate is given, else none: then the bench's concurrency sets the pace."""
    text = options.arrivals or ("closed" if options.rate is None else "poisson")
    if options.burstiness is not None:
        if text != "gamma":
            raise BadInput(f"--burstiness applies to --arrivals gamma, not to {text}")
        text = f"gamma:{options.burstiness}"
    arrivals = parse_arrivals(text, "--arrivals")
    if arrivals.is_closed and options.rate is not None:
        raise BadInput("--rate: a closed loop has no rate; drop one of --arrivals closed and --rate")
    if not arrivals.is_closed and options.rate is None:
        raise BadInput(f"--arrivals {text} needs --rate, the arrivals per second")
    if options.end_rate is not None and options.rate is None:
        raise BadInput("--end-rate needs --rate, the arrivals per second at the beginning")
    return arrivals


def _replayed(options: TrafficOptions, source: str) -> Traffic:
    _refuse(
        options, ("input", "turns", "turn_input", "think_s"), "does not apply to traces, which have their own"
    )
    kind, file = split_kind(source)
    if kind not in (*READERS, PROMPTS):
        raise unknown_kind(kind, (*READERS, PROMPTS), "--traffic")
    if not file:
        raise BadInput(f"--traffic: {source!r} names no file; write {kind}:FILE")
    if kind == PROMPTS:
        return _own_prompts(options, Path(file), source)
    _refuse(options, ("output",), "does not apply to traces, which have their own")
    traffic = READERS[kind](Path(file), skip_bad_rows=options.skip_bad_rows, seed=options.seed)
    if options.window_start_s is not None or options.window_s is not None:
        traffic = operations.window(traffic, options.window_start_s or 0.0, options.window_s)
    if options.sample is not None:
        traffic = operations.sampled(traffic, options.sample, options.seed)
    if options.requests is not None:
        traffic = operations.first(traffic, options.requests)
    return replace(_paced(options, traffic), name=source)


def _own_prompts(options: TrafficOptions, path: Path, source: str) -> Traffic:
    """At times drawn for --rate, else for a closed loop. --output applies to lines without max_tokens."""
    _refuse(options, ("speed", "window_start_s", "window_s"), "applies to traces: prompts have no times")
    _refuse(
        options, ("max_context", "shared_prefix"), "applies to generated prompts: these are sent unchanged"
    )
    text = options.output or DEFAULT_OUTPUT
    if not text.isdecimal() or int(text) < 1:
        raise BadInput(f"--output {text}: must be a number of tokens for prompts from a file")
    traffic = read_prompts(path, int(text), skip_bad_rows=options.skip_bad_rows)
    if options.sample is not None:
        traffic = operations.sampled(traffic, options.sample, options.seed)
    if options.requests is not None:
        traffic = operations.first(traffic, options.requests)
    arrivals = _arrivals(options)
    if not arrivals.is_closed:
        rate = 1.0 if options.rate is None else options.rate
        drawn = operations.with_arrivals(traffic, arrivals, rate, options.seed, options.end_rate)
        traffic = replace(drawn, notes=traffic.notes)
    return replace(traffic, name=source)


def _paced(options: TrafficOptions, traffic: Traffic) -> Traffic:
    """At the trace's own pace, scaled; or at newly drawn times."""
    if options.speed is not None and (options.rate is not None or options.arrivals is not None):
        raise BadInput("--speed: give either it or --rate, and no --arrivals")
    if options.arrivals is not None:
        arrivals = _arrivals(options)
        return operations.with_arrivals(
            traffic, arrivals, options.rate or 1.0, options.seed, options.end_rate
        )
    _refuse(options, ("burstiness",), "applies to --arrivals gamma: give that too")
    if options.end_rate is not None:
        raise BadInput("--end-rate: a trace has its own pace; give --arrivals to draw new times")
    if options.rate is not None:
        return operations.at_rate(traffic, options.rate)
    return traffic if options.speed is None else operations.scaled(traffic, options.speed)


def _refuse(options: TrafficOptions, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise BadInput(f"{_flag(name)} {why}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
