"""The decision list of a plan: passes its figures to each gate of `decision_gates`, ordered by leverage."""

from __future__ import annotations

from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.errors import LabError
from ridgeline.lab.perfmodel.parallel import choose_parallel
from ridgeline.lab.plan import decision_gates
from ridgeline.lab.plan.decision_gates import Decision
from ridgeline.lab.plan.plan_types import Plan

TIGHT = 0.8  # of a limit; above this share, a prediction may miss it


def decision_list(plan: Plan) -> tuple[Decision, ...]:
    return (
        decision_gates.hosted_or_dedicated(plan.even, _no_comparison(plan)),
        _smallest(plan),
        decision_gates.engine(plan.engine, refused=plan.engine_refusal),
        _quantize(plan),
        decision_gates.prefix_cache(plan.ideal, plan.kept, prefill_s_per_token(plan), plan.replicas),
        _speculate(plan),
        _parallelize(plan),
        _disaggregate(plan),
    )


def prefill_s_per_token(plan: Plan) -> float:
    chunk = plan.settings.limits.prefill_chunk
    work = StepWork(prefill_tokens=chunk, prefill_rows=1)
    return plan.times.steps.seconds(work) / chunk


def ridge_batch(plan: Plan) -> float:
    """Batch size at which a decode step's arithmetic takes as long as reading its weights."""
    deployment = plan.candidate.deployment
    shape, batch = deployment.shape, max(1, round(plan.estimate.concurrency))
    read = shape.weight_bytes_read(deployment.kept, batch)
    context = round(plan.share.mean_input + plan.share.mean_output / 2)
    return deployment.chip.ridge(deployment.kept.linear) * read / shape.flops(1, context)


def _no_comparison(plan: Plan) -> str:
    if plan.request.usd_per_gpu_hour is None:
        return f"the hourly price of {plan.request.chip.name} is unknown (--gpu-price)"
    return plan.request.no_offers or "no similar hosted model is listed (--price-in, --price-out)"


def _smallest(plan: Plan) -> Decision:
    deployment, memory = plan.candidate.deployment, plan.candidate.memory
    shape, chip = deployment.shape, deployment.chip
    per_parameter = shape.weight_bytes(deployment.kept) / shape.parameters
    room = (
        chip.memory_bytes - memory.reserve - memory.activations - plan.candidate.batch * memory.kv_per_request
    )
    return decision_gates.smallest_model(
        parameters=shape.parameters,
        active=shape.active_parameters,
        gpus=plan.candidate.gpus,
        decode_floor_ms=1e3 * shape.weight_bytes_read(deployment.kept, 1) / deployment.tp / chip.bytes_per_s,
        one_gpu_parameters=max(0.0, room / per_parameter),
    )


def _quantize(plan: Plan) -> Decision:
    others = tuple(found for found in plan.formats if found not in (plan.chosen_format, plan.formats[0]))
    return decision_gates.quantize(plan.formats[0], plan.chosen_format, others)


def _speculate(plan: Plan) -> Decision:
    limits = [limit for limit in plan.request.slo.limits if limit.metric in ("tpot", "itl", "ntpot")]
    near = [plan.metrics[limit.key].high > TIGHT * limit.ms for limit in limits if limit.key in plan.metrics]
    tpot = plan.metrics.get("tpot_ms.p50")
    return decision_gates.speculate(
        batch=max(1.0, plan.estimate.concurrency),
        ridge_batch=ridge_batch(plan),
        engine_can=True,
        tpot_is_tight=any(near),
        tpot_ms=None if tpot is None else tpot.mid,
    )


def _parallelize(plan: Plan) -> Decision:
    """The rule's reason if the search found the same split; otherwise that it costs least."""
    deployment, demand = plan.candidate.deployment, plan.share
    reason = ""
    try:
        choice = choose_parallel(
            deployment.shape,
            deployment.chip,
            deployment.kept,
            deployment.kv_precision,
            round(demand.mean_input),
            round(demand.mean_output),
            concurrency=max(1, round(plan.estimate.concurrency)),
            most_gpus=plan.request.gpus_max,
            whole_windows=plan.engine == "ridgeline",
        )
        if (choice.tp, choice.pp) == (deployment.tp, deployment.pp):
            reason = choice.reason
    except LabError:
        pass  # the search found a candidate; the rule's refusal does not matter
    if not reason:
        reason = (
            f"of the splits within the service level this one takes the fewest GPUs, with "
            f"{plan.candidate.batch} requests at once, bound by {plan.candidate.bound}"
        )
    return decision_gates.parallelize(
        tp=deployment.tp, pp=deployment.pp, ep=deployment.ep, replicas=plan.replicas, reason=reason
    )


def _disaggregate(plan: Plan) -> Decision:
    demand = plan.share
    per_second = plan.rate * demand.requests_per_arrival * (demand.mean_input + demand.mean_output)
    hours = plan.request.busy_hours
    return decision_gates.disaggregate(
        tokens_per_day=plan.even.profile.tokens_per_day if plan.even else per_second * 3600 * hours,
        parameters=plan.request.shape.parameters,
        input_per_output=demand.mean_input / demand.mean_output,
        gpus=plan.gpus,
        replica_gpus=plan.candidate.gpus,
        link_bytes_per_s=_replica_link(plan),
        engine_can=plan.engine != "ridgeline",
    )


def _replica_link(plan: Plan) -> float | None:
    """Between two replicas: within a node if both fit one, else between nodes."""
    chip = plan.request.chip
    return (
        chip.link_bytes_per_s if 2 * plan.candidate.gpus <= chip.link_domain else chip.internode_bytes_per_s
    )
