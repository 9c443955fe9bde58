"""BenchConfig: the settings of a run. Made by the command line, sweeps and the tuner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.errors import BadInput
from ridgeline.lab.slo import Slo, parse_slo
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.vocabulary import Vocabulary

if TYPE_CHECKING:
    from ridgeline.models.text.tokenizer import Tokenizer

DEFAULT_CONCURRENCY = 8

Api = Literal["chat", "completions"]
Cache = Literal["cold", "as_is", "primed"]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """This many requests in flight at all times: the next is sent when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are sent at their planned times, whatever the server does; at max_concurrency they wait until
    one has ended. The wait counts from the planned time.
    """

    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class RequestDeadlines:
    """Seconds. A request that exceeds one has failed; the run continues."""

    connect_s: float = 10.0
    first_byte_s: float = 300.0  # from the request to the answer's first byte; queueing counts
    between_s: float = 60.0  # between two reads of an answer
    request_s: float = 600.0  # from sending to the complete answer
    run_s: float | None = None  # of the whole run; None: the traffic's length plus one request


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """
    url:          of the server, http:// or https://; `/v1` may be missing
    model:        name for the server; "": the first of its /v1/models
    duration_s:   stop sending after this many seconds; requests in flight are awaited
    warmup:       requests sent before the run at the loop's concurrency, with separate prompts
    cache:        state of the server's prefix cache at the start: `cold` gives the run its own salt where
                  the server takes one, `primed` sends every prompt once before
    vocabulary:   words of one token; None: determined with the server
    count_tokens: counts an answer without usage; None: its chunks are counted
    usd_per_hour: what the server costs, for $ per million tokens
    temperature:  None: the server's default
    extra:        fields added to every body unchanged
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
    deadlines: RequestDeadlines = RequestDeadlines()
    cache: Cache = "cold"
    ignore_eos: bool = True
    temperature: float | None = 0.0
    include_timing: bool = True
    vocabulary: Vocabulary | None = None
    count_tokens: Callable[[str], int] | None = None
    usd_per_hour: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def config_of(
    url: str, options: BenchOptions, traffic: Traffic, *, api_key: str = "", seed: int = 0
) -> BenchConfig:
    """A run from its options. Traffic without times, or --concurrency, makes a closed loop."""
    if options.max_concurrency is not None and options.concurrency is not None:
        raise BadInput("--max-concurrency caps an open loop and --concurrency is a closed one: give one")
    mode: ClosedLoop | OpenLoop = OpenLoop(options.max_concurrency)
    if options.concurrency is not None or not traffic.duration_s > 0:
        given = options.max_concurrency if options.concurrency is None else options.concurrency
        mode = ClosedLoop(DEFAULT_CONCURRENCY if given is None else given)
    tokenizer = None if options.tokenizer is None else _tokenizer(options.tokenizer)
    return BenchConfig(
        url,
        traffic,
        mode,
        model=options.model or "",
        api=options.api,
        api_key=api_key,
        name=options.name or traffic.name,
        seed=seed,
        warmup=options.warmup,
        slo=None if options.slo is None else parse_slo(options.slo),
        duration_s=options.duration_s,
        deadlines=RequestDeadlines(
            options.connect_s, options.first_byte_s, options.between_s, options.deadline_s, options.run_s
        ),
        cache=options.cache,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        include_timing=options.server_timing,
        vocabulary=None if tokenizer is None else Vocabulary.from_tokenizer(tokenizer),
        count_tokens=None
        if tokenizer is None
        else lambda text: len(tokenizer.encode(text, add_special=False)),
        usd_per_hour=options.usd_per_hour,
        extra=_body_fields(options.body),
    )


def _tokenizer(model: str) -> Tokenizer:
    from ridgeline.models.files.registry import resolve_description
    from ridgeline.models.text.tokenizer import Tokenizer

    return Tokenizer.load(resolve_description(model))


def _body_fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadInput(f"--body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput('--body must be a JSON object, as {"top_p": 0.9}')
    return found
