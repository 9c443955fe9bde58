"""The torch backend's memory needs and its loading: the reference, and the backend for models that the
native library does not support. Used by `build_engine`; the only module of the start that imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.limits.machine_limits import DeviceCeilings, MeasuredLimits, limits_of
from ridgeline.engine.limits.steady import steady_rate
from ridgeline.engine.start.loading import DUMMY_NOTE, Loaded, Progress, StepSizes, expansion_notes
from ridgeline.engine.start.memory import Footprint, MemoryPlan
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.model_spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class TorchBuild:
    def __init__(self, config: EngineConfig, path: Path, spec: ModelSpec, threads: int) -> None:
        self._config = config
        self._path = path
        self._spec = spec
        self._threads = threads
        self._dtype = "float32" if config.weights == "auto" else config.weights
        self._kv_dtype = self._dtype if config.kv_dtype == "auto" else config.kv_dtype

    @property
    def weights_bytes(self) -> int:
        return self._spec.weight_bytes(self._dtype)

    def footprint(self, sizes: StepSizes) -> Footprint:
        """A step's peak: gate and up next to the residual, or logits for every token."""
        spec = self._spec
        per_token = max(2 * spec.ffn_size + 4 * spec.hidden_size, spec.vocab_size)
        return Footprint(
            weights_bytes=self.weights_bytes,
            kv_bytes_per_token=CacheLayout.of(spec, DTYPE_BYTES[self._kv_dtype]).token_bytes,
            activation_bytes=4 * sizes.step_tokens * per_token,
            element_bytes=DTYPE_BYTES[self._dtype],
        )

    def prepare(self) -> None:
        # Some virtual machines advertise AMX but hide the CPUID leaf that describes its tiles; torch's bf16
        # matmul then dies with SIGILL. oneDNN reads this variable when torch is imported.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
        import torch

        torch.set_num_threads(self._threads)

    def load(self, plan: MemoryPlan, sizes: StepSizes, progress: Progress | None) -> Loaded:
        import torch

        from ridgeline.engine.run.host_sampler import HostSampler
        from ridgeline.engine.run.torch_runner import TorchRunner
        from ridgeline.models.decoders.reference import Decoder, allocate_kv
        from ridgeline.models.weights.torch_weights import load_weights, random_weights
        from ridgeline.ops.backend import select_backend

        spec, block_size = self._spec, self._config.block_size
        dtype = getattr(torch, self._dtype)
        is_dummy = self._config.load_format == "dummy"
        weights = random_weights(spec, dtype) if is_dummy else load_weights(self._path, spec, dtype, progress)
        decoder = Decoder(spec, weights, select_backend("torch"), plan.max_context)
        kv_cache = allocate_kv(spec, plan.num_blocks, block_size, getattr(torch, self._kv_dtype), "cpu")
        return Loaded(
            runner=TorchRunner(decoder, kv_cache, block_size, HostSampler(spec.eos_ids)),
            unit=f"{self._threads} threads",
            weights=self._dtype,
            kv=self._kv_dtype,
            weights_bytes=self.weights_bytes,
            notes=(DUMMY_NOTE,) if is_dummy else expansion_notes(spec, self._dtype),
        )

    def limits(self) -> MeasuredLimits:
        import torch

        from ridgeline.engine.limits.torch_limits import matmul_rate, read_bandwidth

        size = self.weights_bytes
        read = steady_rate(lambda: read_bandwidth(size))
        multiply = steady_rate(lambda: matmul_rate(getattr(torch, self._dtype)))
        uncertainty = max(read.uncertainty, multiply.uncertainty)
        ceilings = DeviceCeilings(read.per_s, multiply.per_s, uncertainty)
        return limits_of(self._spec, size, ceilings)
