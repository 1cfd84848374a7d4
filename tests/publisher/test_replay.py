"""publisher.sidecar.replay on a real ROUTER: every request is answered up to END, and nobody waits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_rig import LOOPBACK, PATIENCE_S, Socket

from kvevents import AllBlocksCleared
from kvevents.dialect import Dialect
from kvevents.frames import END, Frame, parse_replay_answer, replay_request
from kvevents.speller import Speller
from kvevents.view import View
from publisher.config.sidecar_config import SinkConfig, WorkerInfo
from publisher.sidecar.replay import ReplayServer
from publisher.sidecar.sink import Sink
from publisher.stream.output import Output

pytestmark = pytest.mark.integration

TOPIC = b"kv"
Answers = Iterator[tuple[int, bytes]]


def batches(count: int, size: int = 10) -> Callable[[int], Answers]:
    """A log of `count` batches."""
    return lambda start: ((seq, b"%d" % seq * size) for seq in range(start, count))


class Rig:
    """A server and its clients in one thread; a turn takes a millisecond of the server's time."""

    def __init__(
        self,
        replay: Callable[[int], Answers],
        *,
        timeout_s: float = 10.0,
        hwm: int = 1000,
        oldest: int = 0,
    ) -> None:
        self._context = zmq.Context[Socket]()
        self._sockets: list[Socket] = []
        self.router = self._context.socket(zmq.ROUTER)
        self._sockets.append(self.router)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.SNDHWM, hwm)
        self.address = self.router.bind(LOOPBACK).addr
        self.server = ReplayServer(
            self.router, TOPIC, replay, lambda start: start >= oldest, timeout_s=timeout_s
        )
        self.now = 0.0

    def client(self, kind: int = zmq.DEALER, *, small: bool = False) -> Socket:
        """A connected client; a `small` one has next to no buffers."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        if small:
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.RCVBUF, 4096)
        socket.connect(self.address)
        return socket

    def drive(self, done: Callable[[], bool]) -> None:
        """Turn as the sidecar does until `done`."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, self.server.stats
            self.router.poll(0 if self.server.busy else 1)
            self.now += 0.001
            self.server.take_requests()
            self.server.serve(self.now)

    def answers(self, client: Socket) -> list[list[bytes]]:
        """Drive until the client has an END; all it got up to there."""
        got: list[list[bytes]] = []
        self.drive(lambda: has_ended(got, client))
        return got

    def __enter__(self) -> Rig:
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


def read(client: Socket) -> Iterator[list[bytes]]:
    """What the client has received."""
    while True:
        try:
            yield client.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def has_ended(got: list[list[bytes]], client: Socket) -> bool:
    """Read into `got` what has come; whether END is among it."""
    for frames in read(client):
        got.append(frames)
        if parse_replay_answer(frames) == END:
            return True
    return False


def seqs_of(got: list[list[bytes]]) -> list[int]:
    return [one.seq for frames in got if isinstance(one := parse_replay_answer(frames), Frame)]


def eight(number: int) -> bytes:
    return number.to_bytes(8, "big")


END_FRAMES = [b"", b"\xff" * 8, b""]

# -------------------------------------------------------------------------------- request shapes


@pytest.mark.parametrize(
    ("envelope", "frames"),
    [([b""], [b"", eight(2)]), ([], [eight(2)])],
    ids=["delimited", "bare"],
)
def test_a_dealer_is_answered_in_the_shape_it_asked_in(
    envelope: list[bytes], frames: list[bytes]
) -> None:
    """With a delimiter or without: every batch from the seq asked for, then END, in the same envelope."""
    with Rig(batches(4)) as rig:
        client = rig.client()
        client.send_multipart(frames)
        assert rig.answers(client) == [
            [*envelope, TOPIC, eight(2), b"2" * 10],
            [*envelope, TOPIC, eight(3), b"3" * 10],
            [*envelope, *END_FRAMES],
        ]
        assert rig.server.stats.batches == 2
        assert (rig.server.stats.requests, rig.server.stats.answered) == (1, 1)


