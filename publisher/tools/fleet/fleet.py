"""What several workers hold, as of what their streams have brought so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents.follower import Malformed, Step, Told
from kvevents.gaps import Lost, Restarted
from kvevents.hashing import canonical_hash
from kvevents.message import Channel
from kvevents.reading import Reading, read
from publisher.tools.fleet.held import Held
from publisher.tools.source import Capture, Source

__all__ = ["Fleet", "Missing", "Rank", "Worker"]

_LOCAL = (None, "LOCAL")
_FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
_MOST_RANKS = 1024
"""Of one worker; what a stream says of more is counted and left out."""


@dataclass(slots=True)
class Missing:
    """What is not known of a stream: `before` it was joined (0 or more times), batches that were `lost`,
    batches and events that could not be read, blocks that could not be placed.
    """

    before: int = 0
    lost: int = 0
    unreadable: int = 0
    skipped: int = 0
    misfits: int = 0

    def __sub__(self, earlier: Missing) -> Missing:
        return Missing(*(getattr(self, one) - getattr(earlier, one) for one in _MISSING))

    def __add__(self, other: Missing) -> Missing:
        return Missing(*(getattr(self, one) + getattr(other, one) for one in _MISSING))

    def __bool__(self) -> bool:
        return any(getattr(self, one) for one in _MISSING)


_MISSING = [one.name for one in fields(Missing)]


class Rank:
    """One rank of a worker. `stores`: blocks that were told as stored. `remote`, `other_groups`: blocks
    that were left out, for they are of another worker, or of a KV cache group that is not the main one:
    the first that is told to be of full attention; until one is, group 0.
    """

    def __init__(self, worker: str, number: int, index: Held) -> None:
        self.worker, self.number, self.index = worker, number, index
        self.stores = self.remote = self.other_groups = 0
        self._main: int | None = None
        self._guessed = False
        self._misfits = 0
        self._since = Missing()
        """What was missing of the worker's stream when all was cleared last."""

    def missing(self, of_worker: Missing) -> Missing:
        """Since all was cleared last."""
        return of_worker - self._since + Missing(misfits=self._misfits)

    def restart(self) -> None:
        """Nothing is held, and nothing is missing."""
        self.index.clear()
        self._main, self._guessed = None, False
        self._misfits, self._since = 0, Missing()

    def apply(self, events: Sequence[Event], of_worker: Missing) -> list[Event]:
        """Those that concern this rank's state, which were applied."""
        told: list[Event] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
                self._guessed = False
                self._misfits, self._since = 0, Missing() + of_worker
                told.append(event)
                continue
            if event.locality not in _LOCAL:
                self.remote += len(event.block_hashes)
                continue
            if isinstance(event, BlockStored):
                self.stores += len(event.block_hashes)
                self._choose_group(event)
            if event.group_idx is not None and event.group_idx != (self._main or 0):
                self.other_groups += len(event.block_hashes)
                continue
            told.append(self._placed(event) if isinstance(event, BlockStored) else event)
            before = self.index.oddities.malformed
            self.index.apply(told[-1:])
            self._misfits += self.index.oddities.malformed - before
        return told

    def _choose_group(self, event: BlockStored) -> None:
        if self._main is not None or event.group_idx is None:
            return
        if event.kv_cache_spec_kind in _FULL_ATTENTION:
            self._main = event.group_idx
            if self._main != 0 and self._guessed:
                self.index.clear()
        elif event.group_idx == 0:
            self._guessed = True

    def _placed(self, event: BlockStored) -> BlockStored:
        """Blocks that come from another medium may be told by their hashes alone, in any order, and with
        a block size of 0: those that are held.
        """
        size = self.index.block_size
        if event.block_size or len(event.token_ids) or size is None:
            return event
        held = [name for name in event.block_hashes if self.index.has(canonical_hash(name))]
        self._misfits += len(event.block_hashes) - len(held)
        return msgspec.structs.replace(
            event, block_hashes=held, block_size=size, parent_block_hash=None, extra_keys=None
        )


class Worker:
    """One source's stream. `came`: batches. `malformed`: messages that are none of the wire's. `beyond`:
    batches of ranks that were too many. `answered`, `gave_up`: replays.
    """

    def __init__(self, source: Source, new_index: Callable[[str, int], Held]) -> None:
        self.source, self.name = source, source.name
        self.ranks: dict[int, Rank] = {}
        self.came = self.malformed = self.beyond = 0
        self.missing = Missing()
        self.was_connected = isinstance(source, Capture)
        self.answered = self.gave_up = self.was_behind = False
        self._new_index = new_index

    @property
    def seq(self) -> int | None:
        """Of the last batch; None before it."""
        if isinstance(self.source, Capture) and not self.came:
            return None
        following = self.source.follower.next_seq
        return following - 1 if following else None

    @property
    def in_step(self) -> bool:
        """Whether it is connected, and no answer is awaited."""
        follower = self.source.follower
        waits = follower.recovering or follower.asking is not None
        return self.source.connected and not waits

    @property
    def told_all(self) -> bool:
        """Whether there was something, or a replay endpoint has said that there is nothing."""
        return bool(self.came) or self.answered

    def rank(self, number: int) -> Rank | None:
        """None where there are too many of them."""
        found = self.ranks.get(number)
        if found is None and len(self.ranks) < _MOST_RANKS:
            found = Rank(self.name, number, self._new_index(self.name, number))
            self.ranks[number] = found
        return found

    def is_whole(self, rank: Rank | None) -> bool:
        """Whether what is known is all there is."""
        missing = self.missing if rank is None else rank.missing(self.missing)
        return self.in_step and not missing and not self.beyond

    def notes(self, rank: Rank | None) -> list[str]:
        """Why it is not, and what was left out."""
        return _notes(self, rank)


