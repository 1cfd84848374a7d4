"""A publisher peer with subscribers on its wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from benchmarks.kit.common.child import ChildFailed, JsonChild, PeerProcess, kit_module
from benchmarks.kit.workloads.numbers import percentile

from .lineup import free_endpoint

__all__ = ["Arrivals", "Wire", "open_wire"]

PROBE_S = 0.1
JOIN_TRIES = 100


class Arrivals(NamedTuple):
    """What a subscriber got of one run."""

    got: int
    lost: int
    bytes: int
    elapsed_s: float  # from the first publish() to the last arrival
    latencies_us: list[float]
    at: list[float]  # of time.monotonic

    def unseen(self, at: float) -> int:
        """How many had not come at that moment, of time.monotonic."""
        return self.lost + sum(one > at for one in self.at)

    def latency_us(self, percent: float) -> float:
        return percentile(self.latencies_us, percent)


class Wire(NamedTuple):
    """`endpoints`: one a sink, in the order in which their subscribers were asked for."""

    peer: PeerProcess
    endpoints: Sequence[str]
    subscribers: Sequence[JsonChild]
    replay_endpoint: str | None

    def arrivals(self, run: Mapping[str, Any]) -> Arrivals:
        """Wait for the last batch of `run`; what the only subscriber got. Ends it."""
        return self.all_arrivals([run])[0][0]

    def all_arrivals(self, runs: Sequence[Mapping[str, Any]]) -> list[list[Arrivals]]:
        """By subscriber, what it got of each run, once the last is over. Ends the subscribers.

        Raises ChildFailed where a batch was refused: sequences do not count batches any more.
        """
        if refused := runs[-1].get("refused"):
            raise ChildFailed(f"{self.peer.name}: {refused} batches were refused")
        for subscriber in self.subscribers:
            subscriber.send({"until": runs[-1]["last"]})
        return [
            self._arrivals(subscriber.receive(120)["seen"], runs) for subscriber in self.subscribers
        ]

    def _arrivals(
        self, seen: Sequence[tuple[int, float, int]], runs: Sequence[Mapping[str, Any]]
    ) -> list[Arrivals]:
        found = []
        for run in runs:
            first, last, sent = run["first"], run["last"], run["sent"]
            ours = [item for item in seen if first <= item[0] <= last]
            if not ours:
                raise ChildFailed(f"{self.peer.name}: nothing arrived")
            found.append(
                Arrivals(
                    got=len(ours),
                    lost=len(sent) - len(ours),
                    bytes=sum(size for _, _, size in ours),
                    elapsed_s=ours[-1][1] - sent[0],
                    latencies_us=[(at - sent[number - first]) * 1e6 for number, at, _ in ours],
                    at=[at for _, at, _ in ours],
                )
            )
        return found


@contextmanager
def open_wire(
    peer: PeerProcess,
    *,
    block_size: int = 64,
    replay_batches: int = 0,
    subscribers: int = 1,
    dialects: Sequence[str] = (),
) -> Iterator[Wire]:
    """Start the publisher and wait until each subscriber has seen a batch.

    With `dialects`, which only ours takes, there is a sink for each, and that many subscribers a sink.
    """
    endpoints = [free_endpoint() for _ in dialects or ("",)]
    replay = free_endpoint() if replay_batches else None
    peer.ask(
        "start",
        endpoint=endpoints[0],
        replay_endpoint=replay,
        buffer_batches=replay_batches or 1,
        block_size=block_size,
        sinks=list(zip(dialects, endpoints, strict=True)) if dialects else None,
    )
    try:
        with ExitStack() as stack:
            children = [
                stack.enter_context(JsonChild(kit_module("common.subscriber", endpoint)))
                for endpoint in endpoints
                for _ in range(subscribers)
            ]
            for child in children:
                _join(peer, child)
            yield Wire(peer, endpoints, children, replay)
    finally:
        peer.ask("stop")


def _join(peer: PeerProcess, subscriber: JsonChild) -> None:
    for _ in range(JOIN_TRIES):
        peer.ask("probe")
        if subscriber.receive_if(PROBE_S):
            return
    raise ChildFailed(f"{peer.name}: its subscriber saw nothing")
