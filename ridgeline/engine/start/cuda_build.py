"""The GPU backend's memory needs and its loading: weights are streamed in while kernels compile.

Used by `build_engine`. Sizes are computed without torch until `prepare` imports it; the KV cache is planned
from the device's free memory, never by trial runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable, InvalidConfig
from ridgeline.engine.limits.machine_limits import MeasuredLimits, limits_of
from ridgeline.engine.start.compiled_marks import CompiledMarks
from ridgeline.engine.start.cuda_kernels import KernelLoading
from ridgeline.engine.start.cuda_preload import (
    clear_cublas,
    in_thread,
    log_errors,
    preload_compiler,
    preload_cublas,
)
from ridgeline.engine.start.device_memory import DeviceMemory
from ridgeline.engine.start.gpu_probe import find_gpu, make_context
from ridgeline.engine.start.loading import DUMMY_NOTE, Loaded, Progress, StepSizes, expansion_notes
from ridgeline.engine.start.memory import (
    GIB,
    DeviceRoom,
    Footprint,
    MemoryPlan,
    available_memory,
    planned_context,
)
from ridgeline.engine.start.memory_receipt import MemoryReceipt, planned_parts
from ridgeline.machine import cache_dir
from ridgeline.models.decoders.cuda_workspace import workspace
from ridgeline.models.errors import ModelError
from ridgeline.models.files.checkpoint_files import shard_paths, weights_file
from ridgeline.models.spec.cache_layout import CacheElement, CacheLayout
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import bytes_of
from ridgeline.models.weights.checkpoint import open_source
from ridgeline.models.weights.layout import Piece, pieces
from ridgeline.models.weights.low_bits.keep_policy import wrong_experts_keep, wrong_keep
from ridgeline.models.weights.low_bits.plan import LowBitPlan, low_bit_plan
from ridgeline.ops.low_bit_formats import ONLINE

if TYPE_CHECKING:
    import torch

    from ridgeline.engine.run.cuda.runner import CudaRunner
    from ridgeline.models.weights.torch_weights import Weights

log = logging.getLogger(__name__)

DEVICE = "cuda"
KV_STEP_BYTES = 4  # of an 8-bit cache, for each token, KV head, and key or value
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NORM_BYTES = 4  # norms are float32 for every model
# Memory not allocated here: kernel modules, cuBLAS and its workspace; a graph's nodes and arguments.
LIBRARY_BYTES = 384 << 20
GRAPH_BUCKETS = 72  # shapes of steps that are captured: batch sizes, prompts, some of both
GRAPH_BYTES, GRAPH_LAYER_BYTES = 896 << 20, 64 << 10  # fixed, and per layer of each bucket
GRAPHS_S = 1.5  # for capturing the first graphs before the engine is ready; idle time does the rest
TRIAL_ROWS, TRIAL_TOKENS = 8, 512  # the steps that measure the cost of --deterministic

Stage = Callable[[str], AbstractContextManager[None]]


class CudaBuild:
    def __init__(
        self, config: EngineConfig, path: Path, spec: ModelSpec, threads: int, stage: Stage | None = None
    ) -> None:
        self._config = config
        self._path = path
        self._spec = spec
        self._threads = threads
        self._stage: Stage = stage or (lambda name: nullcontext())
        self._dtype = model_dtype(config, spec)
        self._gpu = find_gpu()
        self._low = self._low_bits()
        if config.kv_dtype not in ("auto", self._dtype, "fp8", "int8"):
            raise InvalidConfig(
                f"--kv-dtype {config.kv_dtype}: on a GPU the KV cache has the dtype of the layers' inputs, "
                f"{self._dtype}, or fp8 or int8. Leave the flag out, or set both with --weights"
            )
        self._check_fp8()
        self._device = DeviceMemory()

    def _low_bits(self) -> LowBitPlan:
        config, spec = self._config, self._spec
        for name in config.quantization_keep:
            if wrong := wrong_keep(name, spec.num_layers):
                raise InvalidConfig(f"--quantization-keep {wrong}")
        is_read = config.weights in ONLINE or (config.weights == "auto" and spec.quantization is not None)
        source = open_source(self._path, spec) if is_read and config.load_format != "dummy" else None
        has_fp8 = self._gpu is None or self._gpu.has_fp8
        low = low_bit_plan(spec, config.weights, config.quantization_keep, source, has_fp8=has_fp8)
        if low.mxfp4_experts and (wrong := wrong_experts_keep(config.quantization_keep, spec)):
            raise InvalidConfig(f"--quantization-keep {wrong}")
        return low

    def _check_fp8(self) -> None:
        """FP8 that was asked for; what a file has in it is expanded instead."""
        if self._gpu is None or self._gpu.has_fp8:
            return
        for flag, value in (("--weights", self._config.weights), ("--kv-dtype", self._config.kv_dtype)):
            if value == "fp8":
                have = ".".join(map(str, self._gpu.capability))
                raise InvalidConfig(
                    f"{flag} fp8 needs a GPU of compute capability 8.9 or newer; {self._gpu.name} has "
                    f"{have}. Use {flag} int8"
                )

    @property
    def weights_bytes(self) -> int:
        orders = sum(4 * self._columns(layer, name) for layer, name in self._low.ordered)
        return orders + sum(self._piece_bytes(piece) for piece in pieces(self._spec))

    def _columns(self, layer: int, name: str) -> int:
        own = (piece for piece in pieces(self._spec) if (piece.layer, piece.field) == (layer, name))
        return next(own).shape[1]

    @property
    def _kv_format(self) -> str:
        return self._config.kv_dtype if self._config.kv_dtype in ("fp8", "int8") else ""

    @property
    def _cache_element(self) -> CacheElement:
        if self._kv_format:
            return CacheElement(1, scale_bytes=KV_STEP_BYTES)
        return CacheElement(DTYPE_BYTES[self._dtype])

    def _piece_bytes(self, piece: Piece) -> int:
        if (format := self._low.format_of(piece)) is None:
            return round(math.prod(piece.shape) * self._element_bytes(piece))
        return format.nbytes(piece.shape[0], piece.shape[1])

    def _element_bytes(self, piece: Piece) -> float:
        if self._stored_experts and piece.field in ("experts_gate_up", "experts_down"):
            return bytes_of("mxfp4")
        return NORM_BYTES if piece.is_norm else DTYPE_BYTES[self._dtype]

    @property
    def _stored_experts(self) -> bool:
        return self._low.mxfp4_experts

    def prepare(self) -> None:
        """Import torch and the runner with its kernels' sources, and create the device's context. Importing
        torch takes longest; work that does not need it runs in parallel."""
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
        if self._config.load_format != "dummy":
            in_thread(read_ahead, self._path)
        context = in_thread(make_context)
        marks = CompiledMarks(
            Path(os.environ["TRITON_CACHE_DIR"]),
            self._spec,
            self._dtype,
            self._stored_experts,
            sorted(self._low.formats.items()),
            self._config.kv_dtype,
            os.environ.get("RIDGELINE_PDL"),
        )
        self._kernels = KernelLoading(marks)
        self._compiler = in_thread(preload_compiler)
        import torch

        with self._stage("import kernels"):
            if not torch.cuda.is_available():
                raise BackendUnavailable(
                    "torch finds no usable GPU; use --backend native to serve on the CPU"
                )
            import ridgeline.engine.run.cuda.runner
            import ridgeline.engine.run.cuda.warm  # noqa: F401
        with self._stage("device"):
            context.join()
            self._device.open()
            self._kernels.begin()

    def footprint(self, sizes: StepSizes) -> Footprint:
        config, spec = self._config, self._spec
        context = planned_context(spec, config)
        buffers = workspace(
            spec, DTYPE_BYTES[self._dtype], sizes.step_tokens, sizes.max_running, context, self._low
        )
        return Footprint(
            weights_bytes=self.weights_bytes,
            kv_bytes_per_token=CacheLayout.of(spec, self._cache_element).token_bytes,
            activation_bytes=sum(buffers.values()),
            reserve_bytes=LIBRARY_BYTES + self._graph_bytes,
            device=DeviceRoom(
                free_bytes=self._device.free_at_start,
                most_kv_tokens=sizes.max_running * context,
                lower=what_to_lower(self.weights_bytes, buffers),
            ),
            element_bytes=DTYPE_BYTES[self._dtype],
        )

    def load(self, plan: MemoryPlan, sizes: StepSizes, progress: Progress | None) -> Loaded:
        import torch

        device = self._device
        dtype = getattr(torch, self._dtype)
        kernels = in_thread(self._warm_kernels, dtype, plan, sizes)
        device.mark("start")
        cublas = in_thread(preload_cublas, dtype)
        weights = self._weights(dtype, progress)
        with self._stage("cublas"):
            cublas.join()
        device.mark("weights")
        with self._stage("buffers"):
            runner = self._runner(weights, plan, sizes)
        device.mark("runner")
        notes = self._notes()
        if self._config.deterministic:
            with self._stage("kernels"):
                kernels.join()
            with self._stage("trial"):
                notes += (f"deterministic: {self._cost_of_determinism(runner, plan)}",)
        runner.graphs.is_loaded = self._kernels.is_loaded
        return Loaded(
            runner=runner,
            unit=device.name + ", deterministic" * self._config.deterministic,
            weights=self._weights_name,
            kv=self._kv_format or self._dtype,
            weights_bytes=weights.nbytes,
            notes=notes,
            before_first_step=kernels.join,
            after_warm_up=lambda: runner.capture_first(GRAPHS_S),
            memory=self._receipt(plan, runner.kv_bytes),
            count_drafter=self._device.count_drafter,
        )

    def limits(self) -> MeasuredLimits:
        from ridgeline.engine.limits.cuda_limits import device_ceilings

        return limits_of(self._spec, self._step_bytes, device_ceilings(self._device.name, self._dtype))

    @property
    def _graph_bytes(self) -> int:
        if not self._config.cuda_graphs:
            return 0
        return GRAPH_BYTES + GRAPH_BUCKETS * self._spec.num_layers * GRAPH_LAYER_BYTES

    @property
    def _step_bytes(self) -> int:
        """Weights read by one decode step. An embedding that is not also the head is only looked up."""
        spec = self._spec
        embed = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size * DTYPE_BYTES[self._dtype]
        return self.weights_bytes - embed

    def _weights(self, dtype: torch.dtype, progress: Progress | None) -> Weights:
        if self._config.load_format == "dummy":
            from ridgeline.models.weights.torch_weights import random_weights

            return random_weights(
                self._spec, dtype, device=DEVICE, stored_experts=self._stored_experts, low=self._low
            )
        from ridgeline.models.weights.stream import stream_weights

        return stream_weights(
            self._path,
            self._spec,
            dtype,
            progress,
            DEVICE,
            stored_experts=self._stored_experts,
            low=self._low,
        )

    def _runner(self, weights: Weights, plan: MemoryPlan, sizes: StepSizes) -> CudaRunner:
        from ridgeline.engine.run.cuda.runner import CudaRunner

        return CudaRunner(
            spec=self._spec,
            weights=weights,
            max_context=plan.max_context,
            num_blocks=plan.num_blocks,
            block_size=self._config.block_size,
            max_running=sizes.max_running,
            step_tokens=sizes.step_tokens,
            deterministic=self._config.deterministic,
            cuda_graphs=self._config.cuda_graphs,
            kv_dtype=weights.embed.tensor.dtype,
            low=self._low,
            kv_format=self._kv_format,
        )

    def _warm_kernels(self, dtype: torch.dtype, plan: MemoryPlan, sizes: StepSizes) -> None:
        """A kernel that fails here fails again at its launch and is reported there."""
        try:
            from ridgeline.engine.run.cuda.graphs import ladder

            decode_sizes = ladder(sizes.max_running)
            wanted: dict[str, Any] = {
                "spec": self._spec,
                "dtype": dtype,
                "max_rows": decode_sizes[-1],
                "step_tokens": sizes.step_tokens,
                "max_context": plan.max_context,
                "num_blocks": plan.num_blocks,
                "deterministic": self._config.deterministic,
                "block_size": self._config.block_size,
                "stored_experts": self._stored_experts,
                "low": self._low,
                "kv_format": self._kv_format,
                "verifies": self._config.speculate not in ("auto", "off"),
            }
            trial = None
            if self._config.deterministic:
                trial = min(TRIAL_ROWS, decode_sizes[-1]), min(TRIAL_TOKENS, sizes.step_tokens)
            self._compiler.join()
            self._kernels.load(wanted, decode_sizes, trial)
        except Exception as error:
            log_errors([error])

    def _cost_of_determinism(self, runner: CudaRunner, plan: MemoryPlan) -> str:
        from ridgeline.engine.start.cuda_trial import cost_of_determinism

        try:
            return cost_of_determinism(
                runner.decoder, TRIAL_ROWS, TRIAL_TOKENS, plan.max_context, self._config.cuda_graphs
            )
        except Exception as error:  # if more than the trial is broken, the first step reports it
            log.warning("could not measure the cost of --deterministic", exc_info=True)
            return f"its cost could not be measured ({error})"
        finally:
            clear_cublas()

    def _notes(self) -> tuple[str, ...]:
        notes = []
        stored = self._spec.weight_format
        if self._config.load_format == "dummy":
            notes.append(DUMMY_NOTE)
        elif self._low.notes:
            pass
        elif expanded := expansion_notes(self._spec, self._dtype):
            notes += expanded
        elif self._config.weights == "auto" and stored != self._dtype:
            notes.append(f"weights are converted from {stored} in the file to {self._dtype} (--weights)")
        if self._kv_format:
            element = {"fp8": "FP8", "int8": "int8"}[self._kv_format]
            notes.append(
                f"the KV cache has {element} keys and values with a scale per token and head; attention "
                f"multiplies them in {self._dtype}"
            )
        scheme = self._spec.quantization
        if scheme is not None and scheme.has_static_inputs and self._low.stored:
            notes.append("the file's static scales of inputs are replaced by those of each token")
        return (*notes, *self._low.notes)

    @property
    def _weights_name(self) -> str:
        """The formats of the layers' matrices, and the dtype of everything else."""
        low = dict.fromkeys(format.element for format in self._low.formats.values())
        return " and ".join([*low, self._dtype])

    def _receipt(self, plan: MemoryPlan, kv_bytes: int) -> Callable[[], MemoryReceipt]:
        """kv_bytes: the allocated size of the cache."""
        planned = planned_parts(plan, self._graph_bytes)
        return lambda: self._device.receipt(planned, kv_bytes)


