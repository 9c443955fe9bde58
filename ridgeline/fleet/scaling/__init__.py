"""Decides how many replicas a model needs. Pure logic: no I/O; the caller passes the time.

The controller calls `Autoscaler.decide(inputs, now)` every few seconds and stores its `explain` as an event;
the simulator calls it with a simulated clock.
"""

from ridgeline.fleet.scaling.autoscaler import Autoscaler
from ridgeline.fleet.scaling.demand import DemandBook, DemandSample
from ridgeline.fleet.scaling.explain import Decision, Explain, Signal
from ridgeline.fleet.scaling.inputs import Inputs, ReplicaSample, sample_of

__all__ = [
    "Autoscaler",
    "Decision",
    "DemandBook",
    "DemandSample",
    "Explain",
    "Inputs",
    "ReplicaSample",
    "Signal",
    "sample_of",
]
