"""The gate: reference, reference again (the noise floor) and candidate on the same items, and the verdict.

The second run of the reference goes through the items backwards with another number in flight: it measures
what batching alone changes. Everything is stored as it comes; a rerun with the same folder continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.evaluate.evaluation import head_of, load_tasks
from ridgeline.lab.evaluate.options import EvaluateOptions, GateOptions
from ridgeline.lab.evaluate.progress import OnProgress
from ridgeline.lab.evaluate.run import RunSettings, run_tasks
from ridgeline.lab.evaluate.samples import Sample, samples_of
from ridgeline.lab.evaluate.scoring.outcome import Outcome
from ridgeline.lab.evaluate.statistics.divergence import (
    Z95,
    Divergence,
    Floats,
    NotAligned,
    Positions,
    clustered_mean,
    divergence_of,
    positions_of,
)
from ridgeline.lab.evaluate.statistics.gate_checks import (
    FAILING,
    NOT_SHOWN,
    Check,
    TaskValues,
    TextCheck,
    accuracy_checks,
    text_verdict,
)
from ridgeline.lab.evaluate.store import ResultsFolder
from ridgeline.lab.evaluate.subjects.open import opened
from ridgeline.lab.evaluate.subjects.subject import Subject, parse_subject
from ridgeline.lab.evaluate.tasks.items import digest_of
from ridgeline.lab.evaluate.tasks.table import Task
from ridgeline.lab.evaluate.verdicts import (
    GATE_FILE,
    PLANNED_ENGINES,
    STORED,
    CheckSummary,
    QualityVerdict,
    ServedFormat,
    why_unusable,
)
from ridgeline.lab.model_identity import identify
from ridgeline.models.spec.precision import Precision, format_name
from ridgeline.options import nearest
from ridgeline.version import __version__

REFERENCE, AGAIN, CANDIDATE = "reference", "reference-again", "candidate"
_FOLDERS = (REFERENCE, AGAIN, CANDIDATE)
RESULT = GATE_FILE
FEWEST_TEXTS = 2
WORST = 10
QUANTILES = 100


class GateResult(msgspec.Struct, frozen=True):
    reference: str
    candidate: str
    reference_facts: dict[str, Any]
    candidate_facts: dict[str, Any]
    passed: bool
    checks: list[Check]
    settings: dict[str, Any]
    kl_quantiles: list[float] = []  # of all positions; for the chart
    noise_kl_quantiles: list[float] = []
    samples: list[Sample] = []
    verdict: QualityVerdict | None = None  # for `ridgeline plan`
    not_recorded: str = ""  # why there is none
    version: str = __version__

    @property
    def failed_checks(self) -> list[Check]:
        strict = bool(self.settings.get("strict"))
        return [check for check in self.checks if fails(check, strict)]

    def save(self, folder: Path) -> None:
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (folder / RESULT).write_bytes(text + b"\n")


def fails(check: Check, strict: bool) -> bool:
    return check.verdict in FAILING or (strict and check.verdict == NOT_SHOWN)


def run_gate(
    reference: str,
    candidate: str,
    options: EvaluateOptions,
    gate: GateOptions,
    folder: Path,
    on_progress: OnProgress,
    api_key: str = "",
) -> GateResult:
    stated = None if gate.record_as is None else stated_format(gate.record_as, candidate)
    tasks, _ = load_tasks(options)
    for task in tasks:
        if task.is_text and len(task.items) < FEWEST_TEXTS:
            raise BadInput(f"task {task.name}: the gate needs at least {FEWEST_TEXTS} texts; raise --limit")
    first = RunSettings(options.concurrency, gate.top, label="reference · ")
    again = RunSettings(max(1, options.concurrency // 2), gate.top, backwards=True, label="again · ")
    if options.concurrency == 1:
        again = RunSettings(2, gate.top, backwards=True, label="again · ")
    with opened(reference, api_key) as subject:
        reference_facts, reference_format = subject.facts, subject.served
        _run(subject, tasks, folder / REFERENCE, first, on_progress)
        _run(subject, tasks, folder / AGAIN, again, on_progress)
    with opened(candidate, api_key) as subject:
        candidate_facts, candidate_format = subject.facts, stated or subject.served
        _run(
            subject,
            tasks,
            folder / CANDIDATE,
            RunSettings(options.concurrency, gate.top, label="candidate · "),
            on_progress,
        )
    heads = [(reference, reference_facts), (reference, reference_facts), (candidate, candidate_facts)]
    found = judge(folder, tasks, heads, options, gate)
    return _with_verdict(found, tasks, reference_format, candidate_format)


def stated_format(text: str, candidate: str) -> ServedFormat:
    """--record-as MODEL,weights=FORMAT[,engine=NAME][,kv=FORMAT]: what a server serves."""
    flag = f"--record-as {text}"
    if not parse_subject(candidate).is_url:
        raise BadInput(f"{flag}: the candidate is loaded here, and its format is known; leave it out")
    spec = parse_subject(text)
    unknown = set(spec.settings) - {"weights", "engine", "kv"}
    if spec.is_url or "weights" not in spec.settings or unknown:
        raise BadInput(
            f"{flag}: write MODEL,weights=FORMAT,engine=NAME, with kv=FORMAT if it is not bfloat16"
        )
    try:
        named = spec.settings["weights"]
        weights = STORED if named == STORED else str(Precision.named(named))
        kv = format_name(spec.settings.get("kv", "bfloat16"))
    except ValueError as error:
        raise BadInput(f"{flag}: {error}") from error
    engine = spec.settings.get("engine", "vllm")
    if engine not in PLANNED_ENGINES:
        raise BadInput(
            f"{flag}: `ridgeline plan` asks for no engine {engine!r} and would never find this verdict"
            f"{nearest(engine, PLANNED_ENGINES)}"
        )
    model = identify(spec.name)
    if not model.content and not model.repo:
        raise BadInput(
            f"{flag}: {spec.name!r} is no model of the hub (org/name) and none on this machine: "
            "`ridgeline plan` would never find this verdict"
        )
    return ServedFormat(model, weights, kv, engine, f"{engine}, as stated", stated=True)


def _with_verdict(
    found: GateResult,
    tasks: Sequence[Task],
    reference: ServedFormat | None,
    candidate: ServedFormat | None,
) -> GateResult:
    why = why_unusable(reference, candidate)
    if why or candidate is None:
        return msgspec.structs.replace(found, not_recorded=why)
    items = {task.name: len(task.items) for task in tasks}
    verdict = QualityVerdict(
        reference=found.reference,
        candidate=found.candidate,
        served=candidate,
        passed=found.passed,
        checks=[CheckSummary(one.task, one.verdict, items[one.task], one.reason) for one in found.checks],
        kl_margin=float(found.settings["kl_margin"]),
        margin=float(found.settings["margin"]),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return msgspec.structs.replace(found, verdict=verdict)


def _run(
    subject: Subject, tasks: Sequence[Task], folder: Path, settings: RunSettings, on_progress: OnProgress
) -> None:
    with ResultsFolder(folder, head_of(subject.name, subject.facts)) as results:
        run_tasks(subject, tasks, results, settings, on_progress)


def judge(
    folder: Path,
    tasks: Sequence[Task],
    heads: Sequence[tuple[str, dict[str, Any]]],
    options: EvaluateOptions,
    gate: GateOptions,
) -> GateResult:
    """The verdict from the three stored runs."""
    runs = [_stored(folder / name, *head) for name, head in zip(_FOLDERS, heads, strict=True)]
    values = [_values(task, runs) for task in tasks if not task.is_text]
    by_task: dict[str, Check] = {
        check.task: check
        for check in accuracy_checks(
            values, margin=gate.margin / 100, alpha=gate.alpha, power=gate.power, seed=options.seed
        )
    }
    kl: list[Positions] = []
    noise_kl: list[Positions] = []
    for task in tasks:
        if task.is_text:
            by_task[task.name] = _text_check(task, runs, gate.kl_margin, kl, noise_kl)
    checks = [by_task[task.name] for task in tasks]
    settings = {
        "tasks": list(options.task_names),
        "limit": options.limit,
        "seed": options.seed,
        "concurrency": options.concurrency,
        **{name: getattr(gate, name) for name in ("margin", "kl_margin", "top", "alpha", "power", "strict")},
    }
    return GateResult(
        heads[0][0],
        heads[2][0],
        heads[0][1],
        heads[2][1],
        not any(fails(check, gate.strict) for check in checks),
        checks,
        settings,
        _quantiles(kl),
        _quantiles(noise_kl),
        [sample for task in tasks for sample in _samples(task, runs, options.samples)],
    )


def _samples(task: Task, runs: Sequence[ResultsFolder], count: int) -> list[Sample]:
    return samples_of(task, {REFERENCE: _outcomes(task, runs[0]), CANDIDATE: _outcomes(task, runs[2])}, count)


def _stored(folder: Path, subject: str, facts: dict[str, Any]) -> ResultsFolder:
    with ResultsFolder(folder, head_of(subject, facts)) as results:
        return results


def _outcomes(task: Task, results: ResultsFolder) -> dict[str, Outcome]:
    found = {}
    for item in task.items:
        outcome = results.outcome((task.name, item.id, digest_of(item)))
        if outcome is None:
            raise LabError(f"{results.folder}: item {item.id} of {task.name} has no outcome")
        found[item.id] = outcome
    return found


def _values(task: Task, runs: Sequence[ResultsFolder]) -> TaskValues:
    found = [_outcomes(task, run) for run in runs]
    primary = [{id: outcome.values[task.primary] for id, outcome in one.items()} for one in found]
    changed = sum(found[0][id].answer != outcome.answer for id, outcome in found[2].items())
    return TaskValues(task.name, task.primary, primary[0], primary[1], primary[2], changed)


def _text_check(
    task: Task,
    runs: Sequence[ResultsFolder],
    margin: float,
    kl: list[Positions],
    noise_kl: list[Positions],
) -> TextCheck:
    outcomes = [_outcomes(task, run) for run in runs]
    _refuse_other_lengths(task, outcomes[0], outcomes[2])
    change, error = _loss_change(outcomes[0], outcomes[2])
    noise_change, noise_error = _loss_change(outcomes[0], outcomes[1])
    losses = (change, error, noise_change, noise_error)
    try:
        found, worst = _divergence(task, runs[0], runs[2], kl)
        noise, _ = _divergence(task, runs[0], runs[1], noise_kl)
    except (NotAligned, OSError) as reason:
        kl.clear()
        noise_kl.clear()
        verdict = text_verdict(
            change - Z95 * error, change + Z95 * error, abs(noise_change) + Z95 * noise_error, margin
        )
        without = str(reason) if isinstance(reason, NotAligned) else "a subject gives no top tokens"
        by_loss = sorted(
            (
                (id, outcomes[0][id].values["logprob"] - outcome.values["logprob"])
                for id, outcome in outcomes[2].items()
            ),
            key=lambda pair: -pair[1],
        )
        return TextCheck(task.name, verdict, *losses, without=without, worst=tuple(by_loss[:WORST]))
    verdict = text_verdict(found.kl_low, found.kl_high, noise.kl_high, margin)
    return TextCheck(task.name, verdict, *losses, found, noise, worst=worst)


def _divergence(
    task: Task, reference: ResultsFolder, other: ResultsFolder, kept: list[Positions]
) -> tuple[Divergence, tuple[tuple[str, float], ...]]:
    texts: list[Positions] = []
    logprobs: list[Floats] = []
    means = []
    for item in task.items:
        digest = digest_of(item)
        own, others = reference.scores(digest), other.scores(digest)
        texts.append(positions_of(own, others))
        logprobs.append(own.logprobs.astype(np.float64))
        means.append((item.id, float(texts[-1].kl.mean())))
    kept += texts
    return divergence_of(texts, logprobs), tuple(sorted(means, key=lambda pair: -pair[1])[:WORST])


def _refuse_other_lengths(task: Task, reference: dict[str, Outcome], candidate: dict[str, Outcome]) -> None:
    if any(one.values["bytes"] != candidate[id].values["bytes"] for id, one in reference.items()):
        raise LabError(
            f"{task.name}: one subject scores texts after BOS or EOS, the other knows no such token and "
            "leaves out the first word; give a server's tokenizer: URL,tokenizer=MODEL"
        )


def _loss_change(reference: dict[str, Outcome], other: dict[str, Outcome]) -> tuple[float, float]:
    """Nats per token of the reference, with the error over texts."""
    sums = [one.values["logprob"] - other[id].values["logprob"] for id, one in reference.items()]
    lengths = [one.values["tokens"] for one in reference.values()]
    return clustered_mean(np.array(sums), np.array(lengths))


def _quantiles(texts: Sequence[Positions]) -> list[float]:
    if not texts:
        return []
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return [float(value) for value in np.quantile(np.concatenate([text.kl for text in texts]), places)]
