"""Prefill attention at the shapes of 8B and 0.6B models: prompts, chunks over long contexts, short suffixes.

FLOPs are those of the causal half that must be computed. The peers are torch's SDPA backends on dense keys
and values of the same lengths. `python benchmarks/gpu_kernels.py --only prefill_attention`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.timing import Report, median_seconds
from ridgeline.ops.cuda.attention.gather_kv import PrefillScratch, gather_kv, make_prefill_scratch
from ridgeline.ops.cuda.attention.prefill_attention import PrefillConfig, prefill_attention, prefill_config
from ridgeline.ops.cuda.attention.prefill_plan import PrefillViews, plan_prefill

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
HEAD_DIM = 128
HEADS = {"8B": (32, 8), "0.6B": (16, 8)}
# name: (rows, tokens of a row in the step, context of a row)
CASES = {
    "2 x 4096 whole": (2, 4096, 4096),
    "8192 whole": (1, 8192, 8192),
    "8192 over 16384": (1, 8192, 16384),
    "8192 over 32768": (1, 8192, 32768),
    "16 x 512 whole": (16, 512, 512),
    "64 x 128 over 4224": (64, 128, 4224),
}
ODD_CASE = (3, 333, 1111)
CONFIGS = [
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(128, 128, 8, 2, gathered=True),
    PrefillConfig(64, 128, 4, 2, gathered=True),
    PrefillConfig(128, 128, 4, 2, specialized=True),
    PrefillConfig(128, 128, 4, 2, specialized=True, turns=True),
    PrefillConfig(128, 64, 4, 4, specialized=True),
]


@dataclass(frozen=True)
class Problem:
    """One step of equal rows, over a cache whose blocks lie in random order."""

    rows: int
    count: int
    context: int
    q: Tensor
    kv: Tensor
    tables: Tensor
    out: Tensor
    scratch: PrefillScratch

    def plan(self, config: PrefillConfig) -> PrefillViews:
        tile_tokens = config.block_m // (self.q.shape[1] // self.kv.shape[1])
        plan = plan_prefill(
            [self.count] * self.rows,
            [self.context] * self.rows,
            tile_tokens,
            table_rows=range(self.rows),
        )
        return plan.device_views(torch.from_numpy(plan.pack()).to(self.q.device))

    @property
    def flops(self) -> float:
        first = self.context - self.count
        keys = sum(range(first + 1, self.context + 1))
        return 4.0 * self.rows * keys * self.q.shape[1] * self.q.shape[2]

    def dense(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [H, count, D], keys and values [K, context, D] of a row."""
        blocks = self.tables[row, : -(-self.context // BLOCK_SIZE)].long()
        kv = self.kv[blocks].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, : self.context]
        q = self.q[row * self.count : (row + 1) * self.count].transpose(0, 1)
        return q, kv[0], kv[1]


def make_problem(
    case: tuple[int, int, int], heads: int, kv_heads: int, device: str, dim: int = HEAD_DIM
) -> Problem:
    rows, count, context = case
    blocks = -(-context // BLOCK_SIZE)
    kv = torch.randn(rows * blocks + 1, kv_heads, 2, BLOCK_SIZE, dim, device=device, dtype=DTYPE)
    tables = torch.randperm(rows * blocks, device=device).int().view(rows, blocks) + 1
    q = torch.randn(rows * count, heads, dim, device=device, dtype=DTYPE)
    scratch = make_prefill_scratch(rows * (context + 127), kv_heads, dim, DTYPE, device)
    return Problem(rows, count, context, q, kv, tables, torch.empty_like(q), scratch)


def launch_of(problem: Problem, config: PrefillConfig) -> Callable[[], None]:
    plan = problem.plan(config)
    scale = problem.q.shape[2] ** -0.5

    def launch() -> None:
        prefill_attention(
            problem.q,
            problem.kv,
            problem.tables,
            plan,
            problem.out,
            problem.scratch,
            scale=scale,
            config=config,
        )

    return launch


def check_last_row(report: Report, name: str, problem: Problem, tokens: int = 48) -> None:
    """The first and last tokens of the last row against float32; the whole output must be finite."""
    q, keys, values = (part.float() for part in problem.dense(problem.rows - 1))
    group = q.shape[0] // keys.shape[0]
    out = problem.out[-problem.count :].transpose(0, 1)
    for begin in (0, max(0, problem.count - tokens)):
        some = slice(begin, begin + min(tokens, problem.count))
        positions = torch.arange(problem.context, device=q.device)
        own = positions[problem.context - problem.count :][some]
        scores = q[:, some] @ keys.repeat_interleave(group, 0).mT * q.shape[2] ** -0.5
        scores.masked_fill_(positions[None, :] > own[:, None], -torch.inf)
        exact = scores.softmax(-1) @ values.repeat_interleave(group, 0)
        report.check(f"{name}, tokens from {begin}", out[:, some], exact)
    if not bool(problem.out.isfinite().all()):
        report.check(f"{name}, finite", problem.out, torch.zeros_like(problem.out))


def peers_of(problem: Problem) -> dict[str, Callable[[], object]]:
    """SDPA over dense keys and values, one per query head (its grouped form is slower, not faster)."""
    group = problem.q.shape[1] // problem.kv.shape[1]
    parts = [problem.dense(row) for row in range(problem.rows)]
    q = torch.stack([part[0] for part in parts]).contiguous()
    keys, values = (
        torch.stack([part[index] for part in parts]).repeat_interleave(group, 1).contiguous()
        for index in (1, 2)
    )
    square = problem.count == problem.context

    def sdpa(backend: SDPBackend) -> Callable[[], object]:
        def launch() -> object:
            with sdpa_kernel(backend):
                if square:
                    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
                mask = causal_lower_right(problem.count, problem.context)
                return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

        return launch

    peers = {"torch SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION)}
    if square:
        peers["torch SDPA cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    return peers


def label(config: PrefillConfig) -> str:
    kind = "specialized" if config.specialized else "gathered" if config.gathered else "paged"
    turns = " turns" if config.turns else ""
    return f"{kind} {config.block_m}x{config.block_n} w{config.warps} s{config.stages}{turns}"


def attempt(report: Report, name: str, launch: Callable[[], object], flops: float, repeats: int) -> bool:
    try:
        seconds = median_seconds([launch], repeats)
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0][:160]
        report.lines.append({"name": name, "failure": reason})
        print(f"{name:<58} failed: {reason}", flush=True)
        return False
    report.line(name, seconds, flops=flops)
    return True


def compile_all(configs: list[PrefillConfig], heads: tuple[int, int], device: str, dim: int) -> None:
    """Compile the kernels in parallel, on a tiny step; what fails here fails again, and is shown, below."""

    def tiny(config: PrefillConfig) -> None:
        try:
            launch_of(make_problem((1, 40, 300), *heads, device, dim), config)()
        except Exception:
            return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tiny, configs))


def specialized_survive() -> bool:
    """Whether the kernels that wait at barriers end at all, tried in a process that can be killed."""
    command = [sys.executable, "-m", "benchmarks.gpu.prefill_attention"]
    try:
        done = subprocess.run(
            command, timeout=90, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2]
        )
    except subprocess.TimeoutExpired as failure:
        print(f"specialized kernels hang: {failure.stdout!r}", flush=True)
        return False
    if done.returncode:
        print(f"specialized kernels fail: {done.stdout[-500:]} {done.stderr[-500:]}", flush=True)
    return done.returncode == 0


