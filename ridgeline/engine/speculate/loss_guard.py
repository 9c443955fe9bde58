"""LossGuard: pauses speculation that costs more than it saves, whatever was expected of it.

For drafters that read text; `LossBudget` is for those that compute.

It compares the time of steps with drafts with the predicted time of the plain steps that they replaced. Each
pause in a row is twice as long as the one before, so that the loss becomes a smaller and smaller share.
"""

from __future__ import annotations

WINDOW = 32  # steps with drafts that are judged together
FIRST_PAUSE = 64  # steps
LONGEST_PAUSE = 4096


class LossGuard:
    def __init__(self) -> None:
        self.pauses = 0
        self._saved_s = 0.0  # predicted time of the plain steps for the same tokens, in this window
        self._spent_s = 0.0
        self._steps = 0
        self._paused_steps = 0
        self._next_pause = FIRST_PAUSE

    @property
    def is_paused(self) -> bool:
        return self._paused_steps > 0

    def pass_step(self) -> None:
        """A step without drafts."""
        if self._paused_steps:
            self._paused_steps -= 1

    def note(self, plain_s: float, spent_s: float) -> None:
        """A step with drafts took spent_s; plain steps would have taken plain_s for its tokens.

        A step that took several times as long was disturbed, and says nothing about drafts.
        """
        if spent_s > 4 * plain_s:
            return
        self._saved_s += plain_s
        self._spent_s += spent_s
        self._steps += 1
        if self._steps < WINDOW:
            return
        if self._spent_s > self._saved_s:
            self.pauses += 1
            self._paused_steps = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        else:
            self._next_pause = max(FIRST_PAUSE, self._next_pause // 2)
        self._saved_s = self._spent_s = 0.0
        self._steps = 0
