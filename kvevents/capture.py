"""The format of a capture: messages as they came, in a file that a kill can tear but not spoil.

A line `kvevents capture 1`, then records: length of the body u32, CRC-32 of length and body u32, both
little-endian, and the body, MessagePack. The first record is a `CaptureHead`, all others are `Message`s.
Fields are only ever added; another number in the first line is another format. What is cut off or damaged
ends the capture: it, and all behind it, is not read. All of it may be packed with gzip, as
`CaptureWriter` does; docs/capture.md is for those who read it with tools of their own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec

from kvevents.errors import KVEventsError
from kvevents.message import Channel, Message
from kvevents.unpacker import Unpacker

__all__ = [
    "MAX_RECORD_BYTES",
    "CaptureHead",
    "CaptureReader",
    "CaptureWriter",
    "capture_start",
    "pack_message",
]

MAX_RECORD_BYTES = 128 << 20
"""Of a body. A reader takes no larger one for true, so it never holds more than that."""

_MAGIC = b"kvevents capture "
_VERSION = b"1"
_FIRST_LINE = _MAGIC + _VERSION + b"\n"
_MAX_FIRST_LINE = 64
_lengths = struct.Struct("<II")
_length = struct.Struct("<I")

_GZIP = zlib.MAX_WBITS | 16
_LEVEL = 1  # 6 packs these payloads 1 % smaller, at two thirds of the speed


class CaptureHead(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a capture is of, and since when, in nanoseconds since the epoch."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    started_ns: int = 0


class _AnyMessage(msgspec.Struct, array_like=True, frozen=True):
    """A message of whatever channel; behind its fields there may be more."""

    at_ns: int
    channel: int
    frames: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(CaptureHead).decode
_decode_message = msgspec.msgpack.Decoder(Message).decode
_decode_any_message = msgspec.msgpack.Decoder(_AnyMessage).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def capture_start(head: CaptureHead) -> bytes:
    """What a capture begins with."""
    return _FIRST_LINE + _record(_encode(head))


def pack_message(at_ns: int, channel: Channel, frames: Sequence[bytes]) -> bytes:
    """One message's record. Raises ValueError for one of more than `MAX_RECORD_BYTES`."""
    return _record(_encode(Message(at_ns, channel, list(frames))))


def _record(body: bytes) -> bytes:
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"message: {len(body)} bytes are above {MAX_RECORD_BYTES}")
    length = _length.pack(len(body))
    return length + _length.pack(zlib.crc32(body, zlib.crc32(length))) + body


class CaptureWriter:
    """Packs a capture: each method returns the bytes that are next in the file.

    What was added before a `flush` can be read as soon as the bytes up to it are in the file, whatever
    becomes of the rest.
    """

    def __init__(self, head: CaptureHead) -> None:
        self._head = head
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._flushed = True

    def start(self) -> bytes:
        """What it begins with. Once, and before all else."""
        return self._packer.compress(capture_start(self._head)) + self._packer.flush(
            zlib.Z_SYNC_FLUSH
        )

    def add(self, message: Message) -> bytes:
        """One more message. Raises ValueError, and has added nothing, where it is too large."""
        record = pack_message(message.at_ns, message.channel, message.frames)
        self._flushed = False
        return self._packer.compress(record)

    def flush(self) -> bytes:
        """Nothing, unless something was added since the last."""
        if self._flushed:
            return b""
        self._flushed = True
        return self._packer.flush(zlib.Z_SYNC_FLUSH)

    def close(self) -> bytes:
        """The end; nothing can be added behind it."""
        return self._packer.flush()


