"""Residency: the only writer of copies, and what it records."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from hicache.node import Node
from hicache.recorder import NullRecorder
from hicache.residency import Residency
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


def store_twice(residency: Residency, tree: RadixTree) -> None:
    node = grown(tree)
    for _ in range(2):
        residency.store(node, Tier.DEVICE, array("q", [0, 1]))


def store_too_few(residency: Residency, tree: RadixTree) -> None:
    residency.store(grown(tree), Tier.DEVICE, array("q", [0]))


def store_below_nothing(residency: Residency, tree: RadixTree) -> None:
    residency.store(grown(tree, grown(tree)), Tier.DEVICE, array("q", [0, 1]))


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
        (drop_nothing, "R1"),
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
