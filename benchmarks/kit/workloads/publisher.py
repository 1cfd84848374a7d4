"""The publisher workloads: as fast as it takes, at a fixed rate, and beside a busy interpreter."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from hashlib import sha256
from time import monotonic
from time import perf_counter_ns as now
from typing import TYPE_CHECKING, Any

from benchmarks.kit.peers.interface import StoredBlocks

from .numbers import percentile, quiet_gc
from .tokens import PER_BLOCK, sequence

if TYPE_CHECKING:
    from benchmarks.kit.peers.interface import PublisherPeer

__all__ = ["PublisherWorkload"]


class PublisherWorkload:
    """What a controller may ask of a publisher peer.

    Answers name batches by their sequence number, which counts every batch since `start`.
    """

    def __init__(self, peer: PublisherPeer) -> None:
        self._peer = peer
        self._random = random.Random(0)
        self._next_block = 0
        self._batches: list[Any] = []
        self._block_size = 0
        self._next_sequence = 0
        self._steps: dict[tuple[float, float], Callable[[], None]] = {}
        self.requests: dict[str, Callable[..., dict[str, Any]]] = {
            name: getattr(self, name)
            for name in (
                "start",
                "probe",
                "prepare",
                "flood",
                "rate",
                "busy",
                "drain",
                "stop",
            )
        }

    def start(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        buffer_batches: int,
        block_size: int,
        sinks: list[tuple[str, str]] | None = None,
    ) -> dict[str, Any]:
        """With `sinks`, a dialect and an endpoint each, instead of one output."""
        self._block_size = block_size
        if sinks is None:
            self._peer.start(endpoint, replay_endpoint, buffer_batches, block_size)
        else:
            self._peer.start_sinks(sinks, block_size)
        self._next_sequence = self._peer.first_sequence
        return {}

    def probe(self) -> dict[str, Any]:
        """Publish one small batch, so that a subscriber can show that it is there."""
        self._peer.publish(self._peer.prepare(self._prompt(1, 1)))
        self._next_sequence += 1
        return {}

    def prepare(self, batches: int, events: int, blocks: int) -> dict[str, Any]:
        """Make the batches that the next workloads publish, in order; each is one new prompt."""
        self._batches = [self._peer.prepare(self._prompt(events, blocks)) for _ in range(batches)]
        return {}

    def flood(self) -> dict[str, Any]:
        """Publish without a pause."""
        sent, spent = [], []
        publish, batches = self._peer.publish_all, self._take()
        with quiet_gc():
            for batch in batches:
                sent.append(monotonic())
                start = now()
                publish(batch)
                spent.append(now() - start)
        return self._report(sent, spent)

    def rate(self, per_second: float) -> dict[str, Any]:
        """Publish at a fixed rate, asleep in between."""
        sent, spent = [], []
        publish, batches = self._peer.publish, self._take()
        with quiet_gc():
            begin = monotonic() + 0.05
            for index, batch in enumerate(batches):
                if (pause := begin + index / per_second - monotonic()) > 0:
                    time.sleep(pause)
                sent.append(monotonic())
                start = now()
                publish(batch)
                spent.append(now() - start)
        return self._report(sent, spent)

    def busy(
        self,
        step_us: float,
        free_share: float,
        steps: int,
        events: int,
        blocks: int,
        *,
        publish: bool,
    ) -> dict[str, Any]:
        """Steps of interpreter work, a share of which may release the interpreter lock. Each makes a
        batch besides, as an engine does just before it publishes it.

        Without `publish`, the same steps publish nothing: what a step costs alone.
        """
        step = self._step(step_us, free_share)
        prepare, publish_one = self._peer.prepare, self._peer.publish
        sent, spent, took = [], [], []
        with quiet_gc():
            gc.disable()
            begin = now()
            for _ in range(steps):
                start = now()
                step()
                batch = prepare(self._prompt(events, blocks))
                if publish:
                    sent.append(monotonic())
                    put = now()
                    publish_one(batch)
                    spent.append(now() - put)
                took.append(now() - start)
            total = now() - begin
            ended = monotonic()
            gc.enable()
        report = self._report(sent, spent) if publish else {}
        return {
            **report,
            "total_s": total / 1e9,
            "steps_us": [one / 1e3 for one in took],
            "ended": ended,
        }

    def drain(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait until nothing is left to send."""
        deadline = monotonic() + timeout_s
        while self._peer.backlog():
            if monotonic() > deadline:
                raise TimeoutError(f"{self._peer.backlog()} batches left after {timeout_s} s")
            time.sleep(0.02)
        return {}

    def stop(self) -> dict[str, Any]:
        self._peer.stop()
        self._batches = []
        return {}

    def _prompt(self, events: int, blocks: int) -> list[StoredBlocks]:
        """A prompt that nobody has sent before: each event continues the one before."""
        length = blocks * self._block_size
        pieces = -(-length // PER_BLOCK)
        parent: int | None = None
        prompt = []
        for _ in range(events):
            ids = range(self._next_block, self._next_block + pieces)
            self._next_block += pieces
            hashes = [self._random.getrandbits(64) - (1 << 63) for _ in range(blocks)]
            tokens = sequence(ids, length).tolist()
            prompt.append(StoredBlocks(hashes, parent, tokens, self._block_size))
            parent = hashes[-1]
        return prompt

    def _step(self, step_us: float, free_share: float) -> Callable[[], None]:
        """Calibrated once, so that steps with and without publishing do the same work."""
        shape = (step_us, free_share)
        if shape not in self._steps:
            self._steps[shape] = _calibrated_step(*shape)
        return self._steps[shape]

    def _take(self) -> list[Any]:
        """The prepared batches that are left."""
        taken, self._batches = self._batches, []
        return taken

    def _report(self, sent: list[float], spent: list[int]) -> dict[str, Any]:
        first, self._next_sequence = self._next_sequence, self._next_sequence + len(sent)
        return {
            "first": first,
            "last": self._next_sequence - 1,
            "sent": sent,
            "publish_p50_us": percentile(spent, 50) / 1e3,
            "publish_p99_us": percentile(spent, 99) / 1e3,
            "publish_max_us": max(spent, default=0) / 1e3,
            **self._peer.counts(),
        }


def _spin(turns: int) -> int:
    total = 0
    for turn in range(turns):
        total += turn & 7
    return total


def _calibrated_step(step_us: float, free_share: float) -> Callable[[], None]:
    """Work of about `step_us`, calibrated now: counting holds the lock, hashing frees it."""
    data = memoryview(bytes(1 << 20))
    start = now()
    _spin(200_000)
    per_turn = (now() - start) / 200_000
    start = now()
    for _ in range(20):
        sha256(data)
    per_byte = (now() - start) / 20 / len(data)
    turns = int(step_us * (1 - free_share) * 1e3 / per_turn)
    freeing = data[: int(step_us * free_share * 1e3 / per_byte)]

    def step() -> None:
        _spin(turns)
        if freeing:
            sha256(freeing)

    return step
