"""The gates of the decision list: a gate turns figures into a Decision with its reason. Pure functions.

Ordered by leverage: decisions that shrink the later ones come first. `decision_list` passes
the figures of a finished plan, `reports` prints the decisions. Thresholds are only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.lab.plan.break_even import BreakEven
from ridgeline.lab.plan.quantization.figures import FormatFigures
from ridgeline.lab.plan.sharing import Sharing

# From measurements and practice; see docs/techniques and `ridgeline explain`.
CACHE_PAYS_SHARE = 0.05  # of prompt tokens; smaller savings are within measurement noise
DRAFT_TOKENS = 4  # a usual draft's length
ACCEPTED = 0.6  # of guesses, where nothing is known of the text
SPECULATION_LOAD = 0.5  # of the batch at which arithmetic binds; draft verification must fit beside it
DISAGGREGATE_TOKENS_PER_DAY = (100e6, 1e9)  # worth a look; worth it
DISAGGREGATE_PARAMETERS = 100e9
DISAGGREGATE_INPUT_PER_OUTPUT = 4.0
DISAGGREGATE_LINK = 25e9  # bytes/s of a chip: 200 Gb/s, the slowest that serving systems are sold with
QUANTIZE_GAIN = 0.10  # of the cost; smaller gains do not justify the risk to quality
CLEARLY = 0.8  # a price below this ratio counts as lower: both sides are estimates


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: the question, the verdict, the reason, and the gate's figures."""

    question: str
    verdict: str
    reason: str
    figures: dict[str, float] = field(default_factory=dict)
    term: str = ""  # entry of `ridgeline explain`


def hosted_or_dedicated(even: BreakEven | None, missing: str = "") -> Decision:
    question = "hosted API or dedicated?"
    if even is None:
        return Decision(question, "open", f"no comparison: {missing}", term="break-even")
    hosted, own = even.hosted.usd_month, even.own.usd_month
    is_scaled = own < even.own_always.usd_month
    idle = even.idle_share_scaled if is_scaled else even.idle_share
    figures = {
        "hosted_usd_month": hosted,
        "own_usd_month": own,
        "idle_share": idle,
        "even_requests_per_day": even.even_requests_per_day or 0.0,
    }
    how = " scaled by the hour" if is_scaled else ""
    lines = f"hosted {_usd(hosted)}, own{how} {_usd(own)} a month, {idle:.0%} of it for idle GPUs"
    if even.even_requests_per_day is None:
        full, each = even.full_per_request, even.hosted.per_request
        why = f"{lines}; even a busy replica costs {_small(full)} a request, the API {_small(each)}"
        return Decision(question, "hosted", why, figures, "break-even")
    from_here = f"dedicated pays from {even.even_requests_per_day:,.0f} requests a day on, at such hours"
    if own <= CLEARLY * hosted:
        return Decision(question, "dedicated", f"{lines}; {from_here}", figures, "break-even")
    if hosted <= CLEARLY * own:
        return Decision(question, "hosted", f"{lines}; {from_here}", figures, "break-even")
    return Decision(question, "either", f"{lines}: too close to call; {from_here}", figures, "break-even")


def smallest_model(
    *, parameters: int, active: int, gpus: int, decode_floor_ms: float, one_gpu_parameters: float
) -> Decision:
    """one_gpu_parameters: the largest model of this precision that one chip holds beside its KV cache."""
    figures = {
        "parameters": float(parameters),
        "active_parameters": float(active),
        "decode_floor_ms": decode_floor_ms,
        "one_gpu_parameters": one_gpu_parameters,
    }
    half = (
        f"each token reads {count(active)} parameters: at least {decode_floor_ms:.2g} ms alone, "
        "and a model of half that takes half"
    )
    verdict = "check a smaller one first"
    if gpus > 1:
        fits = f"; up to {count(one_gpu_parameters)} would fit one GPU instead of {gpus}"
        return Decision("the smallest model that does it?", verdict, half + fits, figures, "smallest model")
    return Decision("the smallest model that does it?", verdict, half, figures, "smallest model")


def engine(chosen: str, *, refused: str = "") -> Decision:
    """refused: why ridgeline cannot serve this plan; empty if it can."""
    if not refused:
        return Decision("which engine?", chosen, "serves this model on this hardware; plan.toml starts it")
    return Decision("which engine?", chosen, f"ridgeline does not: {refused}")


