"""One sink's stream, without its sockets: what is told, numbering, what is retained, telling it anew.

O1  Every batch has the next seq, and is in the retained log; so is an empty one that is not sent, where
    the form wants a seq to be missing before AllBlocksCleared.
O2  What a sink makes of itself (heartbeats, the state told anew, a merged batch) is said in journal
    entries; the inputs say the rest. So `replay_entry` and `tell` with the same inputs give the same
    batches, byte for byte.
O3  While the state is being told anew, what the worker tells waits behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from kvevents.codec import decode_batch, encode_batch
from kvevents.errors import KVEventsError
from kvevents.events import AllBlocksCleared, Event, KVEventBatch
from kvevents.index import BlockIndex
from kvevents.merge import merge_events
from kvevents.speller import Spells
from kvevents.view import View
from publisher.stream.journal import Entry, Kind
from publisher.stream.log import RetainedLog, num_blocks, snapshot_batches
from publisher.stream.replica import FrozenReplica, Told

__all__ = ["SNAPSHOT_BLOCKS", "Frame", "Output"]

SNAPSHOT_BLOCKS = 256
"""About so many blocks of the state are told in one batch."""

_MOST_HELD_BLOCKS = 8192


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A batch to send. Its events are those told in it, and must not change."""

    seq: int
    payload: bytes
    ts: float
    events: Sequence[Event]


