"""publisher.subscriber: late joins, gaps, losses and restarts, against publishers in the test's hands."""

from __future__ import annotations

import contextlib
import selectors
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from types import TracebackType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_rig import (
    ENVIRONMENT,
    LOOPBACK,
    RawPublisher,
    insert,
    kill,
    make_cache,
    open_fds,
    payload_of,
    receive_until,
    router_view,
)
from publisher_sidecar_rig import WORKER, Engine, config, flushed, sink, work
from publisher_story import Steps, Story, facts_of, steps

from hicache import HiRadixCache
from kvevents import AllBlocksCleared, BlockIndex, BlockRemoved, BlockStored, StorageMedium
from kvevents.frames import JOIN
from kvevents.gaps import Gap, Lost, Restarted
from publisher import (
    Batch,
    ConfigError,
    Received,
    Respawn,
    Sidecar,
    SidecarConfig,
    SinkConfig,
    Subscriber,
    SubscriberStats,
    Undecodable,
    WorkerInfo,
    spawn,
)
from publisher.stream.log import RetainedLog

pytestmark = pytest.mark.integration

CLEARED = AllBlocksCleared()


def join(
    publisher: RawPublisher, *, seqs: Sequence[int] = (), replay_timeout_s: float = 5.0
) -> Subscriber:
    """A subscriber that has joined a publisher of whose log `seqs` are left, and is in step."""
    subscriber = Subscriber(
        publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=replay_timeout_s
    )
    publisher.await_subscriber()
    wait_for_request(publisher, subscriber)
    client, start = publisher.request()
    assert start == JOIN
    if not seqs:
        publisher.end(client)
        receive_until(subscriber, lambda _: publisher.router.poll(0) > 0)
        client, start = publisher.request()
        assert start == 0
    for seq in seqs:
        publisher.answer(client, seq, CLEARED)
    publisher.end(client)
    receive_until(subscriber, lambda _: not subscriber.recovering)
    return subscriber


def brief(received: list[Received]) -> list[object]:
    """Batches by their seq, `~seq` for a replayed one; the rest as it is."""
    return [
        (f"~{one.seq}" if one.replayed else one.seq) if isinstance(one, Batch) else one
        for one in received
    ]


def wait_for_request(publisher: RawPublisher, subscriber: Subscriber) -> list[Received]:
    return receive_until(subscriber, lambda _: publisher.router.poll(0) > 0)


def let_time_pass(subscriber: Subscriber) -> None:
    """All that the replay under way has."""
    subscriber._listener._replay_deadline = 0.0


def has(seq: int) -> Callable[[list[Received]], bool]:
    """Whether the batch of this seq is among what was received."""
    return lambda got: any(isinstance(one, Batch) and one.seq == seq for one in got)


# ------------------------------------------------------------------------------------------- join


def test_a_late_joiner_gets_the_exact_state() -> None:
    """Through a log that has long rolled, and with evictions, the router's view is the cache; nothing of
    it is odd.
    """
    cache = make_cache(num_pages=32)
    sink = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, buffer_steps=3)
    with spawn(WorkerInfo(block_size=4), SidecarConfig(sinks=(sink,), linger_s=0.0)) as sidecar:
        for step in range(60):
            insert(cache, range(step % 7 * 100, step % 7 * 100 + step))
            sidecar.pump(cache)
        answer = sidecar.client.flush(cache, 10.0)
        assert answer is not None and answer.next_seqs[0] > 20
        (bound,) = sidecar.client.sinks
        view = router_view(bound.endpoint, bound.replay_endpoint, answer.next_seqs[0])
        assert view.resident == cache.resident_blocks()
        assert view.oddities == BlockIndex().oddities
        assert cache.num_dropped > 0


