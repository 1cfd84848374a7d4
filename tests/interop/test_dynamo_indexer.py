"""A worker's sidecar and Dynamo's standalone indexer: what the one holds, the other believes, always."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any, Self

import msgspec
import pytest
import zmq
from dynamo_answers import held, score
from dynamo_indexer import DynamoIndexer
from dynamo_life import ROOM, life
from interop_forwarder import Forwarder
from interop_waiting import PATIENCE_S, wait_until
from interop_worker import BLOCK, POD_IP, ExampleWorker, Store

from kvevents import BlockIndex, Namespace, StorageMedium
from kvevents.frames import END, Frame, parse_replay_answer, replay_request
from publisher import Batch, SinkConfig, Subscriber

pytestmark = pytest.mark.integration

CONSUMER = "Dynamo indexer 1.6.1"
SCORED = 12
"""Prompts that are asked for, of those whose blocks are known."""

Socket = zmq.Socket[bytes]

_numbers = itertools.count(1)


def conformance(situation: str) -> pytest.MarkDecorator:
    """A row of the table in docs/consumers.md."""
    return pytest.mark.conformance(preset="dynamo", consumer=CONSUMER, situation=situation)


def sink(**settings: Any) -> SinkConfig:
    """A sink for Dynamo, whose heartbeats come soon."""
    defaults: dict[str, Any] = {"name": "dynamo", "dialect": "dynamo", "heartbeat_s": 0.1}
    return SinkConfig(**defaults | settings)


@pytest.fixture(scope="module")
def indexer() -> Iterator[DynamoIndexer]:
    """One for all tests: each registers a worker of its own, and no two prompts are the same."""
    with DynamoIndexer.start() as started:
        yield started


class Watched:
    """A worker, not registered yet, and what the indexer believes of it; forgotten at the end.

    `prompt`: four blocks, inserted.
    """

    def __init__(self, indexer: DynamoIndexer, worker: ExampleWorker) -> None:
        self.indexer, self.worker, self.number = indexer, worker, next(_numbers)
        self._log_start = indexer.log_size()
        self._registered = False
        self.prompt = worker.prompt(4)
        worker.insert(self.prompt)

    def register(self, endpoint: str | None = None) -> None:
        """Live messages come from `endpoint`, replays always from the sidecar."""
        worker = self.worker
        self.indexer.register(self.number, endpoint or worker.endpoint(), worker.replay_endpoint())
        self._registered = True

    def agrees(self, step: str = "") -> None:
        """The indexer comes to hold on each tier what the cache does, and scores prompts by it."""
        resident = self.worker.resident()
        wanted = held(resident)
        if not wait_until(lambda: self.indexer.blocks(self.number) == wanted):
            assert self.indexer.blocks(self.number) == wanted, (step, self.warnings())
        known = [prompt for blocks in resident.values() for prompt in blocks.values()]
        for prompt in [self.prompt, *known[:: max(1, len(known) // SCORED)]]:
            assert self.indexer.score(prompt, self.number) == score(prompt, resident), step

    def goes_on(self) -> None:
        """They agree, and the indexer is not waiting for END, for which it would wait for ever."""
        self.agrees()
        for _ in range(2):
            self.worker.insert(self.worker.prompt(1))
            self.agrees("one more")

    def warnings(self) -> list[str]:
        """Of the indexer since the worker was registered."""
        return self.indexer.warnings(self._log_start)

    def gaps(self) -> list[tuple[int, int]]:
        """Those that the indexer saw, as (expected, got): there was no other warning."""
        found = []
        for line in self.warnings():
            gap = re.search(r"Gap detected: expected seq (\d+), got (\d+) ", line)
            assert gap is not None, line
            found.append((int(gap[1]), int(gap[2])))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._registered:
            self.indexer.unregister(self.number)


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[ExampleWorker]:
    """For all tests that need no other."""
    with ExampleWorker.start(sink(), storage_pages=ROOM) as worker:
        yield worker


@pytest.fixture
def site(indexer: DynamoIndexer, shared_worker: ExampleWorker) -> Iterator[Watched]:
    """A worker that holds one prompt."""
    if not shared_worker.running():
        shared_worker.restart()
    shared_worker.flush()
    with Watched(indexer, shared_worker) as one:
        yield one


@contextlib.contextmanager
def watched(indexer: DynamoIndexer, *sinks: SinkConfig, **settings: Any) -> Iterator[Watched]:
    """A worker of another kind."""
    with ExampleWorker.start(*sinks, **settings) as worker, Watched(indexer, worker) as site:
        yield site


@contextlib.contextmanager
def interrupted(site: Watched) -> Iterator[Forwarder]:
    """Registered with a forwarder in between, and the two agree."""
    with Forwarder(site.worker.endpoint()) as forwarder:
        site.register(forwarder.endpoint)
        site.agrees()
        yield forwarder


def change(site: Watched) -> None:
    """Something on every tier: the prompt goes down, its device copy is given up, others come."""
    worker = site.worker
    worker.backup(site.prompt)
    worker.evict_device(2)
    worker.write_storage()
    worker.insert(worker.prompt(3))
    worker.insert(worker.prompt(2, after=site.prompt))


# -------------------------------------------------------------------------------- all transitions


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(one, marks=conformance(f"every transition, storage as {one}"))
        for one in ("DISK", "EXTERNAL")
    ],
)
def test_every_transition(indexer: DynamoIndexer, storage: Store) -> None:
    """After each step of a block's life, on each medium, the indexer's tiers are the cache's."""
    with watched(indexer, sink(), storage=storage, storage_pages=ROOM) as site:
        site.register()
        for step in life(site.worker, site.prompt, storage):
            site.agrees(step)
        assert [expected for expected, _ in site.gaps()] == [0]  # it came late


