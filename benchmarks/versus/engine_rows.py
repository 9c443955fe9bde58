"""Decode and prefill: our engine in this process against llama.cpp's benchmark tools, sample by sample.

Called by cpu_vs_llamacpp.py, once for each model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ridgeline.models.spec.read_spec import read_spec
from versus import engine_rates
from versus.bench import Bench, measure_ceilings, median_ceilings
from versus.comparison import Figure, Row
from versus.peer_llamacpp import CACHES, DECODE_EXTRAS, FORMATS, PREFILL_EXTRAS, Variant, every_cache, tune

PROMPT, TOKENS, PREFILL = 128, 64, 512
CONTEXT = PROMPT + TOKENS // 2  # what a decode step sees on average
# All flags would take too long to try with this model: its best cache types, no other flags.
TINYLLAMA_VARIANTS = [Variant("Q4_0", cache) for cache in (CACHES[0], CACHES[1], CACHES[4])]


def engine_rows(bench: Bench, name: str, models: dict[str, Path], bars: dict[int, float]) -> list[Row]:
    """Decode at several batch sizes and prefill of one model, every repeat going through all rows."""
    ours_path = models["Q4_1"] if "Q4_1" in models else models["Q4_0"]
    is_large = name == "tinyllama"
    rows = [
        Row(f"{name}.decode.{n}", f"decode, {n} stream{'s' * (n > 1)}", "tok/s", bar,
            least_percent_of_limit=80.0 if is_large and n == 1 else None)
        for n, bar in bars.items()
    ]  # fmt: skip
    rows.append(Row(f"{name}.prefill", f"prefill {PREFILL}", "tok/s", 3.0 if is_large else 4.0))
    rows = [row for row in rows if bench.wanted(row.key)]
    if not rows:
        return []

    def peer_rate(row: Row, variant: Variant) -> float:
        model = models[variant.format]
        if row.key.endswith("prefill"):
            return bench.peer.prefill_rate(model, PREFILL, variant.flags)
        return bench.peer.decode_rate(model, _streams(row), PROMPT, TOKENS, variant.flags)

    finalists = {row.key: _finalists(bench, row, is_large, peer_rate) for row in rows}
    engine = engine_rates.load(ours_path)
    bench.console.log(f"ours, {name}: {engine.summary}")
    ceilings = []
    for number in range(bench.repeats):
        ceilings.append(measure_ceilings(bench, ours_path))
        for row in rows:

            def our_rate(row: Row = row) -> float:
                if row.key.endswith("prefill"):
                    return engine_rates.prefill_rate(engine, PREFILL, bench.rng)
                return engine_rates.decode_rate(engine, _streams(row), PROMPT, TOKENS, bench.rng)

            row.ours.samples.append(bench.sample(f"{number + 1}. {row.key} ours", our_rate))
            for variant in finalists[row.key]:
                sample = bench.sample(
                    f"{number + 1}. {row.key} {variant}", lambda r=row, v=variant: peer_rate(r, v)
                )
                row.theirs.setdefault(str(variant), Figure()).samples.append(sample)
    bench.ceilings[name] = median_ceilings(ceilings)
    for row in rows:
        row.ours.limit = _rate_limit(bench, row, name, ours_path)
        for variant in finalists[row.key]:
            row.theirs[str(variant)].limit = _rate_limit(bench, row, name, models[variant.format])
    return rows


def _streams(row: Row) -> int:
    return int(row.key.rpartition(".")[2])


def _finalists(
    bench: Bench, row: Row, is_large: bool, rate: Callable[[Row, Variant], float]
) -> tuple[Variant, ...]:
    variants = TINYLLAMA_VARIANTS if is_large else every_cache(FORMATS)
    extras = PREFILL_EXTRAS if row.key.endswith("prefill") else DECODE_EXTRAS

    def quiet_rate(variant: Variant) -> float:
        return bench.sample(f"flags of {row.key}: {variant}", lambda: rate(row, variant)).value

    tuned = bench.tuned(row.key, lambda: tune(quiet_rate, variants, () if is_large else extras))
    row.tried = tuned.tried
    return tuned.finalists


def _rate_limit(bench: Bench, row: Row, name: str, model: Path) -> float:
    spec, ceilings = read_spec(model), bench.ceilings[name]
    if row.key.endswith("prefill"):
        return engine_rates.prefill_limit(spec, PREFILL, ceilings)
    weights = engine_rates.step_weight_bytes(model, spec)
    return engine_rates.decode_limit(spec, weights, _streams(row), CONTEXT, ceilings)
