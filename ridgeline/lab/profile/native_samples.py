"""Maps sampled stacks to operators of the native library. Pure logic over `sampling.Samples`.

The library executes a whole step in one call and has no timers, so its operators are identified by the stack
of the calling thread, one of the threads that share every operator's work. Its waits for other threads are a
separate row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from ridgeline.lab.profile.rows import OperatorRow, summed
from ridgeline.lab.profile.sampling import Samples, Stack
from ridgeline.lab.profile.work import Work

STEP = "rl_step_execute"
WAITING, HOST = "waiting for other threads", "the host: Python around the step"
# Innermost first: matched against the stack below the step's call.
_BY_PIECE = (
    (("Phase::nap", "Phase::pause", "nanosleep"), WAITING),
    (("prepare_", "rms_norm", "quantize_limbs"), "norms, and inputs of linears"),
    (("rotate_and_store", "store_key", "store_value", "::rope"), "rope, KV write"),
    (("Step::attend", "attend_kv"), "attention"),
    (("gated_mlp",), "FFN: gate and up"),
    (("Step::predict",), "LM head"),
    (("Step::linear", "Step::project"), "qkv, output, FFN: down"),
)
_WORK = {
    "attention": ("attention",),
    "rope, KV write": ("kv_write",),
    "FFN: gate and up": ("gate_up",),
    "LM head": ("lm_head",),
    "qkv, output, FFN: down": ("qkv", "output", "down"),
}


def operator_of(stack: Stack) -> str:
    place = next((at for at, frame in enumerate(stack) if frame.startswith(STEP)), None)
    if place is None:
        return HOST
    below = " ".join(stack[place + 1 :])
    return next((name for pieces, name in _BY_PIECE if any(p in below for p in pieces)), "the rest of a step")


def operator_rows(samples: Samples, seconds: float, work: Mapping[str, Work]) -> list[OperatorRow]:
    """Shares of the samples as shares of `seconds`, the unsampled time of the steps of `work`."""
    counts: Counter[str] = Counter()
    for stack, count in samples.stacks.items():
        counts[operator_of(stack)] += count
    total = max(1, samples.count)
    return [
        OperatorRow(name, seconds * count / total, None, summed(work, _WORK.get(name, ())))
        for name, count in counts.most_common()
    ]


def share_error(samples: Samples, share: float) -> float:
    """Half of the 95 % interval of a share, as a share."""
    return 1.96 * math.sqrt(share * (1 - share) / max(1, samples.count))
