"""publisher.sidecar.source: the sidecar's end of the link (S1, S2), and workers that are none."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_link_rig import store
from publisher_rig import PATIENCE_S, open_fds, short_folder

from publisher import SidecarClient, WorkerInfo
from publisher.link.messages import (
    BATCH,
    FRESH,
    LOST,
    VERSION,
    Bound,
    Close,
    ControlMessage,
    Failed,
    Ready,
    Welcome,
    receive,
    send,
)
from publisher.link.ring import MIN_RING_BYTES, RingWriter
from publisher.sidecar.source import LinkSource, SourceError
from publisher.stream.input import Input

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4, dp_rank=3, worker_id="w")
LINK = bytes(range(16))
HERE = Ready((Bound("tcp://127.0.0.1:5", None),), "http://127.0.0.1:6")
FULL = b"the ring was full"


class Worker:
    """The worker's end, for one sidecar after the other in this process."""

    def __init__(self, folder: Path, ring_bytes: int = MIN_RING_BYTES) -> None:
        self._path = folder / "link"
        self.client = SidecarClient(self._path, WORKER, ring_bytes=ring_bytes)
        self._sources: list[LinkSource] = []

    def sidecar(self, expected: int = 0) -> LinkSource:
        """One that has come, is ready, and has started from `expected`; the one before is gone."""
        for source in self._sources:
            source.close()

        def connect() -> None:
            source = LinkSource(self._path, timeout_s=PATIENCE_S)
            source.ready(HERE)
            self._sources.append(source)

        thread = Thread(target=connect)
        thread.start()
        self.client.accept(time.monotonic() + PATIENCE_S)
        thread.join()
        self._sources[-1].start(expected)
        return self._sources[-1]

    def write(self, body: bytes, flags: int = 0) -> bool:
        """A message as it is; False when the ring is full."""
        return self.client._ring.write(body, flags)

    def close(self) -> None:
        self.client.close()
        for source in self._sources:
            source.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    before = open_fds()
    with short_folder() as folder:
        worker = Worker(folder)
        yield worker
        worker.close()
    assert open_fds() == before


def read_all(source: LinkSource) -> list[Input]:
    inputs, more = source.read(1_000_000)
    assert not more
    return inputs


# ---------------------------------------------------------------------------------------- reading


def test_messages_come_with_their_numbers_and_flags(worker: Worker) -> None:
    """S1: in order, as they were written; whoever writes cannot forge a loss."""
    source = worker.sidecar()
    worker.write(b"a", FRESH)
    worker.write(b"b", BATCH)
    worker.write(b"c", LOST)
    assert read_all(source) == [Input(0, FRESH, b"a"), Input(1, BATCH, b"b"), Input(2, 0, b"c")]
    assert (source.offered, source.alive) == (3, True)


def test_reading_is_bounded(worker: Worker) -> None:
    """One read gives at most so many messages, and says whether there may be more."""
    source = worker.sidecar()
    for number in range(5):
        worker.write(b"%d" % number)
    counts, more = [], True
    while more:
        inputs, more = source.read(2)
        counts.append(len(inputs))
    assert counts == [2, 2, 1]


def test_what_was_not_released_is_read_again(worker: Worker) -> None:
    """S2: by the next sidecar, which the worker takes for another end of the same stream; what was
    released is gone, and what an earlier one says it has applied is skipped.
    """
    first = worker.sidecar()
    for number in range(6):
        worker.write(b"%d" % number)
    first.read(2)
    first.release()
    first.read(2)  # and dies
    second = worker.sidecar()
    assert second.link_id == first.link_id
    assert second.before == HERE
    assert first.before is None
    assert [one.number for one in read_all(second)] == [2, 3, 4, 5]
    third = worker.sidecar(expected=4)
    assert [one.number for one in read_all(third)] == [4, 5]
    third.release()
    assert third.depth[0] == 0
    assert third.offered == 2


def test_what_is_refused_shows_as_a_number_or_as_a_loss(worker: Worker) -> None:
    """S1: a message refused in the middle leaves a hole in the numbers; the last ones, of which nothing
    follows, an input with LOST before the number that comes next.
    """
    source = worker.sidecar()
    worker.write(b"a")
    worker.client._ring.refuse()
    worker.write(b"c")
    worker.client._ring.refuse()
    assert read_all(source) == [Input(0, 0, b"a"), Input(2, 0, b"c"), Input(4, LOST, FULL)]
    assert read_all(source) == []
    worker.write(b"e")
    assert read_all(source) == [Input(4, 0, b"e")]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("wwwrdrk"), st.integers(1, 900)), max_size=40))
def test_every_number_comes_once_or_is_known_to_be_lost(ops: list[tuple[str, int]]) -> None:
    """S1, S2: with a ring that fills up, refusals, and sidecars that die with or without having kept what
    they read, each number is applied exactly once or passed over, in order.
    """
    with short_folder() as folder:
        worker = Worker(folder)
        source = worker.sidecar()
        expected, applied, written = 0, list[int](), list[int]()

        def apply(inputs: list[Input]) -> None:
            nonlocal expected
            for one in inputs:
                assert one.number >= expected
                lost = bool(one.flags & LOST)
                expected = one.number + (not lost)
                applied.extend([] if lost else [one.number])

        for kind, size in ops:
            match kind:
                case "w":
                    number = worker.client._ring.offered
                    if worker.write(bytes(size)):
                        written.append(number)
                case "r":
                    apply(source.read(1 + size % 4)[0])
                    source.release()
                case "d":  # kept, and not released
                    apply(source.read(1 + size % 4)[0])
                    source = worker.sidecar(expected)
                case _:  # neither
                    source.read(1 + size % 4)
                    source = worker.sidecar(expected)
        apply(read_all(source))
        assert applied == written
        assert expected == worker.client._ring.offered
        worker.close()


