"""Our engine in this process, timed: decode of many streams, prefill of one prompt, and the limits of both.

Called by cpu_vs_llamacpp.py. The engine is built as a user gets it, but without speculation. The clock
runs over whole steps: planning, computing, sampling and applying, where a peer's benchmark only computes.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.start.build import BuiltEngine, build_engine
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec

KV_BYTES = 2  # bf16 or f16: what both engines keep by default
_names = itertools.count()


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do, measured in the same run as everything that stands beside it."""

    read_bytes_per_s: float
    int8_ops_per_s: float


def load(path: Path) -> BuiltEngine:
    """Without drafts: a row counts steps, and the peer does not speculate."""
    return build_engine(EngineConfig(model=str(path), speculate="off"), path)


def measure_ceilings(read_bytes: int, threads: int) -> Ceilings:
    from ridgeline.ops.cpu import library

    return Ceilings(
        library.measure_read(read_bytes, threads), library.measure_peak(library.Peak.INT8, threads)
    )


def decode_rate(engine: BuiltEngine, streams: int, prompt: int, tokens: int, rng: random.Random) -> float:
    """Tokens per second of all streams together, from when every prompt is computed, over `tokens` steps."""
    core, vocab = engine.core, engine.spec.vocab_size
    # Streams whose prompt is computed early decode while the others' are: they need tokens to spare.
    spare = 2 * streams * prompt // core.scheduler.limits.step_tokens + streams + 8
    params = SamplingParams(max_tokens=tokens + spare, temperature=0.0, ignore_eos=True)
    names = [_add(engine, _random_prompt(rng, vocab, prompt), params) for _ in range(streams)]
    begun: set[str] = set()
    while len(begun) < streams:
        begun.update(delta.request_id for delta in core.step() if delta.tokens)
    made: Counter[str] = Counter()
    started = time.perf_counter()
    for _ in range(tokens):
        for delta in core.step():
            made[delta.request_id] += len(delta.tokens)
    seconds = time.perf_counter() - started
    for name in names:
        core.abort(name)
    core.idle()
    if sorted(made) != sorted(names) or set(made.values()) != {tokens}:
        raise RuntimeError(f"{streams} streams were to make {tokens} tokens each, but made {dict(made)}")
    return streams * tokens / seconds


def prefill_rate(engine: BuiltEngine, prompt: int, rng: random.Random) -> float:
    """Prompt tokens per second, from the request's arrival to its first token."""
    core = engine.core
    prompt_ids = _random_prompt(rng, engine.spec.vocab_size, prompt)
    started = time.perf_counter()
    _add(engine, prompt_ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while core.has_work:
        core.step()
    seconds = time.perf_counter() - started
    core.idle()
    return prompt / seconds


def _add(engine: BuiltEngine, prompt_ids: list[int], params: SamplingParams) -> str:
    name = f"bench-{next(_names)}"
    engine.core.add(Request(name, prompt_ids, params, time.monotonic()))
    return name


def _random_prompt(rng: random.Random, vocab: int, length: int) -> list[int]:
    """Never seen before, so that nothing comes from the prefix cache."""
    return [rng.randrange(100, vocab) for _ in range(length)]


# ---- limits: what no engine can beat with these bytes and this machine ----


def step_weight_bytes(model: Path, spec: ModelSpec, streams: int = 1) -> int:
    """Bytes of weights one decode step must read; of an untied embedding only the rows of its tokens, and of
    routed experts those that are chosen, as many as `streams` independent choices reach on average."""
    if model.is_dir():  # dense: every stored byte but an untied embedding's, which these models do not have
        return sum(file.stat().st_size for file in model.glob("*.safetensors"))
    tensors = GgufFile(model).tensors
    of_experts = sum(tensor.nbytes for name, tensor in tensors.items() if "_exps." in name)
    total = sum(tensor.nbytes for tensor in tensors.values()) - of_experts
    ffn = spec.layers[-1].ffn
    if isinstance(ffn, Experts):
        total += round(of_experts * (1 - (1 - ffn.per_token / ffn.num) ** streams))
    return total if spec.tied_embeddings else total - tensors["token_embd.weight"].nbytes


def decode_limit(spec: ModelSpec, weight_bytes: int, streams: int, context: int, ceilings: Ceilings) -> float:
    """A step reads all weights and every stream's KV, and multiplies every row by every weight."""
    step_bytes = weight_bytes + streams * CacheLayout.of(spec, KV_BYTES).read(context)
    seconds = max(
        step_bytes / ceilings.read_bytes_per_s, streams * spec.decode_flops(context) / ceilings.int8_ops_per_s
    )
    return streams / seconds


def prefill_limit(spec: ModelSpec, prompt: int, ceilings: Ceilings) -> float:
    return prompt / (spec.prefill_flops(prompt) / ceilings.int8_ops_per_s)
