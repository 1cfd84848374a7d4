"""What a turn of the sidecar does at most, and what clients can make it keep; counted, not timed."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
import pytest
import zmq
from publisher_link_rig import Link
from publisher_rig import LOOPBACK, PATIENCE_S, Socket, insert, make_cache

from kvevents import AllBlocksCleared, BlockIndex, BlockStored, Event, KVEventBatch
from kvevents.codec import decode_batch, encode_batch
from kvevents.dialect import Dialect
from kvevents.events import StorageMedium
from kvevents.frames import END, JOIN, Frame, parse_replay_answer, replay_request
from kvevents.materializer import Materializer
from kvevents.namespace import BASE
from kvevents.records import BlockId, Remove, StoreKnown, StoreNew
from kvevents.speller import Speller
from kvevents.view import View
from publisher.config.sidecar_config import SinkConfig, WorkerInfo
from publisher.sidecar.replay import ReplayServer
from publisher.sidecar.sink import Sink
from publisher.stream.core import Core
from publisher.stream.input import Input
from publisher.stream.log import RetainedLog
from publisher.stream.output import SNAPSHOT_BLOCKS, Output
from publisher.worker.client import RETELL_BLOCKS

BLOCK_SIZE = 2
RUNNING, STALLED, BYTES_PER_TURN = 4, 32, 128 << 10
MESSAGE_BYTES = 512
"""What a message counts for apart from its payload."""

# ---------------------------------------------------------------------------------------- replays


class Router:
    """A server whose log has no end, and whose clock stands still unless it is set."""

    def __init__(self, size: int = 100, *, hwm: int = 2) -> None:
        self._context = zmq.Context[Socket]()
        self._sockets: list[Socket] = []
        self.router = self._socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.SNDHWM, hwm)
        self._address = self.router.bind(LOOPBACK).addr
        self.begun = self.ended = self.sent = 0
        self.clock = 0.0
        self.step_s = 0.0
        self._payload = bytes(size)
        self.server = ReplayServer(
            self.router,
            b"",
            self._replay,
            lambda _: True,
            timeout_s=10.0,
            clock=lambda: self.clock,
        )

    def _replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        self.begun += 1
        return self._answers(start)

    def _answers(self, start: int) -> Iterator[tuple[int, bytes]]:
        try:
            for seq in itertools.count(start):
                self.sent += 1
                self.clock += self.step_s
                yield seq, self._payload
        finally:
            self.ended += 1

    def _socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        self._sockets.append(socket)
        return socket

    def client(self, *, hwm: int = 1000) -> Socket:
        """A client that asks for nothing yet."""
        client = self._socket(zmq.DEALER)
        client.setsockopt(zmq.RCVHWM, hwm)
        if hwm == 1:
            client.setsockopt(zmq.RCVBUF, 4096)
        client.connect(self._address)
        return client

    def ask(self, *, hwm: int = 1000) -> Socket:
        """A client that asks from 0."""
        client = self.client(hwm=hwm)
        client.send_multipart(replay_request(0))
        return client

    def take(self, count: int) -> None:
        """Until so many requests in all have been read."""
        deadline = time.monotonic() + PATIENCE_S
        while self.server.stats.requests < count:
            assert time.monotonic() < deadline, self.server.stats
            self.router.poll(100)
            self.server.take_requests()

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.mark.integration
@pytest.mark.parametrize("size", [10, 4000, 200_000])
def test_a_turn_sends_a_bounded_number_of_bytes(size: int) -> None:
    """However many clients ask: 128 KiB, and less than a message over it."""
    with Router(size, hwm=0) as rig:
        for _ in range(8):
            rig.ask(hwm=0)
        rig.take(8)
        for _ in range(5):
            before = rig.sent
            rig.server.serve(0.0)
            counted = (rig.sent - before) * (size + MESSAGE_BYTES)
            assert 0 < counted < BYTES_PER_TURN + size + MESSAGE_BYTES


@pytest.mark.integration
def test_a_turn_ends_when_its_time_is_over() -> None:
    """A log that takes a second for a batch is asked for one batch a turn."""
    with Router() as rig:
        for _ in range(8):
            rig.ask()
        rig.take(8)
        rig.step_s = 1.0
        for turn in range(1, 6):
            rig.server.serve(0.0)
            assert rig.sent == turn


@pytest.mark.integration
def test_few_replays_run_and_few_wait_for_clients_that_do_not_read() -> None:
    """50 clients that take nothing: never more than 4 + 32 replays are under way, the others are
    dropped, those first that have taken nothing for the longest.
    """
    with Router(100_000) as rig:
        for _ in range(50):
            rig.ask(hwm=1)
        rig.take(50)
        for turn in range(2000):
            rig.server.serve(turn / 1e6)
            assert rig.begun - rig.ended <= RUNNING + STALLED + 1
            if rig.begun == 50 and not rig.server.busy:
                break
        assert rig.begun == 50
        assert rig.server.stats.dropped == 50 - STALLED


@pytest.mark.integration
def test_clients_that_left_cost_a_bounded_turn() -> None:
    """64 that asked and went away: a turn begins at most 16 of their replays, and in the end all are
    forgotten.
    """
    with Router() as rig:
        clients = [rig.ask() for _ in range(64)]
        rig.take(64)
        for client in clients:
            client.close(linger=0)
        deadline = time.monotonic() + PATIENCE_S
        while rig.server.busy or rig.server.stalled:
            assert time.monotonic() < deadline, rig.server.stats
            before = rig.begun
            rig.server.serve(time.monotonic())
            assert rig.begun - before <= 16
        assert rig.server.stats.dropped == 64 == rig.ended


@pytest.mark.integration
def test_a_request_of_many_frames_is_read_in_many_turns() -> None:
    """Of 20,000 frames a turn reads a few hundred. Who asked before is answered meanwhile, who asks
    meanwhile afterwards, and that request has its END, being malformed.
    """
    frames, most = 20_000, 1000
    with Router() as rig:
        before = rig.ask()
        rig.take(1)
        huge = rig.client()
        for _ in range(frames - 1):
            huge.send(b"x", zmq.SNDMORE)
        huge.send(b"x")
        assert rig.router.poll(int(PATIENCE_S * 1000))
        rig.server.take_requests()
        assert rig.router.getsockopt(zmq.RCVMORE), "the rest is for other turns"
        rig.server.serve(0.0)
        assert before.poll(int(PATIENCE_S * 1000))
        meanwhile = rig.ask()
        turns = 1
        while rig.server.stats.requests < 2:
            rig.server.take_requests()
            turns += 1
        assert turns > frames / most
        rig.take(3)
        for client in (huge, meanwhile):
            deadline = time.monotonic() + PATIENCE_S
            while not client.poll(10):
                assert time.monotonic() < deadline, rig.server.stats
                rig.server.serve(time.monotonic())
        assert parse_replay_answer(huge.recv_multipart()) == END
        assert isinstance(parse_replay_answer(meanwhile.recv_multipart()), Frame)
        assert (rig.server.stats.requests, rig.server.stats.malformed) == (3, 1)


class Part(NamedTuple):
    """What a test needs of a zmq.Frame."""

    bytes: bytes
    more: bool


class Crowd:
    """A ROUTER's place with requests of clients that will never be heard of again."""

    def __init__(self, count: int) -> None:
        asked = replay_request(0)
        requests = ([b"\0%d" % number, *asked] for number in range(count))
        self._parts = (
            Part(one, at < len(asked)) for said in requests for at, one in enumerate(said)
        )

    def recv(self, _flags: int = 0, *, copy: bool = True) -> Part:
        assert not copy
        for part in self._parts:
            return part
        raise zmq.Again


