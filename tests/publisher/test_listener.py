"""publisher.subscriber.listener: who is slow, or is sent giants, or nonsense, hurts nobody."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from ports_rig import free_ports
from publisher_rig import LOOPBACK, PATIENCE_S, RawPublisher

from kvevents.follower import Malformed, Step, Told
from kvevents.frames import JOIN, live_frames, replay_answer, replay_request
from kvevents.gaps import Gap, Lost
from kvevents.message import Channel
from publisher.config.keys import read_public_key, read_secret_key, write_keys
from publisher.subscriber.listener import Listener, wait_for


def listen_until(listener: Listener, done: Callable[[list[Step]], bool]) -> list[Step]:
    """All that comes until it is enough."""
    deadline = time.monotonic() + PATIENCE_S
    steps: list[Step] = []
    while not done(steps):
        assert time.monotonic() < deadline, steps[-5:]
        wait_for([listener], time.monotonic() + 0.05)
        steps += listener.turn()
    return steps


PACE = (Channel.BEHIND, Channel.ABREAST)


def channels(steps: list[Step]) -> list[Channel]:
    """But for those of a machine that is slow."""
    return [step.message.channel for step in steps if step.message.channel not in PACE]


def paces(steps: list[Step]) -> list[Channel]:
    return [step.message.channel for step in steps if step.message.channel in PACE]


def told(steps: list[Step]) -> list[int]:
    return [one.seq for step in steps for one in step.arrivals if isinstance(one, Told)]


def resident_bytes() -> int:
    """Of this process, by /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_flood_is_bounded_and_stalls_nobody() -> None:
    """With a small queue, gigabytes that nobody reads: the publisher sends them all at once, little of
    it is kept, the hole is said, and that it may be our own.
    """
    payload = bytes(100_000)
    with RawPublisher() as publisher:
        publisher.pub.setsockopt(zmq.SNDHWM, 100)
        endpoint = publisher.pub.bind(LOOPBACK).addr
        with Listener(endpoint, hwm=100) as listener:
            publisher.await_subscriber()
            before, began = resident_bytes(), time.monotonic()
            for seq in range(20_000):  # 2 GB
                publisher.pub.send_multipart(live_frames(b"", seq, payload), zmq.NOBLOCK)
            assert time.monotonic() - began < PATIENCE_S
            assert resident_bytes() - before < 300 << 20
            behind = False
            deadline = time.monotonic() + PATIENCE_S
            steps: list[Step] = []
            seq = 20_000
            while not any(isinstance(a, Lost) for step in steps for a in step.arrivals):
                assert time.monotonic() < deadline
                publisher.live(seq, payload=b"x")
                seq += 1
                steps += listener.turn()
                behind |= listener.follower.behind
            assert behind
            arrivals = [arrival for step in steps for arrival in step.arrivals]
            gaps = [arrival for arrival in arrivals if isinstance(arrival, Gap)]
            lost = [arrival for arrival in arrivals if isinstance(arrival, Lost)]
            assert [(one.first, one.count) for one in gaps] == [
                (one.first, one.count) for one in lost
            ]


def test_who_keeps_up_is_not_behind() -> None:
    """A gap then is none of its making."""
    with RawPublisher() as publisher, Listener(publisher.endpoint, hwm=100) as listener:
        publisher.await_subscriber()
        for seq in range(50):
            publisher.live(seq, payload=b"x")
        listen_until(listener, lambda steps: len(told(steps)) == 50)
        assert not listener.follower.behind


def test_one_turn_is_bounded() -> None:
    """A thousand messages at most, whatever is waiting; the others come with the next."""
    with RawPublisher() as publisher, Listener(publisher.endpoint) as listener:
        publisher.await_subscriber()
        for seq in range(2500):
            publisher.live(seq, payload=b"x")
        steps: list[Step] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(told(steps)) < 2500:
            assert time.monotonic() < deadline
            wait_for([listener], deadline)
            turn = listener.turn()
            assert len(told(turn)) <= 1000
            steps += turn
        assert told(steps) == list(range(2500))


