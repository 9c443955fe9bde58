"""Routers that end: they have their drain, also if the controller stood still meanwhile."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.controller import routers as routers_module
from ridgeline.fleet.controller.routers import Routers


class DrainingRouter:
    """Ends after some looks at it, or when it is killed."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self.signals: list[signal.Signals] = []

    @property
    def lives(self) -> bool:
        self._looks -= 1
        return self._looks > 0 and signal.SIGKILL not in self.signals

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


@pytest.fixture
def routers() -> Iterator[Routers]:
    with socket.socket() as listener:
        none = cast(Any, None)
        yield Routers("f", 1, listener, none, none, Path(), none)


@pytest.mark.parametrize(("step_s", "killed"), [(3600.0, False), (1.0, True)])
async def test_the_drain_of_routers_counts_only_time_in_which_the_controller_ran(
    routers: Routers, monkeypatch: pytest.MonkeyPatch, step_s: float, killed: bool
) -> None:
    """A controller that was paused for an hour between two looks does not cut their requests."""
    router, now = DrainingRouter(20), 0.0

    def clock() -> float:
        nonlocal now
        now += step_s
        return now

    monkeypatch.setattr(routers_module, "AwakeClock", lambda: AwakeClock(clock))
    routers.processes[0] = cast(Any, router)
    await routers.end(5.0)
    assert router.signals[0] == signal.SIGTERM
    assert (signal.SIGKILL in router.signals) is killed
