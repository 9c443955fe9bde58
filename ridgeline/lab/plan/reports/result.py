"""The files of a plan: plan.toml for `serve --config`, prediction.json for `plan verify`, plan.html.

And the commands that run, measure and verify it. Called by `cli.lab.plan`; computes nothing.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ridgeline import __version__
from ridgeline.lab.plan.decision_gates import Decision
from ridgeline.lab.plan.engines import other_command
from ridgeline.lab.plan.plan_types import Plan
from ridgeline.lab.plan.reports.formats import format_facts
from ridgeline.lab.plan.reports.html import plan_page
from ridgeline.lab.plan.settings import config_file
from ridgeline.lab.prediction import Prediction, write_prediction
from ridgeline.lab.traffic.describe import describe
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import options_of

CONFIG, PREDICTION, PAGE = "plan.toml", "prediction.json", "plan.html"
LOCAL = "http://127.0.0.1:8000"
WARMUP = 8


@dataclass(frozen=True, slots=True)
class Written:
    config: Path | None  # None: another engine serves the plan
    prediction: Path
    page: Path


def write_plan(plan: Plan, decisions: tuple[Decision, ...], folder: Path) -> Written:
    folder.mkdir(parents=True, exist_ok=True)
    made_at = datetime.now(tz=UTC).isoformat(timespec="seconds")
    config = None
    if plan.engine == "ridgeline":
        config = folder / CONFIG
        config.write_text(config_file(plan.settings, _header(plan, made_at)), encoding="utf-8")
    prediction = folder / PREDICTION
    write_prediction(prediction_of(plan, made_at), prediction)
    page = folder / PAGE
    page.write_text(plan_page(plan, decisions, commands(plan, folder), made_at), encoding="utf-8")
    return Written(config, prediction, page)


def prediction_of(plan: Plan, made_at: str) -> Prediction:
    return Prediction(
        model=plan.request.name,
        hardware=plan.request.hardware,
        method=plan.method,
        engine={"engine": plan.engine, **plan.settings.changed()},
        traffic={
            "mode": "open",
            "facts": describe(plan.share.traffic).facts(),
            "options": options_given(plan.share.options),
            "replicas": plan.replicas,
            "bench": bench_command(plan),
        },
        metrics=plan.metrics,
        uncorrected={name: plan.estimate.metrics[name] for name in plan.corrected},
        formats=format_facts(plan),
        caveats=list(plan.caveats),
        made_at=made_at,
    )


def commands(plan: Plan, folder: Path) -> list[tuple[str, str]]:
    """(description, command), in order."""
    serve = f"ridgeline serve --config {shlex.quote(str(folder / CONFIG))}"
    if plan.engine != "ridgeline":
        deployment = plan.candidate.deployment
        serve = other_command(
            plan.engine,
            plan.request.name if plan.request.model.endswith(".json") else plan.request.model,
            tp=deployment.tp,
            pp=deployment.pp,
            ep=deployment.ep,
            precision=""
            if plan.candidate.precision == str(plan.request.shape.stored)
            else plan.candidate.precision,
            kv_precision=deployment.kv_precision,
            max_running=plan.settings.limits.max_running,
        )
    check = f"ridgeline plan verify {shlex.quote(str(folder / PREDICTION))} RUN_FOLDER"
    return [("serve it", serve), ("measure it", bench_command(plan)), ("check this plan", check)]


def bench_command(plan: Plan) -> str:
    """Sends exactly the traffic of the prediction."""
    words = ["ridgeline", "bench", LOCAL]
    for name, value in options_given(plan.share.options).items():
        flag = "--" + name.replace("_", "-")
        words += (
            [flag] if value is True else [flag, f"{value:.12g}" if isinstance(value, float) else str(value)]
        )
    return shlex.join([*words, "--slo", str(plan.request.slo), "--warmup", str(WARMUP)])


def options_given(options: TrafficOptions) -> dict[str, object]:
    defaults = {option.name: option.default for option in options_of(TrafficOptions)}
    return {name: value for name, value in asdict(options).items() if value != defaults[name]}


def _header(plan: Plan, made_at: str) -> list[str]:
    kept = [f"{name} {interval.mid:.4g}" for name, interval in plan.metrics.items()][:4]
    return [
        f"Planned by ridgeline {__version__} at {made_at}: {plan.request.shape.name} on "
        f"{plan.request.chip.title}, {plan.replicas} replica{'s' * (plan.replicas > 1)}.",
        f"Service level: {plan.request.slo}. Predicted for each: {', '.join(kept)}.",
        f"Weights in {plan.candidate.precision}; quality gate: {plan.chosen_format.quality.words}.",
        "ridgeline serve --config plan.toml",
    ]