def test_a_req_gets_the_first_batch() -> None:
    """A REQ socket can take one answer only, and gets the first; the server goes on."""
    with Rig(batches(4)) as rig:
        client = rig.client(zmq.REQ)
        client.send(eight(1))
        rig.drive(lambda: bool(client.poll(0)))
        assert client.recv_multipart() == [TOPIC, eight(1), b"1" * 10]
        other = rig.client()
        other.send_multipart(replay_request(0))
        assert seqs_of(rig.answers(other)) == [0, 1, 2, 3]


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.lists(
            st.one_of(st.just(b""), st.binary(max_size=12), st.integers(0, 9).map(eight)),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_request_is_answered_up_to_end(requests: list[list[bytes]]) -> None:
    """Malformed or not, each request has an END as its last answer, delimited as it was; one that
    cannot be read has nothing else, and is counted.
    """
    with Rig(batches(3)) as rig:
        client, malformed = rig.client(), 0
        for request in requests:
            client.send_multipart(request)
            got = rig.answers(client)
            delimited = request[0] == b"" and request != [b""]
            is_request = len(request) == 1 + delimited and len(request[-1]) == 8
            malformed += not is_request
            start = int.from_bytes(request[-1], "big") if is_request else 3
            assert seqs_of(got) == list(range(start, 3))
            if request == [b""]:  # is it a delimiter, or a seq too short? Either way, END
                assert got[-1] in (END_FRAMES, [b"", *END_FRAMES])
            else:
                assert got[-1] == [b""] * delimited + END_FRAMES
        assert rig.server.stats.malformed == malformed
        assert rig.server.stats.requests == len(requests)


def test_beyond_the_newest_there_is_only_end() -> None:
    """A start that was never published, up to the largest 8 bytes there are, is answered with END."""
    with Rig(batches(3)) as rig:
        client = rig.client()
        for start in (3, 4, 2**63, 2**64 - 1):
            client.send_multipart(replay_request(start))
            assert rig.answers(client) == [[b"", *END_FRAMES]]


def test_answers_with_a_snapshot_are_counted() -> None:
    """Of three answers, the two that reach back beyond what is retained have the state in front."""
    with Rig(batches(9), oldest=5) as rig:
        client = rig.client()
        for start in (0, 4, 5):
            client.send_multipart(replay_request(start))
            rig.answers(client)
        stats = rig.server.stats
        assert (stats.answered, stats.snapshots, stats.dropped) == (3, 2, 0)


def test_replayed_frames_are_the_live_frames() -> None:
    """Case 56: byte for byte, topic and seq and payload, behind the envelope."""
    context = zmq.Context[Socket]()
    config = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, topic="kv@{worker_id}@{model}")
    output = Output(
        *(0, "sink0", View(Dialect()), Speller(Dialect(), 2), lambda _: None, lambda: 5.0),
        max_batches=100,
        max_bytes=1 << 20,
    )
    sink = Sink(context, config, output, WorkerInfo(block_size=4, worker_id="w", model="m"), {})
    server = sink.serve_replays(10.0)
    assert server is not None and sink.router is not None
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(sink.bound.endpoint)
        assert sink.pub.poll(int(PATIENCE_S * 1000))
        for number in range(5):
            sink.send(output.own(number + 0.5, [AllBlocksCleared()] * number), 0.0)
        live = []
        for _ in range(5):
            assert sub.poll(int(PATIENCE_S * 1000))
            live.append(sub.recv_multipart())
        dealer.connect(str(sink.bound.replay_endpoint))
        dealer.send_multipart(replay_request(0))
        assert sink.router.poll(int(PATIENCE_S * 1000))
        server.take_requests()
        while server.busy:  # a turn may end after any message
            server.serve(0.0)
        replayed = []
        for _ in range(6):
            assert dealer.poll(int(PATIENCE_S * 1000))
            replayed.append(dealer.recv_multipart())
        assert [frames[:2] for frames in live] == [[b"kv@w@m", eight(seq)] for seq in range(5)]
        assert replayed == [*([b"", *frames] for frames in live), [b"", *END_FRAMES]]
    finally:
        sub.close(linger=0)
        dealer.close(linger=0)
        sink.close(linger_s=0)
        context.term()


# ------------------------------------------------------------------------------- slow and absent


def test_a_client_that_never_reads_delays_nobody() -> None:
    """One takes nothing; the other has all of 20,000 batches in order and END meanwhile. The first is
    dropped once it has taken nothing for the timeout, and not before.
    """
    with Rig(batches(20_000, size=200), timeout_s=1000.0) as rig:
        stuck = rig.client(small=True)
        stuck.send_multipart(replay_request(0))
        rig.drive(lambda: rig.server.stalled)
        reader = rig.client()
        reader.send_multipart(replay_request(0))
        got = rig.answers(reader)
        assert seqs_of(got) == list(range(20_000))
        assert got[-1] == [b"", *END_FRAMES]
        assert rig.server.stats.dropped == 0
        assert rig.server.stalled
        rig.now += 999.0
        rig.drive(lambda: not rig.server.busy)
        assert rig.server.stats.dropped == 0
        rig.now += 2.0
        rig.drive(lambda: rig.server.stats.dropped == 1)
        assert (rig.server.stalled, rig.server.busy) == (False, False)


def test_a_client_that_reads_slowly_gets_everything() -> None:
    """Case 58: of 3,072 batches none is lost to a full queue, and END comes last, however long it takes
    all in all: the timeout is for taking nothing.
    """
    with Rig(batches(3072, size=2000), timeout_s=20.0) as rig:
        client = rig.client(small=True)
        client.send_multipart(replay_request(0))
        rig.drive(lambda: rig.server.stalled)
        got: list[list[bytes]] = []
        while not (got and parse_replay_answer(got[-1]) == END):
            rig.drive(lambda: bool(client.poll(0)))
            got.append(client.recv_multipart())
            rig.now += 0.02
        assert seqs_of(got) == list(range(3072))
        assert rig.server.stats.dropped == 0


