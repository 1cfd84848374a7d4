"""publisher.sidecar.relay: a real SUB and DEALER against an engine's publisher in the test's hands."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from ports_rig import free_ports
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    RawPublisher,
    open_fds,
    payload_of,
    start_kvevents,
)

from kvevents import AllBlocksCleared, BlockStored, StorageMedium
from kvevents.codec import decode_batch
from kvevents.frames import Frame, replay_answer
from publisher.config.sidecar_config import ConfigError, RelayConfig, WorkerInfo
from publisher.link.messages import BATCH, FRESH
from publisher.sidecar.engine_stream import RelayStats
from publisher.sidecar.relay import RelaySource
from publisher.sidecar.source import Source
from publisher.stream.input import Input
from publisher.tools.doctor.asking import ask

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4)
CLEARED = AllBlocksCleared()
LATER_S = 3600.0


class Rebound(RawPublisher):
    """The next run of an engine: on the addresses of an earlier one."""

    def __init__(self, earlier: RawPublisher) -> None:
        super().__init__()
        for socket, endpoint in (
            (self.pub, earlier.endpoint),
            (self.router, earlier.replay_endpoint),
        ):
            socket.bind(endpoint)


class Relay:
    """A relay driven as a sidecar drives it: wait for what it names, then read."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, **more: Any) -> None:
        self.context = zmq.Context[zmq.Socket[bytes]]()
        config = RelayConfig(
            endpoint=endpoint, replay_endpoint=replay_endpoint, topic=topic, worker=WORKER
        )
        self.source = RelaySource(config, context=self.context, **{"probe_s": LATER_S} | more)
        self.inputs: list[Input] = []
        self.most = 100

    def turn(self, timeout_s: float = 1.0) -> None:
        poller = zmq.Poller()
        for one in self.source.pollables():
            poller.register(one, zmq.POLLIN)
        left = self.source.wake_at() - time.monotonic()
        poller.poll(int(max(0.0, min(left, timeout_s)) * 1000) + 1)
        more = True
        while more:
            inputs, more = self.source.read(self.most)
            assert len(inputs) <= self.most
            self.inputs += inputs

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"this is all that came: {self.brief}"
            self.turn(0.02)

    def until_told(self, *brief: object) -> None:
        """Until exactly this has been told, beginning with the first."""
        self.until(lambda: len(self.brief) >= len(brief))
        assert self.brief == list(brief)

    @property
    def brief(self) -> list[object]:
        """Batches by their number; what begins anew as such."""
        return ["fresh" if one.flags & FRESH else one.number for one in self.inputs]


@contextlib.contextmanager
def relaying(
    publisher: RawPublisher, *, can_replay: bool = True, topic: str = "", **more: Any
) -> Iterator[Relay]:
    """A relay of this publisher, not started yet."""
    replay_endpoint = publisher.replay_endpoint if can_replay else None
    relay = Relay(publisher.endpoint, replay_endpoint, topic, **more)
    try:
        yield relay
    finally:
        relay.source.close()
        relay.source.close()
        relay.context.term()


def asked(publisher: RawPublisher, relay: Relay, start: int) -> bytes:
    """Who asks for a replay from `start`."""
    relay.until(lambda: publisher.router.poll(0))
    client, found = publisher.request()
    assert found == start
    return client


def join(publisher: RawPublisher, relay: Relay, *seqs: int) -> None:
    """Let it join, the log holding `seqs`."""
    relay.source.start(0)
    client = asked(publisher, relay, 0)
    publisher.await_subscriber()
    for seq in seqs:
        publisher.answer(client, seq)
    publisher.end(client)
    relay.until(lambda: relay.source._dealer is None)
    assert relay.brief == [*seqs]


