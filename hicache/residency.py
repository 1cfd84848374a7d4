"""Which tier holds which pages of a node: the only place where that changes.

Each change records itself as its last step, once it is true, so no call site can forget an event and
none can invent one.

R1  A node's copy on a tier has exactly one page for each of the node's pages.
R2  On every tier residency is prefix-closed: a node's parent is a root or has a copy there too.
R3  The counts per tier, of resident pages and of those under a lock, are those of the nodes.
"""

from __future__ import annotations

from hicache.node import Copy, Node
from hicache.recorder import ResidencyRecorder
from hicache.tier import DEVICE, HOST, NUM_TIERS, Tier

__all__ = ["Residency"]


class Residency:
    """Gives nodes copies and takes them away."""

    def __init__(self, recorder: ResidencyRecorder) -> None:
        self._recorder = recorder
        self._resident = [0] * NUM_TIERS
        self._protected = [0] * NUM_TIERS
        self._stored = [0] * NUM_TIERS
        self._dropped = [0] * NUM_TIERS

    def num_stored(self, tier: Tier) -> int:
        """Pages ever stored on `tier`; less those dropped or cleared, they are resident."""
        return self._stored[tier]

    def num_dropped(self, tier: Tier) -> int:
        """Pages ever dropped from `tier`; a clear counts as none."""
        return self._dropped[tier]

    def num_resident(self, tier: Tier) -> int:
        """Pages in nodes' copies on `tier`."""
        return self._resident[tier]

    def num_protected(self, tier: Tier) -> int:
        """Those of them that a lock holds."""
        return self._protected[tier]

    def store(self, node: Node, tier: Tier, pages: Copy) -> None:
        """`pages` of `tier` now hold the node's KV, readable."""
        parent = node.parent
        assert parent is not None, "R1: only a node in the tree has copies"
        assert node.copies[tier] is None and len(pages) == node.num_pages, "R1"
        assert parent.is_root or parent.copies[tier] is not None, "R2"
        new = not node.resident
        node.copies[tier] = pages
        parent.num_held[tier] += 1
        self._resident[tier] += node.num_pages
        self._stored[tier] += node.num_pages
        if protected(node, tier):
            self._protected[tier] += node.num_pages
        self._recorder.stored(node, tier, new=new)

    def drop(self, node: Node, tier: Tier) -> Copy:
        """Take the node's copy on `tier` away; the pages are the caller's to free."""
        pages, parent = node.copies[tier], node.parent
        assert pages is not None and parent is not None, "R1: only a copy that is there is dropped"
        assert not node.num_held[tier], "R2"
        node.copies[tier] = None
        parent.num_held[tier] -= 1
        self._resident[tier] -= node.num_pages
        self._dropped[tier] += node.num_pages
        if protected(node, tier):
            self._protected[tier] -= node.num_pages
        self._recorder.dropped(node, tier)
        return pages

    def clear(self) -> None:
        """No node has a copy any more; the tree is being cleared."""
        self._resident = [0] * NUM_TIERS
        self._protected = [0] * NUM_TIERS
        self._recorder.cleared()

    def locked(self, node: Node) -> None:
        """The node's lock_ref went from 0 to 1."""
        self._protect(node, DEVICE, node.num_pages)
        if not node.host_ref:
            self._protect(node, HOST, node.num_pages)

    def unlocked(self, node: Node) -> None:
        """The node's lock_ref went from 1 to 0."""
        self._protect(node, DEVICE, -node.num_pages)
        if not node.host_ref:
            self._protect(node, HOST, -node.num_pages)

    def host_held(self, node: Node) -> None:
        """The node's host_ref went from 0 to 1."""
        if not node.lock_ref:
            self._protect(node, HOST, node.num_pages)

    def host_released(self, node: Node) -> None:
        """The node's host_ref went from 1 to 0."""
        if not node.lock_ref:
            self._protect(node, HOST, -node.num_pages)

    def _protect(self, node: Node, tier: Tier, num_pages: int) -> None:
        if node.copies[tier] is not None:
            self._protected[tier] += num_pages


def protected(node: Node, tier: Tier) -> bool:
    """Whether a lock keeps the node's copy on `tier`. A store's pages are the store's to keep."""
    if tier == DEVICE:
        return bool(node.lock_ref)
    return tier == HOST and bool(node.lock_ref or node.host_ref)
