"""The tree with its tiers: locks, holds, room on the host, and the pages that go back."""

from __future__ import annotations

from array import array

import pytest

from hicache.allocator import PageAllocator
from hicache.flight import Flights
from hicache.node import Node
from hicache.recorder import NullRecorder
from hicache.residency import Residency
from hicache.tier import Tier
from hicache.tiered import TieredTree
from hicache.tree import RadixTree
from hicache.violations import violations
from kvevents import BASE, pack_tokens

NUM_PAGES = 8


@pytest.fixture
def tiered() -> TieredTree:
    """Pages of one token, eight on the device and eight on the host."""
    allocators = {tier: PageAllocator(NUM_PAGES) for tier in (Tier.DEVICE, Tier.HOST)}
    return TieredTree(RadixTree(1), Residency(NullRecorder()), allocators, "lru")


def grow(tiered: TieredTree, parent: Node | None, tokens: list[int], *tiers: Tier) -> Node:
    """A node below `parent`, or a root, with copies on `tiers`."""
    tree = tiered.tree
    node = tree.add(parent or tree.root(BASE), bytes(pack_tokens(tokens)))
    tree.now += 1
    node.last_access = tree.now
    for tier in tiers:
        if tier in tiered.allocators:
            pages = tiered.allocators[tier].take(len(tokens))
            assert pages is not None
            tiered.store(node, tier, pages)
        else:
            tiered.store(node, tier, range(len(tokens)))
    return node


def free(tiered: TieredTree) -> tuple[int, int]:
    """Free pages of device and host; the whole must be sound."""
    assert violations(tiered, Flights(tiered)) == []
    return tuple(tiered.allocators[tier].num_free for tier in (Tier.DEVICE, Tier.HOST))  # type: ignore[return-value]


def test_a_drop_gives_pages_back_and_the_node_up_with_its_last_copy(tiered: TieredTree) -> None:
    """Each copy's pages are free as it goes; the node stays in the tree until the last has gone."""
    node = grow(tiered, None, [1, 2], Tier.DEVICE, Tier.HOST, Tier.DISK)
    assert free(tiered) == (6, 6)
    tiered.drop(node, Tier.DEVICE)
    assert (free(tiered), node in tiered.tree) == ((8, 6), True)
    tiered.drop(node, Tier.HOST)
    assert (free(tiered), node in tiered.tree) == ((8, 8), True)
    tiered.drop(node, Tier.DISK)
    assert (free(tiered), node in tiered.tree) == ((8, 8), False)


def test_a_storage_tier_has_no_pages_to_free(tiered: TieredTree) -> None:
    """Its copies are lengths, and freeing them is nothing."""
    tiered.free(Tier.EXTERNAL, range(3))
    assert free(tiered) == (8, 8)


def test_a_lock_reaches_from_a_node_to_its_root(tiered: TieredTree) -> None:
    """Pins and holds protect device and host copies along the path, and are counted apart."""
    top = grow(tiered, None, [1], Tier.DEVICE, Tier.HOST)
    end = grow(tiered, top, [2], Tier.DEVICE)
    other = grow(tiered, top, [3], Tier.DEVICE)
    tiered.pin(end)
    tiered.hold(end)
    assert (top.lock_ref, end.lock_ref, other.lock_ref) == (2, 2, 0)
    assert (end.pins, end.moves, top.pins) == (1, 1, 0)
    assert (tiered.num_evictable(Tier.DEVICE), tiered.num_evictable(Tier.HOST)) == (1, 0)
    tiered.unpin(end)
    tiered.release(end)
    assert (tiered.num_evictable(Tier.DEVICE), tiered.num_evictable(Tier.HOST)) == (3, 1)


def test_a_host_hold_lets_the_device_go(tiered: TieredTree) -> None:
    """It protects the host copies along the path and nothing else; released, they may go."""
    top = grow(tiered, None, [1], Tier.DEVICE, Tier.HOST)
    end = grow(tiered, top, [2], Tier.DEVICE, Tier.HOST)
    tiered.hold_host(end)
    assert (tiered.num_evictable(Tier.DEVICE), tiered.num_evictable(Tier.HOST)) == (2, 0)
    assert tiered.take_host(7) is None
    assert tiered.next_victim(Tier.DEVICE, 1) is end
    tiered.drop(end, Tier.DEVICE)
    tiered.release_host(end)
    pages = tiered.take_host(7)
    assert pages is not None and len(set(pages)) == 7
    assert end not in tiered.tree


def test_a_victim_is_cut_to_size(tiered: TieredTree) -> None:
    """Of a leaf that is larger than what is wanted only the last pages are offered."""
    node = grow(tiered, None, [1, 2, 3, 4], Tier.HOST)
    assert tiered.next_victim(Tier.HOST, 1) is node
    assert (node.num_pages, node.key) == (1, bytes(pack_tokens([4])))
    assert tiered.next_victim(Tier.DEVICE, 1) is None


@pytest.mark.parametrize(("num_pages", "left"), [(0, 6), (2, 6), (3, 5), (8, 0)])
def test_room_on_the_host_costs_no_more_than_it_must(
    tiered: TieredTree, num_pages: int, left: int
) -> None:
    """Free pages are taken first; then leaves give way, the least recently used first, and no more."""
    grow(tiered, None, [1, 2, 3], Tier.HOST)
    last = grow(tiered, None, [4, 5, 6], Tier.HOST)
    pages = tiered.take_host(num_pages)
    assert pages is not None and len(pages) == num_pages
    assert tiered.residency.num_resident(Tier.HOST) == left
    assert (last in tiered.tree) == (left >= 3)


def test_room_that_cannot_be_had_costs_nothing(tiered: TieredTree) -> None:
    """When not even evicting all that is unlocked would do, nothing is evicted."""
    node = grow(tiered, None, [1, 2, 3], Tier.HOST)
    grow(tiered, None, [4, 5, 6], Tier.HOST)
    tiered.pin(node)
    assert tiered.take_host(6) is None
    assert tiered.residency.num_resident(Tier.HOST) == 6
    assert tiered.take_host(5) is not None


def test_an_inner_node_can_be_evicted_once_its_children_are_gone(tiered: TieredTree) -> None:
    """Leaves come up first, on each tier by itself; their parent comes up when they have gone."""
    top = grow(tiered, None, [1], Tier.DEVICE, Tier.HOST)
    end = grow(tiered, top, [2], Tier.DEVICE)
    assert tiered.next_victim(Tier.HOST, 9) is top
    tiered.queues[Tier.HOST].offer(top)
    assert tiered.next_victim(Tier.DEVICE, 9) is end
    assert tiered.next_victim(Tier.DEVICE, 9) is None
    tiered.drop(end, Tier.DEVICE)
    assert tiered.next_victim(Tier.DEVICE, 9) is top


def test_a_clear_forgets_every_node_and_leaves_the_pages_to_the_caller(tiered: TieredTree) -> None:
    """No node, copy or entry is left; the pages are still nobody's but the caller's."""
    node = grow(tiered, None, [1, 2], Tier.DEVICE, Tier.HOST)
    copies = list(node.copies)
    tiered.clear()
    assert len(tiered.tree) == 0
    assert [tiered.residency.num_resident(tier) for tier in Tier] == [0] * 4
    assert tiered.next_victim(Tier.DEVICE, 1) is None
    for tier in (Tier.DEVICE, Tier.HOST):
        pages = copies[tier]
        assert isinstance(pages, array)
        tiered.free(tier, pages)
    assert free(tiered) == (8, 8)
