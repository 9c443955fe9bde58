"""StepRing: the newest step records, kept for /debug/steps and for calibrating the planner on real runs.

Filled by the engine's loop once per step, so `append` is constant time; never blocks, never writes by itself.
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ridgeline.telemetry.stats import StepRecord


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The kept steps in one line. Rates are over compute time (Σ wall), not over the time between steps."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    wall_s: float = 0.0
    schedule_s: float = 0.0
    mean_decode_batch: float = 0.0  # over the steps that decode
    p50_step_ms: float = 0.0
    p99_step_ms: float = 0.0
    tokens_per_s: float = 0.0  # prefill and decode
    schedule_share: float = 0.0  # of wall + schedule: what planning costs


class StepRing:
    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a step ring holds at least one record, not {capacity}")
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self._total = 0

    def append(self, record: StepRecord) -> None:
        self._records.append(record)
        self._total += 1

    def __len__(self) -> int:
        return len(self._records)

    @property
    def total(self) -> int:
        """Steps ever appended, the forgotten ones included."""
        return self._total

    def last(self, count: int = 1) -> list[StepRecord]:
        """The newest `count` records, oldest of them first."""
        return list(self._records)[-count:] if count > 0 else []

    def dump(self) -> list[StepRecord]:
        """All kept records, oldest first."""
        return list(self._records)

    def summary(self) -> StepSummary:
        records = self.dump()
        if not records:
            return StepSummary()
        walls = sorted(record.wall_s for record in records)
        wall_s, schedule_s = sum(walls), sum(record.schedule_s for record in records)
        prefill = sum(record.prefill_tokens for record in records)
        decode_batches = [record.decode_batch for record in records if record.decode_batch]
        decode = sum(decode_batches)
        return StepSummary(
            steps=len(records),
            prefill_tokens=prefill,
            decode_tokens=decode,
            wall_s=wall_s,
            schedule_s=schedule_s,
            mean_decode_batch=decode / len(decode_batches) if decode_batches else 0.0,
            p50_step_ms=1e3 * _nearest_rank(walls, 0.50),
            p99_step_ms=1e3 * _nearest_rank(walls, 0.99),
            tokens_per_s=(prefill + decode) / wall_s if wall_s > 0 else 0.0,
            schedule_share=schedule_s / (wall_s + schedule_s) if wall_s + schedule_s > 0 else 0.0,
        )

    def write_jsonl(self, path: Path) -> int:
        """Write the kept records, one JSON object per line; returns how many. The file appears whole."""
        records = self.dump()
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as out:
                for record in records:
                    out.write(json.dumps(record.as_dict()) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return len(records)


def _nearest_rank(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    rank = -(-len(ordered) * share // 1)  # ceiling
    return ordered[max(int(rank), 1) - 1]
