"""Residency: the only writer of copies, and what it records."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from hicache.node import Node
from hicache.recorder import NullRecorder
from hicache.residency import Residency, protected
from hicache.tier import Tier
from hicache.tree import RadixTree
from kvevents import BASE, pack_tokens


class Witness(NullRecorder):
    """Notes for each call what was true when it came."""

    def __init__(self) -> None:
        self.residency = Residency(self)
        self.seen: list[tuple[str, bool, int, int]] = []

    def stored(self, node: Node, tier: Tier, *, new: bool) -> None:
        self._note(f"stored new={new}", node, tier)

    def dropped(self, node: Node, tier: Tier) -> None:
        self._note("dropped", node, tier)

    def cleared(self) -> None:
        self.seen.append(("cleared", False, self.residency.num_resident(Tier.DEVICE), 0))

    def _note(self, call: str, node: Node, tier: Tier) -> None:
        held = node.copies[tier] is not None
        parent = node.parent
        assert parent is not None
        count = self.residency.num_resident(tier)
        self.seen.append((call, held, count, parent.num_held[tier]))


def grown(tree: RadixTree, parent: Node | None = None) -> Node:
    """A new node of two pages."""
    first = len(tree)
    return tree.add(parent or tree.root(BASE), bytes(pack_tokens([first, first])))


def test_a_change_records_itself_once_it_is_true() -> None:
    """When the recorder hears of a change, copies and counts show it already."""
    witness, tree = Witness(), RadixTree(1)
    node = grown(tree)
    witness.residency.store(node, Tier.DEVICE, array("q", [3, 4]))
    assert witness.residency.drop(node, Tier.DEVICE) == array("q", [3, 4])
    witness.residency.store(node, Tier.DEVICE, array("q", [5, 6]))
    witness.residency.clear()
    assert witness.seen == [
        ("stored new=True", True, 2, 1),
        ("dropped", False, 0, 0),
        ("stored new=True", True, 2, 1),
        ("cleared", False, 0, 0),
    ]


def test_pages_under_a_lock_are_counted() -> None:
    """Locks, and stores and drops below a lock, move the count of protected pages."""
    residency, tree = Residency(NullRecorder()), RadixTree(1)
    node = grown(tree)
    node.lock_ref = 1
    residency.store(node, Tier.DEVICE, array("q", [3, 4]))
    assert residency.num_protected(Tier.DEVICE) == 2
    residency.unlocked(node)
    assert residency.num_protected(Tier.DEVICE) == 0
    residency.locked(node)
    residency.drop(node, Tier.DEVICE)
    assert (residency.num_protected(Tier.DEVICE), residency.num_resident(Tier.DEVICE)) == (0, 0)


def test_a_hold_on_the_host_copy_protects_it_alone() -> None:
    """What storage reads is protected on the host, once, whether or not a request locks it too."""
    residency, tree = Residency(NullRecorder()), RadixTree(1)
    node = grown(tree)
    for tier in (Tier.DEVICE, Tier.HOST):
        residency.store(node, tier, array("q", [3, 4]))

    def protected_pages() -> tuple[int, int]:
        return residency.num_protected(Tier.DEVICE), residency.num_protected(Tier.HOST)

    node.host_ref = 1
    residency.host_held(node)
    assert protected_pages() == (0, 2)
    node.lock_ref = 1
    residency.locked(node)
    assert protected_pages() == (2, 2)
    node.host_ref = 0
    residency.host_released(node)
    assert protected_pages() == (2, 2)
    node.lock_ref = 0
    residency.unlocked(node)
    assert protected_pages() == (0, 0)


def test_a_store_keeps_its_own_pages() -> None:
    """Neither a lock nor a hold says anything about a copy on a storage tier."""
    residency, tree = Residency(NullRecorder()), RadixTree(1)
    node = grown(tree)
    node.lock_ref = node.host_ref = 1
    residency.store(node, Tier.DISK, range(2))
    assert not protected(node, Tier.DISK)
    assert residency.num_protected(Tier.DISK) == 0


def test_tiers_are_counted_apart() -> None:
    """Stores and drops count on their tier alone; a clear empties all and counts as no drop."""
    residency, tree = Residency(NullRecorder()), RadixTree(1)
    node = grown(tree)
    for tier in Tier:
        residency.store(node, tier, range(2))
    residency.drop(node, Tier.HOST)
    counts = [(residency.num_resident(tier), residency.num_dropped(tier)) for tier in Tier]
    assert counts == [(2, 0), (0, 2), (2, 0), (2, 0)]
    residency.clear()
    counts = [(residency.num_resident(tier), residency.num_stored(tier)) for tier in Tier]
    assert counts == [(0, 2)] * 4
    assert residency.num_dropped(Tier.DEVICE) == 0


def test_only_the_first_copy_is_new() -> None:
    """A copy is told as new when the node had none on any tier, whichever was the first."""
    witness, tree = Witness(), RadixTree(1)
    node = grown(tree)
    witness.residency.store(node, Tier.DISK, range(2))
    witness.residency.store(node, Tier.DEVICE, array("q", [0, 1]))
    witness.residency.drop(node, Tier.DISK)
    witness.residency.drop(node, Tier.DEVICE)
    witness.residency.store(node, Tier.HOST, array("q", [0, 1]))
    assert [call for call, *_ in witness.seen] == [
        "stored new=True",
        "stored new=False",
        "dropped",
        "dropped",
        "stored new=True",
    ]


def store_twice(residency: Residency, tree: RadixTree) -> None:
    node = grown(tree)
    for _ in range(2):
        residency.store(node, Tier.DEVICE, array("q", [0, 1]))


def store_too_few(residency: Residency, tree: RadixTree) -> None:
    residency.store(grown(tree), Tier.DEVICE, array("q", [0]))


def store_below_nothing(residency: Residency, tree: RadixTree) -> None:
    residency.store(grown(tree, grown(tree)), Tier.DEVICE, array("q", [0, 1]))


def store_outside(residency: Residency, tree: RadixTree) -> None:
    node = grown(tree)
    tree.remove(node)
    residency.store(node, Tier.DEVICE, array("q", [0, 1]))


def store_below_another_tier(residency: Residency, tree: RadixTree) -> None:
    parent = grown(tree)
    residency.store(parent, Tier.DEVICE, array("q", [0, 1]))
    residency.store(grown(tree, parent), Tier.HOST, array("q", [0, 1]))


def drop_from_another_tier(residency: Residency, tree: RadixTree) -> None:
    node = grown(tree)
    residency.store(node, Tier.DEVICE, array("q", [0, 1]))
    residency.drop(node, Tier.HOST)


def drop_nothing(residency: Residency, tree: RadixTree) -> None:
    residency.drop(grown(tree), Tier.DEVICE)


def drop_above_something(residency: Residency, tree: RadixTree) -> None:
    parent = grown(tree)
    residency.store(parent, Tier.DEVICE, array("q", [0, 1]))
    residency.store(grown(tree, parent), Tier.DEVICE, array("q", [2, 3]))
    residency.drop(parent, Tier.DEVICE)


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        (store_twice, "R1"),
        (store_too_few, "R1"),
        (store_outside, "R1"),
        (drop_nothing, "R1"),
        (drop_from_another_tier, "R1"),
        (store_below_another_tier, "R2"),
        (store_below_nothing, "R2"),
        (drop_above_something, "R2"),
    ],
)
def test_a_broken_invariant_stops_us(
    fault: Callable[[Residency, RadixTree], None], invariant: str
) -> None:
    """A change that would break R1 or R2 is our own fault, and named by its number."""
    with pytest.raises(AssertionError, match=invariant):
        fault(Residency(NullRecorder()), RadixTree(1))
