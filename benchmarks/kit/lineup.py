"""Which peers take part, and their processes."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.kit.common.child import PeerProcess

__all__ = ["CACHES", "PUBLISHERS", "Lineup", "free_endpoint"]

# name: environment, module and arguments
PUBLISHERS = {"sglang": "sglang sglang_publisher", "vllm": "vllm vllm_publisher"}
CACHES = {
    "sglang-radix": "sglang sglang_cache radix",
    "sglang-python": "sglang sglang_cache python",
    "sglang-rust": "sglang sglang_cache rust",
    "vllm": "vllm vllm_cache",
}


def _environment(name: str) -> Path:
    return Path(os.environ["BENCH_HOME"]) / "venvs" / name


def _command(known: str) -> list[str]:
    environment, module, *arguments = known.split()
    if not (_environment(environment) / "installed").is_file():
        raise SystemExit(f"{environment} is not installed; run install.sh {environment}")
    python = _environment(environment) / "bin" / "python"
    return [str(python), "-BP", "-m", f"benchmarks.kit.peers.{module}", *arguments]


class Lineup:
    """The peers of one benchmark, in the order in which every round runs them."""

    def __init__(self, chosen: Sequence[str], known: Mapping[str, str]) -> None:
        """Without a choice, every known peer that is installed. NAME=COMMAND is a peer of yours."""
        if not chosen:
            chosen = [
                name
                for name, command in known.items()
                if (_environment(command.split()[0]) / "installed").is_file()
            ]
        self.commands: dict[str, list[str]] = {}
        for peer in chosen:
            name, equals, command = peer.partition("=")
            if not equals and name not in known:
                raise SystemExit(f"no such peer: {name}; known here: {', '.join(known)}")
            self.commands[name] = shlex.split(command) if equals else _command(known[name])

    @contextmanager
    def started(self) -> Iterator[list[PeerProcess]]:
        """All peers, each in its process; those that wait for their turn are idle."""
        with ExitStack() as stack:
            peers = [stack.enter_context(PeerProcess(*item)) for item in self.commands.items()]
            yield [peer.wait_ready() for peer in peers]

    @contextmanager
    def started_alone(self, name: str) -> Iterator[PeerProcess]:
        """One peer in a new process."""
        with PeerProcess(name, self.commands[name]) as peer:
            yield peer.wait_ready()


def free_endpoint() -> str:
    """A loopback TCP endpoint whose port was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
