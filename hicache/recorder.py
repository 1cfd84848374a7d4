"""Where residency's changes are written down, and told anew when a sidecar asks.

A re-telling is `Clear`, then every resident node once, parents before children, a bounded number of
blocks at a time. Changes meanwhile are recorded at once for nodes already told; what happens to the
others is seen when their turn comes.
"""

from __future__ import annotations

from typing import Protocol

from hicache.node import Node
from hicache.tier import MEDIUM, Tier
from hicache.tree import RadixTree
from kvevents.records import BlockId, Clear, Record, Remove, StoreKnown, StoreNew

__all__ = ["NullRecorder", "Recorder", "ResidencyRecorder"]


_NODE_BLOCKS = 2
"""A node costs as much to tell as so many blocks more than it has."""


class ResidencyRecorder(Protocol):
    """What `Residency` calls, once a change is true."""

    def stored(self, node: Node, tier: Tier, *, new: bool) -> None:
        """`node` has a copy on `tier`; `new`: its first on any tier."""

    def dropped(self, node: Node, tier: Tier) -> None:
        """`node` has no copy on `tier` any more."""

    def cleared(self) -> None:
        """No node has a copy anywhere."""

    def take(self) -> list[Record]:
        """The records since the last call."""

    @property
    def retelling(self) -> bool:
        """Whether a re-telling is under way."""

    def begin_retell(self) -> None:
        """Drop the records not taken yet and start a re-telling."""

    def retell(self, num_blocks: int) -> None:
        """Tell about `num_blocks` more."""


class NullRecorder:
    """Events turned off."""

    retelling = False

    def stored(self, node: Node, tier: Tier, *, new: bool) -> None: ...

    def dropped(self, node: Node, tier: Tier) -> None: ...

    def cleared(self) -> None: ...

    def take(self) -> list[Record]:
        return []

    def begin_retell(self) -> None: ...

    def retell(self, num_blocks: int) -> None: ...


class Recorder:
    """Keeps records until they are taken."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._records: list[Record] = []
        self._telling = 0
        self._waiting: list[Node] = []
        """The nodes of the moment the re-telling began, the oldest last: parents before children, but
        for upper halves of splits, which come to be after their lower halves.
        """
        self._untold: dict[Node, None] = {}
        """Nodes that came since and wait too, and no others for long: a re-telling that nobody
        continues keeps no more than the tree does, and what it had at first.
        """

    @property
    def retelling(self) -> bool:
        return bool(self._waiting or self._untold)

    def stored(self, node: Node, tier: Tier, *, new: bool) -> None:
        if not new:
            if node.told == self._telling:
                count, first_id = node.num_pages, BlockId(node.first_id)
                self._records.append(StoreKnown(MEDIUM[tier], first_id, count))
        elif self.retelling and not self._told_parent(node):
            node.told = -1
            self._untold[node] = None
        else:
            self._tell_new(node, tier)

    def dropped(self, node: Node, tier: Tier) -> None:
        if not node.resident:
            self._untold.pop(node, None)
        if node.told == self._telling:
            span = (BlockId(node.first_id), node.num_pages)
            last = self._records[-1] if self._records else None
            if isinstance(last, Remove) and last.medium is MEDIUM[tier]:
                last.ranges.append(span)
            else:
                self._records.append(Remove(MEDIUM[tier], [span]))
        elif node.parent is not None and self._awaits(node.parent):
            self._untold[node.parent] = None  # it may be the upper half of a split, unlisted so far

    def cleared(self) -> None:
        self._waiting.clear()
        self._untold.clear()
        self._records.append(Clear())

    def take(self) -> list[Record]:
        records, self._records = self._records, []
        return records

    def begin_retell(self) -> None:
        self._records = [Clear()]
        self._telling += 1
        self._waiting = self._tree.nodes()
        self._waiting.reverse()
        self._untold.clear()

    def retell(self, num_blocks: int) -> None:
        """Splits a node that is larger than what is left of `num_blocks`; splits are silent."""
        while self.retelling and num_blocks > 0:
            node = self._waiting[-1] if self._waiting else next(reversed(self._untold))
            if self._awaits(node):
                num_blocks -= self._tell_path(node, num_blocks)
            if not self._awaits(node):
                self._done(node)

    def _tell_path(self, node: Node, num_blocks: int) -> int:
        """Tell `node` and its untold ancestors, from the top, as far as `num_blocks` reaches; returns
        how far, in blocks' worth.
        """
        spent = 0
        for untold in reversed(self._untold_path(node)):
            room = num_blocks - spent
            if room <= 0:
                break
            part = self._tree.split(untold, room) if untold.num_pages > room else untold
            self._tell(part)
            spent += part.num_pages + _NODE_BLOCKS
        return spent

    def _done(self, node: Node) -> None:
        if self._waiting:
            self._waiting.pop()
        else:
            del self._untold[node]

    def _awaits(self, node: Node) -> bool:
        return (
            not node.is_root
            and node.parent is not None
            and node.told != self._telling
            and node.resident
        )

    def _untold_path(self, node: Node) -> list[Node]:
        """`node` and its ancestors as far as they are still to be told, `node` first."""
        path = [node]
        while (parent := path[-1].parent) is not None and self._awaits(parent):
            path.append(parent)
        return path

    def _told_parent(self, node: Node) -> bool:
        parent = node.parent
        return parent is None or parent.is_root or parent.told == self._telling

    def _tell(self, node: Node) -> None:
        tiers = [tier for tier in Tier if node.copies[tier] is not None]
        self._tell_new(node, tiers[0])
        for tier in tiers[1:]:
            self.stored(node, tier, new=False)

    def _tell_new(self, node: Node, tier: Tier) -> None:
        node.told = self._telling
        parent = node.parent
        assert parent is not None, "T1: a node that gains a copy is in the tree"
        parent_id = None if parent.is_root else BlockId(parent.first_id + parent.num_pages - 1)
        self._records.append(
            StoreNew(
                MEDIUM[tier],
                BlockId(node.first_id),
                node.num_pages,
                parent_id,
                node.namespace if parent.is_root else None,
                node.key,
            )
        )
