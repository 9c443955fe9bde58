"""KubernetesSubstrate against an emulated API: no cluster, but its calls, watch protocol and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import KubernetesConfig
from ridgeline.fleet.substrates import kubernetes
from ridgeline.fleet.substrates.kubernetes import KubernetesSubstrate
from ridgeline.fleet.substrates.kubernetes_pods import pod
from ridgeline.fleet.substrates.substrate import MARK, Handle, Observed, ReplicaSpec, SubstrateError
from ridgeline.proxy.http_client import Timeouts
from tests.fleet.substrates.emulated_kubernetes import NAMESPACE, TOKEN, EmulatedKubernetes
from tests.patience import PATIENCE_S

SPEC = ReplicaSpec(
    fleet="f00dcafe12",
    id="smollm2-1",
    model="smollm2",
    version="v1",
    source="smollm2-135m",
    flags=("--max-running=4",),
    environment={"RIDGELINE_API_KEYS": "secret-key"},
    resources=ResourcesConfig(cpus=2, memory=1.5, gpus=1),
)
NAME = "ridgeline-f00dcafe-smollm2-1"


@pytest.fixture
async def cluster() -> AsyncIterator[EmulatedKubernetes]:
    made = EmulatedKubernetes()
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def config(cluster: EmulatedKubernetes, tmp_path: Path) -> KubernetesConfig:
    (tmp_path / "token").write_text(TOKEN + "\n", encoding="utf-8")
    return KubernetesConfig(
        namespace=NAMESPACE, image="ridgeline:test", api=cluster.url, token_file=tmp_path / "token"
    )


@pytest.fixture
async def substrate(config: KubernetesConfig) -> AsyncIterator[KubernetesSubstrate]:
    made = KubernetesSubstrate(config)
    yield made
    await made.close()


async def until(
    substrate: KubernetesSubstrate, handle: Handle, right: Callable[[Observed], bool]
) -> Observed:
    async with asyncio.timeout(PATIENCE_S):
        while not right(seen := await substrate.poll(handle)):
            await asyncio.sleep(0.01)
    return seen


async def test_a_start_makes_a_pod_and_a_secret_that_it_owns(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    await substrate.start(SPEC)
    pod, secret = cluster.pods[NAME], cluster.secrets[NAME]
    container = pod["spec"]["containers"][0]
    assert container["args"][:3] == ["serve", "smollm2-135m", "--max-running=4"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "1536Mi", "nvidia.com/gpu": "1"}
    assert container["env"] == [{"name": MARK, "value": "f00dcafe12/smollm2-1"}]
    assert "secret-key" not in str(pod)
    assert secret["stringData"] == {"RIDGELINE_API_KEYS": "secret-key"}
    assert secret["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["automountServiceAccountToken"] is False


async def test_a_start_that_is_sent_twice_makes_one_pod(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    first, second = await substrate.start(SPEC), await substrate.start(SPEC)
    assert first == second
    assert list(cluster.pods) == [NAME]


async def test_a_start_that_is_not_answered_is_found_by_its_name(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = substrate._api._ask

    async def hurried(
        method: str, path: str, body: Any, query: Any, timeouts: Timeouts, again: bool
    ) -> bytes:
        """Only the call that is not answered has a short timeout."""
        first_byte_s = 1.0 if (method, path) == ("POST", substrate._api.pods) else PATIENCE_S
        return await asked(method, path, body, query, replace(timeouts, first_byte_s=first_byte_s), again)

    monkeypatch.setattr(substrate._api, "_ask", hurried)
    cluster.mute.add(("POST", "pods"))
    handle = await substrate.start(SPEC)
    assert list(cluster.pods) == list(cluster.secrets) == [NAME]
    assert (await substrate.poll(handle)).phase == "pending"
    # It cannot be looked for either: the pod stays without a handle.
    cluster.refuse["GET", "ridgeline-f00dcafe-smollm2-2"] = 500
    with pytest.raises(SubstrateError, match="cannot be reached"):
        await substrate.start(msgspec.structs.replace(SPEC, id="smollm2-2"))
    assert sorted(one.replica for one in await substrate.find(SPEC.fleet)) == ["smollm2-1", "smollm2-2"]


async def test_another_replica_s_pod_of_the_same_name_is_not_taken_over(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    await substrate.start(SPEC)
    cluster.pods[NAME]["metadata"]["annotations"]["ridgeline/mark"] = "f00dcafe99/smollm2-1"
    with pytest.raises(SubstrateError, match="belongs to another replica"):
        await substrate.start(SPEC)


async def test_a_refused_secret_leaves_no_pod(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    cluster.refuse["POST", "secrets"] = 403
    with pytest.raises(SubstrateError, match="403 Forbidden: refused by the test"):
        await substrate.start(SPEC)
    assert cluster.pods == {}


async def test_a_pod_without_a_node_says_why(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    handle = await substrate.start(SPEC)
    assert (await substrate.poll(handle)).phase == "pending"
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    await cluster.unschedulable(NAME, message)
    seen = await until(substrate, handle, lambda seen: "Insufficient" in seen.reason)
    assert (seen.phase, seen.reason) == ("pending", f"Unschedulable: {message}")
    await cluster.scheduled(NAME)
    await cluster.waiting(NAME, "ImagePullBackOff", "manifest unknown")
    seen = await until(substrate, handle, lambda seen: "Image" in seen.reason)
    assert (seen.phase, seen.reason) == ("pending", "ImagePullBackOff: manifest unknown")


async def test_a_running_pod_has_an_address_and_the_segments_of_its_start(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    handle = await substrate.start(SPEC)
    cluster.pods[NAME]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    await cluster.scheduled(NAME)
    cluster.pods[NAME]["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:07Z"
    await cluster.running(NAME, "10.1.2.3")
    seen = await until(substrate, handle, lambda seen: seen.phase == "running")
    assert seen.url == "http://10.1.2.3:8000"
    assert seen.segments["node"] == 7
    assert seen.segments["image"] > 0


@pytest.mark.parametrize(("code", "reason"), [(137, "OOMKilled"), (1, "Error"), (0, "Completed")])
async def test_a_pod_that_ended_says_how(
    code: int, reason: str, cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    handle = await substrate.start(SPEC)
    await cluster.scheduled(NAME)
    await cluster.ended(NAME, code, reason)
    seen = await until(substrate, handle, lambda seen: seen.phase == "exited")
    assert (seen.exit_code, seen.reason) == (code, reason)


async def test_a_lost_node_and_a_deleted_pod_end_a_replica(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    handle = await substrate.start(SPEC)
    await cluster.scheduled(NAME)
    await cluster.running(NAME, "10.1.2.3")
    await until(substrate, handle, lambda seen: seen.phase == "running")
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    await cluster.set_status(NAME, conditions=[{**target, "message": "node is unreachable"}])
    seen = await until(substrate, handle, lambda seen: seen.phase == "exited")
    assert seen.reason == "NodeLost: node is unreachable"
    await cluster.remove(NAME)
    seen = await until(substrate, handle, lambda seen: "does not exist" in seen.reason)
    assert seen.phase == "exited"


async def test_a_stop_gives_the_drain_as_grace_and_waits_for_the_node(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    handle = await substrate.start(SPEC)
    await cluster.scheduled(NAME)
    await cluster.running(NAME, "10.1.2.3")
    stopping = asyncio.create_task(substrate.stop(handle, 30.0))
    async with asyncio.timeout(PATIENCE_S):
        while not cluster.deleted:
            await asyncio.sleep(0.01)
    assert cluster.deleted == [(NAME, 35)]
    seen = await until(substrate, handle, lambda seen: bool(seen.reason))
    assert (seen.phase, seen.reason) == ("running", "its pod is being deleted")
    assert not stopping.done()
    await cluster.remove(NAME)
    await asyncio.wait_for(stopping, PATIENCE_S)
    assert cluster.secrets == {}
    await substrate.stop(handle, 30.0)  # once more: nothing to do
    assert len(cluster.deleted) == 1


async def test_a_pod_that_its_lost_node_never_confirms_is_reported(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "GONE_S", -1.0)
    handle = await substrate.start(SPEC)
    await cluster.scheduled(NAME)
    with pytest.raises(SubstrateError, match="its node may be lost"):
        await substrate.stop(handle, 0.0)


async def test_a_stop_does_not_count_a_time_for_which_the_controller_stood_still(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(0, 10**6, 3600))
    monkeypatch.setattr(kubernetes, "AwakeClock", lambda: AwakeClock(lambda: next(hours)))
    monkeypatch.setattr(kubernetes, "POLL_S", 0.0)
    handle = await substrate.start(SPEC)
    await cluster.scheduled(NAME)
    await cluster.running(NAME, "10.1.2.3")
    stopping = asyncio.create_task(substrate.stop(handle, 30.0))
    async with asyncio.timeout(PATIENCE_S):
        while next(hours) < 10 * 3600:
            await asyncio.sleep(0.01)
        await cluster.remove(NAME)
        await stopping


async def test_a_stop_never_deletes_a_later_pod_of_the_same_name(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    handle = await substrate.start(SPEC)
    await cluster.remove(NAME)
    await substrate.start(SPEC)
    await substrate.stop(handle, 0.0)
    assert NAME in cluster.pods
    assert (await substrate.poll(handle)).phase == "exited"


async def test_watches_survive_cuts_bookmarks_and_compaction(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    handle = await substrate.start(SPEC)
    await substrate.poll(handle)
    watch = substrate._watches[SPEC.fleet]
    await cluster.bookmark()
    cluster.cut_watches()
    await cluster.scheduled(NAME)
    await cluster.waiting(NAME, "ContainerCreating")
    await until(substrate, handle, lambda seen: seen.reason == "ContainerCreating")
    assert watch.lists == 1  # continued from the last version
    cluster.cut_watches()
    await cluster.running(NAME, "10.1.2.3")
    cluster.forget_history()
    await until(substrate, handle, lambda seen: seen.url == "http://10.1.2.3:8000")
    assert watch.lists == 2
    polls = len(cluster.requests)
    for _ in range(50):
        await substrate.poll(handle)
    assert len(cluster.requests) == polls  # from memory


async def test_an_api_that_is_away_is_an_error_and_not_a_lost_replica(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.fleet.substrates.kubernetes_watch.STALE_S", 0.0)
    handle = await substrate.start(SPEC)
    await substrate.poll(handle)
    await cluster.close()

    async def fails() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await substrate.poll(handle)
                await asyncio.sleep(0.01)

    with pytest.raises(SubstrateError, match="cannot be reached"):
        await fails()


async def test_a_wrong_token_is_named(config: KubernetesConfig, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong", encoding="utf-8")
    made = KubernetesSubstrate(config)
    with pytest.raises(SubstrateError, match="401 Unauthorized"):
        await made.start(SPEC)
    await made.close()


async def test_another_controller_finds_the_replicas_of_its_fleet(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate, config: KubernetesConfig
) -> None:
    handle = await substrate.start(SPEC)
    await substrate.start(msgspec.structs.replace(SPEC, fleet="another"))
    ended = msgspec.structs.replace(SPEC, id="smollm2-2")
    await substrate.start(ended)
    await cluster.ended("ridgeline-f00dcafe-smollm2-2", 1, "Error")
    later = KubernetesSubstrate(config)
    assert await later.find(SPEC.fleet) == [handle]
    assert (await later.poll(handle)).phase == "pending"
    await later.close()


async def test_an_adopted_pod_whose_controller_ended_before_it_made_the_secret_gets_it(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate, config: KubernetesConfig
) -> None:
    made = await substrate._create(pod(SPEC, config), SPEC.mark)  # here the controller was killed
    later = KubernetesSubstrate(config)
    (handle,) = await later.find(SPEC.fleet)
    await later.adopt(handle, None)  # it is about to be ended
    assert cluster.secrets == {}
    for _ in range(2):  # the second time, the API answers that there is one
        await later.adopt(handle, SPEC.environment)
        assert cluster.secrets[NAME]["stringData"] == SPEC.environment
        assert cluster.secrets[NAME]["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    cluster.refuse["POST", "secrets"] = 403
    with pytest.raises(SubstrateError, match="403 Forbidden"):
        await later.adopt(handle, SPEC.environment)
    await cluster.scheduled(NAME)
    await cluster.running(NAME, "10.1.2.3")
    await until(later, handle, lambda seen: seen.phase == "running")
    await later.adopt(handle, SPEC.environment)  # its container has it
    await later.close()


async def test_old_ended_pods_are_deleted_at_the_next_start(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    for number in range(kubernetes.KEPT + 2):
        handle = await substrate.start(msgspec.structs.replace(SPEC, id=f"smollm2-{number}"))
        await cluster.ended(f"ridgeline-f00dcafe-smollm2-{number}", 1, "Error")
        await until(substrate, handle, lambda seen: seen.phase == "exited")
    await substrate.start(msgspec.structs.replace(SPEC, id="smollm2-99"))
    assert len(cluster.pods) == kubernetes.KEPT + 1


async def test_logs_are_cut_to_their_end(cluster: EmulatedKubernetes, substrate: KubernetesSubstrate) -> None:
    handle = await substrate.start(SPEC)
    with pytest.raises(SubstrateError, match="waiting to start"):
        await substrate.logs(handle, 100)
    cluster.logs[NAME] = b"".join(b"line %04d\n" % number for number in range(1000))
    assert await substrate.logs(handle, 100) == cluster.logs[NAME][-100:]


async def test_the_capacity_is_that_of_nodes_that_take_pods(
    cluster: EmulatedKubernetes, substrate: KubernetesSubstrate
) -> None:
    allocatable = {"cpu": "3920m", "memory": "16Gi", "nvidia.com/gpu": "2"}
    cluster.nodes = [
        {"spec": {}, "status": {"allocatable": allocatable}},
        {"spec": {"unschedulable": True}, "status": {"allocatable": allocatable}},
    ]
    found = await substrate.capacity()
    assert (found.cpus, found.memory, found.gpus) == (3.92, 16.0, 2)
    cluster.refuse["GET", "nodes"] = 403
    assert (await substrate.capacity()).cpus is None


async def test_placement_settings_reach_the_pod(
    cluster: EmulatedKubernetes, config: KubernetesConfig
) -> None:
    wider = replace(
        config,
        node_selector=("disk=nvme",),
        tolerations=("gpu", "spot=true:NoSchedule"),
        runtime_class="nvidia",
        cache_claim="weights",
        pull_secrets=("registry",),
    )
    made = KubernetesSubstrate(wider)
    resources = ResourcesConfig(region="eu-west", pool="h200-spot")
    long = "a-model-with-a-very-long-name-that-no-label-and-no-host-name-would-hold-12"
    flags = ("--served-model-name=$(HOME)",)
    await made.start(msgspec.structs.replace(SPEC, id=long, resources=resources, flags=flags))
    (name,) = cluster.pods
    spec = cluster.pods[name]["spec"]
    assert len(name) <= 63
    assert spec["nodeSelector"] == {
        "disk": "nvme",
        "topology.kubernetes.io/region": "eu-west",
        "ridgeline/pool": "h200-spot",
    }
    assert spec["tolerations"] == [
        {"key": "gpu", "operator": "Exists"},
        {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
    ]
    assert spec["volumes"][0] == {"name": "cache", "persistentVolumeClaim": {"claimName": "weights"}}
    assert spec["runtimeClassName"] == "nvidia"
    assert "--served-model-name=$$(HOME)" in spec["containers"][0]["args"]
    await made.close()


def test_outside_a_pod_the_api_s_address_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SubstrateError, match="kubectl proxy"):
        KubernetesSubstrate(KubernetesConfig())
