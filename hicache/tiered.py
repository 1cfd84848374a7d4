"""The radix tree with its copies on every tier, and the memory they are in.

What moves pages (`mover`, `storage_tier`, `prefetch`) and what the engine calls (`cache`) work on this.
"""

from __future__ import annotations

from collections.abc import Mapping

from hicache.allocator import PageAllocator
from hicache.eviction import EvictionQueue, eviction_policy
from hicache.node import Copy, Node, PageIndices
from hicache.residency import Residency
from hicache.tier import HOST, Tier
from hicache.tree import RadixTree

__all__ = ["TieredTree"]


class TieredTree:
    """`allocators`: of the tiers that have a pool."""

    def __init__(
        self,
        tree: RadixTree,
        residency: Residency,
        allocators: Mapping[Tier, PageAllocator],
        policy: str,
    ) -> None:
        self.tree, self.residency, self.allocators = tree, residency, allocators
        self.queues = {tier: EvictionQueue(tier, eviction_policy(policy)) for tier in allocators}
        self.ranks_fall = eviction_policy(policy).falls

    # ------------------------------------------------------------------------------- residency

    def store(self, node: Node, tier: Tier, pages: Copy) -> None:
        """`pages` of `tier`, filled, are the node's from now on."""
        self.residency.store(node, tier, pages)
        if tier in self.queues:
            self.queues[tier].offer(node)

    def drop(self, node: Node, tier: Tier) -> None:
        """Give up the node's copy on `tier`, its pages, and the node if that was all it had."""
        parent = node.parent
        self.free(tier, self.residency.drop(node, tier))
        if not node.resident:
            self.tree.remove(node)
        if parent is not None and tier in self.queues:
            self.queues[tier].offer(parent)

    def free(self, tier: Tier, pages: Copy) -> None:
        """Pages of `tier` that were the cache's are nobody's."""
        if not isinstance(pages, range):
            self.allocators[tier].take_back(pages)

    # ----------------------------------------------------------------------------------- locks

    def pin(self, node: Node) -> None:
        """A request keeps the device and host copies of the path to `node`."""
        node.pins += 1
        self._lock(node)

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        node.pins -= 1
        self._unlock(node)

    def hold(self, node: Node) -> None:
        """As `pin`, for what is on its way."""
        node.moves += 1
        self._lock(node)

    def release(self, node: Node) -> None:
        """Undo one `hold`."""
        node.moves -= 1
        self._unlock(node)

    def hold_host(self, node: Node) -> None:
        """Keep the host copies of the path to `node`; the device may go."""
        node.host_pins += 1
        at: Node | None = node
        while at is not None:
            at.host_ref += 1
            if at.host_ref == 1:
                self.residency.host_held(at)
            at = at.parent

    def release_host(self, node: Node) -> None:
        """Undo one `hold_host`."""
        node.host_pins -= 1
        at: Node | None = node
        while at is not None:
            at.host_ref -= 1
            if not at.host_ref:
                self.residency.host_released(at)
                self.queues[HOST].offer(at)
            at = at.parent

    def _lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.lock_ref += 1
            if at.lock_ref == 1:
                self.residency.locked(at)
            at = at.parent

    def _unlock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.lock_ref -= 1
            if not at.lock_ref:
                self.residency.unlocked(at)
                for queue in self.queues.values():
                    queue.offer(at)
            at = at.parent

    # -------------------------------------------------------------------------------- eviction

    def num_evictable(self, tier: Tier) -> int:
        """Pages that no lock protects."""
        return self.residency.num_resident(tier) - self.residency.num_protected(tier)

    def next_victim(self, tier: Tier, num_pages: int) -> Node | None:
        """The leaf of `tier` to go next, cut to its last `num_pages` pages; None: nothing may go."""
        node = self.queues[tier].pop()
        if node is not None and node.num_pages > num_pages:
            self.tree.split(node, node.num_pages - num_pages)
        return node

    def take_host(self, num_pages: int) -> PageIndices | None:
        """Host pages, evicting as needed; None, with nothing evicted, when that would not do."""
        allocator = self.allocators[HOST]
        short = num_pages - allocator.num_free
        if short > self.num_evictable(HOST):
            return None
        while short > 0:
            node = self.next_victim(HOST, short)
            assert node is not None, "R3: what is not protected can be evicted, leaves first"
            short -= node.num_pages
            self.drop(node, HOST)
        return allocator.take(num_pages)

    def clear(self) -> None:
        """Forget every node and copy. The pages are the caller's to free."""
        for queue in self.queues.values():
            queue.clear()
        self.tree.clear()
        self.residency.clear()
