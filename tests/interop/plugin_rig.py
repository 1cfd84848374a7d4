"""Ranks of real engines with our plugin in them, each a process; tests skip without `make interop`."""

from __future__ import annotations

import contextlib
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq
from interop_process import HERE, HOME, needs
from interop_rpc import JsonChild

from kvevents.frames import Frame, parse_replay_answer, replay_request

__all__ = ["PATIENCE_S", "Rank", "payloads", "rank_of", "until"]

ROOT = HERE.parents[1]
PATIENCE_S = 30.0


def until(done: Callable[[], object]) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.01)


def entry_points() -> str:
    """Those that pyproject.toml declares for the engines, as an installed package has them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in declared.items()
    )


class Rank(JsonChild):
    """One rank of an engine. `loaded`: its publishers, once the plugins were loaded."""

    loaded = ""

    def publish(self, *batches: Sequence[dict[str, Any]]) -> float:
        """The longest that one took, in seconds."""
        longest: float = self.ask("publish", batches=batches)
        return longest

    def ended(self, pid: int) -> bool:
        """Whether a process is gone."""
        return not Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def rank_of(
    release: str,
    *,
    rank: int = 0,
    ranks: int = 1,
    block_size: int | None = 4,
    env: Mapping[str, str] | None = None,
    plugins: bool = True,
) -> Iterator[Rank]:
    """A process that has loaded the engine's modules, and its plugins if it has any; skips the test
    without them.
    """
    folder = needs(HOME / "engines" / release)
    engine = release.partition("-")[0]
    if plugins:
        module = "sglang/srt/plugins" if engine == "sglang" else "vllm/plugins"
        needs(folder / module / "__init__.py")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = HOME / "venv/lib" / version / "site-packages"
    if not packages.exists():
        pytest.skip(f"{packages} is missing: the engines' packages are of another Python")
    config = {
        "engine": engine,
        "folder": str(folder),
        "entry_points": entry_points(),
        "rank": rank,
        "ranks": ranks,
        "block_size": block_size,
    }
    folders = (HERE, ROOT, packages)
    told = {"KVEVENTS_CONFIG": "", "KVEVENTS_SIDECAR": "", **(env or {})}
    with Rank(
        Path(sys.executable), "engine_plugin_child", config, env=told, folders=folders
    ) as child:
        if plugins:
            child.loaded = child.ask("load")
        yield child


def payloads(replay_endpoint: str, start: int = 0) -> list[bytes]:
    """All that a sink has sent from `start` on, as a late subscriber gets it."""
    found: list[bytes] = []
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        dealer.connect(replay_endpoint)
        dealer.send_multipart(replay_request(start))
        while isinstance(answer := parse_replay_answer(dealer.recv_multipart()), Frame):
            found.append(answer.payload)
    return found
