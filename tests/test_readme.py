"""What the README shows is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvevents import Overlap, StorageMedium
from publisher import SidecarConfig, SinkConfig

README = Path(__file__).parent.parent / "README.md"
ANY_PORT = "tcp://127.0.0.1:0"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.integration
def test_the_worker_and_the_router_of_the_readme_agree() -> None:
    """The two code blocks run as they stand but for the ports, and the router sees the prompt."""
    worker, router = python_blocks()
    seen: list[Overlap] = []

    def run_router(bound: Any, tokens: list[int]) -> None:
        code = router.replace("tcp://127.0.0.1:5557", bound.endpoint)
        code = code.replace("tcp://127.0.0.1:5558", bound.replay_endpoint)
        exec(compile(code, "README router", "exec"), {"tokens": tokens, "print": seen.append})

    spawned = "spawn(WorkerInfo(block_size=16))"
    assert spawned in worker
    worker = worker.replace(spawned, "spawn(WorkerInfo(block_size=16), config)")
    worker += "    run_router(sidecar.client.sinks[0], tokens)\n"
    sink = SinkConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT)
    names = {"config": SidecarConfig(sinks=(sink,)), "run_router": run_router}
    exec(compile(worker, "README worker", "exec"), names)
    assert [one.blocks[StorageMedium.GPU] for one in seen] == [50 // 16]


def test_every_command_and_file_that_the_readme_names_is_there() -> None:
    """No path in backquotes or links leads nowhere."""
    text = README.read_text()
    paths = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"`([\w/]+/[\w/]+\.py)`", text)
    assert paths
    assert [path for path in paths if not (README.parent / path).exists()] == []
