"""BenchConfig: all that a run is asked for, as data. Made by the command line, sweeps and the tuner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.lab.slo import Slo
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.vocabulary import Vocabulary

Api = Literal["chat", "completions"]
Cache = Literal["cold", "as_is", "primed"]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many requests under way at all times: the next is sent when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are sent at their moments, whatever the server does."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; when one has passed the request has failed, and the run goes on."""

    connect_s: float = 10.0
    first_byte_s: float = 300.0  # from the request to the answer's first byte; queueing counts
    between_s: float = 60.0  # from bytes to bytes of an answer
    request_s: float = 600.0  # from sending to the whole answer
    run_s: float | None = None  # of the whole run; None: the traffic's length and a request's after it


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """
    url:          of the server; `/v1` may be missing. https:// is spoken too
    model:        name for the server; "": the first of its /v1/models
    duration_s:   nothing is sent after so many seconds; what is under way is awaited
    warmup:       requests sent before, one lot at the loop's concurrency, with prompts of their own
    cache:        state of the server's prefix cache at the start: `cold` gives all prompts of the run a salt
                  of their own where the server takes one, `primed` sends every prompt once before
    vocabulary:   words of one token; None: found out with the server
    temperature:  None: the server's default
    extra:        fields put into every body as they are
    """

    url: str
    traffic: Traffic
    mode: ClosedLoop | OpenLoop
    model: str = ""
    api: Api = "completions"
    api_key: str = ""
    name: str = ""
    seed: int = 0
    warmup: int = 0
    slo: Slo | None = None
    duration_s: float | None = None
    deadlines: Deadlines = Deadlines()
    cache: Cache = "cold"
    ignore_eos: bool = True
    temperature: float | None = 0.0
    include_timing: bool = True
    vocabulary: Vocabulary | None = None
    extra: dict[str, Any] = field(default_factory=dict)
