"""The format of a capture: messages as they came, in a file that a kill can tear but not spoil.

A line `kvevents capture 1`, then records: length of the body u32, CRC-32 of length and body u32, both
little-endian, and the body, MessagePack. The first record is a `CaptureHead`, all others are `Message`s.
Fields are only ever added; another number in the first line is another format. What is cut off or damaged
ends the capture: it, and all behind it, is not read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from kvevents.errors import KVEventsError
from kvevents.message import Channel, Message

__all__ = ["CaptureHead", "CaptureReader", "capture_start", "pack_message"]

_MAGIC = b"kvevents capture "
_VERSION = b"1"
_FIRST_LINE = _MAGIC + _VERSION + b"\n"
_MAX_FIRST_LINE = 64
_lengths = struct.Struct("<II")
_length = struct.Struct("<I")
_MAX_BODY = 1 << 30


class CaptureHead(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a capture is of, and since when, in nanoseconds since the epoch."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    started_ns: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(CaptureHead).decode
_decode_message = msgspec.msgpack.Decoder(Message).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def capture_start(head: CaptureHead) -> bytes:
    """What a capture begins with."""
    return _FIRST_LINE + _record(_encode(head))


def pack_message(at_ns: int, channel: Channel, frames: Sequence[bytes]) -> bytes:
    """One message's record."""
    return _record(_encode(Message(at_ns, channel, list(frames))))


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


def _record(body: bytes) -> bytes:
    length = _length.pack(len(body))
    return length + _length.pack(zlib.crc32(body, zlib.crc32(length))) + body


class CaptureReader:
    """Reads a capture piece by piece.

    `head`: None until it came. `damaged`: why nothing more is read; None: it is.
    """

    def __init__(self) -> None:
        self.head: CaptureHead | None = None
        self.damaged: str | None = None
        self._begun = False
        self._rest = bytearray()

    def close(self) -> None:
        """There is no more. A last record that is cut off is no damage; a length that is a lie is."""
        if self.damaged is None and self._begun and _is_whole(self._rest[_lengths.size :]):
            self.damaged = "a record whose length is not its own"

    @property
    def torn(self) -> int:
        """How many bytes are behind the last whole record; of the file, once all of it was fed."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises KVEventsError when it is no capture, or of a version
        that is not known.
        """
        self._rest += data
        if not self._begun and not self._read_first_line():
            return []
        messages: list[Message] = []
        at = 0
        while self.damaged is None and len(self._rest) - at >= _lengths.size:
            length, crc = _lengths.unpack_from(self._rest, at)
            if length > _MAX_BODY:
                self.damaged = f"a record of {length} bytes"
                break
            end = at + _lengths.size + length
            if len(self._rest) < end:
                break
            body = bytes(self._rest[at + _lengths.size : end])
            if zlib.crc32(body, zlib.crc32(_length.pack(length))) != crc:
                self.damaged = "a record whose checksum is not its own"
                break
            if (message := self._read_record(body)) is not None:
                messages.append(message)
            at = at if self.damaged is not None else end
        del self._rest[:at]
        return messages

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
            self.damaged = "a record that is not understood"
            return None
