"""RaySubstrate: replicas are actors of Ray Core, each in its own placement group. Ray Serve is not used.

Actors and groups are detached and named FLEET/REPLICA: they outlive the controller and are found again by
name. Ray decides the node; requests go straight to the server's port. Ray's calls block: they run in threads,
and none waits for an actor longer than ANSWER_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.config_substrates import RayConfig, pairs
from ridgeline.fleet.substrates.ray_actor import KILL_GRACE_S, ReplicaActor, Report
from ridgeline.fleet.substrates.substrate import (
    Capacity,
    Handle,
    Observed,
    ReplicaSpec,
    SubstrateError,
)

THREADS = (
    64  # of Ray's calls: more than the controller makes at a time, so that no start waits for silent actors
)
POLL_S = 0.25  # seconds between two looks at an actor that drains
ANSWER_S = 5.0  # seconds after which an actor that does not answer is called silent, not dead
KEPT_ENDINGS = 256  # ended replicas to remember; the controller forgets each after some seconds
KEPT_LOG = 65_536  # bytes of an ended replica's log that are kept here
LOOPBACK = "127.0.0.1"

P = ParamSpec("P")
T = TypeVar("T")


class RaySubstrate:
    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ray")
        self._ray: Any = None
        self._actors: dict[str, Any] = {}
        self._last: dict[str, Report] = {}
        self._endings: dict[str, tuple[Observed, bytes]] = {}  # ended replicas, with their logs

    async def start(self, spec: ReplicaSpec) -> Handle:
        await self._call(self._start, spec)
        return Handle(spec.id, spec.mark)

    async def adopt(self, handle: Handle, environment: Mapping[str, str] | None) -> None:
        """Ray drops the call of a process that ended before the actor had a node: it is made again."""
        if environment is not None:
            await self._call(self._begin, handle.place, environment)

    async def stop(self, handle: Handle, drain_s: float) -> None:
        ending = await self._call(self._tell_to_stop, handle.place, drain_s)
        clock = AwakeClock()
        until = clock() + drain_s + KILL_GRACE_S + ANSWER_S
        # A silent actor is released all the same: its guard kills the server when the actor's process ends.
        while ending is not None and clock() < until:
            if await self._call(self._has_answered, ending):
                break
            await asyncio.sleep(POLL_S)
        await self._call(self._release, handle.place)

    async def poll(self, handle: Handle) -> Observed:
        return await self._call(self._poll, handle.place)

    async def logs(self, handle: Handle, last_bytes: int) -> bytes:
        return await self._call(self._logs, handle.place, last_bytes)

    async def find(self, fleet: str) -> Sequence[Handle]:
        return await self._call(self._find, fleet)

    async def capacity(self) -> Capacity:
        found: Mapping[str, float] = await self._call(lambda: self._cluster().cluster_resources())
        memory = found.get("memory")
        return Capacity(
            cpus=found.get("CPU", 0.0),
            memory=None if memory is None else memory / (1 << 30),
            gpus=int(found.get("GPU", 0.0)),
        )

    def limits(self) -> Capacity:
        return Capacity()  # a replica without room is pending

    async def close(self) -> None:
        """End a cluster that was started here, with its replicas. Those of another cluster keep running."""
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)
            self._ray = None
        self._threads.shutdown(wait=False)

    async def _call(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run a call in a thread, on a connected cluster."""
        loop = asyncio.get_running_loop()
        if self._ray is None:
            await loop.run_in_executor(self._threads, self._cluster)
            take_signals_back()
        try:
            return await loop.run_in_executor(self._threads, partial(work, *arguments, **named))
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise SubstrateError(f"the Ray cluster does not answer: {_death(error)}") from error

    # ── in threads ──

    def _cluster(self) -> Any:
        with self._lock:
            if self._ray is None:
                self._ray = _connect(self._config)
            return self._ray

    def _start(self, spec: ReplicaSpec) -> None:
        ray = self._cluster()
        wanted = bundle(spec, self._config)
        try:
            group = ray.util.placement_group(
                [wanted], strategy="STRICT_PACK", name=spec.mark, lifetime="detached"
            )
            named = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU", "memory")}
            options = ray.remote(ReplicaActor).options(
                name=spec.mark,
                namespace=self._config.namespace,
                lifetime="detached",
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0),
                memory=wanted.get("memory"),
                resources=named or None,
                max_restarts=0,  # the controller starts another replica with another name
                max_concurrency=4,  # reports are answered during a drain
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=0
                ),
            )
            shown = msgspec.structs.replace(spec, environment={})
            self._actors[spec.mark] = options.remote(msgspec.json.encode(shown), self._host())
            self._begin(spec.mark, spec.environment)
        except (ray.exceptions.RayError, ValueError) as error:
            self._release(spec.mark)
            raise SubstrateError(f"Ray refused to start {spec.id}: {error}") from error

    def _begin(self, mark: str, environment: Mapping[str, str]) -> None:
        """By a call: Ray keeps a call's arguments no longer than it. The actor ignores a second one."""
        actor = self._actor(mark)
        if actor is not None:
            actor.begin.remote(dict(environment))

    def _tell_to_stop(self, mark: str, drain_s: float) -> Any:
        """The actor answers when nothing of its server runs. None: no actor would answer."""
        actor = self._actor(mark)
        return actor.stop.remote(drain_s) if actor is not None and self._is_placed(mark) else None

    def _has_answered(self, answer: Any) -> bool:
        """Also with an error: the actor has died."""
        return bool(self._cluster().wait([answer], timeout=0)[0])

    def _poll(self, mark: str) -> Observed:
        if mark in self._endings:
            return self._endings[mark][0]
        ray = self._cluster()
        if not self._is_placed(mark):
            return Observed("pending", reason=self._why_pending(mark))
        actor = self._actor(mark)
        if actor is None:
            return self._end(mark, Observed("exited", reason=f"Ray does not know the actor {mark}"))
        last = self._last.get(mark)
        try:
            report = msgspec.json.decode(ray.get(actor.report.remote(), timeout=ANSWER_S), type=Report)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            silent = f"its actor has not answered within {ANSWER_S:.0f} s"
            return Observed("running", "" if last is None else last.url, reason=silent)
        except ray.exceptions.RayError as error:
            return self._end(mark, Observed("exited", reason=_death(error)))
        self._last[mark] = report
        if report.exit_code is not None or (report.reason and report.pid is None):
            seen = Observed("exited", report.url, report.exit_code, report.reason)
            log = b""
            with contextlib.suppress(ray.exceptions.RayError):
                log = ray.get(actor.tail.remote(KEPT_LOG), timeout=ANSWER_S)
                ray.get(actor.stop.remote(0.0), timeout=ANSWER_S)
            return self._end(mark, seen, log)
        return Observed("running", report.url, reason="" if report.url else "it has not bound its port yet")

    def _logs(self, mark: str, last_bytes: int) -> bytes:
        if mark in self._endings:
            return self._endings[mark][1][-last_bytes:]
        ray, actor = self._cluster(), self._actor(mark)
        if actor is None:
            raise SubstrateError(f"Ray has no actor {mark}; the log of a lost node is lost with it")
        try:
            found: bytes = ray.get(actor.tail.remote(last_bytes), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            raise SubstrateError(f"the actor {mark} cannot be asked for its log: {_death(error)}") from error
        return found

    def _find(self, fleet: str) -> list[Handle]:
        named = self._cluster().util.list_named_actors(all_namespaces=True)
        return [
            Handle(one["name"].partition("/")[2], one["name"])
            for one in named
            if one["namespace"] == self._config.namespace and one["name"].startswith(f"{fleet}/")
        ]

    def _actor(self, mark: str) -> Any:
        """None if it is dead, or was never started."""
        if mark not in self._actors:
            try:
                self._actors[mark] = self._cluster().get_actor(mark, namespace=self._config.namespace)
            except ValueError:
                return None
        return self._actors[mark]

    def _group(self, mark: str) -> Any:
        try:
            return self._cluster().util.get_placement_group(mark)
        except ValueError:
            return None

    def _is_placed(self, mark: str) -> bool:
        group = self._group(mark)
        table = {} if group is None else self._cluster().util.placement_group_table(group)
        return bool(table.get("state") != "PENDING")

    def _why_pending(self, mark: str) -> str:
        ray = self._cluster()
        wanted = ray.util.placement_group_table(self._group(mark)).get("bundles", {}).get(0, {})
        free = ray.available_resources()
        text = ", ".join(
            f"{name} {amount:g} ({free.get(name, 0.0):g} free)" for name, amount in sorted(wanted.items())
        )
        return f"no node of the Ray cluster has room for {text}"

    def _end(self, mark: str, seen: Observed, log: bytes = b"") -> Observed:
        self._endings[mark] = (seen, log)
        while len(self._endings) > KEPT_ENDINGS:
            del self._endings[next(iter(self._endings))]
        self._release(mark)
        return seen

    def _release(self, mark: str) -> None:
        """Remove the actor and its group, which frees what they reserve."""
        ray, actor = self._cluster(), self._actor(mark)
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor, no_restart=True)
        group = self._group(mark)
        if group is not None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.util.remove_placement_group(group)
        self._actors.pop(mark, None)
        self._last.pop(mark, None)

    def _host(self) -> str:
        """The address to listen on; empty: the address of the node."""
        return LOOPBACK if self._config.address is None else ""


