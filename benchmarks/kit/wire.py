"""A publisher peer with one subscriber on its wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.kit.common.child import ChildFailed, JsonChild, PeerProcess, kit_module
from benchmarks.kit.workloads.numbers import percentile

from .lineup import free_endpoint

__all__ = ["Arrivals", "Wire", "open_wire"]

PROBE_S = 0.1
JOIN_TRIES = 100


class Arrivals(NamedTuple):
    """What the subscriber got of one run."""

    got: int
    lost: int
    bytes: int
    elapsed_s: float  # from the first publish() to the last arrival
    latencies_us: list[float]

    def summary(self) -> dict[str, float]:
        return {
            f"latency_{name}_us": round(percentile(self.latencies_us, percent), 1)
            for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
        }


class Wire(NamedTuple):
    peer: PeerProcess
    subscriber: JsonChild
    replay_endpoint: str | None

    def arrivals(self, run: Mapping[str, Any]) -> Arrivals:
        """Wait for the last batch of `run`; how long each one took. Ends the subscriber."""
        self.subscriber.send({"until": run["last"]})
        seen = self.subscriber.receive(120)["seen"]
        first, sent = run["first"], run["sent"]
        ours = [item for item in seen if first <= item[0] <= run["last"]]
        if not ours:
            raise ChildFailed(f"{self.peer.name}: nothing arrived")
        return Arrivals(
            got=len(ours),
            lost=len(sent) - len(ours),
            bytes=sum(size for _, _, size in ours),
            elapsed_s=ours[-1][1] - sent[0],
            latencies_us=[(at - sent[sequence - first]) * 1e6 for sequence, at, _ in ours],
        )


@contextmanager
def open_wire(peer: PeerProcess, *, replay_batches: int = 0) -> Iterator[Wire]:
    """Start the publisher and wait until its subscriber has seen a batch."""
    endpoint = free_endpoint()
    replay = free_endpoint() if replay_batches else None
    peer.ask("start", endpoint=endpoint, replay_endpoint=replay, buffer_batches=replay_batches or 1)
    try:
        with JsonChild(kit_module("common.subscriber", endpoint)) as subscriber:
            for _ in range(JOIN_TRIES):
                peer.ask("probe")
                if subscriber.receive_if(PROBE_S):
                    break
            else:
                raise ChildFailed(f"{peer.name}: its subscriber saw nothing")
            yield Wire(peer, subscriber, replay)
    finally:
        peer.ask("stop")