def test_bytes_that_are_no_message_are_a_loss(worker: Worker) -> None:
    """S1: all that the ring holds is passed over, which is said once, and the next message is read."""
    source = worker.sidecar()
    for _ in range(3):
        worker.write(b"sound")
    with mmap.mmap(worker.client._ring.fd, 0) as memory:
        memory[4096:4100] = b"\xff" * 4
    (one,) = read_all(source)
    assert (one.number, one.flags) == (3, LOST)
    assert b"ring" in one.body
    worker.write(b"next")
    assert read_all(source) == [Input(3, 0, b"next")]


def test_a_source_is_readable_when_there_is_something(worker: Worker) -> None:
    """A message makes a descriptor readable until it was read, also one written before the source came;
    a refused one does too.
    """
    worker.write(b"early")
    source = worker.sidecar()
    poller = select.poll()
    for fd in source.pollables():
        assert isinstance(fd, int)
        poller.register(fd, select.POLLIN)

    def readable() -> bool:
        return bool(poller.poll(0))

    assert readable()
    read_all(source)
    assert not readable()
    worker.client.publish([store(0)])
    assert readable()
    read_all(source)
    worker.client.publish([object()])  # type: ignore[list-item]
    assert readable()
    assert [one.flags for one in read_all(source)] == [LOST]
    assert not readable()
    assert source.wake_at() == float("inf")


def test_a_resync_is_asked_for_in_the_ring(worker: Worker) -> None:
    """The worker sees it at its next look, whatever else it does."""
    source = worker.sidecar()
    before = worker.client._ring.resyncs
    source.ask_resync("why not")
    assert worker.client._ring.resyncs == before + 1


# -------------------------------------------------------------------------------------------- end


def test_the_source_sees_the_worker_leave(worker: Worker) -> None:
    """A close in good order ends the control messages; what was written before can still be read."""
    source = worker.sidecar()
    worker.client.publish([store(0)])
    before = source.alive
    worker.client.close()
    assert (before, source.alive) == (True, False)
    assert len(read_all(source)) == 1
    source.close()
    source.close()


def test_the_source_sees_the_worker_die() -> None:
    """The end of the connection, without a word, is the worker's end too."""
    ring, wake = RingWriter(MIN_RING_BYTES), os.eventfd(0)
    try:
        with worker_answering(Welcome(VERSION, WORKER, LINK), ring.fd, wake) as path:
            source = LinkSource(path, timeout_s=PATIENCE_S)
            try:
                poller = select.poll()
                for fd in source.pollables():
                    assert isinstance(fd, int)
                    poller.register(fd, select.POLLIN)
                while source.alive:
                    assert poller.poll(int(PATIENCE_S * 1000))
                assert source.pollables() == []
                source.ready(Ready(()))  # nobody to hear it, and no error
            finally:
                source.close()
    finally:
        ring.close()
        os.close(wake)


# -------------------------------------------------------------------------------------- handshake


def test_the_handshake_tells_who_is_there(worker: Worker) -> None:
    """The source learns its worker, and the client where the sinks are bound."""
    source = worker.sidecar()
    assert source.worker == WORKER
    assert len(source.link_id) == 16
    assert (worker.client.sinks, worker.client.http_endpoint) == (HERE.sinks, HERE.http_endpoint)


@contextlib.contextmanager
def worker_answering(message: ControlMessage, *fds: int) -> Iterator[Path]:
    """The link of a worker that answers Hello with this, and leaves."""
    with (
        short_folder() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        listener.bind(str(folder / "link"))
        listener.listen(1)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                receive(connection)
                send(connection, message, fds)

        thread = Thread(target=answer)
        thread.start()
        yield folder / "link"
        thread.join()


def worker_saying(message: ControlMessage, *fds: int) -> str:
    """What a source says of a worker that answers with this."""
    before = open_fds()
    with (
        worker_answering(message, *fds) as path,
        pytest.raises(SourceError, match=f"^link {path}: ") as error,
    ):
        LinkSource(path, timeout_s=PATIENCE_S)
    assert open_fds() == before
    return str(error.value)


def test_a_worker_that_is_none_is_a_source_error() -> None:
    """Nobody there, another version, no ring along, memory that is no ring, or one that says no."""
    with short_folder() as folder, pytest.raises(SourceError, match="No such file"):
        LinkSource(folder / "link", timeout_s=1.0)
    memory, wake = os.memfd_create("noring"), os.eventfd(0)
    try:
        assert "not Welcome" in worker_saying(Close())
        assert "not Welcome" in worker_saying(Welcome(VERSION + 1, WORKER, LINK), memory, wake)
        assert "not Welcome" in worker_saying(Welcome(VERSION, WORKER, LINK), memory)
        assert "no room" in worker_saying(Failed("no room"))
        assert "ring: 0 bytes" in worker_saying(Welcome(VERSION, WORKER, LINK), memory, wake)
    finally:
        os.close(memory)
        os.close(wake)
