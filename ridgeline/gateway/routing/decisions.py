"""Decisions of a route, from the ledger: the reasons, the models, and what a shadow would have saved.

For `ridgeline gateway routes decisions`. Reads only ledger rows; the cost of the other model is an estimate
from that model's own rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.gateway.accounting.store.schema import TABLE
from ridgeline.gateway.accounting.store.table import LedgerStore

MOST_ROWS = 200_000  # the latest


@dataclass(frozen=True, slots=True)
class RoutedRow:
    model: str
    tokens: int
    cost_pusd: int
    why: dict[str, Any]


@dataclass
class Decisions:
    """Of one route. saved_usd: what the shadow's choices would have saved; None: no rows have its prices."""

    rows: int = 0
    by: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    escalated: int = 0
    shadowed: int = 0
    agreed: int = 0
    cost_usd: float = 0.0
    shadow_cost_usd: float = 0.0  # of the rows with a shadow
    saved_usd: float | None = None
    decide_ms: dict[str, float] = field(default_factory=dict)


def read_rows(store: LedgerStore, route: str, since_ms: int = 0) -> list[RoutedRow]:
    found = store.query(
        f"SELECT model, tokens_in + tokens_out, cost_pusd, route FROM {TABLE} "
        f"WHERE model_asked = ? AND at_ms >= ? AND route <> '' ORDER BY at_ms DESC LIMIT {MOST_ROWS}",
        (route, since_ms),
    )
    return [RoutedRow(str(row[0]), int(row[1]), int(row[2]), _why(row[3])) for row in found]


def read_prices(store: LedgerStore, since_ms: int = 0) -> dict[str, float]:
    """Picodollars per token for every model that answered, under any requested name."""
    found = store.query(
        f"SELECT model, SUM(tokens_in + tokens_out), SUM(cost_pusd) FROM {TABLE} "
        "WHERE at_ms >= ? GROUP BY model",
        (since_ms,),
    )
    return {str(model): int(cost) / int(tokens) for model, tokens, cost in found if tokens and cost}


def decisions_of(rows: Iterable[RoutedRow], prices: Mapping[str, float]) -> Decisions:
    found = Decisions()
    saved, is_known = 0.0, True
    times = []
    for row in rows:
        if "by" not in row.why:
            continue  # refused before the decision
        found.rows += 1
        found.by[str(row.why["by"])] += 1
        found.models[row.model] += 1
        found.cost_usd += row.cost_pusd / 1e12
        if "rule" in row.why:
            found.rules[str(row.why["rule"])] += 1
        found.escalated += "escalated_from" in row.why
        if isinstance(row.why.get("decide_ms"), (int, float)):
            times.append(float(row.why["decide_ms"]))
        shadow = row.why.get("shadow")
        if not isinstance(shadow, str):
            continue
        found.shadowed += 1
        found.agreed += shadow == row.model
        found.shadow_cost_usd += row.cost_pusd / 1e12
        if shadow != row.model:
            is_known = is_known and shadow in prices
            saved += (row.cost_pusd - row.tokens * prices.get(shadow, 0.0)) / 1e12
    found.saved_usd = saved if found.shadowed and is_known else None
    if times:
        p50, p99 = np.percentile(times, (50, 99))
        found.decide_ms = {"p50": float(p50), "p99": float(p99)}
    return found


def lines_of(found: Decisions, route: str) -> list[str]:
    if not found.rows:
        return [f"the ledger has no request of the route {route}"]
    lines = [
        f"{found.rows} requests of {route}, {found.cost_usd:.6f} USD",
        "decided by   " + _shares(found.by, found.rows),
        "answered by  " + _shares(found.models, found.rows),
    ]
    if found.rules:
        lines.append("rules        " + _shares(found.rules, found.rows))
    if found.escalated:
        lines.append(f"escalated    {found.escalated} ({found.escalated / found.rows:.1%})")
    if found.decide_ms:
        lines.append(f"decided in   p50 {found.decide_ms['p50']:.1f} ms, p99 {found.decide_ms['p99']:.1f} ms")
    if found.shadowed:
        share = found.agreed / found.shadowed
        lines.append(f"shadow       agreed with {found.agreed} of {found.shadowed} ({share:.1%})")
        if found.saved_usd is None:
            lines.append("             what it would have saved: unknown, a model has no rows with a cost")
        else:
            share = found.saved_usd / found.shadow_cost_usd if found.shadow_cost_usd else 0.0
            lines.append(f"             would have saved {found.saved_usd:.6f} USD ({share:.1%})")
    return lines


def _shares(counts: Counter[str], total: int) -> str:
    return ", ".join(f"{name} {count} ({count / total:.1%})" for name, count in counts.most_common(10))


def _why(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