@pytest.mark.parametrize("oldest", [0, 41])
def test_a_join_starts_where_the_answer_starts(oldest: int) -> None:
    """The first answer's seq is no gap; what came live meanwhile is applied after it, each once."""
    with RawPublisher() as publisher:
        subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
        with subscriber:
            publisher.await_subscriber()
            wait_for_request(publisher, subscriber)
            client, start = publisher.request()
            assert start == JOIN
            for seq in (oldest + 1, oldest + 2, oldest + 3):
                publisher.live(seq, CLEARED)
            for seq in (oldest, oldest + 1, oldest + 2):
                publisher.answer(client, seq, CLEARED)
            publisher.end(client)
            received = receive_until(subscriber, has(oldest + 3))
            seqs = [one.seq for one in received if isinstance(one, Batch)]
            assert seqs == [oldest, oldest + 1, oldest + 2, oldest + 3]
            assert len(received) == 4
            assert subscriber.next_seq == oldest + 4
            assert not subscriber.recovering


def test_a_publisher_without_base_state_is_asked_from_0() -> None:
    """A plain engine answers END to a join; it is asked for all it has, and the hole before is told."""
    with (
        RawPublisher() as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
    ):
        publisher.await_subscriber()
        wait_for_request(publisher, subscriber)
        client, start = publisher.request()
        assert start == JOIN
        publisher.end(client)
        wait_for_request(publisher, subscriber)
        client, start = publisher.request()
        assert start == 0
        for seq in (3, 4):
            publisher.answer(client, seq, CLEARED)
        publisher.end(client)
        publisher.live(5)
        received = receive_until(subscriber, has(5))
        assert brief(received) == [Lost(0, 3), "~3", "~4", 5]


@pytest.mark.parametrize(
    "shape",
    [
        lambda seq, text: [b"", b"topic", seq, text],
        lambda seq, text: [b"topic", seq, text],
        lambda seq, text: [b"", seq, text],
    ],
    ids=["delimiter and topic", "topic", "delimiter"],
)
@pytest.mark.parametrize(
    "end", [[b"", b"", b"\xff" * 8, b""], [b"", b"\xff" * 8, b""]], ids=["four", "three"]
)
def test_replay_answers_of_every_shape_are_read(
    shape: Callable[[bytes, bytes], list[bytes]], end: list[bytes]
) -> None:
    """With or without delimiter, with or without topic: the engines' forms of answer and END."""
    with (
        RawPublisher() as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
    ):
        wait_for_request(publisher, subscriber)
        client, _ = publisher.request()
        for seq in range(3):
            frames = shape(seq.to_bytes(8, "big"), payload_of(CLEARED))
            publisher.router.send_multipart([client, *frames])
        publisher.router.send_multipart([client, *end])
        received = receive_until(subscriber, lambda _: not subscriber.recovering)
        assert brief(received) == ["~0", "~1", "~2"]
        assert subscriber.stats.malformed == 0


def test_without_a_replay_endpoint_it_starts_with_the_next() -> None:
    """What came before is lost, and said to be; so is what is missed later."""
    with RawPublisher() as publisher, Subscriber(publisher.endpoint) as subscriber:
        publisher.await_subscriber()
        for seq in (5, 6, 8):
            publisher.live(seq)
        assert brief(receive_until(subscriber, has(8))) == [
            Lost(0, 5),
            5,
            6,
            Gap(7, 1),
            Lost(7, 1),
            8,
        ]
        assert subscriber.stats == SubscriberStats(batches=3, gaps=1, lost=6)


def test_a_topic_is_a_prefix() -> None:
    """Only topics that begin so are received."""
    with (
        RawPublisher() as publisher,
        Subscriber(publisher.endpoint, topic="kv@a") as subscriber,
    ):
        publisher.await_subscriber()
        for seq, topic in enumerate((b"kv@a@m", b"kv@b@m", b"x", b"kv@a")):
            publisher.pub.send_multipart([topic, seq.to_bytes(8, "big"), payload_of()])
        received = receive_until(subscriber, has(3))
        assert [one.seq for one in received if isinstance(one, Batch)] == [0, 3]


# ------------------------------------------------------------------------------------------- gaps


