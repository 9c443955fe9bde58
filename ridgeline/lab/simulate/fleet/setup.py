"""FleetSetup: the settings of a fleet simulation, without its traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.fleet.config_models import LimitsConfig, PlaceConfig, RolloutConfig, ScalingConfig
from ridgeline.fleet.placement.regions import Latencies
from ridgeline.fleet.routing.policy import PolicyName
from ridgeline.lab.errors import BadInput
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.lab.simulate.speculation import DraftFigures
from ridgeline.replica.load_pace import LOAD_EVERY_S

EXACT_REPLICAS = 1000
NO_FRONT = FrontTimes()
MODEL = "model"  # a simulation has one


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """limits, times, front, lookahead, drafts: settings of each replica, as in `simulate`

    replicas:     at the start; all are ready at time 0
    scaling:      None: the number is fixed
    cold_start_s: from the start of a replica to its first request
    router_s:     seconds that a router adds to a request
    name_blocks:  KV blocks behind one name of the prefix index, as prompt_blocks has about four
    add_at_s:     one more replica becomes ready at this time, to show its ramp
    roll_at_s:    all replicas are replaced by those of a new version, from this time on
    places:       regions and pools of the replicas, as [[models.places]]
    region:       of the routers; a request to another region takes the latency longer
    """

    limits: SchedulerLimits
    times: StepTimes
    replicas: int
    front: FrontTimes = NO_FRONT
    lookahead: int = 0
    routers: int = 1
    policy: PolicyName = "default"
    waiting: LimitsConfig = field(default_factory=LimitsConfig)
    scaling: ScalingConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    cold_start_s: float = 60.0
    price_per_hour: float = 1.0
    router_s: float = 0.0005
    load_every_s: float = LOAD_EVERY_S
    decide_every_s: float = 1.0
    name_blocks: int = 4
    add_at_s: float | None = None
    roll_at_s: float | None = None
    seed: int = 0
    places: tuple[PlaceConfig, ...] = (PlaceConfig(),)
    region: str = ""
    latency_ms: Latencies = field(default_factory=dict)
    drafts: DraftFigures | None = None

    def __post_init__(self) -> None:
        least = 0 if self.scaling is not None and self.scaling.min == 0 else 1
        if self.replicas < least:
            raise BadInput(f"a fleet has at least {least} replicas, got {self.replicas}")
        if self.routers < 1 or self.name_blocks < 1:
            raise BadInput("routers and name_blocks must be at least 1")
