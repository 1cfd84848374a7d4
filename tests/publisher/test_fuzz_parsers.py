"""Every parser that faces a socket, shared memory or a file: only the documented exceptions come out."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_inputs import any_inputs
from publisher_rig import open_fds
from publisher_status_rig import full_status
from zmq.utils import z85

from kvevents import KVEventsError
from kvevents.frames import (
    parse_live,
    parse_replay_answer,
    parse_replay_request,
    replay_answer,
    replay_request,
)
from kvevents.records import decode_records
from publisher.config.keys import read_public_key, write_keys
from publisher.config.sidecar_config import SinkConfig, WorkerInfo
from publisher.link.messages import (
    VERSION,
    Close,
    ControlMessage,
    Failed,
    Flush,
    Flushed,
    Hello,
    Ready,
    Welcome,
    receive,
    send,
)
from publisher.link.ring import MIN_RING_BYTES, RingReader, RingWriter
from publisher.sidecar.curve import Guard
from publisher.sidecar.replay import ReplayServer
from publisher.sidecar.source import LinkSource
from publisher.sidecar.web import StatusServer
from publisher.stream.core import Core
from publisher.stream.input import Input
from publisher.stream.journal import Entry, Head, Journal, Kind, read_journal

PATIENCE_S = 20.0
FEW = settings(max_examples=max(40, settings().max_examples // 3))
MORE = settings(max_examples=max(150, settings().max_examples))

U64 = st.integers(0, 2**64 - 1) | st.integers(0, 40) | st.just(2**64 - 1)
Frames = st.lists(st.binary(max_size=12) | st.just(b"") | st.just(b"\xff" * 8), max_size=6)


# ------------------------------------------------------------------------------------- frames


@MORE
@given(Frames)
def test_frames(frames: list[bytes]) -> None:
    """Live messages, replay requests and answers: a value, or KVEventsError; what was a value says what
    its frames say.
    """
    with contextlib.suppress(KVEventsError):
        live = parse_live(frames)
        assert [live.topic, live.seq.to_bytes(8, "big"), live.payload] == frames
    with contextlib.suppress(KVEventsError):
        request = parse_replay_request(frames)
        assert replay_request(request.start)[not request.delimited :] == frames
    with contextlib.suppress(KVEventsError):
        answer = parse_replay_answer(frames)
        assert frames[-1] == getattr(answer, "payload", frames[-1])


@FEW
@given(st.lists(Frames.filter(bool), min_size=1, max_size=6))
def test_requests_to_a_replay_server(requests: list[list[bytes]]) -> None:
    """Whatever clients send, each gets one answer that ends, and a good request after it gets its own."""
    context = zmq.Context[zmq.Socket[bytes]]()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for one in (router, dealer):
            one.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://replay")
        dealer.connect("inproc://replay")
        server = ReplayServer(
            router, b"t", lambda start: iter([(start, b"x")]), lambda _: True, timeout_s=9
        )
        for frames in [*requests, replay_request(7)]:
            dealer.send_multipart(frames)
            answers: list[list[bytes]] = []
            while not answers or answers[-1][-2:] != [b"\xff" * 8, b""]:
                server.take_requests()
                server.serve(0.0)
                while dealer.poll(0):
                    answers.append(dealer.recv_multipart())
            assert len(answers) <= 2
        assert answers[0] == replay_answer(b"t", 7, b"x", delimited=True)
        assert server.stats.requests == len(requests) + 1
    finally:
        router.close()
        dealer.close()
        context.term()


# --------------------------------------------------------------------------------------- link

WORKER = WorkerInfo(block_size=2)
MESSAGES: list[ControlMessage] = [
    Hello(2, 1),
    Welcome(2, WORKER, b"l" * 16, Ready((), None)),
    Ready((), "http://127.0.0.1:1"),
    Failed("why"),
    Flush(3),
    Flushed(3, (1, 2), True, 4),
    Close(),
]


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Arbitrary bytes, arbitrary values, and messages with some bytes changed."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.binary(min_size=1, max_size=40))
    packed = bytearray(msgspec.msgpack.encode(draw(st.sampled_from(MESSAGES))))
    if kind == 1:
        fields = msgspec.msgpack.decode(packed)
        key = draw(st.sampled_from(sorted(fields)))
        fields[key] = draw(st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3))
        return msgspec.msgpack.encode(fields)
    if kind == 2:
        return bytes(packed[: draw(st.integers(1, len(packed)))])
    for _ in range(draw(st.integers(1, 3))):
        packed[draw(st.integers(0, len(packed) - 1))] = draw(st.integers(0, 255))
    return bytes(packed)


@MORE
@given(st.lists(packets(), min_size=1, max_size=4), st.integers(0, 3))
def test_control_packets(sent: list[bytes], num_fds: int) -> None:
    """A message, or KVEventsError; no descriptor that came along is left open, however many came; the
    next good packet is read.
    """
    before = open_fds()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for packet in sent:
            socket.send_fds(ours, [packet], [0] * num_fds)
            with contextlib.suppress(KVEventsError):
                message, fds = receive(theirs)
                for fd in fds:
                    os.close(fd)
                assert message is not None
                send(ours, message)
                assert receive(theirs) == (message, [])
        send(ours, Close())
        assert receive(theirs) == (Close(), [])
    assert open_fds() == before


# --------------------------------------------------------------------------------------- ring


@contextlib.contextmanager
def ring() -> Iterator[RingWriter]:
    writer = RingWriter(MIN_RING_BYTES)
    try:
        yield writer
    finally:
        writer.close()


def use(reader: RingReader) -> None:
    """As a source does, for a while; what is read fits into the ring."""
    for _ in range(20):
        try:
            message = reader.read()
        except KVEventsError:
            reader.skip_all()
            assert reader.read() is None
            return
        assert 0 <= reader.used_bytes <= reader.capacity
        assert 0 <= reader.offered < 2**64
        if message is None:
            return
        assert len(message.body) <= reader.capacity
        reader.release()


@MORE
@given(
    words=st.dictionaries(st.integers(0, 20), U64, max_size=6),
    data=st.lists(
        st.tuples(st.integers(0, MIN_RING_BYTES - 16), st.binary(max_size=40)), max_size=4
    ),
    late=st.dictionaries(st.sampled_from([8, 9, 16]), U64, max_size=3),
    messages=st.lists(st.binary(max_size=900), max_size=6),
)
def test_ring_memory(
    words: dict[int, int],
    data: list[tuple[int, bytes]],
    late: dict[int, int],
    messages: list[bytes],
) -> None:
    """Arbitrary words in the header and bytes in the data, before the reader comes and while it reads:
    messages within the ring, or KVEventsError, after which it goes on; never a byte from outside.
    """
    with ring() as writer:
        for body in messages:
            writer.write(body)
        for word, value in words.items():
            writer._words[word] = value
        for position, changed in data:
            end = min(len(writer._data), position + len(changed))
            writer._data[position:end] = changed[: end - position]
        try:
            reader = RingReader(writer.fd)
        except KVEventsError:
            return
        try:
            use(reader)
            for word, value in late.items():
                writer._words[word] = value
            use(reader)
        finally:
            reader.close()


def linked(writer: RingWriter, folder: Path) -> LinkSource:
    """A source on this ring, as a worker would give it."""
    path = folder / "link"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def welcome() -> None:
        connection, _ = listener.accept()
        with connection:
            receive(connection)
            send(connection, Welcome(VERSION, WORKER, b"l" * 16), (writer.fd, wake))

    with listener:
        listener.bind(str(path))
        listener.listen(1)
        worker = Thread(target=welcome)
        worker.start()
        source = LinkSource(path, timeout_s=PATIENCE_S)
        worker.join()
    os.close(wake)
    return source


@FEW
@given(
    messages=st.lists(
        st.tuples(st.integers(0, 2**32 - 1) | st.integers(0, 7), U64, st.binary(max_size=20)),
        min_size=1,
        max_size=5,
    ),
    offered=st.none() | U64,
)
def test_a_ring_with_messages_of_any_kind(
    tmp_path_factory: pytest.TempPathFactory,
    messages: list[tuple[int, int, bytes]],
    offered: int | None,
) -> None:
    """Whatever flags and numbers messages have, a sidecar takes them, keeps them, and can be followed by
    another.
    """
    folder = tmp_path_factory.mktemp("link")
    with ring() as writer:
        source = linked(writer, folder)
        try:
            for flags, number, body in messages:
                writer._offered = number
                with contextlib.suppress(ValueError):  # the writer's own end cannot count on
                    writer.write(body, flags)
            if offered is not None:
                writer._words[9] = offered
            inputs, _ = source.read(100)
            first = opened(folder, inputs)
        finally:
            source.close()
    second = opened(folder, [])
    assert second.warm
    assert second.replica.expected == first.replica.expected
    assert [one.next_seq for one in second.outputs] >= [one.next_seq for one in first.outputs]


@FEW
@given(
    head=U64,
    tail=U64,
    prefix=st.tuples(
        st.integers(0, 2**32 - 1) | st.integers(0, MIN_RING_BYTES), st.integers(0, 2**32 - 1), U64
    ),
)
def test_a_ring_with_one_message_of_any_kind(
    head: int, tail: int, prefix: tuple[int, int, int]
) -> None:
    """Any head, tail, length, flags and number: a body of that length, or KVEventsError."""
    with ring() as writer:
        writer._words[8], writer._words[16] = head, tail
        packed = struct.pack("<IIQ", *prefix)
        for at, byte in enumerate(packed):
            writer._data[(tail + at) % writer.capacity] = byte
        reader = RingReader(writer.fd)
        try:
            with contextlib.suppress(KVEventsError):
                message = reader.read()
                if message is not None:
                    assert len(message.body) == prefix[0]
                    assert (message.flags, message.number) == prefix[1:]
        finally:
            reader.close()


@MORE
@given(st.binary(max_size=60))
def test_ring_bodies(body: bytes) -> None:
    """Bytes that should be records are, or KVEventsError."""
    for one in (body, b"\x91" * len(body) * 50, b"\x91" + body):
        with contextlib.suppress(KVEventsError):
            decode_records(one)


# --------------------------------------------------------------------------------------- files


def opened(folder: Path, inputs: list[Input]) -> Core:
    """A core over this folder takes inputs, starts, works, and is closed."""
    sinks = (SinkConfig(name="a"), SinkConfig(name="b", coalesce_s=0.01, token_ids=False))
    core = Core(WORKER, b"l" * 16, sinks, ("a", "b"), folder, clock=lambda: 5.0)
    try:
        core.start()
        core.apply(inputs, 1.0)
        for turn in range(4):
            core.work(2.0 + turn)
    finally:
        core.close()
    return core


@FEW
@given(inputs=any_inputs(most=6), more=any_inputs(most=3), data=st.data())
def test_state_files(
    tmp_path_factory: pytest.TempPathFactory,
    inputs: list[Input],
    more: list[Input],
    data: st.DataObject,
) -> None:
    """A sidecar starts over whatever its folder holds, takes arbitrary inputs, and never numbers again
    what it has numbered, unless the file that says so was damaged.
    """
    folder = tmp_path_factory.mktemp("state")
    first = opened(folder, inputs)
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    damaged = data.draw(st.sampled_from(files))
    content = bytearray(damaged.read_bytes())
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    del content[data.draw(st.integers(0, len(content))) if data.draw(st.booleans()) else 1 << 30 :]
    damaged.write_bytes(content)
    second = opened(folder, more)
    for before, after in zip(first.outputs, second.outputs, strict=True):
        assert after.next_seq >= before.next_seq or damaged.name == f"seq-{before.name}"


@FEW
@given(junk=st.binary(max_size=80), name=st.sampled_from(["checkpoint", "entries"]))
def test_journal_files(tmp_path_factory: pytest.TempPathFactory, junk: bytes, name: str) -> None:
    """Bytes of strangers behind the magic word, as a checkpoint or as entries: read up to there."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    journal.begin(Head(b"", b"", (), 0, True, False, b""), iter([b"p"]))
    journal.advance(1000)
    journal.append(Entry(Kind.CUT))
    journal.close()
    path = folder / f"{name}-00000001"
    magic = path.read_bytes()[:8]
    path.write_bytes(magic + junk)
    for found in read_journal(folder):
        with contextlib.suppress(KVEventsError):
            assert len(list(found.entries)) <= 1 + len(junk) // 20


