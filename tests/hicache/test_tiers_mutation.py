"""The model test of all tiers can fail: ways to break the cache, each caught by the same checks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any, TypeAlias

import pytest
from tiers_rig import Setup, TiersRig
from tiers_walk import random_setup, random_tiers_step

from hicache import HiRadixCache, HostPool, Node, Prefetch
from hicache.eviction import EvictionQueue
from hicache.flight import ABANDON, PENDING, Flight, Flights
from hicache.mover import Mover
from hicache.prefetch import Prefetches
from hicache.recorder import Recorder
from hicache.residency import Residency
from hicache.storage.backend import StorageBackend
from hicache.storage_tier import StorageTier
from hicache.tier import STORAGE_TIERS, Tier
from hicache.tiered import TieredTree
from hicache.tree import RadixTree
from kvevents import KVEventsError
from kvevents.hashing import DIGEST_BYTES

WALKS, STEPS = 60, 80
PARTS: dict[type, str] = {
    EvictionQueue: "",
    Flights: "_flights",
    Mover: "_mover",
    Prefetches: "_prefetches",
    RadixTree: "_tree",
    Recorder: "_recorder",
    Residency: "_residency",
    StorageTier: "_storage",
    TieredTree: "_tiered",
}
"""Where a cache has each of its parts."""

STORAGE: dict[str, Any] = {"storage": True}

MakeCache: TypeAlias = Callable[..., HiRadixCache]


def altered(*mutants: type) -> MakeCache:
    """Caches of which some parts are mutants instead; or a mutant of the cache itself."""
    if issubclass(mutants[0], HiRadixCache):
        return mutants[0]

    class Altered(HiRadixCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._alter()

        def _add_storage(self, backend: StorageBackend, host_pool: HostPool) -> None:
            self._alter()
            super()._add_storage(backend, host_pool)

        def _alter(self) -> None:
            for mutant in mutants:
                base = next(part for part in PARTS if issubclass(mutant, part))
                if base is EvictionQueue:
                    self._tiered.queues[Tier.HOST].__class__ = mutant
                    continue
                part = getattr(self, PARTS[base])
                if part is not None:
                    part.__class__ = mutant
            if self._storage is not None:
                self._tree.on_split = self._storage._split
                self._mover.on_backup = self._storage.wanted

    return Altered


def is_caught(*mutants: type, **likely: Any) -> bool:
    """Whether one of some random walks, each with a cache of its own, finds the mutants out.

    `likely`: what a cache must be like to show it soon, and no cache otherwise.
    """
    make_cache = altered(*mutants)
    for walk in range(WALKS):
        random = Random(walk)
        if finds_something(make_cache, replace(random_setup(random), **likely), random):
            return True
    return False


def finds_something(make_cache: MakeCache, setup: Setup, random: Random) -> bool:
    rig = TiersRig(setup, make_cache)
    try:
        for _ in range(STEPS):
            random_tiers_step(random, rig)
            rig.check()
        rig.calm_down()
    except (AssertionError, KVEventsError):
        return True
    finally:
        with suppress(AssertionError):
            rig.close()
    return False


def test_nothing_is_found_in_a_sound_cache() -> None:
    """The walks that catch the mutants find nothing wrong with the cache as it is."""
    assert not is_caught(Recorder)


# ------------------------------------------------------------------ a call of the recorder's, once


def miscounted(kind: str, tier: Tier | None, nth: int, times: int) -> type[Recorder]:
    """Hears the `nth` call of a kind on a tier, not counting those of a re-telling, `times` times."""

    class Miscounted(Recorder):
        nth_left = nth

        def stored(self, node: Node, tier: Tier, *, new: bool) -> None:
            for _ in range(self._times("new" if new else "known", tier)):
                super().stored(node, tier, new=new)

        def dropped(self, node: Node, tier: Tier) -> None:
            for _ in range(self._times("dropped", tier)):
                super().dropped(node, tier)

        def cleared(self) -> None:
            for _ in range(self._times("cleared", None)):
                super().cleared()

        def _times(self, heard: str, at: Tier | None) -> int:
            if (heard, at) != (kind, tier) or self.retelling:
                return 1
            self.nth_left -= 1
            return 1 if self.nth_left else times

    return Miscounted


def needs_storage(kind: str, tier: Tier) -> bool:
    """Whether a call of that kind can only come of what storage has."""
    return tier is Tier.DISK or (kind, tier) == ("new", Tier.HOST)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK], ids=lambda tier: tier.name)
@pytest.mark.parametrize("kind", ["new", "known", "dropped"])
def test_a_call_lost_or_doubled_once(kind: str, tier: Tier, times: int, nth: int) -> None:
    """On each tier, a store or removal that is recorded too rarely or too often is caught."""
    mutant = miscounted(kind, tier, nth, times)
    assert is_caught(mutant, **(STORAGE if needs_storage(kind, tier) else {}))


@pytest.mark.parametrize("times", [0, 2])
def test_a_clear_lost_or_doubled_once(times: int) -> None:
    """A flush, or a start over a store, that clears too rarely or too often is caught."""
    assert is_caught(miscounted("cleared", None, 1, times))


class TellsOneTier(Recorder):
    """A re-telling forgets all copies of a node but the first."""

    def _tell(self, node: Node) -> None:
        self._tell_new(node, next(tier for tier in Tier if node.copies[tier] is not None))


def test_a_retelling_that_forgets_the_lower_tiers() -> None:
    """A re-telling has to speak of every tier."""
    assert is_caught(TellsOneTier)


# ----------------------------------------------------------------------------------- landing


class Dated(Flights):
    """Sees another progress than there is."""

    def progress(self) -> list[int]:
        return [
            self.seen(flight, progress)
            for flight, progress in zip(self._flights, super().progress(), strict=False)
        ]

    def seen(self, flight: Flight, progress: int) -> int:
        raise NotImplementedError


class LandsTheFailed(Dated):
    def seen(self, flight: Flight, progress: int) -> int:
        failed = progress == 1 and flight.tier not in STORAGE_TIERS
        return 1 + flight.num_pages if failed else progress


class LandsWhatIsNotWritten(Dated):
    def seen(self, flight: Flight, progress: int) -> int:
        failed = progress == 1 and flight.tier in STORAGE_TIERS
        return 1 + flight.num_pages if failed else progress


class LandsMoreThanThePersistedPrefix(Dated):
    def seen(self, flight: Flight, progress: int) -> int:
        return 1 + flight.num_pages if progress > 1 else progress


class LandsCopiesEarly(Dated):
    def seen(self, flight: Flight, progress: int) -> int:
        early = progress == PENDING and flight.tier not in STORAGE_TIERS and not flight.abandoned
        return 1 + flight.num_pages if early else progress


class LandsWritesEarly(Dated):
    def seen(self, flight: Flight, progress: int) -> int:
        early = progress == PENDING and flight.tier in STORAGE_TIERS and not flight.abandoned
        return 1 + flight.num_pages if early else progress


class LandsTheLate(Dated):
    """Takes what came after its deadline for done."""

    def seen(self, flight: Flight, progress: int) -> int:
        return 1 + flight.num_pages if progress == ABANDON else progress


class NeverTimesOut(Dated):
    def seen(self, flight: Flight, progress: int) -> int:
        return PENDING if progress == ABANDON else progress


class EndsEarly(Dated):
    """Takes a copy that nobody waits for any more for ended, though it is under way."""

    def seen(self, flight: Flight, progress: int) -> int:
        return 1 if progress == PENDING and flight.abandoned else progress


class LandsWithoutParent(Flights):
    def _settle(self, flight: Flight, arrived: int) -> bool:
        if flight.abandoned or arrived in (PENDING, ABANDON):
            return super()._settle(flight, arrived)
        nodes = self._stretch(flight)
        self._forget(flight, nodes)
        flight.land(flight, nodes, arrived - 1)
        flight.owned = array("q")
        flight.done = True
        return True


class DoesNotWaitForParent(Flights):
    """Gives up what arrived before the pages above it."""

    def _settle(self, flight: Flight, arrived: int) -> bool:
        ended = super()._settle(flight, arrived)
        return ended or (arrived > 0 and super()._settle(flight, 1))


class FreesWhatIsBeingWritten(Flights):
    """An abandoned copy's pages are free at once."""

    def abandon(self, flight: Flight) -> None:
        super().abandon(flight)
        self._tiered.free(flight.owned_tier, flight.owned)
        flight.owned = array("q")