def test_a_giant_frame_ends_the_connection() -> None:
    """It is never in memory, and is not tried again; what came before is told."""
    with RawPublisher() as publisher, Listener(publisher.endpoint, max_frame=1 << 20) as listener:
        publisher.await_subscriber()
        publisher.live(0, payload=b"x")
        publisher.live(1, payload=bytes((1 << 20) + 1))
        steps = listen_until(
            listener, lambda steps: Channel.DISCONNECTED in channels(steps) and bool(told(steps))
        )
        assert told(steps) == [0]
        assert not listener.connected


def test_a_giant_answer_is_a_replay_without_an_end() -> None:
    """Live messages go on, and what it was asked for is given up."""
    with (
        RawPublisher() as publisher,
        Listener(
            publisher.endpoint,
            publisher.replay_endpoint,
            max_frame=1 << 20,
            replay_timeout_s=0.1,
            attempts=1,
        ) as listener,
    ):
        publisher.await_subscriber()
        steps = listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
        client, start = publisher.request()
        assert start == JOIN
        giant = replay_answer(b"", 0, bytes((1 << 20) + 1), delimited=True)
        publisher.router.send_multipart([client, *giant])
        publisher.live(5, payload=b"x")
        steps += listen_until(listener, lambda steps: told(steps) == [5])
        assert Channel.OVER in channels(steps) and Channel.ANSWER not in channels(steps)


def test_an_answer_as_large_as_an_engines_is_had() -> None:
    """All that it retains fits, 10,000 batches, whatever we are busy with: it drops what does not."""
    with (
        RawPublisher() as publisher,
        Listener(publisher.endpoint, publisher.replay_endpoint, hwm=100, start=0) as listener,
    ):
        publisher.await_subscriber()
        listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
        client, _ = publisher.request()
        publisher.router.setsockopt(
            zmq.SNDTIMEO, int(PATIENCE_S * 1000)
        )  # it waits where they drop
        for seq in range(10_000):
            answer = replay_answer(b"", seq, bytes(2000), delimited=True)
            publisher.router.send_multipart([client, *answer])
        publisher.end(client)
        steps = listen_until(listener, lambda steps: len(told(steps)) == 10_000)
        assert told(steps) == list(range(10_000))


def impatient(publisher: RawPublisher) -> Listener:
    """One that asks once, and not for long."""
    return Listener(publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=0.2, attempts=1)


def away(seconds: float) -> None:
    """Whoever listens does something else."""
    time.sleep(seconds)


def test_an_answer_that_waited_for_us_is_one() -> None:
    """Who was busy for longer than a replay may take has not been left without an answer."""
    with (
        RawPublisher() as publisher,
        impatient(publisher) as listener,
    ):
        publisher.await_subscriber()
        steps = listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
        client, _ = publisher.request()
        publisher.answer(client, 7)
        publisher.end(client)
        away(1.0)
        steps += listen_until(listener, lambda steps: channels(steps).count(Channel.ANSWER) == 2)
        assert Channel.OVER not in channels(steps)
        assert told(steps) == [7]


def test_whoever_stood_still_waits_once_more() -> None:
    """While a whole process is stopped no answer can even come; then it is as overdue as any."""
    with (
        RawPublisher() as publisher,
        impatient(publisher) as listener,
    ):
        publisher.await_subscriber()
        listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
        away(1.6)
        assert Channel.OVER not in channels(listener.turn())
        assert listener.unanswered_s > 1.6
        steps = listen_until(listener, lambda steps: Channel.OVER in channels(steps))
        assert not listener.follower.recovering and listener.unanswered_s == 0.0
        assert Channel.ANSWER not in channels(steps)


