"""Where inputs come from, and the source that is a worker's link.

S1  Inputs come in the order of their numbers. A number that will never come shows as a later one, or as
    an input with LOST.
S2  What was read is in the ring until `release`: a process that dies in between is followed by one that
    reads it again.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from kvevents.errors import KVEventsError
from kvevents.frames import MAX_SEQ
from publisher.config.sidecar_config import WorkerInfo
from publisher.link.messages import (
    BATCH,
    COLUMNS,
    FRESH,
    LOST,
    PACKED,
    VERSION,
    ControlMessage,
    Failed,
    Flush,
    Flushed,
    Hello,
    Ready,
    Welcome,
    peer_pid,
    receive,
    send,
)
from publisher.link.ring import RingReader
from publisher.stream.input import Input

__all__ = ["BYTES_PER_READ", "LinkSource", "Source", "SourceError"]


class SourceError(Exception):
    """The worker is not there, has a sidecar already, or is not of this version."""


class Source(Protocol):
    """Where inputs come from: the link to a worker, or an engine's own publisher."""

    worker: WorkerInfo
    link_id: bytes
    """The same id, the same stream of numbers."""

    @property
    def alive(self) -> bool:
        """False once the worker is gone or leaving."""

    def pollables(self) -> list[int | zmq.Socket[bytes]]:
        """Readable when there is something to do."""

    def wake_at(self) -> float:
        """Monotonic time by which to call `read` though nothing is readable; inf when there is none."""

    def start(self, expected: int, last: bytes | None = None) -> None:
        """Begin. All inputs before number `expected` were applied by an earlier run; 0: none were.

        `last`: the body of the last of them, where it is known.
        """

    def read(self, most: int) -> tuple[list[Input], bool]:
        """The next inputs, in order, and whether there may be more."""

    def release(self) -> None:
        """What was read has been kept, and need not be read again."""

    def ask_resync(self, reason: str) -> None:
        """Ask for all state anew, where the worker can tell it."""

    def close(self) -> None:
        """Safe to call twice."""


_LOOK_S = 0.2
"""Between looks whether to go on waiting for the worker."""

BYTES_PER_READ = 64 << 10
"""What has been read is applied before it is sent: so much of it is not waited for long."""

_FLAGS = FRESH | BATCH | PACKED | COLUMNS

_FULL = b"the ring was full"


