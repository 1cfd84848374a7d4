"""A sink's next seq in a file that survives the process.

One word of 64 bits, stored whole: the seq in the upper 48, a checksum of it in the lower 16. So a kill
at any moment leaves the old seq or the new one. The file is mapped, and never synced: it survives the
process, not the host.
"""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path

__all__ = ["MAX_KEPT_SEQ", "SeqFile"]

MAX_KEPT_SEQ = 2**48 - 1
_MAGIC = 0x6B76_7365_7100_0001  # "kvseq", version 1
_SIZE = 16


class SeqFile:
    """The file at `path`, made when it is not there.

    `found`: what it said; None when it is new or cannot be trusted, and then `reason` says why. A new one
    says 0 from now on; one that cannot be trusted stays as it is until the first `write`. Raises OSError
    when the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            os.posix_fallocate(fd, 0, _SIZE)  # a store into a hole of a full disk would kill us
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        self.found: int | None = None
        self.reason = "it is not there"
        self.created = not size or (size == _SIZE and not any(self._words))  # killed in between
        if not self.created:
            self._read(size)
        else:
            self.write(0)  # one that ends before its first batch leaves nothing to distrust

    def _read(self, size: int) -> None:
        seq, check = self._words[1] >> 16, self._words[1] & 0xFFFF
        if size != _SIZE or self._words[0] != _MAGIC:
            self.reason = f"{size} bytes that are not a seq"
        elif check != _check(seq):
            self.reason = "its checksum is wrong"
        else:
            self.found = seq

    def write(self, seq: int) -> None:
        """Keep `seq`, at most `MAX_KEPT_SEQ`."""
        self._words[1] = seq << 16 | _check(seq)
        self._words[0] = _MAGIC

    def close(self) -> None:
        """Safe to call twice."""
        if not self._map.closed:
            self._words.release()
            self._map.close()


def _check(seq: int) -> int:
    return zlib.crc32(seq.to_bytes(8, "little")) & 0xFFFF
