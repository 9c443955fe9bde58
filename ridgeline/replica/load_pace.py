"""LoadPace: when the next Load line of a feed is due.

Several routers see each other's requests only in these lines. At light load every accepted request therefore
makes a line at once: without it, all routers take the same replica for the idle one until the next regular
line. At heavy load one request changes little, and the regular lines suffice.
"""

from __future__ import annotations

LOAD_EVERY_S = 0.25
LOAD_LEAST_S = 0.02  # between two lines
EARLY_SHARE = 8  # a line is early if more than one in this many of the open requests is new


class LoadPace:
    """Of one reader of a feed. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._told_at = float("-inf")
        self._told_accepted = 0

    def told(self, accepted: int, now: float) -> None:
        """A line was sent. accepted: the counter in it."""
        self._told_at, self._told_accepted = now, accepted

    def is_early(self, accepted: int, open_requests: int) -> bool:
        """Whether the next line must not wait for its regular time."""
        return EARLY_SHARE * (accepted - self._told_accepted) > open_requests

    def due_at(self, accepted: int, open_requests: int) -> float:
        return self._told_at + (LOAD_LEAST_S if self.is_early(accepted, open_requests) else LOAD_EVERY_S)
