"""Shows how far the weights are while an engine starts: one line, rewritten on a terminal, logged elsewhere.

The first start on a CPU packs the weights for it, which takes seconds to minutes. A start that is ready
sooner than DELAY_S shows nothing. Called by the engine process, with the loader's (done, total).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger("ridgeline.engine")

DELAY_S = 1.0
TERMINAL_EVERY_S, LOG_EVERY_S = 0.2, 10.0


class WeightsProgress:
    """A loader's progress as text: percent, and the seconds that are left at the rate so far."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began: float | None = None
        self._shown = 0.0
        self._line_open = False  # on a terminal

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._began is None:
            self._began = now
            self._shown = now + DELAY_S - self._every  # the next line is due DELAY_S from now
        if done >= total:
            self._end()
        elif now >= self._shown + self._every and done > 0:
            self._shown = now
            left = (now - self._began) * (total - done) / done
            self._show(f"preparing weights: {100 * done // total} %, about {left:.0f} s left")

    @property
    def _every(self) -> float:
        return TERMINAL_EVERY_S if self._stream.isatty() else LOG_EVERY_S

    def _show(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._line_open = True
        else:
            log.info(text)

    def _end(self) -> None:
        if self._line_open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._line_open = False
