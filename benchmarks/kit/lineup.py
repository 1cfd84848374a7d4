"""Which peers take part, and their processes."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.kit.common.child import ChildFailed, PeerProcess
from benchmarks.kit.common.home import bench_home

__all__ = ["CACHES", "OURS", "PUBLISHERS", "Lineup", "free_endpoint", "in_turn"]

T = TypeVar("T")

OURS = "kvevents"

# name: environment, module and arguments; ours runs in this interpreter
PUBLISHERS = {
    OURS: "- ours_publisher",
    "sglang": "sglang sglang_publisher",
    "vllm": "vllm vllm_publisher",
}
CACHES = {
    OURS: "- ours_cache",
    "sglang-radix": "sglang sglang_cache radix",
    "sglang-python": "sglang sglang_cache python",
    "sglang-rust": "sglang sglang_cache rust",
    "vllm": "vllm vllm_cache",
}


class Lineup:
    """The peers of one work, in the order in which its first round runs them.

    `absent`: those that cannot take part, and why. `versions`: of those that were started.
    """

    def __init__(
        self, known: Mapping[str, str], *, peers: bool = True, only: Sequence[str] = ()
    ) -> None:
        """Ours, and the known ones that are installed. `only` names some of them."""
        self.commands: dict[str, list[str]] = {}
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        for name, command in known.items():
            if only and name not in only:
                continue
            environment, module, *arguments = command.split()
            python = Path(sys.executable)
            if environment != "-":
                home = bench_home() / "venvs" / environment
                python = home / "bin" / "python"
                if not peers:
                    self.absent[name] = "without peers, as asked"
                    continue
                if not (home / "installed").is_file():
                    self.absent[name] = f"{environment} is not installed"
                    continue
            module = f"benchmarks.kit.peers.{module}"
            self.commands[name] = [str(python), "-BP", "-m", module, *arguments]

    @contextmanager
    def started(self) -> Iterator[list[PeerProcess]]:
        """All peers, each in its process; those that wait for their turn are idle."""
        with ExitStack() as stack:
            started = [
                stack.enter_context(PeerProcess(name, command))
                for name, command in self.commands.items()
            ]
            yield [peer for peer in started if self._is_ready(peer)]

    @contextmanager
    def started_alone(self, name: str, *more: str) -> Iterator[PeerProcess]:
        """One peer in a new process, with arguments of its own. Raises ChildFailed."""
        with PeerProcess(name, [*self.commands[name], *more]) as peer:
            self.versions[name] = peer.wait_ready().version
            yield peer

    def rounds(self, count: int, one: Callable[[PeerProcess], T]) -> dict[str, list[T]]:
        """What `one` found of each peer, by round; each round begins with another peer.

        A peer that fails is dropped, and `absent` says why. Raises ChildFailed when ours does.
        """
        with self.started() as started:
            peers = [*started]
            found: dict[str, list[T]] = {peer.name: [] for peer in peers}
            for number in range(count):
                for peer in in_turn(peers, number):
                    try:
                        found[peer.name].append(one(peer))
                    except ChildFailed as failure:
                        self._drop(peer, failure)
                        peers.remove(peer)
        return {name: found[name] for name in self.commands}

    def _is_ready(self, peer: PeerProcess) -> bool:
        try:
            self.versions[peer.name] = peer.wait_ready().version
        except ChildFailed as failure:
            self._drop(peer, failure)
            return False
        return True

    def _drop(self, peer: PeerProcess, failure: ChildFailed) -> None:
        if peer.name == OURS:
            raise failure
        del self.commands[peer.name]
        self.absent[peer.name] = f"failed: {str(failure).splitlines()[-1]}"


def in_turn(peers: Sequence[PeerProcess], number: int) -> list[PeerProcess]:
    """The peers in the order of round `number`: each round begins with another."""
    first = number % len(peers)
    return [*peers[first:], *peers[:first]]


def free_endpoint() -> str:
    """A loopback TCP endpoint whose port was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