# ---------------------------------------------------------------------------------------- ZAP


@FEW
@given(
    requests=st.lists(
        st.lists(
            st.sampled_from([b"", b"1.0", b"CURVE", b"NULL", b"1"]) | st.binary(max_size=40),
            min_size=1,
            max_size=11,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_zap_requests(
    tmp_path_factory: pytest.TempPathFactory, requests: list[list[bytes]]
) -> None:
    """Nobody is let in who is not in the directory; what is no question is not answered; a good question
    after them is.
    """
    folder = tmp_path_factory.getbasetemp() / "zap"
    if not folder.exists():
        write_keys(folder, "server")
        write_keys(folder / "clients", "client")
    key = next(iter(guard_keys(folder)))
    context = zmq.Context[zmq.Socket[bytes]]()
    guard = Guard(context, secret_key=folder / "server.key_secret", client_keys=folder / "clients")
    asker = context.socket(zmq.DEALER)
    try:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect("inproc://zeromq.zap.01")
        question = [b"", b"1.0", b"%d", b"kvevents", b"127.0.0.1", b"", b"CURVE", key]
        for frames in [*requests, question]:
            asker.send_multipart(frames)
        guard.handle()
        answers = []
        while asker.poll(0):
            answers.append(asker.recv_multipart())
        assert answers[-1] == [b"", b"1.0", b"%d", b"200", b"OK", b"", b""]
        assert all(answer[3] == b"400" for answer in answers[:-1])
        sound = [one for one in requests if len(one) == 8 and one[1] == b"1.0"]
        assert (guard.status.accepted, guard.status.denied) == (1, len(sound))
    finally:
        asker.close()
        guard.close()
        context.term()


def guard_keys(folder: Path) -> list[bytes]:
    return [z85.decode(read_public_key("k", folder / "clients" / "client.key").encode())]


# --------------------------------------------------------------------------------------- HTTP


@pytest.fixture(scope="module")
def server() -> Iterator[StatusServer]:
    status = full_status()
    status.turned_at = time.monotonic() + 1000
    one = StatusServer("http://127.0.0.1:0", lambda: status, request_s=5.0)
    yield one
    one.close()


def asked(server: StatusServer, request: bytes) -> bytes:
    """All the answer to these bytes and no more."""
    parts = urlsplit(server.endpoint)
    address = (parts.hostname or "", parts.port or 0)
    with socket.create_connection(address, PATIENCE_S) as connection:
        answer = b""
        with contextlib.suppress(OSError):  # it may not wait for the rest of a long one
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


Lines = st.binary(max_size=60) | st.sampled_from(
    [b"GET /metrics HTTP/1.1", b"HEAD / HTTP/1.0", b"GET", b"POST /state HTTP/1.1", b"a: b", b":"]
)
Requests: st.SearchStrategy[Any] = st.one_of(
    st.binary(max_size=200),
    st.lists(Lines, max_size=5).map(b"\r\n".join).map(lambda text: text + b"\r\n\r\n"),
    st.builds(
        lambda path, version: b"GET " + path + b" HTTP/" + version + b"\r\n\r\n",
        st.binary(max_size=20),
        st.sampled_from([b"1.1", b"0.9", b"2.0", b"9" * 30, b"-1.1", b"1.x", b""]),
    ),
    st.just(b"GET /" + b"x" * 70_000),
    st.just(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 3000),
    st.just(b"GET /kv_event_sources?" + b"sink=a&" * 1000 + b" HTTP/1.1\r\n\r\n"),
)


@pytest.mark.integration
@settings(max_examples=max(60, settings().max_examples // 2))
@given(Requests)
def test_http_requests(server: StatusServer, request_bytes: bytes) -> None:
    """Any bytes get one answer or the end of the connection, and never one of ours that failed; the next
    good request is answered.
    """
    answer = asked(server, request_bytes)
    first = answer.split(b"\r\n")[0]
    assert not answer or first.startswith(b"HTTP/1.") or answer[:1] not in (b"", b"H")
    assert b" 500 " not in first
    assert b"Traceback" not in answer
    good = asked(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert good.startswith(b"HTTP/1.0 200 ")
    assert good.endswith(b"ok\n")
