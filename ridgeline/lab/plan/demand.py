"""The demand of a plan: traffic, limits and budget. Parsed and validated.

`cli.lab.plan` passes the command line's values; `make_plan` uses them. Only parsing happens here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH
from ridgeline.lab.plan.options import DEFAULT_SLO
from ridgeline.lab.slo import Slo, parse_slo
from ridgeline.lab.traffic import operations
from ridgeline.lab.traffic.arrivals import parse_arrivals
from ridgeline.lab.traffic.options import DEFAULT_INPUT, DEFAULT_OUTPUT
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.source import TrafficOptions, build_traffic

FEWEST, MOST = 200, 3000  # requests of synthetic traffic: enough for a P90, few enough to simulate
WANTED_S = 60.0

_BUDGET = re.compile(
    r"\$?\s*(?P<usd>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)\s*(?P<thousand>k)?\s*(?:/|per)\s*(?P<per>[a-z]+(?:\s[a-z]+)?)"
)
_PER = {
    "month": "month", "mo": "month", "hour": "hour", "h": "hour", "hr": "hour", "day": "day", "year": "year",
    "mtok": "mtok", "mtoken": "mtok", "mtokens": "mtok", "m tokens": "mtok", "million tokens": "mtok",
    "request": "request", "req": "request",
}  # fmt: skip
_HOURS = {"month": HOURS_PER_MONTH, "hour": 1.0, "day": 24.0, "year": 8760.0}


@dataclass(frozen=True, slots=True)
class Budget:
    """At most this many dollars: per month in total, or per million tokens or request."""

    usd: float
    per: str  # "month", "mtok" or "request"

    def usd_month(self, tokens_month: float, requests_month: float) -> float:
        """The monthly budget for this much traffic."""
        units = {"month": 1.0, "mtok": tokens_month / 1e6, "request": requests_month}
        return self.usd * units[self.per]

    def __str__(self) -> str:
        return f"${self.usd:,.10g} per {'million tokens' if self.per == 'mtok' else self.per}"


@dataclass(frozen=True, slots=True)
class Demand:
    """The traffic of the whole service, and the options that reproduce it.

    rate: arrivals per second; None: not given, and the plan reports what one replica serves
    """

    options: TrafficOptions
    traffic: Traffic
    rate: float | None
    asked: TrafficOptions  # as given by the user

    @property
    def mean_input(self) -> float:
        return self.traffic.input_tokens / len(self.traffic.requests)

    @property
    def mean_output(self) -> float:
        return self.traffic.output_tokens / len(self.traffic.requests)

    @property
    def longest(self) -> int:
        return max(request.input_tokens + request.output_tokens for request in self.traffic.requests)

    @property
    def requests_per_arrival(self) -> float:
        """More than 1 if conversations arrive."""
        return len(self.traffic.requests) / sum(request.turn == 0 for request in self.traffic.requests)

    def share(self, arrivals_per_s: float) -> Demand:
        """One replica's part: the same kind of requests at this many arrivals per second."""
        if self.rate is None or self.options.traffic is None:
            requests = _count(self.asked, arrivals_per_s)
            options = replace(self.options, rate=arrivals_per_s, requests=requests)
        elif arrivals_per_s > self.rate:  # more than the trace has: play it faster
            options = replace(self.options, rate=arrivals_per_s, speed=None)
        else:
            share = (self.options.sample or 1.0) * arrivals_per_s / self.rate
            # A trace is thinned first, then stretched to the rate.
            rate = None if self.options.rate is None else arrivals_per_s
            options = replace(self.options, sample=share, rate=rate)
        return Demand(options, build_traffic(options), arrivals_per_s, self.asked)


def read_slo(text: str | None) -> Slo:
    return parse_slo(DEFAULT_SLO if text is None else text)


def parse_budget(text: str) -> Budget:
    """`$5000/month`, `$0.40/Mtok`, `$3/hour`, `$0.01 per request`."""
    found = _BUDGET.fullmatch(text.strip().lower())
    per = _PER.get(found["per"]) if found else None
    if not found or per is None:
        raise BadInput(f"--budget {text!r}: write $5000/month, $0.40/Mtok or $0.01/request")
    usd = float(found["usd"].replace(",", "")) * (1000 if found["thousand"] else 1)
    if not usd > 0:
        raise BadInput(f"--budget {text!r}: must be above zero")
    if per in _HOURS:
        return Budget(usd * HOURS_PER_MONTH / _HOURS[per], "month")
    return Budget(usd, per)


def read_demand(options: TrafficOptions) -> Demand:
    """A trace, at its own rate or another; or lengths with or without a rate."""
    if options.arrivals is not None and parse_arrivals(options.arrivals, "--arrivals").is_closed:
        raise BadInput("--arrivals closed: a plan needs an open loop with an arrival rate")
    if options.traffic is not None:
        traffic = build_traffic(options)
        if any(request.said is not None for request in traffic.requests):
            raise BadInput("--traffic prompts: a plan needs lengths; give --input and --output, or a trace")
        if not traffic.requests:
            raise BadInput(f"{options.traffic}: contains no requests")
        return Demand(options, traffic, operations.rate_of(traffic), options)
    if options.rate is not None and not options.rate > 0:
        raise BadInput(f"--rate must be more than 0, got {options.rate:g}")
    named = replace(
        options,
        input=options.input or DEFAULT_INPUT,
        output=options.output or DEFAULT_OUTPUT,
        arrivals=options.arrivals or "poisson",
        requests=_count(options, options.rate or 1.0),
    )
    return Demand(named, build_traffic(replace(named, rate=options.rate or 1.0)), options.rate, options)


def _count(options: TrafficOptions, rate: float) -> int:
    if options.requests is not None:
        return options.requests
    return int(min(MOST, max(FEWEST, WANTED_S * rate)))
