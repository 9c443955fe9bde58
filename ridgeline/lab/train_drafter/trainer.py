"""Trains a head on answers: Muon and AdamW over batches of sequences, the target's states as they are needed.

A checkpoint is written every minute; a repeated command continues from it. The order of the batches follows
from the seed and the step's number, so an interrupted run sees what an uninterrupted one does.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.lab.errors import LabError
from ridgeline.lab.train_drafter.answers import Answer, OnProgress
from ridgeline.lab.train_drafter.optimizers import Optimizers
from ridgeline.lab.train_drafter.options import TrainOptions
from ridgeline.lab.train_drafter.target import Target
from ridgeline.lab.train_drafter.unroll import loss_of, unrolled
from ridgeline.models.drafters.eagle3 import Eagle3Head
from ridgeline.models.drafters.eagle3_config import Eagle3Config

PASSES = 3
UNBOUNDED = 1 << 40
WARM_UP_STEPS = 100  # at most
WARM_UP = 0.04  # of the steps
LAST_RATE = 0.1  # of the peak
CLIP = 1.0
SAVE_EVERY_S = 60.0


@dataclass
class Run:
    """What a training run has done so far."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # mean of every tenth part
    right: list[float] = field(default_factory=list)  # of the last steps, by guess


def draft_vocabulary(answers: list[Answer], config: Eagle3Config) -> Tensor:
    """The most frequent tokens of the answers, ascending; filled up with the first ids."""
    counts = Counter(token for answer in answers for token in answer.answer)
    frequent = [token for token, _ in counts.most_common(config.draft_vocab_size)]
    known = set(frequent)
    rest = (token for token in range(config.vocab_size) if token not in known)
    frequent += [next(rest) for _ in range(config.draft_vocab_size - len(frequent))]
    return torch.tensor(sorted(frequent))


def batch_of(answers: list[Answer], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] padded with 0, and which of them are of answers."""
    longest = min(length, max(len(answer.tokens) for answer in answers))
    longest = -(-longest // 32) * 32  # few shapes: each new one costs memory
    tokens = torch.zeros(len(answers), longest, dtype=torch.int64)
    learns = torch.zeros(len(answers), longest, dtype=torch.bool)
    for place, answer in enumerate(answers):
        ids = answer.tokens[:longest]
        tokens[place, : len(ids)] = torch.tensor(ids)
        learns[place, len(answer.prompt) : len(ids)] = True
    return tokens.to(device), learns.to(device)


def new_head(config: Eagle3Config, answers: list[Answer], target: Target, seed: int) -> Eagle3Head:
    """Its output matrix begins as the target's rows of the draft vocabulary."""
    torch.manual_seed(seed)
    head = Eagle3Head(config, draft_vocabulary(answers, config)).to(target.device)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.decoder.weights.lm_head[head.draft_ids])
        head.norm.weight.copy_(target.decoder.weights.final_norm)
    return head


def train(
    head: Eagle3Head,
    target: Target,
    answers: list[Answer],
    options: TrainOptions,
    checkpoint: Path,
    on_progress: OnProgress,
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    usable = [answer for answer in answers if len(answer.answer) > options.guesses + 2]
    if not usable:
        raise LabError("no answer is long enough to learn from: raise --tokens, or give other --prompts")
    per_pass = max(1, len(usable) // options.batch)
    most_s = 60 * options.minutes
    # With a time alone there is no number of steps: the rate and the parts of the report follow the time.
    steps = options.steps or (UNBOUNDED if most_s else PASSES * per_pass)
    optimizers = Optimizers(head, options.learning_rate, options.matrix_rate)
    run = _resumed(checkpoint, head, optimizers)
    began, saved = clock() - run.seconds, clock()
    recent: list[float] = []
    while run.step < steps:
        share = _rate(run.step, steps, clock() - began, most_s)
        batch = _batch(usable, run.step, per_pass, options)
        loss, right = _step(head, target, batch, options, optimizers, share)
        recent.append(loss)
        run.step += 1
        run.seconds = clock() - began
        run.right = [0.9 * a + 0.1 * b for a, b in zip(run.right or right, right, strict=True)]
        if not math.isfinite(loss):
            raise LabError(f"the loss of step {run.step} is not finite: lower --learning-rate")
        done = max(run.step / steps, run.seconds / most_s if most_s else 0.0)
        if int(10 * done) > len(run.losses):
            run.losses.append(sum(recent) / len(recent))
            recent = []
        if steps == UNBOUNDED:
            on_progress("training, s", min(round(run.seconds), round(most_s)), round(most_s))
        else:
            on_progress("training", run.step, steps)
        if clock() - saved > SAVE_EVERY_S:
            _save(checkpoint, head, optimizers, run)
            saved = clock()
        if most_s and run.seconds >= most_s:
            break
    _save(checkpoint, head, optimizers, run)
    return run


def _batch(answers: list[Answer], step: int, per_pass: int, options: TrainOptions) -> list[Answer]:
    """Of each pass another order; sequences of similar length are not gathered."""
    passed, place = divmod(step, per_pass)
    generator = torch.Generator().manual_seed(options.seed * 7919 + passed)
    order = torch.randperm(len(answers), generator=generator).tolist()
    return [answers[n] for n in order[place * options.batch : (place + 1) * options.batch]] or answers


def _step(
    head: Eagle3Head,
    target: Target,
    batch: list[Answer],
    options: TrainOptions,
    optimizers: Optimizers,
    share: float,
) -> tuple[float, list[float]]:
    tokens, learns = batch_of(batch, options.length, target.device)
    seen = target.see(tokens)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        found = unrolled(head, target.embed, seen.taps, tokens, options.guesses, target.spec.embedding_scale)
    loss = loss_of(found, seen.logits, head.draft_ids, learns)
    optimizers.zero_grad()
    loss.total.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
    optimizers.step(share)
    return float(loss.total.detach()), loss.right.tolist()


def _rate(step: int, steps: int, seconds: float, most_s: float) -> float:
    """Of the peak: up for a few steps, then down to a tenth by a cosine of the steps, or of the time if that
    is less."""
    warm = min(WARM_UP_STEPS, max(1, round(WARM_UP * steps)))
    if step < warm:
        return (step + 1) / warm
    share = (step - warm) / max(1, steps - warm)
    if most_s:
        share = max(share, seconds / most_s)
    share = min(1.0, share)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2


def _save(path: Path, head: Eagle3Head, optimizers: Optimizers, run: Run) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    state = {
        "head": head.state_dict(),
        "draft_ids": head.draft_ids,
        "optimizers": optimizers.state(),
        "run": vars(run),
    }
    torch.save(state, unfinished)
    unfinished.replace(path)


def _resumed(path: Path, head: Eagle3Head, optimizers: Optimizers) -> Run:
    if not path.is_file():
        return Run()
    state = torch.load(path, map_location=head.draft_ids.device, weights_only=True)
    if not torch.equal(state["draft_ids"], head.draft_ids):
        raise LabError(f"{path}: is of other answers; use another --out, or remove the folder")
    head.load_state_dict(state["head"])
    optimizers.load(state["optimizers"])
    return Run(**state["run"])
