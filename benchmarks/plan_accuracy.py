"""How far the planner's analytic TPOT and TTFT are from what others measured, on deployments held out.

Each (model, engine, chip, precision) of ../shared/data/measured-serving is predicted by constants fitted on
all the others; so is the width of its interval. Beside it the speed-of-light roofline and the textbook's
efficiencies on the same points. Prints tables and writes JSON. `--refit` writes the constants that ship,
fitted on all deployments, and the widths of their intervals; `--ablate` shows what each term is worth.

    python benchmarks/plan_accuracy.py [--data DIR] [--quick] [--refit] [--ablate] [--json out.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.lab.perfmodel import fit_constants
from ridgeline.lab.perfmodel.constants import (
    NAMES,
    ClassWidths,
    Coefficients,
    ConstantsFile,
    shipped,
    write_constants,
)
from ridgeline.lab.perfmodel.held_out import HeldOut, class_widths, covered, leave_one_out, score
from ridgeline.lab.perfmodel.intervals import describe, range_of
from ridgeline.lab.perfmodel.measured import MeasuredPoint, read_points
from ridgeline.lab.perfmodel.step_formula import tpot_seconds

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
SOURCE = "ai-dynamo/aiconfigurator 095f58a5, measured serving points, Apache-2.0"

IDEAL = dict.fromkeys(("read_linear", "read_experts", "read_cache", "int4_read", "linear_flops"), 1.0)
IDEAL |= dict.fromkeys(("narrow_flops", "expert_flops", "attention_flops", "link"), 1.0)
TEXTBOOK = IDEAL | {"read_linear": 0.8, "read_experts": 0.8, "read_cache": 0.8, "linear_flops": 0.6}
TEXTBOOK |= {"attention_flops": 0.6, "link": 0.6}
# Term → the value with which it says nothing.
NEUTRAL = {
    "quantized_layer_s": 1e-12,
    "latent_layer_s": 1e-12,
    "recurrent_layer_s": 1e-12,
    "expert_layer_s": 1e-12,
    "int4_read": 1.0,
    "narrow_flops": 1.0,
    "expert_flops": 1.0,
    "reduce_hop_s": 1e-12,
    "sequence_s": 1e-12,
    "prefill_layer_s": 1e-12,
}


def main() -> None:
    args = arguments()
    if not (args.data / "measured-serving").is_dir():
        sys.exit(f"{args.data}: no measured-serving there; give --data")
    points = read_points(args.data)
    aggregated = [point for point in points if not point.disaggregated]
    apart = [point for point in points if point.disaggregated]
    if args.ablate:
        ablate(aggregated)
        return
    held_out = leave_one_out(aggregated, nested=not args.quick, on_progress=progress)
    rows = (
        aggregated_rows(aggregated, held_out) + wider_rows(aggregated) + disaggregated_rows(aggregated, apart)
    )
    print_table(rows, nested=not args.quick)
    if args.refit:
        refit(aggregated, held_out)
    result = {"made_at": now(), "source": SOURCE, "nested": not args.quick, "rows": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.json}")


def aggregated_rows(points: Sequence[MeasuredPoint], held_out: HeldOut) -> list[dict[str, Any]]:
    table = fit_constants.columns(points)
    mixture = np.array([point.is_mixture for point in points])
    engines = np.array([point.deployment.backend for point in points])
    choices: list[tuple[str, Any]] = [("dense", ~mixture), ("MoE", mixture), ("all", mixture | ~mixture)]
    choices += [
        (f"{engine}, {name}", (engines == engine) & flags)
        for engine in fit_constants.FITTED_ENGINES
        for name, flags in (("dense", ~mixture), ("MoE", mixture))
    ]
    choices += [(" ".join(name), table.groups == group) for group, name in enumerate(table.group_names)]
    inside = covered(held_out.tpot_s, held_out.tpot_width, table.tpot_s)
    first_inside = covered(held_out.ttft_s, held_out.ttft_width, table.ttft_s)
    ideal, textbook = (baseline(table, values) for values in (IDEAL, TEXTBOOK))
    rows = []
    for name, chosen in choices:
        if not chosen.any():
            continue
        rows.append(
            {
                "set": name,
                "tpot": asdict(score(held_out.tpot_s[chosen], table.tpot_s[chosen])),
                "tpot_covered": float(inside[chosen].mean()),
                "tpot_times": float(np.exp(held_out.tpot_width[chosen].mean())),
                "ttft": asdict(score(held_out.ttft_s[chosen], table.ttft_s[chosen])),
                "ttft_covered": float(first_inside[chosen].mean()),
                "speed_of_light": asdict(score(ideal[chosen], table.tpot_s[chosen])),
                "textbook": asdict(score(textbook[chosen], table.tpot_s[chosen])),
            }
        )
    return rows


def wider_rows(points: Sequence[MeasuredPoint]) -> list[dict[str, Any]]:
    """With more held out at once: all deployments of a model, an engine, a chip."""
    table = fit_constants.columns(points)
    whole = fit_constants.fit(table)
    mixture = np.array([point.is_mixture for point in points])
    rows = []
    for place, what in enumerate(("model", "engine", "chip")):
        names = np.array([point.group[place] for point in points])
        predicted = np.zeros(len(points))
        for name in np.unique(names):
            held = names == name
            fitted = fit_constants.fit(table.where(~held), whole, ttft=False)
            predicted[held] = fit_constants.predict(fitted, table.where(held))[0]
        for label, chosen in (("dense", ~mixture), ("MoE", mixture)):
            rows.append(
                {
                    "set": f"{label}, one {what} out at a time",
                    "tpot": asdict(score(predicted[chosen], table.tpot_s[chosen])),
                    "speed_of_light": asdict(score(baseline(table, IDEAL)[chosen], table.tpot_s[chosen])),
                    "textbook": asdict(score(baseline(table, TEXTBOOK)[chosen], table.tpot_s[chosen])),
                }
            )
    return rows


def disaggregated_rows(
    aggregated: Sequence[MeasuredPoint], apart: Sequence[MeasuredPoint]
) -> list[dict[str, Any]]:
    """Decode side alone, by constants fitted on aggregated points of other deployments."""
    known = fit_constants.columns(aggregated)
    whole = fit_constants.fit(known)
    table = fit_constants.columns(apart)
    predicted = np.zeros(len(apart))
    for group, name in enumerate(table.group_names):
        same = known.groups == (known.group_names.index(name) if name in known.group_names else -1)
        fitted = fit_constants.fit(known.where(~same), whole, ttft=False) if same.any() else whole
        held = table.groups == group
        predicted[held] = fit_constants.predict(fitted, table.where(held))[0]
    stated = np.array([point.batch_known for point in apart])
    rows = []
    for label, chosen in (
        ("disaggregated, batch stated", stated),
        ("disaggregated, batch not stated", ~stated),
    ):
        rows.append(
            {
                "set": label,
                "tpot": asdict(score(predicted[chosen], table.tpot_s[chosen])),
                "speed_of_light": asdict(score(baseline(table, IDEAL)[chosen], table.tpot_s[chosen])),
                "textbook": asdict(score(baseline(table, TEXTBOOK)[chosen], table.tpot_s[chosen])),
            }
        )
    return rows


def baseline(table: fit_constants.Points, values: dict[str, float]) -> Any:
    return tpot_seconds(table.loop, Coefficients(**{**dict.fromkeys(NAMES, 0.0), **values}))


def refit(points: Sequence[MeasuredPoint], held_out: HeldOut) -> None:
    """Ours stay as they are: they come from our own measurements."""
    table = fit_constants.columns(points)
    shared, engines = fit_constants.fit(table).coefficients()
    widths = class_widths(points, held_out)
    described = [describe(point.deployment, point.batch, point.isl, point.osl) for point in points]
    before = shipped()
    ours = {name: values for name, values in before.engines.items() if name not in engines}
    write_constants(
        ConstantsFile(
            made_at=now(),
            made_by="benchmarks/plan_accuracy.py --refit",
            source=SOURCE,
            points=len(points),
            deployments=len(table.group_names),
            shared=shared,
            engines={**engines, **ours},
            provenance=before.provenance | dict.fromkeys(engines, SOURCE),
            tpot=ClassWidths(**widths["tpot"]),
            ttft=ClassWidths(**widths["ttft"]),
            fitted=range_of(described),
        )
    )
    print("constants written")


def ablate(points: Sequence[MeasuredPoint]) -> None:
    """Leave-one-deployment-out again without one term at a time."""
    table = fit_constants.columns(points)
    mixture = np.array([point.is_mixture for point in points])

    def line(name: str) -> None:
        held_out = leave_one_out(points, nested=False)
        logs = np.abs(np.log(held_out.tpot_s / table.tpot_s))
        dense, moe = (score(held_out.tpot_s[c], table.tpot_s[c]) for c in (~mixture, mixture))
        print(
            f"{name:32s} {dense.median:6.1f} {dense.mape:6.1f} {logs[~mixture].mean():7.3f}"
            f" {moe.median:8.1f} {moe.mape:6.1f} {logs[mixture].mean():7.3f}",
            flush=True,
        )

    print(f"{'without':32s} {'dense: median, MAPE, log':22s} {'MoE: median, MAPE, log':>24s}")
    line("(all terms)")
    for term, value in NEUTRAL.items():
        with pinned(term, value):
            line(term)


@contextmanager
def pinned(term: str, value: float) -> Iterator[None]:
    """A prior that leaves a constant no choice."""
    before = dict(fit_constants.TPOT_PRIORS)
    fit_constants.TPOT_PRIORS.update(
        {name: (value, 1e-5) for name in before if name == term or name.startswith(f"{term}/")}
    )
    try:
        yield
    finally:
        fit_constants.TPOT_PRIORS.update(before)


def print_table(rows: Sequence[dict[str, Any]], *, nested: bool) -> None:
    how = "nested: no fit behind it saw the deployment" if nested else "quick: not nested"
    print(f"\nerrors in percent; interval coverage of 80 % intervals ({how})")
    head = f"{'':44s} {'n':>5s} {'TPOT MAPE':>10s} {'median':>7s} {'p90':>6s} {'bias':>6s} {'covered':>8s}"
    print(
        head + f" {'×/÷':>5s} {'TTFT median':>12s} {'p90':>6s} {'covered':>8s} {'light':>6s} {'textbook':>9s}"
    )
    for row in rows:
        tpot, first = row["tpot"], row.get("ttft")
        line = f"{row['set'][:44]:44s} {tpot['points']:5d} {tpot['mape']:10.1f} {tpot['median']:7.1f}"
        line += f" {tpot['p90']:6.1f} {tpot['bias']:6.1f}"
        if first:
            line += f" {100 * row['tpot_covered']:8.1f} {row['tpot_times']:5.2f}"
            line += f" {first['median']:12.1f} {first['p90']:6.1f} {100 * row['ttft_covered']:8.1f}"
        else:
            line += " " * 43
        print(line + f" {row['speed_of_light']['median']:6.1f} {row['textbook']['median']:9.1f}")
    deployments = [row["tpot_covered"] for row in rows if row["set"].count(" ") == 3 and "ttft" in row]
    mean = 100 * sum(deployments) / len(deployments)
    print(f"coverage, every deployment counted once: {mean:.0f} % of {len(deployments)}")
    print(
        "light: median TPOT error of the bare roofline; textbook: with 0.8 of the bandwidth, 0.6 of the FLOP"
    )


def progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} deployments held out", end="\n" if done == of else "", file=sys.stderr)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder with measured-serving and configs")
    parser.add_argument(
        "--quick", action="store_true", help="widths of intervals not nested: seconds, not a minute"
    )
    parser.add_argument("--refit", action="store_true", help="write the constants that ship")
    parser.add_argument(
        "--ablate", action="store_true", help="leave out one term at a time, and print that alone"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "bench-results" / "plan_accuracy.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