@conformance("adapters and salts")
def test_namespaces(indexer: DynamoIndexer, site: Watched) -> None:
    """Blocks of an adapter, or under a salt, are found by the prompts that name it, and by no other."""
    worker = site.worker
    site.register()
    spaces = [
        Namespace(lora_name="adapter"),
        Namespace(cache_salt="salt"),
        Namespace(lora_name="adapter", cache_salt="salt"),
    ]
    prompts = [worker.prompt(3) for _ in spaces]
    for prompt, space in zip(prompts, spaces, strict=True):
        worker.insert(prompt, space)
        worker.backup(prompt, space)
    worker.evict_device(2)
    resident = worker.resident()
    assert wait_until(lambda: indexer.blocks(site.number) == held(resident))
    for prompt, space in zip(prompts, spaces, strict=True):
        for asked in (Namespace(), *spaces):
            found = indexer.score(prompt, site.number, asked)
            assert found == score(prompt, resident, asked)
            assert any(found) == (asked == space)


@conformance("start with files of an earlier run")
def test_a_store_that_is_not_empty(site: Watched) -> None:
    """A worker that begins with what an earlier one stored is believed to have that, and no more."""
    worker = site.worker
    site.register()
    worker.backup(site.prompt)
    worker.write_storage()
    site.agrees()
    worker.leave()
    worker.restart()
    assert held(worker.resident()).keys() == {"disk"}
    site.agrees()
    worker.prefetch(site.prompt)
    worker.insert(worker.prompt(2, after=site.prompt))
    site.goes_on()


# -------------------------------------------------------------------------------------- what is lost


@conformance("late join")
def test_a_late_join(site: Watched) -> None:
    """Who comes late asks once, from 0, and has it all with the next heartbeat."""
    change(site)
    site.register()
    site.goes_on()
    assert [expected for expected, _ in site.gaps()] == [0]


@conformance("late join, the log does not reach back")
def test_a_late_join_of_a_long_history(indexer: DynamoIndexer) -> None:
    """Where the log has rolled, the answer is the state."""
    with watched(indexer, sink(buffer_steps=3)) as site:
        for _ in range(20):
            site.worker.insert(site.worker.prompt(1))
        change(site)
        site.register()
        site.goes_on()
        assert [expected for expected, _ in site.gaps()] == [0]


