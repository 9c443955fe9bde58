"""ModelRouter: chooses one of a route's models for a request, and gives the reason.

Called by the pipeline for requests whose `model` is a route's name. In order: rules with `always`, the
conversation's current model, other rules, the prediction of the route's artifact, the route's default. A
failing embedding server costs the prediction, never the request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.gateway.errors import NotFound
from ridgeline.gateway.offload.offload import is_large
from ridgeline.gateway.routing.cascade import DEFAULT_THRESHOLD, Cascade
from ridgeline.gateway.routing.config import RouteConfig, RuleConfig
from ridgeline.gateway.routing.embedder import Embedder, EmbeddingFailed, Vectors
from ridgeline.gateway.routing.learned.artifact import Artifact, load
from ridgeline.gateway.routing.reading import Reading, read
from ridgeline.gateway.routing.routing_request import Decision, RoutingRequest
from ridgeline.gateway.routing.rules import Rule, compiled
from ridgeline.gateway.routing.sticky import StickyTable, conversation_key
from ridgeline.options import OptionError

__all__ = ["Decision", "ModelRouter", "RoutingRequest"]


@dataclass(frozen=True, slots=True)
class Route:
    """A route whose artifact and rules are loaded and checked."""

    config: RouteConfig
    default: str
    artifact: Artifact | None
    rules: tuple[Rule, ...]


class ModelRouter:
    """One per worker. `embedder` may be None if no route has an artifact."""

    def __init__(
        self,
        routes: Sequence[RouteConfig],
        rules: Sequence[RuleConfig] = (),
        embedder: Embedder | None = None,
        clock: Callable[[], float] = time.monotonic,
        read_large: Callable[[RoutingRequest], Awaitable[Reading]] | None = None,
    ) -> None:
        """read_large: reads a large request in another process."""
        self.embedder = embedder
        self._read_large = read_large
        self._clock = clock
        self._sticky = StickyTable()
        self.routes = _checked(routes, compiled(rules), embedder)

    async def decide(self, request: RoutingRequest) -> Decision:
        """The model for one request. A key that may use a route may use every model of it."""
        started = time.perf_counter()
        route = self.routes.get(request.route)
        if route is None:
            raise NotFound(f"no route is named {request.route!r}", code="model_not_found", param="model")
        if self._read_large is not None and is_large(request.fields):
            reading = await self._read_large(request)
        else:
            reading = read(request.kind, request.fields)
        decision = await self._decide(route, request, reading)
        if route.config.shadow:
            decision.shadow, decision.model, decision.cascade = decision.model, route.default, None
            decision.why["shadow"] = decision.shadow
        decision.why["decide_ms"] = round((time.perf_counter() - started) * 1e3, 3)
        return decision

    def escalated(self, request: RoutingRequest, decision: Decision, confidence: float | None) -> None:
        """The cheap answer was not good enough: the conversation continues with the stronger model."""
        route = self.routes[request.route]
        if decision.conversation and route.config.sticky_s > 0:
            until = self._clock() + route.config.sticky_s
            self._sticky.remember(decision.conversation, decision.escalate_to, until)
        decision.why["escalated_from"] = decision.model
        decision.why["confidence"] = None if confidence is None else round(confidence, 4)

    async def _decide(self, route: Route, request: RoutingRequest, reading: Reading) -> Decision:
        ruled = _ruled(route, request, reading, only_always=True)
        if ruled is not None:
            return ruled  # for this request only: the conversation keeps its model
        conversation = conversation_key(request, reading) if route.config.sticky_s > 0 else b""
        if conversation and (request.conversation or reading.is_later_turn):
            model = self._sticky.model(conversation, self._clock())
            if model in route.config.models:
                kept = _with_cascade(route, Decision(model, {"by": "sticky"}))
                return self._kept(route, kept, conversation)
        ruled = _ruled(route, request, reading, only_always=False)
        if ruled is not None:
            return self._kept(route, ruled, conversation)
        decision = await self._predicted(route, reading)
        decision.why["tokens"] = reading.tokens
        return self._kept(route, _with_cascade(route, decision), conversation)

    def _kept(self, route: Route, decision: Decision, conversation: bytes) -> Decision:
        if conversation:
            self._sticky.remember(conversation, decision.model, self._clock() + route.config.sticky_s)
            decision.conversation = conversation
        return decision

    async def _predicted(self, route: Route, reading: Reading) -> Decision:
        default, models, artifact = route.default, route.config.models, route.artifact
        if artifact is None or (artifact.words is None and self.embedder is None):
            return Decision(default, {"by": "default"})
        if len(models) == 1:
            return Decision(default, {"by": "default", "reason": "the route has only one model"})
        text = artifact.recipe.text(reading.turns)
        if not text:
            return Decision(default, {"by": "default", "reason": "no user text"})
        try:
            vectors = await self._vector(artifact, text)
        except EmbeddingFailed as error:
            return Decision(default, {"by": "default", "reason": str(error)})
        if vectors.shape[1] != artifact.dimensions:
            return Decision(
                default, {"by": "default", "reason": "vectors have another length than the artifact's"}
            )
        forecast = artifact.forecast(vectors[0], reading.last, reading.tokens)
        model, why = forecast.choice(models, route.config.threshold)
        return Decision(model, {"by": "predicted", **why})

    async def _vector(self, artifact: Artifact, text: str) -> Vectors:
        if artifact.words is not None:
            return artifact.words.vector(text)[None]
        if self.embedder is None:
            raise EmbeddingFailed("no upstream for embeddings")
        return await self.embedder.embed([text], artifact.recipe.max_tokens)


def _ruled(route: Route, request: RoutingRequest, reading: Reading, only_always: bool) -> Decision | None:
    for rule in route.rules:
        if (only_always and not rule.always) or rule.model not in route.config.models:
            continue
        reasons = rule.match(request, reading)
        if reasons is not None:
            why: dict[str, Any] = {"by": "rule", "rule": rule.name, "because": reasons}
            return Decision(rule.model, why)
    return None


def _with_cascade(route: Route, decision: Decision) -> Decision:
    """A cascade follows any decision but a rule's, which is final."""
    strongest = route.config.models[-1]
    if route.config.cascade and decision.model != strongest:
        threshold = route.config.cascade_threshold
        if threshold is None and route.artifact is not None:
            threshold = route.artifact.cascade_threshold
        decision.cascade = Cascade(DEFAULT_THRESHOLD if threshold is None else threshold)
        decision.escalate_to = strongest
    return decision