def quantize(stored: FormatFigures, chosen: FormatFigures, others: tuple[FormatFigures, ...]) -> Decision:
    """others: neither stored nor chosen. The verdict of a format's quality gate is part of the reason."""
    question = "quantize?"
    every = (stored, chosen, *others)
    figures = {f"{p.precision}_gpus": float(p.gpus) for p in every if p.gpus is not None}
    figures |= {f"{p.precision}_per_gpu": p.per_gpu for p in every if p.per_gpu is not None}
    figures |= {
        f"{p.precision}_gate_passed": float(p.quality.status == "passed") for p in every if p.quality.verdict
    }
    if chosen.precision != stored.precision:
        if stored.gpus is None:
            why = f"{stored.precision} does not do: {stored.why}"
        elif stored.gpus == chosen.gpus:
            why = f"as many GPUs as at {stored.precision}, {_per_gpu(stored, chosen)}"
        else:
            why = f"{stored.gpus} GPUs at {stored.precision}, {chosen.gpus} at {chosen.precision}"
        reason = f"{why}; {_gate(chosen)}"
        return Decision(question, f"yes: {chosen.precision}", reason, figures, "quantization")
    failed = "".join(f"; {p.precision} is out: {_gate(p)}" for p in others if p.quality.status == "failed")
    best = min(
        (p for p in others if p.gpus is not None and p.quality.status != "failed"),
        key=lambda p: (p.gpus, -(p.per_gpu or 0.0)),
        default=None,
    )
    if best is None or chosen.gpus is None:
        why = f"nothing smaller than {chosen.precision} {'remains' if failed else 'runs here'}{failed}"
        return Decision(question, "no", why, figures, "quantization")
    assert best.gpus is not None
    if best.gpus <= (1 - QUANTIZE_GAIN) * chosen.gpus:
        why = f"{best.precision} would take {best.gpus} GPUs instead of {chosen.gpus}; {_gate(best)}{failed}"
        return Decision(question, f"worth a trial: {best.precision}", why, figures, "quantization")
    why = f"{chosen.precision} does it, and {best.precision} would take as many GPUs"
    if best.per_gpu is not None and chosen.per_gpu is not None:
        why += f"; {_per_gpu(chosen, best)}"
    return Decision(question, "no", f"{why}; {_gate(best)}{failed}", figures, "quantization")


def _per_gpu(one: FormatFigures, other: FormatFigures) -> str:
    return (
        f"one GPU serves {one.per_gpu or 0.0:.3g} requests/s ({one.speed}), then {other.per_gpu or 0.0:.3g} "
        f"({other.speed})"
    )


def _gate(figures: FormatFigures) -> str:
    quality = figures.quality
    if quality.verdict is not None:
        return f"its quality gate {quality.verdict.words}"
    if quality.status == "not gated":
        return f"{figures.precision} is not gated"
    return f"{figures.precision} needs no gate: it is {quality.status}"


def prefix_cache(ideal: Sharing, kept: Sharing, prefill_s_per_token: float, replicas: int = 1) -> Decision:
    """ideal: of all traffic, with unlimited cache; kept: of one replica's traffic, with this plan's KV
    memory.
    """
    question = "prefix cache?"
    figures = {"ideal_share": ideal.share, "kept_share": kept.share}
    if not ideal.known:
        why = "the traffic has no prefix information; lookups cost almost nothing"
        return Decision(question, "on", why, figures, "prefix cache")
    saved_s = kept.share * prefill_s_per_token * ideal.input_tokens
    figures["saved_prefill_s"] = saved_s
    where = "" if replicas == 1 else f" by one of {replicas} replicas that get requests at random"
    shares = f"{ideal.share:.1%} of prompt tokens came before, {kept.share:.1%} would still be held{where}"
    if replicas > 1 and kept.share < ideal.share / 2:
        shares += "; a router that knows prefixes would keep them together"
    if kept.share >= CACHE_PAYS_SHARE:
        saving = f"{shares}: {_seconds(saved_s)} of prefill saved over the trace"
        return Decision(question, "on: it pays", saving, figures, "prefix cache")
    return Decision(question, "on, little effect expected", shares, figures, "prefix cache")


