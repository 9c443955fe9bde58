"""Small models of every family, engines around them, and what comes of requests: for the checks on a device
and for the tests that run the same engine in Triton's interpreter. Needs torch and triton alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.cuda.runner import CudaRunner
from ridgeline.engine.run.host_sampler import HostSampler
from ridgeline.engine.run.torch_runner import TorchRunner
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits
from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.spec.ffn import Experts, Router
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.weights.torch_weights import (
    DecoderWeights,
    LayerWeights,
    Weight,
    Weights,
    random_weights,
)
from ridgeline.ops.backend import select_backend
from tests.models.specs import Place, decoder_spec

BLOCK_SIZE = 16
GARBAGE = 12345  # what memory of integers holds before anybody writes to it

Work = list[tuple[list[int], SamplingParams]]


@dataclass
class Answer:
    """What one sample of one request came to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits of an engine: of its steps, of its pool, of its sequences."""

    step_tokens: int = 32
    max_running: int = 8
    num_blocks: int = 32
    max_context: int = 128
    prefill_chunk: int | None = None

    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            step_tokens=self.step_tokens,
            prefill_chunk=self.prefill_chunk or self.step_tokens,
            max_running=self.max_running,
            max_waiting=1000,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_context=self.max_context,
        )


def family(name: str, **sizes: Any) -> ModelSpec:
    """A spec with the features of a family: llama, qwen2, qwen3, mistral or gemma3."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 40,
        "vocab_size": 101,
        "max_context": 128,
        "num_layers": 2,
        "window": 9,
        "eos_ids": (0,),
        **sizes,
    }
    num_layers, window = shape.pop("num_layers"), shape.pop("window")
    dim = shape["head_dim"]
    layers: list[Place] = [(RopeSpec(10000.0, dim), None)] * num_layers
    features: dict[str, Any] = {}
    if name == "qwen2":
        features = {"qkv_bias": True}
    elif name == "qwen3":
        features = {"qk_norm": True}
    elif name == "mistral":
        layers = [(RopeSpec(10000.0, dim), window)] * num_layers
    elif name == "gemma3":
        near, far = (RopeSpec(10000.0, dim), window), (RopeSpec(1e6, dim), None)
        layers = [far if number % 2 else near for number in range(num_layers)]
        features = {
            "qk_norm": True,
            "post_norms": True,
            "activation": "gelu_tanh",
            "embedding_scale": math.sqrt(shape["hidden_size"]),
            "logit_softcap": 30.0,
            "softcap": 50.0,
        }
    elif name == "qwen3_moe":
        features = {"qk_norm": True, "experts": Experts(6, 3, 16)}
    elif name == "qwen2_moe":
        routed = Experts(5, 2, 24, shared_size=40, shared_gate=True, router=Router(normalized=False))
        features = {"qkv_bias": True, "experts": routed, "dense_layers": (1,)}
    elif name != "llama":
        raise ValueError(f"unknown family {name!r}")
    return decoder_spec(family=name, name=name, norm_eps=1e-6, layers=layers, **features, **shape)


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3_moe", "qwen2_moe")