def test_it_is_a_source() -> None:
    """It fulfils the protocol: always alive, with its config's worker, and an id of its endpoints."""
    with RawPublisher() as publisher, relaying(publisher) as relay:
        source: Source = relay.source
        assert source.alive
        assert source.worker == WORKER
        assert len(source.link_id) == 16
        assert source.pollables() == []
        assert source.wake_at() == float("inf")
        source.release()
        source.ask_resync("why")
        with relaying(publisher) as again, relaying(publisher, can_replay=False) as other:
            assert again.source.link_id == source.link_id != other.source.link_id


@pytest.mark.parametrize("delimited", [True, False], ids=["delimited", "bare"])
def test_a_late_start_begins_with_what_the_engine_has_kept(*, delimited: bool) -> None:
    """The log, then what came live meanwhile, in order and once; payloads as they came."""
    with RawPublisher() as publisher, relaying(publisher) as relay:
        relay.source.start(0)
        client = asked(publisher, relay, 0)
        publisher.await_subscriber()
        for seq in (5, 6, 7):
            publisher.live(seq, CLEARED)
        for seq in (3, 4, 5):
            publisher.answer(client, seq, CLEARED, delimited=delimited)
        publisher.end(client, delimited=delimited)
        relay.until_told(3, 4, 5, 6, 7)
        assert {(one.flags, one.body) for one in relay.inputs} == {(BATCH, payload_of(CLEARED))}
        assert relay.source.connected
        assert relay.source.stats == RelayStats(received=3, replayed=3, lost=3)


def test_a_gap_is_closed_before_what_is_behind_it() -> None:
    """The missing ones are asked for, and nothing overtakes them."""
    with RawPublisher() as publisher, relaying(publisher) as relay:
        join(publisher, relay, 0)
        publisher.live(1)
        publisher.live(4)
        publisher.live(5)
        client = asked(publisher, relay, 1)
        assert relay.brief == [0, 1]
        for seq in (1, 2, 3, 4):
            publisher.answer(client, seq)
        publisher.end(client)
        relay.until_told(0, 1, 2, 3, 4, 5)
        assert relay.source.stats == RelayStats(received=3, gaps=1, replayed=4)


def test_a_gap_that_is_not_answered_is_jumped_over() -> None:
    """After three attempts; later it is asked for everything once more, and that begins anew."""
    now = 0.0
    with (
        RawPublisher() as publisher,
        relaying(publisher, replay_timeout_s=5.0, probe_s=60.0, clock=lambda: now) as relay,
    ):
        join(publisher, relay, 0)
        publisher.live(3)
        for _ in range(3):
            asked(publisher, relay, 0)
            now += 5.0
        relay.until_told(0, 3)
        assert relay.source.stats.lost == 2
        now += 60.0
        client = asked(publisher, relay, 0)
        for seq in range(4):
            publisher.answer(client, seq)
        publisher.end(client)
        publisher.live(4)
        relay.until_told(0, 3, "fresh", 0, 1, 2, 3, 4)


def test_an_answer_that_stalls_is_continued() -> None:
    """Again and again, without an end marker, as long as each brings something."""
    now = 0.0
    with (
        RawPublisher() as publisher,
        relaying(publisher, replay_timeout_s=LATER_S, stall_s=1.0, clock=lambda: now) as relay,
    ):
        relay.source.start(0)
        for start in range(6):
            client = asked(publisher, relay, start)
            publisher.answer(client, start)
            publisher.answer(client, start + 1)
            relay.until_told(*range(start + 2))
            now += 1.0
        client = asked(publisher, relay, 6)
        publisher.answer(client, 6)
        publisher.end(client)
        relay.until(lambda: relay.source._dealer is None)
        assert relay.brief == [0, 1, 2, 3, 4, 5, 6]


