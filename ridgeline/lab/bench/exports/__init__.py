"""A run in the formats of AIPerf, GuideLLM and `vllm bench serve`: by their formulas, not by their names.

Names collide (GuideLLM's TPOT is E2E/n_out, its ITL is our TPOT; vLLM's ITL is our ICL), so every figure is
recomputed from the records. docs/bench-reports.md lists what cannot be filled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.lab.bench.exports.aiperf import to_aiperf, to_aiperf_csv
from ridgeline.lab.bench.exports.facts import RunFacts, facts_of
from ridgeline.lab.bench.exports.guidellm import to_guidellm
from ridgeline.lab.bench.exports.vllm import to_vllm

__all__ = [
    "DIALECTS",
    "RunFacts",
    "export",
    "facts_of",
    "to_aiperf",
    "to_aiperf_csv",
    "to_guidellm",
    "to_vllm",
]

# The files each tool writes; vLLM's has a different name for every run.
DIALECTS: dict[str, dict[str, Callable[[RunFacts], Any]]] = {
    "aiperf": {"profile_export_aiperf.json": to_aiperf, "profile_export_aiperf.csv": to_aiperf_csv},
    "guidellm": {"benchmarks.json": to_guidellm},
    "vllm": {"vllm-bench-serve.json": to_vllm},
}


def export(run: RunFacts, dialect: str, directory: Path) -> list[Path]:
    """Write the format's files into the directory; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, convert in DIALECTS[dialect].items():
        found = convert(run)
        path = directory / name
        text = found.encode() if isinstance(found, str) else msgspec.json.format(msgspec.json.encode(found))
        path.write_bytes(text)
        written.append(path)
    return written
