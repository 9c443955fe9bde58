"""LoadBook: the load of every replica, as one router knows it.

A request is charged when it is sent (`charge`) and discharged when its answer has ended (`discharge`). Each
Load line of a replica replaces what the book assumed. The number in flight is the number of open tickets.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ridgeline.fleet.messages import ModelEntry, Table
from ridgeline.fleet.placement.regions import Latencies, Rules
from ridgeline.fleet.routing.columns import Field, ModelColumns
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.fleet.routing.row import Row, Ticket
from ridgeline.fleet.routing.step_cost import StepCost
from ridgeline.replica.messages import FeedLine, Load, Started

__all__ = ["LoadBook", "Ticket"]

HEAT_S = 60.0  # time constant with which the work sent to a replica is forgotten


class LoadBook:
    """`clock` is monotonic. Not thread-safe: each router process has one.

    routers: how many serve the same replicas. Between two Load lines a router does not see the others'
    requests, so it counts its own once for every router: several routers do not fill the same replica.
    """

    def __init__(self, clock: Callable[[], float], routers: int = 1) -> None:
        self.clock, self.routers = clock, routers
        self.generation = -1
        self.rows: dict[str, Row] = {}
        self.models: dict[str, ModelEntry] = {}  # by name, alias and adapter
        self.latency_ms: Latencies = {}
        self._columns: dict[str, ModelColumns] = {}
        self._costs: dict[tuple[str, str], StepCost] = {}
        self._open: set[Ticket] = set()
        self._turns = 0
        self._heat_from = clock()

    def set_table(self, table: Table) -> bool:
        """Apply a table. Returns False if it is older than the known one; then it is ignored."""
        if table.generation < self.generation:
            return False
        now, self.generation = self.clock(), table.generation
        self.routers = table.routers or self.routers
        self.latency_ms = table.latency_ms
        self.models = {name: one for one in table.models for name in (one.name, *one.aliases)}
        for one in table.models:
            for adapter in one.adapters:  # fleet.toml's names win
                self.models.setdefault(adapter, one)
        rows: dict[str, Row] = {}
        for entry in table.replicas:
            row = self.rows.get(entry.id)
            if row is None:
                cost = self._costs.setdefault((entry.model, entry.pool), StepCost())
                row = Row(entry, cost, now)
                row.heat = self._mean_heat(entry.model)
            elif row.entry.epoch != entry.epoch and row.epoch != entry.epoch:
                row.lost = False  # a new process; its feed is not read yet
            row.entry = entry
            rows[entry.id] = row
        for name in self.rows.keys() - rows.keys():
            self.rows[name].index = -1
        self.rows = rows
        self._arrange()
        return True

    def hear(self, replica_id: str, line: FeedLine) -> None:
        """Apply a line of a replica's feed. PrefixMap.hear takes the prefix events."""
        row = self.rows.get(replica_id)
        if row is None:
            return
        if isinstance(line, Load):
            adapters = row.load.adapters if row.load is not None else ()
            changed = row.hear(line, self.clock())
            columns = self._columns[row.entry.model]
            columns.output_tokens = row.cost.output_tokens
            if line.adapters != adapters:
                columns.adapters_version += 1
            if changed:
                self._write_costs(row)
        elif isinstance(line, Started):
            row.start(line, self.clock())
        else:
            return
        self._write(row)

    def lost(self, replica_id: str) -> None:
        """Send it no request until its feed starts again (Started) or the table names another process."""
        row = self.rows.get(replica_id)
        if row is not None:
            row.lost = True
            self._write(row)

    def charge(self, replica_id: str, prompt: PromptView, matched_blocks: int = 0) -> Ticket:
        """Call it directly after `choose`, before the request is sent."""
        row, now = self.rows[replica_id], self.clock()
        ticket = Ticket(row, prompt, matched_blocks, now)
        if prompt.adapter and not row.has_adapter(prompt.adapter):
            self._columns[row.entry.model].adapters_version += 1
        row.charge(ticket)
        self._open.add(ticket)
        self._turns += 1
        row.turn = self._turns
        row.heat += self._heat_now(now) * (ticket.tokens + (prompt.output_tokens or row.cost.output_tokens))
        self._write(row)
        return ticket

    def first_token(self, ticket: Ticket) -> None:
        """The prompt is computed: remove its tokens from the queue. Optional; it improves the estimate."""
        ticket.row.computed(ticket)
        self._write(ticket.row)

    def discharge(self, ticket: Ticket) -> None:
        """The answer has ended or failed. A second call does nothing."""
        if not ticket.open:
            return
        ticket.open = False
        self._open.remove(ticket)
        row = ticket.row
        row.discharge(ticket)
        if ticket.adapter and row.index >= 0 and not row.has_adapter(ticket.adapter):
            self._columns[row.entry.model].adapters_version += 1
        self._write(row)

    def in_flight(self, model: str = "", replica_id: str = "") -> int:
        """Open tickets of this router."""
        if not model and not replica_id:
            return len(self._open)
        return sum(
            (not model or one.model == model) and (not replica_id or one.replica_id == replica_id)
            for one in self._open
        )

    def candidates(self, model: str, residency: Rules = ()) -> int:
        """How many replicas of a model may take requests, saturated ones included. 0: the model is cold."""
        columns = self.columns(model)
        if columns is None:
            return 0
        is_open = columns.field(Field.OPEN)
        return int(is_open @ columns.allowed(residency) if residency else is_open.sum())

    def columns(self, model: str) -> ModelColumns | None:
        """The replicas of a model, given by its name, an alias or an adapter."""
        entry = self.models.get(model)
        return self._columns.get(entry.name) if entry is not None else None

    def row_at(self, columns: ModelColumns, index: int) -> Row:
        return self.rows[columns.names[index]]

    def heat_scale(self, now: float) -> float:
        """The factor that turns Field.HEAT into tokens."""
        return math.exp((self._heat_from - now) / HEAT_S)

    def _heat_now(self, now: float) -> float:
        """Write newer work with a larger weight, so that older work decays."""
        if now - self._heat_from > 100 * HEAT_S:
            scale = self.heat_scale(now)
            for row in self.rows.values():
                row.heat *= scale
            self._heat_from = now
            for columns in self._columns.values():
                columns.values[Field.HEAT] *= scale
        return 1.0 / self.heat_scale(now)

    def _mean_heat(self, model: str) -> float:
        columns = self._columns.get(model)
        return float(columns.field(Field.HEAT).mean()) if columns is not None and len(columns) else 0.0

    def _arrange(self) -> None:
        """Columns for the rows, in the table's order."""
        by_model: dict[str, list[Row]] = {}
        for row in self.rows.values():
            by_model.setdefault(row.entry.model, []).append(row)
        for model in self._columns.keys() - by_model.keys():
            del self._columns[model]
        for model, rows in by_model.items():
            columns = self._columns.setdefault(model, ModelColumns())
            columns.latency_ms = self.latency_ms
            entries = [row.entry for row in rows]
            columns.reshape(
                [one.id for one in entries],
                [one.weight for one in entries],
                [one.version for one in entries],
                [one.region for one in entries],
                [row.hash for row in rows],
            )
            for index, row in enumerate(rows):
                row.index = index
                self._write(row)

    def _write(self, row: Row) -> None:
        if row.index >= 0:
            column, room = row.column(self.routers), row.room(self.routers)
            self._columns[row.entry.model].write(row.index, column, room, row.cost)

    def _write_costs(self, row: Row) -> None:
        """For all replicas that share them, at once: with 1,000 replicas they change many times a second."""
        columns = self._columns[row.entry.model]
        rows = (self.rows[name] for name in columns.names)
        alike = columns.cached(
            ("cost", id(row.cost)), 0, lambda: np.array([one.index for one in rows if one.cost is row.cost])
        )
        columns.price(alike, row.cost)