def test_ten_thousand_identities_that_wait_take_little_memory() -> None:
    """Each is a request and no more: under 1 KiB, and no replay is begun for it."""

    def never(_start: int) -> Iterator[tuple[int, bytes]]:
        raise AssertionError("a replay that nobody serves")

    server = ReplayServer(Crowd(10_000), b"", never, lambda _: True, timeout_s=1.0)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        while server.stats.requests < 10_000:
            server.take_requests()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000 * 1024


def new_output(record: Callable[[object], None] = lambda _: None) -> Output:
    return Output(
        0,
        "a",
        View(Dialect()),
        Speller(Dialect(), 0),
        record,
        lambda: 1.0,
        max_batches=100,
        max_bytes=1 << 20,
    )


@pytest.mark.integration
def test_a_giant_frame_closes_its_own_connection_only() -> None:
    """A request of 1 MB is not taken in; the client beside it has its answer."""
    context = zmq.Context[Socket]()
    config = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK)
    sink = Sink(context, config, new_output(), WorkerInfo(block_size=BLOCK_SIZE), {})
    giant, client = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    monitor = giant.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        server = sink.serve_replays(10.0)
        assert server is not None
        for one in (giant, client):
            one.connect(str(sink.bound.replay_endpoint))
        giant.send_multipart([b"", bytes(1 << 20)])
        assert monitor.poll(int(PATIENCE_S * 1000)), "it is cut off"
        client.send_multipart(replay_request(0))
        while not server.stats.requests:
            assert server.router.poll(int(PATIENCE_S * 1000))
            server.take_requests()
        server.serve(0.0)
        assert client.poll(int(PATIENCE_S * 1000))
        assert parse_replay_answer(client.recv_multipart()) == END
        assert (server.stats.requests, server.stats.malformed) == (1, 0)
    finally:
        giant.disable_monitor()
        for one in (monitor, giant, client):
            one.close(linger=0)
        sink.close(linger_s=0)
        context.term()


