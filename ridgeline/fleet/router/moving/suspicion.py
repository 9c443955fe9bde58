"""Suspicion: whether one request is what its replicas die of. Pure logic.

A replica that dies moves all its requests to peers, also the one that killed it, if one did: without another
limit such a request would kill `migrations` + 1 replicas. A request is a suspect once two replicas in a row
have died with it, the second one before it had computed PROVEN_TOKENS tokens of it. If no other request was
at both, it is refused. If others were, it may be innocent: it goes on at a replica where no other suspect is,
until that replica has proven it, and is refused if the replica dies.
"""

from __future__ import annotations

PROVEN_TOKENS = 8  # a request that kills a step does so again within a few tokens
TRIAL_S = 5.0  # after this time a replica has survived a request whose answer shows no tokens
REFUSED_AFTER = 3  # deaths, also if other requests were there


class Suspicion:
    """Of one request."""

    __slots__ = ("deaths", "is_quarantined", "tokens")

    def __init__(self) -> None:
        self.deaths = 0  # replicas in a row that died with it, all but the first before they had proven it
        self.tokens = 0  # that its present replica has computed
        self.is_quarantined = False

    @property
    def is_suspect(self) -> bool:
        """Whether it is kept apart from other suspects."""
        return self.deaths >= REFUSED_AFTER - 1

    @property
    def is_proven(self) -> bool:
        """Whether its present replica has computed enough of it."""
        return self.tokens >= PROVEN_TOKENS

    def died(self, others: int) -> None:
        """Its replica died. others: further requests there with which a replica had died before."""
        self.deaths = 1 if self.is_proven else self.deaths + 1
        self.is_quarantined = self.is_suspect and (self.deaths >= REFUSED_AFTER or not others)
