"""The worker's end of the link.

K1  Publishing never waits and never raises: what does not fit into the ring, or comes when the sidecar
    is gone for good, is refused and counted, and its number is not used again. While a sidecar is only
    awaited the ring is written as ever.
K2  Whatever was refused is repaired: the sidecar sees the hole and asks, and the next pumps tell the
    cache's state anew.
K3  A pump tells at most `RETELL_BLOCKS` blocks of a re-telling, fewer where so many would not fit into
    the ring, and none while more than a sixteenth of the ring is in use. Re-tellings begin at most every
    `retell_interval_s`, so that one which cannot succeed costs little.
K4  The first pump begins with a re-telling: what the cache held before there was a sidecar is told too.
    So does the first of another cache than before: each has ids of its own, and no message tells of two.
    Until that re-telling begins nothing of it is told, and the one before counts as held.
K5  Closing while another thread publishes is safe: whichever of the two is last lets go of the ring.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event as Flag
from threading import Lock

import msgspec

from kvevents.codec import encode_batch
from kvevents.errors import KVEventsError
from kvevents.events import KVEventBatch
from kvevents.records import Record, RecordSource
from kvevents.tokens import TOKEN_BYTES
from publisher.config.sidecar_config import WorkerInfo
from publisher.host_log import host_log
from publisher.link.messages import (
    BATCH,
    FRESH,
    LINK_ID_BYTES,
    VERSION,
    Bound,
    Close,
    Flush,
    Flushed,
    Welcome,
    receive,
    send,
)
from publisher.link.packed import pack_plain
from publisher.link.ring import MIN_RING_BYTES, RingWriter, above_streams
from publisher.once import Once
from publisher.worker.door import ABSENT, SLOW, Admitted, Door, Left, TurnedAway
from publisher.worker.wake import wake

__all__ = ["DEFAULT_RING_BYTES", "RETELL_BLOCKS", "ClientStats", "LinkError", "SidecarClient"]

DEFAULT_RING_BYTES = 32 << 20
RETELL_BLOCKS = 256

_RECORD_BYTES = 64  # of a block's record at most, apart from its tokens and its namespace
_PARTS = 4  # of a re-telling that the ring has room for
_MOST_KEPT_BYTES = 1 << 20
_FIRST, _OTHER = -1, -2  # in the place of a request that was met: a re-telling is due unasked

_log = host_log("kvevents.link")
_encode = msgspec.msgpack.Encoder().encode


class LinkError(Exception):
    """The sidecar did not come, could not start, or is gone."""


@dataclass(slots=True)
class ClientStats:
    """What the worker's end has counted. Messages: offered = written + refused.

    `oversized`: of the refused, those that the ring could not hold were it empty. `invalid`: batches
    that break the contract, and so were no message. `retellings`: begun, but for the first. `bytes`:
    written, without headers. `write_ns`: time spent on encoding and writing.
    """

    written: int = 0
    refused: int = 0
    oversized: int = 0
    invalid: int = 0
    retellings: int = 0
    bytes: int = field(default=0, compare=False)
    write_ns: int = field(default=0, compare=False)

    @property
    def offered(self) -> int:
        """Messages that were to be written."""
        return self.written + self.refused


class SidecarClient:
    """Hands a cache's records to a sidecar. One thread, the scheduler's; any may close it."""

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
        self.link_id = os.urandom(LINK_ID_BYTES)
        """Of this stream of numbers, for all the sidecars that will read it."""
        self._ring = RingWriter(ring_bytes)
        self._eventfd = -1
        try:
            self._eventfd = above_streams(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            welcome = Welcome(VERSION, worker, self.link_id)
            self.door = Door(path, welcome, (self._ring.fd, self._eventfd))
        except BaseException:
            self._ring.close()
            if self._eventfd >= 0:
                os.close(self._eventfd)
            raise
        self.expecting: bool | None = None
        """Whether a sidecar is there or will come, as who attends the door says; None: nobody does."""
        self.attended = False
        """Whether another thread waits at the door, and says when a sidecar has left."""
        self._left = False
        self._connection: socket.socket | None = None
        self._end = select.poll()
        """Of the connection."""
        self._arrivals: deque[socket.socket] = deque()
        """The connection that was let in last, until the scheduler's thread takes it."""
        self._arrived = Flag()
        self._guard = Lock()
        """Held in each call, never while waiting, and for ever once the ring is let go of."""
        self._answered = _FIRST
        """The sidecar's requests for a re-telling that were met; below 0: none of `_source` has begun."""
        self._retell_interval_s = retell_interval_s
        self._retell_at = 0.0
        self._source: Callable[[], object] = object
        """Gives the cache that the last pump was of, and keeps it from nothing."""
        self._said_other = False
        self._most_blocks = min(RETELL_BLOCKS, ring_bytes // (_PARTS * block_bytes))
        self._num_blocks = self._most_blocks
        """Blocks that the next part of a re-telling has."""
        self._buffer = bytearray()
        """What the last batch was packed in; to ask for new memory each time would take as long."""
        self._stats = ClientStats()
        self._invalid_kinds = Once()
        self._closed = False
        self._pid = os.getpid()
        self.sinks: tuple[Bound, ...] = ()
        """Where the sidecar's sinks listen, once it is ready."""
        self.http_endpoint: str | None = None
        """Where its metrics and health are."""

    @property
    def stats(self) -> ClientStats:
        """The counts so far, a copy."""
        return replace(self._stats)

    @property
    def connected(self) -> bool:
        """Whether a sidecar is there, as far as was noticed."""
        return (self._connection is not None and not self._left) or bool(self._arrivals)

    @property
    def owned(self) -> bool:
        """Whether this is the process that made it; in a forked child it does nothing."""
        return os.getpid() == self._pid

    # ------------------------------------------------------------------------------- start-up

    def fileno(self) -> int:
        """The listening socket: readable once a sidecar has come."""
        return self.door.fileno()

    def accept(self, deadline: float) -> int:
        """Wait for a sidecar until `deadline` (of time.monotonic) and see it ready; returns its pid.

        For a link that nobody else attends. Raises LinkError when it does not come, speaks another
        version, fails or dies.
        """
        while (now := time.monotonic()) < deadline:
            poller = select.poll()
            for fd, events in self.door.watched():
                poller.register(fd, events)
            poller.poll(max(0.0, min(deadline, self.door.wake_at()) - now) * 1000)
            for outcome in self.door.attend(time.monotonic()):
                match outcome:
                    case Admitted(pid=pid):
                        self.let_in(outcome)
                        return pid
                    case TurnedAway(reason=reason):
                        raise LinkError(reason)
                    case Left():
                        pass
        raise LinkError(SLOW if self.door.busy else ABSENT)

    def let_in(self, sidecar: Admitted) -> None:
        """Hand a sidecar that is ready to the scheduler's thread; from any one thread."""
        self.sinks, self.http_endpoint = sidecar.sinks, sidecar.http_endpoint
        with contextlib.suppress(IndexError):
            self._arrivals.popleft().close()  # of one that left before it was taken
        self._arrivals.append(sidecar.connection)
        self._arrived.set()
        wake(self._eventfd)  # what is in the ring woke the one before
        if self._closed:
            self._say_close()

    def note_left(self) -> None:
        """The sidecar that was let in last has gone, as who attends the door has seen."""
        self._left = True

    def give_up(self) -> None:
        """Nobody will come any more."""
        self.expecting = False
        self._arrived.set()

    # ------------------------------------------------------------------------------ each step

    def publish(self, records: list[Record]) -> bool:
        """Hand over records, as one batch. False when they were refused (K1)."""
        if not self._enter():
            return False
        try:
            return self._write(records, 0)
        finally:
            self._leave()

    def publish_batch(self, batch: KVEventBatch) -> bool:
        """Hand over a batch of events that are ready, of an engine that has no records.

        False when it was refused (K1), or breaks the contract of docs/wire.md; that is counted as
        invalid, and the first of each kind is logged.
        """
        if not self._enter():
            return False
        try:
            began = time.perf_counter_ns()
            try:
                if batch.dp_rank is None:
                    batch = msgspec.structs.replace(batch, dp_rank=self._worker.dp_rank)
                body: bytes | bytearray = self._buffer
                if not (flags := pack_plain(batch, self._buffer)):
                    body, flags = encode_batch(batch), BATCH
            except Exception as error:  # whatever an engine hands over, it gets no exception (K1)
                self._count_invalid(error)
                return False
            written = self._put(body, flags)
            if len(self._buffer) > _MOST_KEPT_BYTES:
                self._buffer = bytearray()
            self._stats.write_ns += time.perf_counter_ns() - began
            return written
        finally:
            self._leave()

    def has_room(self, num_bytes: int) -> bool:
        """Whether to wait makes no difference to a message of so many bytes, its header included: the
        ring has room for it, never will have, or is let go of.
        """
        if not self._enter():
            return True
        try:
            room, most = self._ring.free_bytes, self._ring.capacity
            return not self._reachable or min(num_bytes, most) <= room
        finally:
            self._leave()

    def pump(self, source: RecordSource) -> bool:
        """Hand over what changed in `source` since the last pump; call it every step, idle or not.

        True: all that there was to hand over was, or waits for its turn in a re-telling. False: it was
        refused, and is counted; later pumps tell the whole state anew (K2, K3). Neither asks anything of
        the caller. It waits for nothing, and does not say that a router has it: `flush` does.

        `source` may be another cache than before, which it replaces (K4), and is not kept alive. Raises
        ValueError, and goes on as before, for one whose page size or hash format is not what the sidecar
        was told (`WorkerInfo`); TypeError for what is no cache.
        """
        if source is None or source is not self._source():
            self._take_up(source)
        if not self._enter():
            return False
        try:
            return self._pump(source)
        finally:
            self._leave()

    def _enter(self) -> bool:
        """Take the guard; False once there is nothing to be done any more."""
        if self._closed or not self.owned or not self._guard.acquire(blocking=False):
            return False
        if self._arrivals:
            self._take_arrival()
        return True

    def _leave(self) -> None:
        self._guard.release()
        if self._closed and not self.attended:
            self._let_go()

    def _pump(self, source: RecordSource) -> bool:
        self._notice_end()
        flags = 0
        if (wanted := self._ring.resyncs) != self._answered and self._may_retell():
            source.begin_retell()
            self._stats.retellings += self._answered != _FIRST
            flags, self._answered = FRESH, wanted
        elif self._answered < 0:
            if not source.retelling:
                source.begin_retell()
            dropped = source.take_records()  # the re-telling that is due has it
            return self._reachable or not dropped or self._put(None, 0)
        telling = source.retelling and self._nearly_free()
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

    def _take_up(self, source: RecordSource) -> None:
        """From now on `source` is told of (K4)."""
        worker = self._worker
        try:
            page_size, hash_format = source.page_size, source.hash_format
        except AttributeError:
            raise TypeError(f"source: a {type(source).__name__} is no cache") from None
        for key, theirs, ours in (
            ("block_size", worker.block_size, page_size),
            ("hash_format", worker.hash_format, hash_format),
        ):
            if theirs != ours:
                raise ValueError(f"{key}: the sidecar was told {theirs}, the cache has {ours}")
        if self._source is not object:
            self._answered = _OTHER
            if not self._said_other:
                self._said_other = True
                _log.warning(
                    "pump: another cache than before; what that held is cleared, and this one told"
                )
        try:
            self._source = weakref.ref(source)
        except TypeError:  # of a class with slots
            self._source = lambda: source

    def _may_retell(self) -> bool:
        now = time.monotonic()
        if now < self._retell_at or not self._half_free():
            return False
        self._retell_at = now + self._retell_interval_s
        return True

    def _take_arrival(self) -> None:
        """A new sidecar is there: it has the place of the one before."""
        with contextlib.suppress(IndexError):
            arrived = self._arrivals.popleft()
            self._disconnect()
            self._connection = arrived
            self._end.register(arrived, select.POLLIN)

    def _notice_end(self) -> None:
        """A look at the connection, without waiting; at the descriptor first, which is quicker. Not where
        somebody says when to: it lets go of the interpreter (see `wake`).
        """
        if self.attended and not self._left:
            return
        self._left = False
        if self._connection is None or not self._end.poll(0):
            return
        try:
            gone = not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:
            self._disconnect()

    def _nearly_free(self) -> bool:
        """Whether the sidecar keeps up: what changes meanwhile is not to wait behind a re-telling."""
        return self._ring.free_bytes * 16 >= self._ring.capacity * 15

    def _half_free(self) -> bool:
        return self._ring.free_bytes * 2 >= self._ring.capacity

    def _write(self, records: list[Record], flags: int) -> bool:
        began = time.perf_counter_ns()
        try:
            body = _encode((time.time(), records))
        except (TypeError, ValueError, OverflowError):  # no records: the sidecar is to see the hole
            body = None
        written = self._put(body, flags)
        self._stats.write_ns += time.perf_counter_ns() - began
        return written

    def _put(self, body: bytes | bytearray | None, flags: int) -> bool:
        """The one way into the ring: every number is either written or refused."""
        stats = self._stats
        if body is None or not self._reachable:
            self._ring.refuse()
            written = False
        else:
            written = self._ring.write(body, flags)
        if written:
            stats.written += 1
            stats.bytes += len(body or b"")
        else:
            stats.refused += 1
            stats.oversized += body is not None and len(body) > self._ring.most_bytes
        wake(self._eventfd)
        return written

    @property
    def _reachable(self) -> bool:
        """Whether what is written will be read."""
        return self._connection is not None if self.expecting is None else self.expecting

    def _count_invalid(self, error: Exception) -> None:
        self._stats.invalid += 1
        kind = re.sub(r"\[\d+\]", "[]", str(error).partition(":")[0])
        if self._invalid_kinds.is_new(kind):
            _log.warning("a batch that breaks the contract was not published: %s", error)

    # --------------------------------------------------------------------------------- waiting

    def flush(self, source: RecordSource, timeout_s: float) -> Flushed | None:
        """Wait until all that `source` has to tell is published; returns the sidecar's answer.

        None when that did not happen in time or the sidecar is gone for good. For shutdown, tests and
        tools: the scheduler has no need of it.
        """
        deadline = time.monotonic() + timeout_s
        while _left(deadline) > 0.001:
            self._arrived.clear()
            self.pump(source)
            connection = self._connection
            if self._closed or not self.owned or not self._reachable:
                break
            if connection is None:
                self._arrived.wait(_left(deadline))
            elif (answer := self._flush_once(connection, deadline)) is not None and (
                answer.in_step and not source.retelling and self._all_answered()
            ):
                return answer
        return None

    def _all_answered(self) -> bool:
        """Whether no request for a re-telling is open."""
        if not self._enter():
            return False
        try:
            return self._ring.resyncs == self._answered
        finally:
            self._leave()

    def _flush_once(self, connection: socket.socket, deadline: float) -> Flushed | None:
        """The answer to a flush; None when there is none in time, or no sidecar any more."""
        number = self._ring.offered
        try:
            poller = select.poll()
            poller.register(connection, select.POLLOUT)
            if not poller.poll(_left(deadline) * 1000):
                return None
            send(connection, Flush(number))
            poller.modify(connection, select.POLLIN)
            while poller.poll(_left(deadline) * 1000):
                message, fds = receive(connection)
                for fd in fds:
                    os.close(fd)
                if not isinstance(message, Flushed):
                    break
                if message.number == number:  # not a late one, to a flush that was given up
                    return message
            else:
                return None
        except BlockingIOError:  # it does not read what is said to it
            return None
        except (OSError, ValueError, KVEventsError):  # ValueError: closed by another thread
            pass
        if self._enter():
            try:
                if connection is self._connection:
                    self._disconnect()
            finally:
                self._leave()
        return None

    # ------------------------------------------------------------------------------------- end

    def stop(self) -> None:
        """Publish no more: the sidecar publishes what is in the ring and that this worker is gone, then
        ends. From any thread, without waiting.
        """
        if not self._closed:
            self._closed = True
            self._say_close()
            self._arrived.set()

    def _say_close(self) -> None:
        if self.owned:
            for connection in (self._connection, *self._arrivals):
                if connection is not None:
                    with contextlib.suppress(OSError):
                        send(connection, Close())

    def close(self) -> None:
        """Stop, and let go of everything. Does not wait for the sidecar. Safe to call twice.

        While a thread attends the door, that is `Sidecar.close`'s to do, and this only stops.
        """
        self.stop()
        if not self.attended:
            self._let_go()

    def _let_go(self) -> None:
        """Unless a call is under way: then its end comes here again (K5)."""
        if self._guard.acquire(blocking=False):
            self._disconnect()
            self.close_copies()

    def close_copies(self) -> None:
        """Let go of the descriptors, as a forked child does whatever its parent was doing."""
        self.door.close()
        while self._arrivals:
            self._arrivals.popleft().close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1
        self._ring.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            if self.owned:  # the door has a copy
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            self._end.unregister(self._connection)
            self._connection.close()
            self._connection = None


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
