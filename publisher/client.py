"""The worker's end of the link.

K1  Publishing never waits and never raises: what does not fit into the ring, or comes when the sidecar
    is gone, is refused and counted, and its number is not used again.
K2  Whatever was refused is repaired: the sidecar sees the hole and asks, and the next pumps tell the
    cache's state anew.
K3  A pump tells at most `RETELL_BLOCKS` blocks of a re-telling, fewer where so many would not fit into
    the ring, and none while the ring is over half full. Re-tellings begin at most every
    `retell_interval_s`, so that one which cannot succeed costs little.
K4  The first pump begins with a re-telling: what the cache held before there was a sidecar is told too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvevents.errors import KVEventsError
from kvevents.records import Record, RecordSource
from kvevents.tokens import TOKEN_BYTES
from publisher.config import WorkerInfo
from publisher.link import (
    FRESH,
    VERSION,
    Bound,
    Close,
    Failed,
    Flush,
    Flushed,
    Hello,
    Ready,
    Welcome,
    receive,
    send,
)
from publisher.ring import MIN_RING_BYTES, RingWriter

__all__ = ["DEFAULT_RING_BYTES", "RETELL_BLOCKS", "ClientStats", "LinkError", "SidecarClient"]

DEFAULT_RING_BYTES = 32 << 20
RETELL_BLOCKS = 256

_RECORD_BYTES = 64  # of a block's record at most, apart from its tokens and its namespace
_PARTS = 4  # of a re-telling that the ring has room for

_ENDED = "the sidecar ended before it was ready"

_encode = msgspec.msgpack.Encoder().encode


class LinkError(Exception):
    """The sidecar did not come, could not start, or is gone."""


@dataclass(slots=True)
class ClientStats:
    """What the worker's end has counted. Messages: offered = written + refused."""

    written: int = 0
    refused: int = 0
    retellings: int = 0


