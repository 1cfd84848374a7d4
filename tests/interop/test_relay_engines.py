"""publisher.sidecar.relay in front of the publishers of real SGLang and vLLM releases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import zmq
from interop_rig import RELEASES, Engine, engine_of
from interop_script import SIZE, Script

from kvevents import BlockIndex, StorageMedium, decode_batch
from publisher.config.sidecar_config import RelayConfig, WorkerInfo
from publisher.link.messages import FRESH
from publisher.sidecar.relay import RelaySource
from publisher.stream.foreign import ForeignCounts, ForeignState

pytestmark = pytest.mark.integration

PATIENCE_S = 30.0

every_release = pytest.mark.parametrize("release", RELEASES)


class Relay:
    """A relay, and what it makes a router believe."""

    def __init__(
        self, engine: Engine, context: zmq.Context[zmq.Socket[bytes]], **more: Any
    ) -> None:
        config = RelayConfig(
            endpoint=engine.endpoint,
            replay_endpoint=engine.replay_endpoint,
            worker=WorkerInfo(block_size=SIZE),
        )
        self.source = RelaySource(config, context=context, **more)
        self.foreign, self.router = ForeignState(SIZE), BlockIndex()
        self.numbers: list[int] = []
        """Of what came since the state began."""
        self.last: bytes | None = None
        self.begun = 0

    def turn(self, timeout_s: float = 0.02) -> None:
        poller = zmq.Poller()
        for readable in self.source.pollables():
            poller.register(readable, zmq.POLLIN)
        left = min(timeout_s, self.source.wake_at() - time.monotonic())
        poller.poll(max(0, int(left * 1000)))
        inputs, _ = self.source.read(100)
        for one in inputs:
            if one.flags & FRESH or (self.numbers and one.number != self.numbers[-1] + 1):
                self.foreign.clear()
                self.router.clear()
                self.numbers.clear()
                self.begun += 1
            if not one.flags & FRESH:
                self.numbers.append(one.number)
                self.last = one.body
            decoded = decode_batch(one.body)
            assert decoded.skipped == ()
            self.router.apply(self.foreign.apply(decoded.batch.events))

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"this is all that came: {self.numbers}"
            self.turn()

    def until_told(self, numbers: Iterable[int]) -> None:
        """Until the state consists of exactly these batches."""
        wanted = list(numbers)
        self.until(lambda: self.numbers[-1:] == wanted[-1:])
        assert self.numbers == wanted

    @property
    def believed(self) -> set[int]:
        return set(self.router.resident[StorageMedium.GPU])


@contextlib.contextmanager
def relaying(
    engine: Engine, expected: int = 0, last: bytes | None = None, **more: Any
) -> Iterator[Relay]:
    context = zmq.Context[zmq.Socket[bytes]]()
    relay = Relay(engine, context, **more)
    try:
        relay.source.start(expected, last)
        yield relay
    finally:
        relay.source.close()
        context.term()


@every_release
def test_a_late_start_and_what_follows(release: str) -> None:
    """All that was published before and all that comes then: the router holds what the engine does."""
    with engine_of(release) as engine:
        script = Script(release)
        engine.publish(script.batches(0, 30))
        with relaying(engine) as relay:
            relay.until_told(range(30))
            assert relay.believed == set(script.chain)
            engine.publish(script.batches(30, 30))
            relay.until_told(range(60))
            assert relay.believed == set(script.chain)
            assert relay.foreign.counts == ForeignCounts()
            assert relay.source.stats.lost == relay.source.stats.restarts == 0


@every_release
def test_a_buffer_that_has_rolled(release: str) -> None:
    """What is left of it is told, and what hangs on nothing is not; a relay that was further goes on."""
    with engine_of(release, buffer_steps=10) as engine:
        script = Script(release)
        with relaying(engine) as first:
            engine.publish(script.batches(0, 5))
            first.until_told(range(5))
        engine.publish(script.batches(5, 3))
        with relaying(engine, 5, first.last) as second:
            second.until_told(range(5, 8))
            assert second.begun == 0
        engine.publish(script.batches(8, 40))
        with relaying(engine, 8, second.last) as third:
            third.until_told(range(38, 48))
            assert third.begun == 1
            assert third.believed == set()
            assert third.foreign.counts.orphans == 10


@every_release
def test_a_gap_while_the_relay_was_away(release: str) -> None:
    """Another process missed what the engine said meanwhile; it gets it from the replay."""
    with engine_of(release) as engine:
        script = Script(release)
        engine.publish(script.batches(0, 20))
        with relaying(engine) as first:
            first.until_told(range(20))
        engine.publish(script.batches(20, 20))
        with relaying(engine, 20, first.last) as second:
            second.until_told(range(20, 40))
            engine.publish(script.batches(40, 1))
            second.until_told(range(20, 41))
            assert second.source.stats.restarts == 0


@every_release
def test_a_crash_and_a_restart(release: str) -> None:
    """At the same endpoints: only what the new run holds is believed, from its first batch on."""
    with engine_of(release) as engine, relaying(engine, gone_s=PATIENCE_S) as relay:
        engine.publish(Script(release).batches(0, 12))
        relay.until_told(range(12))
        engine.restart()
        script = Script(release, run=1)
        engine.publish(script.batches(0, 30))
        relay.until(lambda: relay.begun)
        relay.until_told(range(30))
        assert relay.begun == 1
        assert relay.believed == set(script.chain)
        assert relay.source.stats.restarts == 1


@every_release
def test_a_death(release: str) -> None:
    """When the engine is gone, so is all that was believed of it."""
    with engine_of(release) as engine, relaying(engine, gone_s=0.1) as relay:
        script = Script(release)
        engine.publish(script.batches(0, 12))
        relay.until_told(range(12))
        assert relay.believed == set(script.chain)
        engine.crash()
        relay.until(lambda: relay.begun)
        assert relay.believed == set()


@pytest.mark.parametrize("release", RELEASES[:2])
def test_a_replay_that_overflows_the_engines_queue(release: str) -> None:
    """SGLang drops what a slow reader has not taken, the end marker too: all of it comes nevertheless."""
    count = 6000
    with engine_of(release) as engine:
        script = Script(release)
        engine.publish(script.batches(0, count))
        with relaying(engine, stall_s=0.2, hwm=100) as relay:
            relay.until_told(range(count))
            assert relay.believed == set(script.chain)
            assert relay.source.stats.lost == 0
