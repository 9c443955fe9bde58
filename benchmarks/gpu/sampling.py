"""Sampling kernels at a real vocabulary: the plain draw, filters, penalties and log-probabilities.

The tokens are compared with the specification's (`ops.sampling`, in numpy) before anything is timed. Beside
the draw stands what a plain PyTorch engine would launch: argmax, and softmax with an exponential race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.timing import Report, copies_beyond_l2
from ridgeline.ops import sampling as spec
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.sampling import sampling
from ridgeline.ops.cuda.sampling.logprobs import LogprobBuffers
from ridgeline.ops.cuda.sampling.state import PLAIN, RowParams, SamplePlan, SamplerState

DEVICE = "cpu" if INTERPRETED else "cuda"
# small where the kernels are interpreted: that only shows that all of this runs
VOCAB, BATCHES, COMPARED = (1500, (1, 2), 2) if INTERPRETED else (151936, (1, 8, 64, 256), 32)
PARAMS: dict[str, RowParams] = {
    "greedy": RowParams(temperature=0.0),
    "temperature 0.6": RowParams(temperature=0.6),
    "top-k 50, top-p 0.9": RowParams(temperature=0.8, top_k=50, top_p=0.9),
    "top-k 20, top-p 0.95, min-p 0.01": RowParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01),
    "top-p 0.9, peaked": RowParams(temperature=0.25, top_p=0.9),
    "top-p 0.9, flat": RowParams(temperature=1.0, top_p=0.9),
    "top-k 1000": RowParams(temperature=0.8, top_k=1000),
    "min-p 0.05": RowParams(temperature=0.8, min_p=0.05),
    "penalties": RowParams(temperature=0.6, repetition_penalty=1.1, presence_penalty=0.5),
    "bias on 300 tokens": RowParams(temperature=0.0, bias=dict.fromkeys(range(0, 900, 3), 2.0)),
    "20 logprobs": RowParams(temperature=0.6, logprobs=20),
}
# (tokens a block, warps, programs for the whole batch)
CONFIGS = [(1024, 4, 1056), (1024, 4, 528), (2048, 4, 1056), (2048, 8, 528), (512, 4, 1056), (1024, 8, 528)]


class Batch:
    """`count` rows with the same kind of parameters and one seed each."""

    def __init__(self, count: int, vocab: int, params: RowParams, sets: int = 1) -> None:
        self.params = [replace(params, seed=i) for i in range(count)]
        self.state = SamplerState(count, vocab, DEVICE)
        self.prompt = list(range(0, min(vocab, 2000), 7))
        for row, row_params in enumerate(self.params):
            self.state.set_row(row, row_params, self.prompt)
        self.state.flush()
        self.scratch = sampling.SampleScratch(count, vocab, DEVICE)
        self.logits = [_logits(count, vocab) for _ in range(sets)]
        self.rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
        self.positions = torch.full((count,), 11, dtype=torch.int32, device=DEVICE)
        self.last_tokens = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        self.out_tokens = torch.full((count,), -99, dtype=torch.int32, device=DEVICE)
        self.logprobs = LogprobBuffers(count, vocab, DEVICE)
        self.plan = self.state.plan(range(count), [11] * count)

    def launches(self, kernel: Callable[..., None], plan: SamplePlan, **options: int) -> list[partial[None]]:
        outputs = (self.last_tokens, self.out_tokens, self.scratch, plan)
        shared = (self.rows, self.positions, self.state, *outputs)
        named: dict[str, Any] = dict(options)
        if kernel is sampling.sample:
            named["logprobs"] = self.logprobs
        return [partial(kernel, logits, *shared, **named) for logits in self.logits]


def _logits(count: int, vocab: int) -> Tensor:
    return (torch.randn(count, vocab, device=DEVICE) * 3.0).to(torch.bfloat16)


def measure(
    report: Report, vocab: int = VOCAB, batches: tuple[int, ...] = BATCHES, compared: int = COMPARED
) -> None:
    report.heading("tokens against the specification")
    for name, params in PARAMS.items():
        try:
            _compare(report, name, Batch(compared, vocab, params))
        except Exception as failure:  # one that does not compile must not hide the others
            print(f"!!!!!! {name}: {type(failure).__name__}: {failure}", flush=True)
            report.wrong.append(name)
    for count in batches:
        report.heading(f"the draw alone, {count} rows of {vocab}")
        for name in ("greedy", "temperature 0.6"):
            batch = Batch(count, vocab, PARAMS[name], _sets(count, vocab))
            for block, warps, programs in CONFIGS:
                options = {"block": block, "warps": warps, "programs": programs}
                launches = batch.launches(sampling.draw, PLAIN, **options)
                label = f"{name}: block {block}, {warps} warps, {programs} programs"
                report.attempt(label, launches, bytes=count * vocab * 2)
        _peers(report, batch)
    for count in batches[:-1]:
        report.heading(f"all of a step's sampling, {count} rows of {vocab}")
        for name, params in PARAMS.items():
            batch = Batch(count, vocab, params, _sets(count, vocab))
            report.attempt(name, batch.launches(sampling.sample, batch.plan), bytes=count * vocab * 2)


def _sets(count: int, vocab: int) -> int:
    """Of logits: few, because a step's logits are still in L2 when they are sampled."""
    return min(4, copies_beyond_l2(count * vocab * 2))


