"""The ramp of a new replica: how many requests it may have at once, by the work it has done.

The replica itself counts the proof since its start (Load): every request that ended, and every
PROVEN_TOKENS tokens, add one request to the allowance. So the allowance about doubles with each round of
answers, a slow replica ramps slowly, time alone counts for nothing, and every router, also one that has
just started, sees the same proof.
"""

from __future__ import annotations

from ridgeline.replica.messages import Load

FIRST = 2  # requests at once for a replica that has proven nothing
PROVEN_TOKENS = 512  # prompt tokens computed and output tokens
RAMP_S = 300.0  # a replica without requests shows nothing; after this many seconds it is ready all the same
FEW_UNSEEN = 4  # one in this many requests of the allowance may wait for its first step
MOST_UNSEEN = 4  # and no more than these: a fast replica proves much in a second, in which a burst comes too


def proof(load: Load | None) -> int:
    """The proof of a replica since its start."""
    if load is None:
        return 0
    computed = max(load.prompt_tokens - load.prefix_hits, 0)
    return load.ended + (computed + load.output_tokens) // PROVEN_TOKENS


def allowance(load: Load | None) -> int:
    """Requests that a ramping replica may have at once, over all routers."""
    return FIRST + proof(load)


def queue_allowance(load: Load | None) -> int:
    """How many of these may wait: a replica with an empty cache computes every prompt in full."""
    return min(max(1, allowance(load) // FEW_UNSEEN), MOST_UNSEEN)


def is_proven(load: Load | None, max_running: int) -> bool:
    """Whether the ramp has ended: the allowance covers all that the replica runs at once."""
    return allowance(load) >= max(max_running, 1)
