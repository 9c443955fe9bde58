"""Alarm: one callback at one time, precise to a few microseconds, for event loops whose timers round to 1 ms.

The load and the mock server keep their due times in heaps and have one alarm each. On Linux it is a timerfd
that the loop watches; elsewhere it uses the loop's timers.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC, _NONBLOCK, _CLOEXEC, _ABSOLUTE = 1, 0o4000, 0o2000000, 1

now = time.perf_counter  # CLOCK_MONOTONIC on Linux, as the timerfd's


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """`set` replaces the previous time; the callback is called once for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._handle: asyncio.TimerHandle | None = None
        self._fd = _timerfd()
        self._spec = _Itimerspec()
        if self._fd is not None:
            loop.add_reader(self._fd, self._rung)

    def set(self, at: float) -> None:
        """at: by `now`; a past time fires at once."""
        if self._fd is None:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(at - now(), 0.0), self._callback)
            return
        nanoseconds = max(int(at * 1e9), 1)  # 0 would disarm it
        self._spec.value_s, self._spec.value_ns = divmod(nanoseconds, 1_000_000_000)
        _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _rung(self) -> None:
        assert self._fd is not None
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set again since it fired
            return
        self._callback()


def _timerfd() -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC)
    return None if fd < 0 else int(fd)


if sys.platform.startswith("linux"):
    _libc = ctypes.CDLL(None, use_errno=True)
