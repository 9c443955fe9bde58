"""From a model to a draft head on disk: answers, training, acceptance, files and the report.

Everything is kept in a folder beside the result while it is unfinished, so that a repeated command continues.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.engine.client.llm import LLM
from ridgeline.lab.errors import LabError
from ridgeline.lab.train_drafter.answers import (
    Answer,
    OnProgress,
    prompt_ids,
    read_prompts,
    sampled_answers,
    split_held_out,
)
from ridgeline.lab.train_drafter.evaluation import Acceptance, acceptance
from ridgeline.lab.train_drafter.options import TrainOptions
from ridgeline.lab.train_drafter.target import Target
from ridgeline.lab.train_drafter.trainer import Run, new_head, train
from ridgeline.models.drafters.eagle3 import Eagle3Head, write_head
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec

ANSWERS, CHECKPOINT, OPTIONS, REPORT = "answers.jsonl", "checkpoint.pt", "options.json", "report.json"
MOST_HELD_OUT = 80  # prompts of each file
SAMPLING_SHARE = 0.4  # of a GPU's memory, while answers are sampled
EVALUATED_TOGETHER = 8
# Options that do not change the answers: a run may continue with others.
FREE = ("steps", "minutes", "batch", "learning_rate", "matrix_rate", "device", "running", "held_out")


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    device: str
    parameters: int
    draft_vocabulary: int
    taps: list[int]
    guesses: int
    answers: int
    answer_tokens: int
    steps: int
    sampling_s: float
    training_s: float
    losses: list[float]
    acceptance: dict[str, dict[str, Any]]  # by file of held-out prompts
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HeldOut:
    name: str
    texts: list[str]


def train_drafter(name: str, path: Path, out: Path, options: TrainOptions, on_progress: OnProgress) -> Report:
    """Raises LabError for a folder of another run and for prompts that cannot be read."""
    spec = read_spec(path)
    device = _device(options)
    _claim(out, name, options)
    texts, held = _prompts(options)
    began = time.monotonic()
    answers, held_answers = _sampled(name, texts, held, options, device, out, on_progress)
    sampling_s = time.monotonic() - began
    config = Eagle3Config.for_target(spec, options.vocabulary, options.guesses, name)
    target = Target(path, spec, device, config.taps, options.length)
    head = new_head(config, answers, target, options.seed)
    run = train(head, target, answers, options, out / CHECKPOINT, on_progress)
    found = {
        each: acceptance(head, target, part, options.length, EVALUATED_TOGETHER, on_progress)
        for each, part in held_answers.items()
    }
    write_head(head, out)
    report = _report(name, device, head, answers, run, sampling_s, found, options)
    (out / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def _device(options: TrainOptions) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise LabError("--device cuda: torch finds no usable GPU; use --device cpu")
    return torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")


def _claim(out: Path, name: str, options: TrainOptions) -> None:
    """A folder is of one model and one set of options; those of `FREE` may change when it is continued."""
    mine = {"model": name, **{key: value for key, value in asdict(options).items() if key not in FREE}}
    mine = json.loads(json.dumps(mine))
    file = out / OPTIONS
    if file.is_file():
        theirs = json.loads(file.read_text())
        if theirs != mine:
            other = sorted(key for key in mine if theirs.get(key) != mine[key])
            raise LabError(
                f"{out}: was begun with another {', '.join(other)}; use another --out or remove it"
            )
        return
    if out.is_dir() and any(out.iterdir()):
        raise LabError(f"{out}: is not empty and not a run of train-drafter")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(mine, indent=2) + "\n")


def _prompts(options: TrainOptions) -> tuple[list[str], list[HeldOut]]:
    texts = read_prompts(options.prompts)
    if options.held_out:
        held = [HeldOut(Path(file).stem, read_prompts((file,))[:MOST_HELD_OUT]) for file in options.held_out]
        known = {text for part in held for text in part.texts}
        return [text for text in texts if text not in known], held
    if not texts:
        return [], []
    texts, last = split_held_out(texts)
    return texts, [HeldOut("held-out", last[:MOST_HELD_OUT])]


def _sampled(
    name: str,
    texts: list[str],
    held: list[HeldOut],
    options: TrainOptions,
    device: torch.device,
    out: Path,
    on_progress: OnProgress,
) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """Answers of the model as it is served: sampled ones to learn from, greedy ones to be judged by."""
    settings: dict[str, Any] = {"speculate": "off"}
    if device.type == "cuda":
        settings |= {"backend": "cuda", "memory_fraction": SAMPLING_SHARE}
    if options.running:
        settings["max_running"] = options.running
    llm = LLM(name, **settings)
    answers = sampled_answers(llm, texts, options, out / ANSWERS, on_progress)
    if not held:  # of its own questions every 50th
        answers, kept = answers[: -_held(answers)], answers[-_held(answers) :]
        prompts = {"held-out": [answer.prompt for answer in kept]}
    else:
        most = options.length - options.tokens
        prompts = {
            part.name: [prompt_ids(llm.tokenizer, text)[: max(16, most)] for text in part.texts]
            for part in held
        }
    found: dict[str, list[Answer]] = {}
    for part, ids in prompts.items():
        on_progress(f"held out: {part}", 0, len(ids))
        found[part] = greedy_answers(llm, ids, options.tokens)
        on_progress(f"held out: {part}", len(ids), len(ids))
    del llm
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return answers, found


def greedy_answers(llm: LLM, prompts: list[list[int]], tokens: int) -> list[Answer]:
    from ridgeline.engine.schedule.request import SamplingParams

    found = llm.generate(prompts, [SamplingParams(temperature=0.0, max_tokens=tokens)] * len(prompts))
    return [Answer(one.prompt_ids, one.completions[0].tokens) for one in found]


def _held(answers: list[Answer]) -> int:
    return max(1, min(MOST_HELD_OUT, len(answers) // 50))


def _report(
    name: str,
    device: torch.device,
    head: Eagle3Head,
    answers: list[Answer],
    run: Run,
    sampling_s: float,
    found: dict[str, Acceptance],
    options: TrainOptions,
) -> Report:
    return Report(
        model=name,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        parameters=head.config.parameters,
        draft_vocabulary=head.config.draft_vocab_size,
        taps=list(head.config.taps),
        guesses=head.config.length,
        answers=len(answers),
        answer_tokens=sum(len(answer.answer) for answer in answers),
        steps=run.step,
        sampling_s=round(sampling_s, 1),
        training_s=round(run.seconds, 1),
        losses=[round(loss, 4) for loss in run.losses],
        acceptance={
            name: {
                "length": round(one.length, 3),
                "by_position": [round(each, 3) for each in one.by_position],
                "covered": round(one.covered, 3),
                "rows": one.rows,
                "answers": one.answers,
            }
            for name, one in found.items()
        },
        options=asdict(options),
    )


def report_text(report: Report, out: Path) -> str:
    tokens, sampling_s = report.answer_tokens, report.sampling_s
    lines = [
        f"{out}: EAGLE-3 head for {report.model}, {report.parameters / 1e6:.1f}M parameters, "
        f"{report.draft_vocabulary} draft tokens, {report.guesses} guesses",
        f"trained on {report.answers} answers ({tokens} tokens, sampled in {sampling_s:.0f} s)"
        f" in {report.steps} steps, {report.training_s:.0f} s on {report.device}",
        "",
        "held out, greedy      tokens a row   in the vocabulary   right by position",
    ]
    for name, one in report.acceptance.items():
        rates = " ".join(f"{each:.2f}" for each in one["by_position"])
        figures = f"{one['length']:>8.2f}{100 * one['covered']:>18.1f} %"
        lines.append(f"{name:<22}{figures}     {rates}   ({one['rows']} rows)")
    lines += ["", f"serve it:  ridgeline serve {report.model} --backend cuda --speculate {out}"]
    return "\n".join(lines)


def check_model(spec: ModelSpec) -> None:
    Eagle3Config.for_target(spec, 16, 1, "")
