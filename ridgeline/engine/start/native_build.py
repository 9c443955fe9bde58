"""The native backend's memory needs and its loading: packed weights, KV cache and the library's threads.

Used by `build_engine`. Packed weights come from the disk cache if an earlier start stored them. Never
imports torch.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path

import numpy as np

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable
from ridgeline.engine.limits.machine_limits import MeasuredLimits, limits_of, native_ceilings
from ridgeline.engine.run.host_sampler import HostSampler
from ridgeline.engine.run.native_runner import NativeRunner, StepArrays
from ridgeline.engine.start.loading import Loaded, Progress, StepSizes, input_notes
from ridgeline.engine.start.memory import Footprint, MemoryPlan
from ridgeline.models.spec.cache_layout import CacheElement, CacheLayout
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.packed import PackedDecoder, PackedPlan, plan_packed
from ridgeline.ops.cpu.library import (
    BLOCK_TOKENS,
    Format,
    KvFormat,
    NativeDecoder,
    NativeError,
    Peak,
)

KV_FORMATS = {
    "float32": KvFormat.F32,
    "bfloat16": KvFormat.BF16,
    "int8": KvFormat.INT8,
    "int4": KvFormat.INT4,
}
KV_BYTES = {KvFormat.F32: 4.0, KvFormat.BF16: 2.0, KvFormat.INT8: 1.0, KvFormat.INT4: 0.5}
SCALED_KV = (KvFormat.INT8, KvFormat.INT4)
PANEL = 16  # the library pads heads to a multiple of this
TRIAL_ROWS, TRIAL_TOKENS, TRIAL_REPEATS = 8, 128, 5  # the steps that measure the cost of --deterministic


class NativeBuild:
    def __init__(self, config: EngineConfig, path: Path, spec: ModelSpec, threads: int) -> None:
        self._config = config
        self._path = path
        self._spec = spec
        self._threads = threads
        self._kv_dtype = "bfloat16" if config.kv_dtype == "auto" else config.kv_dtype
        self._packed: PackedDecoder | None = None

    @cached_property
    def _plan(self) -> PackedPlan:
        return plan_packed(self._path, self._spec, self._config.weights)

    @property
    def weights_bytes(self) -> int:
        return self._plan.nbytes

    def prepare(self) -> None:
        """Nothing to import: the library was loaded when it was chosen."""

    def footprint(self, sizes: StepSizes) -> Footprint:
        """Step buffers are float32: residual, branch, q, k and v, attention, the gated FFN, and inputs in the
        kernels' format; for experts also their inputs, inner values and outputs. Logits: one row per running
        sequence, or per token of a scored prompt."""
        spec = self._spec
        heads = spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
        per_token = 3 * spec.hidden_size + heads + 3 * spec.ffn_size + expert_floats_per_token(spec)
        logit_rows = max(sizes.max_running, sizes.step_tokens)
        return Footprint(
            weights_bytes=self.weights_bytes,
            kv_bytes_per_token=CacheLayout.of(spec, stored_element(KV_FORMATS[self._kv_dtype])).token_bytes,
            activation_bytes=4 * (sizes.step_tokens * per_token + logit_rows * spec.vocab_size),
        )

    def load(self, plan: MemoryPlan, sizes: StepSizes, progress: Progress | None) -> Loaded:
        packed = self._packed = self._plan.load(progress)
        decoder = self._decoder(plan.max_context, plan.num_blocks, sizes.step_tokens)
        notes = packed.notes + input_notes(self._spec)
        if self._config.deterministic:
            notes += (f"deterministic: {self._cost_of_determinism()}",)
        return Loaded(
            runner=NativeRunner(decoder, HostSampler(self._spec.eos_ids), sizes.max_running),
            unit=f"{decoder.isa}, {self._threads} threads" + ", deterministic" * self._config.deterministic,
            weights=" and ".join(packed.bytes_by_format),
            kv=self._kv_dtype,
            weights_bytes=packed.nbytes,
            mapped_bytes=packed.image.mapped_bytes,
            notes=notes,
        )

    def limits(self) -> MeasuredLimits:
        packed = self._loaded()
        ceilings = native_ceilings(
            packed.image.payload, packed.bytes_per_step, units_for(packed), self._threads
        )
        return limits_of(self._spec, packed.bytes_per_step, ceilings)

    def _decoder(
        self, max_context: int, num_blocks: int, step_tokens: int, deterministic: bool | None = None
    ) -> NativeDecoder:
        table = self._loaded().table(
            max_context=max_context,
            num_blocks=num_blocks,
            max_step_tokens=step_tokens,
            kv_format=KV_FORMATS[self._kv_dtype],
            deterministic=self._config.deterministic if deterministic is None else deterministic,
        )
        try:
            return NativeDecoder(table, self._threads)
        except NativeError as error:
            raise BackendUnavailable(str(error)) from error

    def _cost_of_determinism(self) -> str:
        """The same two steps with and without it, timed now: the cost depends on model and machine."""
        seconds: dict[bool, list[float]] = {}
        blocks = TRIAL_TOKENS // BLOCK_TOKENS
        for deterministic in (False, True):
            decoder = self._decoder(TRIAL_TOKENS, blocks, TRIAL_TOKENS, deterministic)
            seconds[deterministic] = [
                best_seconds(decoder, step) for step in (decode_step(TRIAL_ROWS), prefill_step(TRIAL_TOKENS))
            ]
            decoder.close()
        decode, prefill = (slow / fast for fast, slow in zip(*seconds.values(), strict=True))
        return (
            f"a decode step of {TRIAL_ROWS} sequences takes {decode:.2f} times as long as without it, "
            f"a prefill of {TRIAL_TOKENS} tokens {prefill:.2f} times"
        )

    def _loaded(self) -> PackedDecoder:
        assert self._packed is not None, "call load() first"
        return self._packed


def stored_element(format: KvFormat) -> CacheElement:
    """Heads are padded to whole panels. Each key and each value has a float scale in int8, a scale and a
    minimum of 16 bits in int4."""
    return CacheElement(KV_BYTES[format], scale_bytes=4 if format in SCALED_KV else 0, multiple=PANEL)


def expert_floats_per_token(spec: ModelSpec) -> int:
    """Floats that a step's buffers hold for each of its tokens, for the experts that it chooses."""
    most = 0
    for ffn in {layer.ffn for layer in spec.layers}:
        if isinstance(ffn, Experts):
            inputs = 5 * max(spec.hidden_size, ffn.size) // 4  # a float, or two limbs of a byte each
            chosen = ffn.per_token * (inputs + ffn.size + spec.hidden_size)
            most = max(most, chosen + spec.hidden_size + 3 * (ffn.num + PANEL))
    return most


