"""deploy/kubernetes: overlays build, are strictly valid for three versions of Kubernetes, and start what there is."""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from allspan.client.gateway.metrics.table import METRICS, PREFIX
from allspan.launch.commands.agent import make_parser as agent_parser
from allspan.launch.hosts.agent.endpoint import from_environment
from allspan.launch.settings import ServeSettings, serve_parser, serve_settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))
POD_HEAD = {"apiVersion": "v1", "kind": "Pod"}
ROLES = ("leaderTemplate", "workerTemplate")
VERSIONS = ("1.33", "1.35", "1.37")
KEYS = {"containers": "name", "volumes": "name", "env": "name", "ports": "name", "volumeMounts": "mountPath"}
"""What strategic merge patches identify the entries of a list by; other lists are replaced."""

TEXT, COUNT, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}


def strict(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    fields = {"properties": required | optional, "required": sorted(required), "additionalProperties": False}
    return {"type": "object", **fields}


META = strict({"name": TEXT}, labels={"type": "object", "additionalProperties": TEXT})
TARGET = strict({"apiVersion": TEXT, "kind": TEXT, "name": TEXT})
PROMETHEUS = strict({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT})
TRIGGER = strict({"type": {"const": "prometheus"}, "metadata": PROMETHEUS})
SCALED = strict(
    {"scaleTargetRef": TARGET, "triggers": {"type": "array", "items": TRIGGER, "minItems": 1}},
    pollingInterval=COUNT,
    cooldownPeriod=COUNT,
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    advanced=strict({}, horizontalPodAutoscalerConfig=strict({}, behavior=ANY)),
)
POD = strict({"metadata": strict({"labels": ANY}), "spec": ANY})
GROUP = strict(
    {
        "replicas": COUNT,
        "leaderWorkerTemplate": strict(
            {"size": COUNT, "leaderTemplate": POD, "workerTemplate": POD},
            restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart"]},
        ),
    },
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
)
CUSTOM = {
    "LeaderWorkerSet": strict(
        {"apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"}, "kind": TEXT, "metadata": META, "spec": GROUP}
    ),
    "ScaledObject": strict(
        {"apiVersion": {"const": "keda.sh/v1alpha1"}, "kind": TEXT, "metadata": META, "spec": SCALED}
    ),
}
"""Strict schemas of the fields used of kinds that Kubernetes itself does not have."""


