"""Prometheus' text format: written for one worker, and read back to make one page of several workers' pages.

`Page` is filled by GatewayMetrics when it is scraped; `Merged` belongs to the supervisor. Both know the
families by one table, which says of each how workers' values become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "ridgeline_gateway_"

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    kind: Kind
    doc: str
    merge: Literal["sum", "max", "min"] = "sum"


class Page:
    """One exposition text under way. Families come in the order in which they are first named."""

    def __init__(self, families: Mapping[str, Family]) -> None:
        self._families = families
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, value: float, labels: Labels = ()) -> None:
        self._of(name).append(f"{PREFIX}{name}{_braces(labels)} {_number(value)}")

    def add_histogram(
        self, name: str, edges: Iterable[float], counts: list[int], total: float, labels: Labels = ()
    ) -> None:
        """counts: one for each edge and one for what lies above the last; not cumulative."""
        lines, running = self._of(name), 0
        for edge, count in zip((*map(_number, edges), "+Inf"), counts, strict=True):
            running += count
            lines.append(f"{PREFIX}{name}_bucket{_braces((*labels, ('le', edge)))} {running}")
        lines.append(f"{PREFIX}{name}_sum{_braces(labels)} {_number(total)}")
        lines.append(f"{PREFIX}{name}_count{_braces(labels)} {running}")

    def text(self) -> str:
        parts = []
        for name, lines in self._lines.items():
            family = self._families[name]
            parts += [
                f"# HELP {PREFIX}{name} {family.doc}",
                f"# TYPE {PREFIX}{name} {family.kind}",
                *lines,
            ]
        return "\n".join(parts) + "\n"

    def _of(self, name: str) -> list[str]:
        if name not in self._lines:
            self._lines[name] = []
            assert name in self._families, name
        return self._lines[name]


@dataclass
class _Sums:
    """Samples by family: each line's name with its labels, as written, and its value."""

    families: dict[str, dict[str, float]] = field(default_factory=dict)
    heads: dict[str, tuple[str, str]] = field(default_factory=dict)  # the lines HELP and TYPE


class Merged:
    """All workers' pages as one. What a worker had counted stays counted after its end."""

    def __init__(self, families: Mapping[str, Family]) -> None:
        self._families = families
        self._ended = _Sums()  # counters and histograms of workers that are gone
        self._latest: dict[str, str] = {}

    def update(self, worker: str, text: str) -> None:
        """`worker` names one process, not its place: a replacement has another name."""
        self._latest[worker] = text

    def end(self, worker: str) -> None:
        """It is gone. What it counted after its last page is lost; what it showed is not."""
        text = self._latest.pop(worker, None)
        if text is not None:
            self._add(self._ended, text, gauges=False)

    def text(self) -> str:
        sums = _Sums(
            {name: dict(rows) for name, rows in self._ended.families.items()}, dict(self._ended.heads)
        )
        for text in self._latest.values():
            self._add(sums, text, gauges=True)
        lines: list[str] = []
        for name, rows in sums.families.items():
            lines += [*sums.heads[name], *(f"{sample} {_number(value)}" for sample, value in rows.items())]
        return "\n".join(lines) + "\n"

    def _add(self, sums: _Sums, text: str, gauges: bool) -> None:
        name, family, help_line = "", Family("counter", ""), ""
        for line in text.rstrip("\n").split("\n"):  # a label may hold what else ends lines for Python
            if line.startswith("# HELP "):
                help_line = line
            elif line.startswith("# TYPE "):
                name = line.split(" ")[2]
                family = self._families[name.removeprefix(PREFIX)]
                if gauges or family.kind != "gauge":
                    sums.heads.setdefault(name, (help_line, line))
                    sums.families.setdefault(name, {})
            elif gauges or family.kind != "gauge":
                sample, _, number = line.rpartition(" ")
                rows, value = sums.families[name], float(number)
                if sample not in rows:
                    rows[sample] = value
                elif family.merge == "sum":
                    rows[sample] += value
                else:
                    rows[sample] = (max if family.merge == "max" else min)(rows[sample], value)


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
