"""publisher.sidecar.engine_watch: what the log says of an engine, and how often."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest
import zmq
from ports_rig import free_endpoints

from kvevents import AllBlocksCleared, BlockStored, KVEventBatch, StorageMedium
from kvevents.codec import encode_batch
from kvevents.events import Event
from publisher.config.sidecar_config import RelayConfig, WorkerInfo
from publisher.link.messages import BATCH
from publisher.sidecar.engine_watch import EngineWatch
from publisher.sidecar.relay import RelaySource
from publisher.stream.input import Input
from publisher.stream.replica import Replica

WORKER = WorkerInfo(block_size=2, dp_rank=1)
LATER = 1e6


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvevents.sidecar")


@pytest.fixture
def relay() -> Iterator[RelaySource]:
    """Of an engine that is not there; what it counts is in the test's hands."""
    endpoint, replay_endpoint = free_endpoints(2)
    config = RelayConfig(
        endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv@", worker=WORKER
    )
    with zmq.Context[zmq.Socket[bytes]]() as context:
        source = RelaySource(config, context=context)
        yield source
        source.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Since it was last asked."""
    lines = [one.getMessage() for one in caplog.records]
    caplog.clear()
    return lines


class Told:
    """A replica that is told batches."""

    def __init__(self) -> None:
        self.replica = Replica(WORKER)

    def tell(self, *events: Event, dp_rank: int = 1) -> None:
        body = encode_batch(KVEventBatch(1.0, [*events], dp_rank))
        self.replica.apply(Input(self.replica.expected, BATCH, body))

    def orphans(self, count: int) -> None:
        """Blocks behind one that nobody knows."""
        first = self.replica.expected * 1000
        hashes: list[int | bytes] = [*range(first, first + count)]
        tokens = [7] * (2 * count)
        self.tell(BlockStored(hashes, -1, tokens, 2, medium=StorageMedium.GPU))


def test_blocks_behind_the_unknown_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """At once, and again at ten times as many; after a clear anew."""
    told = Told()
    watch = EngineWatch(None, told.replica, 0.0)
    numbers = []
    for count in (0, 3, 20, 10, 300, 0):
        if count:
            told.orphans(count)
        watch.check(LATER)
        numbers += [int(line.split()[0]) for line in said(caplog) if "behind others" in line]
    assert numbers == [3, 33, 333]
    assert told.replica.foreign.orphans_since_clear == 333
    told.tell(AllBlocksCleared())
    assert told.replica.foreign.orphans_since_clear == 0
    for _ in range(2):
        watch.check(LATER)
    (line,) = said(caplog)
    assert line.startswith("all was cleared")
    told.orphans(2)
    watch.check(LATER)
    (line,) = said(caplog)
    assert line.startswith("2 blocks are left out")
    told.replica.count_from_here()
    assert told.replica.foreign.orphans_since_clear == 0


def test_another_rank_and_another_size_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each with both numbers."""
    told = Told()
    watch = EngineWatch(None, told.replica, 0.0)
    for _ in range(2):
        told.tell(dp_rank=1)
        watch.check(LATER)
        assert said(caplog) == []
    for _ in range(2):
        odd = BlockStored([1], None, [1, 2, 3], 3, medium=StorageMedium.GPU)
        told.tell(odd, dp_rank=4)
        watch.check(LATER)
    sizes, ranks = said(caplog)
    assert "3 tokens, not 2" in sizes
    assert "of rank 4" in ranks and "rank 1" in ranks


def test_an_engine_that_comes_and_goes(
    relay: RelaySource, caplog: pytest.LogCaptureFixture
) -> None:
    """That it is not there, that it is, that it is not any more, and what becomes of its blocks."""
    watch = EngineWatch(relay, Replica(WORKER), 0.0)
    assert watch.wake_at == 5.0
    watch.check(4.9)
    assert said(caplog) == []
    watch.check(5.0)
    (line,) = said(caplog)
    assert "no engine is there" in line and relay.endpoint in line
    relay.connected = True
    for _ in range(2):
        watch.check(6.0)
    assert said(caplog) == ["the engine is connected"]
    relay.connected = False
    watch.check(7.0)
    relay.stats.departures += 1
    for _ in range(2):
        watch.check(8.0)
    assert said(caplog) == [
        "the engine is not connected any more",
        "the engine has not come back: all blocks are cleared",
    ]


def test_what_happens_again_and_again_is_said_now_and_then(
    relay: RelaySource, caplog: pytest.LogCaptureFixture
) -> None:
    """Some at once, then one each 15 s of a kind; how it ends is said, and how often it was."""
    told = Told()
    watch = EngineWatch(relay, told.replica, 0.0)
    for step in range(2400):
        relay.connected = step % 2 == 0
        relay.stats.restarts += 1
        told.replica.counts.missed += 1
        watch.check(step / 10)
    lines = said(caplog)
    assert 60 < len(lines) < 80
    assert sum("two behind one address" in line for line in lines) > 10
    relay.connected = True
    watch.check(1000.0)
    assert said(caplog)[0] == "the engine is connected"


