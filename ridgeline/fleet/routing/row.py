"""Row: one replica in a LoadBook. Ticket: one request in flight there.

The load is the replica's last Load line, plus the tickets that the line does not count, minus the requests
that have ended since.
"""

from __future__ import annotations

import math
from zlib import crc32

from ridgeline.fleet.messages import ReplicaEntry
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.fleet.routing.ramp import allowance, is_proven, queue_allowance
from ridgeline.fleet.routing.step_cost import StepCost
from ridgeline.replica.messages import Load, Started

UNKNOWN_MOST = 8  # max_running of a replica whose feed has not started
BLOCK_TOKENS = 16
# A Load line may have been on its way when a request was sent. It counts the request if that was sent this
# many seconds before it came, and if as many requests were accepted as were sent.
ON_THE_WAY_S = 0.01
# Seconds after which the replica counts a ticket, or the request has failed there.
SEEN_AFTER_S = 2.0


class Ticket:
    """One request in flight at one replica."""

    __slots__ = (
        "accepted_before",
        "adapter",
        "cached_tokens",
        "charged_at",
        "computed",
        "kv_blocks",
        "open",
        "row",
        "tokens",
    )

    def __init__(self, row: Row, prompt: PromptView, matched_blocks: int, now: float) -> None:
        self.row, self.adapter, self.charged_at = row, prompt.adapter, now
        self.tokens = math.ceil(prompt.uncached_tokens(matched_blocks))
        self.cached_tokens = max(prompt.tokens - self.tokens, 0)
        block_size = row.started.block_size if row.started else BLOCK_TOKENS
        # An answer seldom reaches its limit: max_tokens of 100,000 must not make an idle replica look full.
        output = min(prompt.output_tokens, row.cost.output_tokens)
        self.kv_blocks = math.ceil((prompt.tokens + output) / max(block_size, 1))
        self.accepted_before = row.accepted + len(row.unseen)
        self.open, self.computed = True, False

    @property
    def replica_id(self) -> str:
        return self.row.entry.id

    @property
    def model(self) -> str:
        return self.row.entry.model


