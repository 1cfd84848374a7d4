"""A stream in numbers: what was resident when, how long blocks stay, and which come back.

P1  A block is on a tier from the first event that stores it there to the one that removes it, or clears
    its rank; other events about it change nothing. It is counted by its hash, whatever else is told.
P2  A lifetime goes from a block's store to its removal, by the times at which the messages came. Where
    the store came in answer to a replay, its time is not known; where a clear or the end came first, the
    lifetime is longer than was seen. Both are counted apart.
P3  A return is a store of a block that was removed from that tier, with no clear in between. Its
    *distance* is how many distinct others came to the tier while it was away. A tier that evicts the
    least recently used block keeps what it has and what comes, so one larger by the distance and one
    would still have had the block: it is the most that was missing, and less may have been enough.
P4  Memory is bounded by the distinct blocks since the last clear, and by the heads of returning runs;
    the timeline and the histograms have bounds of their own.
P5  The first 64 ranks are followed apart. All others are taken for one: what two of them have of one hash
    is one block, and a clear of one clears all of them.
P6  What came in answer to a replay is in every count, but not in the timeline's events and blocks: it was
    published at some other time.
P7  What was published before the first batch that was told of a run is no loss: whoever joins late has it
    from nobody. Blocks that were stored then are resident and not counted, until all is cleared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TypeAlias

from kvevents.absences import Absences
from kvevents.events import BlockRemoved, BlockStored, StorageMedium, medium_of
from kvevents.follower import Malformed
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.hashing import BlockHash, canonical_hash
from kvevents.histogram import Histogram
from kvevents.reading import Reading
from kvevents.timeline import KINDS, Timeline

__all__ = ["Counts", "Head", "Profile", "Tier"]

_MEDIA = tuple(StorageMedium)
_STORED, _REMOVED, _CLEARED = range(len(KINDS))
_UNKNOWN = -1
_MOST_RANKS = 64


@dataclass(slots=True)
class Counts:
    """Of blocks on a tier, of one rank or of several together."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    resident: int = 0
    peak: int = 0
    """The most that were resident; of several ranks, each one's most added up."""
    lifetimes: Histogram = field(default_factory=Histogram)
    """Nanoseconds (P2)."""
    unknown_ages: int = 0
    """Removed blocks whose store came in answer to a replay."""
    away: Histogram = field(default_factory=Histogram)
    """Nanoseconds that blocks which returned had been away."""
    elsewhere: int = 0
    """Returns of blocks that another tier had meanwhile kept."""
    distances: Histogram = field(default_factory=Histogram)
    """Blocks (P3)."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Returns, by how large a tier would certainly have kept them (P3), in thousandths of the peak."""

    @property
    def returns(self) -> int:
        """Stores of blocks that had been removed."""
        return self.distances.count

    def kept_by(self, thousandths: int) -> int:
        """How many returns a tier of so many thousandths of the peak would certainly have kept."""
        return sum(times for size, times in self.sizes.items() if size <= thousandths)

    def add(self, other: Counts) -> None:
        """Count those of `other` too."""
        for name in (
            *("stored", "removed", "cleared", "resident", "peak"),
            *("unknown_ages", "elsewhere"),
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("lifetimes", "away", "distances"):
            getattr(self, name).merge(getattr(other, name))
        self.sizes.update(other.sizes)


@dataclass(frozen=True, slots=True)
class Head:
    """The first of several blocks that returned together: whose, where, how often, and how many."""

    rank: int | None
    """None: one of those that are not followed apart (P5)."""
    medium: StorageMedium
    block_hash: BlockHash
    times: int
    blocks: int


class Tier:
    """What one rank has on one medium."""

    def __init__(self) -> None:
        self.held: dict[BlockHash, int] = {}
        """Since when; _UNKNOWN where that is not known."""
        self.absences = Absences[BlockHash]()
        self.heads: Counter[BlockHash] = Counter()
        self.head_blocks: Counter[BlockHash] = Counter()
        self._counts = Counts()

    def store(self, names: Iterable[BlockHash], at_ns: int, since: int, others: list[Tier]) -> int:
        """How many are new. `others`: the rank's other tiers."""
        held, counts, came = self.held, self._counts, self.absences.came
        before, back = len(held), list[BlockHash]()
        for name in names:
            if name in held:
                continue
            held[name] = since
            if (absence := came(name, at_ns)) is not None:
                back.append(name)
                counts.away.add(absence.time)
                counts.distances.add(absence.others)
                counts.elsewhere += any(name in other.held for other in others)
        new = len(held) - before
        counts.stored += new
        counts.peak = max(counts.peak, len(held))
        if back:
            self.heads[back[0]] += 1
            self.head_blocks[back[0]] += len(back)
        return new

    def remove(self, names: Iterable[BlockHash], at_ns: int) -> int:
        """How many there were."""
        held, counts, went = self.held, self._counts, self.absences.went
        before = len(held)
        for name in names:
            if (since := held.pop(name, None)) is None:
                continue
            went(name, at_ns)
            if since == _UNKNOWN:
                counts.unknown_ages += 1
            else:
                counts.lifetimes.add(at_ns - since)
        gone = before - len(held)
        counts.removed += gone
        return gone

    def clear(self) -> int:
        """How many there were."""
        gone = len(self.held)
        self._counts.cleared += gone
        self.held.clear()
        self.absences.clear()
        return gone

    def counts(self) -> Counts:
        """A copy, as of now."""
        told = Counts(resident=len(self.held))
        told.add(self._counts)
        for distance, times in told.distances:
            told.sizes[1000 - (-1000 * (distance + 1) // told.peak)] += times
        return told


_Tiers: TypeAlias = dict[StorageMedium, Tier]


class Profile:
    """Of one stream. Feed it, in order, what came and when."""

    def __init__(self, most: int = 2000) -> None:
        self.timeline = Timeline(most)
        self.batches = self.replayed = self.undecodable = self.skipped = 0
        """`replayed`: of the batches, those that came in answer to a replay."""
        self.missed = self.earlier = 0
        """Batches that were lost, and those that came before the first (P7)."""
        self.replayed_until_ns: int | None = None
        """When the last batch came that a replay told before anything came live; None: there is none."""
        self._begun = False
        """Whether a batch of this run was told."""
        self.events = dict.fromkeys(KINDS, 0)
        self._ranks: dict[int | None, _Tiers] = {}
        """None: all that are not followed apart."""
        self._resident = dict.fromkeys(_MEDIA, 0)

    def take(self, at_ns: int, one: Reading | Malformed | Gap | Lost | Restarted) -> None:
        """What came at `at_ns`. Never raises for what is told; time that goes back stands still."""
        stretch = self.timeline.at(at_ns)
        at_ns = self.timeline.end_ns
        match one:
            case Reading(batch=None) | Malformed():
                self._begun = self._begun or isinstance(one, Reading)
                self.undecodable += 1
                stretch.marks["undecodable"] += 1
            case Reading():
                self._read(one, at_ns)
            case Gap():
                stretch.marks["gap"] += 1
            case Lost() if not self._begun:
                self.earlier += one.count
            case Lost():
                self.missed += one.count
                stretch.marks["lost"] += 1
            case Restarted():
                stretch.marks["restarted"] += 1
                self._begun = False
                for tiers in self._ranks.values():
                    self._clear(tiers)
        stretch.resident = tuple(self._resident.values())

    # ---------------------------------------------------------------------------------- numbers

    @property
    def ranks(self) -> list[int]:
        """Those that are followed apart, ascending."""
        return sorted(rank for rank in self._ranks if rank is not None)

    @property
    def has_others(self) -> bool:
        """Whether more were told of than are followed apart."""
        return None in self._ranks

    def tiers(self, rank: int | None = None) -> dict[StorageMedium, Counts]:
        """Of a rank, or of all together; only media that blocks were on. Empty for a rank that is not
        followed apart.
        """
        ranks = self._ranks.values() if rank is None else [self._ranks.get(rank, {})]
        found = {medium: Counts() for medium in _MEDIA}
        for tiers in ranks:
            for medium, tier in tiers.items():
                found[medium].add(tier.counts())
        return {medium: counts for medium, counts in found.items() if counts.stored}

    def heads(self, most: int) -> list[Head]:
        """The runs of blocks that returned most often, at most so many of them."""
        return nsmallest(
            most,
            self._heads(),
            key=lambda h: (-h.times, -h.blocks, h.rank is None, h.rank or 0, h.block_hash),
        )

    def _heads(self) -> Iterator[Head]:
        for rank, tiers in self._ranks.items():
            for medium, tier in tiers.items():
                for name, times in tier.heads.items():
                    yield Head(rank, medium, name, times, tier.head_blocks[name])

    # ----------------------------------------------------------------------------------- events

    def _read(self, reading: Reading, at_ns: int) -> None:
        self.batches += 1
        self._begun = True
        self.skipped += len(reading.skipped)
        stretch = self.timeline.stretches[-1]
        since = _UNKNOWN if reading.told.replayed else at_ns
        live = not reading.told.replayed
        self.replayed += not live
        if self.replayed == self.batches:
            self.replayed_until_ns = at_ns
        tiers = self._tiers_of(reading.rank) if reading.events else {}
        for event in reading.events:
            if isinstance(event, BlockStored):
                kind, blocks = _STORED, self._store(tiers, event, at_ns, since)
            elif isinstance(event, BlockRemoved):
                kind, blocks = _REMOVED, self._remove(tiers, event, at_ns)
            else:
                kind, blocks = _CLEARED, self._clear(tiers)
                stretch.marks["cleared"] += 1
            self.events[KINDS[kind]] += 1
            stretch.events[kind] += live
            stretch.blocks[kind] += live * blocks

    def _tiers_of(self, rank: int) -> _Tiers:
        found = self._ranks.get(rank)
        if found is not None:
            return found
        return self._ranks.setdefault(rank if len(self._ranks) < _MOST_RANKS else None, {})

    def _store(self, tiers: _Tiers, event: BlockStored, at_ns: int, since: int) -> int:
        medium = medium_of(event)
        tier = tiers.get(medium)
        if tier is None:
            tier = tiers[medium] = Tier()
        others = [other for other in tiers.values() if other is not tier]
        new = tier.store(map(canonical_hash, event.block_hashes), at_ns, since, others)
        self._resident[medium] += new
        return new

    def _remove(self, tiers: _Tiers, event: BlockRemoved, at_ns: int) -> int:
        removed = 0
        names = [canonical_hash(raw) for raw in event.block_hashes]
        for medium, tier in tiers.items():
            if event.medium is None or event.medium == medium:
                gone = tier.remove(names, at_ns)
                self._resident[medium] -= gone
                removed += gone
        return removed

    def _clear(self, tiers: _Tiers) -> int:
        cleared = 0
        for medium, tier in tiers.items():
            gone = tier.clear()
            self._resident[medium] -= gone
            cleared += gone
        return cleared
