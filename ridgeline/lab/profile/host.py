"""Where the processes of a running server spend time: each sampled by py-spy, concurrently.

For `ridgeline profile --pid`. With the server's address, its step records show how much of that time its
engines computed. Never starts or stops a server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.profile.sampling import (
    FunctionRow,
    Recording,
    Samples,
    family,
    speedscope,
    top_functions,
)
from ridgeline.lab.profile.table import function_lines
from ridgeline.lab.profile.work import idle_share
from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import BrokenOff, Unreachable
from ridgeline.telemetry.stats import StepRecord

ANSWER_S = 10.0  # timeout for the server's step records


@dataclass(frozen=True, slots=True)
class ProcessProfile:
    pid: int
    role: str  # front, engine or process
    samples: int  # of non-idle stacks
    functions: list[FunctionRow]
    file: str | None


@dataclass(frozen=True, slots=True)
class HostProfile:
    seconds: int
    processes: list[ProcessProfile]
    not_sampled: list[str]  # reasons for skipped children: ended, or not a Python process
    steps: int | None  # of its engine in that time; None: no server address given
    idle_share: float | None  # of that time, the part between two steps


def profile_processes(
    pid: int, seconds: int, out: Path | None, *, native: bool = False, url: str | None = None
) -> HostProfile:
    """Sample the process and its descendants for some seconds. LabError if the process cannot be sampled."""
    started = time.monotonic()
    recordings: list[Recording] = []
    seen: dict[int, Samples] = {}
    not_sampled: list[str] = []
    try:
        roles = family(pid)
        for each in roles:
            try:
                recordings.append(Recording(each, seconds, native=native))
            except BadInput:  # it has just ended
                if each == pid:
                    raise
        for recording in recordings:
            try:
                seen[recording.pid] = recording.finish()
            except LabError as error:
                if recording.pid == pid:
                    raise
                not_sampled.append(f"{roles[recording.pid]} {recording.pid}: {error}")
    finally:
        for recording in recordings:
            recording.close()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    processes = [_process(each, roles[each], samples, out) for each, samples in seen.items()]
    if url is None:
        return HostProfile(seconds, processes, not_sampled, None, None)
    # All processes on a machine share the monotonic clock.
    records = [record for record in read_steps(url) if record.start >= started]
    return HostProfile(seconds, processes, not_sampled, len(records), idle_share(records))


def host_lines(profile: HostProfile, top: int = 12) -> Iterator[str]:
    for process in profile.processes:
        yield f"== {process.role}, process {process.pid}: {process.samples} non-idle samples"
        yield from function_lines(process.functions[:top])
        if process.file is not None:
            yield f"wrote {process.file}"
    yield from (f"not sampled: {why}" for why in profile.not_sampled)
    if profile.steps is not None:
        share = "–" if profile.idle_share is None else f"{profile.idle_share:.1%}"
        yield f"{profile.steps} steps in that time; {share} of it without a forward pass"


def read_steps(url: str) -> list[StepRecord]:
    """The step records that a server still holds, of its first model."""
    client = BlockingClient(url, timeout_s=ANSWER_S)
    address = f"{client.url}/debug/steps"
    try:
        answer = client.ask("GET", "/debug/steps")
        if answer.status != 200:
            raise LabError(f"{address} answered {answer.status}")
        return [StepRecord(**json.loads(line)) for line in answer.body.splitlines() if line.strip()]
    except (Unreachable, BrokenOff, ValueError, TypeError) as error:
        raise LabError(f"{address} did not answer with step records: {error}") from error


def _process(pid: int, role: str, samples: Samples, out: Path | None) -> ProcessProfile:
    path = None if out is None else out / f"{role}-{pid}.speedscope.json"
    if path is not None:
        path.write_text(json.dumps(speedscope(samples, f"{role} {pid}")), encoding="utf-8")
    return ProcessProfile(
        pid, role, samples.count, top_functions(samples), None if path is None else str(path)
    )