def test_who_never_comes_on_time_gives_up_too() -> None:
    """One that turns to it ever so rarely is not for ever at its first request."""
    with (
        RawPublisher() as publisher,
        impatient(publisher) as listener,
    ):
        publisher.await_subscriber()
        listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
        turns = []
        for _ in range(2):
            away(1.6)
            turns.append(channels(listener.turn()))
        assert [Channel.OVER in turn for turn in turns] == [False, True]


def test_what_was_missed_while_away_may_be_our_own_loss() -> None:
    """For as long as it takes to catch up, and a little; a recorder has it in its capture."""
    with RawPublisher() as publisher, Listener(publisher.endpoint) as listener:
        publisher.await_subscriber()
        publisher.live(0, payload=b"x")
        steps = listen_until(listener, lambda steps: told(steps) == [0])
        steps += listen_until(listener, lambda _: not listener.follower.behind)
        away(1.6)
        publisher.live(5, payload=b"x")
        assert listener.sockets[-1].poll(int(PATIENCE_S * 1000))
        steps = listen_until(listener, lambda steps: told(steps) == [5])
        assert listener.follower.behind
        assert [step.message.channel for step in steps] == [Channel.BEHIND, Channel.LIVE]
        steps = listen_until(listener, lambda steps: Channel.ABREAST in paces(steps))
        assert not listener.follower.behind


def test_answers_of_another_topic_are_not_told() -> None:
    """A topic filters what is replayed as it does what comes live."""
    with (
        RawPublisher() as publisher,
        Listener(
            publisher.endpoint, publisher.replay_endpoint, topic="kv@a", attempts=1
        ) as listener,
    ):
        publisher.await_subscriber()
        listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
        client, _ = publisher.request()
        other = replay_answer(b"kv@b", 7, b"x", delimited=True)
        publisher.router.send_multipart([client, *other])
        steps = listen_until(listener, lambda steps: Channel.ANSWER in channels(steps))
        assert told(steps) == [] and not listener.follower.recovering
        (malformed,) = (a for step in steps for a in step.arrivals)
        assert isinstance(malformed, Malformed) and "'kv@b'" in malformed.reason


def test_a_refused_key_is_said(tmp_path: Path) -> None:
    """A publisher that speaks no CURVE to one that does, and the other way round."""
    public, secret = write_keys(tmp_path, "publisher")
    own = read_secret_key("", write_keys(tmp_path, "client")[1])
    context = zmq.Context[zmq.Socket[bytes]]()
    with context.socket(zmq.XPUB) as guarded, RawPublisher() as plain:
        guarded.setsockopt(zmq.LINGER, 0)
        guarded.curve_server = True
        guarded.curve_secretkey = read_secret_key("", secret)[1].encode()
        endpoint = guarded.bind(LOOPBACK).addr
        key = read_public_key("", public)
        with Listener(endpoint, server_key=key, client_keys=own) as listener:
            steps = listen_until(listener, lambda steps: Channel.CONNECTED in channels(steps))
            assert Channel.REFUSED not in channels(steps)
        other_way_round = Listener(plain.endpoint, server_key=key, client_keys=own)
        for refused in (other_way_round, Listener(endpoint)):
            with refused as listener:  # by whom may hang up before it has said why
                steps = listen_until(
                    listener,
                    lambda steps: Channel.REFUSED in channels(steps) or len(channels(steps)) > 2,
                )
                assert not listener.connected
                assert set(channels(steps)) <= {Channel.REFUSED, Channel.DISCONNECTED}
    context.term()


def test_a_publisher_in_the_place_of_another_socket_is_found() -> None:
    """Whoever listened at its address before: libzmq gives up at a socket of another kind."""
    with RawPublisher() as publisher:
        endpoint = publisher.replay_endpoint
        with Listener(endpoint) as listener:
            listen_until(listener, lambda steps: Channel.DISCONNECTED in channels(steps))
            publisher.publish_at_the_replay_endpoint()
            listen_until(listener, lambda _: bool(publisher.pub.poll(0)))
            publisher.await_subscriber()
            publisher.live(3)
            listen_until(listener, lambda steps: told(steps) == [3])


