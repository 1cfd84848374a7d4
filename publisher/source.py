"""The sidecar's end of the link: messages from the ring, in step or asking for a resync.

S1  Records are applied only in step: from the first message on, each number following the last.
S2  A number that is missing, refused or unreadable ends that. A resync is asked for, and all messages
    up to the one that begins it are dropped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvevents.errors import KVEventsError
from kvevents.events import Event
from kvevents.materializer import Materializer
from kvevents.records import Record
from publisher.config import WorkerInfo
from publisher.link import (
    FRESH,
    VERSION,
    Bound,
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
from publisher.ring import Message, RingReader

__all__ = ["LinkSource", "SourceError", "SourceStats", "Told"]


class SourceError(Exception):
    """The worker is not there, or not of this version."""


@dataclass(frozen=True, slots=True)
class Told:
    """Events that became true at `ts`, seconds since the epoch."""

    ts: float
    events: list[Event]


@dataclass(slots=True)
class SourceStats:
    """Messages of the ring by what became of them, their events, and the resyncs asked for."""

    applied: int = 0
    events: int = 0
    missed: int = 0
    skipped: int = 0
    unreadable: int = 0
    resyncs: int = 0


_ucred = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_decode = msgspec.msgpack.Decoder(tuple[float, list[Record]]).decode


class LinkSource:
    """Connects to a worker's link. Raises SourceError when that fails within `timeout_s`."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(timeout_s)
        self._fds: list[int] = []
        try:
            self.worker = self._handshake(path)
            self._ring = RingReader(self._fds[0])
            self.worker_fd = self._watch_worker()
            """Readable once the worker's process has ended, though a child of its may hold the link;
            None where that cannot be seen.
            """
        except (OSError, KVEventsError) as error:
            self.close()
            raise SourceError(f"link {path}: {error}") from error
        self.wake_fd = self._fds[1]
        self.connection.settimeout(0)
        self.stats = SourceStats()
        self._materializer = self._new_materializer()
        self._flushes: list[int] = []
        self.last_loss = ""
        """Why a resync was last asked for."""
        self._expected = 0
        self._in_step = True

    def _new_materializer(self) -> Materializer:
        return Materializer(self.worker.block_size, self.worker.hash_format)

    def _handshake(self, path: Path) -> WorkerInfo:
        self.connection.connect(str(path))
        send(self.connection, Hello(VERSION, os.getpid()))
        message, self._fds = receive(self.connection)
        if not isinstance(message, Welcome) or message.version != VERSION or len(self._fds) != 2:
            raise KVEventsError(f"the worker said {message}, not Welcome of version {VERSION}")
        return message.worker

    def _watch_worker(self) -> int | None:
        credentials = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size)
        pid = _ucred.unpack(credentials)[0]
        if pid <= 0:  # in another pid namespace
            return None
        self._fds.append(os.pidfd_open(pid))
        return self._fds[-1]

    def ready(self, sinks: tuple[Bound, ...]) -> None:
        """Tell the worker that the sinks are bound."""
        self._say(Ready(sinks))

    def failed(self, reason: str) -> None:
        """Tell the worker why there will be no sidecar."""
        self._say(Failed(reason))

    # ------------------------------------------------------------------------------- messages

    @property
    def in_step(self) -> bool:
        """Whether nothing is missing (S1)."""
        return self._in_step

    def take(self, most: int) -> tuple[list[Told], bool]:
        """What at most `most` messages say, and whether there may be more."""
        told: list[Told] = []
        offered = self._ring.offered
        for _ in range(most):
            message = self._read()
            if message is None:
                self._ring.release()
                if self._expected < offered:  # the last ones were refused
                    if self._in_step:
                        self._lose("the ring was full", missed=offered - self._expected)
                    self._expected = offered
                return told, False
            if (found := self._take_one(message)) is not None:
                told.append(found)
        self._ring.release()
        return told, True

    def quiet_wake(self) -> None:
        """Reset the eventfd; call before `take`, so that a later wake is not lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def _read(self) -> Message | None:
        try:
            return self._ring.read()
        except KVEventsError as error:
            self.stats.unreadable += 1
            self._ring.skip_all()
            self._expected = self._ring.offered
            self._lose(str(error))
            return None

    def _take_one(self, message: Message) -> Told | None:
        if message.flags & FRESH:
            self._materializer = self._new_materializer()
            self._in_step = True
        elif self._in_step and message.number != self._expected:
            self._lose("the ring was full", missed=message.number - self._expected)
        self._expected = message.number + 1
        if not self._in_step:
            self.stats.skipped += 1
            return None
        try:
            ts, records = _decode(message.body)
            told = Told(ts, self._materializer.apply(records))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KVEventsError) as error:
            self.stats.unreadable += 1
            self._lose(str(error))
            return None
        self.stats.applied += 1
        self.stats.events += len(told.events)
        return told

    def _lose(self, reason: str, *, missed: int = 0) -> None:
        self.last_loss = reason
        self.stats.missed += missed
        self.stats.resyncs += 1
        self._in_step = False
        self._ring.ask_resync()

    # -------------------------------------------------------------------------------- control

    def take_control(self) -> bool:
        """Read what the worker said; False once it is gone or leaving."""
        while True:
            try:
                message, fds = receive(self.connection)
            except BlockingIOError:
                return True
            except KVEventsError:
                return False
            for fd in fds:
                os.close(fd)
            match message:
                case None | Close():
                    return False
                case Flush(number=number):
                    self._flushes.append(number)
                case _:
                    return False

    def answer_flushes(self, next_seqs: tuple[int, ...]) -> None:
        """Answer those whose messages have all been taken."""
        while self._flushes and self._flushes[0] <= self._expected:
            number = self._flushes.pop(0)
            self._say(Flushed(number, next_seqs, self._in_step, self.stats.events))

    def _say(self, message: ControlMessage) -> None:
        with contextlib.suppress(OSError):  # gone: its end will be noticed
            send(self.connection, message)

    def close(self) -> None:
        """Safe to call twice."""
        self.connection.close()
        if hasattr(self, "_ring"):
            with contextlib.suppress(ValueError):
                self._ring.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []
