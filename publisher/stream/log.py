"""The retained log: the newest frames of a sink, and the state before the oldest of them.

L1  Seqs count from `next_seq` as it was given, one for each frame appended, without a hole.
L2  The log keeps at most `max_batches` frames, and of those so many as `max_bytes` of memory hold, by
    their weight; but always the newest frame.
    A frame that falls off is applied to the base state first.
L3  A replay from any start is contiguous and ends with the newest frame: the frames themselves,
    byte for byte, where the log reaches back; before that a snapshot of the state, beginning with
    AllBlocksCleared, and empty batches up to the frames. Applied in order it gives the state now.
    Where it would need more than `max_padding` empty batches it begins later, at the last seqs before the
    frames that hold the snapshot.
L4  A step of a replay is of bounded work, and replays that need a snapshot share one that is not too
    old: for many clients the state is copied, and encoded, once.
L5  A replay whose last frame has fallen off the log, and `_GRACE` more, goes on as one from where it is,
    which begins with a snapshot: slow clients keep alive at most as many frames as the log, and those,
    and what falls off until their next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeAlias

import msgspec

from kvevents.events import AllBlocksCleared, Event
from kvevents.frames import JOIN
from kvevents.index import BlockIndex
from publisher.stream.weight import weight

__all__ = ["RetainedLog", "num_blocks", "snapshot_batches"]

Answer: TypeAlias = tuple[int, bytes]
Encode: TypeAlias = Callable[[Sequence[Event]], bytes]
Answers: TypeAlias = Generator[Answer, None, int | None]
"""Returns the seq that comes next when it has become too old, and None when it is whole."""


class _Retained(msgspec.Struct, frozen=True, gc=False):
    payload: bytes
    events: Sequence[Event]
    weight: int


_MOVED_BLOCKS = 256
"""About so many blocks are applied to a state in one step of a replay."""

_GRACE = 1000

_LEAST_FRAMES = 4
"""With fewer, a replay can spare no seq for a step that tells nothing."""


class _Snapshot:
    """The state before frame `first`, as batches that are made when they are first asked for."""

    def __init__(
        self,
        state: BlockIndex,
        first: int,
        blocks_per_batch: int,
        encode: Encode,
    ) -> None:
        self.first = first
        self.most_batches = -(-len(state) // blocks_per_batch) or 1
        self.since: list[_Retained] = []
        """Frames from `first` on that the log has dropped."""
        self.since_bytes = 0
        """Their weight."""
        self._encode = encode
        self._rest: Iterator[list[Event]] | None = snapshot_batches(state, blocks_per_batch)
        self._made: list[bytes] = []

    def payloads(self) -> Iterator[bytes]:
        at = 0
        while at < len(self._made) or self._make():
            yield self._made[at]
            at += 1

    def _make(self) -> bool:
        batch = next(self._rest, None) if self._rest is not None else None
        if batch is None:
            self._rest = None  # and with it the state
            return False
        self._made.append(self._encode(batch))
        return True


class Tellable(Protocol):
    """A state of a moment, that can be told."""

    def snapshot(self, blocks_per_event: int, /) -> Iterator[Sequence[Event]]:
        """Events that tell all of it, parents first; those of one stretch of blocks at a time."""


def snapshot_batches(state: Tellable, per_batch: int) -> Iterator[list[Event]]:
    """The state in batches of about `per_batch` blocks, parents first; the first of them clears."""
    batch: list[Event] = [AllBlocksCleared()]
    blocks = 0
    for events in state.snapshot(per_batch):
        if blocks >= per_batch:
            yield batch
            batch, blocks = [], 0
        batch += events
        blocks += num_blocks(events[:1])
    yield batch


def num_blocks(events: Sequence[Event]) -> int:
    """Blocks that the events speak of, once for each event."""
    return sum(
        len(event.block_hashes) for event in events if not isinstance(event, AllBlocksCleared)
    )


class RetainedLog:
    """`encoder` gives what makes payloads of events, for one telling of the state from its beginning; a
    snapshot has about `snapshot_blocks` blocks a batch.

    `next_seq`, `base`: where an earlier log ended, and the state then, which becomes this log's own.
    """

    def __init__(
        self,
        encoder: Callable[[], Encode],
        *,
        max_batches: int,
        max_bytes: int,
        max_padding: int | None = None,
        snapshot_blocks: int = 256,
        next_seq: int = 0,
        base: BlockIndex | None = None,
    ) -> None:
        self._encoder = encoder
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._max_padding = max_padding
        self._snapshot_blocks = snapshot_blocks
        self._frames: deque[_Retained] = deque()
        self._bytes = 0
        self._base = BlockIndex() if base is None else base
        self._snapshot: _Snapshot | None = None
        """The newest, for the replays that come next."""
        self.next_seq = next_seq
        """The seq of the next frame."""

    @property
    def oldest_seq(self) -> int:
        """The seq of the oldest frame kept; `next_seq` when none is."""
        return self.next_seq - len(self._frames)

    def reaches(self, start: int) -> bool:
        """Whether a replay from `start` needs no snapshot."""
        return start != JOIN and start >= self.oldest_seq

    @property
    def num_batches(self) -> int:
        """Frames kept."""
        return len(self._frames)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that those take, by their weight."""
        return self._bytes

    def append(self, payload: bytes, events: Sequence[Event]) -> int:
        """Keep a frame; returns its seq. `events` are what `payload` says; neither may change."""
        frame = _Retained(payload, events, weight(payload, events))
        self._frames.append(frame)
        self._bytes += frame.weight
        seq = self.next_seq
        self.next_seq += 1
        while len(self._frames) > self._max_batches or (
            self._bytes > self._max_bytes and len(self._frames) > 1
        ):
            gone = self._frames.popleft()
            self._bytes -= gone.weight
            self._base.apply(gone.events)
            if self._snapshot is not None:
                self._age(self._snapshot, gone)
        return seq

    def _age(self, snapshot: _Snapshot, gone: _Retained) -> None:
        """One frame more lies between it and the log; with an eighth of what that keeps it is too old."""
        snapshot.since.append(gone)
        snapshot.since_bytes += gone.weight
        if (
            len(snapshot.since) * 8 > self._max_batches
            or snapshot.since_bytes * 8 > self._max_bytes
        ):
            self._snapshot = None

    def replay(self, start: int) -> Iterator[Answer]:
        """Seqs and payloads from `start` to the newest frame of now (L3), made as they are asked for.

        What is appended later changes nothing of it, but for L5. From JOIN, the shortest answer that
        gives the state now; from any other start beyond the log, nothing.
        """
        return self._kept_up(self._answers(start))

    def _kept_up(self, answers: Answers) -> Iterator[Answer]:
        while (seq := (yield from answers)) is not None:
            answers = self._answers(seq)

    def _answers(self, start: int) -> Answers:
        oldest = self.oldest_seq
        if start == JOIN and not oldest:
            start = 0
        if self.reaches(start):
            wanted = max(0, self.next_seq - start)
            last = list(islice(reversed(self._frames), wanted))  # few, most often
            return self._kept(start, last[::-1])
        snapshot = self._snapshot
        if snapshot is None:
            state = self._base.fork()
            snapshot = _Snapshot(state, oldest, self._snapshot_blocks, self._encoder())
            self._snapshot = snapshot
        frames = [*snapshot.since, *self._frames]
        latest = max(0, snapshot.first - snapshot.most_batches)
        padding = self._max_padding
        if start == JOIN or (padding is not None and start + padding < latest):
            start = latest
        if start >= snapshot.first:
            return self._kept(start, frames[start - snapshot.first :])
        if start + snapshot.most_batches <= snapshot.first:
            return self._after_snapshot(start, snapshot, frames)
        return self._after_moving(start, self._base.fork(), oldest, list(self._frames))

    def _kept(self, start: int, frames: list[_Retained]) -> Answers:
        end = start + len(frames)
        for seq, frame in enumerate(frames, start):
            if self._is_past(end):
                return seq
            yield seq, frame.payload
        return None

    def _is_past(self, end: int) -> bool:
        """Whether a replay of frames before `end` has become too old (L5)."""
        return self.oldest_seq > end + _GRACE

    def _after_snapshot(self, start: int, snapshot: _Snapshot, frames: list[_Retained]) -> Answers:
        first = snapshot.first
        end = first + len(frames)
        seq = start
        for payload in snapshot.payloads():
            if self._is_past(end):
                return seq
            yield seq, payload
            seq += 1
        del snapshot
        return (yield from self._up_to(seq, first, frames))

    def _up_to(self, seq: int, first: int, frames: list[_Retained]) -> Answers:
        """Empty batches before the frames, and those."""
        assert seq <= first, "L3: a snapshot fits into the seqs before the frames"
        empty = self._encoder()([]) if seq < first else b""
        while seq < first:
            yield seq, empty
            seq += 1
        return (yield from self._kept(first, frames))

    def _after_moving(
        self, start: int, state: BlockIndex, first: int, frames: list[_Retained]
    ) -> Answers:
        """With a snapshot of `state` moved on through the oldest frames, until it fits before the next.

        Each step of that takes a seq and makes more: two frames at least. The frames may run out: the
        batches get larger than usual in that case.
        """
        seq, moved, end = start, 0, first + len(frames)
        encode = self._encoder()
        empty = encode([])
        in_steps = len(frames) >= _LEAST_FRAMES
        if in_steps:
            yield seq, encode([AllBlocksCleared()])
            seq += 1
        while moved < len(frames) and (first + moved - seq) * self._snapshot_blocks < len(state):
            if self._is_past(end):
                return seq
            moved = _move(state, frames, moved)
            if in_steps:
                yield seq, empty
                seq += 1
        first += moved
        frames = frames[moved:]
        if seq < first:
            per_batch = max(self._snapshot_blocks, -(-len(state) // (first - seq)))
            for batch in snapshot_batches(state, per_batch):
                if self._is_past(end):
                    return seq
                yield seq, encode(batch)
                seq += 1
        return (yield from self._up_to(seq, first, frames))


def _move(state: BlockIndex, frames: list[_Retained], at: int) -> int:
    """Apply frames from place `at` on to `state`; returns the place after them."""
    begin, blocks = at, 0
    while at < len(frames) and (blocks < _MOVED_BLOCKS or at < begin + 2):
        state.apply(frames[at].events)
        blocks += 1 + num_blocks(frames[at].events)
        at += 1
    return at