def test_a_publisher_after_nonsense_is_found() -> None:
    """After a good handshake with who is no publisher all the same: libzmq gives up at that, too."""
    with socket.create_server(("127.0.0.1", *free_ports(1))) as server, RawPublisher() as publisher:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with Listener(endpoint) as listener:
            stranger, _ = server.accept()
            ready = b"\5READY\x0bSocket-Type\0\0\0\3PUB"
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f\3\0NULL".ljust(55, b"\0"))
            stranger.sendall(bytes((4, len(ready))) + ready)
            listen_until(listener, lambda steps: Channel.CONNECTED in channels(steps))
            server.close()
            stranger.sendall(b"\xff" * 2000)
            listen_until(listener, lambda steps: Channel.DISCONNECTED in channels(steps))
            stranger.close()
            publisher.publish_at(endpoint)
            listen_until(listener, lambda _: bool(publisher.pub.poll(0)))
            publisher.await_subscriber()
            publisher.live(3)
            listen_until(listener, lambda steps: told(steps) == [3])


def test_nonsense_costs_itself() -> None:
    """Messages of any frames are told as what they are."""
    odd: list[list[bytes]] = [
        [b""],
        [b"", b"", b"", b""],
        [b"t", bytes(7), b"x"],
        [b"", b"\xff" * 8, b""],
    ]
    with RawPublisher() as publisher, Listener(publisher.endpoint) as listener:
        publisher.await_subscriber()
        for frames in odd:
            publisher.pub.send_multipart(frames)
        publisher.live(0, payload=b"x")
        steps = listen_until(listener, lambda steps: told(steps) == [0])
        got = [
            a.message.frames for step in steps for a in step.arrivals if isinstance(a, Malformed)
        ]
        assert got == odd


def test_each_step_is_noted_in_its_order() -> None:
    """Connected, asked, answered, over: what a recorder needs to show it again."""
    with (
        RawPublisher() as publisher,
        Listener(publisher.endpoint, publisher.replay_endpoint) as listener,
    ):
        publisher.await_subscriber()
        steps = listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
        client, _ = publisher.request()
        publisher.answer(client, 7)
        publisher.end(client)
        steps += listen_until(listener, lambda steps: channels(steps).count(Channel.ANSWER) == 2)
        publisher.live(8, payload=b"x")
        steps += listen_until(listener, lambda steps: told(steps) == [8])
        assert channels(steps) == [
            Channel.CONNECTED,
            Channel.ASKED,
            Channel.ANSWER,
            Channel.ANSWER,
            Channel.LIVE,
        ]
        assert steps[1].message.frames == replay_request(JOIN)
        assert told(steps) == [7, 8]


@pytest.mark.parametrize("start", [None, 3])
def test_where_to_start(start: int | None) -> None:
    """Nothing is asked, or what follows a seq."""
    with (
        RawPublisher() as publisher,
        Listener(publisher.endpoint, publisher.replay_endpoint, start=start) as listener,
    ):
        publisher.await_subscriber()
        if start is None:
            publisher.live(3, payload=b"x")
            steps = listen_until(listener, lambda steps: told(steps) == [3])
            assert Channel.ASKED not in channels(steps)
        else:
            listen_until(listener, lambda steps: Channel.ASKED in channels(steps))
            assert publisher.request()[1] == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_says_which_ip_is_spoken(host: str) -> None:
    """To a host that has both, IPv6 is not spoken where it was not asked for."""
    endpoint, replay_endpoint = (f"tcp://{host}:{port}" for port in free_ports(2))
    with Listener(endpoint, replay_endpoint) as listener:
        listener._ask(0)
        for socket in (listener._sub, listener._dealer):
            assert socket is not None
            assert socket.getsockopt(zmq.IPV6) == int("[" in host)
