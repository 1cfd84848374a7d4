"""`kvevents play`: captures published again, as processes; and the parts that decide what is sent."""

from __future__ import annotations

import gzip
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import zmq
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    RawPublisher,
    insert,
    kvevents,
    make_cache,
    payload_of,
    short_folder,
    start_kvevents,
)

from kvevents import BlockIndex, BlockStored, StorageMedium
from kvevents.capture import CaptureHead, CaptureReader, capture_start, pack_message
from kvevents.follower import Follower, Step, Told
from kvevents.frames import (
    JOIN,
    live_frames,
    parse_replay_answer,
    replay_answer,
    replay_end,
    replay_request,
    reset_frames,
)
from kvevents.message import Channel, Message
from kvevents.reading import read
from publisher import SidecarConfig, SinkConfig, Subscriber, WorkerInfo, spawn
from publisher.tools.captures.history import History
from publisher.tools.captures.play import MAX_SPEED, Player, Sending, in_order, live_only, stretches
from publisher.tools.source import Capture

Told_ = tuple[Channel, list[bytes]]

S = 1_000_000_000
BOTH = ("--endpoint", LOOPBACK, "--replay-endpoint", LOOPBACK)


def batch(seq: int) -> bytes:
    """A payload of its own: one block, that only this batch stores."""
    return payload_of(BlockStored([seq + 1], None, [seq, 2, 3, 4], 4, medium=StorageMedium.GPU))


def live(seq: int, topic: bytes = b"") -> Told_:
    return Channel.LIVE, live_frames(topic, seq, batch(seq))


def asked(start: int) -> Told_:
    return Channel.ASKED, replay_request(start)


def answer(seq: int, *, topic: bytes | None = b"") -> Told_:
    return Channel.ANSWER, replay_answer(topic, seq, batch(seq), delimited=True)


END = Channel.ANSWER, replay_end(delimited=True)
CONNECTED: Told_ = Channel.CONNECTED, []

JOINED = [CONNECTED, asked(JOIN), answer(20), live(22), answer(21), answer(22), END]
"""A recorder that joins: the state is in 20..22, and 22 came live as well."""


def messages_of(told: Iterable[Told_], every_ns: int = 0) -> list[Message]:
    return [Message(n * every_ns, *one) for n, one in enumerate(told)]


def capture(file: Path, told: Iterable[Told_], *, replay: bool = True, every_ns: int = 0) -> Path:
    """A capture of these, `every_ns` apart."""
    head = CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2" if replay else None)
    records = [pack_message(*_fields(one)) for one in messages_of(told, every_ns)]
    file.write_bytes(capture_start(head) + b"".join(records))
    return file


def _fields(one: Message) -> tuple[int, Channel, list[bytes]]:
    return one.at_ns, one.channel, one.frames


def steps_of(told: Iterable[Told_]) -> tuple[Iterator[Step], Follower]:
    follower = Follower(can_replay=True, start=None)
    return (Step(one, follower.take(one)) for one in messages_of(told)), follower


@contextmanager
def playing(file: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str | None]]:
    """The command, once it is bound: the process, and its endpoints."""
    with start_kvevents("play", "play", str(file), *arguments) as process:
        assert process.stderr is not None
        told = [process.stderr.readline(), process.stderr.readline()]
        found = re.fullmatch(r"kvevents play: bound to (\S+?)(?:, replays at (\S+))?\n", told[-1])
        assert found is not None, told
        yield process, found[1], found[2]


@contextmanager
def subscribed(endpoint: str, topic: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """A plain SUB socket."""
    context = zmq.Context[zmq.Socket[bytes]]()
    with context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.RCVHWM, 0)
        sub.setsockopt(zmq.SUBSCRIBE, topic)
        sub.connect(endpoint)
        yield sub
    context.term()


def take(socket: zmq.Socket[bytes], count: int) -> list[list[bytes]]:
    """So many messages."""
    got: list[list[bytes]] = []
    while len(got) < count:
        assert socket.poll(int(PATIENCE_S * 1000)), got
        got.append(socket.recv_multipart())
    return got