def test_what_is_not_taken_yet_is_no_stall() -> None:
    """However long the work takes that an answer has brought, it is not asked for once more."""
    now = 0.0
    with RawPublisher() as publisher, relaying(publisher, clock=lambda: now) as relay:
        source = relay.source
        source.start(0)
        client = asked(publisher, relay, 0)
        for seq in range(8):
            publisher.answer(client, seq)
        deadline = time.monotonic() + PATIENCE_S
        while len(source._ready) < 8 and time.monotonic() < deadline:
            source._read_replay(8)
        while len(source._ready) >= 2:
            now += 10.0
            relay.inputs += source.read(2)[0]
        assert relay.brief == [*range(8)]
        publisher.end(client)
        relay.until(lambda: source._dealer is None)
        assert source.stats == RelayStats(replayed=8)


def test_a_nonsense_answer_is_asked_for_again() -> None:
    """It is counted; so is a live message that is none."""
    with RawPublisher() as publisher, relaying(publisher, replay_timeout_s=LATER_S) as relay:
        relay.source.start(0)
        client = asked(publisher, relay, 0)
        publisher.await_subscriber()
        publisher.router.send_multipart([client, b"what"])
        client = asked(publisher, relay, 0)
        publisher.end(client)
        publisher.pub.send_multipart([b"", b"short", b"x"])
        publisher.live(0)
        relay.until_told(0)
        assert relay.source.stats.malformed == 2


def test_an_engine_without_replay() -> None:
    """Holes are jumps, nobody is asked, and there is nothing to wake up for."""
    with RawPublisher() as publisher, relaying(publisher, can_replay=False) as relay:
        relay.source.start(0)
        publisher.await_subscriber()
        for seq in (2, 3, 6):
            publisher.live(seq)
        relay.until_told(2, 3, 6)
        assert relay.source.stats == RelayStats(received=3, gaps=2, lost=4)
        assert relay.source.wake_at() == float("inf")


def test_only_its_topic() -> None:
    """Other topics of the same publisher are not heard."""
    with RawPublisher() as publisher, relaying(publisher, topic="kv@a") as relay:
        join(publisher, relay)
        for seq, topic in enumerate((b"kv@a", b"kv@b", b"kv@a")):
            publisher.pub.send_multipart([topic, seq.to_bytes(8, "big"), payload_of()])
        client = asked(publisher, relay, 0)
        publisher.end(client)
        relay.until_told(0, 2)


def test_a_batch_lost_before_a_pause_is_found() -> None:
    """A quiet engine is asked whether there was more."""
    now = 0.0
    with (
        RawPublisher() as publisher,
        relaying(publisher, probe_s=1.0, clock=lambda: now) as relay,
    ):
        join(publisher, relay, 0)
        now += 1.0
        client = asked(publisher, relay, 0)
        publisher.answer(client, 0)
        publisher.answer(client, 1)
        publisher.end(client)
        relay.until(lambda: relay.source._dealer is None)
        relay.until_told(0, 1)
        now += 2.0
        asked(publisher, relay, 1)


def test_a_restart_is_noticed_by_the_connection() -> None:
    """The next run on the same addresses, though its live numbers go on from where the last one was."""
    first = RawPublisher()
    with relaying(first, gone_s=LATER_S) as relay:
        with first:
            join(first, relay, 0, 1)
        relay.until(lambda: not relay.source.connected)
        with Rebound(first) as second:
            client = asked(second, relay, 1)
            second.await_subscriber()
            second.live(2)
            second.answer(client, 1, CLEARED)
            client = asked(second, relay, 0)
            for seq in (0, 1, 2):
                second.answer(client, seq, CLEARED)
            second.end(client)
            relay.until_told(0, 1, "fresh", 0, 1, 2)
            assert relay.source.stats.restarts == 1


def test_the_same_run_goes_on_after_a_cut() -> None:
    """What was missed meanwhile is replayed; nothing begins anew."""
    first = RawPublisher()
    with relaying(first, gone_s=LATER_S) as relay:
        with first:
            join(first, relay, 0, 1)
        with Rebound(first) as second:
            client = asked(second, relay, 1)
            second.await_subscriber()
            for seq in (1, 2, 3):
                second.answer(client, seq)
            second.end(client)
            second.live(4)
            relay.until_told(0, 1, 2, 3, 4)
            assert relay.source.stats.restarts == 0


