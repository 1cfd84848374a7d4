"""The journal: inputs kept in files before what they mean is sent, so that a next process can go on.

A generation is a checkpoint, what the replica held at one moment, and the entries since. Two generations
are kept: a process that takes over reads the older checkpoint and all entries after it, and has the
retained frames of both.

J1  An entry is in the file before what it says is published, and is whole or not there: a tail that was
    torn by a kill is dropped.
J2  Nothing is synced: the journal survives the process, not the host.
J3  What cannot be written ends the journal, never the sidecar: its files are removed, and it is begun
    anew later.

`checkpoint-G` and `entries-G`, for generation G; each a magic word, then entries: CRC-32 of what follows,
length u32, kind u8, flags u8, sink u16, number u64, body.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvevents.errors import KVEventsError

__all__ = ["Entry", "Head", "HeadSink", "Journal", "Kind", "Recovered", "read_journal"]

_MAGIC = b"kvjrnl\0\1"
_header = struct.Struct("<IIBBHQ")
_crc, _rest = struct.Struct("<I"), struct.Struct("<IBBHQ")
_MAX_BODY = 1 << 30
_PER_WRITE = 256
"""Entries of three parts each; the system takes 1,024 parts at once."""


class Kind(IntEnum):
    """What an entry says."""

    INPUT = 1
    """`number`, `flags` and body of an input."""
    CUT = 2
    """A sink merged what it had been holding into one batch. Body: its ts, a double."""
    FRAME = 3
    """A sink published a batch of its own: its ts and events, as our own dialect spells them."""
    REBASE = 4
    """A sink's numbering started over at 0."""
    SNAPSHOT = 5
    """A sink began to tell the whole state."""
    TOLD = 6
    """A sink has told the whole state."""
    HEAD = 16
    """The first of a checkpoint: a `Head`."""
    PIECE = 17
    """A piece of the replica's state."""
    END = 18
    """The last of a checkpoint."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry. `sink`: position among the sinks of the generation's head."""

    kind: Kind
    body: bytes = b""
    number: int = 0
    flags: int = 0
    sink: int = 0


class HeadSink(NamedTuple):
    """A sink at a checkpoint. `spelling`: a fingerprint of how it spells. `telling`: the state is yet to
    be told on it, all of it.
    """

    name: str
    spelling: str
    next_seq: int
    telling: bool


