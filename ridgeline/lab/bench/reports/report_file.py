"""report.html in a run's or a sweep's folder, written after every run and by `ridgeline bench report`."""

from __future__ import annotations

from pathlib import Path

from ridgeline.lab.bench.figures.result import RUN_FILE, BenchResult
from ridgeline.lab.bench.reports.report import report_page
from ridgeline.lab.bench.sweeps.report import sweep_page
from ridgeline.lab.bench.sweeps.sweep import SWEEP_FILE, SweepResult
from ridgeline.lab.errors import BadInput

REPORT_FILE = "report.html"


def write_report(folder: Path, path: Path | None = None) -> Path:
    """For a run or a sweep; `path` defaults to report.html in the folder."""
    if (folder / SWEEP_FILE).exists():
        text = sweep_page(SweepResult.load(folder), folder)
    elif (folder / RUN_FILE).exists():
        text = report_page(BenchResult.load(folder))
    else:
        raise BadInput(f"{folder}: contains neither a run ({RUN_FILE}) nor a sweep ({SWEEP_FILE})")
    path = folder / REPORT_FILE if path is None else path
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path
