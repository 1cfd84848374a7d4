"""The order of eviction: what is queued, when it comes up, and by which rank."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from hicache.eviction import LRU, EvictionPolicy, EvictionQueue
from hicache.node import Node
from hicache.tier import Tier
from kvevents import BASE


def leaf(last_access: int = 0) -> Node:
    """A node with a device copy, below a root."""
    node = Node(Node(None, b"", 0, -1, BASE), b"\0\0\0\0", 1, 0, BASE)
    node.copies[Tier.DEVICE] = array("q", [0])
    node.last_access = last_access
    return node


class Ranks:
    """A policy that ranks by a table."""

    def __init__(self, ranks: dict[Node, int]) -> None:
        self.ranks = ranks

    def rank(self, node: Node) -> int:
        return self.ranks[node]


def drained(queue: EvictionQueue) -> list[Node]:
    """Everything that still comes up, in order."""
    found = []
    while (node := queue.pop()) is not None:
        found.append(node)
    return found


@pytest.mark.parametrize("policy", [LRU()])
def test_a_policy_ranks_without_changing_anything(policy: EvictionPolicy) -> None:
    """Asking for a rank twice gives the same; using a node does not lower it."""
    node = leaf(3)
    rank = policy.rank(node)
    assert policy.rank(node) == rank
    node.last_access = 5
    assert policy.rank(node) >= rank


def test_lru_ranks_by_the_last_use() -> None:
    """The node used longest ago has the lowest rank."""
    assert LRU().rank(leaf(1)) < LRU().rank(leaf(2))


def test_the_lowest_rank_comes_first() -> None:
    """Nodes come up by rank, whatever the order in which they were offered."""
    nodes = [leaf(time) for time in range(20)]
    queue = EvictionQueue(Tier.DEVICE, LRU())
    for node in Random(1).sample(nodes, len(nodes)):
        queue.offer(node)
    assert drained(queue) == nodes


def test_equal_ranks_come_in_the_order_of_their_offers() -> None:
    """Among nodes of one rank the first offered is the first out."""
    nodes = [leaf(1) for _ in range(5)]
    queue = EvictionQueue(Tier.DEVICE, LRU())
    for node in nodes:
        queue.offer(node)
    assert drained(queue) == nodes


def test_a_rank_that_rose_is_looked_at_again() -> None:
    """Entries out of date do not come up early: the order is that of the ranks now."""
    a, b, c = leaf(), leaf(), leaf()
    policy = Ranks({a: 1, b: 2, c: 3})
    queue = EvictionQueue(Tier.DEVICE, policy)
    for node in (a, b, c):
        queue.offer(node)
    policy.ranks = {a: 5, b: 6, c: 4}
    assert drained(queue) == [c, a, b]


def test_a_node_has_at_most_one_entry() -> None:
    """Offered twice, it comes up once; taken out, it can be offered again."""
    node, queue = leaf(), EvictionQueue(Tier.DEVICE, LRU())
    queue.offer(node)
    queue.offer(node)
    assert node in queue
    assert drained(queue) == [node]
    assert node not in queue
    queue.offer(node)
    assert drained(queue) == [node]


def lock(node: Node) -> None:
    node.lock_ref = 1


def keep_child(node: Node) -> None:
    node.num_held[Tier.DEVICE] = 1


def lose_copy(node: Node) -> None:
    node.copies[Tier.DEVICE] = None


@pytest.mark.parametrize("change", [lock, keep_child, lose_copy])
def test_what_cannot_be_evicted_does_not_come_up(change: object) -> None:
    """A lock, a child with a copy or no copy keeps a node out, before the offer and after it."""
    assert callable(change)
    queue, other = EvictionQueue(Tier.DEVICE, LRU()), leaf(9)
    before, after = leaf(1), leaf(2)
    change(before)
    for node in (before, after, other):
        queue.offer(node)
    change(after)
    assert not queue.evictable(before) and not queue.evictable(after)
    assert drained(queue) == [other]
    assert after not in queue


def test_a_cleared_queue_is_empty() -> None:
    """After `clear` nothing comes up, and everything can be offered anew."""
    node, queue = leaf(), EvictionQueue(Tier.DEVICE, LRU())
    queue.offer(node)
    queue.clear()
    assert node not in queue
    assert queue.pop() is None
    queue.offer(node)
    assert drained(queue) == [node]
