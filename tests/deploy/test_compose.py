"""compose.yaml says what the product takes, and its parts agree with each other."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from deploy_rig import DOCKER, REPOSITORY, commands, output_of, serve_settings, yaml_of

from examples.options import read_options
from publisher.cli.commands import parser_of

COMPOSE = yaml_of(DOCKER / "compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
ENGINES = [name for name in SERVICES if name.startswith("engine-")]
SIDECARS = [name for name in SERVICES if name.startswith("sidecar-")]


def flags(command: list[str]) -> dict[str, list[str]]:
    """All values of each flag, in order."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in command:
        if word.startswith("--"):
            values = found.setdefault(word, [])
        else:
            values.append(word)
    return found


def ports(name: str) -> tuple[str, str, str]:
    """Of a sidecar: where it publishes, replays, and has its metrics."""
    service = SERVICES[name]
    config = serve_settings(service["command"], DOCKER / "sidecar.toml").config
    (sink,) = config.sinks
    found = (sink.endpoint, sink.replay_endpoint, config.http_endpoint)
    events, replays, http = (str(one).rpartition(":")[2] for one in found)
    return events, replays, http


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted in it: by path, the volume."""
    pairs = (one.split(":")[:2] for one in service["volumes"])
    return {path: volume for volume, path in pairs}


@pytest.mark.parametrize("number", range(2))
def test_an_engine_and_its_sidecar_meet(number: int) -> None:
    """They share the link's volume and nothing else; the socket is where the engine makes it."""
    engine, sidecar = SERVICES[ENGINES[number]], SERVICES[SIDECARS[number]]
    options = read_options(engine["command"])
    link = serve_settings(sidecar["command"], DOCKER / "sidecar.toml").link
    assert link == Path(options.link, "link-dp0")
    volumes, others = mounted(engine), mounted(sidecar)
    shared = str(Path(options.link).parent)
    assert volumes[shared] == others[shared]
    assert set(volumes.values()) & set(others.values()) == {volumes[shared]}
    assert options.worker_id == ENGINES[number]


def test_the_router_is_told_of_the_workers_there_are() -> None:
    """Addresses, block size and model are the engines' and the sidecars' own."""
    told = flags(SERVICES["router"]["command"])
    urls = []
    for engine, sidecar in zip(ENGINES, SIDECARS, strict=True):
        options = read_options(SERVICES[engine]["command"])
        url, (events, replays, _) = f"http://{engine}:{options.port}", ports(sidecar)
        urls.append(url)
        assert f"{url}=tcp://{sidecar}:{events}" in told["--kv-event-source"]
        assert f"{url}=tcp://{sidecar}:{replays}" in told["--kv-event-replay-source"]
        assert told["--kv-event-block-size"] == [str(options.page_size)]
        assert told["--kv-event-model"] == [options.model]
    assert told["--worker-urls"] == urls
    assert len(told["--kv-event-source"]) == len(urls)


def test_the_routers_flags_are_those_that_the_real_one_is_run_with() -> None:
    """Each is in docs/consumers.md or in the tests against the real router, which takes them."""
    known = (REPOSITORY / "docs/consumers.md").read_text()
    known += (REPOSITORY / "tests/interop/router_process.py").read_text()
    of_the_address = {"--host", "--prometheus-host"}
    assert all(
        flag in known for flag in flags(SERVICES["router"]["command"]).keys() - of_the_address
    )


def test_tail_looks_at_every_sidecar() -> None:
    """Its command parses, and names the ports there are."""
    command = SERVICES["tail"]["command"]
    parser_of("tail").parse_args(command)
    assert command[1:] == [
        f"{engine}=tcp://{sidecar}:{events},{replays}"
        for engine, sidecar in zip(ENGINES, SIDECARS, strict=True)
        for events, replays, _ in [ports(sidecar)]
    ]


def test_prometheus_scrapes_all_there_is() -> None:
    """Its targets are the services and their ports, and the rules are where it looks for them."""
    config = yaml_of(DOCKER / "monitoring/prometheus.yml")
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]
    }
    assert jobs["kvevents"] == [f"{name}:{ports(name)[2]}" for name in SIDECARS]
    assert jobs["engine"] == [
        f"{name}:{read_options(SERVICES[name]['command']).port}" for name in ENGINES
    ]
    (port,) = flags(SERVICES["router"]["command"])["--prometheus-port"]
    assert jobs["router"] == [f"router:{port}"]
    targets = [Path(one["target"]) for one in SERVICES["prometheus"]["configs"]]
    assert [one.name for one in targets] == ["prometheus.yml", *config["rule_files"]]
    assert all((DOCKER / one["file"]).is_file() for one in COMPOSE["configs"].values())


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    """The provider's folder is the one that is mounted; the source is the service."""
    folders = mounted(SERVICES["grafana"])
    provisioning = DOCKER / folders["/etc/grafana/provisioning"]
    (provider,) = yaml_of(provisioning / "dashboards/kvevents.yaml")["providers"]
    assert (DOCKER / folders[provider["options"]["path"]] / "kvevents.json").is_file()
    (source,) = yaml_of(provisioning / "datasources/prometheus.yaml")["datasources"]
    assert source["url"].split("/")[2].split(":")[0] in SERVICES
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(home).parent) == provider["options"]["path"]


def test_nothing_is_reached_from_outside_this_machine() -> None:
    """Published ports are on loopback; what we build runs read-only and without capabilities."""
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if service["image"].startswith("kvevents-"):
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name


def test_docker_compose_takes_it() -> None:
    """`docker compose config`, where there is one."""
    commands("docker")
    if subprocess.run(
        ["docker", "compose", "version"], check=False, capture_output=True
    ).returncode:
        pytest.skip("docker has no compose")
    shown = output_of("docker", "compose", "-f", DOCKER / "compose.yaml", "config", "--services")
    assert set(shown.split()) == set(SERVICES)
