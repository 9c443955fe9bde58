"""The actor and its guard, as plain processes: Ray itself is not needed to see that nothing outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from types import SimpleNamespace

import msgspec
import pytest

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import RayConfig
from ridgeline.fleet.substrates import ray_actor
from ridgeline.fleet.substrates.ray import RaySubstrate, bundle
from ridgeline.fleet.substrates.ray_actor import ReplicaActor, Report
from ridgeline.fleet.substrates.substrate import ReplicaSpec, SubstrateError
from ridgeline.options import OptionError
from tests.fleet.substrates.marked import marked, none_left
from tests.patience import PATIENCE_S

# A server with a child, as an engine is.
TWO = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(600)
"""


KEY = {"RIDGELINE_API_KEYS": "key"}


def spec(**changes: object) -> ReplicaSpec:
    made = ReplicaSpec(
        fleet=uuid.uuid4().hex,
        id="m-1",
        model="m",
        version="v",
        source="smollm2-135m",
        flags=(),
        environment={},
        resources=ResourcesConfig(),
    )
    return msgspec.structs.replace(made, **changes)


def actor(of: ReplicaSpec, program: str) -> ReplicaActor:
    made = ReplicaActor(msgspec.json.encode(of), "127.0.0.1", (sys.executable, "-c", program))
    made.begin(KEY)
    return made


def report(of: ReplicaActor) -> Report:
    return msgspec.json.decode(of.report(), type=Report)


def wait_for(of: ReplicaActor, right: object) -> Report:
    deadline = time.monotonic() + PATIENCE_S
    while not right(seen := report(of)):  # type: ignore[operator]
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)
    return seen


def test_a_server_that_ends_is_reported_with_its_last_line() -> None:
    made = actor(spec(), "import sys; print('weights are missing'); sys.exit(3)")
    seen = wait_for(made, lambda seen: seen.exit_code is not None)
    assert (seen.exit_code, seen.reason) == (3, "exit code 3; last line of its log: weights are missing")
    assert made.tail(8) == b"missing\n"
    made.stop(0.0)


def test_a_stop_ends_a_server_and_what_it_started() -> None:
    of = spec()
    made = actor(of, TWO)
    wait_for(made, lambda seen: seen.pid is not None)
    assert marked(of.fleet)
    made.stop(30.0)
    assert none_left(of.fleet)


def test_a_server_that_ignores_the_end_of_its_drain_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.fleet.substrates.ray_actor.KILL_GRACE_S", 0.0)
    of = spec()
    made = actor(of, STUBBORN)
    deadline = time.monotonic() + PATIENCE_S
    while made.tail(10) != b"up\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    made.stop(0.05)
    assert report(made).reason == "signal 9"
    assert none_left(of.fleet)


