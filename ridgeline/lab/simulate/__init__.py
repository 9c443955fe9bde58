"""The simulator: the engine's real scheduler and KV pool under planned traffic, with fitted step times."""

from ridgeline.lab.simulate.fit import fit_step_times
from ridgeline.lab.simulate.front import FrontTimes, fit_front
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.run import SimulatedRun
from ridgeline.lab.simulate.step_times import StepTimes

__all__ = ["FrontTimes", "SimulatedRun", "StepTimes", "fit_front", "fit_step_times", "simulate"]