def test_numbers_that_go_back_are_a_restart() -> None:
    """On the connection that was there already."""
    with RawPublisher() as publisher, relaying(publisher) as relay:
        join(publisher, relay, 0)
        publisher.live(1)
        publisher.live(0, CLEARED)
        client = asked(publisher, relay, 0)
        publisher.end(client)
        publisher.live(1, CLEARED)
        relay.until_told(0, 1, "fresh", 0, 1)


def test_a_dead_engine_is_told_once() -> None:
    """When it has been away for `gone_s`: an empty batch that begins anew. The next run starts at 0."""
    first = RawPublisher()
    with relaying(first, gone_s=0.05) as relay:
        with first:
            join(first, relay, 0, 1)
        relay.until_told(0, 1, "fresh")
        assert not relay.source.connected
        assert relay.source.stats.departures == 1
        fresh = relay.inputs[-1]
        assert (fresh.number, fresh.flags) == (0, BATCH | FRESH)
        batch = decode_batch(fresh.body).batch
        assert batch.events == []
        assert abs(batch.ts - time.time()) < PATIENCE_S
        relay.turn(0.1)
        relay.turn(0.1)
        with Rebound(first) as second:
            client = asked(second, relay, 0)
            second.answer(client, 0)
            second.end(client)
            relay.until_told(0, 1, "fresh", 0)


def test_an_engine_that_never_comes_is_dead_too() -> None:
    """What an earlier process was told of it is told to be gone; nothing when there was nothing."""
    with RawPublisher() as publisher:
        pass
    with relaying(publisher, gone_s=0.05) as relay:
        relay.source.start(7, payload_of())
        relay.until_told("fresh")
    with relaying(publisher, gone_s=0.05) as relay:
        relay.source.start(0)
        relay.until(lambda: relay.source.wake_at() == float("inf"))
        assert relay.inputs == []
        assert relay.source.stats.departures == 0


@pytest.mark.parametrize("same", [True, False], ids=["same run", "another run"])
def test_a_later_process_goes_on_where_the_first_one_ended(same: bool) -> None:
    """In the same run with what follows; in another one from its 0."""
    with RawPublisher() as publisher, relaying(publisher) as relay:
        relay.source.start(3, payload_of(CLEARED) if same else payload_of())
        client = asked(publisher, relay, 2)
        publisher.answer(client, 2, CLEARED)
        if not same:
            client = asked(publisher, relay, 0)
            for seq in (0, 1, 2):
                publisher.answer(client, seq, CLEARED)
        publisher.answer(client, 3, CLEARED)
        publisher.end(client)
        relay.until_told(*((3,) if same else ("fresh", 0, 1, 2, 3)))


def test_a_read_does_bounded_work() -> None:
    """At most so many inputs at once, from a replay and from a burst; the rest comes with the next."""
    with RawPublisher() as publisher, relaying(publisher) as relay:
        relay.most = 3
        relay.source.start(0)
        client = asked(publisher, relay, 0)
        publisher.await_subscriber()
        for seq in range(20):
            publisher.answer(client, seq)
        publisher.end(client)
        for seq in range(15, 40):
            publisher.live(seq)
        relay.until_told(*range(40))


