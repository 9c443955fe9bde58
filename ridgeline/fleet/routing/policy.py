"""Policy: how `choose` weighs replicas: a name from POLICIES, and the knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["default", "round-robin", "least-loaded", "prefix", "lora", "sticky"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class Policy:
    """Saturation, staleness, weights and residency hold for every policy; the other knobs for `default`."""

    name: PolicyName = "default"
    queue_share: float = (
        0.125  # requests beyond max_running that a replica may queue, of max_running; at least 1
    )
    kv_full: float = 0.95  # a replica with a larger share of its KV blocks held is saturated
    queue_s: float = 5.0  # a replica with more seconds of prompts to compute is saturated
    stale_s: float = 2.0  # without a Load line for this time a replica is less preferred
    silent_s: float = 10.0  # without a Load line for this time it is excluded, unless all are
    adapter_load_s: float = 0.5  # what loading an adapter costs
    region_s: float = 0.1  # what a replica in another region costs
    sticky_tokens: float = 64.0  # the bonus of a session's own replica, in prompt tokens
    heat_tokens: float = 2048.0  # the price of twice the mean work of the last minute, in prompt tokens
    tie_share: float = 0.02  # replicas within this share of the prompt's own cost are equal

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ValueError(f"unknown routing policy {self.name!r}; known: {', '.join(POLICIES)}")
