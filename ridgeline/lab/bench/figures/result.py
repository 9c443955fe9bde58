"""BenchResult: a complete run, stored in a folder: run.json (settings, summary, validity) and requests.jsonl.

Written by `ridgeline bench`, sweeps and the tuner; read by report, compare, export and `plan verify`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.lab.bench.figures.ceilings import Share
from ridgeline.lab.bench.figures.metrics import Summary
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.validity import Validity
from ridgeline.lab.errors import BadInput

VERSION = 1
RUN_FILE, REQUESTS_FILE = "run.json", "requests.jsonl"


class BenchResult(msgspec.Struct, omit_defaults=True):
    """settings: the configuration and what was determined before the run. shares: rates beside the machine's
    limits, if the server reports them. selftest: the client's result before the run, or that it was skipped.
    """

    settings: dict[str, Any]
    summary: Summary
    validity: Validity
    records: list[RequestRecord] = []  # in requests.jsonl, not in run.json
    shares: list[Share] = []
    selftest: dict[str, Any] = {}
    started_at: str = ""  # ISO 8601, UTC
    seconds: float = 0.0  # of the run, warm-up apart
    interrupted: bool = False
    version: int = VERSION

    def save(self, folder: Path) -> None:
        """Into a folder, created if missing. Each file appears complete or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        run = msgspec.to_builtins(msgspec.structs.replace(self, records=[]))
        run["version"] = self.version  # even if it is the default
        _write(folder / REQUESTS_FILE, msgspec.json.Encoder().encode_lines(self.records))
        _write(folder / RUN_FILE, msgspec.json.format(msgspec.json.encode(_spelled(run)), indent=1) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> BenchResult:
        """Raises BadInput for missing or invalid files, with the line."""
        path = folder / RUN_FILE
        try:
            raw = path.read_bytes()
            lines = (folder / REQUESTS_FILE).read_bytes().splitlines()
        except OSError as error:
            raise BadInput(
                f"{error.filename}: cannot be read ({error.strerror}): not a run's folder?"
            ) from error
        try:
            # Not strict: JSON has no infinity, so infinite numbers are written as "inf".
            result = msgspec.json.decode(raw, type=cls, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: not a run of this version: {error}") from error
        if result.version != VERSION:
            raise BadInput(f"{path}: written as version {result.version}, this is version {VERSION}")
        decoder = msgspec.json.Decoder(RequestRecord)
        for number, line in enumerate(lines, start=1):
            try:
                result.records.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadInput(f"{folder / REQUESTS_FILE}, line {number}: {error}") from error
        return result


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(inner) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