def read(file: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def merged(old: Any, patch: Any, key: str = "") -> Any:
    """A strategic merge patch applied, as far as the patches here go."""
    if isinstance(old, dict) and isinstance(patch, dict):
        return old | {name: merged(old.get(name), value, name) for name, value in patch.items()}
    if isinstance(old, list) and isinstance(patch, list) and key in KEYS:
        names = {item[KEYS[key]]: item for item in old}
        for item in patch:
            names[item[KEYS[key]]] = merged(names.get(item[KEYS[key]]), item)
        return list(names.values())
    return copy.deepcopy(patch)


def identity(document: Any) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


@functools.cache
def build(name: str) -> dict[tuple[str, str], Any]:
    """What `kubectl kustomize` prints, by kind and name; a kustomization here has resources and patches alone."""
    folder = FOLDER / name
    (wanted,) = read(folder / "kustomization.yaml")
    assert wanted.keys() <= {"apiVersion", "kind", "resources", "patches"}, name
    made: dict[tuple[str, str], Any] = {}
    for resource in wanted["resources"]:
        if (folder / resource).is_dir():
            made |= build((folder / resource).resolve().name)
        else:
            made |= {identity(document): document for document in read(folder / resource)}
    for patch in wanted.get("patches", ()):
        (document,) = read(folder / patch["path"])
        old = made.pop(identity(document))
        if document.get("$patch") != "delete":
            made[identity(document)] = merged(old, document)
    return made


def pods() -> list[Any]:
    """The pod templates of all overlays, as pytest's parameters."""
    found = []
    for name in OVERLAYS:
        for (kind, own), document in build(name).items():
            if kind == "Deployment":
                found.append(pytest.param(document["spec"]["template"]["spec"], id=f"{name}-{own}"))
            elif kind == "LeaderWorkerSet":
                found.append(pytest.param(templates(document)["leaderTemplate"]["spec"], id=f"{name}-{own}"))
    return found


def templates(group: Any) -> Any:
    return group["spec"]["leaderWorkerTemplate"]


def settings_of(container: Any) -> ServeSettings:
    """What the real parser makes of the container's words, which follow the image's `tini -- allspan`."""
    command, *words = container["args"]
    assert command == "serve"
    parsed: ServeSettings = serve_settings(serve_parser().parse(words))
    return parsed


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_strictly_valid_for_three_versions_of_kubernetes(name: str) -> None:
    for (kind, _), document in build(name).items():
        if kind in CUSTOM:
            jsonschema.validate(document, CUSTOM[kind])
            bare = [templates(document)[role] for role in ROLES] if kind == "LeaderWorkerSet" else []
            documents = [POD_HEAD | template | {"metadata": {"name": "pod"}} for template in bare]
        else:
            documents = [document]
        for version in VERSIONS:
            for each in documents:
                kubernetes_validate.validate(each, version, strict=True)


def test_validation_is_strict() -> None:
    deployment = copy.deepcopy(build("base")["Deployment", "allspan"])
    deployment["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)
    scaled = copy.deepcopy(build("keda")["ScaledObject", "allspan"])
    scaled["spec"]["pollInterval"] = 5
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(scaled, CUSTOM["ScaledObject"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_builds_the_same(name: str) -> None:
    kubectl = shutil.which("kubectl")
    version = subprocess.run([kubectl or "false", "version", "--client"], capture_output=True, text=True, timeout=30)
    found = re.search(r"Kustomize Version: v(\d+)", version.stdout)
    if found is None or int(found[1]) < 5:
        return  # Debian 12 has an older one; `build` stands for it
    run = subprocess.run([str(kubectl), "kustomize", str(FOLDER / name)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert {identity(document): document for document in yaml.safe_load_all(run.stdout)} == build(name)


@pytest.mark.parametrize("pod", pods())
def test_a_container_starts_with_flags_that_there_are_and_has_time_to_drain(pod: Any) -> None:
    (container,) = pod["containers"]
    settings = settings_of(container)
    gateway = settings.gateway
    assert gateway is not None
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "http": gateway.port,
        "grpc": gateway.grpc_port,
    }
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert pod["terminationGracePeriodSeconds"] >= 5 + settings.shutdown_timeout + 15
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert all(probe["scheme"] == "HTTPS" and probe["port"] == "http" for probe in probes.values())
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900


@pytest.mark.parametrize("pod", pods())
def test_a_pod_has_whole_processors_shared_memory_and_no_rights(pod: Any) -> None:
    (container,) = pod["containers"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"], "Guaranteed QoS"
    assert resources["limits"]["cpu"].isdigit()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    for word in container["args"]:
        if (path := word.partition("=")[2]).startswith("/"):
            mount = mounts[str(Path(path).parent)]
            assert mount["readOnly"]
            assert "secret" in volumes[mount["name"]]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {row["key"]: row["tolerationSeconds"] for row in pod["tolerations"]} == {
        "node.kubernetes.io/unreachable": 10,
        "node.kubernetes.io/not-ready": 10,
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_whatever_selects_pods_finds_them(name: str) -> None:
    made = build(name)
    template = served(made)
    labels = template["metadata"]["labels"]
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    for (kind, _), document in made.items():
        spec = document.get("spec", {})
        if kind == "Service":
            assert spec["selector"].items() <= labels.items()
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif kind == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        elif kind == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
        elif kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = spec["scaleTargetRef"]
            assert (target["kind"], target["name"]) in made


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_network_policy_lets_clients_reach_what_the_service_names_and_nothing_else(name: str) -> None:
    made = build(name)
    listening = {port["containerPort"] for port in served(made)["spec"]["containers"][0]["ports"]}
    policy = made["NetworkPolicy", "allspan"]["spec"]
    (clients,) = (row for row in policy["ingress"] if "namespaceSelector" in row["from"][0])
    assert {port["port"] for port in clients["ports"]} == listening
    assert {port["port"] for port in made["Service", "allspan"]["spec"]["ports"]} == listening
    others = [row for row in policy["ingress"] if row is not clients]
    inside = [{"podSelector": policy["podSelector"]}]
    assert [row["from"] for row in others] == ([inside] if ("LeaderWorkerSet", "allspan") in made else [])


def served(made: dict[tuple[str, str], Any]) -> Any:
    """The template of the pods that serve."""
    if group := made.get(("LeaderWorkerSet", "allspan")):
        return templates(group)["leaderTemplate"]
    return made["Deployment", "allspan"]["spec"]["template"]


def test_a_groups_leader_serves_over_its_hosts_and_workers_run_agents() -> None:
    group = templates(build("lws")["LeaderWorkerSet", "allspan"])
    leader, worker = (group[role]["spec"] for role in ROLES)
    settings = settings_of(leader["containers"][0])
    assert settings.hosts.hosts == ("lws",)
    command, *words = worker["containers"][0]["args"]
    assert command == "agent"
    agent = agent_parser().parse(words)
    (port,) = worker["containers"][0]["ports"]
    assert port["containerPort"] == agent.agent_port
    given = {row["name"]: row["value"] for row in leader["containers"][0]["env"]}
    assert from_environment("host_timeout", given) == {
        name: getattr(agent, name) for name in ("agent_ssl_ca_certs", "agent_ssl_certfile", "agent_ssl_keyfile")
    }
    assert worker["terminationGracePeriodSeconds"] >= leader["terminationGracePeriodSeconds"]
    for name in ("resources", "securityContext"):
        assert worker["containers"][0][name] == leader["containers"][0][name]
    assert worker["tolerations"] == leader["tolerations"]


def test_scaling_asks_for_metrics_that_are_exported() -> None:
    exported = {PREFIX + metric.name for metric in METRICS}
    triggers = build("keda")["ScaledObject", "allspan"]["spec"]["triggers"]
    asked = {name for row in triggers for name in re.findall(rf"{PREFIX}\w+", row["metadata"]["query"])}
    assert asked
    assert asked <= exported
    (metric,) = build("replicas")["HorizontalPodAutoscaler", "allspan"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"].replace("_", ":", 1) in exported
    assert not [kind for kind, _ in build("keda") if kind == "HorizontalPodAutoscaler"], "KEDA makes its own"
