"""The interface below the torch decoder: a namespace of ops, chosen once at start.

`reference` is the specification, `torch_backend` the faster twin for serving. The native library and the CUDA
decoder do not use this interface: they fuse ops. Tests compare them with `reference`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from torch import Tensor

from ridgeline.ops import reference, torch_backend
from ridgeline.ops.inputs import StepInputs
from ridgeline.ops.reference import Activation


class Backend(Protocol):
    """The ops a decoder calls. Shapes, layouts and tolerances are in `reference`, op by op."""

    NAME: str

    def embed(self, token_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def write_kv(self, keys: Tensor, values: Tensor, kv: Tensor, slots: Tensor) -> None: ...

    def plan_attention(self, inputs: StepInputs, window: int | None, chunked: bool = False) -> Any: ...

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        plan: Any,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def mlp(
        self,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        activation: Activation,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor: ...

    def gated_mlp(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        activation: Activation,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor: ...

    def route(
        self,
        logits: Tensor,
        per_token: int,
        *,
        scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax",
        normalized: bool = True,
        scale: float = 1.0,
        choice_bias: Tensor | None = None,
        groups: int = 1,
        top_groups: int = 1,
        margin: float = 0.0,
    ) -> tuple[Tensor, Tensor]: ...

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        activation: Activation,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        clamp: float | None = None,
        scales_input: bool = False,
    ) -> Tensor: ...


_BACKENDS: dict[str, Backend] = {"torch": torch_backend, "reference": reference}


def select_backend(name: str = "auto") -> Backend:
    """The backend of this name; "auto" is the fastest one available."""
    if name == "auto":
        return torch_backend
    if name not in _BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[name]
