"""The order in which the leaves of a tier are evicted."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from hicache.node import Node
from hicache.tier import HOST, Tier

__all__ = ["POLICIES", "EvictionPolicy", "EvictionQueue", "eviction_policy"]

_HIGH = 64


class EvictionPolicy(Protocol):
    """Ranks nodes: the lowest goes first."""

    falls: bool
    """Whether a use can lower a node's rank."""

    def rank(self, node: Node) -> int:
        """The node's rank now."""


class LRU:
    """Least recently used first."""

    falls = False

    def rank(self, node: Node) -> int:
        return node.last_access


class MRU:
    """Most recently used first."""

    falls = True

    def rank(self, node: Node) -> int:
        return -node.last_access


class LFU:
    """Least often inserted first; among equals the least recently used."""

    falls = False

    def rank(self, node: Node) -> int:
        return (node.hits << _HIGH) + node.last_access


class FIFO:
    """Oldest first."""

    falls = False

    def rank(self, node: Node) -> int:
        return node.first_id


class FILO:
    """Newest first."""

    falls = False

    def rank(self, node: Node) -> int:
        return -node.first_id


class Priority:
    """Lowest priority first; among equals the least recently used."""

    falls = False

    def rank(self, node: Node) -> int:
        return (node.priority << _HIGH) + node.last_access


class SLRU:
    """Least recently used first, what was inserted only once before what was inserted again."""

    falls = False

    def rank(self, node: Node) -> int:
        return (int(node.hits >= 2) << _HIGH) + node.last_access


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "mru": MRU,
    "filo": FILO,
    "priority": Priority,
    "slru": SLRU,
}


def eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises ValueError for a name that is none."""
    made = POLICIES.get(name) if isinstance(name, str) else None
    if made is None:
        raise ValueError(f"eviction_policy: {name!r} is none of {', '.join(POLICIES)}")
    return made()


class EvictionQueue:
    """The evictable nodes of one tier, lowest rank first.

    An entry may be out of date. Where ranks only rise, its rank is looked at again when it comes up, so
    a use costs nothing and a node has one entry. Where they fall, each use adds an entry, and those
    that tell an old rank are thrown away.
    """

    def __init__(self, tier: Tier, policy: EvictionPolicy) -> None:
        self._tier, self._policy = tier, policy
        self._of_host = tier == HOST
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._order = 0

    def evictable(self, node: Node) -> bool:
        """Has a copy on the tier, no child that has one, and no lock."""
        tier = self._tier
        return (
            not node.lock_ref
            and node.copies[tier] is not None
            and not node.num_held[tier]
            and not (self._of_host and node.host_ref)
        )

    def __contains__(self, node: Node) -> bool:
        """Whether the node has an entry."""
        return node in self._queued

    def offer(self, node: Node) -> None:
        """Call when a node may have become evictable."""
        if node not in self._queued and self.evictable(node):
            self._queued.add(node)
            self._push(node)

    def used(self, node: Node) -> None:
        """Call when a node's rank may have fallen."""
        if node in self._queued:
            self._push(node)
            if len(self._heap) > 64 and len(self._heap) > 4 * len(self._queued):
                self._rebuild()

    def pop(self) -> Node | None:
        """Take out the evictable node of the lowest rank; None when there is none."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if node not in self._queued:
                continue
            now = self._policy.rank(node)
            if not self.evictable(node):
                self._queued.remove(node)
            elif now == rank:
                self._queued.remove(node)
                return node
            elif not self._policy.falls:
                self._push(node)
        return None

    def clear(self) -> None:
        """Forget every entry."""
        self._heap.clear()
        self._queued.clear()

    def _push(self, node: Node) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self._policy.rank(node), self._order, node))

    def _rebuild(self) -> None:
        nodes = sorted(
            {node: order for _, order, node in self._heap}.items(), key=lambda one: one[1]
        )
        self._heap.clear()
        for node, _ in nodes:
            if node in self._queued:
                self._push(node)