def test_a_gap_is_closed_by_replay() -> None:
    """Live batches that never came are asked for, and come in their place; case 64: what a replay and
    the live stream both bring is delivered once.
    """
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        publisher.live(1)
        publisher.live(5)
        received = wait_for_request(publisher, subscriber)
        client, start = publisher.request()
        assert start == 2
        publisher.live(6)
        for seq in range(2, 7):
            publisher.answer(client, seq, CLEARED)
        publisher.end(client)
        publisher.live(7)
        received += receive_until(subscriber, has(7))
        assert brief(received) == [1, Gap(2, 3), "~2", "~3", "~4", "~5", "~6", 7]
        assert subscriber.stats == SubscriberStats(batches=8, gaps=1, replayed=6)


def test_a_hole_that_nobody_can_fill_is_lost() -> None:
    """A replay that begins after the hole, or is empty: Lost says what, and the stream goes on."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        publisher.live(3)
        received = wait_for_request(publisher, subscriber)
        client, start = publisher.request()
        assert start == 1
        publisher.answer(client, 2)
        publisher.end(client)
        received += receive_until(subscriber, has(3))
        assert brief(received) == [Gap(1, 2), Lost(1, 1), "~2", 3]
        publisher.live(6)
        received = wait_for_request(publisher, subscriber)
        client, start = publisher.request()
        assert start == 4
        publisher.end(client)
        received += receive_until(subscriber, has(6))
        assert brief(received) == [Gap(4, 2), Lost(4, 2), 6]
        assert subscriber.stats.lost == 3


def test_a_silent_replay_endpoint_is_given_up() -> None:
    """It is asked three times, each on its own time limit; then Lost, and the live stream goes on."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        publisher.live(4)
        publisher.live(5)
        received: list[Received] = []
        for _ in range(3):
            received += wait_for_request(publisher, subscriber)
            assert publisher.request()[1] == 1
            let_time_pass(subscriber)
        received += receive_until(subscriber, has(5))
        assert publisher.router.poll(0) == 0
        assert brief(received) == [Gap(1, 3), Lost(1, 3), 4, 5]
        publisher.live(6)
        assert brief(receive_until(subscriber, has(6))) == [6]


def test_a_dead_replay_endpoint_does_not_stop_the_stream() -> None:
    """Nobody listens there: the join is given up, and what comes live is delivered."""
    with sockets.create_server(("127.0.0.1", 0)) as server:
        dead = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with (
        RawPublisher() as publisher,
        Subscriber(publisher.endpoint, dead, replay_timeout_s=0.05) as subscriber,
    ):
        publisher.await_subscriber()
        publisher.live(2)
        assert brief(receive_until(subscriber, has(2))) == [Lost(0, 2), 2]


def test_an_interrupted_replay_is_asked_for_again() -> None:
    """From where it had got to; a late answer to the first request does not get in between."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        publisher.live(4)
        received = wait_for_request(publisher, subscriber)
        first, start = publisher.request()
        publisher.answer(first, 1)
        received += receive_until(subscriber, has(1))
        let_time_pass(subscriber)
        received += wait_for_request(publisher, subscriber)
        second, start = publisher.request()
        assert start == 2
        assert second != first
        for seq in (2, 3):
            publisher.answer(second, seq)
        publisher.end(second)
        received += receive_until(subscriber, has(4))
        assert brief(received) == [Gap(1, 3), "~1", "~2", "~3", 4]


@pytest.mark.parametrize(
    "nonsense",
    [[b"x"], [b"", b""], [b"", b"t", b"short", b"p"], [b"1", b"2", b"3", b"4", b"5"]],
    ids=["one", "two", "seq", "five"],
)
def test_a_nonsense_answer_is_a_failed_replay(nonsense: list[bytes]) -> None:
    """It is counted, and the replay is asked for again at once."""
    with (
        RawPublisher() as publisher,
        join(publisher, seqs=[0], replay_timeout_s=3600.0) as subscriber,
    ):
        publisher.live(2)
        received = wait_for_request(publisher, subscriber)
        client, _ = publisher.request()
        publisher.router.send_multipart([client, *nonsense])
        received += wait_for_request(publisher, subscriber)
        client, start = publisher.request()
        assert start == 1
        publisher.answer(client, 1)
        publisher.end(client)
        received += receive_until(subscriber, has(2))
        assert brief(received) == [Gap(1, 1), "~1", 2]
        assert subscriber.stats.malformed == 1


def test_seqs_that_go_back_are_a_restart() -> None:
    """A publisher that counts from 0 again has started over: Restarted, and the state is asked for."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        for seq in (1, 2, 3):
            publisher.live(seq)
        receive_until(subscriber, has(3))
        publisher.live(0, CLEARED)
        received = wait_for_request(publisher, subscriber)
        client, start = publisher.request()
        assert start == JOIN
        publisher.answer(client, 0, CLEARED)
        publisher.end(client)
        publisher.live(1)
        received += receive_until(subscriber, has(1))
        assert brief(received) == [Restarted(0), "~0", 1]
        assert subscriber.stats.restarts == 1


