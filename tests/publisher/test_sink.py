"""publisher.sidecar.sink: one output's sockets, where they are, and when a heartbeat is due."""

from __future__ import annotations

import contextlib
import socket as unix
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zmq
from ports_rig import free_endpoints
from publisher_rig import LOOPBACK, PATIENCE_S, Socket, short_folder

from kvevents import AllBlocksCleared, BlockStored, Event, StorageMedium, decode_batch
from kvevents.frames import Frame, parse_live
from kvevents.speller import Speller
from kvevents.view import View
from publisher.config.checks import ConfigError
from publisher.config.sidecar_config import SinkConfig, WorkerInfo
from publisher.link.messages import Bound
from publisher.sidecar.sink import Sink, SinkError
from publisher.stream.output import Output

pytestmark = pytest.mark.integration


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context[Socket]() as context:
        yield context


WORKER = WorkerInfo(block_size=4, dp_rank=3, model="m", worker_id="w")


def output_of(config: SinkConfig) -> Output:
    """A stream that no journal keeps."""
    return Output(
        0,
        config.name,
        View(config.spelling),
        Speller(config.spelling, WORKER.dp_rank),
        lambda _: None,
        lambda: 77.0,
        max_batches=config.buffer_steps,
        max_bytes=config.buffer_bytes,
    )


@contextlib.contextmanager
def open_sink(
    context: zmq.Context[Socket],
    *,
    facts: Mapping[str, str] | None = None,
    before: Bound | None = None,
    subscriber_timeout_s: float = 30.0,
    **settings: Any,
) -> Iterator[Sink]:
    defaults = {"endpoint": LOOPBACK, "replay_endpoint": None, "add_dp_rank": False}
    config = SinkConfig(**defaults | settings)
    sink = Sink(
        context,
        config,
        output_of(config),
        WORKER,
        facts or {},
        before=before,
        subscriber_timeout_s=subscriber_timeout_s,
    )
    try:
        yield sink
    finally:
        sink.close(linger_s=0)


def subscribers(sink: Sink) -> int:
    return sink.status.subscribers


def publish(sink: Sink, *events: Event, ts: float = 1.0, now: float = 0.0) -> int:
    """Send a batch; returns its seq."""
    frame = sink.output.own(ts, list(events))
    sink.send(frame, now)
    return frame.seq


@contextlib.contextmanager
def subscribed(context: zmq.Context[Socket], sink: Sink, *, hwm: int = 0) -> Iterator[Socket]:
    """A subscriber whose subscription has arrived."""
    with context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.RCVHWM, hwm)
        if hwm:
            sub.setsockopt(zmq.RCVBUF, 4096)
        sub.setsockopt(zmq.IPV6, 1)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        before = sink.status.subscribers
        sub.connect(sink.bound.endpoint)
        assert sink.pub.poll(int(PATIENCE_S * 1000))
        sink.take_subscriptions(0.0)
        assert sink.status.subscribers == before + 1
        yield sub


def receive(sub: Socket) -> Frame:
    assert sub.poll(int(PATIENCE_S * 1000))
    return parse_live(sub.recv_multipart())


# ---------------------------------------------------------------------------------------- binding


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_a_taken_port_is_named(context: zmq.Context[Socket], key: str) -> None:
    """SinkError names the key and the endpoint, and leaves no socket open: the context can end."""
    with open_sink(context) as sink:
        taken = sink.bound.endpoint
        with (
            pytest.raises(SinkError, match=rf"^{key}: {taken} cannot be bound: .*in use"),
            open_sink(context, **dict[str, Any]({key: taken})),
        ):
            pass


def once_bound() -> Bound:
    """Where a sink was that is gone: its context has ended, and with it every socket."""
    with zmq.Context[Socket]() as context, open_sink(context, replay_endpoint=LOOPBACK) as sink:
        return sink.bound


