"""choose(): the replica that answers a request. It changes nothing: the caller charges the choice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from ridgeline.fleet.routing.book import LoadBook, Row
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView


@dataclass(frozen=True, slots=True)
class Choice:
    replica_id: str
    reason: str  # for logs and the response header: "prefix", "least-loaded", …
    predicted_wait_s: float  # until the first token
    matched_blocks: int


def choose(
    book: LoadBook,
    prefixes: PrefixMap,
    prompt: PromptView,
    policy: Policy,
    rng: Random,
    now: float,
    exclude: Collection[str] = (),
) -> Choice | None:
    """None: every replica is saturated (hold the request), or there is none (`book.candidates` is 0).

    The caller charges the choice at once: `book.charge(choice.replica_id, prompt, choice.matched_blocks)` and
    `prefixes.routed(choice.replica_id, prompt.blocks, now)`.
    """
    entry = book.models.get(prompt.model)
    if entry is None:
        return None
    matched = prefixes.matches(prompt.blocks, now)
    best: tuple[float, float, str] | None = None
    for row in book.rows.values():
        if not book._is_open(row, entry.name) or row.entry.id in exclude or _is_full(row, policy):
            continue
        hit = matched.get(row.entry.id, 0)
        cost = (_in_flight(row) * 256 + prompt.uncached_tokens(hit), rng.random(), row.entry.id)
        best = cost if best is None else min(best, cost)
    if best is None:
        return None
    hit = matched.get(best[2], 0)
    return Choice(best[2], "prefix" if hit else "least-loaded", best[0] / 2000, hit)


def _in_flight(row: Row) -> int:
    told = row.load.running + row.load.waiting if row.load else 0
    return max(told, len(row.tickets))


def _is_full(row: Row, policy: Policy) -> bool:
    most = row.started.max_running if row.started else 16
    return _in_flight(row) >= most + max(1, int(most * policy.queue_share))