def replay_of(endpoint: str, request: list[bytes]) -> list[list[bytes]]:
    """The answer to a request, with its end."""
    context = zmq.Context[zmq.Socket[bytes]]()
    got: list[list[bytes]] = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart(request)
        while not (got and got[-1][-1] == b""):
            got += take(dealer, 1)
    context.term()
    return got


def told_by(file: Path) -> list[tuple[int, bytes]]:
    """What a capture's follower delivers."""
    return [
        (one.seq, one.payload)
        for step in Capture(file).steps()
        for one in step.arrivals
        if isinstance(one, Told)
    ]


def come_to_by(file: Path) -> int | None:
    """The last seq that its follower has delivered, while a replay may be under way in it still."""
    capture, come = Capture(file), None
    for message in capture.messages():
        for one in capture.follower.take(message):
            come = one.seq if isinstance(one, Told) else come
    return come


def state_of(told: Sequence[tuple[int, bytes]]) -> object:
    """What a router believes that applied these."""
    index = BlockIndex()
    for seq, payload in told:
        index.apply(read(Told(seq, payload, replayed=False)).events)
    return index.resident


# ------------------------------------------------------------------------------------ what is sent


def test_a_stretch_ends_with_the_replay() -> None:
    """Messages without a hole are alone; from the first that shows one to the END they are together."""
    told = [*JOINED, live(23), live(26), asked(24), live(27), answer(24), answer(25), END, live(28)]
    steps, follower = steps_of(told)
    lengths = [len(one) for one in stretches(steps, lambda: follower)]
    assert lengths == [1, 6, 1, 6, 1]


def test_a_replay_without_an_end_is_a_stretch_with_one() -> None:
    """The rest of the capture, and at most 100,000 messages of it."""
    told = [CONNECTED, asked(JOIN), *[live(seq) for seq in range(100_000)]]
    steps, follower = steps_of(told)
    assert [len(one) for one in stretches(steps, lambda: follower)] == [1, 100_000, 1]


def test_with_a_replay_socket_what_came_live_is_sent() -> None:
    """Frame for frame, malformed or not."""
    told = [*JOINED, (Channel.LIVE, reset_frames(b"")), (Channel.LIVE, [b"x"]), (Channel.LIVE, [])]
    steps, _ = steps_of(told)
    assert [one.frames for one in live_only(steps)] == [live(22)[1], reset_frames(b""), [b"x"]]


def test_without_one_what_was_delivered_is_sent() -> None:
    """Replayed batches in their turn, each once, and malformed messages."""
    told = [*JOINED, live(23), live(26), asked(24), (Channel.LIVE, [b"x"])]
    told += [answer(24), answer(25), END]
    steps, _ = steps_of(told)
    assert [one.frames for one in in_order(steps, b"t")] == [
        *[live_frames(b"t", seq, batch(seq)) for seq in (20, 21, 22)],
        live(23)[1],
        [b"x"],
        *[live_frames(b"t", seq, batch(seq)) for seq in (24, 25)],
        live(26)[1],
    ]


def history_of(told: Iterable[Told_], max_batches: int = 10) -> History:
    history = History(max_batches)
    history.take(list(steps_of(told)[0]))
    return history


def seqs(history: History, start: int) -> list[int]:
    return [seq for seq, _ in history.replay(start)]


def test_join_is_answered_from_where_the_captures_was() -> None:
    """And any other start from there, or from what is behind it."""
    history = history_of([*JOINED, live(23)])
    assert seqs(history, JOIN) == seqs(history, 0) == [20, 21, 22, 23]
    assert (seqs(history, 22), seqs(history, 24)) == ([22, 23], [])


def test_an_engine_has_no_answer_to_join() -> None:
    """END alone, as it answered; from 0 it has all."""
    told = [CONNECTED, asked(JOIN), END, asked(0), answer(0), answer(1), END, live(2)]
    history = history_of(told)
    assert (seqs(history, JOIN), seqs(history, 0)) == ([], [0, 1, 2])


def test_the_state_is_kept_and_the_rest_is_bounded() -> None:
    """So many batches behind the answer that the capture begins with, and that answer."""
    history = history_of([*JOINED, *map(live, range(23, 100))], max_batches=5)
    assert seqs(history, JOIN) == [20, 21, 22, 95, 96, 97, 98, 99]


