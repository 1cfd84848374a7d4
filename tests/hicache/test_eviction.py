"""The order of eviction: what is queued, when it comes up, and by which rank."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from hicache.eviction import LRU, POLICIES, EvictionPolicy, EvictionQueue, eviction_policy
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

    falls = False

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


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    """Every policy there is, by its name."""
    return eviction_policy(request.param)


def test_a_policy_ranks_without_changing_anything(policy: EvictionPolicy) -> None:
    """Asking for a rank twice gives the same; a use lowers it only where the policy says so."""
    node = leaf(3)
    rank = policy.rank(node)
    assert policy.rank(node) == rank
    node.last_access = 5
    assert (policy.rank(node) < rank) == policy.falls
    node.last_access, node.hits, node.priority = 3, 2, 1
    assert policy.rank(node) >= rank


def known(first_id: int, last_access: int, hits: int, priority: int) -> Node:
    """A leaf with all that a policy may look at."""
    node = leaf(last_access)
    node.first_id, node.hits, node.priority = first_id, hits, priority
    return node


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", "bdac"),
        ("mru", "cadb"),
        ("fifo", "abcd"),
        ("filo", "dcba"),
        ("lfu", "dabc"),
        ("slru", "dabc"),
        ("priority", "bcda"),
    ],
)
def test_a_policy_has_the_order_of_its_name(name: str, order: str) -> None:
    """Four leaves that differ in age, last use, number of inserts and priority come up by the policy."""
    leaves = {
        "a": known(0, last_access=30, hits=1, priority=9),
        "b": known(1, last_access=10, hits=2, priority=0),
        "c": known(2, last_access=40, hits=9, priority=0),
        "d": known(3, last_access=20, hits=1, priority=5),
    }
    queue = EvictionQueue(Tier.DEVICE, eviction_policy(name))
    for node in leaves.values():
        queue.offer(node)
    assert drained(queue) == [leaves[letter] for letter in order]


def test_ages_do_not_outweigh_counts() -> None:
    """However late its last use, a node of lower count or priority goes first."""
    for name in ("lfu", "slru", "priority"):
        often, once = known(0, 0, hits=2, priority=1), known(1, 2**40, hits=1, priority=0)
        ranks = eviction_policy(name)
        assert ranks.rank(once) < ranks.rank(often)


def test_slru_asks_only_whether_there_was_a_second_insert() -> None:
    """What was inserted twice and what was inserted nine times go by their last use."""
    ranks = eviction_policy("slru")
    assert ranks.rank(known(0, 1, hits=9, priority=0)) < ranks.rank(known(1, 2, 2, 0))


@pytest.mark.parametrize("name", ["LRU", "", "random"])
def test_a_policy_that_is_none_is_refused(name: str) -> None:
    """An unknown name is refused with it and with those there are."""
    with pytest.raises(ValueError, match=f"eviction_policy: '{name}' is none of lru, lfu, fifo"):
        eviction_policy(name)


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


class Falling(Ranks):
    """The same, where a use lowers a rank."""

    falls = True


def test_a_rank_that_fell_comes_up_early() -> None:
    """Where a use lowers a rank, the queue is told of each use, and forgets what it knew before."""
    a, b, c = leaf(), leaf(), leaf()
    policy = Falling({a: 7, b: 8, c: 9})
    queue = EvictionQueue(Tier.DEVICE, policy)
    for node in (a, b, c):
        queue.offer(node)
    for rank in (6, 5):
        policy.ranks[c] = rank
        queue.used(c)
    assert drained(queue) == [c, a, b]


def test_a_queue_of_many_uses_stays_small() -> None:
    """Entries that tell old ranks are thrown away before they outnumber the nodes by far."""
    nodes = [leaf(0) for _ in range(20)]
    queue = EvictionQueue(Tier.DEVICE, eviction_policy("mru"))
    for node in nodes:
        queue.offer(node)
    for time in range(1, 1001):
        nodes[time % 20].last_access = time
        queue.used(nodes[time % 20])
    assert len(queue._heap) <= 81
    assert drained(queue) == sorted(nodes, key=lambda node: -node.last_access)


def test_uses_of_what_is_not_queued_are_nothing() -> None:
    """A node without an entry gets none by being used."""
    queue = EvictionQueue(Tier.DEVICE, eviction_policy("mru"))
    queue.used(leaf(1))
    assert queue.pop() is None


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


def hold_host(node: Node) -> None:
    """Only the host copy is held; it may leave the device, and does not stay for that."""
    node.copies[Tier.HOST] = array("q", [0])
    node.host_ref = 1


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


def test_a_hold_on_the_host_copy_is_for_the_host() -> None:
    """What storage is reading keeps its host copy; its device copy may go."""
    node = leaf(1)
    hold_host(node)
    for tier, evictable in ((Tier.DEVICE, True), (Tier.HOST, False)):
        queue = EvictionQueue(tier, LRU())
        queue.offer(node)
        assert queue.evictable(node) is evictable
        assert drained(queue) == [node] * evictable


def test_a_cleared_queue_is_empty() -> None:
    """After `clear` nothing comes up, and everything can be offered anew."""
    node, queue = leaf(), EvictionQueue(Tier.DEVICE, LRU())
    queue.offer(node)
    queue.clear()
    assert node not in queue
    assert queue.pop() is None
    queue.offer(node)
    assert drained(queue) == [node]