class Row:
    def __init__(self, entry: ReplicaEntry, cost: StepCost, now: float) -> None:
        self.entry, self.cost = entry, cost
        self.index = -1  # position in ModelColumns; -1: not in the table
        self.lost = False
        self.epoch = ""
        self.heard_at = now
        self.load: Load | None = None
        self.started: Started | None = None
        self.turn = 0
        self.heat = 0.0
        self.hash = crc32(entry.id.encode()) << 32 | crc32(entry.id[::-1].encode())
        self.tickets: set[Ticket] = set()
        self.accepted = 0  # requests of all routers, at the last Load line
        # Tickets that the last Load line does not count, oldest first, and their sums.
        self.unseen: dict[Ticket, None] = {}
        self._unseen_tokens = self._unseen_kv = 0
        self._seen_tokens = self._seen_cached_tokens = 0
        # Of tickets that it counts and whose prompts are not computed.
        self._seen_tokens = self._seen_cached_tokens = 0
        # Requests that have ended since the last Load line.
        self._ended = self._computed_tokens = self._freed_kv = 0

    @property
    def is_open(self) -> bool:
        """Whether requests may go there. A process that the table does not know is not ready yet."""
        says_ready = self.load is None or self.load.state == "ready"
        agrees = not self.epoch or not self.entry.epoch or self.epoch == self.entry.epoch
        in_service = self.entry.state in ("ready", "ramping") and self.entry.weight > 0
        return in_service and says_ready and agrees and not self.lost

    @property
    def is_ramping(self) -> bool:
        return self.entry.state == "ramping" and not is_proven(self.load, self.most)

    @property
    def most(self) -> int:
        return max(self.started.max_running, 1) if self.started else UNKNOWN_MOST

    def start(self, line: Started, now: float) -> None:
        if line.epoch != self.epoch:  # another process: it has none of the requests of the last one
            self.load, self.accepted = None, 0
            self.tickets = set()
            self._reset_unseen()
            self._ended = self._computed_tokens = self._freed_kv = 0
        self.started, self.epoch, self.lost, self.heard_at = line, line.epoch, False, now

    def hear(self, load: Load, now: float) -> bool:
        """Apply a Load line, which replaces the estimates. True if the costs of a step have changed."""
        changed = self.load is not None and self.cost.hear(self.load, load)
        self.load, self.heard_at, self.accepted = load, now, load.accepted
        self._ended = self._computed_tokens = self._freed_kv = 0
        for ticket in list(self.unseen):
            age = now - ticket.charged_at
            seen = age >= ON_THE_WAY_S and load.accepted > ticket.accepted_before
            if not seen and age < SEEN_AFTER_S:
                break
            self._see(ticket)
            if not ticket.computed:
                self._seen_tokens += ticket.tokens
                self._seen_cached_tokens += ticket.cached_tokens
        return changed

    def charge(self, ticket: Ticket) -> None:
        self.tickets.add(ticket)
        self.unseen[ticket] = None
        self._unseen_tokens += ticket.tokens
        self._unseen_kv += ticket.kv_blocks

    def computed(self, ticket: Ticket) -> None:
        """The ticket's prompt is computed."""
        if ticket.computed or ticket not in self.tickets:
            return
        if ticket in self.unseen:
            self._unseen_tokens -= ticket.tokens
        else:
            self._seen_tokens -= ticket.tokens
            self._seen_cached_tokens -= ticket.cached_tokens
            self._computed_tokens += ticket.tokens + ticket.cached_tokens
        ticket.computed = True

    def discharge(self, ticket: Ticket) -> None:
        if ticket not in self.tickets:
            return
        if ticket in self.unseen:
            self._see(ticket)
        else:
            self.computed(ticket)
            self._ended += 1
            self._freed_kv += ticket.kv_blocks
        self.tickets.remove(ticket)

    def has_adapter(self, adapter: str) -> bool:
        """Whether the adapter is loaded, or about to be: a request for it is on its way."""
        loaded = self.load is not None and adapter in self.load.adapters
        return loaded or any(one.adapter == adapter for one in self.tickets)

    def column(self, routers: int) -> tuple[float, ...]:
        """The values of a column, in the order of columns.Field, up to the seconds."""
        told = told_tokens = told_kv = 0
        if self.load is not None:
            # The counters are newer than the gauges, which are as old as the engine's last answer.
            load = self.load
            told = max(load.running + load.waiting, load.accepted - load.ended)
            told = max(told - self._ended, 0)
            # A server counts a prompt in full until it looks the prompt up in its cache.
            queued = max(self.load.queued_tokens - self._computed_tokens, 0)
            told_tokens = max(queued - self._seen_cached_tokens, min(queued, self._seen_tokens))
            told_kv = max(self.load.kv_blocks_held - self._freed_kv, 0)
        unseen = len(self.unseen)
        requests = max(told + unseen, len(self.tickets))
        shared = requests + unseen * (routers - 1)
        tokens = told_tokens + self._unseen_tokens * routers
        kv_blocks = self.started.kv_blocks if self.started else 0
        kv = (told_kv + self._unseen_kv) / kv_blocks if kv_blocks else 0.0
        return (
            self.is_open,
            requests,
            shared,
            tokens,
            self.heat,
            kv,
            self.most,
            self.heard_at if self.is_open else math.inf,
            self.turn,
            2 * max(shared, kv * self.most) + max(shared - self.most + 1, 0),
            told_tokens + self._unseen_tokens,
        )

    def room(self, routers: int) -> float | None:
        """Requests that it may have while it ramps; None if it does not ramp."""
        if not self.is_ramping:
            return None
        waiting = len(self.unseen) * routers + (self.load.waiting if self.load is not None else 0)
        return allowance(self.load) if waiting < queue_allowance(self.load) else 0

    def _see(self, ticket: Ticket) -> None:
        del self.unseen[ticket]
        self._unseen_kv -= ticket.kv_blocks
        if not ticket.computed:
            self._unseen_tokens -= ticket.tokens

    def _reset_unseen(self) -> None:
        self.unseen = {}
        self._unseen_tokens = self._unseen_kv = 0
        self._seen_tokens = self._seen_cached_tokens = 0
