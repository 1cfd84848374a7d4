"""docs/deployment.md: its commands can be typed, and what it names is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy_rig import DOCKER, REPOSITORY, blocks, commands, output_of, yaml_of

from publisher.cli.commands import parser_of

PAGE = (REPOSITORY / "docs" / "deployment.md").read_text()
SERVICES = yaml_of(DOCKER / "compose.yaml")["services"]
COMPOSE = ["docker", "compose", "-f", "docker/compose.yaml"]


def typed() -> Iterator[list[str]]:
    """Each command, split as a shell would."""
    for block in blocks(PAGE, "sh"):
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
            file, image = (rest[rest.index(flag) + 1] for flag in ("-f", "-t"))
            if file == "mine/Dockerfile":  # which the page shows
                (named,) = yaml_of(DOCKER / "kubernetes/plugin/kustomization.yaml")["images"]
                assert image == f"{named['name']}:{named['newTag']}"
                return
            assert (REPOSITORY / file).is_file()
            assert image in {service["image"] for service in SERVICES.values()}
        case ["kubectl", "kustomize", folder] | ["kubectl", "apply", "-k", folder]:
            assert (REPOSITORY / folder / "kustomization.yaml").is_file()
        case ["kubectl", "rollout", "status", name] | ["kubectl", "port-forward", name, _]:
            found = yaml_of(DOCKER / "kubernetes/base/statefulset.yaml")["metadata"]["name"]
            assert name in (f"statefulset/{found}", f"{found}-0")
        case ["kubectl", "exec", "engine-0", "-c", container, "--", "sh", "-c", "kill 1"]:
            (one,) = pod_of_base()["initContainers"]
            assert container == one["name"]
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


def pod_of_base() -> Any:
    return yaml_of(DOCKER / "kubernetes/base/statefulset.yaml")["spec"]["template"]["spec"]


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


def test_each_kustomization_of_ones_own_names_what_is_there() -> None:
    """What they are built on are folders beside them, and the images are of those."""
    shown = [yaml_of(block) for block in blocks(PAGE, "yaml") if "\nresources:" in block]
    assert len(shown) == 3
    for mine in shown:
        (resource,) = mine["resources"]
        folder = (REPOSITORY / "mine" / resource).resolve()
        assert (folder / "kustomization.yaml").is_file()
        texts = [
            path.read_text()
            for path in (folder, DOCKER / "kubernetes/base")
            for path in path.glob("*.yaml")
        ]
        for image in mine["images"]:
            assert any(image["name"] in text for text in texts), image


def test_the_plugins_image(tmp_path: Path) -> None:
    """Two lines on top of SGLang's image; hadolint, where there is one, has nothing to say."""
    (block,) = blocks(PAGE, "dockerfile")
    first, second = block.splitlines()
    assert first == "FROM lmsysorg/sglang:TAG"
    assert re.search(r"pip install --no-cache-dir '/src\[publisher\]'$", second)
    commands("hadolint")
    (tmp_path / "Dockerfile").write_text(block)
    output_of("hadolint", tmp_path / "Dockerfile")


def test_each_kind_of_engine_has_a_folder() -> None:
    """The choice at the top of the page."""
    chosen = re.findall(r"^\| [^|]+ \| `docker/kubernetes/(\w+)` \|", PAGE, re.MULTILINE)
    assert chosen == ["base", "relay", "plugin", "plugin"]
    assert all((DOCKER / "kubernetes" / one).is_dir() for one in chosen)


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
