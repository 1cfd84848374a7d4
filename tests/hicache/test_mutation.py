"""The model test can fail: ways to break the recording, each caught by the same checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeAlias

import pytest
from hicache_rig import SHAPE, Rig, feed_of_records, random_step
from msgspec.structs import replace

from hicache import HiRadixCache, Node, PagePool
from hicache.recorder import Recorder
from hicache.residency import Residency
from hicache.tier import Tier
from hicache.tree import RadixTree
from kvevents import BASE, HashFormat, KVEventsError, StorageMedium
from kvevents.records import Clear, Record, Remove, StoreNew

STEPS = 3000
PAGE_SIZE, NUM_PAGES = 2, 8

MakeRecorder: TypeAlias = Callable[[RadixTree], Recorder]


class CacheWith(HiRadixCache):
    """A cache with a recorder, and perhaps a tree, of the test's own."""

    def __init__(self, make_recorder: MakeRecorder, tree: RadixTree | None = None) -> None:
        super().__init__(PagePool(NUM_PAGES, PAGE_SIZE, SHAPE))
        if tree is not None:
            self._tree = self._tiered.tree = tree
        self._recorder = make_recorder(self._tree)
        self._residency = self._tiered.residency = Residency(self._recorder)


def steps_until_caught(cache: HiRadixCache, seed: int = 1) -> int:
    """How many random steps the cache passes; STEPS when nothing is found."""
    rig = Rig(cache, feed_of_records(PAGE_SIZE, HashFormat.SGLANG))
    random = Random(seed)
    for step in range(STEPS):
        try:
            random_step(random, rig)
            rig.check()
        except (AssertionError, KVEventsError):
            return step
    return STEPS


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_found_in_a_sound_cache(seed: int) -> None:
    """The walk that catches the mutants finds nothing wrong with the cache as it is."""
    assert steps_until_caught(CacheWith(Recorder), seed) == STEPS


# ------------------------------------------------------------------ a call of the recorder's, once


class Miscounted(Recorder):
    """Hears the `nth` call of a kind, not counting those during a re-telling, `times` times."""

    def __init__(self, tree: RadixTree, kind: str, nth: int, times: int) -> None:
        super().__init__(tree)
        self._kind, self._nth, self._wrong = kind, nth, times

    def stored(self, node: Node, tier: Tier, *, new: bool) -> None:
        for _ in range(self._times("stored")):
            super().stored(node, tier, new=new)

    def dropped(self, node: Node, tier: Tier) -> None:
        for _ in range(self._times("dropped")):
            super().dropped(node, tier)

    def cleared(self) -> None:
        for _ in range(self._times("cleared")):
            super().cleared()

    def _times(self, kind: str) -> int:
        if kind != self._kind or self.retelling:
            return 1
        self._nth -= 1
        return 1 if self._nth else self._wrong


@pytest.mark.parametrize("nth", [1, 2, 10])
@pytest.mark.parametrize(
    ("kind", "times"),
    [("stored", 0), ("stored", 2), ("dropped", 0), ("dropped", 2), ("cleared", 0)],
)
def test_a_call_lost_or_doubled_once(kind: str, times: int, nth: int) -> None:
    """Residency calling its recorder once too rarely or too often is caught, if it happens once.

    A second clear is not among them: it says nothing new, and so nothing false. Nor are calls during
    a re-telling, which often come to speak of the node anyway.
    """
    mutant = partial(Miscounted, kind=kind, nth=nth, times=times)
    assert steps_until_caught(CacheWith(mutant)) < STEPS


# --------------------------------------------------------------------------------- what a record says


def without_parent(record: Record) -> list[Record]:
    if isinstance(record, StoreNew) and record.parent_id is not None:
        return [replace(record, parent_id=None, namespace=BASE)]
    return [record]


def without_namespace(record: Record) -> list[Record]:
    return [replace(record, namespace=None)] if isinstance(record, StoreNew) else [record]


