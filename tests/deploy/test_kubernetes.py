"""The Kubernetes objects say what the product takes, and their parts agree with each other."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deploy_rig import (
    DOCKER,
    commands,
    documents,
    get,
    mounts,
    output_of,
    ports,
    running_sidecar,
    serve_settings,
    yaml_of,
)

from examples.options import read_options
from publisher import Sidecar, WorkerInfo
from publisher.config.settings import pod_facts
from publisher.config.sidecar_config import ConfigError, check_ports
from publisher.config.topic import topic_fields
from publisher.engines.told import Told, read_told

KUBERNETES = DOCKER / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml"))
COMPONENTS = [
    name
    for name in OVERLAYS
    if yaml_of(KUBERNETES / name / "kustomization.yaml")["kind"] == "Component"
]
SET = yaml_of(BASE / "statefulset.yaml")
POD = SET["spec"]["template"]["spec"]
(SIDECAR,) = POD["initContainers"]
(ENGINE,) = POD["containers"]
FILES = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")


def built(overlay: str) -> list[Any]:
    """What kustomize makes of it, of a component with the base; skips where there is none."""
    commands("kubectl")
    if overlay not in COMPONENTS:
        return documents(output_of("kubectl", "kustomize", KUBERNETES / overlay))
    return combined("base", [overlay])


def combined(overlay: str, components: list[str], *resources: str) -> list[Any]:
    """What kustomize makes of several, in a kustomization beside them."""
    with tempfile.TemporaryDirectory() as folder:
        at = os.path.relpath(KUBERNETES, folder)
        said = {
            "resources": [f"{at}/{one}" for one in (overlay, *resources)],
            "components": [f"{at}/{one}" for one in components],
        }
        Path(folder, "kustomization.yaml").write_text(json.dumps(said))
        return documents(output_of("kubectl", "kustomize", folder))


@pytest.mark.parametrize(
    "config", [BASE / "sidecar.toml", KUBERNETES / "llm-d/sidecar.toml"], ids=str
)
def test_the_sidecars_command_and_file_are_what_serve_takes(config: Path) -> None:
    """And its ports are those with names, its folders those that are mounted."""
    settings = serve_settings(SIDECAR["args"], config)
    assert settings.forever
    (sink,) = settings.config.sinks
    told = (sink.endpoint, sink.replay_endpoint, settings.config.http_endpoint)
    numbers = [int(str(one).rpartition(":")[2]) for one in told]
    assert ports(SIDECAR) == dict(zip(("kv-events", "kv-replay", "kv-http"), numbers, strict=True))
    assert str(settings.config.state_dir).startswith(mounts(SIDECAR)["state"] + "/")
    named = Path(SIDECAR["args"][SIDECAR["args"].index("--config") + 1])
    assert str(named) == f"{mounts(SIDECAR)['config']}/{config.name}"


def test_worker_and_sidecar_meet() -> None:
    """One user, one volume, and the socket in a folder of it that the worker makes for itself alone."""
    options = read_options(ENGINE["args"])
    link = serve_settings(SIDECAR["args"], BASE / "sidecar.toml").link
    assert link == Path(options.link, "link-dp0")
    assert str(Path(options.link).parent) == mounts(SIDECAR)["link"] == mounts(ENGINE)["link"]
    assert POD["securityContext"]["runAsUser"] > 0
    for container in (SIDECAR, ENGINE):
        assert "runAsUser" not in container["securityContext"]
    assert ports(ENGINE) == {"http": options.port}


def test_the_relay_listens_where_the_engine_publishes() -> None:
    """Of an engine that is as it was: its addresses, its block size and its name for the model; the
    sidecar's own ports are those of the base, and nothing is left of the link.
    """
    pod = yaml_of(KUBERNETES / "relay/statefulset.yaml")["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    (engine,) = (one for one in pod["containers"] if "name" in one)
    settings = serve_settings(sidecar["args"], KUBERNETES / "relay/sidecar.toml")
    plain = serve_settings(SIDECAR["args"], BASE / "sidecar.toml").config
    relay, told = settings.config.relay, json.loads(engine["args"][-1])
    assert relay is not None and settings.link is None
    assert msgspec.structs.replace(settings.config, relay=None) == plain
    assert relay.endpoint == told["endpoint"].replace("*", "127.0.0.1")
    assert relay.replay_endpoint == told["replay_endpoint"].replace("*", "127.0.0.1")
    assert told.pop("buffer_steps") == 100_000
    assert set(told) == {"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"}
    words = dict(pairwise(engine["args"]))
    assert int(words["--block-size"]) == relay.worker.block_size
    assert engine["args"][0] == relay.worker.model
    assert ports(engine) == {"http": int(words["--port"])} == ports(ENGINE)
    gone = {one["name"] for one in pod["volumes"] if one.get("$patch") == "delete"}
    assert gone == {one["name"] for one in POD["volumes"]} - {"state", "config"}


def plugin() -> tuple[dict[str, Any], Told]:
    """The engine's container in `plugin`, and what its option comes to."""
    pod = yaml_of(KUBERNETES / "plugin/statefulset.yaml")["spec"]["template"]["spec"]
    (engine,) = (one for one in pod["containers"] if "name" in one)
    keys = json.loads(engine["args"][-1].replace("$(POD_NAME)", "engine-0"))
    return engine, read_told(keys, {}, dialect="sglang")