def test_the_rank_is_added_to_ports(context: zmq.Context[Socket]) -> None:
    """Rank 3 binds both sockets three above what is configured, and dials three above too; a path gets
    the rank in its name.
    """
    free = once_bound()
    pub, replay = _port(free.endpoint), _port(str(free.replay_endpoint))
    configured: dict[str, Any] = {
        "endpoint": f"tcp://127.0.0.1:{pub - 3}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay - 3}",
    }
    with open_sink(context, add_dp_rank=True, **configured) as sink:
        assert sink.bound == free
    target = configured["endpoint"]
    with open_sink(context, add_dp_rank=True, mode="connect", endpoint=target) as sink:
        assert sink.status.endpoints == (f"tcp://127.0.0.1:{pub}",)
    with (
        short_folder() as folder,
        open_sink(context, add_dp_rank=True, endpoint=f"ipc://{folder}/pub") as sink,
    ):
        assert sink.bound.endpoint == f"ipc://{folder}/pub_dp3"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_free_port_is_the_one_it_had_before(context: zmq.Context[Socket]) -> None:
    """Where any port would do, an earlier run's is taken again, unless someone has it by now."""
    before = once_bound()
    with open_sink(context, replay_endpoint=LOOPBACK, before=before) as again:
        assert again.bound == before
        with open_sink(context, replay_endpoint=LOOPBACK, before=before) as other:
            assert {other.bound.endpoint, other.bound.replay_endpoint}.isdisjoint(
                {before.endpoint, before.replay_endpoint}
            )


def test_the_topic_says_what_was_asked(context: zmq.Context[Socket]) -> None:
    """The port that was bound, the worker and the pod; what nobody knows is refused, with no socket
    left open.
    """
    topic = "kv@{pod_ip}:{port}-{worker_id}-{dp_rank}@{model}"
    with (
        open_sink(context, topic=topic, facts={"pod_ip": "10.0.0.7"}) as sink,
        subscribed(context, sink) as sub,
    ):
        publish(sink)
        port = _port(sink.bound.endpoint)
        assert receive(sub).topic == f"kv@10.0.0.7:{port}-w-3@m".encode()
    with pytest.raises(ConfigError, match=r"^topic: .*pod_ip"), open_sink(context, topic=topic):
        pass


def test_a_bound_port_is_read_back(context: zmq.Context[Socket]) -> None:
    """Port 0 becomes the port that the system chose, a different one for each socket."""
    with open_sink(context, replay_endpoint="tcp://127.0.0.1:*") as sink:
        ports = [
            int(str(bound).rpartition(":")[2])
            for bound in (sink.bound.endpoint, sink.bound.replay_endpoint)
        ]
        assert all(ports)
        assert len(set(ports)) == 2


def test_ipc_is_bound_and_given_back(context: zmq.Context[Socket]) -> None:
    """An ipc path works, a socket left behind by a dead publisher is no obstacle, and closing removes
    it.
    """
    with short_folder() as folder:
        path = folder / "pub"
        for _ in range(2):
            with open_sink(context, endpoint=f"ipc://{path}") as sink:
                assert sink.bound.endpoint == f"ipc://{path}"
                with subscribed(context, sink) as sub:
                    publish(sink)
                    assert receive(sub).seq == 0
            _leave_a_dead_socket(path)


def _leave_a_dead_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with unix.socket(unix.AF_UNIX) as dead:
        dead.bind(str(path))


def test_ipc_takes_no_path_from_anyone(context: zmq.Context[Socket]) -> None:
    """A path where another publisher listens is in use, and one where a file lies stays that file:
    ZeroMQ by itself would remove either.
    """
    with short_folder() as folder:
        precious = folder / "precious"
        precious.write_text("data")
        with open_sink(context, endpoint=f"ipc://{folder}/pub") as sink:
            for path in (folder / "pub", precious):
                with (
                    pytest.raises(SinkError, match=rf"^endpoint: ipc://{path} cannot be bound"),
                    open_sink(context, endpoint=f"ipc://{path}"),
                ):
                    pass
            with subscribed(context, sink) as sub:  # it is still ours
                publish(sink)
                assert receive(sub).seq == 0
        assert precious.read_text() == "data"


def test_ipv6_is_bound(context: zmq.Context[Socket]) -> None:
    """A bracketed address binds, and the bound endpoint can be connected to (case 96)."""
    try:
        with open_sink(context, endpoint="tcp://[::1]:0") as sink, subscribed(context, sink) as sub:
            publish(sink)
            assert receive(sub).seq == 0
    except SinkError as error:
        pytest.skip(f"no IPv6 here: {error}")


# ------------------------------------------------------------------------------------- publishing