class Output:
    """Of the sink `name`, number `number` among those of a sidecar.

    `view`: what of the events is told; the output's own, as is a `speller` that knows of what is held.
    `record` is told what the journal is to keep. `clock`: seconds since the epoch, for replays.
    `max_padding`: see `RetainedLog`. `coalesce_s`: how long batches are held to be merged into one.
    `rebase_after`: so many seqs after the state was last told whole the numbering starts over.
    """

    def __init__(
        self,
        number: int,
        name: str,
        view: View,
        speller: Spells,
        record: Callable[[Entry], None],
        clock: Callable[[], float],
        *,
        max_batches: int,
        max_bytes: int,
        max_padding: int | None = None,
        coalesce_s: float = 0.0,
        rebase_after: int | None = None,
        next_seq: int = 0,
    ) -> None:
        self.name = name
        self._view, self._speller = view, speller
        self._number, self._record, self._clock = number, record, clock
        self._max_batches, self._max_bytes, self._max_padding = max_batches, max_bytes, max_padding
        self._coalesce_s, self._rebase_after = coalesce_s, rebase_after
        self._rebase_at = float("inf") if rebase_after is None else rebase_after
        self.log = self._new_log(next_seq)
        self._held: list[Told] = []
        """Told by the worker and not published yet: to be merged, or behind a snapshot."""
        self._held_blocks = 0
        self._held_since = 0.0
        self._snapshot: Iterator[list[Event]] | None = None
        self._snapshotting = False

    def _new_log(self, next_seq: int, base: BlockIndex | None = None) -> RetainedLog:
        return RetainedLog(
            self._encoder,
            max_batches=self._max_batches,
            max_bytes=self._max_bytes,
            max_padding=self._max_padding,
            snapshot_blocks=SNAPSHOT_BLOCKS,
            next_seq=next_seq,
            base=base,
        )

    def _encoder(self) -> Callable[[Sequence[Event]], bytes]:
        speller = self._speller.fresh()
        return lambda events: speller.spell(self._clock(), events)

    @property
    def tells_all(self) -> bool:
        """Whether every event is told as it is, and nothing else is kept of them."""
        return self._view.plain and self._speller.fresh() is self._speller

    def load_index(self, base: BlockIndex) -> None:
        """Begin from a state told before, where this output tells all; `base` becomes its own."""
        self.log = self._new_log(self.next_seq, base)

    def load(self, state: Iterable[list[Event]]) -> None:
        """Begin from a state that was told in batches before; nothing has been published here."""
        base = BlockIndex()
        for events in state:
            told = self._view.apply(events)
            self._speller.hold(told)
            base.apply(told)
        self.log = self._new_log(self.next_seq, base)

    @property
    def next_seq(self) -> int:
        """The seq of the next batch."""
        return self.log.next_seq

    @property
    def snapshotting(self) -> bool:
        """Whether the state is being told anew, or was when an earlier process ended."""
        return self._snapshotting

    def count_from_here(self) -> None:
        """Begin the count at 0: what an earlier process left out is not to be counted again."""
        self._view.left_out = 0

    @property
    def num_left_out(self) -> int:
        """Events of which nothing was told."""
        return self._view.left_out

    @property
    def held(self) -> bool:
        """Whether something was told and is not published yet."""
        return bool(self._held) or self._snapshotting

    @property
    def num_held_events(self) -> int:
        """Events that were told and are not published yet."""
        return sum(len(told.events) for told in self._held)

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """See `RetainedLog.replay`."""
        return self.log.replay(start)

    def reaches(self, start: int) -> bool:
        """See `RetainedLog.reaches`."""
        return self.log.reaches(start)

    # --------------------------------------------------------------------------- as told

    def tell(self, told: Told, now: float) -> list[Frame]:
        """What the worker told at `now`, monotonic: published, or held for its time (O3)."""
        if not self._coalesce_s and not self._snapshotting:
            return self._tell(told.ts, told.events, told.payload)
        if not self._held:
            self._held_since = now
        self._held.append(told)
        self._held_blocks += num_blocks(told.events)
        return []

    def cut_at(self) -> float:
        """The monotonic time by which to call `cut`."""
        if self._snapshotting or not self._held:
            return float("inf")
        full = self._held_blocks >= _MOST_HELD_BLOCKS
        return self._held_since + (0.0 if full else self._coalesce_s)

    def cut(self) -> list[Frame]:
        """Publish what is held as one batch; nothing while the state is being told."""
        if self._snapshotting or not self._held:
            return []
        self._record(Entry(Kind.CUT, sink=self._number))
        return self._merge()

    def _merge(self) -> list[Frame]:
        ts = self._held[-1].ts
        events = merge_events(event for told in self._held for event in told.events)
        self._drop_held()
        return self._tell(ts, events)

    def _tell(
        self, ts: float, events: Sequence[Event], payload: bytes | None = None
    ) -> list[Frame]:
        """As a batch, unless nothing of it is told. `payload`: see `Told`."""
        told = self._view.apply(events)
        if payload is not None and self._speller.verbatim and told is events:
            return [Frame(self.log.append(payload, events), payload, ts, events)]
        return [self._add(ts, told)] if told else []

    def _drop_held(self) -> None:
        self._held, self._held_blocks = [], 0

    # --------------------------------------------------------------------------- its own

    def own(self, ts: float, events: Sequence[Event]) -> Frame:
        """A batch that the worker did not tell."""
        frame = self._add(ts, self._view.apply(events))
        verbatim = self._speller.verbatim and frame.events is events
        body = frame.payload if verbatim else encode_batch(KVEventBatch(ts, list(events)))
        self._record(Entry(Kind.FRAME, body, sink=self._number))
        return frame

    def end(self, ts: float) -> Frame:
        """The worker is gone, and all that it held."""
        self._drop_held()
        self._snapshot, self._snapshotting = None, False
        return self.own(ts, [AllBlocksCleared()])

    def begin_snapshot(self, state: FrozenReplica) -> None:
        """Tell the whole state anew, which is `state` now; `snapshot_part` publishes it."""
        self._record(Entry(Kind.SNAPSHOT, sink=self._number))
        self._start_snapshot()
        self._snapshot = snapshot_batches(state, SNAPSHOT_BLOCKS)

    def await_snapshot(self) -> None:
        """Hold what is told: `begin_snapshot` follows."""
        self._start_snapshot()

    def snapshot_part(self, ts: float) -> list[Frame]:
        """The next batch of it; after the last, what was told meanwhile."""
        if self._snapshot is None:
            return []
        events = next(self._snapshot, None)
        if events is not None:
            return [self.own(ts, events)]
        self._record(Entry(Kind.TOLD, sink=self._number))
        return self._end_snapshot()

    def _start_snapshot(self) -> None:
        self._drop_held()  # it is in the state
        self._snapshotting = True

    def _end_snapshot(self) -> list[Frame]:
        self._snapshot, self._snapshotting = None, False
        if self._rebase_after is not None:
            self._rebase_at = self.next_seq + self._rebase_after
        if self._coalesce_s:
            return []
        held = self._held
        self._drop_held()
        return [frame for told in held for frame in self._tell(told.ts, told.events, told.payload)]

    @property
    def rebase_due(self) -> bool:
        """Whether the numbering is to start over."""
        return self.next_seq >= self._rebase_at and not self._snapshotting

    def rebase(self, state: FrozenReplica) -> None:
        """Start over at seq 0, and tell the whole state."""
        self._record(Entry(Kind.REBASE, sink=self._number))
        self.log = self._new_log(0)
        self.begin_snapshot(state)

    def _add(self, ts: float, events: Sequence[Event]) -> Frame:
        """`events`: as told."""
        if self._speller.clears_by_gap and AllBlocksCleared() in events:
            self.log.append(self._speller.spell(ts, []), [])  # retained, and never sent
        payload = self._speller.spell(ts, events)
        return Frame(self.log.append(payload, events), payload, ts, events)

    # --------------------------------------------------------------------------- recovery

    def replay_entry(self, entry: Entry) -> None:
        """Do what an earlier process did (O2). Raises KVEventsError for what it cannot have done."""
        match entry.kind:
            case Kind.CUT if self._held and not self._snapshotting:
                self._merge()
            case Kind.FRAME:
                batch = decode_batch(entry.body).batch
                self._add(batch.ts, self._view.apply(batch.events))
            case Kind.REBASE:
                self.log = self._new_log(0)
            case Kind.SNAPSHOT:
                self._start_snapshot()
            case Kind.TOLD if self._snapshotting:
                self._end_snapshot()
            case _:
                raise KVEventsError(f"journal: {entry.kind.name} at seq {self.next_seq}")
