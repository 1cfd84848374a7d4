"""What several workers hold, as of what their streams have brought so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents.follower import Malformed, Step, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.hashing import canonical_hash
from kvevents.message import Channel
from kvevents.reading import Reading, read
from publisher.tools.fleet.held import Held
from publisher.tools.source import Capture, Live, Source

__all__ = ["Fleet", "Missing", "Rank", "Worker", "slow", "waiting"]

_LOCAL = (None, "LOCAL")
_FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
_MOST_RANKS = 1024
"""Of one worker; what a stream says of more is counted and left out."""
_SILENT_S = 2.0
"""A replay of which nothing comes for so long is one that is not answered."""
_LONGEST_REASON = 100
_STOPPED = "a replay stopped before its end"
_ASTRAY_NS = 2_000_000_000
"""Replays that are ahead of what comes live for so long are another's, or that is far behind."""


@dataclass(slots=True)
class Missing:
    """What is not known of a stream: `before` it was joined (0 or more times), batches that were `lost`,
    and those of them that are perhaps `ours` alone, batches and events that could not be read, blocks
    that could not be placed.
    """

    before: int = 0
    lost: int = 0
    ours: int = 0
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
        self.misfit = ""
        """Why the first block that could not be placed could not."""
        self._misfits = 0
        self._since = Missing()
        """What was missing of the worker's stream when all was cleared last."""
        self.anew = 0
        """After which of the replays that were given up all was cleared, live."""

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
            before, size = self.index.oddities.malformed, self.index.block_size
            self.index.apply(told[-1:])
            misfits = self.index.oddities.malformed - before
            if misfits and not self._misfits and isinstance(event, BlockStored):
                self.misfit = _why_misfit(event, size)
            self._misfits += misfits
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
        misfits = len(event.block_hashes) - len(held)
        if misfits and not self._misfits:
            self.misfit = "told by its hash alone, and not held"
        self._misfits += misfits
        return msgspec.structs.replace(
            event, block_hashes=held, block_size=size, parent_block_hash=None, extra_keys=None
        )


def _why_misfit(event: BlockStored, size: int | None) -> str:
    blocks, tokens = len(event.block_hashes), len(event.token_ids)
    if event.block_size < 1:
        return f"block_size {event.block_size} is below 1"
    if size is not None and event.block_size != size:
        return f"block_size {event.block_size}, after blocks of {size}"
    if tokens not in (0, blocks * event.block_size):
        return f"{_many(tokens, 'token id', 'token ids')}, not {blocks} x {event.block_size}"
    return "its parent, token ids, extra keys or names cannot be"


