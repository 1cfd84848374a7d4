"""The kustomizations of one's own that docs/deployment.md shows, as kustomize makes them."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deploy_rig import (
    DOCKER,
    REPOSITORY,
    blocks,
    commands,
    documents,
    mounts,
    output_of,
    ports,
    serve_settings,
    yaml_of,
)

from publisher.engines.told import changed, read_told

PAGE = (REPOSITORY / "docs" / "deployment.md").read_text()
BASE = DOCKER / "kubernetes/base"
OF_BASE = yaml_of(BASE / "statefulset.yaml")["spec"]["template"]["spec"]
HALF_AN_HOUR_S = 1800

Objects = dict[str, dict[str, Any]]


def mine(what: str = "") -> str:
    """The page's `mine/kustomization.yaml`, of those the one whose first line goes on so."""
    first = f"# mine/kustomization.yaml{what}\n"
    (found,) = (block for block in blocks(PAGE, "yaml") if block.startswith(first))
    return found


def made_of(folder: Path, *texts: str, **files: Path | str) -> Objects:
    """What kustomize makes of it, with the files beside it, by kind; skips without kubectl."""
    commands("kubectl")
    at = folder / "mine"
    at.mkdir()
    shutil.copytree(DOCKER / "kubernetes", folder / "docker/kubernetes", dirs_exist_ok=True)
    (at / "kustomization.yaml").write_text("".join(texts))
    for name, file in files.items():
        text = file.read_text() if isinstance(file, Path) else file
        (at / f"{name}.toml").write_text(text)
    made = documents(output_of("kubectl", "kustomize", at))
    by_kind = {one["kind"]: one for one in made}
    assert len(by_kind) == len(made)
    return by_kind


def pod_of(made: Objects) -> dict[str, Any]:
    found: dict[str, Any] = made["StatefulSet"]["spec"]["template"]["spec"]
    return found


def check_strictly(made: Objects, folder: Path) -> None:
    """By Kubernetes' schemas, where there is what knows them."""
    commands("kubernetes-validate")
    for kind, one in made.items():
        file = folder / f"{kind}.json"
        file.write_text(json.dumps(one))
        output_of("kubernetes-validate", "--strict", file)


def has_time_and_a_gpu(engine: dict[str, Any]) -> None:
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= HALF_AN_HOUR_S
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["timeoutSeconds"] > 1
        assert engine[probe]["httpGet"]["port"] in ports(engine)
    assert set(engine["resources"]["limits"]) == {"nvidia.com/gpu"}
    assert "readOnlyRootFilesystem" not in engine.get("securityContext", {})