def test_a_time_for_which_the_actor_stood_still_does_not_end_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen container: actor and server go on together, when the deadline is long over."""

    def clock() -> AwakeClock:
        began = time.monotonic()  # of the drain
        late = lambda: time.monotonic() + (3600.0 if time.monotonic() - began > 1.0 else 0.0)  # noqa: E731
        return AwakeClock(late)

    monkeypatch.setattr(ray_actor, "AwakeClock", clock)
    made = actor(
        spec(),
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2.0), print('bye', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)",
    )
    wait_for(made, lambda _: made.tail(10) == b"up\n")
    made.stop(PATIENCE_S)
    assert (report(made).exit_code, report(made).reason) == (0, "exit code 0")


@pytest.mark.parametrize("victim", ["actor", "guard"])
def test_nothing_outlives_an_actor_or_a_guard_that_is_killed(victim: str) -> None:
    of = spec()
    program = (
        "import sys, time; from tests.fleet.substrates.test_ray_actor import *; "
        "made = ReplicaActor(sys.argv[1].encode(), '127.0.0.1', (sys.executable, '-c', sys.argv[2])); "
        "made.begin({}); print(made._guard.pid, flush=True); time.sleep(600)"
    )
    text = msgspec.json.encode(of).decode()
    with subprocess.Popen(
        [sys.executable, "-c", program, text, TWO], stdout=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdout is not None
        guard = int(process.stdout.readline())
        deadline = time.monotonic() + PATIENCE_S
        while len(marked(of.fleet)) < 3 and time.monotonic() < deadline:  # guard, server, its child
            time.sleep(0.01)
        os.kill(process.pid if victim == "actor" else guard, signal.SIGKILL)
        if victim == "actor":
            assert none_left(of.fleet)
        else:  # the server dies with its guard; its child, an engine, ends by itself when its server is gone
            deadline = time.monotonic() + PATIENCE_S
            while len(marked(of.fleet)) > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(marked(of.fleet)) == 1
            os.kill(marked(of.fleet)[0], signal.SIGKILL)
        process.kill()


def test_a_command_that_cannot_run_is_named() -> None:
    made = ReplicaActor(msgspec.json.encode(spec()), "127.0.0.1", ("/no/such/program",))
    made.begin(KEY)
    seen = wait_for(made, lambda seen: seen.exit_code is not None)
    assert seen.reason == "cannot start /no/such/program: No such file or directory"
    made.stop(0.0)


def test_a_server_gets_its_key_by_a_call_and_an_actor_without_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = actor(spec(), "import os; print(os.environ['RIDGELINE_API_KEYS'])")
    made.begin({"RIDGELINE_API_KEYS": "another"})  # one server, with the first key
    wait_for(made, lambda seen: seen.exit_code == 0)
    assert made.tail(100) == b"key\n"
    made.stop(0.0)
    waiting = ReplicaActor(msgspec.json.encode(spec()), "127.0.0.1", ("/no/such/program",))
    assert report(waiting).reason == ""
    monkeypatch.setattr(ray_actor, "BEGIN_S", 0.0)
    assert (report(waiting).pid, "no key came" in report(waiting).reason) == (None, True)
    waiting.stop(0.0)
    waiting.begin(KEY)  # too late: it was stopped
    assert report(waiting).pid is None


class StandInRay:
    """Notes what is handed to Ray; it runs nothing."""

    def __init__(self) -> None:
        self.arguments: list[object] = []
        self.calls: list[dict[str, str]] = []
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **given: given)
        self.util = SimpleNamespace(
            placement_group=lambda *given, **named: named, scheduling_strategies=strategies
        )

    def remote(self, kind: type) -> StandInRay:
        return self

    def options(self, **given: object) -> SimpleNamespace:
        self.arguments.append(given)

        def create(*given: object) -> SimpleNamespace:
            self.arguments += given
            return SimpleNamespace(begin=SimpleNamespace(remote=self.calls.append))

        return SimpleNamespace(remote=create)


async def test_the_key_is_no_argument_of_the_actor() -> None:
    substrate, ray = RaySubstrate(RayConfig()), StandInRay()
    substrate._ray = ray
    await substrate.start(spec(environment={"RIDGELINE_API_KEYS": "a-secret-key"}))
    assert "a-secret-key" not in repr(ray.arguments)
    assert ray.calls == [{"RIDGELINE_API_KEYS": "a-secret-key"}]


def test_a_bundle_has_what_a_replica_needs() -> None:
    resources = ResourcesConfig(cpus=8, memory=2.0, gpus=2, region="eu", pool="spot")
    wanted = bundle(spec(resources=resources), RayConfig(resources=("accelerator_type:H200=0.001",)))
    assert wanted == {
        "CPU": 8.0,
        "GPU": 2.0,
        "memory": 2.0 * (1 << 30),
        "region:eu": 0.001,
        "pool:spot": 0.001,
        "accelerator_type:H200": 0.001,
    }
    with pytest.raises(OptionError, match="'fast' is not NAME=VALUE"):
        RayConfig(resources=("fast",))


async def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SubstrateError, match="needs Ray"):
        await RaySubstrate(RayConfig()).start(spec())
