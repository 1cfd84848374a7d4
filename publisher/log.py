"""The retained log: the newest frames of a sink, and the state before the oldest of them.

L1  Seqs count from `next_seq` as it was given, one for each frame appended, without a hole.
L2  The log keeps at most `max_batches` frames and `max_bytes` of payload, but always the newest frame.
    A frame that falls off is applied to the base state first.
L3  A replay from any start is contiguous and ends with the newest frame: the frames themselves,
    byte for byte, where the log reaches back; before that a snapshot of the state, beginning with
    AllBlocksCleared, and empty batches up to the frames. Applied in order it gives the state now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from kvevents.events import AllBlocksCleared, Event
from kvevents.frames import JOIN
from kvevents.index import BlockIndex

__all__ = ["RetainedLog"]

Answer: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _Retained:
    payload: bytes
    events: Sequence[Event]


class RetainedLog:
    """`encode` makes a payload of events; a snapshot has about `snapshot_blocks` blocks a batch.

    `next_seq`, `base`: where an earlier log ended, and the state then, which becomes this log's own.
    """

    def __init__(
        self,
        encode: Callable[[list[Event]], bytes],
        *,
        max_batches: int,
        max_bytes: int,
        snapshot_blocks: int = 256,
        next_seq: int = 0,
        base: BlockIndex | None = None,
    ) -> None:
        self._encode = encode
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._snapshot_blocks = snapshot_blocks
        self._frames: deque[_Retained] = deque()
        self._bytes = 0
        self._base = BlockIndex() if base is None else base
        self._fork: BlockIndex | None = None
        """A copy of the base state, shared by the snapshots taken of it."""
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
        """Bytes of payload kept."""
        return self._bytes

    def append(self, payload: bytes, events: Sequence[Event]) -> int:
        """Keep a frame; returns its seq. `events` are what `payload` says; neither may change."""
        self._frames.append(_Retained(payload, events))
        self._bytes += len(payload)
        seq = self.next_seq
        self.next_seq += 1
        while len(self._frames) > self._max_batches or (
            self._bytes > self._max_bytes and len(self._frames) > 1
        ):
            gone = self._frames.popleft()
            self._bytes -= len(gone.payload)
            self._base.apply(gone.events)
            self._fork = None
        return seq

    def replay(self, start: int) -> Iterator[Answer]:
        """Seqs and payloads from `start` to the newest frame of now (L3), made as they are asked for.

        What is appended later changes nothing of it. From JOIN, the shortest answer that gives the
        state now; from any other start beyond the log, nothing.
        """
        oldest, end = self.oldest_seq, self.next_seq
        if start == JOIN:
            batches = -(-len(self._base) // self._snapshot_blocks) or 1
            start = max(0, oldest - batches) if oldest else 0
        if start >= oldest:  # it may be any number of 64 bits, more than islice takes
            skipped = min(start, end) - oldest
            return self._kept(start, list(islice(self._frames, skipped, None)))
        if self._fork is None:
            self._fork = self._base.fork()
        state, first = self._make_room(self._fork, start)
        return self._after_snapshot(
            start, first, state, list(islice(self._frames, first - oldest, end - oldest))
        )

    def _make_room(self, base: BlockIndex, start: int) -> tuple[BlockIndex, int]:
        """A state whose snapshot fits between `start` and the frames after it, and the seq of those.

        It is `base`, or a copy of it moved on through the oldest frames. That may run out of frames:
        the batches get larger than usual in that case.
        """
        state, seq = base, self.oldest_seq
        for frame in self._frames:
            if (seq - start) * self._snapshot_blocks >= len(state):
                break
            if state is base:
                state = base.fork()
            state.apply(frame.events)
            seq += 1
        return state, seq

    def _kept(self, start: int, frames: list[_Retained]) -> Iterator[Answer]:
        for seq, frame in enumerate(frames, start):
            yield seq, frame.payload

    def _after_snapshot(
        self, start: int, first: int, state: BlockIndex, frames: list[_Retained]
    ) -> Iterator[Answer]:
        seq = start
        for batch in self._snapshot(state, first - start):
            yield seq, self._encode(batch)
            seq += 1
        assert seq <= first, "L3: a snapshot fits into the seqs before the frames"
        empty = self._encode([]) if seq < first else b""
        while seq < first:
            yield seq, empty
            seq += 1
        yield from self._kept(first, frames)

    def _snapshot(self, state: BlockIndex, room: int) -> Iterator[list[Event]]:
        """The state in at most `room` batches, the first of which clears."""
        per_batch = max(self._snapshot_blocks, -(-len(state) // room))
        batch: list[Event] = [AllBlocksCleared()]
        blocks = 0
        for events in state.snapshot(per_batch):
            if blocks >= per_batch:
                yield batch
                batch, blocks = [], 0
            batch += events
            blocks += len(events[0].block_hashes)
        yield batch
