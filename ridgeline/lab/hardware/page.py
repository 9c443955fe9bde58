"""The table of chips as a page: `python -m ridgeline.lab.hardware.page` writes docs/hardware.md.

A test checks that the page matches the table.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.lab.hardware.chip import Chip
from ridgeline.lab.hardware.table import CHIPS, GIB, GIGA, TERA

PAGE = Path("docs") / "hardware.md"
NONE = "–"
COLUMNS = (
    "chip", "memory GiB", "TB/s", "bf16", "fp8", "fp4", "int8", "link GB/s", "network GB/s", "chips per node",
    "W", "$/h",
)  # fmt: skip
UNITS = ("bf16", "fp8", "fp4", "int8")
HEAD = """<!-- Written by `python -m ridgeline.lab.hardware.page` from ridgeline/lab/hardware/table.py. -->
# Hardware

What the planner takes each accelerator to be able to do at most, one chip, with a source for every figure.

```python
from ridgeline.lab.hardware.find_chip import find_chip

find_chip("h200").ridge("fp8")  # 412: FLOP per byte at which arithmetic and memory take equally long
find_chip("cpu")  # the processor this runs on, as measured
```

- **Dense figures only.** Tables of others mix them with figures for 2:4 sparsity, which are twice as high and
  which no served model reaches. Where a maker publishes the sparse figure alone, half of it stands here, and
  the source says so.
- A format that a chip has no unit for is computed in the next wider one: 4-bit weights on an H200 are widened
  and multiplied as bf16.
- `cpu` is this machine: bandwidth and arithmetic as `ridgeline doctor --calibrate` measured and kept them, or
  as measured on the spot in four seconds.
- Prices are what one chip rents for on demand, where a list could be cited; they move, so `ridgeline plan`
  takes yours (`--gpu-price`).
- Link: to the chips of the same node; network: to other nodes; both per chip and in one direction.
"""


def page() -> str:
    lines = [HEAD, _row(*COLUMNS)]
    lines.append(_row(*["---", *["---:"] * (len(COLUMNS) - 1)]))
    lines += [_figures(chip) for chip in CHIPS]
    lines += [
        "",
        "bf16 to int8 in TFLOP/s (int8: TOP/s). GB200 and GB300: 72 chips of a rack share the link.",
        "",
    ]
    lines += ["## Ridge: FLOP per byte from which arithmetic binds", ""]
    lines += [
        _row("chip", "bf16 weights", "fp8 weights", "nvfp4 weights"),
        _row("---", "---:", "---:", "---:"),
    ]
    lines += [
        _row(chip.name, *(f"{chip.ridge(name):,.0f}" for name in ("bfloat16", "fp8", "nvfp4")))
        for chip in CHIPS
    ]
    lines += ["", "## Sources", ""]
    for chip in CHIPS:
        lines += [f"**{chip.name}**: {chip.title}", *_sources(chip), ""]
    return "\n".join(lines).rstrip() + "\n"


def _figures(chip: Chip) -> str:
    links = (chip.link_bytes_per_s, chip.internode_bytes_per_s)
    return _row(
        f"`{chip.name}`",
        f"{chip.memory_bytes / GIB:,.0f}",
        f"{chip.bytes_per_s / TERA:g}",
        *(_tera(chip.flops.get(unit)) for unit in UNITS),
        *(NONE if rate is None else f"{rate / GIGA:,.0f}" for rate in links),
        str(chip.gpus_per_node),
        NONE if chip.watts is None else f"{chip.watts:,.0f}",
        NONE if chip.usd_per_hour is None else f"{chip.usd_per_hour:.2f}",
    )


def _tera(rate: float | None) -> str:
    if rate is None:
        return NONE
    return f"{rate / TERA:,.0f}" if rate >= 1000 * TERA else f"{rate / TERA:.4g}"


def _sources(chip: Chip) -> list[str]:
    """Cells grouped by source; the most common source last, as "all else"."""
    by_source: dict[str, list[str]] = {}
    for cell, source in chip.sources.items():
        by_source.setdefault(source, []).append(cell)
    most = max(by_source, key=lambda source: len(by_source[source]))
    apart = [
        f"- {', '.join(f'`{cell}`' for cell in cells)}: {source}"
        for source, cells in by_source.items()
        if source != most
    ]
    return ["", *apart, f"- {'all else' if apart else 'all'}: {most}"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written")
