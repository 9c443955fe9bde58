"""ServedModels: the models with their engines, and what else every handler needs: settings, metrics, parts.

Built once by `server.process.main`. A model's engine may die and be replaced, so look it up in every request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from starlette.requests import HTTPConnection

import ridgeline
from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.config import EngineConfig
from ridgeline.replica.messages import WeightsFrom
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError, ErrorReply, NotReady
from ridgeline.server.http.request_context import RequestContext
from ridgeline.telemetry.logs import log_request
from ridgeline.telemetry.metrics import ServerMetrics

if TYPE_CHECKING:
    from ridgeline.server.records.recording import TrafficRecorder
    from ridgeline.server.records.state import StateStore
    from ridgeline.server.records.tracing import Tracing

T = TypeVar("T")
Task = Literal["generate", "embed"]
SERVED_MODELS = "ridgeline.served_models"  # scope key, set by the gate
_DOES = {"generate": "generates text", "embed": "makes embeddings"}


class Engine(Protocol):
    """The part of a supervisor that handlers use."""

    client: AsyncClient | None
    draining: bool

    def ready(self) -> tuple[bool, str]: ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that a model was loaded from, for peers that want the same."""

    source: str  # MODEL of `ridgeline serve`
    path: Path
    engine: EngineConfig
    weights: WeightsFrom | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """One served model: the names it is served under, its own first."""

    names: tuple[str, ...]
    engine: Engine
    metrics: ServerMetrics
    other_names: tuple[str, ...] = ()  # accepted, but not listed
    start_segments: dict[str, float] = field(default_factory=dict)  # seconds before the engine's own start
    files: ModelFiles | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """The model that a request names, and the name it used."""

    name: str
    model: Model

    @property
    def metrics(self) -> ServerMetrics:
        return self.model.metrics

    def ready_client(self) -> AsyncClient:
        """The engine's client, or 503 with the reason why no request is accepted."""
        engine = self.model.engine
        ready, reason = engine.ready()
        if engine.draining:
            # On retry the client reaches another replica, or this one after its restart.
            raise NotReady(reason, code="draining", retry_after_s=10)
        if not ready or engine.client is None:
            raise NotReady(reason)
        return engine.client


class ServedModels:
    def __init__(
        self, config: ServerConfig, models: Sequence[Model], state: StateStore | None = None
    ) -> None:
        """state: the store on disk; None: endpoints that need it are not served."""
        self.config = config
        self.models = tuple(models)
        self.state = state
        self.recorder: TrafficRecorder | None = None  # None: traffic is not recorded
        self.tracing: Tracing | None = None  # None: tracing is off
        self._parts: dict[Any, Any] = {}
        self._tasks: dict[str, Task] = {}  # by a model's first name; kept while its engine restarts

    @classmethod
    def of(cls, connection: HTTPConnection) -> ServedModels:
        served_models: ServedModels = connection.scope[SERVED_MODELS]
        return served_models

    def part(self, kind: Callable[[ServedModels], T]) -> T:
        """The single instance of `kind` for this server, created on first use: state that an endpoint keeps
        between requests.
        """
        if kind not in self._parts:
            self._parts[kind] = kind(self)
        made: T = self._parts[kind]
        return made

    @property
    def metrics(self) -> ServerMetrics:
        """Metrics for requests without a model: those refused before one was found."""
        return self.models[0].metrics

    def task_of(self, model: Model) -> Task | None:
        """The model's task; None until its engine has reported it."""
        client = model.engine.client
        if client is not None:
            self._tasks[model.names[0]] = client.hello.task
        return self._tasks.get(model.names[0])

    def book_refusal(
        self, context: RequestContext, reply: ErrorReply, metrics: ServerMetrics | None = None
    ) -> None:
        """Record a request that no engine started. metrics: the model's, if one was found."""
        context.booked = True
        reason = reply.code or reply.type
        (metrics or self.metrics).request_refused(reason, reply.status)
        log_request(context.request_id, context.path, reply.status, error=reason)

    def served(self, asked: str | None, task: Task | None = None) -> Served:
        """The model of that name; without a name, the first that does `task`.

        Raises 404 for an unknown name, 400 for a model with another task.
        """
        if asked is None:
            fitting = [model for model in self.models if task is None or self.task_of(model) in (None, task)]
            if not fitting:
                message = f"model: none of the models served here {_DOES[task or 'generate']}"
                raise ApiError(404, message, param="model", code="model_not_found")
            return Served(fitting[0].names[0], fitting[0])
        for model in self.models:
            if asked in model.names or asked in model.other_names:
                known = self.task_of(model)
                if task is not None and known is not None and known != task:
                    message = f"model: {asked!r} {_DOES[known]}; this endpoint needs one that {_DOES[task]}"
                    raise ApiError(400, message, param="model", code="model_not_suitable")
                return Served(asked, model)
        names = ", ".join(name for model in self.models for name in model.names)
        message = f"model: {asked!r} is not served here; available: {names}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def ready(self) -> tuple[bool, str]:
        """Whether every model would accept a request now; if not, why."""
        if len(self.models) == 1:
            return self.models[0].engine.ready()
        answers = [(model.names[0], *model.engine.ready()) for model in self.models]
        reasons = [f"{name}: {reason}" for name, is_ready, reason in answers if not is_ready]
        return (False, "; ".join(reasons)) if reasons else (True, "ready")


def fingerprint(client: AsyncClient) -> str:
    """Equal fingerprints: the same software computes the same model on the same backend."""
    parts = f"{ridgeline.__version__}\n{client.hello.model}\n{client.hello.backend}"
    return "fp_" + hashlib.sha256(parts.encode()).hexdigest()[:12]