# -------------------------------------------------------------------------------------------- log


class CountedLog(RetainedLog):
    """A log of one block a frame that counts what it encodes."""

    def __init__(self, max_batches: int, snapshot_blocks: int = 4) -> None:
        self.encoded = 0
        super().__init__(
            lambda: self._count,
            max_batches=max_batches,
            max_bytes=1 << 30,
            snapshot_blocks=snapshot_blocks,
        )

    def _count(self, events: Sequence[Event]) -> bytes:
        self.encoded += 1
        return encode_batch(KVEventBatch(1.0, list(events), 0))

    def grow(self, count: int) -> None:
        for _ in range(count):
            event = BlockStored(
                [self.next_seq + 1], None, [0, 0], BLOCK_SIZE, medium=StorageMedium.GPU
            )
            self.append(encode_batch(KVEventBatch(1.0, [event], 0)), [event])


def resident(answers: list[tuple[int, bytes]]) -> set[int]:
    index = BlockIndex()
    for _, payload in answers:
        index.apply(decode_batch(payload).batch.events)
    return {int(one) for one in index.resident[StorageMedium.GPU]}


def test_fifty_snapshots_are_encoded_once() -> None:
    """L4: those who join while the log moves on by less than an eighth share what one has cost, and each
    has the state of its moment.
    """
    log = CountedLog(800)
    log.grow(1600)
    replays = []
    for _ in range(50):
        replays.append((log.next_seq, log.replay(JOIN)))
        log.grow(1)
    for end, replay in replays:
        answers = list(replay)
        assert [seq for seq, _ in answers] == list(range(answers[0][0], end))
        assert resident(answers) == set(range(1, end + 1))
    assert log.encoded == 800 / 4


def test_a_snapshot_moved_on_takes_many_small_steps() -> None:
    """L4: the seq just before the log is asked for, so that the state must move on through frames: the
    steps tell nothing and stay contiguous, and the state is whole.
    """
    log = CountedLog(2000)
    log.grow(4000)
    start = log.oldest_seq - 1
    answers = list(log.replay(start))
    assert [seq for seq, _ in answers] == list(range(start, 4000))
    assert decode_batch(answers[0][1]).batch.events == [AllBlocksCleared()]
    assert resident(answers) == set(range(1, 4001))