def _checked(
    configs: Sequence[RouteConfig], rules: tuple[Rule, ...], embedder: Embedder | None
) -> dict[str, Route]:
    routes: dict[str, Route] = {}
    for config in configs:
        where = f"[[routes]] {config.name!r}"
        if not config.models:
            raise OptionError(f"{where}: models is missing; list them from the cheapest to the strongest")
        if len(set(config.models)) < len(config.models):
            raise OptionError(f"{where}: models lists a model twice")
        if config.name in routes:
            raise OptionError(f"{where} is defined twice")
        default = config.default or config.models[-1]
        if default not in config.models:
            raise OptionError(f"{where}: default {default!r} is not one of its models")
        artifact = None
        if config.artifact is not None:
            artifact = load(config.artifact)
            if artifact.words is None and embedder is None:
                raise OptionError(f"{where}: its artifact needs vectors; set upstream in [embeddings]")
            artifact.check(config.models, embedder.config.model if embedder is not None else "", where)
        own = tuple(rule for rule in rules if rule.route in ("", config.name))
        for rule in own:
            if rule.model not in config.models and rule.route:
                raise OptionError(f"[[rules]] {rule.name!r}: {rule.model!r} is not one of {where}'s models")
        routes[config.name] = Route(config, default, artifact, own)
    for rule in rules:
        if rule.route and rule.route not in routes:
            raise OptionError(f"[[rules]] {rule.name!r}: route {rule.route!r} does not exist")
        if not any(rule.model in route.config.models for route in routes.values()):
            raise OptionError(f"[[rules]] {rule.name!r}: no route has the model {rule.model!r}")
    return routes
