"""The order in which leaves of a tier are evicted."""

from __future__ import annotations

import heapq
from typing import Protocol

from hicache.node import Node
from hicache.tier import Tier

__all__ = ["LRU", "EvictionPolicy", "EvictionQueue"]


class EvictionPolicy(Protocol):
    """Ranks nodes: the lowest goes first. A node's rank must not fall while it waits."""

    def rank(self, node: Node) -> int:
        """The node's rank now."""


class LRU:
    """Least recently used first."""

    def rank(self, node: Node) -> int:
        return node.last_access


class EvictionQueue:
    """The evictable nodes of one tier, lowest rank first.

    An entry may be out of date: a touch does not move it. Its rank is looked at again when it comes
    up, so a touch costs nothing, and a node has at most one entry.
    """

    def __init__(self, tier: Tier, policy: EvictionPolicy) -> None:
        self._tier, self._policy = tier, policy
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._order = 0

    def evictable(self, node: Node) -> bool:
        """Has a copy on the tier, no child that has one, and no lock."""
        return (
            node.copies[self._tier] is not None
            and not node.num_held[self._tier]
            and not node.lock_ref
        )

    def __contains__(self, node: Node) -> bool:
        """Whether the node has an entry."""
        return node in self._queued

    def offer(self, node: Node) -> None:
        """Call when a node may have become evictable."""
        if node not in self._queued and self.evictable(node):
            self._queued.add(node)
            self._push(node)

    def pop(self) -> Node | None:
        """Take out the evictable node of the lowest rank; None when there is none."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if not self.evictable(node):
                self._queued.remove(node)
            elif self._policy.rank(node) > rank:
                self._push(node)
            else:
                self._queued.remove(node)
                return node
        return None

    def clear(self) -> None:
        """Forget every entry."""
        self._heap.clear()
        self._queued.clear()

    def _push(self, node: Node) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self._policy.rank(node), self._order, node))
