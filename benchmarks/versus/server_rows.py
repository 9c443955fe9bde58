"""Two servers side by side: 16 streams over HTTP, the start of a process to its first token, its peak memory.

Called by cpu_vs_llamacpp.py. The servers of a row run at the same time but are loaded in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ridgeline.models.files.pull import ensure
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.read_spec import read_spec
from versus import engine_rates
from versus import rival_servers as servers
from versus.bench import Bench, measure_ceilings, median_ceilings
from versus.comparison import Figure, Row
from versus.http_load import Round
from versus.peer_llamacpp import CACHES, Tuned, Variant, tune
from versus.quiet_machine import Sample

QUESTION_TOKENS, SYSTEM_TOKENS = 27, 285  # of the HTTP rounds, the template counted with the former
F16, BF16_PLAIN = CACHES[0], CACHES[4]
HTTP_VARIANTS = [
    Variant("Q4_0", F16),
    Variant("Q4_0", (*F16, "-kvu")),
    Variant("Q4_0", BF16_PLAIN),
    Variant("Q4_0", (*F16, "-ub", "128")),
    Variant("Q4_0", (*F16, "--poll", "0")),
    Variant("Q8_0", F16),
]
START_VARIANTS = [
    Variant("Q4_0", ()),
    Variant("Q4_0", ("--no-repack",)),
    Variant("Q4_0", ("--no-warmup",)),
    Variant("Q4_1", ()),
]
# A context of 512 tokens: the KV cache of both sides is not in use.
LARGE_MEMORY_VARIANTS = [
    Variant("Q4_K_M", (*F16, "-c", "512")),
    Variant("Q4_K_M", (*F16, "-c", "512", "--no-repack")),
]
LARGE_MEMORY = 1.15  # of the file
MEMORY_VARIANTS = [Variant("Q4_0", F16), Variant("Q4_0", (*F16, "--no-repack")), Variant("Q4_1", F16)]


def http_rows(bench: Bench, output_bar: float, warm_bar: float) -> list[Row]:
    """16 streams with one system prompt: new to the server (cold), then known to it (warm)."""
    rows = [
        Row("http.output", f"HTTP, {servers.STREAMS} streams: output", "tok/s", output_bar),
        Row("http.ttft.warm", "same: TTFT p50, warm", "s", warm_bar, higher_wins=False),
        Row("http.ttft.cold", "same: TTFT p50, cold", "s", 1 / 8, higher_wins=False),
    ]
    if not any(bench.wanted(row.key) for row in rows):
        return []
    variants = _http_finalists(bench, rows)
    rivals = {"": servers.ours("smollm2-135m")}
    rivals |= {str(v): servers.theirs(bench.peer, bench.smollm2[v.format], v) for v in variants}
    ceilings = []
    try:
        for rival in rivals.values():
            rival.start()
        for number in range(bench.repeats):
            ceilings.append(measure_ceilings(bench, bench.smollm2["Q4_1"]))
            for variant, rival in rivals.items():
                cold, warm = _cold_and_warm(bench, rival)
                what = f"{number + 1}. http {rival.name}"
                bench.said(f"{what} TTFT cold", cold.value.ttft_p50_s, cold)
                bench.said(f"{what} output, warm", warm.value.tokens_per_s, warm)
                for row, sample in zip(rows, _http_samples(cold, warm), strict=True):
                    figure = row.theirs.setdefault(variant, Figure()) if variant else row.ours
                    figure.samples.append(sample)
    finally:
        for rival in rivals.values():
            rival.stop()
    bench.ceilings.setdefault("smollm2", median_ceilings(ceilings))
    for row in rows:
        row.ours.limit = _http_limit(bench, row, bench.smollm2["Q4_1"])
        for v in variants:
            row.theirs[str(v)].limit = _http_limit(bench, row, bench.smollm2[v.format])
    return rows


def _http_finalists(bench: Bench, rows: list[Row]) -> list[Variant]:
    """Whatever is best for one of the three rows runs in all of them: each row then has its own best."""
    seen: dict[Variant, tuple[float, float, float]] = {}

    def try_all() -> None:
        for variant in HTTP_VARIANTS:
            rival = servers.theirs(bench.peer, bench.smollm2[variant.format], variant)
            try:
                rival.start()
                cold, warm = _cold_and_warm(bench, rival)
            finally:
                rival.stop()
            seen[variant] = tuple(s.value for s in _http_samples(cold, warm))  # type: ignore[assignment]
            bench.said(f"flags of http: {variant}, output", seen[variant][0], warm)

    def pick(index: int, row: Row) -> Tuned:
        if not seen:
            try_all()
        return tune(lambda variant: seen[variant][index], HTTP_VARIANTS, higher_wins=row.higher_wins)

    chosen: dict[Variant, None] = {}
    for index, row in enumerate(rows):
        tuned = bench.tuned(row.key, lambda i=index, r=row: pick(i, r))
        row.tried = tuned.tried
        chosen[tuned.finalists[0]] = None
    return list(chosen)


def _cold_and_warm(bench: Bench, rival: servers.Server) -> tuple[Sample[Round], Sample[Round]]:
    prompts: list[str] = []

    def cold() -> Round:
        prompts.append(servers.new_system_prompt(bench.rng))  # a repeated try must be as cold as the first
        return servers.shared_prompt_round(rival, prompts[-1], bench.rng)

    first = bench.measured(cold)
    return first, bench.measured(lambda: servers.shared_prompt_round(rival, prompts[-1], bench.rng))


def _http_samples(cold: Sample[Round], warm: Sample[Round]) -> Iterable[Sample[float]]:
    yield Sample(warm.value.tokens_per_s, warm.foreign_share, warm.attempts)
    yield Sample(warm.value.ttft_p50_s, warm.foreign_share, warm.attempts)
    yield Sample(cold.value.ttft_p50_s, cold.foreign_share, cold.attempts)


def _http_limit(bench: Bench, row: Row, model: Path) -> float:
    """Output: every token decoded. First token: half of the questions computed, and a cold prompt once."""
    spec, ceilings = read_spec(model), bench.ceilings["smollm2"]
    if row.higher_wins:
        context = SYSTEM_TOKENS + QUESTION_TOKENS + servers.ANSWER_TOKENS // 2
        weights = engine_rates.step_weight_bytes(model, spec)
        return engine_rates.decode_limit(spec, weights, servers.STREAMS, context, ceilings)
    questions = servers.STREAMS // 2 * spec.prefill_flops(QUESTION_TOKENS, SYSTEM_TOKENS)
    system = spec.prefill_flops(SYSTEM_TOKENS) if row.key.endswith("cold") else 0
    return (questions + system) / ceilings.int8_ops_per_s


# ---- start-up and memory ----


@dataclass(frozen=True)
class Case:
    """A row with a new process for every sample, and how both sides start."""

    row: Row
    model: str
    files: dict[str, Path]  # by format, ours first
    variants: list[Variant]
    measure: Callable[[servers.Server], float]
    slots: int | None = None
    flags: tuple[str, ...] = ()  # ours


def process_rows(bench: Bench) -> list[Row]:
    """A new process for every sample: to its first token, and its peak memory."""

    def seconds_to_token(rival: servers.Server) -> float:
        try:
            return rival.start()
        finally:
            rival.stop()

    def peak_mb(rival: servers.Server, fill: bool = True) -> float:
        try:
            rival.start()
            if fill:
                servers.fill_kv(rival, bench.rng)
            return rival.peak_resident_bytes() / 1e6
        finally:
            rival.stop()

    kv = ("--kv-tokens", str(servers.KV_TOKENS))
    start = Row("start", "serve to first token", "s", 1.5, higher_wins=False, at_most=1.0)
    memory = Row("memory", f"peak RSS, 4-bit, {servers.KV_TOKENS} KV tokens", "MB", 1.2, higher_wins=False)
    cases = [
        Case(start, "smollm2-135m", bench.smollm2, START_VARIANTS, seconds_to_token),
        Case(memory, "smollm2-135m", bench.smollm2, MEMORY_VARIANTS, peak_mb, servers.STREAMS, kv),
    ]
    if bench.wanted("qwen-coder.memory"):
        file = ensure("qwen2.5-coder-1.5b").path
        most = round(LARGE_MEMORY * file.stat().st_size / 1e6)
        large = Row(
            "qwen-coder.memory", "1.5B: peak RSS, KV cache not in use", "MB", 1.2, False, at_most=most
        )
        cases.append(
            Case(
                large, "qwen2.5-coder-1.5b", {"Q4_K_M": file}, LARGE_MEMORY_VARIANTS,
                lambda rival: peak_mb(rival, fill=False), flags=kv,
            )
        )  # fmt: skip
    return [_process_row(bench, case) for case in cases if bench.wanted(case.row.key)]


def _process_row(bench: Bench, case: Case) -> Row:
    row = case.row
    for number in range(bench.repeats):
        mine = servers.ours(case.model, *case.flags)
        row.ours.samples.append(bench.sample(f"{number + 1}. {row.key} ours", lambda s=mine: case.measure(s)))
        for variant in case.variants:
            rival = servers.theirs(bench.peer, case.files[variant.format], variant, case.slots)
            sample = bench.sample(f"{number + 1}. {row.key} {variant}", lambda s=rival: case.measure(s))
            row.theirs.setdefault(str(variant), Figure()).samples.append(sample)
    if row.key == "start" and "smollm2" not in bench.ceilings:
        bench.ceilings["smollm2"] = measure_ceilings(bench, bench.smollm2["Q4_1"])
    ours = next(iter(case.files.values()))
    for figure, model in [(row.ours, ours)] + [
        (row.theirs[str(v)], case.files[v.format]) for v in case.variants
    ]:
        figure.limit = _process_limit(bench, row, model)
    return row


def _process_limit(bench: Bench, row: Row, model: Path) -> float:
    """The file read once; in memory the file, and the KV cache where it is in use."""
    size = model.stat().st_size
    if row.key == "start":
        return size / bench.ceilings["smollm2"].read_bytes_per_s
    kv_tokens = servers.KV_TOKENS if row.key == "memory" else 0
    return (size + kv_tokens * CacheLayout.of(read_spec(model), 2).token_bytes) / 1e6