def test_a_client_that_leaves_is_dropped() -> None:
    """A replay without end ends when its client closes; the next client is served."""
    with Rig(lambda start: ((seq, b"x" * 1000) for seq in itertools.count(start))) as rig:
        client = rig.client()
        client.send_multipart(replay_request(0))
        rig.drive(lambda: bool(client.poll(0)))
        client.close(linger=0)
        rig.drive(lambda: rig.server.stats.dropped == 1)
        assert not rig.server.busy and not rig.server.stalled
        other = rig.client()
        other.send_multipart(replay_request(7))
        rig.drive(lambda: bool(other.poll(0)))
        assert seqs_of([other.recv_multipart()]) == [7]


@pytest.mark.parametrize("stuck", [False, True])
def test_asking_again_starts_again(stuck: bool) -> None:
    """The second request's answer is whole, and the first one's stops: there is one END, the last."""
    with Rig(batches(2000, size=10_000)) as rig:  # more than the kernel's buffers ever take
        client = rig.client(small=stuck)
        client.send_multipart(replay_request(0))
        rig.drive(lambda: rig.server.stalled if stuck else rig.server.stats.batches > 100)
        client.send_multipart(replay_request(1500))
        rig.drive(lambda: rig.server.stats.requests == 2)
        seqs = seqs_of(rig.answers(client))
        cut = len(seqs) - 500
        assert 0 < cut < 2000
        assert seqs == [*range(cut), *range(1500, 2000)]
        rig.drive(lambda: not rig.server.busy)
        assert not client.poll(0)
        assert (rig.server.stats.answered, rig.server.stats.dropped) == (1, 0)


def test_a_flood_of_requests_keeps_nobody_waiting() -> None:
    """Someone asks 3,000 times without reading; another's replay is done before those are read."""
    with Rig(batches(50)) as rig:
        flood, client = rig.client(), rig.client()
        for _ in range(3000):
            flood.send_multipart(replay_request(0))
        client.send_multipart(replay_request(0))
        assert seqs_of(rig.answers(client)) == list(range(50))


def test_many_clients_share_the_turns() -> None:
    """Twenty replays at once all come out whole, though only a few run at a time."""
    with Rig(batches(300)) as rig:
        clients = [rig.client() for _ in range(20)]
        for client in clients:
            client.send_multipart(replay_request(0))
        take(rig, 20)  # in whatever order
        rig.drive(lambda: rig.server.stats.answered > 0)
        assert sum(not client.poll(0) for client in clients) >= 5
        for client in clients:
            assert seqs_of(rig.answers(client)) == list(range(300))


def test_clients_that_do_not_read_are_bounded() -> None:
    """Invariant 25: of a hundred that ask and never read, a few dozen are kept waiting, and the rest are
    dropped; one that reads is served meanwhile.
    """
    with Rig(batches(400, size=20_000), hwm=4) as rig:
        deaf = [rig.client(small=True) for _ in range(100)]
        for client in deaf:
            client.send_multipart(replay_request(0))
        # Before, the one that reads may be the one that has taken nothing for longest.
        rig.drive(lambda: rig.server.stats.requests == 100 and not rig.server.busy)
        assert rig.server.stats.dropped >= 60
        client = rig.client()
        client.send_multipart(replay_request(0))
        assert seqs_of(rig.answers(client)) == list(range(400))


def take(rig: Rig, requests: int) -> None:
    """Until so many have come."""
    deadline = time.monotonic() + PATIENCE_S
    while rig.server.stats.requests < requests:
        assert time.monotonic() < deadline
        rig.router.poll(10)
        rig.server.take_requests()


def test_a_few_replays_run_and_the_others_wait() -> None:
    """Each that runs holds what it tells from; one that waits is a request and no more."""
    with Rig(batches(100_000)) as rig:
        rig.server._clock = lambda: 0.0  # a turn that ends by its bytes alone
        for _ in range(12):
            rig.client().send_multipart(replay_request(0))
        take(rig, 12)
        rig.server.serve(0.0)
        assert (len(rig.server._cursors), len(rig.server._waiting)) == (4, 8)


def test_of_a_request_of_many_frames_a_few_are_kept() -> None:
    """They are read to their end all the same, some at a time, and are no request."""
    with Rig(batches(1)) as rig:
        client = rig.client()
        client.send_multipart([b"x" * 1000] * 1000)
        assert rig.router.poll(int(PATIENCE_S * 1000))
        rig.server.take_requests()
        assert 0 < len(rig.server._frames) < 5
        take(rig, 1)
        assert rig.server.stats.malformed == 1 and rig.server._frames == []
