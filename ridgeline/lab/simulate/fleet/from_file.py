"""setup_of(): makes a FleetSetup from fleet.toml: replicas, scaling and limits, and each replica's engine."""

from __future__ import annotations

from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.config_models import FleetModel
from ridgeline.lab.errors import BadInput
from ridgeline.lab.simulate.engine_setup import engine_of
from ridgeline.lab.simulate.fleet.setup import FleetSetup
from ridgeline.lab.simulate.replica_options import ReplicaOptions
from ridgeline.options import build, check_values


def model_of(settings: FleetSettings, name: str) -> FleetModel:
    if name:
        found = settings.model(name)
        if found is None:
            known = ", ".join(model.name for model in settings.models)
            raise BadInput(f"the fleet has no model {name!r}; it has {known}")
        return found
    if len(settings.models) > 1:
        known = ", ".join(model.name for model in settings.models)
        raise BadInput(f"the fleet has several models; choose one with --model: {known}")
    return settings.models[0]


def setup_of(settings: FleetSettings, model: FleetModel, options: ReplicaOptions) -> FleetSetup:
    served = {key: value for key, value in model.serve.items() if key in ReplicaOptions.__dataclass_fields__}
    options = build(ReplicaOptions, _values(options), check_values(ReplicaOptions, served, "[models.serve] "))
    engine = engine_of(model.source, options)
    return FleetSetup(
        limits=engine.limits,
        times=engine.times,
        front=engine.front,
        lookahead=engine.lookahead,
        replicas=model.model.replicas,
        routers=settings.fleet.routers,
        waiting=model.limits,
        scaling=model.scaling if model.scales else None,
        rollout=model.rollout,
        cold_start_s=options.cold_start_s,
        price_per_hour=model.resources.price,
        places=model.spread,
        region=settings.fleet.region,
        latency_ms=settings.latency_ms,
        drafts=engine.drafts,
    )


def _values(options: ReplicaOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in ReplicaOptions.__dataclass_fields__}
