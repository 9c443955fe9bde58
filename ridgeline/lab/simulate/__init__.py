"""The simulator: the engine's real scheduler and KV pool under planned traffic, with fitted step times."""

from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.run import SimulatedRun

__all__ = ["SimulatedRun", "simulate"]
