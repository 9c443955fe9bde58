"""Readers of trace files: Azure's 2023 CSV, Mooncake's JSONL, our recordings, BurstGPT's CSV.

All return Traffic: times from 0, lengths, and shared prefixes if the file has them. Invalid rows are reported
by line (`trace_rows`). Traces contain no text.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.seeds import stream
from ridgeline.lab.traffic.trace_rows import Row, Trace

MOONCAKE_BLOCK_TOKENS = 512

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_azure(path: Path, *, skip_bad_rows: bool = False, seed: int = 0) -> Traffic:
    """TIMESTAMP, ContextTokens, GeneratedTokens: no text, no prefixes. The seed is not used."""
    trace = Trace(path, skip_bad_rows)
    _read_csv(trace, AZURE_COLUMNS, _date_s)
    return trace.traffic()


def read_burstgpt(path: Path, *, skip_bad_rows: bool = False, seed: int = 0) -> Traffic:
    """Seconds, "Request tokens", "Response tokens". Requests without an answer failed: they are left out."""
    trace = Trace(path, skip_bad_rows)
    _read_csv(trace, BURSTGPT_COLUMNS, float, may_be_unanswered=True)
    return trace.traffic(spread=stream(seed, "spread"))


class _MooncakeLine(msgspec.Struct):
    """timestamp in milliseconds. The last two fields are ours; Mooncake's blocks have 512 tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    model: str = ""


def read_mooncake(path: Path, *, skip_bad_rows: bool = False, seed: int = 0) -> Traffic:
    """timestamp, input_length, output_length, hash_ids: an id for each block of 512 tokens from the start.

    The published trace's timestamps have steps of 3 s; arrivals are spread randomly within each, by the seed.
    """
    trace = Trace(path, skip_bad_rows)
    block_tokens = _read_blocks(trace)
    return trace.traffic(block_tokens, spread=stream(seed, "spread"))


def read_recorded(path: Path, *, skip_bad_rows: bool = False, seed: int = 0) -> Traffic:
    """Recordings of `ridgeline serve --record-traffic`: Mooncake's fields with exact times, in the order in
    which requests finished. Requests without output are left out, as they cannot be replayed.
    """
    trace = Trace(path, skip_bad_rows)
    block_tokens = _read_blocks(trace, may_be_unanswered=True)
    return trace.traffic(block_tokens, is_sorted=False)


READERS: dict[str, Callable[..., Traffic]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
    "recorded": read_recorded,
    "burstgpt": read_burstgpt,
}


def _read_blocks(trace: Trace, may_be_unanswered: bool = False) -> int:
    """The rows of a file with hash ids, and the tokens per block."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    block_tokens, unanswered = 0, 0
    models: set[str] = set()
    for number, row in trace.decoded(decoder):
        if may_be_unanswered and row.output_length == 0:
            unanswered += 1
            continue
        block_tokens = block_tokens or row.block_tokens
        most = -(-row.input_length // max(row.block_tokens, 1))
        if row.block_tokens != block_tokens or block_tokens < 1:
            trace.bad(number, f"block_tokens is {row.block_tokens}, but {block_tokens} in earlier rows")
        elif len(row.hash_ids) > most:
            trace.bad(
                number, f"has {len(row.hash_ids)} hash_ids, but {row.input_length} tokens are {most} blocks"
            )
        else:
            at = row.timestamp / 1000
            models.add(row.model)
            trace.add(Row(number, at, row.input_length, row.output_length, tuple(row.hash_ids)))
    trace.note_unanswered(unanswered)
    if len(models) > 1:
        trace.notes.append(f"requests were for {len(models)} models: {', '.join(sorted(models))}")
    return block_tokens


def _read_csv(
    trace: Trace,
    columns: tuple[str, str, str],
    seconds: Callable[[str], float],
    may_be_unanswered: bool = False,
) -> None:
    """Rows with the columns time, input tokens, output tokens.

    Split by hand: these traces quote nothing, and with one stray quote a CSV reader would consume all lines
    up to the next.
    """
    lines = trace.lines()
    number, head = next(lines, (1, ""))
    names = _cells(head)
    missing = [column for column in columns if column not in names]
    if missing:
        raise BadInput(
            f"{trace.path}: line {number} should name the columns {', '.join(columns)}; "
            f"{', '.join(missing)} not found"
        )
    places = [names.index(column) for column in columns]
    unanswered = 0
    for number, line in lines:
        cells = _cells(line)
        if len(cells) != len(names):
            trace.bad(number, f"has {len(cells)} columns, not {len(names)}")
            continue
        moment, read, written = (cells[place] for place in places)
        if may_be_unanswered and written == "0":
            unanswered += 1
            continue
        try:
            trace.add(Row(number, seconds(moment), _count(read), _count(written)))
        except (ValueError, OverflowError):
            trace.bad(number, f"{_first_wrong(columns, (moment, read, written), seconds)} cannot be read")
    trace.note_unanswered(unanswered)


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError(text)
    return int(text)


def _first_wrong(
    columns: tuple[str, str, str], cells: tuple[str, str, str], seconds: Callable[[str], float]
) -> str:
    for column, cell, read in zip(columns, cells, (seconds, _count, _count), strict=True):
        try:
            read(cell)
        except (ValueError, OverflowError):
            return f"{column} {cell[:30]!r}"
    raise AssertionError("one of them could not be read")


def _date_s(text: str) -> float:
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