class Fleet:
    """Of all sources. `new_index`: makes the index of a rank, given the worker's name and the rank."""

    def __init__(
        self, sources: Sequence[Source], new_index: Callable[[str, int], Held] | None = None
    ) -> None:
        made = new_index or (lambda _worker, _rank: Held())
        self.workers = {id(source): Worker(source, made) for source in sources}

    @property
    def ranks(self) -> list[Rank]:
        """All of them, in order."""
        return [
            worker.ranks[number]
            for worker in self.workers.values()
            for number in sorted(worker.ranks)
        ]

    def of(self, source: Source) -> Worker:
        """A source's."""
        return self.workers[id(source)]

    def begin(self, source: Source, step: Step) -> Worker:
        """A message has come."""
        worker = self.workers[id(source)]
        match step.message.channel:
            case Channel.CONNECTED:
                worker.was_connected = True
            case Channel.ANSWER:
                worker.answered = True
            case Channel.OVER:
                worker.gave_up = True
        worker.was_behind = worker.was_behind or source.is_behind
        return worker

    def told(self, worker: Worker, told: Told) -> tuple[Reading, list[Event]]:
        """A batch in its turn; what it says, and what of it was applied."""
        reading = read(told)
        worker.came += 1
        if reading.batch is None:
            worker.missing.unreadable += 1
            return reading, []
        rank = worker.rank(reading.rank)
        applied: list[Event] = []
        if rank is None:
            worker.beyond += 1
        elif reading.events:
            applied = rank.apply(reading.events, worker.missing)
        worker.missing.skipped += len(reading.skipped)
        return reading, applied

    def other(self, worker: Worker, arrival: object) -> None:
        """What else has come."""
        match arrival:
            case Lost(first=0):
                worker.missing.before += 1
            case Lost(count=count):
                worker.missing.lost += count
            case Malformed():
                worker.malformed += 1
            case Restarted():
                worker.missing = Missing()
                for rank in worker.ranks.values():
                    rank.restart()

    def take(self, source: Source, step: Step) -> bool:
        """All that a message brought; whether that changed what is held."""
        worker, changed = self.begin(source, step), False
        for arrival in step.arrivals:
            if isinstance(arrival, Told):
                _, applied = self.told(worker, arrival)
                changed = changed or any(_changes(event) for event in applied)
            else:
                self.other(worker, arrival)
                changed = changed or isinstance(arrival, Restarted)
        return changed


def _changes(event: Event) -> bool:
    return not isinstance(event, BlockStored | BlockRemoved) or bool(event.block_hashes)


def _notes(worker: Worker, rank: Rank | None) -> list[str]:
    missing = worker.missing if rank is None else rank.missing(worker.missing)
    source, notes = worker.source, list[str]()
    if not worker.was_connected:
        return ["not connected"]
    if not source.connected:
        notes.append("the connection is lost: this is as of then")
    elif not worker.in_step:
        notes.append("its replay is not over")
    if source.is_behind:
        notes.append("it publishes faster than we read")
    if worker.gave_up and not worker.answered and not missing.before:
        notes.append("its replay endpoint does not answer")
    if missing.before:
        notes.append(f"{_joined(worker)}: what was stored before is unknown")
    if missing.lost:
        by_us = ", perhaps by us: it publishes faster than we read" if worker.was_behind else ""
        notes.append(f"stale: {_many(missing.lost, 'batch', 'batches')} lost{by_us}")
    if missing.unreadable:
        notes.append(f"{_many(missing.unreadable, 'batch', 'batches')} cannot be read")
    if missing.skipped:
        notes.append(f"{_many(missing.skipped, 'event', 'events')} cannot be read")
    if missing.misfits:
        notes.append(f"{_many(missing.misfits, 'block', 'blocks')} malformed")
    if worker.malformed:
        notes.append(f"{_many(worker.malformed, 'message', 'messages')} not understood")
    if worker.beyond:
        notes.append(f"only {_MOST_RANKS} ranks are looked at")
    if rank is not None and not rank.stores:
        notes.append(f"none of {_many(worker.came, 'batch', 'batches')} has stored a block")
    if rank is not None and rank.remote:
        notes.append(f"{_many(rank.remote, 'block', 'blocks')} of other workers left out")
    if rank is not None and rank.other_groups:
        many = _many(rank.other_groups, "block", "blocks")
        notes.append(f"{many} of other KV cache groups left out")
    return notes


def _joined(worker: Worker) -> str:
    if not worker.source.can_replay:
        return "joined live"
    if worker.answered:
        return "its replays do not go back far enough"
    return "its replay endpoint does not answer"


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
