"""The text that `ridgeline serve` prints when ready: start-up times, memory receipt, limits, address."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline import __version__
from ridgeline.engine.limits.steady import UNCERTAIN
from ridgeline.engine.start.memory_receipt import receipt_of

if TYPE_CHECKING:
    from ridgeline.engine.client.client import AsyncClient
    from ridgeline.models.files.generation_config import SamplingDefaults

GIB = 1 << 30


def startup_lines(client: AsyncClient, name: str) -> str:
    """The start-up budget and the memory receipt, beside the limits of the machine."""
    hello = client.hello
    seconds = " · ".join(f"{stage} {spent:.2f}" for stage, spent in hello.seconds.items())
    lines = [
        f"ridgeline {__version__} · {name} · context {hello.max_context:,}",
        f"  backend  {hello.backend}",
        *(f"           {note}" for note in hello.notes),
        f"  start    {seconds} · ready {since_process_start():.2f} s",
        *_memory_lines(hello.bytes, hello.kv_tokens),
        *_limit_lines(hello.limits),
        *_sampling_lines(hello.sampling),
    ]
    return "\n".join(lines)


def _limit_lines(limits: dict[str, float]) -> list[str]:
    """The machine's upper limits for a decoder or an encoder; none where they are unknown."""
    if not limits:
        return []
    uncertainty = limits.get("uncertainty", 0.0)
    about = "~" if uncertainty > UNCERTAIN else ""
    if "embed_tokens_per_s" in limits:
        line = (
            f"  limits   {about}{limits['embed_tokens_per_s']:.0f} tok/s in texts of 64 tokens "
            f"({about}{_rate(limits['flops_per_s'], 'FLOP/s', 0)} in float32)"
        )
    else:
        line = (
            f"  limits   decode {about}{limits['decode_tokens_per_s']:.0f} tok/s for one stream "
            f"({about}{_rate(limits['read_bytes_per_s'], 'B/s', 1)} read) · prefill "
            f"{about}{limits['prefill_tokens_per_s']:.0f} tok/s "
            f"({about}{_rate(limits['flops_per_s'], 'FLOP/s', 0)})"
        )
    if not about:
        return [line]
    return [
        line,
        f"           ~: measured on a busy machine, at least {uncertainty:.0%} uncertain, probably too low; "
        "run `ridgeline doctor --calibrate` on an idle one to store better figures",
    ]


def _sampling_lines(defaults: SamplingDefaults) -> list[str]:
    """The sampling defaults, where they differ from the API's."""
    return [f"  sampling {defaults.text()} by default ({defaults.source})"] if defaults.values() else []


def serving_line(url: str) -> str:
    return f"  serving  {url}/v1 · Ctrl-C drains and stops"


def _memory_lines(sizes: dict[str, int], kv_tokens: int) -> list[str]:
    receipt = receipt_of(sizes)
    if receipt is not None:
        parts, whole = receipt.lines()
        return [f"  memory   {parts}", f"           KV cache of {kv_tokens:,} tokens · {whole}"]
    if not kv_tokens:  # an encoder keeps nothing between requests
        return [f"  memory   weights {sizes['weights'] / GIB:.2f} · rest {sizes['rest'] / GIB:.2f} GiB"]
    drafter = ""
    if "drafter" in sizes:
        drafter = f"drafter {sizes['drafter'] / GIB:.2f} · its KV cache {sizes['drafter_kv'] / GIB:.2f} · "
    return [
        f"  memory   weights {sizes['weights'] / GIB:.2f} · KV cache {sizes['kv'] / GIB:.2f} "
        f"({kv_tokens:,} tokens) · {drafter}rest {sizes['rest'] / GIB:.2f} GiB"
    ]


def _rate(per_s: float, unit: str, digits: int) -> str:
    return f"{per_s / 1e12:.2f} T{unit}" if per_s >= 1e12 else f"{per_s / 1e9:.{digits}f} G{unit}"


def since_process_start() -> float:
    """Seconds since this process was created, including interpreter start and imports."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()