class Head(msgspec.Struct, frozen=True):
    """What a checkpoint is of."""

    link_id: bytes
    worker: bytes
    sinks: tuple[HeadSink, ...]
    expected: int
    in_step: bool
    tells_batches: bool
    last_batch: bytes
    ts: float = 0.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found: a checkpoint and the entries since, not all of them read yet."""

    head: Head
    pieces: list[bytes]
    entries: Iterator[Entry]


class Journal:
    """Writes in `folder`. `limit_bytes`: entries of a generation before the next is due, or twice as many
    as its checkpoint has, whichever is more.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = 32 << 20) -> None:
        self._folder, self._limit = folder, limit_bytes
        found = _generations(folder)
        self._generation = found[-1] if found else 0
        self._fd = -1
        self._size = 0
        self._checkpoint: Iterator[Entry] | None = None
        self._checkpoint_fd = -1
        self._checkpoint_bytes = 0
        self.failure: str | None = None
        """Why nothing is written; None while something is."""

    @property
    def active(self) -> bool:
        """Whether entries are written."""
        return self._fd >= 0

    @property
    def checkpointing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._checkpoint is not None

    @property
    def due(self) -> bool:
        """Whether there are entries enough for another generation."""
        return self.active and not self.checkpointing and self._size >= self._due_bytes

    @property
    def _due_bytes(self) -> int:
        return max(self._limit, 2 * self._checkpoint_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of entries in this generation."""
        return self._size

    def resume(self) -> None:
        """Go on with the newest generation, which was read to its end."""
        try:
            path = self._path("entries", self._generation)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._size = os.fstat(self._fd).st_size
            checkpoint = self._path("checkpoint", self._generation)
            self._checkpoint_bytes = checkpoint.stat().st_size if checkpoint.exists() else 0
        except OSError as error:
            self.abandon(f"{self._folder}: {error.strerror}")

    def append(self, *entries: Entry) -> None:
        """Keep entries (J1). Does nothing while the journal is not active."""
        if self._fd < 0:
            return
        try:
            for at in range(0, len(entries), _PER_WRITE):
                self._size += _write(self._fd, *entries[at : at + _PER_WRITE])
        except OSError as error:
            self.abandon(f"entries: {error.strerror}")

    def begin(self, head: Head, pieces: Iterator[bytes]) -> None:
        """Begin a generation: entries from now on belong to it. `advance` writes its checkpoint.

        `pieces` are of the state now; later changes must not reach them.
        """
        self.close()
        self._generation += 1
        try:
            self._fd = self._open("entries")
            self._checkpoint_fd = self._open("checkpoint", suffix=".part")
        except OSError as error:
            self.abandon(f"{self._folder}: {error.strerror}")
            return
        self._size = self._checkpoint_bytes = 0
        self.failure = None
        self._checkpoint = _checkpoint(head, pieces)

    def advance(self, num_bytes: int) -> None:
        """Write some of the checkpoint. The last of it ends the generation before the previous one."""
        if self._checkpoint is None:
            return
        written = 0
        try:
            while written < num_bytes:
                entry = next(self._checkpoint, None)
                if entry is None:
                    self._finish()
                    return
                written += _write(self._checkpoint_fd, entry)
        except OSError as error:
            self.abandon(f"checkpoint: {error.strerror}")
        finally:
            self._checkpoint_bytes += written

    def _finish(self) -> None:
        os.close(self._checkpoint_fd)
        self._checkpoint_fd, self._checkpoint = -1, None
        part = self._path("checkpoint", self._generation, ".part")
        part.rename(self._path("checkpoint", self._generation))
        self._remove(before=self._generation - 1)

    def abandon(self, reason: str) -> None:
        """Stop writing, and leave nothing that is behind what was published (J3)."""
        self.failure = reason
        self.close()
        self._remove(before=self._generation + 1)

    def discard(self) -> None:
        """Remove what an earlier process left."""
        self._remove(before=self._generation + 1)

    def close(self) -> None:
        """Close the files and leave them; safe to call twice."""
        for fd in (self._fd, self._checkpoint_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._checkpoint_fd = -1
        self._checkpoint = None

    def _open(self, what: str, suffix: str = "") -> int:
        path = self._path(what, self._generation, suffix)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            _write_all(fd, [_MAGIC])
        except OSError:
            os.close(fd)
            raise
        return fd

    def _path(self, what: str, generation: int, suffix: str = "") -> Path:
        return self._folder / f"{what}-{generation:08d}{suffix}"

    def _remove(self, *, before: int) -> None:
        for _, generation, path in _files(self._folder):
            if generation < before:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def _checkpoint(head: Head, pieces: Iterator[bytes]) -> Iterator[Entry]:
    yield Entry(Kind.HEAD, msgspec.msgpack.encode(head))
    for piece in pieces:
        yield Entry(Kind.PIECE, piece)
    yield Entry(Kind.END)


def _write(fd: int, *entries: Entry) -> int:
    parts: list[bytes] = []
    for entry in entries:
        body = entry.body
        rest = _rest.pack(len(body), entry.kind, entry.flags, entry.sink, entry.number)
        parts += (_crc.pack(zlib.crc32(body, zlib.crc32(rest))), rest, body)
    return _write_all(fd, parts)


def _write_all(fd: int, parts: list[bytes]) -> int:
    """All of it or an error, with nothing of it left behind."""
    needed = sum(map(len, parts))
    written = os.writev(fd, parts)
    if written < needed:  # the disk is full, but for so much: the rest says so
        data = b"".join(parts)
        while written < needed:
            written += os.write(fd, data[written:])
    return needed


# ------------------------------------------------------------------------------------- reading


def read_journal(folder: Path) -> Iterator[Recovered]:
    """What an earlier process kept, the longest history first; nothing where there is none.

    Each is to be tried until one is accepted. A damaged checkpoint is not given.
    """
    generations = _generations(folder)
    for first in generations:
        chain = [one for one in generations if one >= first]
        if chain != list(range(first, first + len(chain))):
            continue
        checkpoint = _read_checkpoint(folder / f"checkpoint-{first:08d}")
        if checkpoint is not None:
            head, pieces = checkpoint
            yield Recovered(head, pieces, _read_chain(folder, chain))


def _read_checkpoint(path: Path) -> tuple[Head, list[bytes]] | None:
    entries = list(_read_entries(path))
    if len(entries) < 2 or entries[0].kind != Kind.HEAD or entries[-1].kind != Kind.END:
        return None
    if any(entry.kind != Kind.PIECE for entry in entries[1:-1]):
        return None
    try:
        head = msgspec.msgpack.decode(entries[0].body, type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return head, [entry.body for entry in entries[1:-1]]


def _read_chain(folder: Path, generations: list[int]) -> Iterator[Entry]:
    """Entries of generations that follow each other. Raises KVEventsError for a tear before the last; one
    in the last is cut off, so that more can follow.
    """
    for generation in generations:
        path = folder / f"entries-{generation:08d}"
        sound = yield from _read_entries(path)
        if sound is None:
            continue
        if generation != generations[-1] or sound < len(_MAGIC):
            raise KVEventsError(f"{path.name}: damaged")
        os.truncate(path, sound)


def _read_entries(path: Path) -> Generator[Entry, None, int | None]:
    """The entries up to the end, or to the first that is torn, and then it returns its position."""
    try:
        data = path.read_bytes() if path.is_file() else b""  # not what one may wait for
    except OSError:
        return 0
    if data[: len(_MAGIC)] != _MAGIC:
        return 0
    position = len(_MAGIC)
    while position + _header.size <= len(data):
        crc, length, kind, flags, sink, number = _header.unpack_from(data, position)
        end = position + _header.size + length
        if length > _MAX_BODY or end > len(data):
            return position
        if zlib.crc32(memoryview(data)[position + _crc.size : end]) != crc:
            return position
        try:
            known = Kind(kind)
        except ValueError:
            return position
        yield Entry(known, data[position + _header.size : end], number, flags, sink)
        position = end
    return None if position == len(data) else position


def _generations(folder: Path) -> list[int]:
    """Those that have entries, if only none yet."""
    return sorted(
        generation
        for what, generation, path in _files(folder)
        if what == "entries" and path.is_file() and path.stat().st_size
    )


def _files(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """What kind, of which generation, and where."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            what, _, number = path.name.removesuffix(".part").partition("-")
            if what in ("checkpoint", "entries") and number.isascii() and number.isdigit():
                yield what, int(number), path