@conformance("late join, more batches than the padding")
def test_a_late_join_of_a_history_too_long_to_pad(indexer: DynamoIndexer) -> None:
    """The answer begins after the seq that was asked for, which is said, and harms nothing."""
    with watched(indexer, sink(buffer_steps=3, replay_padding=5)) as site:
        for _ in range(20):
            site.worker.insert(site.worker.prompt(1))
        change(site)
        site.register()
        site.agrees()
        said = [one for one in site.warnings() if "Gap detected" not in one]
        assert len(said) == 1
        assert "started_after_requested" in said[0]
        change(site)
        site.goes_on()
        assert len(site.warnings()) == 2


@conformance("gap")
def test_a_gap(site: Watched) -> None:
    """What was lost on the way is replayed, with the next message that comes."""
    with interrupted(site) as forwarder:
        forwarder.lose()
        change(site)
        forwarder.restore(site.worker.next_seqs[0])
        site.worker.insert(site.worker.prompt(1))
        site.goes_on()
        assert forwarder.num_lost
        assert len(site.gaps()) == 2  # it had come late


@conformance("lost tail")
def test_a_lost_tail(indexer: DynamoIndexer, site: Watched) -> None:
    """The last thing that was said is lost, and nothing follows it: a heartbeat shows that."""
    with interrupted(site) as forwarder:
        forwarder.lose()
        site.worker.evict_device(4)
        forwarder.restore(site.worker.next_seqs[0])
        site.agrees()
        assert indexer.blocks(site.number) == {}
        site.goes_on()
        assert len(site.gaps()) == 2


@conformance("gap, the log does not reach back")
def test_a_gap_longer_than_the_log(indexer: DynamoIndexer) -> None:
    """What is not in the log any more is made up for by the state: nothing stale is left."""
    with watched(indexer, sink(buffer_steps=3)) as site, interrupted(site) as forwarder:
        worker = site.worker
        doomed = worker.prompt(3)
        worker.insert(doomed)
        worker.backup(doomed)
        site.agrees()
        forwarder.lose()
        worker.reset_device()
        worker.evict_host(3)
        for _ in range(10):
            change(site)
        forwarder.restore(worker.next_seqs[0])
        site.goes_on()
        assert indexer.score(doomed, site.number) == (0, 0, 0)
        assert len(site.gaps()) == 2


@conformance("the subscriber was away")
def test_a_subscriber_that_was_away(indexer: DynamoIndexer, site: Watched) -> None:
    """It stops listening and subscribes anew: what it has missed is replayed."""
    site.register()
    site.agrees()
    indexer.pause(site.number)
    change(site)
    indexer.resume(site.number)
    site.goes_on()
    assert len(site.gaps()) == 2


# ------------------------------------------------------------------------------------ what is restarted


@conformance("sidecar killed")
def test_a_killed_sidecar(site: Watched) -> None:
    """The next one goes on as if it had not been away; what the cache did meanwhile is not lost."""
    worker = site.worker
    site.register()
    change(site)
    site.agrees()
    worker.restart_sidecar()
    site.goes_on()
    killed = worker.kill_sidecar()
    change(site)
    worker.evict_device(1)
    worker.await_sidecar(killed)
    site.goes_on()
    assert len(site.gaps()) <= 3  # it came late, and may miss what is said before it is back


@conformance("resync")
def test_a_resync(site: Watched) -> None:
    """SIGUSR1: the state told anew changes nothing."""
    site.register()
    change(site)
    site.agrees()
    site.worker.resync()
    site.agrees()
    site.worker.evict_device(3)
    site.goes_on()
    assert len(site.gaps()) == 1


@conformance("worker killed and started again")
def test_a_killed_worker(indexer: DynamoIndexer, site: Watched) -> None:
    """Once it is gone nothing is believed of it; the next one's blocks are, at the same address."""
    worker = site.worker
    site.register()
    change(site)
    site.agrees()
    worker.kill()
    assert wait_until(lambda: indexer.blocks(site.number) == {})
    worker.restart()
    site.agrees()
    worker.insert(worker.prompt(2))
    worker.prefetch(site.prompt)
    site.goes_on()
    assert indexer.status(site.number) == "active"