class Worker:
    """One source's stream. `came`: batches. `malformed`: messages that are none of the wire's. `beyond`:
    batches of ranks that were too many. `answered`, `gave_up`: replays. `refused`: the other end would
    not have us. `own_gaps`: that are perhaps ours alone. `unreadable`: why the first batch or event that
    could not be read could not.
    """

    def __init__(self, source: Source, new_index: Callable[[str, int], Held]) -> None:
        self.source, self.name = source, source.name
        self.ranks: dict[int, Rank] = {}
        self.came = self.malformed = self.beyond = 0
        self.missing = Missing()
        self.was_connected = isinstance(source, Capture)
        self.answered = self.gave_up = self.refused = False
        self.replay_began = False
        """Whether something came of the replay that was asked for last."""
        self.own_gaps = 0
        self.unreadable = ""
        self._own_until = 0
        """What is lost before this seq may be ours alone: we read too slowly when it did not come."""
        self._given_up = self._anew = 0
        """Replays that were given up, and after which of them the stream began at seq 0, live."""
        self._is_given_up = False
        self._ahead_ns: int | None = None
        """Since when the replays are ahead of what comes live."""
        self._at_ns = 0
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
    def held(self) -> int:
        """How many batches have come that wait for a replay."""
        return self.source.follower.held

    @property
    def replay_is_silent(self) -> bool:
        """Whether a replay is under way of which nothing has come for long. One that pauses is not: it
        may be we who were busy with what it brought.
        """
        source = self.source
        if self.replay_began or not isinstance(source, Live):
            return False
        return source.listener.unanswered_s > _SILENT_S

    @property
    def is_astray(self) -> bool:
        """Whether the replays are another publisher's, or what comes live is far behind them."""
        if self._ahead_ns is None or not self.source.follower.ahead:
            return False
        now = self._at_ns if isinstance(self.source, Capture) else time.time_ns()
        return now - self._ahead_ns > _ASTRAY_NS

    @property
    def is_late(self) -> bool:
        """Whether there may be more that has come and was not read yet."""
        return isinstance(self.source, Live) and self.source.is_behind

    def lacks_replay(self, rank: Rank | None) -> bool:
        """Whether a replay was given up that had to tell what is still not known."""
        known = self._anew if rank is None else max(self._anew, rank.anew)
        return self.source.follower.diverged and known != self._given_up

    def told(self, told: Told, rank: Rank, applied: Sequence[Event]) -> None:
        """A batch was applied; what is told live from seq 0, or from a clear, needs no replay."""
        if told.replayed or not self._is_given_up:
            return
        if not told.seq:
            self._anew = self._given_up
        if any(isinstance(event, AllBlocksCleared) for event in applied):
            rank.anew = self._given_up

    def look(self, step: Step) -> None:
        """A message has come."""
        match step.message.channel:
            case Channel.CONNECTED:
                self.was_connected = True
            case Channel.REFUSED:
                self.refused = True
            case Channel.ASKED:
                self.replay_began = False
            case Channel.ANSWER:
                self.answered = self.replay_began = True
            case Channel.OVER:
                self.gave_up = True
        was_given_up, self._is_given_up = self._is_given_up, self.source.follower.diverged
        self._given_up += self._is_given_up and not was_given_up
        self._at_ns = step.message.at_ns
        if not self.source.follower.ahead:
            self._ahead_ns = None
        elif self._ahead_ns is None:
            self._ahead_ns = self._at_ns

    def gap(self, gap: Gap) -> None:
        """Batches have not come; perhaps they came, and we were too slow."""
        if self.source.is_behind:
            self.own_gaps += 1
            self._own_until = max(self._own_until, gap.first + gap.count)

    @property
    def ends_in_replay(self) -> bool:
        """Whether it is a capture that ends before its replay, which may have had what is missing."""
        return isinstance(self.source, Capture) and self.source.ends_in_replay

    def is_ours(self, first: int) -> bool:
        """Whether it may be by us alone that the batches from `first` on are missing."""
        return self.source.is_behind or first < self._own_until

    def lost(self, lost: Lost) -> None:
        """Batches that nobody has any more."""
        if not lost.first:
            self.missing.before += 1
            return
        self.missing.lost += lost.count
        self.missing.ours += lost.count if self.is_ours(lost.first) else 0

    def restart(self) -> None:
        """Another run: nothing is held, and nothing is missing."""
        self.missing, self._own_until, self.unreadable = Missing(), 0, ""
        for rank in self.ranks.values():
            rank.restart()

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
        if missing or self.beyond or self.lacks_replay(rank):
            return False
        return self.in_step and not self.is_late and not self.is_astray

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
        worker.look(step)
        return worker

    def told(self, worker: Worker, told: Told) -> tuple[Reading, list[Event]]:
        """A batch in its turn; what it says, and what of it was applied."""
        reading = read(told)
        worker.came += 1
        if reading.batch is None:
            worker.missing.unreadable += 1
            worker.unreadable = worker.unreadable or reading.reason
            return reading, []
        rank = worker.rank(reading.rank)
        applied: list[Event] = []
        if rank is None:
            worker.beyond += 1
        elif reading.events:
            applied = rank.apply(reading.events, worker.missing)
        if rank is not None:
            worker.told(told, rank, applied)
        worker.missing.skipped += len(reading.skipped)
        if reading.skipped and not worker.unreadable:
            worker.unreadable = reading.skipped[0].reason
        return reading, applied

    def other(self, worker: Worker, arrival: object) -> None:
        """What else has come."""
        match arrival:
            case Gap():
                worker.gap(arrival)
            case Lost():
                worker.lost(arrival)
            case Malformed():
                worker.malformed += 1
            case Restarted():
                worker.restart()

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
    source = worker.source
    if not worker.was_connected:
        why = ": it refuses us: CURVE on one side only, or a key that it does not know"
        return [f"not connected{why if worker.refused else ''}"]
    notes = _of_connection(worker)
    if worker.gave_up and not worker.answered and not missing.before:
        notes.append("its replay endpoint does not answer")
    if worker.lacks_replay(rank) and worker.answered and not missing.before and not missing.lost:
        notes.append(f"{_STOPPED}: what it had still to tell is unknown")
    if missing.before:
        notes.append(f"{_joined(worker)}: what was stored before is unknown")
    if missing.lost:
        notes.append(f"stale: {_many(missing.lost, 'batch', 'batches')} lost{_ours(missing)}")
    if missing.lost and worker.ends_in_replay:
        notes.append("the capture ends before a replay does, which may have had them")
    why = f": {_short(worker.unreadable)}" if worker.unreadable else ""
    if missing.unreadable:
        notes.append(f"{_many(missing.unreadable, 'batch', 'batches')} cannot be read{why}")
        why = ""
    if missing.skipped:
        notes.append(f"{_many(missing.skipped, 'event', 'events')} cannot be read{why}")
    if missing.misfits:
        why = "" if rank is None else f": {rank.misfit}"
        notes.append(f"{_many(missing.misfits, 'block', 'blocks')} malformed{why}")
    if worker.malformed:
        notes.append(f"{_many(worker.malformed, 'message', 'messages')} not understood")
    if worker.beyond:
        many = _many(worker.beyond, "batch", "batches")
        notes.append(f"only {_MOST_RANKS} ranks are looked at: {many} of others left out")
    if rank is not None and not rank.stores:
        notes.append(f"none of {_many(worker.came, 'batch', 'batches')} has stored a block")
    if rank is not None and rank.remote:
        notes.append(f"{_many(rank.remote, 'block', 'blocks')} of other workers left out")
    if rank is not None and rank.other_groups:
        many = _many(rank.other_groups, "block", "blocks")
        notes.append(f"{many} of other KV cache groups left out")
    if source.is_behind and missing.ours:
        notes.append(f"{slow(source)}: what is missing may be our own loss")
    return notes


