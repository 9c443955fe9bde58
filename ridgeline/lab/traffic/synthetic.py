"""Traffic from distributions: single requests, and conversations of several turns.

Arrivals, input lengths, output lengths, turns and pauses use separate streams: changing one leaves the others
unchanged.
"""

from __future__ import annotations

import numpy as np

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.arrivals import Arrivals
from ridgeline.lab.traffic.lengths import Fixed, Lengths, whole_tokens
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.seeds import stream

MAX_REQUESTS = 5_000_000


def synthetic(
    count: int,
    *,
    input_tokens: Lengths,
    output_tokens: Lengths,
    arrivals: Arrivals,
    rate: float = 1.0,
    end_rate: float | None = None,
    seed: int = 0,
    name: str = "synthetic",
) -> Traffic:
    """`count` requests at `rate` per second; a closed loop needs no times and no rate."""
    _check_count(count)
    at = arrivals.moments(count, rate, stream(seed, "arrivals"), end_rate).tolist()
    inputs = whole_tokens(input_tokens.draw(count, stream(seed, "input lengths")))
    outputs = whole_tokens(output_tokens.draw(count, stream(seed, "output lengths")))
    return Traffic(name, tuple(map(PlannedRequest, at, inputs, outputs)))


def conversations(
    count: int,
    *,
    turns: Lengths,
    input_tokens: Lengths,
    output_tokens: Lengths,
    arrivals: Arrivals,
    later_input_tokens: Lengths | None = None,
    think_s: Lengths | None = None,
    rate: float = 1.0,
    end_rate: float | None = None,
    seed: int = 0,
    name: str = "conversations",
) -> Traffic:
    """`count` conversations, whose first turns arrive at `rate` per second.

    A turn's input counts the whole history: earlier inputs and answers, and `later_input_tokens` of new text
    (`input_tokens` if not given).
    """
    _check_count(count)
    lengths = whole_tokens(turns.draw(count, stream(seed, "turns")))
    total = sum(lengths)
    _check_count(total)
    at = arrivals.moments(count, rate, stream(seed, "arrivals"), end_rate).tolist()
    opening = whole_tokens(input_tokens.draw(count, stream(seed, "input lengths")))
    later = whole_tokens(
        (later_input_tokens or input_tokens).draw(total, stream(seed, "later input lengths"))
    )
    outputs = whole_tokens(output_tokens.draw(total, stream(seed, "output lengths")))
    pauses = np.maximum((think_s or Fixed(0.0)).draw(total, stream(seed, "pauses")), 0).tolist()
    requests = []
    place = 0
    for number, turn_count in enumerate(lengths):
        context = 0
        for turn in range(turn_count):
            context += later[place] if turn else opening[number]
            think = pauses[place] if turn else 0.0
            requests.append(PlannedRequest(at[number], context, outputs[place], (), number, turn, think))
            context += outputs[place]
            place += 1
    return Traffic(name, tuple(requests))


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_REQUESTS:
        raise BadInput(f"requests must be 1 to {MAX_REQUESTS:,}, got {count:,}")