def test_what_overflows_its_queue_is_a_gap() -> None:
    """A relay that did not read for long asks for what it lost; nothing is missing in the end."""
    count, body = 2000, bytes(20_000)
    with RawPublisher() as publisher:
        publisher.pub.setsockopt(zmq.SNDHWM, 10)  # limits are those of a later bind
        publisher.endpoint = publisher.pub.bind(LOOPBACK).addr
        publisher.router.setsockopt(zmq.SNDHWM, 0)
        publisher.replay_endpoint = publisher.router.bind(LOOPBACK).addr
        with relaying(publisher, hwm=10, probe_s=0.2) as relay:
            join(publisher, relay)
            for seq in range(count):
                publisher.live(seq, payload=body)
            while len(relay.inputs) < count:
                relay.until(lambda: publisher.router.poll(0))
                client, start = publisher.request()
                for seq in range(start, count):
                    frames = replay_answer(b"", seq, body, delimited=True)
                    publisher.router.send_multipart([client, *frames])
                publisher.end(client)
                relay.until(lambda: relay.source._dealer is None)
            assert relay.brief == [*range(count)]
            assert relay.source.stats.gaps > 0
            assert relay.source.stats.lost == relay.source.stats.restarts == 0


def test_a_dead_replay_endpoint_does_not_stop_the_stream() -> None:
    """The join is given up, and what comes live is told."""
    with (
        RawPublisher() as publisher,
        RawPublisher() as dead,
        relaying(publisher, replay_timeout_s=0.05) as relay,
    ):
        publisher.replay_endpoint = dead.replay_endpoint
        relay.source.start(0)
        publisher.await_subscriber()
        publisher.live(2)
        relay.until_told(2)


def test_an_engine_in_the_place_of_another_socket_is_found() -> None:
    """Who is no publisher hangs up, which is seen; the engine that comes in its place is connected to."""
    with RawPublisher() as publisher:
        relay = Relay(publisher.replay_endpoint, None, "")
        try:
            relay.source.start(0)
            relay.until(lambda: relay.source.strange)
            assert not relay.source.connected
            publisher.publish_at_the_replay_endpoint()
            relay.until(lambda: relay.source.connected)
            assert not relay.source.strange
        finally:
            relay.source.close()
            relay.context.term()


def test_replays_of_another_topic_are_noticed() -> None:
    """They are taken, for nothing else comes; which topic they are of can be said."""
    with RawPublisher() as publisher, relaying(publisher, topic="kv@") as relay:
        assert relay.source.other_topic is None
        relay.source.start(0)
        client = asked(publisher, relay, 0)
        for seq, topic in enumerate((None, b"kv@a", b"\xffx")):
            frames = replay_answer(topic, seq, payload_of(), delimited=True)
            publisher.router.send_multipart([client, *frames])
            relay.until(lambda seq=seq: len(relay.inputs) > seq)  # type: ignore[misc]
            assert relay.source.other_topic == ("\\xffx" if seq == 2 else None)


def test_two_engines_behind_one_address_do_not_keep_it_busy() -> None:
    """Whose numbers go back with every batch: replays are asked for some times a second at most."""
    with RawPublisher() as publisher, relaying(publisher) as relay:
        relay.source.start(0)
        publisher.end(asked(publisher, relay, 0))
        publisher.await_subscriber()
        began, requests = time.monotonic(), 0
        while (lasted := time.monotonic() - began) < 2.0:
            for seq in (1000, 3):
                publisher.live(seq)
            relay.turn(0.0)
            if publisher.router.poll(0):
                requests += 1
                publisher.end(publisher.request()[0])
        assert 2 <= requests <= 22 + 20 * lasted


def test_nothing_is_left_open() -> None:
    """Neither after a restart and replays, nor when it is closed in the middle of one."""
    before = open_fds()
    first = RawPublisher()
    with relaying(first) as relay:
        with first:
            join(first, relay, 0)
            first.live(5)
            asked(first, relay, 0)
        relay.until(lambda: not relay.source.connected)
    assert open_fds() == before


