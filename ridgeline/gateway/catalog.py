"""Catalog: the public names of models, and the upstreams of each. Made once from the settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.gateway.errors import NotFound
from ridgeline.gateway.settings import GatewaySettings, ModelConfig, targets_of
from ridgeline.gateway.tenants.keys import Limits
from ridgeline.gateway.upstreams.outgoing import Target

MAX_NAME = 256
MAX_RESOLVED = 10_000  # cached names that match patterns; further ones are built for each request


@dataclass(frozen=True, slots=True)
class PublicModel:
    name: str
    targets: tuple[Target, ...]
    strategy: str
    limits: Limits
    hedge_after_s: float | None
    config: ModelConfig


class Catalog:
    def __init__(self, settings: GatewaySettings) -> None:
        self._exact = {
            one.name: _model(one, one.name) for one in settings.models if not one.name.endswith("*")
        }
        patterns = [one for one in settings.models if one.name.endswith("*")]
        self._patterns = sorted(patterns, key=lambda one: -len(one.name))  # the longest is the most specific
        self._resolved: dict[str, PublicModel] = {}
        self.routes = frozenset(route.name for route in settings.routes)

    def find(self, name: str) -> PublicModel:
        """Raises NotFound if no table of the configuration matches the name."""
        found = self._exact.get(name) or self._resolved.get(name)
        if found is not None:
            return found
        if len(name) <= MAX_NAME:
            for pattern in self._patterns:
                if name.startswith(pattern.name[:-1]):
                    found = _model(pattern, name)
                    if len(self._resolved) < MAX_RESOLVED:
                        self._resolved[name] = found
                    return found
        raise NotFound(
            f"no model is named {name[:MAX_NAME]!r}; GET /v1/models lists the names",
            code="model_not_found",
            param="model",
        )

    def names(self) -> list[str]:
        """Names that can be listed: only the upstream knows the models of a pattern."""
        return [*self._exact, *sorted(self.routes)]

    def open_upstreams(self) -> list[str]:
        """Upstreams whose models are all available under their own names."""
        return [
            target.upstream
            for pattern in self._patterns
            if pattern.name == "*"
            for target in targets_of(pattern)
            if target.model == "*"
        ]


def allows(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a scope contains the name. An empty scope contains every name."""
    if not patterns:
        return True
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns
    )


def _model(config: ModelConfig, name: str) -> PublicModel:
    stem = name[len(config.name) - 1 :] if config.name.endswith("*") else ""
    targets = []
    for target in targets_of(config):
        # upstream/* takes the whole name, upstream/prefix-* the part that the * of the name matched
        if target.model == "*":
            target = replace(target, model=name)
        elif target.model.endswith("*"):
            target = replace(target, model=target.model[:-1] + stem)
        targets.append(target)
    hedge = config.hedge_after_ms / 1000 if config.hedge_after_ms is not None else None
    return PublicModel(name, tuple(targets), config.strategy, config.limits, hedge, config)
