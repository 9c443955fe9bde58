"""The optimizers of a training run: Muon for the head's matrices, AdamW for its norms and its output matrix.

Muon steps along the nearest orthogonal matrix to the momentum: all directions of a matrix move alike, so that
a few hundred steps teach what AdamW needs many more for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.drafters.eagle3 import Eagle3Head

BETAS = (0.9, 0.95)
MOMENTUM = 0.95
ITERATIONS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal matrix nearest to this one: singular values end between about 0.7 and 1.2."""
    a, b, c = QUINTIC
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    is_tall = len(x) > x.shape[1]
    if is_tall:
        x = x.T
    for _ in range(ITERATIONS):
        squared = x @ x.T
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[Tensor], rate: float) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
                change = orthogonal(parameter.grad.lerp(state["momentum"], MOMENTUM))
                scale = max(1.0, len(parameter) / parameter.shape[1]) ** 0.5
                parameter.add_(change, alpha=-group["lr"] * scale)


class Optimizers:
    """Those of a head, as one. matrix_rate: peak rate of its matrices; 0: AdamW for all"""

    def __init__(self, head: Eagle3Head, rate: float, matrix_rate: float) -> None:
        matrices = [
            parameter
            for name, parameter in head.named_parameters()
            if matrix_rate and parameter.ndim == 2 and name != "lm_head.weight"
        ]
        of_muon = set(map(id, matrices))
        others = [parameter for parameter in head.parameters() if id(parameter) not in of_muon]
        self._each: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(others, rate, BETAS, weight_decay=0.0), rate)
        ]
        if matrices:
            self._each.append((Muon(matrices, matrix_rate), matrix_rate))

    def zero_grad(self) -> None:
        for optimizer, _ in self._each:
            optimizer.zero_grad(set_to_none=True)

    def step(self, share: float) -> None:
        """share: of the peak rates"""
        for optimizer, peak in self._each:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self._each]

    def load(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self._each, states, strict=True):
            optimizer.load_state_dict(state)
