"""The ring: messages from one writer to one reader, through shared memory.

Layout: a header page of 64-bit words, then `capacity` bytes in which messages follow each other,
wrapping at the end. A message is length u32, flags u32, number u64, body, padding to 8 bytes. `head`
counts the bytes ever written, `tail` those ever read.

B1  A message is readable only when all of it is written: `head` moves last. So a writer that dies in
    the middle of a write has written nothing.
B2  Its place is writable only when the reader has let go of it: `tail` moves after the message was
    used. So a reader that dies in the middle is followed by one that reads the message again.
B3  Every message offered gets the next number, also when it is refused. `offered` moves after `head`,
    so a reader that saw `offered` and then read all there is knows which numbers are missing.

Each word has one writer. Words are aligned and stored whole; on processors that may reorder stores, a
lock taken and released between body and `head` keeps them in order.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
from threading import Lock

import msgspec

from kvevents.errors import KVEventsError

__all__ = ["MIN_RING_BYTES", "Message", "RingReader", "RingWriter", "above_streams"]

MIN_RING_BYTES = 4096
_HEADER_BYTES = 4096
_MAGIC = 0x6B76_7269_6E67_0001  # "kvring", version 1
_prefix = struct.Struct("<IIQ")

# Words, on cache lines of their own for writer and reader.
_W_MAGIC, _W_CAPACITY = 0, 1
_W_HEAD, _W_OFFERED = 8, 9
_W_TAIL, _W_RESYNCS = 16, 17

_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message; `number` counts all that were offered."""

    number: int
    flags: int
    body: bytes


def above_streams(fd: int) -> int:
    """The descriptor, or a copy in its place: in a process whose standard streams are closed it would be
    one of them, and be written into.
    """
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


class _Ring:
    """The shared part: the mapping."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._all = memoryview(self._map)
        self._words = self._all[:_HEADER_BYTES].cast("Q")
        self._data = self._all[_HEADER_BYTES:]
        self.capacity = size - _HEADER_BYTES

    def close(self) -> None:
        """Unmap; safe to call twice."""
        for view in (self._words, self._data, self._all):
            view.release()
        self._map.close()


class RingWriter(_Ring):
    """The worker's end. `fd` is the shared memory, to be passed to the reader."""

    def __init__(self, capacity: int) -> None:
        """Raises ValueError for a capacity below `MIN_RING_BYTES`; it is rounded up to whole pages."""
        if capacity < MIN_RING_BYTES:
            raise ValueError(f"ring_bytes: {capacity} is below {MIN_RING_BYTES}")
        size = _HEADER_BYTES + -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = above_streams(os.memfd_create("kvevents-ring", os.MFD_CLOEXEC))
        try:
            os.ftruncate(self.fd, size)
            super().__init__(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self._words[_W_CAPACITY] = self.capacity
        self._words[_W_MAGIC] = _MAGIC
        self._head = self._offered = 0
        self._fence = Lock()

    @property
    def offered(self) -> int:
        """Messages offered so far; the number of the next."""
        return self._offered

    @property
    def free_bytes(self) -> int:
        """Room for messages, their headers included."""
        used = self._head - self._words[_W_TAIL]
        return self.capacity - used if 0 <= used <= self.capacity else 0

    @property
    def most_bytes(self) -> int:
        """The longest body there can be."""
        return self.capacity - _prefix.size

    @property
    def resyncs(self) -> int:
        """How often the reader has asked for a resync."""
        return int(self._words[_W_RESYNCS])

    def refuse(self) -> None:
        """Count a message that cannot be written, so that the reader misses it."""
        self._offered += 1
        self._words[_W_OFFERED] = self._offered

    def write(self, body: bytes | bytearray, flags: int = 0) -> bool:
        """Offer a message; False when there is no room for it. O(len(body)), no waiting."""
        number, length = self._offered, len(body)
        needed = _prefix.size + (length + 7 & ~7)
        if needed > self.free_bytes:
            self.refuse()
            return False
        self._offered = number + 1
        self._copy(self._head, _prefix.pack(length, flags, number))
        self._copy(self._head + _prefix.size, body)
        self._head += needed
        if not _ORDERED_STORES:
            with self._fence:
                pass
        self._words[_W_HEAD] = self._head
        self._words[_W_OFFERED] = self._offered
        return True

    def close(self) -> None:
        if self.fd >= 0:
            super().close()
            os.close(self.fd)
            self.fd = -1

    def _copy(self, position: int, data: bytes | bytearray) -> None:
        start = position % self.capacity
        left = self.capacity - start
        if len(data) <= left:
            self._data[start : start + len(data)] = data
        else:
            self._data[start:] = data[:left]
            self._data[: len(data) - left] = data[left:]


class RingReader(_Ring):
    """The sidecar's end."""

    def __init__(self, fd: int) -> None:
        """Raises KVEventsError when `fd` is no ring of this version."""
        size = os.fstat(fd).st_size
        if size < _HEADER_BYTES + MIN_RING_BYTES:
            raise KVEventsError(f"ring: {size} bytes are too few")
        super().__init__(fd, size)
        if self._words[_W_MAGIC] != _MAGIC or self._words[_W_CAPACITY] != self.capacity:
            self.close()
            raise KVEventsError("ring: not one of this version")
        self._tail = int(self._words[_W_TAIL])

    @property
    def offered(self) -> int:
        """Messages offered so far (B3)."""
        return int(self._words[_W_OFFERED])

    @property
    def used_bytes(self) -> int:
        """Bytes that the writer cannot use: messages not released yet, their headers included."""
        return min(self.capacity, max(0, int(self._words[_W_HEAD] - self._words[_W_TAIL])))

    def read(self) -> Message | None:
        """The next message, None when there is none. `release` lets its place go.

        Raises KVEventsError for bytes that are no message; `skip_all` goes on from there.
        """
        available = self._words[_W_HEAD] - self._tail
        if available == 0:
            return None
        if not _prefix.size <= available <= self.capacity:
            raise KVEventsError(f"ring: {available} bytes available of {self.capacity}")
        length, flags, number = _prefix.unpack(self._bytes(self._tail, _prefix.size))
        if _prefix.size + (length + 7 & ~7) > available:
            raise KVEventsError(f"ring: a message of {length} bytes, {available} available")
        body = self._bytes(self._tail + _prefix.size, length)
        self._tail += _prefix.size + (length + 7 & ~7)
        return Message(number, flags, body)

    def release(self) -> None:
        """Let go of every message read so far (B2)."""
        self._words[_W_TAIL] = self._tail

    def skip_all(self) -> None:
        """Let go of all that is written."""
        self._tail = int(self._words[_W_HEAD])
        self.release()

    def ask_resync(self) -> None:
        """Ask the writer to tell its state anew."""
        self._words[_W_RESYNCS] = (self._words[_W_RESYNCS] + 1) & (2**64 - 1)

    def _bytes(self, position: int, length: int) -> bytes:
        start = position % self.capacity
        end = start + length
        if end <= self.capacity:
            return bytes(self._data[start:end])
        return bytes(self._data[start:]) + bytes(self._data[: end - self.capacity])
