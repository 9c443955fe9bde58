"""Call: the state of one request across its targets: what it may use, what was tried, and why it failed."""

from __future__ import annotations

from ridgeline.fleet.placement.regions import Rules
from ridgeline.gateway.errors import BadRequest, GatewayError, Limited, UpstreamFailed, UpstreamTimeout
from ridgeline.gateway.upstreams.opened import Attempt, AttemptKind
from ridgeline.gateway.upstreams.outgoing import Prepare, Target
from ridgeline.gateway.upstreams.upstream import Upstream

EXHAUSTED = "upstream_credentials_exhausted"


class Call:
    __slots__ = (
        "_failures",
        "attempts",
        "deadline",
        "prepare",
        "priority",
        "queue_s",
        "repeatable",
        "residency",
        "tenant",
        "weight",
    )

    def __init__(
        self,
        prepare: Prepare,
        tenant: str,
        weight: float,
        priority: int,
        deadline: float,
        attempts: list[Attempt],
        repeatable: bool = True,
        residency: Rules = (),
    ) -> None:
        self.prepare, self.deadline = prepare, deadline
        self.tenant, self.weight, self.priority = tenant, weight, priority
        self.attempts, self.repeatable, self.residency = attempts, repeatable, residency
        self.queue_s = 0.0
        self._failures: list[GatewayError] = []  # the last of each target

    def note(
        self,
        kind: AttemptKind,
        upstream: Upstream,
        target: Target,
        credential: str,
        status: int,
        cause: str,
        waited_s: float,
        took_s: float,
        number: int,
    ) -> None:
        attempt = Attempt(
            kind, upstream.name, target.model, credential, status, cause, waited_s, took_s, number
        )
        self.attempts.append(attempt)

    def gave_up(self, error: GatewayError) -> None:
        """Give up one target."""
        self._failures.append(error)

    def error(self) -> GatewayError:
        """The client's error when no target is left. A 429 only if every target was at its limit."""
        failures = self._failures
        limited = [one for one in failures if isinstance(one, Limited)]
        if limited and len(limited) == len(failures):
            return min(limited, key=lambda one: one.retry_after_s)
        # An unsupported field or a missing key at one target does not matter for the others.
        failed = [one for one in failures if not isinstance(one, Limited | BadRequest)]
        known = [one for one in failed if one.code != EXHAUSTED]
        return (known or failed or failures)[-1]


def busy(retry_after_s: float) -> Limited:
    return Limited("the upstream's rate limit is used up", retry_after_s, code="upstream_rate_limit")


def exhausted() -> UpstreamFailed:
    message = "the upstream refused all of the gateway's credentials"
    return UpstreamFailed(message, code=EXHAUSTED)


def down(retry_in_s: float) -> UpstreamFailed:
    headers = {"retry-after": str(max(round(retry_in_s), 1))}
    message = "the upstream has failed too often and is paused; try again later"
    return UpstreamFailed(message, status=503, code="upstream_unavailable", headers=headers)


def refused(status: int) -> UpstreamFailed:
    return UpstreamFailed(f"the upstream answered with status {status}")


def late() -> UpstreamTimeout:
    return UpstreamTimeout("no upstream answered within the request's time limit")
