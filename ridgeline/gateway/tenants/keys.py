"""Key and Team: identities and their permissions. Immutable; a worker holds all of them in one snapshot.

They hold no cycles and there may be many: the garbage collector skips them (`gc=False`).
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Limits of a key, a team or a model. None: no limit. Money in US dollars."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    daily_usd: float | None = None
    monthly_usd: float | None = None


def usd_text(usd: float) -> str:
    """US dollars without an exponent: 500, 0.5, 0.00001."""
    return f"{usd:,.12f}".rstrip("0").rstrip(".")


class Team(msgspec.Struct, frozen=True, gc=False):
    id: str
    name: str
    limits: Limits = Limits()
    weight: float = 1.0  # its share of a busy upstream, beside other teams
    residency: tuple[str, ...] = ()  # regions that may compute its requests, with * for parts; empty: all


class Key(msgspec.Struct, frozen=True, gc=False):
    """A virtual key without its secret. Empty scopes mean everything."""

    id: str  # key_…; may appear in logs, rows and headers
    name: str
    team: str = ""  # a Team's id; empty: no team
    models: tuple[str, ...] = ()  # public names, or patterns with * at the end
    endpoints: tuple[str, ...] = ()  # of `pipeline.endpoints.NAMES`: chat, messages, embeddings, …
    expires_at: float | None = None  # unix seconds
    revoked_at: float | None = None
    ends_requests: bool = False  # of a revoked key: its running requests end too
    limits: Limits = Limits()
    priority: int = 1  # 0 before 1 before 2
    when_limits_unknown: str = "closed"  # or "open": while Redis is unreachable
    guard: str = ""  # the name of a [[guards]] policy; empty: the gateway's default
    cache: str = "off"  # exact, semantic (and exact), off: the default of its requests
    residency: tuple[str, ...] = ()  # as a team's; with both, both hold

    @property
    def tenant(self) -> str:
        """The unit of caches, fairness and ownership: the team, or a key without one."""
        return self.team or self.id
