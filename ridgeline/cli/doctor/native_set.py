"""The native library's instruction set, what the processor lacks for better ones, and what that costs."""

from __future__ import annotations

from ridgeline.cli.doctor import measure
from ridgeline.cli.doctor.finding import Finding

ISA_VARIABLE = "RIDGELINE_ISA"  # as in ops.cpu.library, which loads numpy

# The native library's sets by the extension that each needs, best last.
NATIVE_X86 = {
    "avx2": "AVX2",
    "avxvnni": "AVX-VNNI",
    "avx512vnni": "AVX-512 VNNI",
    "avx512": "AVX-512 BF16",
    "amx": "AMX",
}
NATIVE_ARM = {"neon": "NEON", "dotprod": "dot product", "i8mm": "I8MM"}
# What a set costs beside better ones: products of 256 rows, from docs/performance/cpu-ledger.md.
COSTS = {
    "avx512": "without AMX, long prompts are computed at about 0.6 of the rate with it",
    "avx512vnni": "without BF16, attention and bf16 weights are computed in float32",
    "avxvnni": "without AVX-512, prompts are multiplied at 0.6 of its rate",
    "avx2": "without VNNI, prompts are multiplied at 0.8 (AVX-VNNI) and 0.45 (AVX-512) of the rate with it",
    "portable": "no vector unit that the kernels support: expect a fraction of the speed",
}


def better_sets(isa: str) -> list[str]:
    """The extensions that a processor needs for better sets than `isa`."""
    for known in (NATIVE_X86, NATIVE_ARM):
        if isa in known:
            return list(known.values())[list(known).index(isa) + 1 :]
    return []


def check_native(measured: measure.Measured) -> Finding:
    """The instruction set in use, what better sets this processor lacks, and what that costs."""
    found = measured.values
    if "native_isa" not in found:
        failure = measured.failure.rpartition("Error: ")[2]
        advice = "models are served by torch, several times slower: install g++ and ridgeline again"
        if ISA_VARIABLE in failure:  # it names a set that does not run here
            advice = f"unset {ISA_VARIABLE}: the best set of this machine is then used"
        return Finding("missing", "native", failure or "not found", advice)
    isa, best = found["native_isa"], found["native_isas"][0]
    value, cost = f"{isa}, {found['threads']} threads", COSTS.get(isa, "")
    if isa != best:
        return Finding(
            "slow",
            "native",
            f"{value}, by {ISA_VARIABLE}; {best} runs here too",
            f"unset {ISA_VARIABLE} to use {best}" + f"; {cost}" * bool(cost),
        )
    others, missing = found["native_isas"][1:], better_sets(isa)
    value += f" (also runs: {', '.join(others) or 'none'})"
    if missing:
        value += f"; this processor lacks {', '.join(missing)}"
    return Finding("slow" if isa == "portable" else "ok", "native", value, cost)