@pytest.mark.integration
def test_a_relay_that_came_late_says_so() -> None:
    """Of blocks behind what was stored before: in its log, its metrics, and to a doctor."""
    (port,) = free_ports(1)
    with RawPublisher() as engine:
        command = (
            *("serve", "--relay", engine.endpoint, "--block-size", "2", "--endpoint", LOOPBACK),
            *("--replay-endpoint", "none", "--http-endpoint", f"http://127.0.0.1:{port}"),
        )
        with start_kvevents(f"late {os.getpid()}", *command) as process:
            assert process.stderr is not None
            engine.await_subscriber()
            hidden = BlockStored([6, 7], 5, [1, 2, 3, 4], 2, medium=StorageMedium.GPU)
            engine.live(900, hidden)
            lines: list[str] = []
            while "2 blocks are left out" not in "".join(lines):
                lines.append(process.stderr.readline())
                assert lines[-1], "it ended"
            told = {one.text for one in ask("127.0.0.1", port, None, 5.0, subscribed=False)}
            assert any(one.startswith("2 blocks were left out") for one in told), told


@pytest.mark.integration
def test_a_replay_endpoint_where_nobody_answers_is_named() -> None:
    """The log says that live batches wait, and for whom."""
    with RawPublisher() as engine:
        engine.router.unbind(engine.replay_endpoint)
        command = (
            *("serve", "--relay", engine.endpoint, "--block-size", "2", "--http-endpoint", "none"),
            *("--relay-replay-endpoint", engine.replay_endpoint, "--endpoint", LOOPBACK),
            *("--replay-endpoint", "none"),
        )
        with start_kvevents(f"silent replay {os.getpid()}", *command) as process:
            assert process.stderr is not None
            engine.await_subscriber()
            lines: list[str] = []
            while "does not answer; live batches wait" not in "".join(lines):
                lines.append(process.stderr.readline())
                assert lines[-1], "it ended"
        assert engine.replay_endpoint in lines[-1]


def alone(endpoint: str, replay_endpoint: str) -> RelaySource:
    """A relay of nobody, for whoever looks at its sockets."""
    return Relay(endpoint, replay_endpoint, "", hwm=77).source


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_what_an_engine_can_send_is_bounded(host: str) -> None:
    """On either socket: how many messages wait, and of how many bytes one is. A host that is gone is
    noticed, and closing waits for nothing.
    """
    ports = free_ports(2)
    source = alone(*(f"tcp://{host}:{port}" for port in ports))
    source.start(0)
    source._ask(0)
    for socket in (source._sub, source._dealer):
        assert socket is not None
        options = (zmq.RCVHWM, zmq.MAXMSGSIZE, zmq.TCP_KEEPALIVE, zmq.LINGER, zmq.IPV6)
        found = [socket.getsockopt(option) for option in options]
        assert found == [77, 256 << 20, 1, 0, int("[" in host)]
    source.close()
    source._context.term()


def test_an_address_that_cannot_be_is_named() -> None:
    """By its key, and it is no lack of descriptors, after which one tries again."""
    odd = "tcp://-:5557"
    (port,) = free_ports(1)
    source = alone(odd, f"tcp://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f"^relay.endpoint: {odd}: Invalid argument"):
        source.start(0)
    source.close()
    source._context.term()
    source = alone(f"tcp://127.0.0.1:{port}", odd)
    source.start(0)
    with pytest.raises(ConfigError, match=f"^relay.replay_endpoint: {odd}: Invalid argument"):
        source._ask(0)
    source.close()
    source._context.term()


def test_of_a_connection_that_is_lost_nothing_is_left() -> None:
    """What it brought and asked for may be of a run that has ended: none of it meets what comes next."""
    ports = free_ports(2)
    source = alone(*(f"tcp://127.0.0.1:{port}" for port in ports))
    source.start(0)
    source.connected = True
    source._act(source._stream.connected())
    source._frames.append(Frame(b"", 5, payload_of()))
    kept = [source.connected, source.batches_wait, len(source.pollables()), len(source._frames)]
    source._lose_connection()
    left = [source.connected, source.batches_wait, len(source.pollables()), len(source._frames)]
    assert (kept, left) == ([True, True, 2, 1], [False, False, 0, 0])
    source.close()
    source._context.term()
