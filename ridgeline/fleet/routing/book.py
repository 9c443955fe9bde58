"""LoadBook: the load of every replica, as one router knows it.

A request is charged when it is sent (`charge`) and discharged when its answer has ended (`discharge`). Each
Load line of a replica replaces what the book assumed. The number in flight is the number of open tickets.
"""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry, Table
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.replica.messages import FeedLine, Load, Started


class Ticket:
    """One request in flight at one replica."""

    __slots__ = ("charged_at", "model", "open", "replica_id", "tokens")

    def __init__(self, replica_id: str, model: str, tokens: float, charged_at: float) -> None:
        self.replica_id, self.model, self.tokens, self.charged_at = replica_id, model, tokens, charged_at
        self.open = True


class Row:
    """One replica."""

    def __init__(self, entry: ReplicaEntry, now: float) -> None:
        self.entry = entry
        self.lost = False
        self.epoch = ""
        self.heard_at = now
        self.load: Load | None = None
        self.started: Started | None = None
        self.tickets: set[Ticket] = set()


class LoadBook:
    """`clock` is monotonic. Not safe for threads; each router process has its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.generation = -1
        self.rows: dict[str, Row] = {}
        self.models: dict[str, ModelEntry] = {}
        self._open: set[Ticket] = set()

    def set_table(self, table: Table) -> bool:
        """Takes a table over. False: it is older than the one known, and ignored."""
        if table.generation < self.generation:
            return False
        now, self.generation = self.clock(), table.generation
        self.models = {name: one for one in table.models for name in (one.name, *one.aliases, *one.adapters)}
        rows: dict[str, Row] = {}
        for entry in table.replicas:
            row = rows[entry.id] = self.rows.get(entry.id) or Row(entry, now)
            row.entry = entry
        self.rows = rows
        return True

    def hear(self, replica_id: str, line: FeedLine) -> None:
        """A line of a replica's feed; prefix events are for PrefixMap.hear."""
        row = self.rows.get(replica_id)
        if row is None:
            return
        if isinstance(line, Started):
            row.started, row.epoch, row.lost = line, line.epoch, False
            row.heard_at = self.clock()
        elif isinstance(line, Load):
            row.load, row.heard_at = line, self.clock()

    def lost(self, replica_id: str) -> None:
        """No request goes there until its feed starts again (Started)."""
        if replica_id in self.rows:
            self.rows[replica_id].lost = True

    def charge(self, replica_id: str, prompt: PromptView, matched_blocks: int = 0) -> Ticket:
        """Call it before the request is sent, in the same turn of the loop as `choose`."""
        row = self.rows[replica_id]
        ticket = Ticket(replica_id, row.entry.model, prompt.uncached_tokens(matched_blocks), self.clock())
        row.tickets.add(ticket)
        self._open.add(ticket)
        return ticket

    def first_token(self, ticket: Ticket) -> None:
        """The prompt is computed: its tokens are no longer queued. Optional; makes the estimate better."""

    def discharge(self, ticket: Ticket) -> None:
        """The answer has ended or failed. A second call does nothing."""
        if not ticket.open:
            return
        ticket.open = False
        self._open.discard(ticket)
        if ticket.replica_id in self.rows:
            self.rows[ticket.replica_id].tickets.discard(ticket)

    def in_flight(self, model: str = "", replica_id: str = "") -> int:
        """Open tickets, of this router alone."""
        return sum(
            (not model or one.model == model) and (not replica_id or one.replica_id == replica_id)
            for one in self._open
        )

    def candidates(self, model: str) -> int:
        """Replicas of a model that may take requests, saturated ones included. 0: the model is cold."""
        entry = self.models.get(model)
        return 0 if entry is None else sum(self._is_open(row, entry.name) for row in self.rows.values())

    def _is_open(self, row: Row, model: str) -> bool:
        fed = row.load is None or row.load.state == "ready"
        agrees = not row.epoch or not row.entry.epoch or row.epoch == row.entry.epoch
        in_service = row.entry.state in ("ready", "ramping") and row.entry.weight > 0
        return row.entry.model == model and in_service and fed and agrees and not row.lost