def test_a_replay_that_the_log_has_left_behind_goes_on_from_a_snapshot() -> None:
    """L5: a client that takes one batch while the log is replaced, and 1,000 frames more, is answered
    from there anew, without a hole, as often as that happens; at the end it has the state then.
    """
    log = CountedLog(100)
    log.grow(100)
    replay = log.replay(0)
    answers = [next(replay)]
    log.grow(1100)
    answers.append(next(replay))
    log.grow(1)
    answers.append(next(replay))
    for _ in range(3):
        log.grow(1200)
        answers.append(next(replay))
    answers += replay
    assert [seq for seq, _ in answers] == list(range(len(answers)))
    assert len(answers) == log.next_seq
    assert resident(answers) == set(range(1, log.next_seq + 1))


# ------------------------------------------------------------------------------- worker and core


@pytest.mark.integration
def test_a_pump_retells_a_bounded_number_of_blocks() -> None:
    """K3: about RETELL_BLOCKS a pump, however many are resident."""
    with Link(block_size=1, ring_bytes=1 << 20) as link:
        cache = make_cache(num_pages=2000, page_size=1)
        for first in range(0, 2000, 10):
            insert(cache, range(first, first + 10))
        cache.take_records()
        told: list[int] = []
        while not told or cache.retelling:
            before = len(link.index)
            assert link.client.pump(cache)
            link.take()
            told.append(len(link.index) - before)
        assert sum(told) == 2000
        assert max(told) < RETELL_BLOCKS + 10, "to the end of a prompt"


def numbered(number: int, *records: object) -> Input:
    return Input(number, 0, msgspec.msgpack.encode((1.0, list(records))))


def test_a_turn_tells_one_batch_of_a_snapshot(tmp_path: Path) -> None:
    """However many sinks tell their state anew: a turn publishes one batch, of at most twice
    SNAPSHOT_BLOCKS blocks; each sink has its turn.
    """
    names = ("a", "b", "c")
    sinks = tuple(SinkConfig(name=name) for name in names)
    core = Core(
        WorkerInfo(block_size=BLOCK_SIZE), b"l" * 16, sinks, names, tmp_path, clock=lambda: 1.0
    )
    core.start()
    core.apply(
        [
            numbered(n, StoreNew(StorageMedium.GPU, BlockId(n), 1, None, BASE, b"%08d" % n))
            for n in range(1000)
        ],
        0.0,
    )
    core.snapshot()
    told = dict.fromkeys(range(3), 0)
    while core.held:
        published = core.work(0.0)
        assert len(published) <= 1
        for one in published:
            blocks = [len(e.block_hashes) for e in one.frame.events if isinstance(e, BlockStored)]
            assert sum(blocks) < 2 * SNAPSHOT_BLOCKS
            told[one.sink] += sum(blocks)
    assert told == dict.fromkeys(range(3), 1000)
    core.close()


def test_a_freeze_copies_no_run_that_does_not_change() -> None:
    """10,000 runs are frozen in the memory of a list of them, and what changes later changes a copy."""
    materializer = Materializer(BLOCK_SIZE)
    for n in range(10_000):
        materializer.apply([StoreNew(StorageMedium.GPU, BlockId(n), 1, None, BASE, b"%08d" % n)])
    before = list(materializer.freeze().saved())
    tracemalloc.start()
    try:
        frozen = materializer.freeze()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 10_000 * 8 + 4096
    materializer.apply([Remove(StorageMedium.GPU, [(BlockId(n), 1) for n in range(6000)])])
    materializer.apply([StoreKnown(StorageMedium.CPU, BlockId(7000), 1)])
    assert list(frozen.saved()) == before
    assert len(list(materializer.freeze().saved())) == 4000