def bundle(spec: ReplicaSpec, config: RayConfig) -> dict[str, float]:
    """The amount of each resource that Ray reserves for one replica."""
    wanted: dict[str, float] = {"CPU": float(spec.resources.cpus or 1)}
    if spec.resources.gpus:
        wanted["GPU"] = float(spec.resources.gpus)
    if spec.resources.memory is not None:
        wanted["memory"] = spec.resources.memory * (1 << 30)
    if spec.resources.region:
        wanted[f"region:{spec.resources.region}"] = 0.001
    if spec.resources.pool:
        wanted[f"pool:{spec.resources.pool}"] = 0.001
    return wanted | pairs(config.resources, "[substrate.ray] resources", float)


def take_signals_back() -> None:
    """Replace Ray's native handlers, which print a stack at SIGTERM and end the process with an error."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def _connect(config: RayConfig) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    factory = logging.getLogRecordFactory()  # Ray's filter adds a field to every record
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise SubstrateError(
            f"[substrate] kind = \"ray\" needs Ray ({error}): pip install '.[ray]'"
        ) from error
    options: dict[str, Any] = {"namespace": config.namespace, "log_to_driver": False}
    if config.address is not None:
        options["address"] = config.address
    else:
        options |= {"include_dashboard": False, "num_cpus": config.cpus, "_node_ip_address": LOOPBACK}
    errors: list[Exception] = []
    done = threading.Event()

    def init() -> None:
        try:
            ray.init(configure_logging=False, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            errors.append(error)
        done.set()
        threading.Event().wait()

    # Linux ends the cluster together with the thread that started it, so this thread stays.
    threading.Thread(target=init, name="ray-init", daemon=True).start()
    done.wait()
    logging.setLogRecordFactory(factory)
    if errors:
        where = config.address or "on this machine"
        raise SubstrateError(f"the Ray cluster {where} cannot be used: {errors[0]}") from errors[0]
    return ray


def _death(error: Exception) -> str:
    """Ray's sentence about the cause, without the actor's ids before it."""
    text = " ".join(str(error).split())
    cause = re.search(r"The actor (died|is dead) because.*", text)
    return (text if cause is None else cause[0])[:300]
