"""Settings of a router: how it uses replicas (`FleetTuning`), and its process (`RouterConfig`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ridgeline.options import OptionError
from ridgeline.replica.messages import LONGEST_STEP_S


@dataclass(frozen=True, slots=True)
class FleetTuning:
    """How requests are sent to replicas, by a router process and by a gateway's worker. Times are seconds."""

    progress_s: float = 10.0  # eject a replica that has requests and makes no step for this time
    longest_step_s: float = LONGEST_STEP_S  # a step under way counts as progress for this time
    migrations: int = 3  # most moves of one request to another replica
    inhibit_s: float = 3.0  # a failed replica gets no request for this time; doubled with each failure
    inhibit_max_s: float = 30.0
    retry_ratio: float = 0.1  # most retries after a 5xx or a timeout, as a share of all requests
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    demand_s: float = 1.0  # between two reports to the controller
    max_answer_bytes: int = 64 << 20  # largest answer that is not streamed

    def __post_init__(self) -> None:
        if self.progress_s <= 0:
            raise OptionError(f"progress_s must be above 0, got {self.progress_s:g}")
        if self.longest_step_s <= 0:
            raise OptionError(f"longest_step_s must be above 0, got {self.longest_step_s:g}")
        if self.migrations < 0:
            raise OptionError(f"migrations must be 0 or more, got {self.migrations}")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router process. The controller writes them as JSON to its standard input."""

    host: str = "127.0.0.1"  # the address of the listener
    grpc_port: int | None = None  # shared by all routers; None: no gRPC
    keys: tuple[str, ...] = ()  # accepted bearer keys; none: every client is served
    allowed_hosts: tuple[str, ...] = ()  # without keys: host names that clients may use
    control_token: str = ""  # for a control address over TCP
    name: str = "router"  # its name in reports to the controller
    region: str = ""  # where it runs: replicas there are preferred; empty: no region is
    held_dir: str = ""  # directory of the journal of held requests; empty: no request is journalled
    keeps_journal: bool = False  # this router has the journal; the others ask it, over a socket in held_dir
    peers_dir: str = ""  # of sockets for the metrics of all routers; empty: /metrics shows this process alone
    max_body_bytes: int = 32 << 20
    max_head_bytes: int = 64 << 10
    head_timeout_s: float = 10.0
    upload_timeout_s: float = 60.0  # for a body to arrive completely
    request_timeout_s: float = 3600.0  # for a whole answer
    stream_stall_s: float = 30.0  # close a stream whose client has not read for this time
    max_connections: int = 8192
    drain_s: float = 30.0  # for running requests to finish after SIGTERM
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = "auto"
    tuning: FleetTuning = field(default_factory=FleetTuning)
