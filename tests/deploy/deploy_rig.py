"""The deployment's files, read as those who use them would."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ports_rig import free_endpoints

from kvevents import BlockStored, KVEventBatch, StorageMedium
from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.cli.commands import parser_of
from publisher.config.settings import Settings, read_settings

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

__all__ = [
    "DOCKER",
    "REPOSITORY",
    "blocks",
    "commands",
    "documents",
    "get",
    "mounts",
    "output_of",
    "ports",
    "running_sidecar",
    "serve_settings",
    "yaml_of",
]

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
_POD = {"POD_IP": "10.0.0.7", "POD_NAME": "engine-0", "NAMESPACE": "default"}


def documents(path: Path | str) -> list[Any]:
    """All documents of a YAML file, or of YAML."""
    return list(yaml.safe_load_all(path.read_text() if isinstance(path, Path) else path))


def yaml_of(path: Path | str) -> Any:
    """The one document of a YAML file, or of YAML."""
    (found,) = documents(path)
    return found


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language, without the indent that a list gives them."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


def ports(container: dict[str, Any]) -> dict[str, int]:
    """A container's, by name."""
    return {one["name"]: one["containerPort"] for one in container["ports"]}


def mounts(container: dict[str, Any]) -> dict[str, str]:
    """Where a container has each volume."""
    return {one["name"]: one["mountPath"] for one in container["volumeMounts"]}


def serve_settings(command: Sequence[str], config: Path | None = None) -> Settings:
    """What `kvevents serve` makes of a command, with the file `config` for the one that it names.

    Fails where a flag, a key or a value is none.
    """
    words = list(command)
    assert words.pop(0) == "serve"
    if config is not None:
        words[words.index("--config") + 1] = str(config)
    return read_settings(parser_of("serve").parse_args(["serve", *words, "--check"]), _POD)


def get(url: str) -> tuple[int, str]:
    """The status and the text of a document."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextlib.contextmanager
def running_sidecar() -> Iterator[Sidecar]:
    """A real one with one sink, and HTTP on a free port, that has published something."""
    endpoint, replay_endpoint = free_endpoints(2)
    with tempfile.TemporaryDirectory() as folder:
        config = SidecarConfig(
            sinks=(SinkConfig(endpoint=endpoint, replay_endpoint=replay_endpoint),),
            state_dir=f"{folder}/state",
            linger_s=0.0,
        )
        with spawn(WorkerInfo(block_size=2), config) as sidecar:
            stored = BlockStored([1], None, [3, 4], 2, medium=StorageMedium.GPU)
            assert sidecar.client.publish_batch(KVEventBatch(time.time(), [stored], 0))
            yield sidecar


def commands(*tools: str) -> None:
    """Skips where one of these is not installed."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


def output_of(*command: str | Path) -> str:
    """What a command prints; fails with all that it said where it ends with another code than 0."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