@conformance("worker and sidecar killed")
def test_a_killed_worker_and_sidecar(site: Watched) -> None:
    """Nobody was left to say that the blocks are gone: the next worker's sidecar does."""
    worker = site.worker
    site.register()
    change(site)
    site.agrees()
    worker.kill_sidecar()
    worker.kill()
    worker.restart()
    site.agrees()
    worker.insert(site.prompt)
    site.goes_on()


# ------------------------------------------------------------------------------------ END, always


@contextlib.contextmanager
def asking(endpoint: str, count: int) -> Iterator[list[Socket]]:
    """Clients that have asked for everything, and take little at a time."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context[Socket]())
        yield [stack.enter_context(ask(context, endpoint)) for _ in range(count)]


def ask(context: zmq.Context[Socket], endpoint: str) -> Socket:
    """One such client."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.RCVBUF, 4096)
    dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    dealer.connect(endpoint)
    dealer.send_multipart(replay_request(0))
    return dealer


def replay(dealer: Socket) -> Iterator[Frame]:
    """All that comes before END, which comes."""
    while (answer := parse_replay_answer(dealer.recv_multipart())) != END:
        assert isinstance(answer, Frame)
        yield answer


def answered(worker: ExampleWorker) -> float:
    """Requests for a replay that were answered to the end."""
    names = [
        f'kv_events_replay_requests_total{{result="{result}",sink="dynamo"}}'
        for result in ("served", "snapshot")
    ]
    metrics = worker.metrics()
    return sum(metrics.get(name, 0.0) for name in names)


@conformance("many replays at once, some of them slow")
def test_every_replay_ends(indexer: DynamoIndexer) -> None:
    """The indexer waits for END without a time limit: it comes, among many who ask and three who do not
    take what they asked for.
    """
    with watched(indexer, sink(), device_pages=2000, storage=None) as site:
        worker = site.worker
        for _ in range(100):
            worker.insert(worker.prompt(1000))
        endpoint = worker.replay_endpoint()
        with asking(endpoint, 3), asking(endpoint, 20) as many:
            site.register()
            for dealer in many:
                seqs = [frame.seq for frame in replay(dealer)]
                assert seqs == list(range(len(seqs)))
                assert len(seqs) >= 100
            site.goes_on()
            assert [expected for expected, _ in site.gaps()] == [0]
            assert wait_until(lambda: answered(worker) == len(many) + 1)  # and not the slow ones


# ------------------------------------------------------------------------------- two sinks at once


@conformance("beside an llm-d sink of the same worker")
def test_two_dialects_at_once(indexer: DynamoIndexer) -> None:
    """One worker, two spellings: the indexer holds all tiers, and who reads as llm-d those it knows."""
    topic = f"kv@{POD_IP}:8000@org/model"
    llm_d = SinkConfig(name="llm-d", dialect="llm-d", heartbeat_s=0.1)
    with watched(indexer, sink(), llm_d, model="org/model") as site:
        worker = site.worker
        site.register()
        index = BlockIndex()
        told = {StorageMedium.GPU, StorageMedium.CPU}
        with Subscriber(worker.endpoint(1), worker.replay_endpoint(1), topic=topic) as subscriber:

            def follows() -> bool:
                for one in subscriber.receive(0.02):
                    if isinstance(one, Batch):
                        assert one.skipped == ()
                        index.apply(one.batch.events)
                return {on: set(found) for on, found in index.resident.items() if found} == wanted

            for step in (change, change, lambda one: one.worker.evict_device(4)):
                step(site)
                site.agrees()
                resident = worker.resident()
                wanted = {on: set(resident[on]) for on in told if resident[on]}
                assert wait_until(follows), index.resident
        check_spelling(worker.replay_endpoint(1), topic)


def check_spelling(endpoint: str, topic: str) -> None:
    """Hashes are bytes, media those of vLLM, each message under the topic."""
    with asking(endpoint, 1) as (dealer,):
        for frame in replay(dealer):
            assert frame.topic.decode() == topic
            for event in msgspec.msgpack.decode(frame.payload)[1]:
                assert all(isinstance(one, bytes) for one in event.get("block_hashes", ()))
                assert event.get("medium") in (None, "GPU", "CPU")
                assert event.get("block_size", BLOCK) == BLOCK