class SidecarClient:
    """Hands a cache's records to a sidecar. One thread, the scheduler's."""

    def __init__(
        self,
        path: Path,
        worker: WorkerInfo,
        *,
        ring_bytes: int = DEFAULT_RING_BYTES,
        retell_interval_s: float = 0.05,
    ) -> None:
        """Listen on the unix socket `path`, in a directory that is this user's alone.

        Raises ValueError for a ring too small, OSError when the socket cannot be made.
        """
        block_bytes = worker.block_size * TOKEN_BYTES + _RECORD_BYTES
        if ring_bytes < (least := max(MIN_RING_BYTES, _PARTS * block_bytes)):
            raise ValueError(
                f"ring_bytes: {ring_bytes} is below {least}, for blocks of {worker.block_size} tokens"
            )
        self._worker = worker
        self._ring = RingWriter(ring_bytes)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(str(path))
            self._listener.listen(1)
        except BaseException:
            self._release()
            raise
        self._connection: socket.socket | None = None
        self._answered = -1
        """The sidecar's requests for a re-telling that were met; -1: the first is due unasked."""
        self._retell_interval_s = retell_interval_s
        self._retell_at = 0.0
        self._source: RecordSource | None = None
        self._most_blocks = min(RETELL_BLOCKS, ring_bytes // (_PARTS * block_bytes))
        self._num_blocks = self._most_blocks
        """Blocks that the next part of a re-telling has."""
        self._stats = ClientStats()
        self._closed = False
        self._pid = os.getpid()
        self.sinks: tuple[Bound, ...] = ()
        """Where the sidecar's sinks listen, once it is ready."""

    @property
    def stats(self) -> ClientStats:
        """The counts so far, a copy."""
        return replace(self._stats)

    @property
    def connected(self) -> bool:
        """Whether a sidecar is there, as far as was noticed."""
        return self._connection is not None

    @property
    def owned(self) -> bool:
        """Whether this is the process that made it; in a forked child it does nothing."""
        return os.getpid() == self._pid

    # ------------------------------------------------------------------------------- start-up

    def fileno(self) -> int:
        """The listening socket: readable once a sidecar has come."""
        return self._listener.fileno()

    def accept(self, deadline: float) -> int:
        """Wait for a sidecar until `deadline` (of time.monotonic) and see it ready; returns its pid.

        Raises LinkError when it does not come, speaks another version, fails or dies.
        """
        self._listener.settimeout(_left(deadline))
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            raise LinkError("the sidecar did not connect in time") from None
        try:
            pid = self._handshake(connection, deadline)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(0)
        self._connection = connection
        return pid

    def _handshake(self, connection: socket.socket, deadline: float) -> int:
        match self._await(connection, deadline):
            case Hello(version=version, pid=pid) if version == VERSION:
                pass
            case other:
                raise LinkError(f"the sidecar said {other}, not Hello of version {VERSION}")
        try:
            send(connection, Welcome(VERSION, self._worker), (self._ring.fd, self._eventfd))
        except OSError:
            raise LinkError(_ENDED) from None
        match self._await(connection, deadline):
            case Ready(sinks=sinks):
                self.sinks = sinks
            case Failed(reason=reason):
                raise LinkError(reason)
            case other:
                raise LinkError(f"the sidecar said {other}, not Ready")
        return pid

    def _await(self, connection: socket.socket, deadline: float) -> object:
        connection.settimeout(_left(deadline))
        try:
            message, _ = receive(connection)
        except TimeoutError:
            raise LinkError("the sidecar did not get ready in time") from None
        except KVEventsError as error:
            raise LinkError(str(error)) from error
        if message is None:
            raise LinkError(_ENDED)
        return message

    # ------------------------------------------------------------------------------ each step

    def publish(self, records: list[Record]) -> bool:
        """Hand over records, as one batch. False when they were refused (K1)."""
        return self._write(records, 0)

    def pump(self, source: RecordSource) -> bool:
        """Hand over what changed in `source` since the last pump; call it every step, idle or not.

        Answers the sidecar's requests for a resync (K2, K3). False when something was refused.
        Raises ValueError, the first time it sees `source`, when that is not what the sidecar was
        told: its page size or hash format is another.
        """
        if source is not self._source:
            self._check(source)
        if self._closed or not self.owned:
            return False
        self._notice_end()
        flags = 0
        if (wanted := self._ring.resyncs) != self._answered and self._may_retell():
            source.begin_retell()
            self._stats.retellings += self._answered >= 0
            flags, self._answered = FRESH, wanted
        telling = source.retelling and self._half_free()
        if telling:
            source.retell(self._num_blocks)
        records = source.take_records()
        if not records:
            return True
        written = self._write(records, flags)
        if not written and (telling or flags):  # begin again, in smaller parts: names take room too
            self._answered = wanted - 1
            self._num_blocks = max(1, self._num_blocks // 2)
        elif not source.retelling:
            self._num_blocks = self._most_blocks
        return written

    def _check(self, source: RecordSource) -> None:
        worker = self._worker
        for key, theirs, ours in (
            ("block_size", worker.block_size, source.page_size),
            ("hash_format", worker.hash_format, source.hash_format),
        ):
            if theirs != ours:
                raise ValueError(f"{key}: the sidecar was told {theirs}, the cache has {ours}")
        self._source = source

    def _may_retell(self) -> bool:
        now = time.monotonic()
        if now < self._retell_at or not self._half_free():
            return False
        self._retell_at = now + self._retell_interval_s
        return True

    def _notice_end(self) -> None:
        """A look at the connection, without waiting."""
        if self._connection is None:
            return
        try:
            gone = not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:
            self._disconnect()

    def _half_free(self) -> bool:
        return self._ring.free_bytes * 2 >= self._ring.capacity

    def _write(self, records: list[Record], flags: int) -> bool:
        if self._closed or not self.owned:
            return False
        written = self._connection is not None and self._offer(records, flags)
        with contextlib.suppress(BlockingIOError):  # 2**64 - 2 wakes not read yet: awake enough
            os.eventfd_write(self._eventfd, 1)
        if written:
            self._stats.written += 1
        else:
            self._stats.refused += 1
        return written

    def _offer(self, records: list[Record], flags: int) -> bool:
        try:
            body = _encode((time.time(), records))
        except (TypeError, ValueError, OverflowError):  # no records: the sidecar is to see the hole
            self._ring.refuse()
            return False
        return self._ring.write(body, flags)

    # --------------------------------------------------------------------------------- waiting

    def flush(self, source: RecordSource, timeout_s: float) -> Flushed | None:
        """Wait until all that `source` has to tell is published; returns the sidecar's answer.

        None when that did not happen in time or the sidecar is gone. For shutdown, tests and tools:
        the scheduler has no need of it.
        """
        deadline = time.monotonic() + timeout_s
        while self._connection is not None and _left(deadline) > 0.001:
            self.pump(source)
            connection = self._connection
            if connection is None or (answer := self._flush_once(connection, deadline)) is None:
                break
            settled = answer.in_step and not source.retelling
            if settled and self._ring.resyncs == self._answered:
                return answer
        return None

    def _flush_once(self, connection: socket.socket, deadline: float) -> Flushed | None:
        number = self._ring.offered
        try:
            connection.settimeout(_left(deadline))
            send(connection, Flush(number))
            while True:
                connection.settimeout(_left(deadline))
                message, _ = receive(connection)
                match message:
                    case Flushed(number=answered) if answered == number:
                        return message
                    case Flushed():
                        pass  # late, to a flush that was given up
                    case _:
                        break
        except TimeoutError:
            return None
        except (OSError, KVEventsError):
            pass
        finally:
            connection.settimeout(0)
        self._disconnect()
        return None

    def close(self) -> None:
        """Leave: the sidecar publishes what is in the ring and that this worker is gone, then ends.

        Does not wait for it. Safe to call twice.
        """
        if self._closed:
            return
        self._closed = True
        if self.owned:
            self._path.unlink(missing_ok=True)
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    send(self._connection, Close())
        self._disconnect()
        self._release()

    def _release(self) -> None:
        self._listener.close()
        self._ring.close()
        os.close(self._eventfd)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