# -------------------------------------------------------------------------------- new connections


class Proxy(Thread):
    """Between a subscriber and one endpoint; its connections can be cut, and lead elsewhere then."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self._server = sockets.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._orders, self._obeys = sockets.socketpair()
        self._peers: dict[sockets.socket, sockets.socket] = {}
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def cut(self, target: str | None = None) -> None:
        """All connections are gone when this returns."""
        self._target = target or self._target
        self._orders.send(b"c")
        assert self._orders.recv(1) == b"c"

    def run(self) -> None:
        for one in (self._server, self._obeys):
            self._selector.register(one, selectors.EVENT_READ, one)
        while True:
            for key, _ in self._selector.select():
                if key.data is self._server:
                    self._accept()
                elif key.data is not self._obeys:
                    self._forward(key.data)
                elif order := self._obeys.recv(1):
                    self._close_all()
                    self._obeys.send(order)
                    break  # what else was ready is closed
                else:
                    return

    def _accept(self) -> None:
        ours, _ = self._server.accept()
        host, port = self._target.removeprefix("tcp://").split(":")
        theirs = sockets.create_connection((host, int(port)))
        for one, other in ((ours, theirs), (theirs, ours)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ, one)

    def _forward(self, one: sockets.socket) -> None:
        if one not in self._peers:
            return  # closed in this round
        data = b""
        with contextlib.suppress(OSError):
            data = one.recv(1 << 16)
            self._peers[one].sendall(data)
        if not data:
            self._close(one, self._peers[one])

    def _close(self, *connections: sockets.socket) -> None:
        for one in connections:
            self._selector.unregister(one)
            del self._peers[one]
            one.close()

    def _close_all(self) -> None:
        self._close(*list(self._peers))

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._orders.close()
        self.join()
        self._close_all()
        self._server.close()
        self._obeys.close()
        self._selector.close()


class Follower:
    """Follows a sidecar's only sink from its first batch on: whatever happens, batches only, contiguous,
    with no clear once it has begun.
    """

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.index = BlockIndex()
        self._next_seq = self._told = 0

    def follow(self, sidecar: Sidecar, cache: HiRadixCache) -> None:
        """Until it is in step, and the view is the cache."""
        (end,) = flushed(sidecar, cache)

        def in_step(_: list[Received]) -> bool:
            return not self.subscriber.recovering and (self.subscriber.next_seq or 0) >= end

        for one in receive_until(self.subscriber, in_step):
            if isinstance(one, Gap):
                continue  # published before it was subscribed again; it is closed
            assert isinstance(one, Batch)
            assert one.seq == self._next_seq
            self._told += bool(one.batch.events)  # heartbeats may come before the worker's first
            assert CLEARED not in one.batch.events or self._told <= 2  # the sink's, the worker's
            self._next_seq += 1
            self.index.apply(one.batch.events)
        assert self.index.resident == cache.resident_blocks()


def test_a_connection_cut_is_no_new_beginning(tmp_path: Path) -> None:
    """G3: the same run behind a new connection goes on, with what was missed meanwhile and without a
    clear.
    """
    cache = make_cache(num_pages=64)
    with spawn(WORKER, config(tmp_path, sink(heartbeat_s=0.1))) as sidecar:
        (bound,) = sidecar.client.sinks
        with (
            Proxy(bound.endpoint) as proxy,
            Subscriber(proxy.endpoint, bound.replay_endpoint) as subscriber,
        ):
            follower = Follower(subscriber)
            for _ in range(3):
                work(sidecar, cache, 10)
                follower.follow(sidecar, cache)
                proxy.cut()
                work(sidecar, cache, 10)
                follower.follow(sidecar, cache)
            assert subscriber.stats.replayed > 30
            assert subscriber.stats.restarts == subscriber.stats.lost == 0


def test_a_sidecar_killed_and_warm_again_is_no_new_beginning(tmp_path: Path) -> None:
    """kill -9 under load: a subscriber's batches are contiguous, and its view never passes through
    empty.
    """
    cache = make_cache(num_pages=64)
    settings = config(tmp_path, sink(heartbeat_s=0.1))
    with spawn(WORKER, settings, respawn=Respawn(first_s=0.01)) as sidecar:
        (bound,) = sidecar.client.sinks
        with Subscriber(bound.endpoint, bound.replay_endpoint) as subscriber:
            follower = Follower(subscriber)
            for number in range(1, 4):
                work(sidecar, cache, 10)
                follower.follow(sidecar, cache)
                work(sidecar, cache, 10)
                kill(sidecar.pid)
                work(sidecar, cache, 10)
                follower.follow(sidecar, cache)
                assert sidecar.restarts == number
            assert subscriber.stats.restarts == subscriber.stats.lost == 0


@pytest.mark.parametrize("ahead", [-2, 0, 3])
def test_another_engine_behind_the_connection_is_told_of(ahead: int) -> None:
    """G3: an engine that started over, has no snapshots, and has come to a seq before, at or after where
    the last one was: Restarted, then all that it retains.
    """
    with (
        Engine() as old,
        Engine() as new,
        Proxy(old.endpoint) as live,
        Proxy(old.replay_endpoint) as replay,
    ):
        for engine, count in ((old, 5), (new, 5 + ahead)):
            for seq in range(count):
                engine.publish(payload_of(ts=float(seq + 100 * (engine is new))))
        with Subscriber(live.endpoint, replay.endpoint) as subscriber:

            def serve(_: list[Received]) -> bool:
                old.serve()
                new.serve()
                return not subscriber.recovering

            assert brief(receive_until(subscriber, serve)) == [f"~{n}" for n in range(5)]
            replay.cut(new.replay_endpoint)
            live.cut(new.endpoint)
            received = receive_until(subscriber, lambda _: subscriber.recovering)
            received += receive_until(subscriber, serve)
            assert brief(received) == [Restarted(0), *(f"~{n}" for n in range(5 + ahead))]
            new.await_next_subscriber()
            new.publish(payload_of())
            assert brief(receive_until(subscriber, has(5 + ahead))) == [5 + ahead]
            assert subscriber.stats.restarts == 1


def test_a_batch_of_a_new_connection_is_not_taken_for_one_of_the_last() -> None:
    """G3: it comes with the news of the connection, which goes first, also if it came meanwhile."""
    with Engine() as old, Engine() as new, Proxy(old.endpoint) as live:
        old.publish(payload_of())
        with Subscriber(live.endpoint, old.replay_endpoint) as subscriber:

            def serve(_: list[Received]) -> bool:
                old.serve()
                return not subscriber.recovering

            receive_until(subscriber, serve)
            live.cut(new.endpoint)
            while not new.pub.poll(10):
                subscriber._listener._sub.poll(0)  # it subscribes again
            new.live(1)
            assert subscriber._listener._sub.poll(10_000)
            subscriber._listener.turn()
            assert subscriber.recovering
            assert subscriber.next_seq == 1


# ------------------------------------------------------------------------------- what comes is bad


def test_an_undecodable_batch_costs_only_itself() -> None:
    """It is reported with its seq, bytes and reason, and what follows is delivered."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        publisher.live(1, payload=b"\xc1")
        publisher.live(2, CLEARED)
        bad, good = receive_until(subscriber, has(2))
        assert isinstance(bad, Undecodable)
        assert (bad.seq, bad.payload) == (1, b"\xc1")
        assert bad.reason
        assert isinstance(good, Batch)
        assert subscriber.stats == SubscriberStats(batches=2, replayed=1, malformed=1)