def measure(
    report: Report,
    cases: dict[str, tuple[int, int, int]] = CASES,
    configs: list[PrefillConfig] = CONFIGS,
    heads_of: dict[str, tuple[int, int]] = HEADS,
    odd_case: tuple[int, int, int] = ODD_CASE,
    dim: int = HEAD_DIM,
    device: str = "cuda",
    repeats: int = 3,
) -> None:
    if any(config.specialized for config in configs) and not specialized_survive():
        configs = [config for config in configs if not config.specialized]
    for model, heads in heads_of.items():
        compile_all(configs, heads, device, dim)
        report.heading(f"prefill attention, {model}: {heads[0]} heads over {heads[1]}, {dim} wide, {DTYPE}")
        odd = make_problem(odd_case, *heads, device, dim)
        works = []
        for config in configs:
            name = f"{model} odd rows, {label(config)}"
            odd.out.fill_(torch.nan)
            try:
                launch_of(odd, config)()
                check_last_row(report, name, odd)
                works.append(config)
            except Exception as failure:
                print(f"{name:<58} failed: {str(failure).splitlines()[0][:200]}", flush=True)
        for case_name, case in cases.items():
            problem = make_problem(case, *heads, device, dim)
            default = prefill_config(dim, DTYPE)
            for config in works:
                name = f"{model} {case_name}, {label(config)}"
                problem.out.fill_(torch.nan)
                if attempt(report, name, launch_of(problem, config), problem.flops, repeats):
                    check_last_row(report, name, problem)
            gathering = problem.plan(default)
            attempt(
                report,
                f"{model} {case_name}, the gathering alone",
                lambda p=problem, g=gathering: gather_kv(p.kv, p.tables, g, p.scratch, None),
                0,
                repeats,
            )
            for peer, launch in peers_of(problem).items():
                attempt(report, f"{model} {case_name}, {peer}", launch, problem.flops, repeats)
            del problem, gathering
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":  # small steps, for `specialized_survive`
    report = Report()
    for tried in (config for config in CONFIGS if config.specialized):
        for case in (ODD_CASE, (40, 70, 700)):
            print(label(tried), case, flush=True)
            step = make_problem(case, *HEADS["8B"], "cuda")
            step.out.fill_(torch.nan)
            launch_of(step, tried)()
            torch.cuda.synchronize()
            check_last_row(report, f"{label(tried)} {case}", step)
    sys.exit(1 if report.wrong else 0)