def _of_connection(worker: Worker) -> list[str]:
    source, notes = worker.source, list[str]()
    if not source.connected:
        notes.append("the connection is lost: this is as of then")
    if worker.replay_is_silent or (source.connected and not worker.in_step):
        notes.append(waiting(worker))
    if worker.is_astray:
        ahead = _many(source.follower.ahead, "batch", "batches")
        notes.append(
            f"the replay endpoint {_replay_endpoint(source)} is {ahead} ahead of what comes live:"
            " it is another publisher's, or what comes live is far behind"
        )
    return notes


def waiting(worker: Worker) -> str:
    """What waits for the replay that is under way."""
    source, held = worker.source, worker.held
    if not worker.replay_is_silent:
        waits = "1 batch waits" if held == 1 else f"{held} batches wait"
        return f"its replay is not over{f': {waits} behind it' if held else ''}"
    how = "answers no more" if worker.answered else "does not answer"
    silent = f"the replay endpoint {_replay_endpoint(source)} {how}"
    if not held:
        return silent
    have = "1 batch has come and waits" if held == 1 else f"{held} batches have come and wait"
    return f"{have}: {silent}"


def _replay_endpoint(source: Source) -> str | None:
    if isinstance(source, Live):
        return source.address.replay_endpoint
    return None if source.head is None else source.head.replay_endpoint


def _ours(missing: Missing) -> str:
    if not missing.ours:
        return ""
    which = "" if missing.ours == missing.lost else f"{missing.ours} of them "
    return f", {which}perhaps by us alone: it was read too slowly then"


def slow(source: Source) -> str:
    """Why what is missing may be our own loss."""
    if isinstance(source, Capture):
        return "it was recorded too slowly"
    return "we read more slowly than it publishes, or stood still"


def _short(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"


def _joined(worker: Worker) -> str:
    if not worker.source.can_replay:
        return "joined live"
    if worker.answered and worker.source.follower.diverged:
        return _STOPPED
    if worker.answered:
        return "its replays do not go back far enough"
    return "its replay endpoint does not answer"


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