def test_a_bad_event_costs_only_itself() -> None:
    """The rest of its batch is delivered, with the position and the reason of what was skipped."""
    payload = payload_of(CLEARED, BlockRemoved([1], StorageMedium.GPU)).replace(b"GPU", b"TPU")
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        publisher.live(1, payload=payload)
        (one,) = receive_until(subscriber, has(1))
        assert isinstance(one, Batch)
        assert one.batch.events == [CLEARED]
        assert [skipped.position for skipped in one.skipped] == [1]


def test_a_malformed_message_costs_only_itself() -> None:
    """Too few frames, too many, a short seq: counted, and the stream goes on."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        for frames in (
            [b""],
            [b"", b"\0" * 8],
            [b"", b"\0" * 7, b"x"],
            [b"", b"\0" * 8, b"x", b""],
        ):
            publisher.pub.send_multipart(frames)
        publisher.live(1)
        assert brief(receive_until(subscriber, has(1))) == [1]
        assert subscriber.stats.malformed == 4


# ----------------------------------------------------------------------------- a host that is gone

ALONE = """
import subprocess, sys, time
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
from publisher import Subscriber
from publisher_rig import RawPublisher
with RawPublisher() as publisher, Subscriber(publisher.endpoint) as subscriber:
    publisher.await_subscriber()
    publisher.live(1)
    assert [type(one).__name__ for one in subscriber.receive()] == ["Lost", "Batch"]
    for state in ("down", "up"):
        subprocess.run(["ip", "link", "set", "lo", state], check=True)
        until = time.monotonic() + 60
        while subscriber.connected == (state == "down"):
            assert time.monotonic() < until
            subscriber.receive(0.1)
        print(state, flush=True)
    publisher.live(2)
    (batch,) = subscriber.receive()
    print(batch.seq)