def weights_of(
    spec: ModelSpec, dtype: torch.dtype, seed: int = 0, device: str | torch.device = "cpu"
) -> Weights:
    """Random weights whose norms differ from one."""
    weights = random_weights(spec, dtype, seed, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for part in (weights, *weights.layers):
        for name in (
            "attn_norm",
            "ffn_norm",
            "q_norm",
            "k_norm",
            "post_attn_norm",
            "post_ffn_norm",
            "final_norm",
        ):
            norm = getattr(part, name, None)
            if norm is not None:
                norm.uniform_(0.7, 1.3, generator=generator)
    return weights


def on_cpu(weights: Weights) -> Weights:
    """The same weights for the reference."""

    def moved(value: Any) -> Any:
        if isinstance(value, Weight):
            return replace(value, parts={name: part.cpu() for name, part in value.parts.items()})
        return value.cpu() if isinstance(value, Tensor) else value

    def copied(part: Any) -> dict[str, Any]:
        return {name: moved(getattr(part, name)) for name in type(part).__dataclass_fields__}

    layers = [LayerWeights(**copied(layer)) for layer in weights.layers]
    parts = {**copied(weights), "layers": layers}
    if weights.lm_head is weights.embed:
        parts["lm_head"] = parts["embed"]
    return DecoderWeights(**parts)


def cuda_runner(
    spec: ModelSpec, weights: Weights, sizes: Sizes, kind: type[CudaRunner] = CudaRunner, **more: Any
) -> CudaRunner:
    return kind(
        spec=spec,
        weights=weights,
        max_context=sizes.max_context,
        num_blocks=sizes.num_blocks,
        block_size=BLOCK_SIZE,
        max_running=sizes.max_running,
        step_tokens=sizes.step_tokens,
        **more,
    )


def torch_runner(spec: ModelSpec, weights: Weights, sizes: Sizes) -> TorchRunner:
    """The reference, on the CPU, over weights that are there."""
    decoder = Decoder(spec, weights, select_backend("torch"), sizes.max_context)
    kv = allocate_kv(spec, sizes.num_blocks, BLOCK_SIZE, weights.embed.tensor.dtype)
    return TorchRunner(decoder, kv, BLOCK_SIZE, HostSampler(spec.eos_ids))


def serve(runner: Any, sizes: Sizes, work: Work, lookahead: int | None = None) -> list[list[Answer]]:
    """All the work together, on an engine that begins empty; for each request its n answers."""
    core = EngineCore(Scheduler(sizes.limits()), runner, lookahead=lookahead)
    found = answers(core, work)
    if isinstance(runner, CudaRunner):
        runner.drop_sequences()  # the next engine does not know the sequences of the last one
    return found


def answers(core: EngineCore, work: Work) -> list[list[Answer]]:
    """As `serve`, on an engine that may have served before."""
    found: dict[str, list[Answer]] = {}
    for number, (prompt, params) in enumerate(work):
        found[f"r{number}"] = [Answer() for _ in range(params.n)]
        core.add(Request(f"r{number}", prompt, params))
    while core.has_work:
        for delta in core.step():
            answer = found[delta.request_id][delta.index]
            answer.tokens += delta.tokens
            answer.logprobs += delta.logprobs
            answer.prompt_logprobs += delta.prompt_logprobs
            answer.error = delta.error or answer.error
    core.check_integrity()
    return list(found.values())


def tokens_of(results: list[list[Answer]]) -> list[list[list[int]]]:
    return [[answer.tokens for answer in request] for request in results]


def errors_of(results: list[list[Answer]]) -> list[str]:
    return [answer.error for request in results for answer in request if answer.error is not None]


def bits_of(results: list[list[Answer]]) -> list[Any]:
    """Everything an answer says, floats to the last bit."""
    return [[(a.tokens, a.logprobs, a.prompt_logprobs, a.error) for a in request] for request in results]


@torch.inference_mode()
def poison(runner: CudaRunner) -> None:
    """NaN into what the next step must write before it reads: KV cache, buffers, the sampler's scratch."""
    on_gpu = runner.kv.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    sampler = runner._sampler
    for tensor in _tensors(runner.kv, runner.decoder.buffers, sampler._scratch.filters, sampler._logprobs):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    sampler._scratch._changed.fill_(float("nan"))
    if on_gpu:
        torch.cuda.synchronize()  # the runner has its own stream


def _tensors(*holders: Any) -> Iterator[Tensor]:
    for holder in holders:
        if isinstance(holder, Tensor):
            yield holder
        elif is_dataclass(holder):
            yield from _tensors(*(getattr(holder, each.name) for each in fields(holder)))
        elif hasattr(holder, "__dict__"):
            yield from _tensors(*(value for value in vars(holder).values() if isinstance(value, Tensor)))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Unwritten memory holds NaN (and no small numbers) instead of whatever lay there before."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(GARBAGE % 128 if tensor.itemsize == 1 else GARBAGE)

    torch.empty = lambda *args, **options: filled(empty(*args, **options))
    torch.empty_like = lambda *args, **options: filled(empty_like(*args, **options))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like
