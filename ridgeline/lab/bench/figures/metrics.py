"""Computes metrics from records, each exactly by the formula it carries. Used for measured and simulated
runs.

`summarize` is the only entry point; it reads only RequestRecords, and every percentile comes from the raw
records. Failed answers are in no plain percentile; `adjusted` counts them as +infinity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.lab.bench.figures.rates import Mode, prompt_share, request_share
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.statistics import Estimate, percentiles, pooled_percentiles, wilson
from ridgeline.lab.bench.figures.window import Window, concurrency, steady_window
from ridgeline.lab.slo import Slo

FORMULAS = {
    "dispatch_delay_ms": "t_send − t_sched",
    "ttft_ms": "t_first − t_send",
    "ttft_sched_ms": "t_first − t_sched",
    "ttfo_ms": "t_first_visible − t_send",
    "tpot_ms": "(t_last − t_first) / (n_out − n_first); undefined where n_out ≤ n_first",
    "itl_ms": "gaps between chunks, each spread over the tokens of its chunk, of all answers together",
    "icl_ms": "gaps between chunks, of all answers together",
    "e2e_ms": "t_last − t_send",
    "e2e_sched_ms": "t_last − t_sched",
    "ntpot_ms": "(t_last − t_send) / n_out",
    "server_queue_ms": "arrival at the server to admission, by the server's own clock",
    "server_ttft_ms": "arrival at the server to its first token, by the server's own clock",
    "server_tpot_ms": "time per token after the first, by the server's own clock",
    "inference_ms": "admission to the last token, by the server's own clock",
    "outside_inference_ms": "e2e − inference: queue, HTTP, tokenizing, the network and this client",
    "requests_per_s": "answers that ended well / steady window: closed loop, by the share of t_send…t_end "
    "inside it; open loop, those that ended inside it",
    "output_tokens_per_s": "output tokens of answers that ended well, come inside the steady window / window",
    "input_tokens_per_s": "prompt tokens of answers that ended well / window: closed loop, by the share of "
    "t_send…t_end inside the steady window; open loop, those whose first token came inside it",
    "goodput_per_s": "answers inside every limit of the SLO / window, counted as requests_per_s",
    "attainment": "answers inside every limit of the SLO / all requests offered; failures are bad",
    "cache_hit": "Σ cached prompt tokens / Σ prompt tokens; none if the server does not report them",
    "draft_acceptance": "Σ guessed tokens that were right / Σ guessed tokens that the server verified",
    "tokens_per_step": "Σ output tokens after the first / Σ steps they took: those tokens − accepted guesses",
    "failures": "requests that failed or ran out of time / all requests offered",
    "concurrency_mean": "∫ requests between t_send and t_end over the steady window / window",
    "concurrency_peak": "most requests between t_send and t_end at once",
    "usd_per_mtok": "(usd_per_hour / 3600) / output_tokens_per_s · 1e6; all cost is laid on output tokens",
    "client_cpu": "CPU seconds of the client / seconds of the run; 1 is one core",
}
HEADLINES: dict[Mode, tuple[str, ...]] = {
    "open": (
        "ttft_sched_ms",
        "tpot_ms",
        "e2e_sched_ms",
    ),  # from the planned time: includes client delays
    "closed": ("ttft_ms", "tpot_ms", "e2e_ms"),
}


class Metric(msgspec.Struct, frozen=True, omit_defaults=True):
    """A distribution (n, mean, percentiles) or one value. A percentile is None if there are too few samples;
    adjusted ones may be infinite.
    """

    name: str
    unit: str
    formula: str
    n: int = 0
    value: float | None = None
    low: float | None = None  # the interval of 95 % of a value, where there is one
    high: float | None = None
    mean: float | None = None
    std: float | None = None  # of the samples; None below two
    min: float | None = None
    max: float | None = None
    percentiles: dict[str, Estimate | None] = {}
    adjusted: dict[str, Estimate | None] = {}  # failures at +infinity
    note: str = ""


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    mode: Mode
    metrics: dict[str, Metric]
    headline: tuple[str, ...]
    window: Window
    offered: int  # sent or due, warm-up apart
    ok: int
    failed: int
    cancelled: int  # in flight or unsent when the user stopped the run
    causes: dict[str, int]  # of the failures
    warmup: int
    slo: Slo | None = None
    good: int = 0
    undefined_tpot: int = 0  # successful, with no token after the first chunk
    counting: dict[str, int] = {}  # answers by the source of their token counts
    notes: tuple[str, ...] = ()


def summarize(
    records: Sequence[RequestRecord],
    mode: Mode,
    slo: Slo | None = None,
    client_cpu: float | None = None,
    usd_per_hour: float | None = None,
) -> Summary:
    """All metrics of a run. Warm-up requests are counted and otherwise excluded."""
    measured = [record for record in records if not record.warmup]
    offered = [record for record in measured if record.status != "cancelled"]
    ok = [record for record in offered if record.status == "ok"]
    window = steady_window(offered)
    metrics = _latencies(ok, failed=len(offered) - len(ok))
    metrics |= _rates(ok, window, mode)
    metrics |= _shares(ok, len(offered)) | _speculation(ok)
    good = [record for record in ok if slo is None or meets(record, slo, mode)]
    if slo is not None:
        metrics |= _goodput(good, len(offered), window, mode)
    if usd_per_hour is not None:
        metrics |= _cost(usd_per_hour, metrics)
    mean, peak = concurrency(measured, window)
    metrics["concurrency_mean"] = _value("concurrency_mean", "requests", mean)
    metrics["concurrency_peak"] = _value("concurrency_peak", "requests", float(peak))
    if client_cpu is not None:
        metrics["client_cpu"] = _value("client_cpu", "cores", client_cpu)
    costs = [metrics["usd_per_mtok"]] if "usd_per_mtok" in metrics else []
    return Summary(
        mode,
        metrics,
        HEADLINES[mode],
        window,
        offered=len(offered),
        ok=len(ok),
        failed=len(offered) - len(ok),
        cancelled=len(measured) - len(offered),
        causes=dict(Counter(record.cause or record.status for record in offered if record.status != "ok")),
        warmup=len(records) - len(measured),
        slo=slo,
        good=len(good) if slo is not None else 0,
        undefined_tpot=sum(tpot_s(record) is None for record in ok),
        counting=dict(Counter(f"{record.counted_by}/{record.split_by}" for record in ok)),
        notes=(*_notes(ok), *(f"usd_per_mtok is {cost.note}" for cost in costs if cost.note)),
    )


def flat(summary: Summary) -> dict[str, float]:
    """`ttft_ms.p50`, `adj_ttft_ms.p90`, `output_tokens_per_s`, …: the names used by predictions."""
    named: dict[str, float] = {}
    for name, metric in summary.metrics.items():
        if metric.value is not None:
            named[name] = metric.value
        moments = {key: getattr(metric, key) for key in ("mean", "std", "min", "max")}
        named |= {f"{name}.{key}": value for key, value in moments.items() if value is not None}
        for prefix, group in (("", metric.percentiles), ("adj_", metric.adjusted)):
            named |= {f"{prefix}{name}.{key}": found.value for key, found in group.items() if found}
    return named


def meets(record: RequestRecord, slo: Slo, mode: Mode) -> bool:
    """Whether a successful answer keeps every bound. An undefined TPOT passes and is counted separately.

    In open loops ttft and e2e count from the planned time, like the headline. itl and icl are judged by an
    answer's longest.
    """
    values = {name: span(record) for name, span in _SPANS.items()}
    gaps = _gaps(record)
    values["icl_ms"] = max(gaps, default=None)
    values["itl_ms"] = max(gaps / np.maximum(record.chunk_tokens[1:], 1), default=None)
    if mode == "open":
        values["ttft_ms"], values["e2e_ms"] = values["ttft_sched_ms"], values["e2e_sched_ms"]
    return slo.is_kept({name: None if took is None else took * 1000 for name, took in values.items()})


def tpot_s(record: RequestRecord) -> float | None:
    if record.t_first is None or record.t_last is None or record.n_out <= record.n_first:
        return None
    return (record.t_last - record.t_first) / (record.n_out - record.n_first)


# ── distributions ────────────────────────────────────────────────────────────────────────────────────────

_SPANS: dict[str, Callable[[RequestRecord], float | None]] = {
    "dispatch_delay_ms": lambda r: _span(r.t_send, r.t_sched),
    "ttft_ms": lambda r: _span(r.t_first, r.t_send),
    "ttft_sched_ms": lambda r: _span(r.t_first, r.t_sched),
    "ttfo_ms": lambda r: _span(r.t_first_visible, r.t_send),
    "tpot_ms": tpot_s,
    "e2e_ms": lambda r: _span(r.t_last, r.t_send),
    "e2e_sched_ms": lambda r: _span(r.t_last, r.t_sched),
    "ntpot_ms": lambda r: _span(r.t_last, r.t_send, r.n_out),
}
_SERVER_MS: dict[str, Callable[[RequestRecord], float | None]] = {
    "server_queue_ms": lambda r: r.server.queue_ms if r.server else None,
    "server_ttft_ms": lambda r: r.server.ttft_ms if r.server else None,
    "server_tpot_ms": lambda r: r.server.tpot_ms if r.server else None,
    "inference_ms": lambda r: r.server.inference_ms if r.server else None,
    "outside_inference_ms": lambda r: _outside_ms(r),
}


def _latencies(ok: list[RequestRecord], failed: int) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for name, span in _SPANS.items():
        seconds = [took for record in ok if (took := span(record)) is not None]
        adjust = failed if name != "dispatch_delay_ms" else None
        found[name] = _distribution(name, np.asarray(seconds, dtype=np.float64) * 1000, adjust)
    found |= _pooled(ok)
    for name, told in _SERVER_MS.items():
        milliseconds = [took for record in ok if (took := told(record)) is not None]
        if milliseconds:  # omitted if the server does not report it
            found[name] = _distribution(name, np.asarray(milliseconds, dtype=np.float64), None)
    return found


def _distribution(name: str, samples: npt.NDArray[np.float64], failed: int | None) -> Metric:
    """failed: how many to count as +infinity; None: the metric does not include failures."""
    adjusted = {} if failed is None else percentiles(np.append(samples, np.full(failed, math.inf)))
    found = Metric(
        name,
        "ms",
        FORMULAS[name],
        n=len(samples),
        percentiles=percentiles(samples),
        adjusted=adjusted,
    )
    return _with_moments(found, samples)


def _with_moments(metric: Metric, samples: npt.NDArray[np.float64]) -> Metric:
    if not len(samples):
        return metric
    return msgspec.structs.replace(
        metric,
        mean=float(samples.mean()),
        std=float(samples.std(ddof=1)) if len(samples) > 1 else None,
        min=float(samples.min()),
        max=float(samples.max()),
    )


def _pooled(ok: list[RequestRecord]) -> dict[str, Metric]:
    """Gaps of all answers. Gaps of one answer are correlated, so intervals treat answers as clusters."""
    gaps = [_gaps(record) for record in ok]
    owners = np.repeat(np.arange(len(gaps)), [len(own) for own in gaps])
    raw = np.concatenate(gaps) * 1000 if gaps else np.empty(0)
    tokens = [max(count, 1) for record in ok for count in record.chunk_tokens[1:]]
    share = np.asarray(tokens, dtype=np.int64)
    return {
        name: _with_moments(
            Metric(
                name,
                "ms",
                FORMULAS[name],
                n=len(samples),
                percentiles=pooled_percentiles(samples, family),
            ),
            samples,
        )
        for name, samples, family in (
            ("itl_ms", np.repeat(raw / share, share), np.repeat(owners, share)),
            ("icl_ms", raw, owners),
        )
    }


def _gaps(record: RequestRecord) -> npt.NDArray[np.float64]:
    return np.diff(np.asarray(record.chunk_at, dtype=np.float64))


def _span(end: float | None, start: float | None, parts: int = 1) -> float | None:
    return None if end is None or start is None or parts < 1 else (end - start) / parts


def _outside_ms(record: RequestRecord) -> float | None:
    if record.server is None or record.server.inference_ms is None:
        return None
    e2e = _span(record.t_last, record.t_send)
    return None if e2e is None else e2e * 1000 - record.server.inference_ms


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────


def _rates(ok: list[RequestRecord], window: Window, mode: Mode) -> dict[str, Metric]:
    if window.seconds <= 0:
        return {}
    stamps = np.asarray([at for record in ok for at in record.chunk_at], dtype=np.float64)
    tokens = np.asarray([count for record in ok for count in record.chunk_tokens], dtype=np.int64)
    inside = (stamps > window.start) & (stamps <= window.end)  # a timestamp on an edge belongs to one window
    requests = sum(request_share(record, window, mode) for record in ok)
    prompts = sum((record.n_in or 0) * prompt_share(record, window, mode) for record in ok)
    return {
        "requests_per_s": _rate("requests_per_s", "req/s", requests, window),
        "output_tokens_per_s": _rate("output_tokens_per_s", "tok/s", int(tokens[inside].sum()), window),
        "input_tokens_per_s": _rate("input_tokens_per_s", "tok/s", prompts, window),
    }


def _shares(ok: list[RequestRecord], offered: int) -> dict[str, Metric]:
    told = [record for record in ok if record.n_cached is not None and record.n_in]
    prompt = sum(record.n_in or 0 for record in told)
    hit = sum(record.n_cached or 0 for record in told) / prompt if prompt else None
    silent = "" if told else "not reported by the server"
    failed = offered - len(ok)
    low, high = wilson(failed, offered)
    return {
        "cache_hit": Metric("cache_hit", "", FORMULAS["cache_hit"], n=len(told), value=hit, note=silent),
        "failures": Metric(
            "failures",
            "",
            FORMULAS["failures"],
            n=offered,
            value=failed / offered if offered else None,
            low=low,
            high=high,
        ),
    }


def _speculation(ok: list[RequestRecord]) -> dict[str, Metric]:
    """Absent if the server reports no guesses."""
    told = [(record.n_out - 1, record.server) for record in ok if record.server and record.n_out]
    drafted = sum(server.drafted_tokens or 0 for _, server in told)
    if not drafted:
        return {}
    accepted, later = sum(server.accepted_tokens or 0 for _, server in told), sum(n for n, _ in told)
    values = {"draft_acceptance": accepted / drafted, "tokens_per_step": later / max(1, later - accepted)}
    return {name: Metric(name, "", FORMULAS[name], n=len(told), value=each) for name, each in values.items()}


def _goodput(good: list[RequestRecord], offered: int, window: Window, mode: Mode) -> dict[str, Metric]:
    low, high = wilson(len(good), offered)
    found = {
        "attainment": Metric(
            "attainment",
            "",
            FORMULAS["attainment"],
            n=offered,
            value=len(good) / offered if offered else None,
            low=low,
            high=high,
        )
    }
    if window.seconds > 0:
        kept = sum(request_share(record, window, mode) for record in good)
        found["goodput_per_s"] = _rate("goodput_per_s", "req/s", kept, window)
    return found


def _cost(usd_per_hour: float, metrics: dict[str, Metric]) -> dict[str, Metric]:
    """With the input/output ratio, which a price per output token depends on."""
    rates = [metrics.get(f"{kind}_tokens_per_s") for kind in ("input", "output")]
    read, written = (rate.value or 0.0 if rate is not None else 0.0 for rate in rates)
    name = "usd_per_mtok"
    if written <= 0:
        return {name: Metric(name, "$", FORMULAS[name], note="no output tokens")}
    note = f"at {read / written:.2g} input tokens for each output token"
    return {name: Metric(name, "$", FORMULAS[name], value=usd_per_hour / 3600 / written * 1e6, note=note)}


def _rate(name: str, unit: str, count: float, window: Window) -> Metric:
    return Metric(name, unit, FORMULAS[name], n=round(count), value=count / window.seconds, note=window.note)


def _value(name: str, unit: str, value: float) -> Metric:
    return Metric(name, unit, FORMULAS[name], value=value)


def _notes(ok: list[RequestRecord]) -> list[str]:
    notes = []
    by_chunks = sum(record.counted_by == "chunks" for record in ok)
    if by_chunks:
        notes.append(
            f"{by_chunks} answers came without usage: their chunks are counted as tokens (--tokenizer MODEL "
            "would count their text)"
        )
    by_text = sum(record.counted_by == "tokenizer" for record in ok)
    if by_text:
        notes.append(f"{by_text} answers came without usage: their tokens are counted by --tokenizer's model")
    spread = sum(record.split_by == "spread" for record in ok)
    if spread:
        notes.append(
            f"{spread} answers have more tokens than chunks: n_first is taken as 1, the rest spread evenly"
        )
    undefined = sum(tpot_s(record) is None for record in ok)
    if undefined:
        notes.append(
            f"{undefined} answers have no TPOT (nothing came after the first chunk): they pass its limit"
        )
    silent = sum(record.n_in is None for record in ok)
    if silent:
        notes.append(f"{silent} answers came without prompt tokens: input_tokens_per_s leaves them out")
    off = sum(bool(r.planned_in) and r.n_in is not None and r.n_in != r.planned_in for r in ok)
    if off:
        notes.append(f"{off} prompts had another length at the server than planned")
    short = sum(record.n_out != record.planned_out for record in ok)
    if short:
        notes.append(f"{short} answers were longer or shorter than planned")
    return notes