class CaptureReader:
    """Reads a capture piece by piece, packed or not.

    `head`: None until it came. `damaged`: why nothing more is read; None: it is.
    """

    def __init__(self) -> None:
        self.head: CaptureHead | None = None
        self.damaged: str | None = None
        self._begun = False
        self._unpacker = Unpacker()
        self._rest = bytearray()
        """Of the records, what is not whole yet."""
        self._fed = 0
        self._whole = 0
        """Of the bytes that were fed, those up to the end of a record."""

    def close(self) -> None:
        """There is no more. A last record that is cut off is no damage; a length that is a lie is."""
        if self.damaged is None and self._begun and _is_whole(self._rest[_lengths.size :]):
            self.damaged = "a record whose length is not its own"

    @property
    def torn(self) -> int:
        """How many bytes are behind the last whole record; of the file, once all of it was fed. Where
        they are packed, they cannot be told to the byte.
        """
        return self._fed - self._whole

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises KVEventsError when it is no capture, or of a version
        that is not known.
        """
        return list(self.read(data))

    def read(self, data: bytes) -> Iterator[Message]:
        """The same one by one, for they may be more than fit into memory. To be taken to its end before
        anything else is fed.
        """
        self._fed += len(data)
        if not self._ended:
            yield from self._read_pieces(data)

    # ---------------------------------------------------------------------------------- inside

    @property
    def _ended(self) -> bool:
        return self.damaged is not None

    def _read_pieces(self, data: bytes) -> Iterator[Message]:
        unpacker = self._unpacker
        before = unpacker.taken
        for piece in unpacker.feed(data):
            left = len(self._rest) + len(piece)
            yield from self._read_records(piece)
            if not unpacker.packed:
                self._whole = unpacker.taken - len(self._rest)
            elif not self._rest:
                self._whole = unpacker.taken
            elif len(self._rest) < left:  # the record that is not whole began in this piece
                self._whole = before
            before = unpacker.taken
            if self._ended:
                break
        if unpacker.packed and not self._rest:
            self._whole = unpacker.taken
        self.damaged = self.damaged or unpacker.damaged
        if self._ended:
            self._rest.clear()

    def _read_records(self, data: bytes) -> Iterator[Message]:
        self._rest += data
        if not self._begun and not self._read_first_line():
            return
        at = 0
        while not self._ended and len(self._rest) - at >= _lengths.size:
            length, crc = _lengths.unpack_from(self._rest, at)
            if length > MAX_RECORD_BYTES:
                self.damaged = self._why_so_long(at, length)
                break
            end = at + _lengths.size + length
            if len(self._rest) < end:
                break
            body = bytes(self._rest[at + _lengths.size : end])
            if zlib.crc32(body, zlib.crc32(_length.pack(length))) != crc:
                self.damaged = "a record whose checksum is not its own"
                break
            message = self._read_record(body)
            at = at if self._ended else end
            if message is not None:
                yield message
        del self._rest[:at]

    def _why_so_long(self, at: int, length: int) -> str:
        if _MAGIC.startswith(self._rest[at : at + len(_MAGIC)]):
            return "another capture begins: one file is of one"
        return f"a record of {length} bytes"

    def _read_first_line(self) -> bool:
        """Whether it is there and ours."""
        line, newline, _ = bytes(self._rest[:_MAX_FIRST_LINE]).partition(b"\n")
        if not (line.startswith(_MAGIC) if newline else _may_become_magic(line)):
            raise KVEventsError("no capture: it does not begin with 'kvevents capture'")
        if not newline:
            return False
        if line != _FIRST_LINE[:-1]:
            version = ascii(line[len(_MAGIC) :])[2:-1]
            raise KVEventsError(f"capture version {version}: only {_VERSION.decode()} is known")
        del self._rest[: len(_FIRST_LINE)]
        self._begun = True
        return True

    def _read_record(self, body: bytes) -> Message | None:
        try:
            if self.head is None:
                self.head = _decode_head(body)
                return None
            return _decode_message(body)
        except _UNREADABLE:
            if not _is_of_another_channel(body):
                self.damaged = "a record that is not understood"
            return None


def _is_of_another_channel(body: bytes) -> bool:
    """Whether it is a message, of a channel that a later writer knows."""
    try:
        channel = _decode_any_message(body).channel
    except _UNREADABLE:
        return False
    return channel > max(Channel)


def _is_whole(body: bytearray) -> bool:
    """Whether a body is all there, whatever its length is said to be."""
    try:
        msgspec.msgpack.decode(body, type=msgspec.Raw)
    except _UNREADABLE as error:
        return "trailing" in str(error)
    return True


def _may_become_magic(line: bytes) -> bool:
    if len(line) < len(_MAGIC):
        return _MAGIC.startswith(line)
    return line.startswith(_MAGIC) and len(line) < _MAX_FIRST_LINE
