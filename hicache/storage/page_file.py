"""A page as a file: its bytes, then what they are, then a footer that proves both.

```
page | metadata, msgpack | page's bytes u64, metadata's u32, page's sum u32, metadata's CRC-32, magic
```

Little-endian. The page comes first, so that the first bytes of the file are all that a reader needs who
knows no footer. There is no fsync: what a crash tears apart, the checksums find.

A page's sum: of every whole 4 KiB its words of 64 bits, in the machine's byte order, each times an odd
constant and added up modulo 2^64; then the CRC-32 of these numbers and of what is behind the last 4 KiB.
It misses one change in 2^32, as the CRC-32 of all bytes does, which takes two to three times as long; and
those that cancel out within 4 KiB, as the top bits of two words do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL, c_int, c_int64, get_errno
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM, ENOSPC
from hashlib import shake_128
from pathlib import Path
from struct import Struct
from typing import Any
from zlib import crc32

import msgspec
import torch

from hicache.storage.backend import StoredPage
from kvevents.namespace import Namespace

__all__ = [
    "PASSING",
    "BadPage",
    "encode_metadata",
    "footer_size",
    "page_sum",
    "read_page",
    "read_trailer",
    "write_page",
]

PASSING = frozenset({EMFILE, ENFILE, ENOMEM, EAGAIN})
"""Errors that say nothing about the file."""
_MAGIC = b"kvpage\x00\x02"
_FOOTER = Struct("<QIII8s")
_TAIL = 4096
"""Read at once from a file's end; a trailer is seldom longer."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Neither follow a link nor wait for a pipe that somebody put in a page's place."""
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
_BLOCK = 4096
_LARGE = 256 << 10
"""Bytes for which to look for space at once is worth the call."""
_FACTORS = torch.frombuffer(bytearray(shake_128(b"kvpage").digest(_BLOCK)), dtype=torch.int64) | 1
_libc = CDLL(None, use_errno=True)
_fallocate: Any = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = c_int, c_int, c_int64, c_int64

footer_size = _FOOTER.size


class BadPage(Exception):
    """A file that is not the page asked for: torn, changed, or another's. The message says why."""


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    parent: bytes | None
    namespace: Namespace
    tokens: bytes
    fingerprint: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Metadata).decode


def encode_metadata(page: StoredPage, fingerprint: str) -> bytes:
    """What stands behind the page's bytes."""
    return _encode(_Metadata(*page, fingerprint))