def _compare(report: Report, name: str, batch: Batch) -> None:
    """Tokens against the specification. A near-tie may go either way: a rare difference is not a fault."""
    for launch in batch.launches(sampling.sample, batch.plan):
        launch()
    tokens = batch.out_tokens.tolist()
    different = 0
    for i, params in enumerate(batch.params):
        row = batch.logits[0][i].float().cpu().numpy()
        spec.add_bias(row, params.bias)
        spec.apply_penalties(
            row,
            np.array(batch.prompt),
            np.zeros(0, dtype=np.int64),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        if params.temperature == 0.0:
            expected = int(row.argmax())
        else:
            probs = spec.candidate_probs(row, params.temperature, params.min_p, params.top_k, params.top_p)
            expected = spec.draw(probs, params.seed, 11)
        different += tokens[i] != expected
    print(f"{name}: {different} of {len(tokens)} tokens differ from the specification", flush=True)
    same = torch.tensor([1.0 - different / len(tokens)])
    report.check(f"{name}: tokens as specified", same, torch.ones(1), tolerance=0.04)
    if batch.plan.logprobs is not None:
        _compare_logprobs(report, name, batch)


def _compare_logprobs(report: Report, name: str, batch: Batch) -> None:
    count = batch.plan.logprobs or 0
    exact = torch.log_softmax(batch.logits[0].double(), dim=-1)
    best = exact.topk(count).values
    found = batch.logprobs.top_logprobs[:, :count]
    report.check(f"{name}: the best", found, best, tolerance=1e-5)
    named = exact.gather(1, batch.logprobs.top_ids[:, :count].long())
    report.check(f"{name}: of the named ids", named, best, tolerance=1e-12)
    chosen = exact.gather(1, batch.out_tokens[:, None].long())
    report.check(f"{name}: of the chosen", batch.logprobs.logprobs[:, None], chosen, tolerance=1e-5)
    report.check(
        f"{name}: ranks", batch.logprobs.ranks[:, None].double(), (exact > chosen).sum(1, True) + 1.0
    )


def _peers(report: Report, batch: Batch) -> None:
    def race(logits: Tensor) -> None:
        probs = torch.softmax(logits.float() / 0.6, dim=-1)
        probs.div_(torch.empty_like(probs).exponential_()).argmax(dim=-1)

    moved = batch.logits[0].nbytes
    report.attempt("torch: argmax", [partial(torch.argmax, x, dim=-1) for x in batch.logits], bytes=moved)
    report.attempt("torch: softmax, exponential race", [partial(race, x) for x in batch.logits], bytes=moved)
