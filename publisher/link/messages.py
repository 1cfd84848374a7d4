"""The link's control socket: what worker and sidecar say to each other besides the ring.

A unix socket of type SEQPACKET: each message is one packet. The sidecar connects and says Hello; the
worker answers Welcome with two file descriptors, the ring's memory and the eventfd that wakes the
reader; the sidecar binds its sockets and says Ready, or Failed and why. From then on the end of the
connection is the death of the other side.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from typing import TypeAlias

import msgspec

from kvevents.errors import KVEventsError
from publisher.config.sidecar_config import WorkerInfo

__all__ = [
    "BATCH",
    "COLUMNS",
    "FRESH",
    "LINK_ID_BYTES",
    "LOST",
    "PACKED",
    "VERSION",
    "Bound",
    "Close",
    "ControlMessage",
    "Failed",
    "Flush",
    "Flushed",
    "Hello",
    "Ready",
    "Welcome",
    "peer_pid",
    "receive",
    "send",
]

VERSION = 3
LINK_ID_BYTES = 16
FRESH = 1
"""Flag of a ring message: a re-telling begins with it, and what was missed before no longer matters."""

BATCH = 2
"""Flag of a ring message: its body is a batch of events, from an engine that has no records."""

LOST = 4
"""Flag of an input that stands for all before it which never came. Its body says why."""

PACKED = 8
"""Flag of a BATCH: its body is as publisher.link.packed makes it."""

COLUMNS = 16
"""Flag of a PACKED body whose head says all of it."""

_MAX_PACKET = 64 << 10
_MAX_FDS = 2
_ucred = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


class Bound(msgspec.Struct, frozen=True):
    """Where a sink listens, ports filled in."""

    endpoint: str
    replay_endpoint: str | None


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Sidecar: here I am."""

    version: int
    pid: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Sidecar: every socket is bound. `http_endpoint`: where its metrics and health are."""

    sinks: tuple[Bound, ...]
    http_endpoint: str | None = None


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Worker: this is me; ring and eventfd come along.

    `link_id`: of the ring's stream of numbers. It is another one only where that begins anew.
    `before`: what an earlier sidecar of this link had bound, so that ports may stay what they were.
    """

    version: int
    worker: WorkerInfo
    link_id: bytes
    before: Ready | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Sidecar: I cannot start."""

    reason: str


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Worker: answer when all messages before `number` are published."""

    number: int


class Flushed(msgspec.Struct, tag=True, frozen=True):
    """Sidecar: all before `number` are. `next_seqs`: of each sink. `in_step`: False when a resync is
    awaited.

    `num_events`: events told by the worker so far, those of re-tellings included.
    """

    number: int
    next_seqs: tuple[int, ...]
    in_step: bool
    num_events: int


class Close(msgspec.Struct, tag=True, frozen=True):
    """Worker: I am leaving in good order."""


ControlMessage: TypeAlias = Hello | Welcome | Ready | Failed | Flush | Flushed | Close

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ControlMessage).decode


def peer_pid(connection: socket.socket) -> int:
    """The pid of the process that made the other end; 0 where it is in another pid namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size)
    pid: int = _ucred.unpack(credentials)[0]
    return pid


def send(connection: socket.socket, message: ControlMessage, fds: tuple[int, ...] = ()) -> None:
    """Raises OSError when the other side is gone, also where that would raise SIGPIPE."""
    along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    connection.sendmsg([_encode(message)], along, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[ControlMessage | None, list[int]]:
    """The next message and the descriptors that came with it; (None, []) at the end of the connection.

    Raises KVEventsError for a packet that is no message, BlockingIOError or TimeoutError when there
    is none.
    """
    try:
        data, fds, _, _ = socket.recv_fds(
            connection, _MAX_PACKET, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None, []
    if not data:
        return None, []
    try:
        return _decode(data), list(fds)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise KVEventsError(f"control message: {error}") from error