def test_what_is_kept_is_bounded_in_bytes() -> None:
    """256 MiB of each part, whatever the capture has."""
    history = History(1_000_000)
    big = bytes(64 << 20)
    for seq in range(12):
        history.take([Step(Message(0, Channel.LIVE, []), [Told(seq, big, replayed=seq < 6)])])
    assert sum(len(payload) for _, payload in history.replay(0)) <= 512 << 20
    assert seqs(history, 0)[-1] == 11


def test_a_new_run_or_a_new_state_is_all_there_is() -> None:
    """What was before a restart, or before another JOIN, is not replayed."""
    restarted = [*JOINED, live(3), asked(JOIN), answer(2), answer(3), END]
    assert seqs(history_of(restarted), JOIN) == [2, 3]
    rejoined = [*JOINED, live(23), asked(JOIN), answer(22), answer(23), END, live(24)]
    assert seqs(history_of(rejoined), 0) == [22, 23, 24]


def test_what_a_recorder_says_of_itself_is_not_played() -> None:
    """Nor what a later one says, on a channel that is not known: neither sent, nor replayed."""
    told = [(Channel.BEHIND, [b"x"]), *JOINED, (Channel.ABREAST, [b"y"]), live(23)]
    steps = list(steps_of(told)[0])
    assert [one.frames for one in live_only(steps)] == [live(22)[1], live(23)[1]]
    assert [one.frames for one in in_order(steps, b"")] == [live(seq)[1] for seq in range(20, 24)]
    assert seqs(history_of(told), JOIN) == [20, 21, 22, 23]


# ------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("ending", ["the end", signal.SIGINT, signal.SIGTERM])
def test_the_files_of_sockets_are_removed(tmp_path: Path, ending: str | signal.Signals) -> None:
    """Those that it made, however it ends short of a kill."""
    told = [live(0), live(1)]
    file = capture(tmp_path / "c", told, every_ns=0 if ending == "the end" else S * 3600)
    with short_folder() as folder:
        both = ("--endpoint", f"ipc://{folder}/a", "--replay-endpoint", f"ipc://{folder}/b")
        with playing(file, *both, "--stay", "0.01") as (process, endpoint, _):
            assert sorted(one.name for one in folder.iterdir()) == ["a", "b"]
            with subscribed(endpoint) as sub:
                take(sub, 1)
                if isinstance(ending, signal.Signals):
                    process.send_signal(ending)
                _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == (130 if isinstance(ending, signal.Signals) else 0), err
        assert list(folder.iterdir()) == []


def test_the_file_of_anothers_socket_is_left() -> None:
    """Whoever has put one in its place meanwhile keeps it."""
    with short_folder() as folder, RawPublisher() as other:
        with Player(f"ipc://{folder}/a", None, topic=None, history=History(1)):
            (folder / "a").unlink()
            (folder / "held").touch()  # so that the inode is another
            other.pub.bind(f"ipc://{folder}/a")
        assert (folder / "a").is_socket()


def test_frames_are_sent_as_they_came(tmp_path: Path) -> None:
    """Topics, seqs and payloads, malformed messages and seqs that go back; it says how many."""
    told = [
        live(5, b"a"),
        (Channel.LIVE, [b"odd"]),
        live(6, b"b"),
        (Channel.LIVE, [b"", b"", b"", b""]),
    ]
    told += [live(2), (Channel.LIVE, reset_frames(b"t")), (Channel.LIVE, [b"", bytes(8), b"\xc1"])]
    file = capture(tmp_path / "c", told, replay=False)
    with (
        playing(file, "--endpoint", LOOPBACK) as (process, endpoint, _),
        subscribed(endpoint) as sub,
    ):
        assert take(sub, len(told)) == [frames for _, frames in told]
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert re.fullmatch(r"kvevents play: 7 messages sent in \d+\.\d s\n", err)


def test_the_topic_can_be_another(tmp_path: Path) -> None:
    """Of what is live, and of replays; what has one frame only has no topic."""
    file = capture(tmp_path / "c", [*JOINED, live(23, b"a"), (Channel.LIVE, [b"odd"])])
    with playing(file, *BOTH, "--topic", "mine") as (_, endpoint, replay):
        with subscribed(endpoint) as sub:
            sent = take(sub, 3)
        assert [one[0] for one in sent] == [b"mine", b"mine", b"odd"]
        assert replay is not None
        replayed = replay_of(replay, replay_request(20))
    assert [one[1] for one in replayed] == [b"mine"] * 4 + [b""]


def test_time_passes_as_it_did(tmp_path: Path) -> None:
    """At the recorded speed a message is not sent before its time; faster, that much sooner."""
    file = capture(tmp_path / "c", [live(0), live(1), live(2)], replay=False, every_ns=S // 4)
    for speed, at_least in (("1", 0.45), ("2", 0.2)):
        with playing(file, "--endpoint", LOOPBACK, "--speed", speed) as (process, endpoint, _):
            began = time.monotonic()  # nothing is sent before anyone has subscribed
            with subscribed(endpoint) as sub:
                take(sub, 3)
            assert time.monotonic() - began >= at_least
            assert process.wait(timeout=PATIENCE_S) == 0


def test_as_fast_as_can_be_a_subscriber_is_waited_for(tmp_path: Path) -> None:
    """Days of a capture at once, and more than any queue holds, with nothing missing."""
    count = 40_000
    file = capture(
        tmp_path / "c", [live(seq) for seq in range(count)], replay=False, every_ns=S * 60
    )
    with playing(file, "--endpoint", LOOPBACK, "--speed", "max") as (process, endpoint, _):
        context = zmq.Context[zmq.Socket[bytes]]()
        with context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.RCVHWM, 100)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(endpoint)
            assert [one[1] for one in take(sub, count)] == [
                seq.to_bytes(8, "big") for seq in range(count)
            ]
        context.term()
        assert process.wait(timeout=PATIENCE_S) == 0


def test_who_reads_nothing_does_not_stall_it() -> None:
    """It is waited for once, for a second; then what does not fit is not sent to all, and counted."""
    history = History(1)
    with Player(LOOPBACK, None, topic=None, history=history) as player:
        context = zmq.Context[zmq.Socket[bytes]]()
        with context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.LINGER, 0)
            sub.setsockopt(zmq.RCVHWM, 10)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(player.endpoint)
            player.wait_for_subscribers(1)
            began = time.monotonic()
            frames = live_frames(b"", 0, bytes(4000))
            player.play((Sending(0, frames) for _ in range(16_000)), MAX_SPEED)
            assert time.monotonic() - began < PATIENCE_S
            assert player.sent == 16_000
            assert 0 < player.dropped < 6000
        context.term()


def test_a_replay_client_that_reads_nothing_does_not_stall_it(tmp_path: Path) -> None:
    """Live messages go on, and so do the replays of others."""
    big = bytes(200_000)
    answers = [(Channel.ANSWER, replay_answer(b"", n, big, delimited=True)) for n in range(300)]
    told = [CONNECTED, asked(JOIN), *answers, END, live(300), live(301)]
    file = capture(tmp_path / "c", told)
    context = zmq.Context[zmq.Socket[bytes]]()
    with (
        playing(file, *BOTH) as (_, endpoint, replay),
        context.socket(zmq.DEALER) as lazy,
        subscribed(endpoint) as sub,
    ):
        assert replay is not None
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.setsockopt(zmq.LINGER, 0)
        lazy.connect(replay)
        lazy.send_multipart(replay_request(0))
        assert lazy.poll(int(PATIENCE_S * 1000))
        assert take(sub, 2) == [live(300)[1], live(301)[1]]
        assert len(replay_of(replay, replay_request(JOIN))) == 303
    context.term()


@pytest.mark.parametrize("delimited", [True, False])
@pytest.mark.parametrize("start", [0, JOIN, 21, 99])
def test_replays_are_answered_as_the_wire_has_it(
    tmp_path: Path, start: int, delimited: bool
) -> None:
    """With or without the delimiter, byte for byte, END last; also before anyone has subscribed."""
    file = capture(tmp_path / "c", JOINED)
    request = replay_request(start) if delimited else replay_request(start)[1:]
    with playing(file, *BOTH) as (_, _, replay):
        assert replay is not None
        got = replay_of(replay, request)
    first = {0: 20, JOIN: 20, 21: 21, 99: 23}[start]
    assert got == [
        *[replay_answer(b"", n, batch(n), delimited=delimited) for n in range(first, 23)],
        replay_end(delimited=delimited),
    ]


def test_an_engines_answers_have_no_topic(tmp_path: Path) -> None:
    """Where the capture's had none, nor do these."""
    told = [CONNECTED, asked(JOIN), (Channel.ANSWER, replay_end(delimited=True, with_topic=False))]
    told += [asked(0), answer(0, topic=None), (Channel.ANSWER, told[-1][1]), live(1, b"t")]
    with playing(capture(tmp_path / "c", told), *BOTH) as (_, _, replay):
        assert replay is not None
        got = replay_of(replay, replay_request(0))
    assert got == [
        replay_answer(None, 0, batch(0), delimited=True),
        replay_end(delimited=True, with_topic=False),
    ]


def test_it_waits_for_as_many_as_it_is_told(tmp_path: Path) -> None:
    """Nothing is sent before the second has subscribed."""
    file = capture(tmp_path / "c", [live(0)], replay=False)
    with (
        playing(file, "--endpoint", LOOPBACK, "--wait", "2") as (process, endpoint, _),
        subscribed(endpoint) as one,
    ):
        assert not one.poll(300)
        with subscribed(endpoint) as two:
            assert take(one, 1) == take(two, 1) == [live(0)[1]]
        assert process.wait(timeout=PATIENCE_S) == 0


def test_it_need_not_wait(tmp_path: Path) -> None:
    """Nobody listens, and it ends."""
    file = capture(tmp_path / "c", [live(0)], replay=False)
    done = kvevents("play", str(file), "--endpoint", LOOPBACK, "--no-wait")
    assert done.returncode == 0 and "1 message sent" in done.stderr


def test_it_stays_for_replays_until_ctrl_c(tmp_path: Path) -> None:
    """Exit code 0: that is how it ends; or after so many seconds."""
    file = capture(tmp_path / "c", JOINED)
    with playing(file, *BOTH, "--no-wait") as (process, _, replay):
        assert process.stderr is not None and replay is not None
        assert "1 message sent" in process.stderr.readline()
        assert len(replay_of(replay, replay_request(0))) == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 0
    done = kvevents("play", str(file), *BOTH, "--no-wait", "--stay", "0.1")
    assert done.returncode == 0