def test_the_plugin_publishes_as_the_base_does() -> None:
    """By SGLang's option: the sink, the ports and the state of the base's sidecar are the engine's own,
    and its worker is the pod.
    """
    engine, told = plugin()
    plain = serve_settings(SIDECAR["args"], BASE / "sidecar.toml").config
    (sink,), (of_base,) = told.config.sinks, plain.sinks
    alike = {"name": "router", "topic": of_base.topic, "add_dp_rank": of_base.add_dp_rank}
    assert msgspec.structs.replace(sink, **alike) == of_base
    for key in ("state_dir", "http_endpoint"):
        assert getattr(told.config, key) == getattr(plain, key)
    assert ports(engine) == ports(SIDECAR) | ports(ENGINE)
    assert str(told.config.state_dir).startswith(mounts(engine)["state"] + "/")
    words = dict(pairwise(engine["args"]))
    worker = told.worker_info(0, block_size=int(words["--page-size"]))
    assert worker.worker_id == "engine-0"
    assert int(words["--port"]) == ports(engine)["http"]
    assert {one["name"] for one in engine["env"]} == {one["name"] for one in SIDECAR["env"]}


def test_the_plugins_pod_is_the_engine_alone() -> None:
    """No sidecar's container, link or file, and no user that the image does not have."""
    made = built("plugin")
    assert "ConfigMap" not in {one["kind"] for one in made}
    (found,) = (one for one in made if one["kind"] == "StatefulSet")
    pod = found["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert not pod["initContainers"]
    assert {one["name"] for one in pod["volumes"]} == {"state", "shm"} == set(mounts(engine))
    assert not {"runAsUser", "runAsGroup", "runAsNonRoot"} & set(pod["securityContext"])


@pytest.mark.parametrize("overlay", ["plugin", "relay"])
def test_an_engine_has_half_an_hour_to_load_its_model(overlay: str) -> None:
    """And a GPU, and shared memory for its processes; a probe has the second that SGLang's takes."""
    pod = yaml_of(KUBERNETES / overlay / "statefulset.yaml")["spec"]["template"]["spec"]
    (engine,) = (one for one in pod["containers"] if "name" in one)
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["timeoutSeconds"] > 1
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert mounts(engine)["shm"] == "/dev/shm"


def test_one_rank_has_room_between_the_ports() -> None:
    """As the page says of several: 5557 and 5558 are refused, 5557 and 5657 are not."""
    config = serve_settings(SIDECAR["args"], BASE / "sidecar.toml").config
    two = WorkerInfo(block_size=16, dp_size=2)
    with pytest.raises(ConfigError, match="replay_endpoint"):
        check_ports(config, two)
    (sink,) = config.sinks
    apart = msgspec.structs.replace(sink, replay_endpoint="tcp://*:5657")
    check_ports(msgspec.structs.replace(config, sinks=(apart,)), two)


def test_the_sidecar_is_a_native_one_that_waits_for_nobody() -> None:
    """The engine begins when the startup probe has passed: not /readyz, which waits for the engine."""
    assert SIDECAR["restartPolicy"] == "Always"
    assert SIDECAR["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert SIDECAR["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert "readinessProbe" not in SIDECAR


def gate() -> dict[str, Any]:
    """The readiness probe of the sidecar in `gated`."""
    (patch,) = yaml_of(KUBERNETES / "gated/kustomization.yaml")["patches"]
    (patched,) = yaml_of(patch["patch"])["spec"]["template"]["spec"]["initContainers"]
    assert patched["name"] == SIDECAR["name"]
    found: dict[str, Any] = patched["readinessProbe"]
    return found


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """A real one."""
    with running_sidecar() as sidecar:
        yield sidecar


@pytest.mark.integration
def test_the_probes_ask_what_a_sidecar_answers(sidecar: Sidecar) -> None:
    """Each path of a probe is 200 of a sidecar that is well, and /metrics is what a PodMonitor gets."""
    probes = [one["httpGet"] for one in (SIDECAR["startupProbe"], SIDECAR["livenessProbe"], gate())]
    assert [one["path"] for one in probes] == ["/healthz", "/healthz", "/readyz"]
    assert {one["port"] for one in probes} == {"kv-http"}
    monitor = yaml_of(KUBERNETES / "monitoring/podmonitor.yaml")
    (scraped,) = monitor["spec"]["podMetricsEndpoints"]
    assert scraped["port"] in ports(SIDECAR)
    for path in (*(one["path"] for one in probes), scraped["path"]):
        assert get(f"{sidecar.http_endpoint}{path}")[0] == 200, path


def test_the_downward_api_gives_what_topics_may_name() -> None:
    """The variables are those that a sidecar reads; llm-d's topic needs one of them."""
    given = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in SIDECAR["env"]}
    assert set(pod_facts(dict.fromkeys(given, "x"))) == {"pod_ip", "pod_name", "namespace"}
    assert given["POD_IP"] == "status.podIP"
    (sink,) = serve_settings(SIDECAR["args"], KUBERNETES / "llm-d/sidecar.toml").config.sinks
    assert "pod_ip" in topic_fields(sink.topic)
    assert "$(POD_NAME)" in ENGINE["args"]


def test_both_containers_are_confined() -> None:
    """No root, no writable root file system, no capability, no account of the cluster's."""
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    for container in (SIDECAR, ENGINE):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} == set(container["resources"])
    assert SIDECAR["resources"]["requests"]["cpu"] == "500m"  # half a core: docs/operations.md


