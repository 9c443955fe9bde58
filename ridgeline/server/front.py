"""Front: what every handler needs to answer, in one place: settings, the models with their engines, figures.

Built once by `build_app`. A model's engine may die and be replaced; ask for it anew in every request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from starlette.requests import HTTPConnection

import ridgeline
from ridgeline.engine.client.client import AsyncClient
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
_DOES = {"generate": "generates text", "embed": "makes embeddings"}


class Engine(Protocol):
    """What the front asks of a supervisor."""

    client: AsyncClient | None
    draining: bool

    def ready(self) -> tuple[bool, str]: ...


@dataclass(frozen=True, slots=True)
class Model:
    """One model behind this front: the names it is served under, the first being its own."""

    names: tuple[str, ...]
    engine: Engine
    metrics: ServerMetrics
    other_names: tuple[str, ...] = ()  # accepted, but not listed


@dataclass(frozen=True, slots=True)
class Served:
    """The model that a request asks for, under the name it asked by."""

    name: str
    model: Model

    @property
    def metrics(self) -> ServerMetrics:
        return self.model.metrics

    def ready_client(self) -> AsyncClient:
        """The engine's client, or 503 with the reason why no new request is taken."""
        engine = self.model.engine
        ready, reason = engine.ready()
        if engine.draining:
            # A client that comes back finds another replica, or this one restarted.
            raise NotReady(reason, code="draining", retry_after_s=10)
        if not ready or engine.client is None:
            raise NotReady(reason)
        return engine.client


class Front:
    def __init__(
        self, config: ServerConfig, models: Sequence[Model], state: StateStore | None = None
    ) -> None:
        """state: what is kept on disk; None where nothing may be (then nothing that needs it is served)."""
        self.config = config
        self.models = tuple(models)
        self.state = state
        self.recorder: TrafficRecorder | None = None  # of who came when; None: nobody asked for it
        self.tracing: Tracing | None = None  # None: nobody wants traces
        self._parts: dict[Any, Any] = {}
        self._tasks: dict[
            str, Task
        ] = {}  # by a model's first name: as its engine said, also while it restarts

    @classmethod
    def of(cls, connection: HTTPConnection) -> Front:
        front: Front = connection.scope["app"]
        return front

    def part(self, kind: Callable[[Front], T]) -> T:
        """What `kind` makes of this front, made once, when first asked for: what an endpoint keeps between
        its requests.
        """
        if kind not in self._parts:
            self._parts[kind] = kind(self)
        made: T = self._parts[kind]
        return made

    @property
    def metrics(self) -> ServerMetrics:
        """Where that is counted which belongs to no model: what was refused before one was found."""
        return self.models[0].metrics

    def task_of(self, model: Model) -> Task | None:
        """What it is for; None until its engine has said so."""
        client = model.engine.client
        if client is not None:
            self._tasks[model.names[0]] = client.hello.task
        return self._tasks.get(model.names[0])

    def book_refusal(
        self, context: RequestContext, reply: ErrorReply, metrics: ServerMetrics | None = None
    ) -> None:
        """Tell metrics and log of a request that no engine began. metrics: of the model, if one was found."""
        context.booked = True
        reason = reply.code or reply.type
        (metrics or self.metrics).request_refused(reason, reply.status)
        log_request(context.request_id, context.path, reply.status, error=reason)

    def served(self, asked: str | None, task: Task | None = None) -> Served:
        """The model of that name; the first that does `task`, if none was asked for.

        Raises 404 for a name that nobody has, 400 for a model that does something else.
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
        message = f"model: {asked!r} is not served here; served are {names}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def ready(self) -> tuple[bool, str]:
        """Whether every model would take a request now; if not, why."""
        if len(self.models) == 1:
            return self.models[0].engine.ready()
        answers = [(model.names[0], *model.engine.ready()) for model in self.models]
        reasons = [f"{name}: {reason}" for name, is_ready, reason in answers if not is_ready]
        return (False, "; ".join(reasons)) if reasons else (True, "ready")


def fingerprint(client: AsyncClient) -> str:
    """Equal fingerprints: the same software computes the same model on the same backend."""
    parts = f"{ridgeline.__version__}\n{client.hello.model}\n{client.hello.backend}"
    return "fp_" + hashlib.sha256(parts.encode()).hexdigest()[:12]
