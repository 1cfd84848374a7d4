"""docs/deployment.md: its commands can be typed, and what it names is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_rig import DOCKER, REPOSITORY, yaml_of

from publisher.cli.commands import parser_of

PAGE = (REPOSITORY / "docs" / "deployment.md").read_text()
SERVICES = yaml_of(DOCKER / "compose.yaml")["services"]
COMPOSE = ["docker", "compose", "-f", "docker/compose.yaml"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def typed() -> Iterator[list[str]]:
    """Each command, split as a shell would."""
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@pytest.mark.parametrize("words", list(typed()), ids=" ".join)
def test_a_command_can_be_typed(words: list[str]) -> None:
    """Files, services, overlays, ports and our own commands that it names exist."""
    if words[:4] == COMPOSE:
        check_compose(words[4:])
        return
    match words:
        case ["docker", "build", *rest] | ["docker", "buildx", "build", *rest]:
            assert (REPOSITORY / rest[rest.index("-f") + 1]).is_file()
            image = rest[rest.index("-t") + 1]
            assert image in {service["image"] for service in SERVICES.values()}
        case ["kubectl", "kustomize", folder] | ["kubectl", "apply", "-k", folder]:
            assert (REPOSITORY / folder / "kustomization.yaml").is_file()
        case ["kubectl", "rollout", "status", name] | ["kubectl", "port-forward", name, _]:
            found = yaml_of(DOCKER / "kubernetes/base/statefulset.yaml")["metadata"]["name"]
            assert name in (f"statefulset/{found}", f"{found}-0")
        case ["curl", url, *_]:
            port = url.split("/")[2].split(":")[1]
            published = [one.split(":")[1] for s in SERVICES.values() for one in s.get("ports", [])]
            assert port in (*published, "9400")
        case ["vllm-router", *rest]:
            command = SERVICES["router"]["command"]
            flags = {word for word in rest if word.startswith("--")}
            assert flags <= {word for word in command if word.startswith("--")}
        case (
            ["promtool", "check" | "test", "rules", path] | ["python", path, *_] | ["POD=yes", path]
        ):
            assert (REPOSITORY / path).is_file()
        case _:
            pytest.fail(f"nothing here knows {words}")


def check_compose(words: list[str]) -> None:
    match words:
        case ["exec", "tail", "kvevents", *ours]:
            parser_of(ours[0]).parse_args(ours)
            hosts = {one for word in ours for one in re.findall(r"tcp://([\w-]+):", word)}
            assert hosts <= set(SERVICES)
        case ["logs" | "restart", service]:
            assert service in SERVICES
        case ["up" | "down", *_]:
            pass
        case _:
            pytest.fail(f"nothing here knows {words}")


def test_a_kustomization_of_ones_own_names_what_is_there() -> None:
    """Its base is a folder beside it, the images are those of the base, and so is what it patches."""
    mine, more = (yaml_of(block) for block in blocks("yaml"))
    (patch,) = more["patches"]
    patched, of_base = yaml_of(patch["patch"]), yaml_of(DOCKER / "kubernetes/base/statefulset.yaml")
    assert patch["target"] == {"kind": of_base["kind"], "name": of_base["metadata"]["name"]}
    assert patched["metadata"]["name"] == of_base["metadata"]["name"]
    names = [
        [one["name"] for one in found["spec"]["template"]["spec"]["containers"]]
        for found in (patched, of_base)
    ]
    assert names[0] == names[1]
    base = REPOSITORY / "mine" / mine["resources"][0] / "kustomization.yaml"
    known = {one["name"] for one in yaml_of(base.resolve())["images"]}
    assert {one["name"] for one in mine["images"]} == known


def test_the_tables_name_what_is_there() -> None:
    """Each file of the first table, each overlay of the second, and no overlay is left out."""
    first = PAGE.partition("## Images")[0]
    names = [
        name
        for row in first.splitlines()
        for name in re.findall(r"`([\w./-]+)`", row.split(" | ")[0])
    ]
    assert len(names) > 6
    assert all((DOCKER / name).exists() for name in names if name != "docker/"), names
    overlays = set(re.findall(r"^\| `kubernetes/([\w-]+)`", PAGE, re.MULTILINE))
    there = {path.parent.name for path in (DOCKER / "kubernetes").glob("*/kustomization.yaml")}
    assert overlays == there - {"base"}


def test_alerts_that_it_names_exist() -> None:
    """By their names in alerts.yaml."""
    (group,) = yaml_of(DOCKER / "monitoring/alerts.yaml")["groups"]
    known = {rule["alert"] for rule in group["rules"]}
    named = set(re.findall(r"`(KVEvents\w+)`", PAGE))
    assert named and named <= known
    assert Path(REPOSITORY / "docs/images/grafana-queries.png").is_file()
