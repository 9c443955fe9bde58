"""Decode and prefill: our engine in this process against llama.cpp's benchmark tools, sample by sample.

Called by cpu_vs_llamacpp.py, once for each model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ridgeline.models.spec.read_spec import read_spec
from versus import engine_rates
from versus.bench import Bench, measure_ceilings, median_ceilings
from versus.comparison import Figure, Row
from versus.peer_llamacpp import CACHES, DECODE_EXTRAS, PREFILL_EXTRAS, Variant, every_cache, tune

PREFILL = 512
# With a large model all flags would take too long to try: the best cache types, no other flags.
LARGE_CACHES = (CACHES[0], CACHES[1], CACHES[4])


@dataclass(frozen=True)
class ComparedModel:
    """A model of the comparison: its files by format, ours first, and the bars of its rows."""

    name: str  # keys begin with it
    title: str
    files: Callable[[], dict[str, Path]]  # called when a row is wanted: it may download
    decode_bars: dict[int, float]  # by number of streams
    prefill_bar: float
    is_large: bool = False
    ours: Callable[[], Path] | None = (
        None  # a file that the peer cannot read; `files` are then the peer's alone
    )
    least_percent_of_limit: float | None = None  # decode, 1 stream
    prefill_percent_of_limit: float | None = None

    @property
    def prompt(self) -> int:
        """Tokens behind each stream of a decode row. A large model's prompts would take most of the time."""
        return 32 if self.is_large else 128

    @property
    def tokens(self) -> int:
        """Tokens that each stream of a decode row makes."""
        return 32 if self.is_large else 64

    @property
    def context(self) -> int:
        """What a decode step sees on average."""
        return self.prompt + self.tokens // 2

    def rows(self) -> list[Row]:
        decode = [
            Row(f"{self.name}.decode.{n}", f"decode, {n} stream{'s' * (n > 1)}", "tok/s", bar,
                least_percent_of_limit=self.least_percent_of_limit if n == 1 else None)
            for n, bar in self.decode_bars.items()
        ]  # fmt: skip
        prefill = Row(f"{self.name}.prefill", f"prefill {PREFILL}", "tok/s", self.prefill_bar,
                      least_percent_of_limit=self.prefill_percent_of_limit)  # fmt: skip
        return [*decode, prefill]

    def variants(self, formats: tuple[str, ...]) -> list[Variant]:
        """The ways to run the peer that the search for its best flags starts with."""
        if self.is_large:
            return [Variant(format, cache) for format in formats for cache in LARGE_CACHES]
        return every_cache(formats)


def engine_rows(bench: Bench, model: ComparedModel) -> list[Row]:
    """Decode at several batch sizes and prefill of one model, every repeat going through all rows."""
    rows = [row for row in model.rows() if bench.wanted(row.key)]
    if not rows:
        return []
    name, files = model.name, model.files()
    ours_path = model.ours() if model.ours else next(iter(files.values()))

    def peer_rate(row: Row, variant: Variant) -> float:
        file = files[variant.format]
        if row.key.endswith("prefill"):
            return bench.peer.prefill_rate(file, PREFILL, variant.flags)
        return bench.peer.decode_rate(file, _streams(row), model.prompt, model.tokens, variant.flags)

    variants = model.variants(tuple(files))
    finalists = {row.key: _finalists(bench, row, model.is_large, variants, peer_rate) for row in rows}
    engine = engine_rates.load(ours_path)
    bench.console.log(f"ours, {name}: {engine.summary}")
    ceilings = []
    for number in range(bench.repeats):
        for row in rows:

            def our_rate(row: Row = row) -> float:
                if row.key.endswith("prefill"):
                    return engine_rates.prefill_rate(engine, PREFILL, bench.rng)
                return engine_rates.decode_rate(engine, _streams(row), model.prompt, model.tokens, bench.rng)

            contestants: list[tuple[str, Figure, Callable[[], float]]] = [("ours", row.ours, our_rate)]
            for variant in finalists[row.key]:
                figure = row.theirs.setdefault(str(variant), Figure())
                contestants.append((str(variant), figure, lambda r=row, v=variant: peer_rate(r, v)))
            first = number % len(contestants)  # a machine may slow down under load: each comes first in turn
            for contestant, figure, rate in contestants[first:] + contestants[:first]:
                figure.samples.append(bench.sample(f"{number + 1}. {row.key} {contestant}", rate))
        ceilings.append(measure_ceilings(bench, ours_path))
    bench.ceilings[name] = median_ceilings(ceilings)
    for row in rows:
        row.ours.limit = _rate_limit(bench, row, model, ours_path)
        for variant in finalists[row.key]:
            row.theirs[str(variant)].limit = _rate_limit(bench, row, model, files[variant.format])
    return rows


def _streams(row: Row) -> int:
    return int(row.key.rpartition(".")[2])


def _finalists(
    bench: Bench, row: Row, is_large: bool, variants: list[Variant], rate: Callable[[Row, Variant], float]
) -> tuple[Variant, ...]:
    extras = PREFILL_EXTRAS if row.key.endswith("prefill") else DECODE_EXTRAS

    def quiet_rate(variant: Variant) -> float:
        return bench.sample(f"flags of {row.key}: {variant}", lambda: rate(row, variant)).value

    tuned = bench.tuned(row.key, lambda: tune(quiet_rate, variants, () if is_large else extras))
    row.tried = tuned.tried
    return tuned.finalists


def _rate_limit(bench: Bench, row: Row, model: ComparedModel, file: Path) -> float:
    spec, ceilings = read_spec(file), bench.ceilings[model.name]
    if row.key.endswith("prefill"):
        return engine_rates.prefill_limit(spec, PREFILL, ceilings)
    weights = engine_rates.step_weight_bytes(file, spec, _streams(row))
    return engine_rates.decode_limit(spec, weights, _streams(row), model.context, ceilings)
