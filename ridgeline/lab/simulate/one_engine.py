"""compared(): one engine under traffic, without guesses and with them; the tables of `ridgeline simulate
engine`."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.lab.bench.figures.metrics import flat, summarize
from ridgeline.lab.bench.figures.rates import Mode
from ridgeline.lab.simulate.engine_setup import EngineSetup
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.run import SimulatedRun
from ridgeline.lab.traffic.request import Traffic

PLAIN, GUESSING = "plain", "with guesses"
ROWS = (
    ("TTFT p50 ms", "ttft_ms.p50", "{:,.1f}"),
    ("TTFT p90 ms", "ttft_ms.p90", "{:,.1f}"),
    ("TPOT p50 ms", "tpot_ms.p50", "{:,.2f}"),
    ("TPOT p90 ms", "tpot_ms.p90", "{:,.2f}"),
    ("output tok/s", "output_tokens_per_s", "{:,.0f}"),
    ("requests/s", "requests_per_s", "{:,.2f}"),
    ("failed", "failures", "{:.1%}"),
    ("time computing", "busy_share", "{:.1%}"),
    ("KV blocks used, peak", "kv_peak", "{:.1%}"),
    ("preemptions", "preemptions", "{:,.0f}"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """figures: column → figure → value. caveats: of all columns"""

    figures: dict[str, dict[str, float]]
    caveats: tuple[str, ...]


def compared(traffic: Traffic, setup: EngineSetup, concurrency: int | None, seed: int) -> Compared:
    """concurrency: requests in a closed loop at a time; None: sent at their planned times"""
    columns = {PLAIN: None} if setup.drafts is None else {PLAIN: None, GUESSING: setup.drafts}
    figures, caveats = {}, []
    for name, drafts in columns.items():
        run = simulate(
            traffic,
            setup.limits,
            setup.times,
            front=setup.front,
            concurrency=concurrency,
            lookahead=setup.lookahead,
            seed=seed,
            drafts=drafts,
        )
        figures[name] = figures_of(run, "open" if concurrency is None else "closed")
        caveats += run.caveats
    return Compared(figures, tuple(dict.fromkeys(caveats)))


def figures_of(run: SimulatedRun, mode: Mode) -> dict[str, float]:
    """Of an open loop, times to the first token count from the planned moment."""
    found = flat(summarize(run.records, mode))
    if mode == "open":
        found |= {
            name.replace("_sched", ""): value
            for name, value in found.items()
            if name.startswith("ttft_sched_ms.")
        }
    found |= {
        "busy_share": run.busy_s / run.duration_s if run.duration_s else 0.0,
        "kv_peak": run.kv_use.peak,
        "preemptions": float(run.preemptions),
    }
    return {key: found[key] for _, key, _ in ROWS if key in found}


def report(found: Compared) -> list[str]:
    columns = list(found.figures)
    rows = [["", *columns, *["ratio"] * (len(columns) > 1)]]
    for title, key, shape in ROWS:
        values = [found.figures[column].get(key) for column in columns]
        cells = ["-" if value is None else shape.format(value) for value in values]
        if len(values) > 1:
            plain, guessing = values
            cells.append(f"{guessing / plain:.2f}" if plain and guessing is not None else "")
        rows.append([title, *cells])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [*lines, *([""] if found.caveats else []), *(f"note: {caveat}" for caveat in found.caveats)]
