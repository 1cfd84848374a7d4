"""Subscribers A and B: our own `Subscriber`, and what it makes one believe."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from stress_child import Parent
from stress_evidence import Evidence, Way
from stress_site import Site, url

from kvevents.dialect import PRESETS
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.hashing import canonical_hash
from kvevents.index import BlockIndex
from kvevents.speller import Speller
from publisher import Batch, Received, Subscriber, Undecodable

__all__ = ["run_subscriber"]

_LOOK_UP_S = 0.01
_REPLAY_S = 1.0


def run_subscriber(
    parent: Parent, site: Site, name: str, sink: int, *, proxied: bool, tokens: bool, dialect: str
) -> None:
    """Follow a sink, of that dialect, until told to leave. Without `tokens` it leaves them out."""
    pub, replay = (site.proxied if proxied else site.direct)[sink]
    speller = Speller(PRESETS[dialect].dialect, dp_rank=0)
    follower = _Follower(sink, Evidence(site.evidence(name, sink)), speller, tokens=tokens)
    with Subscriber(url(pub), url(replay), replay_timeout_s=_REPLAY_S) as subscriber:
        until: int | None = None
        awaits_end = False
        while True:
            follower.take(subscriber.receive(_LOOK_UP_S))
            match parent.poll():
                case ("pause", seconds):
                    time.sleep(seconds)
                case ("show", next_seqs):
                    until = next_seqs[sink]
                case ("await end",):
                    awaits_end = True
                case ("leave",):
                    return
                case _:
                    pass
            steady = not subscriber.recovering and not follower.stale
            if until is not None and steady and (subscriber.next_seq or 0) >= until:
                parent.say("view", {sink: follower.view()}, follower.problems())
                until = None
            if awaits_end and steady and follower.empty:
                parent.say("end")
                awaits_end = False


def _signed(event: Event) -> Event:
    """`event` with its hashes in the form that we encode from."""
    if isinstance(event, AllBlocksCleared):
        return event
    hashes = [canonical_hash(one) for one in event.block_hashes]
    told = msgspec.structs.replace(event, block_hashes=hashes)
    if isinstance(told, BlockStored) and told.parent_block_hash is not None:
        told.parent_block_hash = canonical_hash(told.parent_block_hash)
    return told


class _Follower:
    def __init__(self, sink: int, evidence: Evidence, speller: Speller, *, tokens: bool) -> None:
        self._sink, self._evidence, self._speller = sink, evidence, speller
        self._index = BlockIndex() if tokens else None
        self._plain: dict[str, set[int]] = {str(medium): set() for medium in StorageMedium}
        self._last: Batch | None = None
        self._problems: list[str] = []
        self._losses = 0
        self.stale = False
        """Whether something was lost, and the state has not been told anew since."""

    def take(self, received: Iterable[Received]) -> None:
        for one in received:
            match one:
                case Batch():
                    self._apply(one)
                case Lost(first=first):
                    self.stale, self._losses = True, self._losses + 1
                    self._last = None
                    self._evidence.add(Way.LOST, first + one.count)
                case Restarted(seq=seq):
                    self._problems.append(f"sink {self._sink} went back to {seq}")
                    self.clear()
                case Undecodable(seq=seq, reason=reason):
                    self._problems.append(f"seq {seq} of sink {self._sink}: {reason}")
                case Gap():
                    pass

    def _apply(self, one: Batch) -> None:
        last, events = self._last, one.batch.events
        clears = bool(events) and isinstance(events[0], AllBlocksCleared)
        if one.skipped:
            self._problems.append(f"seq {one.seq} of sink {self._sink}: skipped {one.skipped}")
        if not one.replayed:
            way = Way.CLEAR if clears else Way.LIVE
        elif last is not None and last.replayed and one.seq == last.seq + 1 and not clears:
            way = Way.REPLAY
        else:
            way = Way.SNAPSHOT if clears else Way.FRAMES
        payload = self._speller.spell(one.batch.ts, list(map(_signed, events)))
        self._evidence.add(way, one.seq, payload)
        self.stale = self.stale and way is not Way.SNAPSHOT
        self._last = one
        if self._index is not None:
            self._index.apply(events)
        else:
            self._apply_plainly(events)

    def _apply_plainly(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                continue
            held = self._plain[str(event.medium)]
            hashes = {canonical_hash(one) for one in event.block_hashes}
            if isinstance(event, BlockRemoved):
                held -= hashes
            else:
                held |= hashes

    def clear(self) -> None:
        if self._index is not None:
            self._index.clear()
        for held in self._plain.values():
            held.clear()

    @property
    def empty(self) -> bool:
        return not self._index if self._index is not None else not any(self._plain.values())

    def view(self) -> dict[str, set[int]]:
        if self._index is None:
            return self._plain
        return {str(medium): set(held) for medium, held in self._index.resident.items()}

    def problems(self) -> list[str]:
        """What a sound stream does not do."""
        problems = list(self._problems)
        if self._index is not None and not self._losses:
            odd = self._index.oddities
            problems += [
                f"sink {self._sink}: {what}: {count} blocks"
                for what in ("unknown_parent", "removed_unknown", "malformed")
                if (count := getattr(odd, what))
            ]
        return problems
