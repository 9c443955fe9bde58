"""Operations on Traffic: faster or slower, a part of it, clipped to a context, with other arrivals.

Each returns new Traffic and adds a note if something was left out or changed. Conversations stay whole: their
later turns carry the time of the first, and are selected with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.arrivals import Arrivals
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.seeds import stream


def rate_of(traffic: Traffic) -> float:
    """Arrivals per second: single requests, and conversations by their first turns."""
    count = sum(1 for request in traffic.requests if request.turn == 0)
    if count < 2 or traffic.duration_s <= 0:
        raise BadInput(f"{traffic.name}: {count} arrivals in {traffic.duration_s:g} s have no rate")
    return count / traffic.duration_s


def scaled(traffic: Traffic, factor: float) -> Traffic:
    """The same requests `factor` times as fast: time is scaled, so bursts are preserved."""
    _check(factor > 0, "speed", factor, "more than 0")
    if factor == 1:
        return traffic
    requests = [replace(request, at=request.at / factor) for request in traffic.requests]
    return _changed(traffic, requests, f"played {factor:.4g} times as fast")


def at_rate(traffic: Traffic, rate: float) -> Traffic:
    """The same requests, scaled in time to this many arrivals per second."""
    _check(rate > 0, "rate", rate, "more than 0")
    return scaled(traffic, rate / rate_of(traffic))


def window(traffic: Traffic, start_s: float, length_s: float | None = None) -> Traffic:
    """Requests from `start_s` on, for `length_s` seconds; times restart at 0."""
    _check(start_s >= 0, "window start", start_s, "not negative")
    end_s = float("inf") if length_s is None else start_s + length_s
    requests = [replace(r, at=r.at - start_s) for r in traffic.requests if start_s <= r.at < end_s]
    if not requests:
        raise BadInput(
            f"{traffic.name}: no request between {start_s:g} s and {end_s:g} s; the last comes at "
            f"{traffic.duration_s:.0f} s"
        )
    until = "the end" if length_s is None else f"{end_s:g} s"
    return _changed(traffic, requests, f"only requests between {start_s:g} s and {until}")


def first(traffic: Traffic, count: int) -> Traffic:
    """The first `count` arrivals; conversations with all turns."""
    _check(count >= 1, "requests", count, "at least 1")
    openers = [request for request in traffic.requests if request.turn == 0]
    if count >= len(openers):
        return traffic
    chosen, arrived, kept = [], 0, set()
    for request in traffic.requests:
        if request.turn == 0:
            arrived += 1
            if arrived <= count:
                kept.add(request.conversation)
                chosen.append(request)
        elif request.conversation in kept:
            chosen.append(request)
    return _changed(traffic, chosen, f"only the first {count} of {len(openers)} arrivals")


def sampled(traffic: Traffic, share: float, seed: int = 0) -> Traffic:
    """Each arrival kept with probability `share`, at its time: less traffic of the same kind."""
    _check(0 < share <= 1, "sample", share, "more than 0 and at most 1")
    if share == 1:
        return traffic
    draws = stream(seed, "sample").random(len(traffic.requests))
    dropped = {
        request.conversation
        for request, draw in zip(traffic.requests, draws, strict=True)
        if request.conversation is not None and request.turn == 0 and draw >= share
    }
    requests = [
        request
        for request, draw in zip(traffic.requests, draws, strict=True)
        if (draw < share if request.conversation is None else request.conversation not in dropped)
    ]
    if not requests:
        raise BadInput(f"{traffic.name}: a sample of {share:g} leaves no request of {len(traffic.requests)}")
    return _changed(
        traffic, requests, f"a sample of {share:g}: {len(requests)} of {len(traffic.requests)} requests"
    )


def clipped(traffic: Traffic, context: int) -> Traffic:
    """Prompts clipped so that prompt and answer fit a context; answers only if not even one prompt token
    would remain. A conversation ends before the turn that does not fit, like a client's.
    """
    _check(context >= 2, "context", context, "at least 2")
    requests, cut, ended = [], 0, set()
    for request in traffic.requests:
        if request.conversation is not None and request.turn > 0:
            if request.conversation in ended:
                continue
            if request.input_tokens + request.output_tokens > context:
                ended.add(request.conversation)
                continue
        elif request.input_tokens + request.output_tokens > context:
            output = min(request.output_tokens, context - 1)
            cut += 1
            request = replace(
                request,
                input_tokens=context - output,
                output_tokens=output,
                prefix=_prefix_within(request.prefix, context - output, traffic.prefix_block_tokens),
            )
            if request.conversation is not None:
                ended.add(request.conversation)
        requests.append(request)
    notes = []
    if cut:
        notes.append(
            f"{cut} of {len(traffic.requests)} prompts were clipped to a context of {context} tokens"
        )
    if len(requests) < len(traffic.requests):
        lost = len(traffic.requests) - len(requests)
        notes.append(
            f"{lost} turns of {len(ended)} conversations did not fit {context} tokens and were left out"
        )
    return _changed(traffic, requests, *notes)


def with_arrivals(
    traffic: Traffic, arrivals: Arrivals, rate: float, seed: int = 0, end_rate: float | None = None
) -> Traffic:
    """The same requests in the same order, at newly drawn times."""
    openers = [request for request in traffic.requests if request.turn == 0]
    moments = arrivals.moments(len(openers), rate, stream(seed, "arrivals"), end_rate).tolist()
    by_conversation = {
        request.conversation: moment
        for request, moment in zip(openers, moments, strict=True)
        if request.conversation is not None
    }
    single = iter([m for request, m in zip(openers, moments, strict=True) if request.conversation is None])
    requests = [
        replace(r, at=next(single) if r.conversation is None else by_conversation[r.conversation])
        for r in traffic.requests
    ]
    requests.sort(key=lambda request: request.at)
    return _changed(traffic, requests, "times were newly drawn, not the trace's")


def with_shared_prefix(traffic: Traffic, tokens: int, share: float = 1.0, seed: int = 0) -> Traffic:
    """`share` of the prompts begin with the same `tokens` tokens, a system prompt; lengths do not change."""
    _check(tokens >= 1, "shared prefix", tokens, "at least 1")
    _check(0 < share <= 1, "shared prefix's share", share, "more than 0 and at most 1")
    if traffic.prefix_block_tokens:
        raise BadInput(f"{traffic.name}: its prompts already have shared prefixes")
    draws = stream(seed, "shared prefix").random(len(traffic.requests)).tolist()
    by_opener: dict[int, bool] = {}
    requests = []
    for request, draw in zip(traffic.requests, draws, strict=True):
        has_it = draw < share
        if request.conversation is not None:  # every turn begins as the first
            has_it = by_opener.setdefault(request.conversation, has_it)
        requests.append(replace(request, prefix=(0,)) if has_it else request)
    note = f"{share:.0%} of prompts begin with the same {tokens} tokens, counted in their lengths"
    return replace(_changed(traffic, requests, note), prefix_block_tokens=tokens)


def _prefix_within(prefix: tuple[int, ...], tokens: int, block_tokens: int) -> tuple[int, ...]:
    return prefix[: -(-tokens // block_tokens)] if block_tokens else prefix


def _changed(traffic: Traffic, requests: Iterable[PlannedRequest], *notes: str) -> Traffic:
    return replace(traffic, requests=tuple(requests), notes=(*traffic.notes, *notes))


def _check(holds: bool, name: str, value: float, rule: str) -> None:
    if not holds or not math.isfinite(value):
        raise BadInput(f"{name} must be {rule}, got {value:g}")
