"""A small fleet for the autoscaler's tests: demand in, replicas that start and drain, a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.fleet.config_models import ScalingConfig
from ridgeline.fleet.scaling import Autoscaler, Decision, DemandSample, Inputs, ReplicaSample

SLOTS = 10
KV_TOKENS = 10_000


@dataclass
class Scene:
    """Each tick: `load` slots of work are spread over the serving replicas; what does not fit waits."""

    config: ScalingConfig
    start_s: float = 20.0
    drain_s: float = 5.0
    tick_s: float = 1.0
    price_per_hour: float = 2.0
    target: int = 0
    now: float = 1000.0
    replicas: list[dict] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.scaler = Autoscaler(self.config)
        while len(self.replicas) < self.target:
            self._start()
            self.replicas[-1]["state"] = "ready"

    def tick(
        self, load: float = 0.0, *, arrived: int = 0, silent: bool = False, offset: float = 0.0
    ) -> Decision:
        self.now += self.tick_s
        self._age()
        decision = self.scaler.decide(self._inputs(load, arrived, silent), self.now + offset)
        self.decisions.append(decision)
        self.target = decision.target
        self._follow()
        return decision

    def run(self, seconds: float, load: float = 0.0, **more: object) -> Decision:
        for _ in range(round(seconds / self.tick_s)):
            decision = self.tick(load, **more)  # type: ignore[arg-type]
        return decision

    @property
    def cost(self) -> float:
        return len(self.replicas) * self.price_per_hour

    def count(self, state: str) -> int:
        return sum(replica["state"] == state for replica in self.replicas)

    def _inputs(self, load: float, arrived: int, silent: bool) -> Inputs:
        serving = [replica for replica in self.replicas if replica["state"] == "ready"]
        shares = dict.fromkeys((replica["id"] for replica in serving), 0)
        for number in range(round(load) if serving else 0):
            shares[serving[number % len(serving)]["id"]] += 1
        samples = []
        for replica in self.replicas:
            is_serving = replica["state"] == "ready"
            share = shares.get(replica["id"], 0)
            samples.append(
                ReplicaSample(
                    id=replica["id"],
                    state=replica["state"],
                    since=replica["since"],
                    heard_at=None if silent or not is_serving else self.now,
                    running=min(share, SLOTS),
                    waiting=max(0, share - SLOTS),
                    kv_tokens=KV_TOKENS,
                    max_running=SLOTS,
                    price_per_hour=self.price_per_hour,
                )
            )
        held = round(load) if not serving else 0
        demand = DemandSample(
            arrived=arrived, held=held, in_flight=round(load), heard_at=None if silent else self.now
        )
        return Inputs(self.target, tuple(samples), demand, self.price_per_hour, self.start_s)

    def _start(self) -> None:
        self.number += 1
        self.replicas.append({"id": f"r{self.number}", "state": "starting", "since": self.now})

    def _age(self) -> None:
        for replica in self.replicas:
            if replica["state"] == "starting" and self.now - replica["since"] >= self.start_s:
                replica.update(state="ready", since=self.now)
        self.replicas = [
            replica
            for replica in self.replicas
            if replica["state"] != "draining" or self.now - replica["since"] < self.drain_s
        ]

    def _follow(self) -> None:
        alive = [replica for replica in self.replicas if replica["state"] in ("starting", "ready")]
        for _ in range(self.target - len(alive)):
            self._start()
        surplus = sorted(alive, key=lambda replica: replica["state"] != "starting")[
            : len(alive) - self.target
        ]
        for replica in surplus if len(alive) > self.target else []:
            if replica["state"] == "starting":
                self.replicas.remove(replica)
            else:
                replica.update(state="draining", since=self.now)
