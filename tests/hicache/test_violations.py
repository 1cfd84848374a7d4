"""`violations()` sees each invariant broken, and says which."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hicache_rig import new_cache, put

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
    cache.free(array("q", [pages_of(node)[0]]))


def page_of_no_pool(cache: HiRadixCache, node: Node) -> None:
    pages_of(node)[0] = 99


def empty_leaf(cache: HiRadixCache, node: Node) -> None:
    node.copies[Tier.DEVICE] = None


def not_queued(cache: HiRadixCache, node: Node) -> None:
    cache._evictable.clear()


def pages_of(node: Node) -> array[int]:
    """The node's own array of pages."""
    pages = node.copies[Tier.DEVICE]
    assert pages is not None
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