def test_ctrl_c_in_the_midst(tmp_path: Path) -> None:
    """Exit code 130, and it says how far it came."""
    file = capture(tmp_path / "c", [live(0), live(1)], replay=False, every_ns=S * 3600)
    with (
        playing(file, "--endpoint", LOOPBACK) as (process, endpoint, _),
        subscribed(endpoint) as sub,
    ):
        take(sub, 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "1 message sent" in err and "Traceback" not in err


# --------------------------------------------------------------------------------------- a round trip


@contextmanager
def recording(file: Path, source: str) -> Iterator[Callable[[int], None]]:
    """A recorder; what is given waits until its follower has come to a seq."""

    def come_to(seq: int) -> None:
        deadline, pause = time.monotonic() + PATIENCE_S, Event()
        while not (file.exists() and (come := come_to_by(file)) is not None and come >= seq):
            assert time.monotonic() < deadline, seq
            pause.wait(0.02)

    with start_kvevents("record", "record", "-w", str(file), source) as process:
        yield come_to
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 0


def frames_of(file: Path) -> list[list[bytes]]:
    """What came live."""
    messages = CaptureReader().feed(file.read_bytes())
    return [one.frames for one in messages if one.channel == Channel.LIVE]


def test_a_round_trip_of_live_messages_is_exact(tmp_path: Path) -> None:
    """record(play(record(x))) has the frames of record(x), malformed ones among them."""
    told: list[Told_] = [live(n, b"kv") for n in range(500)]
    told[100:100] = [(Channel.LIVE, [b"odd"]), (Channel.LIVE, [b"kv", b"1", b"2", b"3"])]
    first, second = tmp_path / "first", tmp_path / "second"
    with RawPublisher() as publisher, recording(first, publisher.endpoint) as come_to:
        publisher.await_subscriber()
        for _, frames in told:
            publisher.pub.send_multipart(frames)
        come_to(499)
    with (
        playing(first, "--endpoint", LOOPBACK, "--speed", "max") as (_, endpoint, _),
        recording(second, endpoint) as come_to,
    ):
        come_to(499)
    assert frames_of(second) == frames_of(first) == [frames for _, frames in told]


@pytest.mark.integration
def test_a_round_trip_of_a_sidecars_stream_is_exact(tmp_path: Path) -> None:
    """Joined late, at work: the same batches in the same order, and a subscriber with and one without
    replays have the state that the original's has.
    """
    worker = WorkerInfo(block_size=4, model="m", worker_id="w")
    sink = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, buffer_steps=8)
    cache = make_cache(num_pages=24)
    config = SidecarConfig(sinks=(sink,), linger_s=0.0, state_dir=str(tmp_path / "state"))
    with spawn(worker, config) as sidecar:

        def work(steps: range) -> None:
            for step in steps:
                insert(cache, range(step * 100, step * 100 + 12))
                sidecar.pump(cache)
            assert sidecar.client.flush(cache, PATIENCE_S) is not None

        work(range(20))
        bound = sidecar.client.sinks[0]
        first = tmp_path / "first"
        with recording(first, f"{bound.endpoint},{bound.replay_endpoint}") as come_to:
            come_to(0)
            work(range(20, 40))
            with Subscriber(bound.endpoint, bound.replay_endpoint) as subscriber:
                while subscriber.recovering or not subscriber.next_seq:
                    subscriber.receive(0.05)
                come_to(subscriber.next_seq - 1)
    told = told_by(first)
    assert told[0][0] > 0
    newest = told[-1][0]
    with playing(first, *BOTH, "--speed", "max") as (_, endpoint, replay):
        for name in ("from the start", "when all was played"):
            with recording(tmp_path / name, f"{endpoint},{replay}") as come_to:
                come_to(newest)
            assert told_by(tmp_path / name) == told
    plain = tmp_path / "plain"
    with (
        playing(first, "--endpoint", LOOPBACK, "--speed", "max") as (_, endpoint, _),
        recording(plain, endpoint) as come_to,
    ):
        come_to(newest)
    assert told_by(plain) == told
    assert state_of(told_by(plain)) == state_of(told)