"""


def test_a_publisher_that_says_nothing_is_asked_whether_it_is_there() -> None:
    """Case 73: the kernel's timer of the connection is that of TCP keepalive, and short."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        assert subscriber.receive(0.3) == []  # what was sent is acknowledged
        port = f"{int(publisher.endpoint.rpartition(':')[2]):04X}"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (timer,) = [line[5] for line in lines if line[2].endswith(f":{port}") and line[3] == "01"]
        kind, jiffies = timer.split(":")
        assert (kind, 0 <= int(jiffies, 16) <= 500) == ("02", True)


@pytest.mark.stress
def test_packets_that_are_dropped_without_a_word() -> None:
    """Case 73: it is noticed, and once they come again the stream goes on. In a network of its own."""
    if subprocess.run(
        ["unshare", "-rn", "ip", "link"], capture_output=True, check=False
    ).returncode:
        pytest.skip("no network of its own can be had here")
    ran = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "PYTHONPATH": ":".join(sys.path)},
    )
    assert (ran.returncode, ran.stdout) == (0, "down\nup\n2\n"), ran.stderr


# --------------------------------------------------------------------------------- time and ending


def test_silence_is_an_empty_list_in_time() -> None:
    """With nothing to receive, the wait is the timeout, and not more."""
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        start = time.monotonic()
        assert subscriber.receive(0.05) == []
        assert subscriber.receive(0) == []
        assert 0.05 <= time.monotonic() - start < 5.0