class KeepsDuplicates(Flights):
    """Pages of a copy that came second are never free."""

    def place(self, flight: Flight, nodes: list[Node], count: int) -> list[Node]:
        before = self._tiered.allocators.get(flight.tier)
        had = len(before.free_pages()) if before is not None else 0
        gained = super().place(flight, nodes, count)
        if before is not None:
            before.take(before.num_free - had - (flight.num_pages - count))
        return gained


class ForgetsTheMoving(Flights):
    """What is under way is not marked, so it is copied again."""

    def leave(self, flight: Flight) -> None:
        self._flights.append(flight)


@pytest.mark.parametrize(
    "mutants",
    [
        (LandsTheFailed,),
        (LandsWhatIsNotWritten,),
        (LandsMoreThanThePersistedPrefix,),
        (LandsCopiesEarly,),
        (LandsWritesEarly,),
        (LandsTheLate,),
        (NeverTimesOut,),
        (EndsEarly,),
        (LandsWithoutParent,),
        (DoesNotWaitForParent,),
        (FreesWhatIsBeingWritten,),
        (KeepsDuplicates,),
        (ForgetsTheMoving,),
    ],
    ids=lambda mutants: mutants[0].__name__,
)
def test_what_is_under_way(mutants: Iterable[type]) -> None:
    """Copies and writes that land too early, too late, though they failed, or in the wrong place."""
    assert is_caught(*mutants)


