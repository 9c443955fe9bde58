"""Key and Team: who asks, and what they may. Immutable; a worker holds all of them in one snapshot.

They hold no cycles and there may be many: the garbage collector need not look at them (`gc=False`).
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Of a key, a team or a model. None: no limit of its own. Money in US dollars."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    daily_usd: float | None = None
    monthly_usd: float | None = None


class Team(msgspec.Struct, frozen=True, gc=False):
    id: str
    name: str
    limits: Limits = Limits()
    weight: float = 1.0  # its share of a busy upstream, beside other teams


class Key(msgspec.Struct, frozen=True, gc=False):
    """A virtual key without its secret. Empty scopes mean everything."""

    id: str  # key_…; may stand in logs, rows and headers
    name: str
    team: str = ""  # a Team's id; empty: the key stands for itself
    models: tuple[str, ...] = ()  # public names, or patterns with * at the end
    endpoints: tuple[str, ...] = ()  # names of `endpoints.ENDPOINTS`: chat, messages, embeddings, …
    expires_at: float | None = None  # unix seconds
    revoked_at: float | None = None
    ends_requests: bool = False  # of a revoked key: its requests under way end too
    limits: Limits = Limits()
    priority: int = 1  # 0 before 1 before 2
    when_limits_unknown: str = "closed"  # or "open": what happens while Redis cannot be reached
    guard: str = ""  # the name of a [[guards]] policy; empty: the gateway's default
    cache: str = "off"  # exact, semantic (and exact), off: what its requests may use without asking

    @property
    def tenant(self) -> str:
        """What caches, fairness and ownership are divided by: the team, or the key that has none."""
        return self.team or self.id
