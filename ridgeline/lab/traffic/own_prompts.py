"""The user's prompts: JSON lines with `prompt` or `messages`, and an optional `max_tokens`.

Read by `source` for --traffic prompts:FILE. They have no times, and the server counts their lengths. Invalid
lines are reported like those of traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.trace_rows import Trace


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def read_prompts(path: Path, output_tokens: int, *, skip_bad_rows: bool = False) -> Traffic:
    """output_tokens: for lines without max_tokens."""
    trace = Trace(path, skip_bad_rows)
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    for number, line in trace.decoded(decoder):
        if (line.prompt is None) == (line.messages is None):
            trace.bad(number, "needs either prompt or messages")
        elif not (line.prompt or line.messages):
            trace.bad(number, "has an empty prompt")
        elif line.max_tokens is not None and line.max_tokens < 1:
            trace.bad(number, f"max_tokens is {line.max_tokens}, not at least 1")
        else:
            said = line.prompt if line.messages is None else tuple(line.messages)
            requests.append(PlannedRequest(0.0, 0, line.max_tokens or output_tokens, said=said))
    trace.refuse_bad(has_rows=bool(requests))
    notes = (*trace.notes, "prompts are sent unchanged: the server counts their tokens")
    return Traffic(path.stem, tuple(requests), notes=notes)
