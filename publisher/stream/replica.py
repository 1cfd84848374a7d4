"""What the worker holds, as far as its inputs tell; and the events that they mean.

R1  Records are applied only in step: from the first on, each number following the last. A number that is
    missing or a record that cannot be read ends that: a resync is wanted, and all inputs up to the one
    that begins it are dropped.
R2  A batch of an engine's own events that does not follow the last begins anew: everything is cleared
    first, for what was missed cannot be had.
R3  The same inputs give the same events, here and in a later process that reads them from the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_

import msgspec

from kvevents.codec import decode_batch
from kvevents.columns import Columns
from kvevents.errors import KVEventsError
from kvevents.events import AllBlocksCleared, Event, StorageMedium
from kvevents.index import BlockIndex
from kvevents.materializer import FrozenRuns, Materializer, SavedRun
from kvevents.records import Record
from publisher.config.sidecar_config import WorkerInfo
from publisher.link.messages import BATCH, FRESH, LOST, PACKED
from publisher.link.packed import (
    Unpacked,
    load_columns,
    load_events,
    save_columns,
    save_events,
    unpack,
)
from publisher.stream.foreign import ForeignState, Groups
from publisher.stream.input import Input
from publisher.stream.status import EventCounts

__all__ = ["FrozenReplica", "Replica", "ReplicaCounts", "Told"]

_SAVED_BLOCKS = 256


class Told(msgspec.Struct, frozen=True, gc=False):
    """Events that became true at `ts`, seconds since the epoch. `payload`: what our own dialect makes of
    them, where the worker has encoded it.
    """

    ts: float
    events: Sequence[Event]
    payload: bytes | None = None


@dataclass(slots=True)
class ReplicaCounts:
    """Inputs by what became of them, their events, and the resyncs wanted.

    `missed`: numbers that never came. `skipped`: came while out of step. `unreadable`: could not be read.
    """

    applied: int = 0
    events: int = 0
    missed: int = 0
    skipped: int = 0
    unreadable: int = 0
    resyncs: int = 0


_decode_records = msgspec.msgpack.Decoder(tuple[float, list[Record]]).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KVEventsError)

_encode_saved = msgspec.msgpack.Encoder().encode
_decode_saved = msgspec.msgpack.Decoder(SavedRun).decode
_decode_groups = msgspec.msgpack.Decoder(Groups).decode
_RUN, _GROUPS, _STORES, _COLUMNS = b"r", b"g", b"s", b"c"


class FrozenReplica:
    """What a replica held at one moment."""

    def __init__(self, runs: FrozenRuns, index: BlockIndex, groups: Groups) -> None:
        self._runs, self._index, self._groups = runs, index, groups

    def saved(self) -> Iterator[bytes]:
        """Pieces that `Replica.load` takes."""
        for run in self._runs.saved():
            yield _RUN + _encode_saved(run)
        for piece in self._index.pieces(_SAVED_BLOCKS):
            if isinstance(piece, Columns):
                yield _COLUMNS + save_columns(piece)
            else:
                yield _STORES + save_events(piece)
        if self._groups != Groups():
            yield _GROUPS + _encode_saved(self._groups)

    def snapshot(self, blocks_per_event: int) -> Iterator[list[Event]]:
        """Events that tell all of it, parents before children; a list for each stretch of blocks."""
        yield from self._runs.snapshot(blocks_per_event)
        for events in self._index.snapshot(blocks_per_event):
            yield list(events)


class Replica:
    """Of one worker's rank. No I/O; never raises for what an input says."""

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker
        self._runs = Materializer(worker.block_size, worker.hash_format)
        self._foreign = ForeignState(worker.block_size)
        self._tells_batches = False
        """Whether the last input was an engine's batch: such a worker cannot tell its state anew."""
        self.ts = 0.0
        """Of the last input applied; that of what has none of its own."""
        self.expected = 0
        """The number of the next input."""
        self.in_step = True
        self.last_batch = b""
        """The body of the last of an engine's batches: what tells its runs apart."""
        self.last_loss = ""
        """Why a resync was last wanted."""
        self.counts = ReplicaCounts()
        self.received = EventCounts()
        """All events that inputs had, by kind and medium; of an engine's own, also those left out."""
        self.other_rank: int | None = None
        """That of an engine's last batch, where it is not the worker's."""

    def count(self, medium: StorageMedium) -> int:
        """Blocks on `medium`."""
        return self._runs.count(medium) + self._foreign.index.count(medium)

    @property
    def dp_rank(self) -> int:
        """The worker's."""
        return self._worker.dp_rank

    @property
    def foreign(self) -> ForeignState:
        """What an engine's own events told."""
        return self._foreign

    # --------------------------------------------------------------------------------- inputs

    def apply(self, given: Input) -> Told | None:
        """Take the next input; what it means, None when that is nothing."""
        self.counts.missed += max(0, given.number - self.expected)
        if given.flags & LOST:
            return self._lost(given)
        apply = self._apply_batch if given.flags & BATCH else self._apply_records
        told = apply(given)
        if told is not None and not math.isfinite(told.ts):
            told = Told(self.ts, told.events)
        if told is not None:
            self.counts.events += len(told.events)
            self.ts = told.ts
        return told

    def _apply_records(self, given: Input) -> Told | None:
        self._tells_batches = False
        if given.flags & FRESH:
            self._runs = Materializer(self._worker.block_size, self._worker.hash_format)
            self.in_step = True
        elif self.in_step and given.number != self.expected:
            self._lose(_FULL)
        self.expected = given.number + 1
        if not self.in_step:
            self.counts.skipped += 1
            return None
        try:
            ts, records = _decode_records(given.body)
            events = self._runs.apply(records)
        except _UNREADABLE as error:
            self.counts.unreadable += 1
            self._lose(str(error))
            return None
        if _clears(events):
            self._foreign.clear()
        self.counts.applied += 1
        self.received.add(events)
        return Told(ts, events)

    def _apply_batch(self, given: Input) -> Told | None:
        begun: list[Event] = []
        if given.flags & FRESH or given.number != self.expected or not self.in_step:
            begun = self._forget()
        self._tells_batches = self.in_step = True
        self.expected = given.number + 1
        try:
            if given.flags & PACKED:
                batch = unpack(given.body, given.flags)
            else:
                read = decode_batch(given.body).batch
                batch = Unpacked(read.ts, read.events, read.dp_rank, None)
        except KVEventsError as error:  # what it said is unknown: so is what is held
            self.counts.unreadable += 1
            self.last_loss = str(error)
            return Told(self.ts, self._forget())
        self.last_batch = b"" if given.flags & PACKED else given.body
        if given.flags & FRESH and not batch.events:  # the mark of a new run, not a batch of it
            self.expected, self.last_batch = given.number, b""
        if type(batch.events) is not Columns and _clears(batch.events):
            self._runs = Materializer(self._worker.block_size, self._worker.hash_format)
        self.counts.applied += 1
        self.received.add(batch.events)
        if batch.dp_rank is not None and batch.dp_rank != self._worker.dp_rank:
            self.other_rank = batch.dp_rank
        told = self._foreign.apply(batch.events, batch.group)
        if begun:
            return Told(batch.ts, [*begun, *told])
        if batch.dp_rank == self._worker.dp_rank and _are_same(told, batch.events):
            return Told(batch.ts, told, batch.payload)
        return Told(batch.ts, told)

    def _lost(self, given: Input) -> Told | None:
        """All inputs before `given.number` that have not come will not come."""
        self.expected = given.number
        reason = given.body.decode(errors="replace")
        if self._tells_batches:
            self.last_loss = reason
            return Told(self.ts, self._forget())
        if self.in_step:
            self._lose(reason)
        return None

    def _forget(self) -> list[Event]:
        self._foreign.clear()
        self._runs = Materializer(self._worker.block_size, self._worker.hash_format)
        return [AllBlocksCleared()]

    def _lose(self, reason: str) -> None:
        self.last_loss = reason
        self.counts.resyncs += 1
        self.in_step = False

    # ---------------------------------------------------------------------------------- state

    def forget(self) -> None:
        """Hold nothing any more."""
        self._forget()

    def count_from_here(self) -> None:
        """Begin all counts at 0: what an earlier process took is not to be counted again."""
        self.counts, self.received = ReplicaCounts(), EventCounts()
        self._foreign.count_from_here()

    def freeze(self) -> FrozenReplica:
        """What is held now; later inputs do not change it."""
        foreign = self._foreign
        return FrozenReplica(self._runs.freeze(), foreign.index.fork(), foreign.groups)

    def load(
        self,
        pieces: Iterable[bytes],
        *,
        expected: int,
        in_step: bool,
        tells_batches: bool,
        last_batch: bytes = b"",
        ts: float = 0.0,
    ) -> None:
        """Hold what `FrozenReplica.saved` gave. Raises KVEventsError for pieces that are none."""
        runs: list[SavedRun] = []
        for piece in pieces:
            kind, body = piece[:1], piece[1:]
            try:
                if kind == _RUN:
                    runs.append(_decode_saved(body))
                elif kind == _COLUMNS:
                    self._foreign.apply(load_columns(body))
                elif kind == _STORES:
                    self._foreign.apply(load_events(body))
                elif kind == _GROUPS:
                    self._foreign.groups = _decode_groups(body)
                else:
                    raise KVEventsError(f"saved state: a piece of kind {kind!r}")
            except _UNREADABLE as error:
                raise KVEventsError(f"saved state: {error}") from error
        self._runs.load(runs)
        self.expected, self.in_step, self._tells_batches = expected, in_step, tells_batches
        self.last_batch, self.ts = last_batch, ts

    @property
    def tells_batches(self) -> bool:
        """Whether it is an engine's own events that came last."""
        return self._tells_batches


def _clears(events: Iterable[Event]) -> bool:
    return any(isinstance(event, AllBlocksCleared) for event in events)


def _are_same(told: Sequence[Event], events: Sequence[Event]) -> bool:
    """Whether these are the same objects."""
    return told is events or (len(told) == len(events) and all(map(is_, told, events)))


_FULL = "the ring was full"
