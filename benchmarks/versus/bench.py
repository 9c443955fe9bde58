"""What every row of the comparison needs: the peer, the models, undisturbed samples, the flags found so far.

Made by cpu_vs_llamacpp.py, used by engine_rows and server_rows. Finding flags takes longer than measuring
with them: they are kept in the cache folder, for this build of llama.cpp, machine and instruction set. A row
without flags there takes those of kept_flags.json, found on another machine with the same set.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from ridgeline.machine import cache_dir, usable_cpus
from ridgeline.models.spec.read_spec import read_spec
from versus import engine_rates
from versus.engine_rates import Ceilings
from versus.peer_llamacpp import LlamaCpp, Tuned, Variant
from versus.quiet_machine import Sample, measured

T = TypeVar("T")


@dataclass
class Bench:
    """What every row needs: the peer, the models, the patience, and the flags found so far."""

    peer: LlamaCpp
    smollm2: dict[str, Path]
    repeats: int
    patience_s: float
    attempts: int
    tune_again: bool
    wanted: Callable[[str], bool]
    console: Console
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    found: dict[str, Tuned] = field(default_factory=dict)
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    disturbed: bool = False  # since the search for flags began
    isa: str = ""  # our instruction set; the peer is built for the same one

    def sample(self, what: str, measure: Callable[[], float]) -> Sample[float]:
        """The least disturbed of a few tries, and a line about it."""
        sample = self.measured(measure)
        self.said(what, sample.value, sample)
        return sample

    def measured(self, measure: Callable[[], T]) -> Sample[T]:
        return measured(measure, self.patience_s, self.attempts)

    def said(self, what: str, value: float, sample: Sample[Any]) -> None:
        self.disturbed |= sample.is_disturbed
        self.console.log(f"{what}: {value:.4g}  (others took {100 * sample.foreign_share:.0f} %)")

    def tuned(self, key: str, find_best: Callable[[], Tuned]) -> Tuned:
        """The flags found for this row earlier, by this build on this machine, or found now."""
        if key not in self.found:
            stored = (
                {} if self.tune_again else {**committed_flags(self.isa), **_read_flags(self.peer, self.isa)}
            )
            self.disturbed = False
            self.found[key] = stored[key] if key in stored else find_best()
            if key not in stored and not self.disturbed:  # what others spoiled serves this run at most
                _write_flags(self.peer, self.isa, {**_read_flags(self.peer, self.isa), key: self.found[key]})
        return self.found[key]


# ---- the flags that were found, kept ----


def _flags_file(isa: str) -> Path:
    return cache_dir() / "bench" / f"llamacpp-flags-{isa}.json"


def committed_flags(isa: str) -> dict[str, Tuned]:
    """Flags found with this instruction set on the machines of docs/performance/cpu-vs-llamacpp.md."""
    kept = json.loads((Path(__file__).parent / "kept_flags.json").read_text())
    rows = kept["avx2" if isa in ("avx2", "avxvnni") else "avx512"]
    return {
        key: Tuned(tuple(Variant(format, tuple(flags.split())) for format, flags in finalists), {})
        for key, finalists in rows.items()
    }


def _read_flags(peer: LlamaCpp, isa: str) -> dict[str, Tuned]:
    try:
        kept = json.loads(_flags_file(isa).read_text())
    except (OSError, ValueError):
        return {}
    if kept.get("peer") != peer.version() or kept.get("machine") != machine():
        return {}
    return {
        key: Tuned(tuple(Variant(format, tuple(flags)) for format, flags in one["finalists"]), one["tried"])
        for key, one in kept["rows"].items()
    }


def _write_flags(peer: LlamaCpp, isa: str, found: dict[str, Tuned]) -> None:
    rows = {
        key: {"finalists": [[v.format, v.flags] for v in one.finalists], "tried": one.tried}
        for key, one in found.items()
    }
    _flags_file(isa).parent.mkdir(parents=True, exist_ok=True)
    kept = {"peer": peer.version(), "machine": machine(), "rows": rows}
    _flags_file(isa).write_text(json.dumps(kept, indent=1))


def machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {usable_cpus()} CPUs"
    return f"{platform.machine()}, {usable_cpus()} CPUs"


# ---- ceilings ----


def measure_ceilings(bench: Bench, model: Path) -> Ceilings:
    size = engine_rates.step_weight_bytes(model, read_spec(model))
    sample = bench.measured(lambda: engine_rates.measure_ceilings(size, bench.peer.threads))
    bench.said(f"read GB/s of {size >> 20} MiB", sample.value.read_bytes_per_s / 1e9, sample)
    return sample.value


def median_ceilings(all_of: list[Ceilings]) -> Ceilings:
    return Ceilings(
        statistics.median(one.read_bytes_per_s for one in all_of),
        statistics.median(one.int8_ops_per_s for one in all_of),
    )
