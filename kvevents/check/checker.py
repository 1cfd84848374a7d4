"""One stream, held to the invariants of docs/check.md."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvevents.check.finding import Finding, Place
from kvevents.check.hashes import Verifier
from kvevents.check.ranks import Memory, Rank, finding_of
from kvevents.check.wire import Wire
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.follower import Malformed
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.hashing import BlockHash
from kvevents.message import Channel, Message
from kvevents.reading import Reading

__all__ = ["Checker", "Resident"]

_MAX_RANKS = 1024
_OF_A_STORE = b"event_type"
_END_SEQ = b"\xff" * 8
_TS_SLACK_S = 60.0
"""A state that is told anew is of now, and changes that waited meanwhile are of before."""

Resident = dict[tuple[int, int | None, StorageMedium], set[BlockHash]]
"""By rank, KV cache group and medium; without those that hold nothing."""


class Checker:
    """One stream's. Each message goes to `message`, then what it brought to `read` and `other`, in
    order. Nothing that comes is trusted: any bytes give findings, and no exception.

    `verifier`: of block hashes; None: they are not looked at. `silence_s`: how long a publisher that
    sends heartbeats may say nothing. What is kept grows with the blocks that are held, and with nothing
    else.
    """

    def __init__(self, *, verifier: Verifier | None = None, silence_s: float = 30.0) -> None:
        self.verifier = verifier
        self.batches = self.events = self.blocks = 0
        """Read so far; of `blocks`, those stored."""
        self._wire = Wire(silence_s)
        self._memory = Memory()
        self._ranks: OrderedDict[int, Rank] = OrderedDict()
        self._from_start = False
        """Whether all that this run has said is known, for ranks that were not heard of yet."""
        self._next: int | None = None
        """The seq after the last batch; None before the first of a run."""
        self._begun = False
        """Whether a batch of this run was read."""
        self._spoken = False
        """Whether one of them has said something."""
        self._restarted: Place | None = None
        """The last batch of the run before, until this one has said something."""
        self._pending: list[Gap | Lost] = []
        """Holes, until it is known what came after them."""
        self._ts: dict[int, tuple[float, Place]] = {}
        self._multiple = False
        self._last = Place(0)

    # ---------------------------------------------------------------------------------- inputs

    def message(self, message: Message) -> list[Finding]:
        """A message as it came, before it has its turn: frames, replays, what goes back."""
        return list(self._wire.take(message))

    def read(self, reading: Reading) -> list[Finding]:
        """A batch in its turn."""
        return list(self._read(reading))

    def other(self, arrival: Gap | Lost | Restarted | Malformed) -> list[Finding]:
        """What else the stream has brought."""
        match arrival:
            case Malformed(message, reason):
                ends = message.channel == Channel.LIVE and message.frames[1:2] == [_END_SEQ]
                if ends and len(message.frames) == 3:
                    return []  # `message` has said so
                return [finding_of("malformed", self._last, reason)]
            case Restarted(seq):
                found = finding_of(
                    "restart", Place(seq), "the publisher has started over", earlier=self._last
                )
                self._restarted = self._last
                self._forget()
                self._begun, self._spoken, self._next = False, False, None
                return [found]
            case Gap() | Lost():
                if self._begun:
                    self._pending.append(arrival)
                if isinstance(arrival, Lost):
                    self._forget()
        return []

    def close(self) -> list[Finding]:
        """There is no more."""
        found = list(self._holes(cleared=False))
        if self.batches and not self.blocks:
            found.append(finding_of("silent", self._last, "no block was ever stored"))
        if self.verifier is not None and self.verifier.gave_up:
            what = "the hashes are made as nothing that is known makes them: not verified"
            found.append(finding_of("hash-scheme", self._last, what))
        return found

    # --------------------------------------------------------------------------------- outputs

    @property
    def exact(self) -> bool:
        """Whether all that is held is known."""
        return self._begun and not self._pending and all(one.known for one in self._ranks.values())

    @property
    def next_seq(self) -> int | None:
        """The seq after that of the last batch; None before the first."""
        return self._next

    def resident(self) -> Resident:
        """What is held, as far as it was told."""
        return {
            (number, group, medium): set(there)
            for number, rank in self._ranks.items()
            for group, lane in rank.lanes.items()
            for medium, there in zip(StorageMedium, lane.present, strict=True)
            if there
        }

    # ---------------------------------------------------------------------------------- inside

    def _forget(self) -> None:
        self._from_start = False
        for rank in self._ranks.values():
            rank.forget()

    def _read(self, reading: Reading) -> Iterator[Finding]:
        place = self._last = Place(reading.seq)
        self.batches += 1
        events = reading.events
        cleared = bool(events) and isinstance(events[0], AllBlocksCleared) and _is_first(reading)
        if self._pending:
            yield from self._holes(cleared=cleared)
        if self._next is not None and reading.seq != self._next and not cleared:
            self._forget()
        if not self._begun:
            self._begin(place)
        self._next = reading.seq + 1
        if not self._spoken and not _is_empty(reading):
            yield from self._first(place, cleared=cleared)
        if reading.batch is None:
            yield finding_of("undecodable", place, reading.reason)
            self._forget()
            return
        rank = self._ranks.get(reading.rank)
        if rank is None:
            rank = self._add(reading.rank)
            if len(self._ranks) > 1 and not self._multiple:
                self._multiple = True
                ranks = ", ".join(map(str, list(self._ranks)[:2]))
                yield finding_of("rank-changes", place, f"ranks {ranks} in one stream")
        yield from self._check_ts(reading, place)
        if _is_empty(reading):
            self._wire.beat()
        of_a_store = _OF_A_STORE in reading.told.payload
        for position, event in _placed(reading):
            where = Place(reading.seq, position)
            if isinstance(event, str):
                yield _skipped(where, event)
                rank.forget()
            elif found := self._event(rank, event, where, of_a_store=of_a_store):
                yield from found

    def _event(self, rank: Rank, event: Event, place: Place, *, of_a_store: bool) -> list[Finding]:
        self.events += 1
        match event:
            case BlockStored():
                self.blocks += len(event.block_hashes)
                return rank.stored(event, place, of_a_store=of_a_store)
            case BlockRemoved():
                return rank.removed(event, place, of_a_store=of_a_store)
            case AllBlocksCleared():
                rank.clear(place)
        return []

    def _begin(self, place: Place) -> None:
        """The first batch of a run."""
        self._begun, self._from_start = True, place.seq == 0
        for rank in self._ranks.values():
            rank.known = self._from_start

    def _first(self, place: Place, *, cleared: bool) -> Iterator[Finding]:
        """The first batch of a run that says something."""
        before, self._restarted = self._restarted, None
        self._spoken = True
        if cleared:
            return
        if before is not None:
            what = "a new run does not begin with AllBlocksCleared: what was held stays believed"
            yield finding_of("restart-without-clear", place, what, earlier=before)
        elif place.seq == 0:
            what = "the batch with seq 0 does not begin with AllBlocksCleared"
            yield finding_of("first-seq", place, what)

    def _holes(self, *, cleared: bool) -> Iterator[Finding]:
        """What became of the holes before a batch. One that begins with a clear makes good for them."""
        pending, self._pending = self._pending, []
        lost = [one for one in pending if isinstance(one, Lost)]
        for one in pending:
            place = Place(one.first)
            if isinstance(one, Lost):
                what = f"{_batches(one.count)} lost from {one.first} on"
                if cleared:
                    what += ", before all is cleared"
                yield finding_of("lost", place, what, severity="note" if cleared else None)
            elif not any(each.first <= one.first + one.count for each in lost):
                what = f"{_batches(one.count)} did not come live, and came by a replay"
                yield finding_of("gap", place, what)

    def _add(self, number: int) -> Rank:
        """A rank that was not heard of; of more than can be, those heard of first are forgotten."""
        rank = self._ranks[number] = Rank(
            self._memory, known=self._from_start, verifier=self.verifier
        )
        if len(self._ranks) > _MAX_RANKS:
            gone, _ = self._ranks.popitem(last=False)
            self._ts.pop(gone, None)
            self._from_start = False
        return rank

    def _check_ts(self, reading: Reading, place: Place) -> Iterator[Finding]:
        """Of changes that came live: heartbeats and what is told anew are of times of their own."""
        events = reading.events
        if reading.told.replayed or reading.batch is None or not events:
            return
        if any(isinstance(one, AllBlocksCleared) for one in events):
            self._ts.pop(reading.rank, None)
            return
        ts = reading.batch.ts
        before = self._ts.get(reading.rank)
        if before is not None and ts < before[0] - _TS_SLACK_S:
            what = f"ts goes back by {before[0] - ts:.1f} s"
            yield finding_of("ts-back", place, what, earlier=before[1])
        self._ts[reading.rank] = ts, place


def _is_first(reading: Reading) -> bool:
    """Whether the first event that was read is the first of the batch."""
    return not (reading.skipped and reading.skipped[0].position == 0)


def _is_empty(reading: Reading) -> bool:
    """Whether it is a batch without events."""
    return reading.batch is not None and not reading.events and not reading.skipped


def _placed(reading: Reading) -> Iterator[tuple[int, Event | str]]:
    """Each event, or why it was skipped, with its position in the batch."""
    if not reading.skipped:
        yield from enumerate(reading.events)
        return
    reasons = {one.position: one.reason for one in reading.skipped}
    events = iter(reading.events)
    for position in range(len(reading.events) + len(reasons)):
        reason = reasons.get(position)
        yield position, next(events) if reason is None else reason


def _skipped(place: Place, reason: str) -> Finding:
    """An event that nobody can read, or that is another make's."""
    foreign = "bigrams" in reason or "is unknown" in reason or reason.endswith("at `$.type`")
    return finding_of("skipped", place, reason, severity="note" if foreign else None)


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"