def model_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """As configured; else a 16-bit type with the file's range: float16 stays, others become bfloat16."""
    if config.weights not in ("auto", *ONLINE):
        return config.weights
    return "float16" if spec.weight_format == "float16" else "bfloat16"


def read_ahead(path: Path) -> None:
    """Let the kernel read the weights' files while torch is imported, if memory can hold them."""
    with contextlib.suppress(OSError, ModelError):  # the loader reports what is wrong
        files = shard_paths(weights_file(path))
        if sum(file.stat().st_size for file in files) > available_memory() // 2:
            return
        for file in files:
            with file.open("rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def what_to_lower(weights_bytes: int, buffers: dict[str, int]) -> str:
    """The setting behind most of the buffers, or the model if the weights are larger than all of them."""
    by_flag = {
        "--max-running": buffers["logits"] + buffers["splits"] + buffers["sampling"],
        "--max-context": buffers["gather"] + buffers["rope"],
    }
    by_flag["--step-tokens"] = sum(buffers.values()) - sum(by_flag.values())
    flag = max(by_flag, key=lambda name: by_flag[name])
    advice = f"lower {flag} (it costs {by_flag[flag] / GIB:.2f} GiB)"
    if weights_bytes > sum(buffers.values()):
        return f"choose a smaller model, use a CPU backend (--backend native), or {advice}"
    return advice