def test_what_waits_for_subscribers_is_bounded() -> None:
    """Each file of a container with 512 MiB says so; the default is ten times as much."""
    for config in (DOCKER / "sidecar.toml", *KUBERNETES.rglob("sidecar.toml")):
        (sink,) = tomllib.loads(config.read_text())["sinks"]
        assert (sink["hwm"], sink["buffer_bytes"]) == (10_000, 128 << 20), config


def test_what_selects_pods_and_ports_finds_them() -> None:
    """Service, policy and monitor name this pod's label, and all of its ports."""
    labels = SET["spec"]["template"]["metadata"]["labels"]
    numbers = ports(SIDECAR) | ports(ENGINE)
    service = yaml_of(BASE / "service.yaml")["spec"]
    policy = yaml_of(BASE / "networkpolicy.yaml")["spec"]
    monitor = yaml_of(KUBERNETES / "monitoring/podmonitor.yaml")["spec"]
    budget = yaml_of(BASE / "poddisruptionbudget.yaml")["spec"]
    assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    assert SET["spec"]["selector"]["matchLabels"] == labels == service["selector"]
    assert policy["podSelector"]["matchLabels"] == labels == monitor["selector"]["matchLabels"]
    served = {one["name"]: one["port"] for one in service["ports"]}
    assert served == {name: numbers[name] for name in ("http", "kv-events", "kv-replay")}
    assert all(one["port"] == one["targetPort"] for one in service["ports"])
    routers, prometheus = ({port["port"] for port in rule["ports"]} for rule in policy["ingress"])
    assert (routers, prometheus) == (set(served.values()), {numbers["kv-http"]})


def test_the_operators_rules_are_prometheus_rules() -> None:
    """The object holds the groups of alerts.yaml, word for word."""
    rule = yaml_of(KUBERNETES / "monitoring/prometheusrule.yaml")
    assert rule["spec"] == yaml_of(DOCKER / "monitoring/alerts.yaml")


def test_what_outlives_the_pod_is_claimed() -> None:
    """In `persistent` the state is of a claim, and no longer of the pod."""
    (found,) = (one for one in built("persistent") if one["kind"] == "StatefulSet")
    assert [one["metadata"]["name"] for one in found["spec"]["volumeClaimTemplates"]] == ["state"]
    volumes = {one["name"] for one in found["spec"]["template"]["spec"]["volumes"]}
    assert volumes == {one["name"] for one in POD["volumes"]} - {"state"}


@pytest.mark.parametrize("overlay", ["base", "relay", "llm-d"])
def test_what_goes_with_each(overlay: str) -> None:
    """Objects for the operator, a claim and a gate, all of them at once."""
    commands("kubectl")
    made = combined(overlay, COMPONENTS, "monitoring")
    (found,) = (one for one in made if one["kind"] == "StatefulSet")
    spec = found["spec"]["template"]["spec"]
    assert sorted(COMPONENTS) == ["gated", "persistent"]
    assert {"PodMonitor", "PrometheusRule"} <= {one["kind"] for one in made}
    assert "state" not in {one["name"] for one in spec["volumes"]}
    (sidecar,) = spec["initContainers"]
    assert sidecar["image"] and sidecar["readinessProbe"] == gate()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_what_kustomize_makes(overlay: str, tmp_path: Path) -> None:
    """Strictly by its schemas; the operator's own kinds are not among them."""
    made = built(overlay)
    images = {
        container["image"]
        for one in made
        if one["kind"] == "StatefulSet"
        for container in (
            *one["spec"]["template"]["spec"]["initContainers"],
            *one["spec"]["template"]["spec"]["containers"],
        )
    }
    sidecar = "kvevents-sidecar:0.1.0"
    expected = {
        "plugin": {"kvevents-sglang:0.1.0"},
        "relay": {sidecar, "vllm/vllm-openai:v0.33.0"},
        "monitoring": set[str](),
    }
    assert images == expected.get(overlay, {sidecar, "kvevents-engine:0.1.0"})
    commands("kubernetes-validate")
    for number, one in enumerate(made):
        if not one["apiVersion"].startswith("monitoring.coreos.com/"):
            file = tmp_path / f"{number}.json"
            file.write_text(json.dumps(one))
            output_of("kubernetes-validate", "--strict", file)