def without_last_stored(record: Record) -> list[Record]:
    if isinstance(record, StoreNew) and record.count > 1:
        tokens = record.tokens[: -len(record.tokens) // record.count]
        return [replace(record, count=record.count - 1, tokens=tokens)]
    return [record]


def stored_elsewhere(record: Record) -> list[Record]:
    if isinstance(record, StoreNew):
        return [replace(record, medium=StorageMedium.CPU)]
    return [record]


def removed_elsewhere(record: Record) -> list[Record]:
    return [replace(record, medium=StorageMedium.CPU)] if isinstance(record, Remove) else [record]


def without_last_removed(record: Record) -> list[Record]:
    if isinstance(record, Remove):
        ranges = [(first, max(1, count - 1)) for first, count in record.ranges]
        return [replace(record, ranges=ranges)]
    return [record]


def parents_removed_first(record: Record) -> list[Record]:
    if isinstance(record, Remove):
        return [replace(record, ranges=record.ranges[::-1])]
    return [record]


def never_cleared(record: Record) -> list[Record]:
    return [] if isinstance(record, Clear) else [record]


class Garbled(Recorder):
    """Hands out something else than what was recorded."""

    def __init__(self, tree: RadixTree, garble: Callable[[Record], list[Record]]) -> None:
        super().__init__(tree)
        self._garble = garble

    def take(self) -> list[Record]:
        return [garbled for record in super().take() for garbled in self._garble(record)]


@pytest.mark.parametrize(
    "garble",
    [
        without_parent,
        without_namespace,
        without_last_stored,
        stored_elsewhere,
        removed_elsewhere,
        without_last_removed,
        parents_removed_first,
        never_cleared,
    ],
)
def test_a_record_that_says_something_else(garble: Callable[[Record], list[Record]]) -> None:
    """A record with a wrong parent, namespace, extent, medium or order is caught."""
    assert steps_until_caught(CacheWith(partial(Garbled, garble=garble))) < STEPS


# ---------------------------------------------------------------------------- order and re-telling


class LateRemovals(Recorder):
    """Tells what was removed after what was stored."""

    def take(self) -> list[Record]:
        return sorted(super().take(), key=lambda record: isinstance(record, Remove))


class NoClearBeforeRetelling(Recorder):
    def begin_retell(self) -> None:
        super().begin_retell()
        self._records.clear()


class ForgetsUpperHalves(Recorder):
    """Loses sight of an untold node above one that goes."""

    def dropped(self, node: Node, tier: Tier) -> None:
        if node.told == self._telling:
            super().dropped(node, tier)


class RemovesTheUntold(Recorder):
    """Announces that a node goes that the re-telling has not reached."""

    def dropped(self, node: Node, tier: Tier) -> None:
        node.told = self._telling
        super().dropped(node, tier)


class TellsBelowTheUntold(Recorder):
    """Announces a new node at once, though its parent is still to be told."""

    def stored(self, node: Node, tier: Tier, *, new: bool) -> None:
        self._tell_new(node, tier)


class ForgetsTheNew(Recorder):
    """Does not come back to a new node whose parent is still to be told."""

    def stored(self, node: Node, tier: Tier, *, new: bool) -> None:
        super().stored(node, tier, new=new)
        self._untold.pop(node, None)


class ChildrenFirst(Recorder):
    def _untold_path(self, node: Node) -> list[Node]:
        return [node]


@pytest.mark.parametrize(
    "mutant",
    [
        LateRemovals,
        NoClearBeforeRetelling,
        ForgetsUpperHalves,
        RemovesTheUntold,
        TellsBelowTheUntold,
        ForgetsTheNew,
        ChildrenFirst,
    ],
)
def test_a_recorder_that_mistakes_the_order(mutant: type[Recorder]) -> None:
    """Removals behind stores, and each rule of the re-telling broken by itself, are caught."""
    assert steps_until_caught(CacheWith(mutant)) < STEPS


class LoudTree(RadixTree):
    """A split removes the upper half for the router, as in sglang#14934."""

    recorder: Recorder

    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        self.recorder.dropped(upper, Tier.DEVICE)
        return upper


class ForgetfulTree(RadixTree):
    """A split forgets that the upper half was told."""

    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.told = -1
        return upper


def test_a_split_that_is_heard() -> None:
    """A split that announces anything is caught."""
    tree = LoudTree(PAGE_SIZE)
    tree.recorder = Recorder(tree)
    assert steps_until_caught(CacheWith(lambda _: tree.recorder, tree)) < STEPS


def test_a_split_that_forgets_what_was_told() -> None:
    """A split that loses whether a node was told is caught."""
    assert steps_until_caught(CacheWith(Recorder, ForgetfulTree(PAGE_SIZE))) < STEPS
