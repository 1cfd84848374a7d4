"""The bytes of a file, packed with gzip or not, in pieces of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

__all__ = ["Unpacker"]

_MAGIC = b"\x1f\x8b"
_GZIP = zlib.MAX_WBITS | 16
_SYNC = b"\0\0\xff\xff"
"""What a flush of the packer ends with."""
_PIECE = 16 << 10
_UNPACKED_PIECE = 1 << 20


class Unpacker:
    """Whether a file is packed is told by its first two bytes. Several gzip members are one file."""

    def __init__(self) -> None:
        self.taken = 0
        """How many bytes of the file stand for what was given so far."""
        self.packed: bool | None = None
        """None: its first bytes have not told yet."""
        self.damaged: str | None = None
        """Why nothing more is unpacked; None: it is."""
        self._member: zlib._Decompress | None = None
        """The one at hand; None between two."""
        self._held = b""
        """What may be the first byte of a member."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What the next bytes of the file stand for: to be taken to its end, at most 1 MiB at a time
        where it is packed, cut where the packer was flushed.
        """
        if self.packed is None:
            data, self._held = self._held + data, b""
            if not data or data == _MAGIC[:1]:
                self._held = data
                return
            self.packed = data.startswith(_MAGIC)
        if not self.packed:
            self.taken += len(data)
            yield data
            return
        at = 0
        while at < len(data) and self.damaged is None:
            sync = data.find(_SYNC, at, at + _PIECE)
            end = at + _PIECE if sync < 0 else sync + len(_SYNC)
            yield from self._unpack(data[at:end])
            at = end

    def _unpack(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            member = self._member
            if member is None:
                piece = self._begin(piece)
                continue
            try:
                unpacked = member.decompress(piece, _UNPACKED_PIECE)
                while True:
                    rest = member.unused_data if member.eof else member.unconsumed_tail
                    self.taken += len(piece) - len(rest)
                    piece = rest
                    yield unpacked
                    if member.eof or not (piece or len(unpacked) == _UNPACKED_PIECE):
                        break
                    unpacked = member.decompress(piece, _UNPACKED_PIECE)
            except zlib.error as error:
                self.damaged = f"it cannot be unpacked: {str(error).rpartition(': ')[2]}"
                return
            if member.eof:
                self._member = None

    def _begin(self, piece: bytes) -> bytes:
        """The next member, if it is one; what is left of the piece."""
        padded = self._held + piece
        found = padded.lstrip(b"\0") if not self._held else padded
        self.taken += len(padded) - len(found)
        self._held = b""
        if not found:
            return b""
        if found == _MAGIC[:1]:
            self._held = found
            return b""
        if not found.startswith(_MAGIC):
            self.damaged = "what is behind its end is not packed"
            return b""
        self._member = zlib.decompressobj(_GZIP)
        return found
