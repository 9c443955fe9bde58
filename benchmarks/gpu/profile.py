"""Where a case's time goes on the device: its kernels by share of the time, beside what they achieved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.gpu import limits
from ridgeline.lab.profile.torch_capture import KERNEL_PARTS
from ridgeline.models.spec.cache_layout import CacheLayout

# Attention in two parts; the first piece of a name that fits counts.
ATTENTION = {
    "_decode_attend": "attention of decodes",
    "_attend_prefix": "attention of decodes",
    "_prefill_attend": "attention of prompts",
    "_attend_specialized": "attention of prompts",
    "_gather_kv": "attention of prompts",
}
PARTS = ATTENTION | {piece: part for piece, part in KERNEL_PARTS.items() if piece not in ATTENTION}


def part_of(kernel: str) -> str:
    return next((part for piece, part in PARTS.items() if piece in kernel.lower()), "other")


def print_profile(built: Any, run: Callable[[], float], case: str, top: int = 14) -> None:
    """Profile one run of the case; a profiled run is slower, so use only the shares and the kernel times."""
    from torch.profiler import ProfilerActivity, profile

    from ridgeline.ops.cuda.dependent_launch import PDL

    before = len(built.core.steps.dump())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall_s = run()
    records = built.core.steps.dump()[before:]
    seconds: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    for event in profiler.key_averages():
        if event.self_device_time_total > 0:  # calls of the host are listed too
            seconds[event.key] += event.self_device_time_total * 1e-6
            launches[event.key] += event.count
    total = sum(seconds.values())
    print(f"  {case}: kernels {total:.3f} s of {wall_s:.3f} s, {len(records)} steps")
    if PDL:
        print("    kernels start early and are counted while they wait; RIDGELINE_PDL=0 shows each alone")
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1])[:top]:
        each = 1e6 * spent / launches[name]
        print(f"    {100 * spent / total:5.1f} %  {launches[name]:7d} × {each:8.1f} µs  {name[:90]}")
    parts: defaultdict[str, float] = defaultdict(float)
    for name, spent in seconds.items():
        parts[part_of(name)] += spent
    for part, spent in sorted(parts.items(), key=lambda item: -item[1]):
        share, each_ms = 100 * spent / total, 1e3 * spent / max(1, len(records))
        achieved = rate(built.spec, records, part, spent)
        print(f"    {share:5.1f} %  {each_ms:8.3f} ms a step  {part}  {achieved}")


def rate(spec: Any, records: list[Any], part: str, spent: float) -> str:
    """What a part achieved: bytes that it must read or operations that it must do, over its time."""
    if part == "linears":
        tokens = sum(r.decode_batch + r.prefill_tokens for r in records)
        samples = sum(r.decode_batch + r.prefill_rows for r in records)
        weights = limits.BYTES * (spec.matmul_parameters + spec.vocab_size * spec.hidden_size) * len(records)
        flops = tokens * spec.matmul_flops_per_token + samples * spec.lm_head_flops
        return f"{weights / spent / 1e12:.2f} TB/s of weights, {flops / spent / 1e12:.0f} TFLOP/s"
    if part == "attention of decodes":
        kv = CacheLayout.of(spec, limits.BYTES).token_bytes * sum(r.decode_context for r in records)
        return f"{kv / spent / 1e12:.2f} TB/s of KV"
    if part == "attention of prompts":
        flops = sum(limits.prompt_attention_flops(spec, r) for r in records)
        return f"{flops / spent / 1e12:.0f} TFLOP/s"
    return ""
