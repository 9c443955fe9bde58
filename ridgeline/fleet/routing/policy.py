"""Policy: how `choose` weighs replicas. A name from POLICIES, and the knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["default", "round-robin", "least-loaded", "prefix", "lora", "sticky"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class Policy:
    name: PolicyName = "default"
    queue_share: float = 0.125  # requests beyond max_running that a replica may queue, of max_running
    kv_full: float = 0.95  # a replica with more of its KV blocks held is saturated
    stale_s: float = 2.0  # without a Load line for this time a replica is less preferred
    silent_s: float = 10.0  # and after this time excluded, unless all are

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ValueError(f"unknown routing policy {self.name!r}; known: {', '.join(POLICIES)}")
