"""What a subscriber saw of a sink, kept in a file as it goes, and what that proves.

V1  A seq has one payload: whoever saw it live, over every restart, saw the same bytes. No other seq
    has them: a payload bears its time.
V2  A replayed frame is the live frame, byte for byte. In an answer that begins with AllBlocksCleared
    the first batches may be a snapshot, which has bytes of its own; from the first batch on that is
    as it was live, all are.
V3  What a subscriber got in order has no hole that it was not told of.
V4  Every seq that was published has been seen.
V5  A sidecar that was killed goes on without AllBlocksCleared where nothing was missed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

__all__ = ["Evidence", "Seen", "Way", "check_clears", "check_evidence", "read_evidence"]

_FIRST_TELLING = 10
"""The worker begins with one, which clears. It is in the batches before this seq."""

_record = struct.Struct("<BQ8s")


class Way(IntEnum):
    """How a batch came."""

    LIVE = 0
    REPLAY = 1
    """After another of the same answer."""
    FRAMES = 2
    """First of an answer, and no snapshot."""
    SNAPSHOT = 3
    """First of an answer, and perhaps of a snapshot: it clears."""
    LOST = 4
    """No batch: the subscriber was told that what it gets from this seq on does not follow."""
    AGAIN = 5
    """Live, but not applied: a replay had brought it."""
    CLEAR = 6
    """Live, and it begins with AllBlocksCleared."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One batch, in the order of delivery. Equal digests, equal payloads."""

    way: Way
    seq: int
    digest: bytes = b""


class Evidence:
    """Writes; what is written survives the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def add(self, way: Way, seq: int, payload: bytes = b"") -> None:
        self._file.write(_record.pack(way, seq, blake2b(payload, digest_size=8).digest()))


def read_evidence(path: Path) -> list[Seen]:
    """What was written; the last record of a process that was killed may be torn."""
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) // _record.size * _record.size
    return [Seen(Way(way), seq, digest) for way, seq, digest in _record.iter_unpack(data[:whole])]


def check_evidence(witnesses: dict[str, list[Seen]], end: int) -> list[str]:
    """Every violation of V1 to V4, of one sink that has published all before `end`, or more."""
    frames: dict[int, tuple[bytes, str]] = {}
    problems: list[str] = []
    for name, seen in witnesses.items():
        problems += _check_same(frames, name, _frames(seen))
    seqs: dict[bytes, int] = {}
    for seq, (digest, witness) in frames.items():
        if (other := seqs.setdefault(digest, seq)) != seq:
            problems.append(f"V1: {witness} saw the payload of seq {other} with seq {seq}")
    for name, seen in witnesses.items():
        problems += _check_snapshots(frames, name, seen)
        problems += _check_order(name, seen)
    everything = {one.seq for seen in witnesses.values() for one in seen if one.way is not Way.LOST}
    if missing := sorted(set(range(max([end, *everything]))) - everything):
        problems.append(f"V4: nobody saw {len(missing)} seqs: {missing[:10]}")
    return problems


def check_clears(witnesses: dict[str, list[Seen]], end: int) -> list[str]:
    """Every violation of V5 before `end`, of a worker that was not replaced and told nothing anew."""
    clears = {one.seq for seen in witnesses.values() for one in seen if one.way is Way.CLEAR}
    return [
        f"V5: seq {seq} clears, and nothing was missed"
        for seq in sorted(clears)
        if _FIRST_TELLING <= seq < end
    ]


def _frames(seen: Iterable[Seen]) -> Iterator[Seen]:
    """What came live, and in answers without a snapshot."""
    real = False
    for one in seen:
        real = real if one.way is Way.REPLAY else one.way is Way.FRAMES
        if one.way in (Way.LIVE, Way.AGAIN, Way.CLEAR) or real:
            yield one


def _check_same(
    frames: dict[int, tuple[bytes, str]], name: str, seen: Iterable[Seen]
) -> Iterator[str]:
    for one in seen:
        digest, witness = frames.setdefault(one.seq, (one.digest, name))
        if digest != one.digest:
            yield f"V1: seq {one.seq} was another for {name} ({one.way.name}) than for {witness}"


def _check_snapshots(
    frames: dict[int, tuple[bytes, str]], name: str, seen: Iterable[Seen]
) -> Iterator[str]:
    snapshot = in_frames = False
    for one in seen:
        if one.way is not Way.REPLAY:
            snapshot, in_frames = one.way is Way.SNAPSHOT, False
        if not snapshot or one.seq not in frames:
            continue
        same = frames[one.seq][0] == one.digest
        if in_frames and not same:
            yield f"V2: {name}: seq {one.seq} of an answer is not the frame, those before are"
        in_frames |= same


def _check_order(name: str, seen: Iterable[Seen]) -> Iterator[str]:
    expected: int | None = None
    for one in seen:
        if one.way is Way.AGAIN:
            continue
        if one.way in (Way.LOST, Way.SNAPSHOT):
            expected = one.seq
        if expected is not None and one.seq != expected:
            yield f"V3: {name}: seq {one.seq} ({one.way.name}) came where {expected} was due"
        expected = one.seq + (one.way is not Way.LOST)
