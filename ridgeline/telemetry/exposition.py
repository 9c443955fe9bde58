"""Prometheus' text format: written for one worker, and parsed to merge the pages of several workers.

The gateway's worker and the fleet's router fill a `Page` for each scrape; `Merged` belongs to the gateway's
supervisor. Both use one table of families, which also gives the way to merge workers' values.
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
    """Builds one exposition text. Families come in the order of their first use.

    process: added to counters and histograms. A page that merges processes then shows a series for each of
    them, and the restart of one resets its series alone.
    """

    def __init__(self, families: Mapping[str, Family], prefix: str = PREFIX, process: Labels = ()) -> None:
        self._families, self._prefix, self._process = families, prefix, process
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, value: float, labels: Labels = ()) -> None:
        if self._families[name].kind == "counter":
            labels = (*labels, *self._process)
        self._of(name).append(f"{self._prefix}{name}{_braces(labels)} {_number(value)}")

    def add_histogram(
        self, name: str, edges: Iterable[float], counts: list[int], total: float, labels: Labels = ()
    ) -> None:
        """counts: one per edge and one above the last edge; not cumulative."""
        lines, running, labels = self._of(name), 0, (*labels, *self._process)
        for edge, count in zip((*map(_number, edges), "+Inf"), counts, strict=True):
            running += count
            lines.append(f"{self._prefix}{name}_bucket{_braces((*labels, ('le', edge)))} {running}")
        lines.append(f"{self._prefix}{name}_sum{_braces(labels)} {_number(total)}")
        lines.append(f"{self._prefix}{name}_count{_braces(labels)} {running}")

    def text(self) -> str:
        parts = []
        for name, lines in self._lines.items():
            family = self._families[name]
            parts += [
                f"# HELP {self._prefix}{name} {family.doc}",
                f"# TYPE {self._prefix}{name} {family.kind}",
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
    """All workers' pages merged into one. A worker's counts remain after its end."""

    def __init__(self, families: Mapping[str, Family]) -> None:
        self._families = families
        self._ended = _Sums()  # counters and histograms of workers that have ended
        self._latest: dict[str, str] = {}

    def update(self, worker: str, text: str) -> None:
        """`worker` names one process: a replacement has another name."""
        self._latest[worker] = text

    def end(self, worker: str) -> None:
        """The worker has ended. Counts after its last page are lost; those on it are kept."""
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
        for line in text.rstrip("\n").split(
            "\n"
        ):  # not splitlines: a label may hold other characters that Python takes for line ends
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
