"""A node as an engine sees it: something to hold on to, and to read in an error."""

from __future__ import annotations

from hicache_rig import new_cache, put
from units_rig import MemoryStore, keys, opened

from kvevents import Namespace

A = list(range(12))


def test_a_node_says_what_it_is() -> None:
    """Its text names ids, tiers and locks, which is what an error about it needs."""
    cache = new_cache(4)
    node = put(cache, A).node
    cache.lock(node)
    assert repr(node) == "<Node ids 0+3 tiers [0] lock_ref 1>"
    assert node.resident and not node.is_root


def test_a_node_is_resident_as_long_as_any_tier_has_it() -> None:
    """A copy on the host, or in the store, is enough."""
    with opened(store=MemoryStore(A)) as rig:
        (node,) = rig.cache._tree.nodes()
        assert repr(node) == "<Node ids 0+3 tiers [2] lock_ref 0>"
        assert node.resident
        rig.store.lose(*keys(A))
        rig.cache.tick()
        assert not node.resident


def test_a_root_is_the_empty_prompt_of_its_namespace() -> None:
    """A miss ends at a root, which holds nothing."""
    salted = Namespace(cache_salt="a")
    node = new_cache(4).match_prefix(A, salted).node
    assert node.is_root and not node.resident
    assert node.namespace == salted