def test_a_gap_is_closed_by_the_replay_as_it_was(tmp_path: Path) -> None:
    """A subscriber is told what was delivered to the recorder, no matter when its replay came."""
    told = [*JOINED, live(23), live(26), asked(24), live(27), answer(24), answer(25), answer(26)]
    told += [answer(27), END, live(28)]
    file = capture(tmp_path / "c", told, every_ns=S // 100)
    again = tmp_path / "again"
    with (
        playing(file, *BOTH) as (_, endpoint, replay),
        recording(again, f"{endpoint},{replay}") as come_to,
    ):
        come_to(28)
    assert told_by(again) == told_by(file) == [(seq, batch(seq)) for seq in range(20, 29)]


# ---------------------------------------------------------------------------------------- bad input


def test_a_damaged_capture_is_played_as_far_as_it_is_whole(tmp_path: Path) -> None:
    """Exit code 1, and what was left out is said; one that was cut off is 0."""
    file = capture(tmp_path / "c", [live(0), live(1)], replay=False)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    done = kvevents("play", str(file), "--endpoint", LOOPBACK, "--no-wait")
    assert done.returncode == 1
    assert "1 message sent" in done.stderr and "checksum" in done.stderr
    file.write_bytes(file.read_bytes()[:-1])
    done = kvevents("play", str(file), "--endpoint", LOOPBACK, "--no-wait")
    assert done.returncode == 0
    assert "1 message sent" in done.stderr and "it was cut off" in done.stderr


def test_nothing_in_it_is_3(tmp_path: Path) -> None:
    """A recorder that heard nothing."""
    for told in ([], [CONNECTED], [CONNECTED, asked(JOIN), END]):
        file = capture(tmp_path / "c", told)
        done = kvevents("play", str(file), "--endpoint", LOOPBACK)
        assert (done.returncode, done.stderr) == (3, f"kvevents play: {file}: nothing is in it\n")


def test_no_capture_is_2(tmp_path: Path) -> None:
    """A file that is none, packed or not, and one that is not there: before anything is bound."""
    file = tmp_path / "f"
    for data, said in ((b"{}", "no capture"), (gzip.compress(b"{}\n" * 99), "no capture")):
        file.write_bytes(data)
        done = kvevents("play", str(file), "--endpoint", LOOPBACK)
        assert done.returncode == 2 and done.stderr.startswith(
            f"kvevents play: FILE: {file}: {said}"
        )
    for name, said in (
        ("x" * 300, f"{'x' * 300}: File name too long"),
        ("h:1,2", "h:1,2 is no capture; `kvevents record tcp://h:1,2 -w FILE` makes one"),
        ("tcp://h:1", "tcp://h:1 is no capture; `kvevents record tcp://h:1 -w FILE` makes one"),
    ):
        done = kvevents("play", name, "--endpoint", LOOPBACK)
        assert (done.returncode, done.stderr) == (2, f"kvevents play: FILE: {said}\n")
    done = kvevents("play", "/nonexistent", "--endpoint", LOOPBACK)
    said = "kvevents play: FILE: /nonexistent: No such file or directory\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_an_endpoint_that_is_taken(tmp_path: Path) -> None:
    """One line names the option; a unix socket that lives is not taken over."""
    file = capture(tmp_path / "c", [live(0)])
    with RawPublisher() as publisher:
        for option in ("--endpoint", "--replay-endpoint"):
            arguments = {"--endpoint": LOOPBACK} | {option: publisher.endpoint}
            done = kvevents(
                "play", str(file), *[text for pair in arguments.items() for text in pair]
            )
            said = f"kvevents play: {option}: {publisher.endpoint} cannot be bound: "
            assert done.returncode == 2 and done.stderr.startswith(said)
    with short_folder() as folder:
        (folder / "s").write_text("mine")
        done = kvevents("play", str(file), "--endpoint", f"ipc://{folder}/s")
        assert done.returncode == 2 and (folder / "s").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--endpoint"),
        (("--endpoint", "udp://h:1"), "--endpoint: 'udp://h:1' is neither"),
        (("--endpoint", LOOPBACK, "--replay-endpoint", "x"), "--replay-endpoint: 'x' is neither"),
        (
            ("--endpoint", LOOPBACK, "--speed", "0"),
            "--speed: '0' is neither max nor in 0.001..1e+06",
        ),
        (("--endpoint", LOOPBACK, "--speed", "nan"), "--speed: 'nan' is neither max"),
        (("--endpoint", LOOPBACK, "--speed", "x"), "--speed: 'x' is neither max"),
        (("--endpoint", LOOPBACK, "--wait", "-1"), "--wait: -1 is not in 0..1000000"),
        (("--endpoint", LOOPBACK, "--no-wait", "--wait", "2"), "--wait"),
        (("--endpoint", LOOPBACK, "--stay", "-1"), "--stay: -1.0 is not above 0"),
        (("--endpoint", LOOPBACK, "--buffer-steps", "0"), "--buffer-steps: 0 is not in 1..1000000"),
        (("--endpoint", LOOPBACK, "--topic", "\udcff"), "--topic: "),
    ],
)
def test_usage(arguments: tuple[str, ...], said: str) -> None:
    """Exit code 2, and one line that names the option, its value and the bound."""
    done = kvevents("play", "/nonexistent", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_replies_have_the_seqs_they_are_asked_for(tmp_path: Path) -> None:
    """What an answer has is what a follower reads."""
    file = capture(tmp_path / "c", JOINED)
    with playing(file, *BOTH) as (_, _, replay):
        assert replay is not None
        got = [parse_replay_answer(one) for one in replay_of(replay, replay_request(JOIN))]
    assert [getattr(one, "seq", None) for one in got] == [20, 21, 22, None]
