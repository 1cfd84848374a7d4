"""The Dockerfiles name what is there, and what the product does."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_rig import DOCKER, REPOSITORY, commands, output_of, running_sidecar, serve_settings

from docker.by_hand.context import Context
from docker.by_hand.dockerfile import DockerfileError, Instruction, Stage, parse, read
from examples.options import read_options
from publisher import Sidecar

DOCKERFILES = sorted(DOCKER.glob("*Dockerfile"))
SIDECAR, ENGINE = read(DOCKER / "Dockerfile"), read(DOCKER / "engine.Dockerfile")


def named(stages: list[Stage], keyword: str) -> list[Instruction]:
    return [one for stage in stages for one in stage.instructions if one.keyword == keyword]


def last(stages: list[Stage], keyword: str) -> Instruction:
    return named(stages, keyword)[-1]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_reaches_the_builder(path: Path) -> None:
    """Every COPY from the repository names something that exists and that .dockerignore lets through."""
    context = Context(REPOSITORY)
    copied = [
        name
        for one in named(read(path), "COPY")
        if "from" not in one.flags
        for name in one.words[:-1]
    ]
    assert copied
    for name in copied:
        assert (REPOSITORY / name).exists(), name
        assert context.has(name), name


def test_what_the_builder_does_not_need_is_not_sent_to_it() -> None:
    """Tests, history and compiled files stay where they are."""
    context = Context(REPOSITORY)
    assert not any(
        context.has(name)
        for name in (
            ".git/config",
            "tests/conftest.py",
            "publisher/__pycache__/log.cpython-313.pyc",
        )
    )
    assert context.has("publisher/demo/data/NOTICE")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_special_and_is_labelled(path: Path) -> None:
    """The last USER is a number that is not root's; title and licence are said; no version floats."""
    stages = read(path)
    user, group = last(stages, "USER").text.split(":")
    assert int(user) > 0 and int(group) > 0
    labels = last(stages, "LABEL").pairs
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert "org.opencontainers.image.title" in labels
    assert all(":" in stage.base and not stage.base.endswith(":latest") for stage in stages[:1])


def test_the_images_are_of_this_version() -> None:
    """VERSION is the project's, in both."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for stages in (SIDECAR, ENGINE):
        versions = [one.pairs["VERSION"] for one in named(stages, "ARG") if "VERSION" in one.pairs]
        assert versions == [project["version"]]


def test_the_sidecars_image_has_no_torch() -> None:
    """Neither the cache nor the extra that brings torch is in it."""
    texts = [one.text for one in named(SIDECAR, "RUN") + named(SIDECAR, "COPY")]
    assert any("[publisher]" in text for text in texts)
    assert not any("hicache" in text or "torch" in text or "demo" in text for text in texts)


def test_the_sidecars_command_is_one_that_serve_takes() -> None:
    """ENTRYPOINT and CMD parse; ports and folders are those of EXPOSE, VOLUME and the health check."""
    assert last(SIDECAR, "ENTRYPOINT").words == ["kvevents"]
    settings = serve_settings(last(SIDECAR, "CMD").words)
    assert settings.forever
    (sink,) = settings.config.sinks
    exposed = last(SIDECAR, "EXPOSE").words
    told = (sink.endpoint, sink.replay_endpoint, settings.config.http_endpoint)
    assert [str(one).rpartition(":")[2] for one in told] == exposed
    assert last(SIDECAR, "ENV").pairs["HEALTH_URL"] == f"http://127.0.0.1:{exposed[-1]}/healthz"
    volumes = last(SIDECAR, "VOLUME").words
    assert str(settings.link).startswith(volumes[0] + "/")
    assert str(settings.config.state_dir).startswith(volumes[1] + "/")


def test_the_engines_command_is_one_that_it_takes() -> None:
    """CMD of the example engine parses, and its health check asks at the port that it listens on."""
    options = read_options(last(ENGINE, "CMD").words)
    assert (options.host, str(options.port)) == ("0.0.0.0", last(ENGINE, "EXPOSE").text)
    assert last(ENGINE, "ENV").pairs["HEALTH_URL"] == f"http://127.0.0.1:{options.port}/health"


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """A real one."""
    with running_sidecar() as sidecar:
        yield sidecar


def health(url: str) -> int:
    keyword, _, rest = last(SIDECAR, "HEALTHCHECK").text.partition(" ")
    assert keyword == "CMD"
    command = Instruction(0, "CMD", {}, rest).words
    assert command.pop(0) == "python"
    environment = os.environ | {"HEALTH_URL": url}
    return subprocess.run(
        [sys.executable, *command], check=False, capture_output=True, env=environment
    ).returncode


@pytest.mark.integration
def test_the_health_check_tells_a_sidecar_from_none(sidecar: Sidecar) -> None:
    """The command of HEALTHCHECK ends with 0 of a real one, and with another code where nothing is."""
    assert health(f"{sidecar.http_endpoint}/healthz") == 0
    assert health(f"{sidecar.http_endpoint}/nothing-here") != 0


def test_a_dockerfile_that_is_not_understood_is_refused() -> None:
    """What the script cannot carry out it does not pass over."""
    for text in ("FROM a\nADD x y", "RUN x", "FROM a\nRUN x \\", "FROM a b c"):
        with pytest.raises(DockerfileError, match=r"^line \d"):
            parse(text)


def test_a_dockerfile_is_read_as_docker_reads_it() -> None:
    """Continued lines are one, comments are none, lists are lists, variables before FROM count in it."""
    lines = ["ARG BASE=x:1", "# no", "FROM ${BASE} AS a", "RUN b \\", "  # no", "  && c"]
    text = "\n".join([*lines, "COPY --from=a /d /e", 'CMD ["f", "g h"]'])
    (stage,) = parse(text)
    run, copy, command = stage.instructions
    assert (stage.base, stage.name) == ("x:1", "a")
    assert (run.line, run.text.split()) == (4, ["b", "&&", "c"])
    assert (copy.flags, copy.words) == ({"from": "a"}, ["/d", "/e"])
    assert command.words == ["f", "g h"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    """Where it is installed."""
    commands("hadolint")
    assert output_of("hadolint", "--no-color", path) == ""