def test_who_is_no_publisher(relay: RelaySource, caplog: pytest.LogCaptureFixture) -> None:
    """The first guess is that the two endpoints were swapped."""
    watch = EngineWatch(relay, Replica(WORKER), 0.0)
    relay.strange = True
    watch.check(5.0)
    (line,) = said(caplog)
    assert "no publisher" in line and "replay endpoint" in line


def test_a_topic_that_does_not_match(relay: RelaySource, caplog: pytest.LogCaptureFixture) -> None:
    """Said with both, where replays tell the engine's; else when only they bring anything."""
    watch = EngineWatch(relay, Replica(WORKER), 0.0)
    relay.stats.gaps = 1
    watch.check(1.0)
    assert said(caplog) == []
    relay.stats.gaps = 2
    for _ in range(2):
        watch.check(2.0)
    (line,) = said(caplog)
    assert line.startswith("relay.topic: ") and "'kv@'" in line
    named = EngineWatch(relay, Replica(WORKER), 0.0)
    relay.other_topic = "events"
    for _ in range(2):
        named.check(1.0)
    (line,) = said(caplog)
    assert "is 'events'" in line and "'kv@'" in line
    heard = EngineWatch(relay, Replica(WORKER), 0.0)
    relay.other_topic, relay.stats.received = None, 1
    heard.check(1.0)
    assert said(caplog) == []


def test_a_replay_that_is_not_answered(
    relay: RelaySource, caplog: pytest.LogCaptureFixture
) -> None:
    """That live batches wait is said while they do, and no more once it was given up."""
    watch = EngineWatch(relay, Replica(WORKER), 0.0)
    watch.wake_at = LATER
    relay.stats.unanswered += 1
    relay._stream.connected()
    assert relay.batches_wait
    watch.check(1.0)
    (line,) = said(caplog)
    assert "live batches wait" in line and str(relay.replay_endpoint) in line
    relay.stats.given_up += 1
    watch.check(2.0)
    (line,) = said(caplog)
    assert "given up" in line
    relay._stream.disconnected()
    for now in range(3, 9):
        relay.stats.unanswered += 1
        watch.check(float(now))
    assert said(caplog) == []


def test_who_is_there_in_time_is_waited_for_no_more(
    relay: RelaySource, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the loop would turn without end once the time is up."""
    watch = EngineWatch(relay, Replica(WORKER), 0.0)
    relay.connected = True
    watch.check(1.0)
    assert watch.wake_at == math.inf
    watch.check(6.0)
    assert said(caplog) == ["the engine is connected"]


def test_numbers_are_of_what_came_since(
    relay: RelaySource, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches that cannot be had, and runs that began: each once, and two runs are no doubt yet."""
    told = Told()
    watch = EngineWatch(relay, told.replica, 0.0)
    seen = []
    for missed, restarts in ((3, 0), (0, 0), (2, 2), (0, 0), (4, 3)):
        told.replica.counts.missed += missed
        relay.stats.restarts += restarts
        watch.check(1.0)
        lines = said(caplog)
        seen.append((len(lines), [line.split()[0] for line in lines if "cannot be had" in line]))
        assert any("3 times: are two behind" in line for line in lines) == (restarts == 3)
    assert seen == [(1, ["3"]), (0, []), (2, ["2"]), (0, []), (2, ["4"])]


def test_what_was_given_up_is_not_waited_for(
    relay: RelaySource, caplog: pytest.LogCaptureFixture
) -> None:
    """The replay that was not answered at last is no other one than that which was given up."""
    watch = EngineWatch(relay, Replica(WORKER), 0.0)
    relay._stream.connected()
    relay.stats.unanswered += 1
    relay.stats.given_up += 1
    for _ in range(2):
        watch.check(1.0)
    (line,) = said(caplog)
    assert "given up" in line


def test_a_plugins_batches_are_no_engines_to_be_had(caplog: pytest.LogCaptureFixture) -> None:
    """What the link has lost leads to a resync, and is said there."""
    told = Told()
    told.replica.counts.missed = 3
    EngineWatch(None, told.replica, 0.0).check(1.0)
    assert said(caplog) == []


def test_without_a_topic_none_can_be_another(caplog: pytest.LogCaptureFixture) -> None:
    """All that comes begins with it."""
    config = RelayConfig(endpoint="tcp://127.0.0.1:1", worker=WORKER)
    with zmq.Context[zmq.Socket[bytes]]() as context:
        source = RelaySource(config, context=context)
        source.stats.gaps = 2
        EngineWatch(source, Replica(WORKER), 0.0).check(1.0)
        source.close()
    assert said(caplog) == []