def test_a_flood_without_anything_to_deliver_is_silence() -> None:
    """Messages that pour in and cannot be read do not hold up the end of the time: it comes between
    them.
    """
    flood = 100_000
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        for _ in range(flood):
            publisher.pub.send_multipart([b"", b"not a seq", b""])
        assert subscriber.receive(0.01) == []
        assert 0 < subscriber.stats.malformed < flood // 2
        publisher.live(1)
        assert brief(receive_until(subscriber, has(1))) == [1]
        assert subscriber.stats.malformed == flood


def test_closing_twice_is_nothing() -> None:
    """Also in the middle of a replay; nothing stays open."""
    before = open_fds()
    with RawPublisher() as publisher:
        subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
        assert subscriber.recovering
        subscriber.close()
        subscriber.close()
    assert open_fds() == before


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://a b:1", "tcp://127.0.0.1:*", "udp://x:1"])
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_cannot_be_is_named(key: str, endpoint: str) -> None:
    """ConfigError, a ValueError, with the key and the value; nothing stays open."""
    before = open_fds()
    endpoints = {"endpoint": "tcp://127.0.0.1:1", key: endpoint}
    with pytest.raises(ConfigError) as error:
        Subscriber(**endpoints)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{key}: ")
    assert repr(endpoint) in str(error.value)
    assert open_fds() == before


# ---------------------------------------------------------------------------------- all at once


@settings(max_examples=25)
@given(told=steps, dropped=st.sets(st.integers(0, 13)), max_batches=st.integers(1, 4))
def test_whatever_is_dropped_the_view_is_right(
    told: Steps, dropped: set[int], max_batches: int
) -> None:
    """Invariant 20: with any live batches missing and a log that keeps next to nothing, a router ends
    with the state the publisher is in, by snapshots where the frames are gone.
    """
    log = RetainedLog(
        lambda: lambda events: payload_of(*events),
        max_batches=max_batches,
        max_bytes=1 << 20,
        snapshot_blocks=2,
    )
    story, index = Story(), BlockIndex()

    def follow(subscriber: Subscriber) -> None:
        for one in subscriber.receive(0):
            if isinstance(one, Batch):
                index.apply(one.batch.events)
            else:
                assert isinstance(one, Gap), one
        while publisher.router.poll(0):
            wait_for_request(publisher, subscriber)
            client, start = publisher.request()
            for seq, payload in log.replay(start):
                publisher.router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            publisher.end(client)

    with (
        RawPublisher() as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
    ):
        publisher.await_subscriber()
        for number, batch in enumerate([*told, []]):
            events = [event for step in batch for event in story.tell(*step)]
            payload = payload_of(*events)
            seq = log.append(payload, events)
            if number not in dropped or number == len(told):
                publisher.live(seq, payload=payload)
            follow(subscriber)
        deadline = time.monotonic() + 20.0
        while subscriber.recovering or subscriber.next_seq != log.next_seq:
            assert time.monotonic() < deadline
            follow(subscriber)
        assert facts_of(index) == story.facts


def test_a_block_stored_twice_by_replay_and_live_counts_once() -> None:
    """Invariant 21: a snapshot that overlaps what is known changes nothing that is so."""
    stored = BlockStored([1, 2], None, [1, 2, 3, 4], 2, medium=StorageMedium.GPU)
    with RawPublisher() as publisher, join(publisher, seqs=[0]) as subscriber:
        publisher.live(1, stored)
        publisher.live(3)
        received = wait_for_request(publisher, subscriber)
        client, _ = publisher.request()
        publisher.answer(client, 2, CLEARED, stored)
        publisher.end(client)
        received += receive_until(subscriber, has(3))
        index = BlockIndex()
        for one in received:
            if isinstance(one, Batch):
                index.apply(one.batch.events)
        assert index.resident[StorageMedium.GPU] == {1, 2}
