"""`violations()` sees each invariant broken, and says which."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hicache_rig import new_cache, put
from units_rig import D, MemoryStore, Rig, opened

from hicache import HiRadixCache, Node
from hicache.tier import Tier
from kvevents import Namespace

A = list(range(12))


def longer_key(cache: HiRadixCache, node: Node) -> None:
    node.key += b"\0\0\0\0"


def another_first_page(cache: HiRadixCache, node: Node) -> None:
    node.key = b"\1" * len(node.key)


def another_namespace(cache: HiRadixCache, node: Node) -> None:
    node.namespace = Namespace(cache_salt="a")


def not_counted(cache: HiRadixCache, node: Node) -> None:
    del cache._tree._nodes[node]


def without_parent(cache: HiRadixCache, node: Node) -> None:
    node.parent = None


def shared_ids(cache: HiRadixCache, node: Node) -> None:
    node.first_id -= 1


def lock_too_many(cache: HiRadixCache, node: Node) -> None:
    node.lock_ref += 1


def page_too_few(cache: HiRadixCache, node: Node) -> None:
    del pages_of(node)[0]


def below_nothing(cache: HiRadixCache, node: Node) -> None:
    assert node.parent is not None
    node.parent.copies[Tier.DEVICE] = None


def child_not_counted(cache: HiRadixCache, node: Node) -> None:
    assert node.parent is not None
    node.parent.num_held[Tier.DEVICE] = 0


def count_too_high(cache: HiRadixCache, node: Node) -> None:
    cache._residency._resident[Tier.DEVICE] += 1


def page_twice(cache: HiRadixCache, node: Node) -> None:
    pages_of(node)[0] = pages_of(node)[1]


def page_free_as_well(cache: HiRadixCache, node: Node) -> None:
    cache.device_pool.allocator.take_back(array("q", [pages_of(node)[0]]))


def page_lent_as_well(cache: HiRadixCache, node: Node) -> None:
    cache.device_pool.allocator._lent.add(pages_of(node)[0])


def page_nowhere(cache: HiRadixCache, node: Node) -> None:
    cache.device_pool.allocator.take(1)


def page_of_no_pool(cache: HiRadixCache, node: Node) -> None:
    pages_of(node)[0] = 99


def empty_leaf(cache: HiRadixCache, node: Node) -> None:
    node.copies[Tier.DEVICE] = None


def not_queued(cache: HiRadixCache, node: Node) -> None:
    cache._tiered.queues[Tier.DEVICE].clear()


def pages_of(node: Node) -> array[int]:
    """The node's own array of pages."""
    pages = node.copies[Tier.DEVICE]
    assert isinstance(pages, array)
    return pages


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        (longer_key, "T1"),
        (another_first_page, "T1"),
        (another_namespace, "T1"),
        (not_counted, "T1"),
        (without_parent, "T1"),
        (shared_ids, "T2"),
        (lock_too_many, "T3"),
        (page_too_few, "R1"),
        (below_nothing, "R2"),
        (child_not_counted, "R3"),
        (count_too_high, "R3"),
        (page_twice, "C1"),
        (page_free_as_well, "C1"),
        (page_lent_as_well, "C1"),
        (page_nowhere, "C1"),
        (page_of_no_pool, "C1"),
        (empty_leaf, "C2"),
        (not_queued, "C2"),
    ],
)
def test_a_broken_invariant_is_named(
    fault: Callable[[HiRadixCache, Node], None], invariant: str
) -> None:
    """A sound cache has no violations; with one thing broken, its number is among them."""
    cache = new_cache(8)
    put(cache, A[:4])
    node = put(cache, A).node
    assert cache.violations() == []
    fault(cache, node)
    assert invariant in {found[:2] for found in cache.violations()}


# ------------------------------------------------------------------------------- the lower tiers


def marked_as_moving(rig: Rig, node: Node) -> None:
    node.moving |= 1 << Tier.DEVICE


def not_marked(rig: Rig, node: Node) -> None:
    node.moving = 0


def hold_too_many(rig: Rig, node: Node) -> None:
    node.moves += 1


def host_hold_too_many(rig: Rig, node: Node) -> None:
    node.host_pins += 1


def host_ref_too_many(rig: Rig, node: Node) -> None:
    node.host_ref += 1


def flight_forgotten(rig: Rig, node: Node) -> None:
    rig.cache._flights._flights.clear()


def flight_twice(rig: Rig, node: Node) -> None:
    rig.cache._flights._flights *= 2


def host_page_twice(rig: Rig, node: Node) -> None:
    rig.host.allocator.take_back(array("q", [rig.cache._flights._flights[0].owned[0]]))


def not_queued_on_the_host(rig: Rig, node: Node) -> None:
    rig.cache._tiered.queues[Tier.HOST].clear()


def directory_of(rig: Rig) -> dict[bytes, Node]:
    """Key to node."""
    assert rig.cache._storage is not None
    return rig.cache._storage.directory


def stored_page_unknown(rig: Rig, node: Node) -> None:
    directory_of(rig).popitem()


def stored_page_too_many(rig: Rig, node: Node) -> None:
    directory_of(rig)[b"k"] = node


def protected_on_the_host(rig: Rig, node: Node) -> None:
    rig.cache._residency._protected[Tier.HOST] += 1


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        (marked_as_moving, "C3"),
        (not_marked, "C3"),
        (hold_too_many, "C3"),
        (hold_too_many, "T3"),
        (host_hold_too_many, "T3"),
        (host_ref_too_many, "T3"),
        (flight_forgotten, "C3"),
        (flight_forgotten, "C1"),
        (flight_twice, "C3"),
        (host_page_twice, "C1"),
        (not_queued_on_the_host, "C2"),
        (stored_page_unknown, "L1"),
        (stored_page_too_many, "L1"),
        (protected_on_the_host, "R3"),
    ],
)
def test_a_broken_invariant_of_the_lower_tiers_is_named(
    fault: Callable[[Rig, Node], None], invariant: str
) -> None:
    """With one prompt stored, one on device and host and one on its way, each fault is seen."""
    with opened(store=MemoryStore()) as rig:
        rig.backed_up(D)
        rig.cache.tick()
        node = rig.put(A).node
        assert rig.heard() == ["S(GPU: a1 a2 a3 | None)"]
        fault(rig, node)
        assert invariant in {found[:2] for found in rig.cache.violations()}
