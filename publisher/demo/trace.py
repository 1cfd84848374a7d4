"""Requests of a trace, as token ids of a given page size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from gzip import GzipFile
from hashlib import shake_128
from io import BufferedReader
from pathlib import Path

import msgspec

__all__ = ["Request", "TraceError", "prompt", "read_trace", "reply"]

TRACE_BLOCK = 512
"""Tokens for each of a request's `hash_ids`; one such block becomes one page."""

_VOCABULARY_BITS = 17  # ids as large as a real tokenizer's, so that they take as many bytes
_MAX_ID = 2**63 - 1
_MAX_LENGTH = 1 << 22  # at the largest page size, 256 MB of tokens
_MAX_LINE_BYTES = 16 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace that cannot be read. The message names file, line and field."""


class Request(msgspec.Struct, frozen=True):
    """One line of a trace. Lengths are in tokens of the original workload."""

    input_length: int
    output_length: int
    hash_ids: list[int]


_decode = msgspec.json.Decoder(Request).decode


def read_trace(path: Path, count: int) -> list[Request]:
    """The first `count` requests, fewer when the file has fewer; plain or gzip. Raises TraceError."""
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                where = f"--trace: {path}:{number}"
                if len(line) > _MAX_LINE_BYTES:
                    raise TraceError(f"{where}: longer than {_MAX_LINE_BYTES} bytes")
                if line.strip():
                    requests.append(_read_line(line, where))
                if len(requests) == count:
                    break
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"--trace: {path}: {getattr(error, 'strerror', None) or error}") from None
    if not requests:
        raise TraceError(f"--trace: {path}: no requests")
    return requests


def _lines(file: BufferedReader) -> Iterator[bytes]:
    """Lines, each cut one byte after the most it may have."""
    packed = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    lines = GzipFile(fileobj=file) if packed else file
    while line := lines.readline(_MAX_LINE_BYTES + 1):
        yield line


def _read_line(line: bytes, where: str) -> Request:
    try:
        request = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: {error}") from None
    except RecursionError:
        raise TraceError(f"{where}: nested too deeply") from None
    for name, value, high in (
        ("input_length", request.input_length, _MAX_LENGTH),
        ("output_length", request.output_length, _MAX_LENGTH),
        *(("hash_ids", one, _MAX_ID) for one in request.hash_ids),
    ):
        if not 0 <= value <= high:
            raise TraceError(f"{where}: {name}: {value} is not in 0..{high}")
    needed = -(-request.input_length // TRACE_BLOCK)
    if len(request.hash_ids) != needed:
        raise TraceError(
            f"{where}: hash_ids: {len(request.hash_ids)} ids, but input_length"
            f" {request.input_length} needs {needed}"
        )
    return request


def prompt(request: Request, page_size: int) -> bytes:
    """The prompt as packed tokens, a trace block scaled to one page; its last page may be partial."""
    length = -(-request.input_length * page_size // TRACE_BLOCK)
    packed = b"".join([_block(one, page_size) for one in request.hash_ids])
    return packed[: length * 4]


def reply(number: int, request: Request, page_size: int) -> bytes:
    """The reply to the `number`-th request, scaled alike; the trace does not have its tokens."""
    length = request.output_length * page_size // TRACE_BLOCK
    return _tokens(b"reply" + number.to_bytes(8, "little"), length)


@lru_cache(maxsize=4096)
def _block(hash_id: int, page_size: int) -> bytes:
    return _tokens(hash_id.to_bytes(8, "little"), page_size)


def _tokens(seed: bytes, count: int) -> bytes:
    """`count` token ids below 2**17, a function of `seed`."""
    wide = int.from_bytes(shake_128(seed).digest(count * 4), "little")
    return (wide & _mask(count)).to_bytes(count * 4, "little")


@lru_cache(maxsize=4096)
def _mask(count: int) -> int:
    return int.from_bytes((2**_VOCABULARY_BITS - 1).to_bytes(4, "little") * count, "little")


def pages_of(packed: bytes, page_size: int) -> Iterator[bytes]:
    """The whole pages of a sequence."""
    step = page_size * 4
    for end in range(step, len(packed) + 1, step):
        yield packed[end - step : end]
