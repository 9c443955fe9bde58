"""StepBudget: the most tokens one step computes. Reduced when device memory runs out, restored in stages.

Owned by the scheduler. Pure logic: it counts steps and reads no clock. Another process on the device, or one
rare combination of rows, may use the memory for a moment; the engine must not stay slow because of it.
"""

from __future__ import annotations

LEAST_TOKENS = 256  # below this a smaller step saves hardly any memory
FIRST_TRIAL_STEPS = 64  # steps that succeed before the budget grows by one stage
MAX_TRIAL_STEPS = 8192


class StepBudget:
    """A shortage halves the budget. It doubles again after `trial_steps` steps that succeed.

    Each further shortage doubles `trial_steps`, so that a budget that is too large for the device is tried
    less and less often. `trial_steps` successful steps at the full budget reset the count of shortages.
    """

    def __init__(self, full_tokens: int) -> None:
        self.tokens = self.full_tokens = full_tokens
        self.trial_steps = FIRST_TRIAL_STEPS
        self._shortages = 0
        self._succeeded = 0  # steps since the last change
        self._has_grown = False  # since the last shortage

    @property
    def is_reduced(self) -> bool:
        return self.tokens < self.full_tokens

    def reduce(self) -> None:
        """The device ran out of memory for a step."""
        if self._shortages and (self._succeeded or self._has_grown):  # a new shortage, not the same one
            self.trial_steps = min(2 * self.trial_steps, MAX_TRIAL_STEPS)
        self._shortages += 1
        self._succeeded = 0
        self._has_grown = False
        self.tokens = max(self.tokens // 2, min(self.tokens, LEAST_TOKENS))

    def step_succeeded(self) -> None:
        if not self._shortages:  # nearly always
            return
        self._succeeded += 1
        if self._succeeded < self.trial_steps:
            return
        self._succeeded = 0
        if self.is_reduced:
            self._has_grown = True
            self.tokens = min(2 * self.tokens, self.full_tokens)
        else:
            self._shortages = 0
            self.trial_steps = FIRST_TRIAL_STEPS