# -------------------------------------------------------------------------------------- splits


class ForgetsMoving(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.moving = 0
        return upper


class ForgetsLocks(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.lock_ref = 0
        return upper


class ForgetsHostLocks(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.host_ref = 0
        return upper


class MovesPins(RadixTree):
    """The upper part gets the lower part's locks, as in sglang's first version."""

    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.moves, node.moves = node.moves, 0
        return upper


class ForgetsDigests(RadixTree):
    """The lower part keeps those of the upper."""

    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        if node.digests is not None:
            node.digests = (upper.digests or b"")[:DIGEST_BYTES] * node.num_pages
        return upper


class ForgetsHits(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.hits = 0
        return upper


class ForgetsUse(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.last_access = 0
        return upper


class ForgetsTheDirectory(StorageTier):
    def _split(self, upper: Node) -> None: ...


def forgets_copy(tier: Tier) -> type[RadixTree]:
    class ForgetsCopy(RadixTree):
        """The upper part loses its copy on a tier."""

        def split(self, node: Node, num_pages: int) -> Node:
            upper = super().split(node, num_pages)
            upper.copies[tier] = None
            return upper

    return ForgetsCopy


class SwapsCopies(RadixTree):
    """The upper part gets pages of the lower."""

    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        for tier in (Tier.DEVICE, Tier.HOST):
            above, below = upper.copies[tier], node.copies[tier]
            if isinstance(above, array) and isinstance(below, array):
                above[0], below[0] = below[0], above[0]
        return upper


@pytest.mark.parametrize(
    "mutant",
    [
        ForgetsMoving,
        ForgetsLocks,
        ForgetsHostLocks,
        MovesPins,
        ForgetsDigests,
        ForgetsHits,
        ForgetsUse,
        ForgetsTheDirectory,
        forgets_copy(Tier.DEVICE),
        forgets_copy(Tier.HOST),
        forgets_copy(Tier.DISK),
        SwapsCopies,
    ],
)
def test_a_split_that_forgets(mutant: type) -> None:
    """A split that loses what is on its way, locked, stored or known of a node."""
    assert is_caught(mutant, **LIKELY.get(mutant, {}))


# --------------------------------------------------------------------------------- protection


class ReleasesTwice(TieredTree):
    def release(self, node: Node) -> None:
        super().release(node)
        if node.lock_ref:
            self._unlock(node)


class NeverReleases(TieredTree):
    def release(self, node: Node) -> None: ...


class ReleasesHostTwice(TieredTree):
    def release_host(self, node: Node) -> None:
        super().release_host(node)
        at: Node | None = node
        while at is not None and at.host_ref:
            at.host_ref -= 1
            if not at.host_ref:
                self.residency.host_released(at)
            at = at.parent


class NeverReleasesHost(TieredTree):
    def release_host(self, node: Node) -> None: ...


class IgnoresHostLocks(EvictionQueue):
    """Evicts host pages that are being written to storage."""

    def evictable(self, node: Node) -> bool:
        return (
            node.copies[Tier.HOST] is not None
            and not node.num_held[Tier.HOST]
            and not node.lock_ref
        )


class EvictsTheLast(EvictionQueue):
    """Those that the policy wants evicted last go first."""

    def pop(self) -> Node | None:
        nodes = [node for node in self._queued if self.evictable(node)]
        if not nodes:
            return None
        node = max(nodes, key=lambda node: (self._policy.rank(node), node.first_id))
        self._queued.remove(node)
        return node


class EvictsTooMuch(TieredTree):
    def take_host(self, num_pages: int) -> array[int] | None:
        pages = super().take_host(num_pages + 1)
        if pages is None:
            return super().take_host(num_pages)
        self.free(Tier.HOST, pages[num_pages:])
        return pages[:num_pages]


class LocksNotTheParents(TieredTree):
    def hold_host(self, node: Node) -> None:
        node.host_pins += 1
        node.host_ref += 1
        if node.host_ref == 1:
            self.residency.host_held(node)


@pytest.mark.parametrize(
    "mutant",
    [
        ReleasesTwice,
        NeverReleases,
        ReleasesHostTwice,
        NeverReleasesHost,
        IgnoresHostLocks,
        EvictsTheLast,
        EvictsTooMuch,
        LocksNotTheParents,
    ],
)
def test_what_protects_pages(mutant: type) -> None:
    """Locks released twice or never, and evictions that heed none, take too much or the wrong ones."""
    assert is_caught(mutant, **LIKELY.get(mutant, {}))


# ----------------------------------------------------------------------------------- policies


class NeverWritesThrough(Mover):
    def after_insert(self, path: list[Node]) -> None: ...


class WritesThroughAtOnce(Mover):
    """Whatever the threshold."""

    def after_insert(self, path: list[Node]) -> None:
        if self._transfers is not None and not self._writes_back and path:
            self.backup(path[-1])


class NeverWritesBack(Mover):
    def evict(self, num_pages: int) -> int:
        writes_back, self._writes_back = self._writes_back, False
        freed = super().evict(num_pages)
        self._writes_back = writes_back
        return freed


class LoadsBackTwice(Mover):
    """Does not see that pages are on their way to the device."""

    def _lacking(self, node: Node, tier: Tier) -> list[Node]:
        found = []
        while not node.is_root and node.copies[tier] is None:
            found.append(node)
            assert node.parent is not None
            node = node.parent
        return found[::-1]


@pytest.mark.parametrize(
    "mutant", [NeverWritesThrough, WritesThroughAtOnce, NeverWritesBack, LoadsBackTwice]
)
def test_a_policy_that_is_not_followed(mutant: type) -> None:
    """Pages that are not copied when the policy wants it, or are copied when it does not."""
    assert is_caught(mutant, **LIKELY.get(mutant, {}))


# ------------------------------------------------------------------------------------- storage


class ForgetsDescendants(StorageTier):
    """A lost page leaves those behind it."""

    def _retract_below(self, node: Node) -> None:
        if node.num_held[self.tier]:
            return
        super()._retract_below(node)


class RetractsParentsFirst(StorageTier):
    def _retract_below(self, node: Node) -> None:
        for key in self.keys(node):
            self._directory.pop(key, None)
        parent = node.parent
        assert parent is not None
        node.num_held[self.tier], kept = 0, node.num_held[self.tier]
        children = [child for child in node.children.values() if child.copies[self.tier]]
        self._tiered.drop(node, self.tier)
        node.num_held[self.tier] = kept
        for child in children:
            self._retract_below(child)


class AnnouncesTheLost(StorageTier):
    """What is lost while its write is under way is not noted."""

    def note_lost(self, keys: Iterable[bytes]) -> None: ...


class NeverRetracts(StorageTier):
    def retract(self, keys: Iterable[bytes]) -> None: ...


class NeverWrites(StorageTier):
    def wanted(self, node: Node) -> None: ...


class WritesWhatWasEvicted(StorageTier):
    """Takes no hold of the host pages that it writes."""

    def _write(self, node: Node, most: int) -> int:
        written = super()._write(node, most)
        if written:
            self._tiered.release_host(node)
            node.host_pins += 1
        return written


class NeverClears(StorageTier):
    """A flush leaves the store as it is."""

    def forget(self) -> None:
        self._directory.clear()
        self._waiting.clear()


class FreesWhatStorageReads(HiRadixCache):
    """A flush frees host pages though they are being written to storage."""

    def _stop_movement(self) -> set[int]:
        super()._stop_movement()
        for flight in self._flights:
            if flight.tier in STORAGE_TIERS:
                flight.owned = array("q")
        return set()


class FlushForgetsFlights(HiRadixCache):
    """What is under way lands after a flush."""

    def _stop_movement(self) -> set[int]:
        return set()


class ResetForgetsFlights(HiRadixCache):
    """Copies of pages that a reset gave up land all the same."""

    def reset_device(self) -> None:
        flights, self._flights._flights = self._flights._flights, []
        super().reset_device()
        self._flights._flights = flights


class CancelsNothing(Prefetches):
    def cancel(self, one: Prefetch) -> None: ...


class PlacesWhatWasNotRead(Prefetches):
    def _land(self, one: Prefetch, count: int) -> None:
        super()._land(one, len(one.pages))


class PlacesOnePageLess(Prefetches):
    def _land(self, one: Prefetch, count: int) -> None:
        super()._land(one, max(0, count - 1))


class KeepsFetchedDuplicates(Prefetches):
    """What was fetched although the host had it by then is never free."""

    def _place(self, one: Prefetch, count: int) -> None:
        allocator = self._tiered.allocators[Tier.HOST]
        num_free = allocator.num_free
        super()._place(one, count)
        allocator.take(allocator.num_free - num_free)


class EndsWhileReading(Prefetches):
    """Frees a prefetch's pages when nobody waits for it, though they are being written."""

    def _land(self, one: Prefetch, count: int) -> None:
        super()._land(one, count)
        self._tiered.free(Tier.HOST, one.pages)
        one.pages = array("q")


class FetchesWithoutPrefix(Prefetches):
    """Does not look whether the prefix is on the host when pages land."""

    def _land(self, one: Prefetch, count: int) -> None:
        if count:
            self._place(one, count)
        super()._land(one, 0)


LIKELY: dict[type, dict[str, Any]] = {
    ForgetsDescendants: {"parents_first": True},
    RetractsParentsFirst: {"parents_first": True},
    IgnoresHostLocks: {**STORAGE, "host_pages": 3},
    ReleasesHostTwice: {**STORAGE, "host_pages": 10},
    ForgetsUse: {"storage": False},
}


@pytest.mark.parametrize(
    "mutant",
    [
        ForgetsDescendants,
        RetractsParentsFirst,
        AnnouncesTheLost,
        NeverRetracts,
        NeverWrites,
        WritesWhatWasEvicted,
        NeverClears,
        FreesWhatStorageReads,
        FlushForgetsFlights,
        ResetForgetsFlights,
        CancelsNothing,
        PlacesWhatWasNotRead,
        PlacesOnePageLess,
        KeepsFetchedDuplicates,
        EndsWhileReading,
        FetchesWithoutPrefix,
    ],
)
def test_storage_and_prefetch(mutant: type) -> None:
    """What is believed of storage without being so, and pages that are freed or filled wrongly."""
    assert is_caught(mutant, **{**STORAGE, **LIKELY.get(mutant, {})})