def units_for(packed: PackedDecoder) -> tuple[Peak, ...]:
    """The units that can multiply by most of these weights; the processor may lack the first."""
    format = packed.main_format
    if format is Format.F32:
        return (Peak.F32,)
    return (Peak.BF16, Peak.F32) if format in (Format.BF16, Format.F8) else (Peak.INT8, Peak.F32)


def decode_step(rows: int) -> StepArrays:
    """The first token of each of `rows` sequences, one block each."""
    each = np.arange(rows, dtype=np.int32)
    return StepArrays(
        token_ids=each,
        positions=np.zeros(rows, np.int32),
        query_starts=np.arange(rows + 1, dtype=np.int32),
        block_tables=each[:, None].copy(),
        logit_rows=each,
    )


def prefill_step(tokens: int) -> StepArrays:
    each = np.arange(tokens, dtype=np.int32)
    return StepArrays(
        token_ids=each,
        positions=each,
        query_starts=np.array([0, tokens], np.int32),
        block_tables=np.arange(-(-tokens // BLOCK_TOKENS), dtype=np.int32)[None, :],
        logit_rows=each[-1:],
    )


def best_seconds(decoder: NativeDecoder, step: StepArrays) -> float:
    decoder.execute(*step)  # warm pages and caches
    best = float("inf")
    for _ in range(TRIAL_REPEATS):
        started = time.perf_counter()
        decoder.execute(*step)
        best = min(best, time.perf_counter() - started)
    return best
