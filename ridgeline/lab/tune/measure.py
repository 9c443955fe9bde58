"""ServerMeasure: the figures of one configuration, from a server started for it and a bench run against it.

Called by `climb` in `ridgeline tune`. One server at a time, fresh for every run, so that all start alike: no
cached prefix, no touched memory. Both halves of a round get the same traffic. Runs are kept beside the
ledger, for `ridgeline bench report` and `compare`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop, RequestDeadlines
from ridgeline.lab.bench.figures.metrics import flat
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.progress import Progress, shown
from ridgeline.lab.bench.run import in_loop, run_bench
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.slo import Slo
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.lab.traffic.source import build_traffic
from ridgeline.lab.tune.climb import NotMeasured, Report, RunId
from ridgeline.lab.tune.ledger import Settings
from ridgeline.lab.tune.servers import TunedServer
from ridgeline.options import check_values

INVALID_TWICE = 2  # runs limited by the client before a configuration is abandoned


@dataclass(frozen=True, slots=True)
class Workload:
    """The load on every server. Stored in the ledger's header."""

    traffic: TrafficOptions
    concurrency: int | None  # closed loop; None: requests have planned times
    warmup: int
    run_s: float  # maximum seconds of a run
    ready_s: float = 180.0  # maximum seconds for a server to become ready
    keep_invalid: bool = False  # also count runs in which the client was too slow

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise BadInput(f"--concurrency must be at least 1, got {self.concurrency}")
        if self.warmup < 0:
            raise BadInput(f"--warmup must not be negative, got {self.warmup}")
        if not self.run_s > 0 or not self.ready_s > 0:
            raise BadInput("--run-s and --ready-s must be above 0")

    def as_dict(self) -> dict[str, Any]:
        plain = TrafficOptions()
        made = {k: v for k, v in asdict(self.traffic).items() if v != getattr(plain, k)}
        return asdict(self) | {"traffic": made}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        traffic = TrafficOptions(**check_values(TrafficOptions, values["traffic"]))
        return cls(**(values | {"traffic": traffic}))


class ServerMeasure:
    def __init__(
        self,
        model: str,
        workload: Workload,
        folder: Path,
        slo: Slo | None,
        report: Report,
        stream: TextIO | None = None,
    ) -> None:
        """stream: for a run's progress; None: not shown."""
        self._model, self._workload, self._folder = model, workload, folder
        self._slo, self._report, self._stream = slo, report, stream
        build_traffic(workload.traffic)  # validates it before a server is started

    def __call__(self, settings: Settings, which: RunId) -> dict[str, float]:
        for attempt in range(1, INVALID_TWICE + 1):
            result = self._once(settings, which)
            if result.validity.valid or self._workload.keep_invalid:
                break
            reasons = "; ".join(result.validity.reasons)
            if attempt == INVALID_TWICE:
                raise NotMeasured("invalid", f"the client was the bottleneck: {reasons}")
            self._report(f"repeating the run: the client was the bottleneck: {reasons}")
        return {name: value for name, value in flat(result.summary).items() if math.isfinite(value)}

    def _once(self, settings: Settings, which: RunId) -> BenchResult:
        folder = self._folder / f"{which.trial:03d}-{which.round + 1}{which.arm}"
        with TunedServer(self._model, settings, folder, self._workload.ready_s) as server:
            try:
                with shown(self._stream) if self._stream else nullcontext(_silent) as on_progress:
                    result = in_loop(run_bench(self._config(server.url, which), on_progress))
            except BadInput:
                raise
            except LabError as error:
                server.check_alive()
                raise NotMeasured("died", str(error)) from error
            result.save(folder)
            if result.interrupted:
                raise KeyboardInterrupt
            server.check_alive()
        if not result.summary.ok:
            causes = ", ".join(result.summary.causes) or "nothing was sent"
            raise NotMeasured("died", f"no request was answered: {causes}")
        return result

    def _config(self, url: str, which: RunId) -> BenchConfig:
        workload = self._workload
        traffic = replace(workload.traffic, seed=workload.traffic.seed + which.round)
        closed = workload.concurrency
        return BenchConfig(
            url=url,
            traffic=build_traffic(traffic),
            mode=OpenLoop() if closed is None else ClosedLoop(closed),
            name=f"trial {which.trial}, round {which.round + 1}{which.arm.upper()}",
            seed=traffic.seed,
            warmup=workload.warmup,
            slo=self._slo,
            duration_s=workload.run_s,
            deadlines=RequestDeadlines(run_s=2 * workload.run_s),
        )


def _silent(progress: Progress) -> None:
    """Discards progress."""
