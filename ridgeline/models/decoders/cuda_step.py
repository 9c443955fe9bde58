"""DeviceStep: the inputs of one step on the device, made by the CUDA runner and read by the CUDA decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.ops.cuda.attention.prefill_plan import PrefillViews
from ridgeline.ops.cuda.attention.shared_prefix import SharedPrefix


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step's inputs on the device. The first `num_decodes` tokens are rows of one token each."""

    token_ids: Tensor  # [T] int32, as are all of these
    positions: Tensor  # [T]
    slots: Tensor  # [T]: slot of the token's KV; -1 is padding
    tables: Tensor  # [rows, blocks]
    table_rows: Tensor  # [num_decodes] rows of `tables`
    num_decodes: int
    num_logits: int  # rows of logits needed: for the first num_logits entries of `logit_rows`
    logit_rows: Tensor | None = None  # [≥ num_logits] tokens whose last hidden state is needed; None: all
    prefill: PrefillViews | None = None  # the other rows
    prefix: SharedPrefix | None = None  # decode rows that share their first blocks
    verifies: bool = False  # decode rows may be of one sequence: keys are stored before any is read

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == self.num_tokens