class LinkSource:
    """Connects to a worker's link. Raises SourceError when that fails within `timeout_s`, or `stopping`
    says so meanwhile.
    """

    def __init__(
        self, path: Path, *, timeout_s: float, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(timeout_s)
        self._give_up_at, self._stopping = time.monotonic() + timeout_s, stopping
        self._fds: list[int] = []
        self._ring: RingReader | None = None
        self._ended = select.poll()
        try:
            welcome = self._handshake(path)
            self._ring = RingReader(self._fds[0])
            self._worker_fd = self._watch_worker()
            """Readable once the worker's process has ended, though a child of its may hold the link;
            None where that cannot be seen.
            """
        except (OSError, KVEventsError) as error:
            self.close()
            raise SourceError(f"link {path}: {error}") from error
        self._wake_fd = self._fds[1]
        self._ended.register(self._connection, select.POLLIN)
        self._pollables: list[int | zmq.Socket[bytes]] = [self._wake_fd, self._connection.fileno()]
        if self._worker_fd is not None:
            self._ended.register(self._worker_fd, select.POLLIN)
            self._pollables.append(self._worker_fd)
        self._connection.settimeout(0)
        self.worker = welcome.worker
        self.link_id = welcome.link_id
        self.before = welcome.before
        """What an earlier sidecar of this worker had bound."""
        self._leaving = False
        self._flushes: list[int] = []
        self.started = self._next = 0
        """The number that this sidecar began with."""

    def _handshake(self, path: Path) -> Welcome:
        self._connection.connect(str(path))
        send(self._connection, Hello(VERSION, os.getpid()))
        message, self._fds = self._await_welcome()
        if isinstance(message, Failed):
            raise KVEventsError(message.reason)
        if not isinstance(message, Welcome) or message.version != VERSION or len(self._fds) != 2:
            raise KVEventsError(f"the worker said {message}, not Welcome of version {VERSION}")
        return message

    def _await_welcome(self) -> tuple[ControlMessage | None, list[int]]:
        self._connection.settimeout(_LOOK_S)
        while True:
            try:
                return receive(self._connection)
            except TimeoutError:  # a worker that is stopped answers nobody
                if self._stopping() or time.monotonic() >= self._give_up_at:
                    raise

    def _watch_worker(self) -> int | None:
        pid = peer_pid(self._connection)
        if pid <= 0:  # in another pid namespace
            return None
        self._fds.append(os.pidfd_open(pid))
        return self._fds[-1]

    def ready(self, message: Ready) -> None:
        """Tell the worker that every socket is bound."""
        self._say(message)

    def failed(self, reason: str) -> None:
        """Tell the worker why there will be no sidecar."""
        self._say(Failed(reason))

    # ------------------------------------------------------------------------------- messages

    @property
    def alive(self) -> bool:
        """False once the worker is gone or leaving; looks at it without waiting."""
        if not self._leaving and (readable := self._ended.poll(0)):
            self._leaving = any(fd == self._worker_fd for fd, _ in readable)
            self._leaving = self._leaving or not self._take_control()
        return not self._leaving

    def pollables(self) -> list[int | zmq.Socket[bytes]]:
        """The eventfd, the connection, and what tells of the worker's end."""
        return [] if self._leaving else self._pollables

    def wake_at(self) -> float:
        """Never: whatever comes makes a descriptor readable."""
        return float("inf")

    def start(self, expected: int, last: bytes | None = None) -> None:  # noqa: ARG002
        """Skip what an earlier sidecar has applied."""
        self.started = self._next = expected

    def read(self, most: int) -> tuple[list[Input], bool]:
        """At most `most` messages of the ring, and none after so many bytes; see `Source.read`."""
        ring = self._ring
        assert ring is not None
        with contextlib.suppress(BlockingIOError):  # before the ring: a later wake is not lost
            os.eventfd_read(self._wake_fd)
        inputs: list[Input] = []
        offered, size = ring.offered, 0
        while len(inputs) < most and size < BYTES_PER_READ:
            try:
                message = ring.read()
                if message is not None and message.number > MAX_SEQ:
                    raise KVEventsError(f"ring: a message with number {message.number}")
            except KVEventsError as error:
                ring.skip_all()
                self._next = ring.offered
                inputs.append(Input(self._next, LOST, str(error).encode()))
                return inputs, False
            if message is None:
                if self._next < offered:  # the last ones were refused
                    self._next = offered
                    inputs.append(Input(offered, LOST, _FULL))
                return inputs, False
            if message.number >= self._next:
                self._next = message.number + 1
                flags = message.flags & _FLAGS
                inputs.append(Input(message.number, flags, message.body))
                size += len(message.body)
        return inputs, True

    def release(self) -> None:
        """Let the writer have the room of what was read."""
        assert self._ring is not None
        self._ring.release()

    def ask_resync(self, reason: str) -> None:  # noqa: ARG002
        """Ask the worker to tell its state anew, through the ring."""
        assert self._ring is not None
        self._ring.ask_resync()

    @property
    def offered(self) -> int:
        """Messages that the worker has numbered since `start`."""
        assert self._ring is not None
        return self._ring.offered - self.started

    @property
    def depth(self) -> tuple[int, int]:
        """Bytes in the ring, and its capacity."""
        assert self._ring is not None
        return self._ring.used_bytes, self._ring.capacity

    # -------------------------------------------------------------------------------- control

    def _take_control(self) -> bool:
        """Read what the worker said; False once it is gone or leaving."""
        while True:
            try:
                message, fds = receive(self._connection)
            except BlockingIOError:
                return True
            except KVEventsError:
                return False
            for fd in fds:
                os.close(fd)
            match message:
                case Flush(number=number):
                    self._flushes.append(number)
                case _:  # its end, Close, or what is none of its messages
                    return False

    def flush_asked(self, expected: int) -> bool:
        """Whether the worker waits for all before a number that is not after `expected`."""
        return bool(self._flushes) and self._flushes[0] <= expected

    def answer_flushes(
        self, expected: int, next_seqs: tuple[int, ...], *, in_step: bool, num_events: int
    ) -> None:
        """Answer those whose messages have all been published."""
        while self.flush_asked(expected):
            self._say(Flushed(self._flushes.pop(0), next_seqs, in_step, num_events))

    def _say(self, message: ControlMessage) -> None:
        with contextlib.suppress(OSError):  # gone: its end will be noticed
            send(self._connection, message)

    def close(self) -> None:
        """Safe to call twice."""
        self._connection.close()
        if self._ring is not None:
            with contextlib.suppress(ValueError):
                self._ring.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []
