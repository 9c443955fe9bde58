"""DeviceMasks: the masks of a step's constrained samples, computed on the host and sent with one copy.

Called by the device's sampler after the forward pass is launched, so that both overlap. Only rows with a
grammar have a mask; a step without any sends no data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.grammar.masks import NoToken, mask_words
from ridgeline.engine.run.sequence_mask import fill_mask
from ridgeline.engine.schedule.request import Sequence

_RING_SIZE = 4  # host buffers, used in rotation: more than steps that can be in flight


@dataclass(frozen=True, slots=True)
class SentMasks:
    """on_device: as `adjust_logits` takes them. failures: by place, why the mask is empty."""

    on_device: Tensor
    failures: dict[int, str]


class DeviceMasks:
    def __init__(self, most_picks: int, vocab: int, device: torch.device) -> None:
        self._most_picks, self._words, self._device = most_picks, mask_words(vocab), device
        self._hosts = [torch.zeros(0, dtype=torch.int32)] * _RING_SIZE
        self._on_device = torch.zeros(0, dtype=torch.int32, device=device)
        self._slot = 0

    def send(self, seqs: list[Sequence], places: list[int]) -> SentMasks:
        """Masks of the sequences at these places, for a step that samples `seqs`."""
        size = self._most_picks + len(places) * self._words
        host = self._host(size)
        values = host.numpy()
        values[: len(seqs)] = -1
        failures: dict[int, str] = {}
        begin = self._most_picks
        for place in places:
            mask = values[begin : begin + self._words]
            try:
                fill_mask(seqs[place], mask)
            except NoToken as reason:
                failures[place] = str(reason)
                mask[:] = 0
            values[place] = begin
            begin += self._words
        if self._on_device.numel() < size:
            self._on_device = torch.empty(host.numel(), dtype=torch.int32, device=self._device)
        self._on_device[:size].copy_(host[:size], non_blocking=True)
        return SentMasks(self._on_device, failures)

    def _host(self, size: int) -> Tensor:
        slot = self._slot = (self._slot + 1) % _RING_SIZE
        if self._hosts[slot].numel() < size:
            on_gpu = self._device.type == "cuda"
            self._hosts[slot] = torch.zeros(2 * size, dtype=torch.int32, pin_memory=on_gpu)
        return self._hosts[slot]