def test_seqs_count_from_0_in_three_frames(context: zmq.Context[Socket]) -> None:
    """Each batch has topic, seq and payload, and the next seq; its ts and rank are those told. What was
    sent is counted.
    """
    with open_sink(context, topic="kv") as sink, subscribed(context, sink) as sub:
        for number in range(3):
            assert publish(sink, AllBlocksCleared(), ts=number + 0.25) == number
        for number in range(3):
            frame = receive(sub)
            batch = decode_batch(frame.payload).batch
            assert (frame.topic, frame.seq, batch.ts) == (b"kv", number, number + 0.25)
            assert (batch.events, batch.dp_rank) == ([AllBlocksCleared()], 3)
        sink.update_status()
        assert (sink.status.batches, sink.status.next_seq, sink.status.oldest_seq) == (3, 3, 0)
        assert sink.status.published.events["cleared", ""] == 3


def test_a_heartbeat_is_due_after_a_silence(context: zmq.Context[Socket]) -> None:
    """`heartbeat_s` after the last batch, or after it was first asked; each batch puts it off."""
    with open_sink(context, heartbeat_s=5.0) as sink:
        assert sink.heartbeat_at(100.0) == 105.0
        publish(sink, AllBlocksCleared(), now=103.0)
        assert sink.heartbeat_at(106.0) == 108.0
        publish(sink, now=108.0)
        assert sink.heartbeat_at(108.0) == sink.heartbeat_at(112.9) == 113.0


def test_subscribers_are_counted(context: zmq.Context[Socket]) -> None:
    """Each that comes counts one, also with a topic that another has, and each that goes, one less."""
    with open_sink(context) as sink:
        with subscribed(context, sink), subscribed(context, sink):
            assert sink.status.subscribers == 2
        while sink.status.subscribers:
            assert sink.pub.poll(int(PATIENCE_S * 1000))
            sink.take_subscriptions(0.0)


def test_joiners_have_the_state_told_now_and_then(context: zmq.Context[Socket]) -> None:
    """Invariant 23: all others hear it too, so whoever comes again and again has to wait."""
    with open_sink(context, dialect="aibrix") as sink, subscribed(context, sink):
        assert sink.tell_at() == 0.0
        sink.note_told(0.0)
        assert sink.tell_at() == float("inf")
        with subscribed(context, sink):  # beside the first, whose end would come at any time
            assert sink.tell_at() == 10.0


def test_subscriptions_are_taken_a_bounded_number_a_turn(context: zmq.Context[Socket]) -> None:
    """Someone who subscribes without end does not keep the sink from its other work."""
    with open_sink(context) as sink, context.socket(zmq.XSUB) as flood:
        flood.setsockopt(zmq.LINGER, 0)
        flood.setsockopt(zmq.SNDHWM, 0)
        flood.connect(sink.bound.endpoint)
        for number in range(20_000):
            flood.send(b"\1%d" % number)
        turns: list[int] = []
        while sum(turns) < 20_000:
            before = sink.status.subscribers
            assert sink.pub.poll(int(PATIENCE_S * 1000))
            sink.take_subscriptions(0.0)
            turns.append(sink.status.subscribers - before)
        assert max(turns) <= 1000


@pytest.mark.parametrize("name", ["pub", "router"])
def test_a_message_too_large_is_not_taken(context: zmq.Context[Socket], name: str) -> None:
    """Invariant 31: subscriptions and requests are short; whoever sends a megabyte is cut off, and the
    sink goes on. As a subscription it would overflow the stack of libzmq.
    """
    with open_sink(context, replay_endpoint=LOOPBACK) as sink:
        assert sink.router is not None
        ours, kind = (sink.pub, b"SUB") if name == "pub" else (sink.router, b"DEALER")
        address = ours.getsockopt_string(zmq.LAST_ENDPOINT)
        with zmtp_peer(int(address.rpartition(":")[2]), kind) as peer, contextlib.suppress(OSError):
            peer.sendall(b"\x02" + (1_000_000).to_bytes(8, "big") + b"\1" * 1_000_000)
            while peer.recv(4096):
                pass
        assert ours.poll(0) == 0
        with subscribed(context, sink) as sub:
            publish(sink)
            assert receive(sub).seq == 0


@contextlib.contextmanager
def zmtp_peer(port: int, kind: bytes) -> Iterator[unix.socket]:
    """A bare TCP connection that has shaken hands like a ZeroMQ socket of this kind."""
    with unix.create_connection(("127.0.0.1", port), PATIENCE_S) as peer:
        peer.sendall(b"\xff" + b"\0" * 8 + b"\x7f\3\0NULL".ljust(55, b"\0"))
        ready = b"\5READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        peer.sendall(bytes((4, len(ready))) + ready)
        with peer.makefile("rb") as replies:
            replies.read(64)
            replies.read(replies.read(2)[1])
        yield peer


