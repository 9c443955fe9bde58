"""Steps as a trace for Perfetto: planning and forward passes on a timeline, with their work.

For backends whose steps torch's profiler cannot see into. Written by `run` from the engine's records, without
slowing anything down.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.lab.profile.work import Steps

PLANNING, FORWARD = 1, 2  # the two lines of the trace


def write_trace(steps: Steps, name: str, path: Path) -> Path:
    path.write_text(json.dumps({"traceEvents": _events(steps, name)}), encoding="utf-8")
    return path


def _events(steps: Steps, name: str) -> list[dict[str, Any]]:
    """Chrome's trace events, microseconds from the first step's planning."""
    lines = {PLANNING: "planning", FORWARD: "forward pass"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"engine steps: {name}"}},
        *({"ph": "M", "name": "thread_name", "pid": 1, "tid": line, "args": {"name": words}}
          for line, words in lines.items()),
    ]  # fmt: skip
    zero = steps.records[0].start if steps.records else 0.0
    for record in steps.records:
        begun, end = record.start - zero, record.start - zero + record.schedule_s + record.wall_s
        what = {
            "prefill_tokens": record.prefill_tokens,
            "decode_batch": record.decode_batch,
            "decode_context": record.decode_context,
        }
        for line, at, seconds in (
            (PLANNING, begun, record.schedule_s),
            (FORWARD, end - record.busy_s, record.busy_s),  # of overlapping steps, their exclusive part
        ):
            events.append(
                {
                    "ph": "X",
                    "name": f"{lines[line]} {record.step_id}",
                    "pid": 1,
                    "tid": line,
                    "ts": at * 1e6,
                    "dur": seconds * 1e6,
                    "args": what,
                }
            )
    return events
