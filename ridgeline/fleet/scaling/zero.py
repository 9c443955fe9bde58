"""Warns if scale to zero does not fit: light traffic with a latency objective."""

from __future__ import annotations

import math

from ridgeline.fleet.config_models import ScalingConfig

HALF_LIFE_S = 3600.0
SHORTEST_S = 600.0
COLD_SHARE = 0.01  # share of requests that wait for a start; above it, a p99 objective cannot hold


class LongRate:
    """Requests/s over about an hour: with light traffic, most windows have no request."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = self._count = 0.0

    def hear(self, arrived: int, now: float) -> None:
        last, self._last = self._last, now
        if last is not None:
            keeps = 0.5 ** ((now - last) / HALF_LIFE_S)
            self._seconds = self._seconds * keeps + (now - last)
            self._count = self._count * keeps + arrived

    @property
    def requests_per_s(self) -> float:
        """0 in the first minutes: there are too few requests for a rate."""
        return self._count / self._seconds if self._seconds >= SHORTEST_S else 0.0


def cold_share(requests_per_s: float, idle_s: float) -> float:
    """Share of requests that find no replica: no other came for `idle_s`. Assumes independent arrivals."""
    return math.exp(-requests_per_s * idle_s)


def zero_warning(config: ScalingConfig, requests_per_s: float, cold_start_s: float) -> str:
    """The warning; empty without an objective, or with a fast start, busy traffic or no traffic."""
    if config.min > 0 or config.ttft_slo_ms is None or 1000 * cold_start_s <= config.ttft_slo_ms:
        return ""
    idle_s = config.scale_down_delay_s + config.window_s
    share = cold_share(requests_per_s, idle_s)
    if requests_per_s <= 0 or share <= COLD_SHARE:
        return ""
    return (
        f"scale to zero does not fit: at {requests_per_s * 3600:.1f} requests/h about {share:.0%} of "
        f"requests wait {cold_start_s:.0f} s for a start, and the objective is a first token within "
        f"{config.ttft_slo_ms:.0f} ms. "
        "Set min = 1, or a longer scale_down_delay_s"
    )