def test_a_subscriber_that_does_not_read_loses_and_can_see_it(
    context: zmq.Context[Socket],
) -> None:
    """Case 72: publishing to a full queue neither waits nor fails, the log stays within its bound, and
    what was lost shows as a gap before the next batch that arrives.
    """
    tokens = list(range(8192))
    with (
        open_sink(context, hwm=5, buffer_steps=3) as sink,
        subscribed(context, sink, hwm=1) as sub,
    ):
        for number in range(400):
            stored = BlockStored([number], None, tokens, 8192, medium=StorageMedium.GPU)
            publish(sink, stored, now=float(number))
        assert 1 <= sink.status.overflows < 400
        seqs = [receive(sub).seq]
        while seqs[-1] + 1 == len(seqs):
            if not sub.poll(100):  # all that was queued is read: let the next one show the loss
                publish(sink, now=1000.0)
            seqs.append(receive(sub).seq)
        assert seqs[:-1] == list(range(len(seqs) - 1))
        assert seqs[-1] > len(seqs) - 1


def test_a_full_queue_is_one_subscribers_alone(context: zmq.Context[Socket]) -> None:
    """Each time that it has become full is counted; those who read get every batch."""
    with (
        open_sink(context, hwm=100) as sink,
        subscribed(context, sink, hwm=1) as slow,
        subscribed(context, sink) as fast,
    ):
        tokens = list(range(8192))
        for _ in range(2):
            seqs, before = [], sink.status.overflows
            for _ in range(400):
                stored = BlockStored([1], None, tokens, 8192, medium=StorageMedium.GPU)
                seqs.append(publish(sink, stored))
                assert receive(fast).seq == seqs[-1]
            assert before < sink.status.overflows < before + 400
            caught_up = False
            while not caught_up:  # or its queue would not become full once more
                while slow.poll(200):
                    receive(slow)
                seq = publish(sink)
                assert receive(fast).seq == seq
                caught_up = bool(slow.poll(200)) and receive(slow).seq == seq


def test_what_a_router_does_not_come_back_for_is_not_kept(context: zmq.Context[Socket]) -> None:
    """A sink that connects: with the connection its queue goes, and it counts as one that has left."""
    tokens = list(range(8192))
    (endpoint,) = free_endpoints(1)
    with open_sink(context, mode="connect", endpoint=endpoint, hwm=100_000) as sink:
        for _ in range(2):
            with context.socket(zmq.SUB) as router:
                router.setsockopt(zmq.LINGER, 0)
                router.setsockopt(zmq.RCVHWM, 1)
                router.subscribe(b"")
                router.bind(endpoint)
                await_subscribers(sink, 1, router)
                for _ in range(200):
                    publish(sink, BlockStored([1], None, tokens, 8192, medium=StorageMedium.GPU))
            await_subscribers(sink, 0)
        with context.socket(zmq.SUB) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.subscribe(b"")
            router.bind(endpoint)
            await_subscribers(sink, 1, router)
            seq = publish(sink)
            assert receive(router).seq == seq


def await_subscribers(sink: Sink, count: int, router: Socket | None = None) -> None:
    """A `router` that has bound sees only when it is asked that somebody has come."""
    deadline = time.monotonic() + PATIENCE_S
    while subscribers(sink) != count:
        assert time.monotonic() < deadline
        if router is not None:
            router.poll(0)
        sink.pub.poll(20)
        sink.take_subscriptions(0.0)


def test_who_takes_nothing_for_long_is_disconnected(context: zmq.Context[Socket]) -> None:
    """What was queued for it goes with it, and it comes again once it reads."""
    with (
        open_sink(context, subscriber_timeout_s=1.0) as sink,
        subscribed(context, sink, hwm=1) as sub,
    ):
        stored = BlockStored([1], None, list(range(8192)), 8192, medium=StorageMedium.GPU)
        deadline, sent = time.monotonic() + PATIENCE_S, 0
        while subscribers(sink):
            sent = publish(sink, stored)
            assert time.monotonic() < deadline
            sink.pub.poll(10)
            sink.take_subscriptions(0.0)
        assert sink.status.overflows == 0
        seqs = []
        while sub.poll(200):
            seqs.append(receive(sub).seq)
        assert len(seqs) < sent
        assert sink.pub.poll(int(PATIENCE_S * 1000))
        sink.take_subscriptions(0.0)
        assert subscribers(sink) == 1