def page_sum(content: memoryview) -> int:
    """Of a page's bytes, which can be written to; see above."""
    num_blocks = len(content) // _BLOCK
    if not num_blocks:
        return crc32(content)
    words = torch.frombuffer(content, dtype=torch.int64, count=num_blocks * (_BLOCK // 8))
    sums = bytearray(8 * num_blocks)
    out = torch.frombuffer(sums, dtype=torch.int64)
    torch.mv(words.view(num_blocks, _BLOCK // 8), _FACTORS, out=out)
    return crc32(content[num_blocks * _BLOCK :], crc32(sums))


def write_page(
    path: str,
    temporary: str,
    content: memoryview,
    metadata: bytes,
    checksum: Callable[[], int] | None = None,
) -> None:
    """Write a page's file in one step: `path` has all of it, or what it had before.

    `temporary`: where it is written; a file that is there already is written over, which is faster than
    making one. `checksum` waits for the content's sum, where somebody else computes it. Makes the folders
    where they are missing. Raises OSError, and what `checksum` raises; `temporary` is gone then.
    """
    try:
        fd = _create(temporary)
        try:
            there, num_bytes = os.fstat(fd).st_size, len(content) + len(metadata) + footer_size
            if there > num_bytes:  # seldom: that takes as long as to make a file
                os.ftruncate(fd, num_bytes)
            elif not there and len(content) >= _LARGE:
                _reserve(fd, num_bytes)
            checksums = checksum() if checksum else page_sum(content), crc32(metadata)
            footer = _FOOTER.pack(len(content), len(metadata), *checksums, _MAGIC)
            _write(fd, [content, memoryview(metadata + footer)])
        finally:
            os.close(fd)
        _rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def read_page(path: str, num_bytes: int, key: bytes, fingerprint: str, content: memoryview) -> None:
    """Fill `content` with the page `key` from a file of `num_bytes`.

    Raises OSError, and BadPage for a file that is anything else; the content is undefined then.
    """
    trailer = bytearray(max(num_bytes - len(content), footer_size) + 1)  # one more: is it longer?
    fd = os.open(path, _READ)
    try:
        length = _read_into(fd, [content, memoryview(trailer)], num_bytes)
    finally:
        os.close(fd)
    if length != num_bytes:
        raise BadPage(f"its length is not {num_bytes} bytes")
    metadata, checksum = _parse(memoryview(trailer)[:-1], num_bytes, len(content))
    if (metadata.key, metadata.fingerprint) != (key, fingerprint):
        raise BadPage("it is another page")
    if page_sum(content) != checksum:
        raise BadPage("its checksum is wrong")


def read_trailer(path: str, num_bytes: int, page_bytes: int) -> tuple[StoredPage, str]:
    """Which page a file has, and of which fingerprint, without reading the page.

    Raises OSError, and BadPage for one without an intact trailer or with a page of another size.
    """
    fd = os.open(path, _READ)
    try:
        tail = os.pread(fd, _TAIL, max(num_bytes - _TAIL, 0))
        if len(tail) < num_bytes - page_bytes:
            _footer_of(memoryview(tail), num_bytes, page_bytes)  # others' files may be of any size
            tail = os.pread(fd, num_bytes - page_bytes, page_bytes)
    finally:
        os.close(fd)
    metadata, _ = _parse(memoryview(tail)[-max(num_bytes - page_bytes, 0) :], num_bytes, page_bytes)
    page = StoredPage(metadata.key, metadata.parent, metadata.namespace, metadata.tokens)
    return page, metadata.fingerprint


def _parse(trailer: memoryview, num_bytes: int, page_bytes: int) -> tuple[_Metadata, int]:
    """The metadata, and the checksum that the page must have."""
    metadata_length, page_checksum, metadata_checksum = _footer_of(trailer, num_bytes, page_bytes)
    encoded = trailer[:metadata_length]
    if crc32(encoded) != metadata_checksum:
        raise BadPage("its metadata's checksum is wrong")
    try:
        return _decode(encoded), page_checksum
    except msgspec.MsgspecError as error:
        raise BadPage(f"its metadata: {error}") from None


def _footer_of(end: memoryview, num_bytes: int, page_bytes: int) -> tuple[int, int, int]:
    """Of a file that ends so: the length of its metadata, and both checksums."""
    if len(end) < footer_size:
        raise BadPage("it is too short")
    footer = _FOOTER.unpack(end[-footer_size:])
    page_length, metadata_length, page_checksum, metadata_checksum, magic = footer
    if magic != _MAGIC:
        raise BadPage("it has no footer")
    if (page_length, page_length + metadata_length + footer_size) != (page_bytes, num_bytes):
        raise BadPage("it has another length than its footer says")
    return metadata_length, page_checksum, metadata_checksum


def _create(path: str) -> int:
    try:
        return os.open(path, _WRITE, 0o600)  # it names the prompt's tokens
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, _WRITE, 0o600)


def _reserve(fd: int, num_bytes: int) -> None:
    """Have the file system find the space at once, which takes it less time than block by block.

    Not `os.posix_fallocate`: where the file system cannot, that writes to every block instead.
    """
    if _fallocate is not None and _fallocate(fd, 0, 0, num_bytes) and get_errno() == ENOSPC:
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def _rename(temporary: str, path: str) -> None:
    try:
        os.replace(temporary, path)  # noqa: PTH105  a Path costs as much as the call
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, path)  # noqa: PTH105


def _write(fd: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _behind(parts, os.writev(fd, parts))


def _read_into(fd: int, parts: list[memoryview], num_bytes: int) -> int:
    """Fill the parts as far as the file goes; how many bytes. Exactly `num_bytes` are its end."""
    length = 0
    while parts and length != num_bytes and (count := os.preadv(fd, parts, length)):
        length += count
        parts = _behind(parts, count)
    return length


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts after `count` bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []
