"""The simulator: the engine's real scheduler and KV pool under planned traffic, with fitted step times."""

from ridgeline.lab.perfmodel.fit_steps import fit_step_times
from ridgeline.lab.perfmodel.front_times import FrontTimes, fit_front
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.run import SimulatedRun

__all__ = ["FrontTimes", "SimulatedRun", "StepTimes", "fit_front", "fit_step_times", "simulate"]