def test_an_engine_that_listens(tmp_path: Path) -> None:
    """Nothing is left of the example's container; it meets the sidecar, of the same user, is served where
    Service and policy look, and has each volume that it mounts.
    """
    made = made_of(tmp_path, mine(), mine(", below"))
    pod = pod_of(made)
    (engine,), (sidecar,) = pod["containers"], pod["initContainers"]
    assert engine["image"] == "registry.example/your-engine:1.0"
    assert sidecar["image"] == "registry.example/kvevents-sidecar:0.1.0"
    has_time_and_a_gpu(engine)
    words = dict(pairwise(engine["args"]))
    link = serve_settings(sidecar["args"], BASE / "sidecar.toml").link
    assert link == Path(words["--link"], "link-dp0")
    assert str(Path(words["--link"]).parent) == mounts(sidecar)["link"] == mounts(engine)["link"]
    assert words["--host"] == "0.0.0.0"
    (served,) = (one for one in made["Service"]["spec"]["ports"] if one["name"] == "http")
    assert ports(engine) == {"http": int(words["--port"])} == {"http": served["targetPort"]}
    assert words["--worker-id"] == "$(POD_NAME)"
    given = {one["name"]: one for one in engine["env"]}
    assert given["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert given["HOME"]["value"] == mounts(engine)["tmp"] == "/tmp"
    assert mounts(engine)["shm"] == "/dev/shm"
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert set(volumes) == set(mounts(engine)) | set(mounts(sidecar))
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["tmp"]["emptyDir"]["sizeLimit"] == "8Gi"
    assert pod["securityContext"] == OF_BASE["securityContext"]
    assert pod["securityContext"]["runAsUser"] == 10001
    for container in (engine, sidecar):
        assert "runAsUser" not in container["securityContext"]
    check_strictly(made, tmp_path)


def test_an_engine_behind_the_relay(tmp_path: Path) -> None:
    """Its sizes, its model and its addresses are those of the sidecar's file, which is the one shown; the
    rest of that is the overlay's.
    """
    (file,) = (one for one in blocks(PAGE, "toml") if one.startswith("# mine/sidecar.toml"))
    made = made_of(tmp_path, mine(", for the relay"), sidecar=file)
    pod = pod_of(made)
    (engine,), (sidecar,) = pod["containers"], pod["initContainers"]
    assert made["ConfigMap"]["data"] == {"sidecar.toml": file}
    (config,) = (one["configMap"] for one in pod["volumes"] if one["name"] == "config")
    assert config["name"] == made["ConfigMap"]["metadata"]["name"]
    assert engine["image"] == "registry.example/vllm-openai:v0.33.0"
    assert sidecar["image"] == "registry.example/kvevents-sidecar:0.1.0"
    has_time_and_a_gpu(engine)
    own = tmp_path / "mine/sidecar.toml"
    settings = serve_settings(sidecar["args"], own).config
    plain = serve_settings(sidecar["args"], DOCKER / "kubernetes/relay/sidecar.toml").config
    words, told = dict(pairwise(engine["args"])), json.loads(engine["args"][-1])
    assert settings.relay is not None and plain.relay is not None
    assert int(words["--block-size"]) == settings.relay.worker.block_size
    assert settings.relay.worker.block_size != plain.relay.worker.block_size
    assert engine["args"][0] == settings.relay.worker.model
    assert words["--tensor-parallel-size"] == str(engine["resources"]["limits"]["nvidia.com/gpu"])
    relay = msgspec.structs.replace(settings.relay, worker=plain.relay.worker)
    assert msgspec.structs.replace(settings, relay=relay) == plain
    (of_overlay,) = (
        one
        for one in yaml_of(DOCKER / "kubernetes/relay/statefulset.yaml")["spec"]["template"][
            "spec"
        ]["containers"]
        if "name" in one
    )
    assert told == json.loads(of_overlay["args"][-1])
    check_strictly(made, tmp_path)


def test_vllm_with_the_plugin(tmp_path: Path) -> None:
    """The file is where the variable says, is one that the engine takes, and publishes as the base."""
    made = made_of(tmp_path, mine(", for vLLM with the plugin"))
    pod = pod_of(made)
    (engine,) = pod["containers"]
    assert engine["image"] == "registry.example/kvevents-vllm:0.1.0"
    assert engine["command"] == ["vllm", "serve"]
    has_time_and_a_gpu(engine)
    environ = {one["name"]: one["value"] for one in engine["env"] if "value" in one}
    assert environ.pop("KVEVENTS_SIDECAR") == "1"
    (config,) = (one["configMap"] for one in pod["volumes"] if one["name"] == "config")
    assert config["name"] == made["ConfigMap"]["metadata"]["name"]
    ((name, text),) = made["ConfigMap"]["data"].items()
    assert environ.pop("KVEVENTS_CONFIG") == f"{mounts(engine)['config']}/{name}"
    assert not environ
    (tmp_path / name).write_text(text)
    words = dict(pairwise(engine["args"]))
    keys = changed(json.loads(engine["args"][-1]))
    told = read_told(keys, {"KVEVENTS_CONFIG": str(tmp_path / name)}, dialect="vllm")
    worker = told.worker_info(0)
    assert (worker.block_size, worker.model) == (int(words["--block-size"]), engine["args"][0])
    (of_base,) = OF_BASE["initContainers"]
    plain = serve_settings(of_base["args"], BASE / "sidecar.toml").config
    assert told.config.sinks == plain.sinks
    assert told.config.http_endpoint == plain.http_endpoint
    assert str(told.config.state_dir).startswith(mounts(engine)["state"] + "/")
    assert ports(engine) == ports(of_base) | {"http": int(words["--port"])}
    check_strictly(made, tmp_path)


def test_two_models_in_a_namespace(tmp_path: Path) -> None:
    """Every selector of one finds its own pods, and none of the other's; the policy's of routers too."""
    selected: list[dict[str, Any]] = []
    labels: list[dict[str, str]] = []
    names: list[set[str]] = []
    for model in ("llama", "qwen"):
        folder = tmp_path / model
        folder.mkdir()
        said = mine(", for each of several models").replace("llama", model)
        made = made_of(folder, mine(), said)
        template = made["StatefulSet"]["spec"]["template"]
        labels.append(template["metadata"]["labels"])
        names.append({one["metadata"]["name"] for one in made.values()})
        assert made["StatefulSet"]["spec"]["serviceName"] == f"{model}-engine"
        assert made["Service"]["metadata"]["name"] == f"{model}-engine"
        policy = made["NetworkPolicy"]["spec"]
        assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == {
            "kvevents/role": "router",
            "app.kubernetes.io/instance": model,
        }
        selected.append(
            {
                "StatefulSet": made["StatefulSet"]["spec"]["selector"]["matchLabels"],
                "Service": made["Service"]["spec"]["selector"],
                "NetworkPolicy": policy["podSelector"]["matchLabels"],
                "PodDisruptionBudget": made["PodDisruptionBudget"]["spec"]["selector"][
                    "matchLabels"
                ],
            }
        )
    assert not names[0] & names[1]
    for mine_too, (own, other) in enumerate((labels, labels[::-1])):
        for kind, selector in selected[mine_too].items():
            assert selector.items() <= own.items(), kind
            assert not selector.items() <= other.items(), kind


@pytest.mark.parametrize("components", ["", "components: [../docker/kubernetes/persistent]\n"])
def test_all_that_may_be_in_it_together(tmp_path: Path, components: str) -> None:
    """The kustomization with the page's patches: kustomize takes it, the policy lets in who was to be let
    in, and the sidecar's file has a name that does not change with it.
    """
    (policy,) = (one for one in blocks(PAGE, "yaml") if "kind: NetworkPolicy" in one)
    (config,) = (one for one in blocks(PAGE, "yaml") if "disableNameSuffixHash" in one)
    (labels,) = re.findall(r"`(labels: \[.*\])`", PAGE)
    text = mine() + mine(", below") + textwrap.indent(policy, "  ") + config + components + labels
    made = made_of(tmp_path, text, sidecar=BASE / "sidecar.toml")
    routers, metrics = made["NetworkPolicy"]["spec"]["ingress"]
    assert [*map(list, routers["from"])] == [["podSelector"], ["namespaceSelector"]]
    assert [one["port"] for one in metrics["ports"]] == [9400, 8000]
    (other,) = metrics["from"]
    assert "monitoring" not in str(other)
    assert made["ConfigMap"]["metadata"]["name"] == "kvevents-sidecar"
    assert {one["metadata"]["labels"]["release"] for one in made.values()} == {"NAME"}
    assert made["StatefulSet"]["spec"]["replicas"] == 4
    volumes = {one["name"] for one in pod_of(made)["volumes"]}
    assert ("state" in volumes) is not bool(components)