def speculate(
    *,
    batch: float,
    ridge_batch: float,
    engine_can: bool,
    tpot_is_tight: bool,
    tpot_ms: float | None = None,
) -> Decision:
    """ridge_batch: batch size at which a decode step's arithmetic takes as long as reading the weights.
    tpot_ms: the median without guesses"""
    question = "speculate?"
    tokens = round(batch) * (DRAFT_TOKENS + 1)
    gain = expected_gain(batch, ridge_batch)
    figures = {
        "batch": batch,
        "ridge_batch": ridge_batch,
        "tokens_with_draft": float(tokens),
        "expected_gain": gain,
    }
    compared = (
        f"{batch:.0f} at once with drafts of {DRAFT_TOKENS} are {tokens} tokens a step; arithmetic binds "
        f"from {ridge_batch:.0f} on"
    )
    if tokens > SPECULATION_LOAD * ridge_batch:
        return Decision(question, "no", f"{compared}: no spare arithmetic", figures, "speculative decoding")
    if not tpot_is_tight:
        return Decision(
            question, "not needed", f"{compared}, but TPOT is met without", figures, "speculative decoding"
        )
    lack = "" if engine_can else "; this engine has no speculation"
    tpot = ""
    if tpot_ms is not None:
        figures |= {"tpot_ms": tpot_ms, "expected_tpot_ms": tpot_ms / gain}
        tpot = f", TPOT {tpot_ms / gain:.3g} ms instead of {tpot_ms:.3g}"
    return Decision(
        question,
        "worth a trial",
        f"{compared}: there is spare arithmetic, for {gain:.1f} times the tokens per second{tpot} where "
        f"{ACCEPTED:.0%} of guesses are right{lack}",
        figures,
        "speculative decoding",
    )


def expected_gain(
    batch: float, ridge_batch: float, accepted: float = ACCEPTED, draft_share: float = 0.0
) -> float:
    """Tokens per second with drafts as a multiple of without: the tokens of a verified row over the cost of
    its step, in products alone. draft_share: time of drafting, as a share of a step without."""
    tokens = sum(accepted**place for place in range(DRAFT_TOKENS + 1))
    plain = max(1.0, batch / ridge_batch)
    verifying = max(1.0, batch * (DRAFT_TOKENS + 1) / ridge_batch)
    return tokens * plain / (verifying + draft_share * plain)


def parallelize(*, tp: int, pp: int, ep: int, replicas: int, reason: str) -> Decision:
    sizes = [f"{name}={count}" for name, count in (("tp", tp), ("pp", pp), ("ep", ep)) if count > 1]
    verdict = ", ".join(sizes) or "no: one device a replica"
    copies = f"{replicas} replica{'s' * (replicas > 1)}"
    figures = {"tp": float(tp), "pp": float(pp), "ep": float(ep), "replicas": float(replicas)}
    return Decision(
        "parallelize?", verdict, f"{reason}; {copies} for the rate", figures, "tensor parallelism"
    )


def disaggregate(
    *,
    tokens_per_day: float,
    parameters: int,
    input_per_output: float,
    gpus: int,
    replica_gpus: int = 1,
    link_bytes_per_s: float | None = None,
    engine_can: bool = True,
) -> Decision:
    """Prefill and decode on separate machines: all of its gates, and chips for a replica of each.

    link_bytes_per_s: between the chips of two replicas, for the KV transfer; None: there is no link
    """
    look, sure = DISAGGREGATE_TOKENS_PER_DAY
    link = link_bytes_per_s or 0.0
    gates = {
        f"{count(tokens_per_day)} tokens a day (from {count(look)} on)": tokens_per_day >= look,
        f"{count(parameters)} parameters (from {count(DISAGGREGATE_PARAMETERS)} on)": parameters
        >= DISAGGREGATE_PARAMETERS,
        f"{input_per_output:.3g} input tokens per output token (from {DISAGGREGATE_INPUT_PER_OUTPUT:g} on)": (
            input_per_output >= DISAGGREGATE_INPUT_PER_OUTPUT
        ),
        f"a link of {link / 1e9:.3g} GB/s a chip between replicas (from {DISAGGREGATE_LINK / 1e9:g} on)": (
            link >= DISAGGREGATE_LINK
        ),
        f"{gpus} GPUs, and one replica takes {replica_gpus} (from two replicas on)": gpus >= 2 * replica_gpus,
    }
    figures = {"tokens_per_day": tokens_per_day, "input_per_output": input_per_output, "gpus": float(gpus)}
    against = [gate for gate, is_passed in gates.items() if not is_passed]
    if against:
        return Decision("disaggregate?", "no", "; ".join(against), figures, "disaggregation")
    verdict = "yes" if tokens_per_day >= sure else "worth a trial"
    lack = "" if engine_can else "; this engine cannot do it yet"
    return Decision("disaggregate?", verdict, "; ".join(gates) + lack, figures, "disaggregation")


def _usd(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def _small(amount: float) -> str:
    return f"${amount:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
