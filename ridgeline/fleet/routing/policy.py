"""Policy: how `choose` weighs replicas: a name from POLICIES, and the knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["default", "round-robin", "least-loaded", "prefix", "lora", "sticky"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class Policy:
    """Saturation, staleness, weights and regions apply to every policy; the other knobs to `default`."""

    name: PolicyName = "default"
    queue_share: float = 0.125  # requests that a replica may queue, as a share of max_running; at least 1
    kv_full: float = 0.95  # a replica with a larger share of its KV blocks held is saturated
    queue_s: float = 5.0  # a replica with more seconds of prompts to compute is saturated
    stale_s: float = 2.0  # without a Load line for this time, a replica costs more
    silent_s: float = 10.0  # without a Load line for this time, it is excluded, unless all are
    adapter_load_s: float = 0.5  # cost of loading an adapter
    region_s: float = 0.1  # by how much another region, with the way there, must be faster
    sticky_tokens: float = 64.0  # bonus of the session's replica, in prompt tokens
    heat_tokens: float = 2048.0  # cost of twice the mean work of the last minute, in prompt tokens
    wait_weight: float = 4.0  # of a second before the first token, against one spread over the answer
    tie_share: float = 0.02  # costs that differ by less than this share of the prompt's cost are equal

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ValueError(f"unknown routing policy {self.name!r}; known: {', '.join(POLICIES)}")
