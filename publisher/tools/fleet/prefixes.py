"""Which prompts are stored most: chains of blocks from the beginning on, over all workers."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from kvevents.behind import Behind
from kvevents.hashing import BlockHash

__all__ = ["Prefix", "Prefixes"]

_MOST_GONE = 100_000
"""Blocks that were dropped, remembered to tell when they come back."""
_MOST_BLOCKS = 1_000_000
"""Of all workers together, and of prefixes; what is stored beyond is not looked at."""
_LONGEST_WALK = 100_000


class Prefix(NamedTuple):
    """From a prompt's first block, `root`, to the last one before it branches, `tip`; `blocks` of them.
    Where what came before a block was not known when it came, it counts as a first one.

    `beneath`: blocks that are held by any, with those of the chain. `held_by`: who holds the tip, by
    number. `stores`, `again`: blocks that came to a worker in the window, and those of them that it had
    dropped.
    """

    root: BlockHash
    tip: BlockHash
    blocks: int
    beneath: int
    held_by: list[int]
    stores: int
    again: int


class _Node:
    __slots__ = ("held", "parent", "root")

    def __init__(self, parent: BlockHash | None, root: BlockHash) -> None:
        self.parent, self.root = parent, root
        self.held = 0
        """Bit n: by the n-th rank."""


class _Behind(Behind):
    def only(self, parent: BlockHash) -> BlockHash | None:
        """The block behind `parent`, where there is one and no other; however many there are."""
        found = self._of.get(parent)
        if isinstance(found, set):
            return next(iter(found)) if len(found) == 1 else None
        return found


class Prefixes:
    """`window_s`: how long a store counts; None: always. Ranks are numbered by whoever calls."""

    def __init__(self, window_s: int | None = 60) -> None:
        self._window_s = window_s
        self._nodes: dict[BlockHash, _Node] = {}
        self._behind = _Behind()
        self._beneath: dict[BlockHash, int] = {}
        self._gone: OrderedDict[tuple[int, BlockHash], None] = OrderedDict()
        self._seconds: deque[tuple[int, dict[BlockHash, list[int]]]] = deque()
        self._totals: dict[BlockHash, list[int]] = {}
        self.left_out = 0
        """Blocks that were beyond what is looked at."""
        self.second: int | None = None
        """When what is stored comes; None: it is of earlier, and does not count as stored now."""

    def stored(self, rank: int, name: BlockHash, parent: BlockHash | None) -> None:
        """A rank has a block that it did not have."""
        node = self._nodes.get(name)
        if node is None:
            if len(self._nodes) >= _MOST_BLOCKS:
                self.left_out += 1
                return
            node = self._add(name, parent)
        node.held |= 1 << rank
        again = (rank, name) in self._gone
        if again:
            del self._gone[rank, name]
        if self.second is not None:
            self._count(node.root, again=again)

    def dropped(self, rank: int, name: BlockHash) -> None:
        """A rank has it no more."""
        node = self._nodes.get(name)
        if node is None or not node.held >> rank & 1:
            return
        node.held &= ~(1 << rank)
        self._gone[rank, name] = None
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        if not node.held:
            self._remove(name, node)

    def _add(self, name: BlockHash, parent: BlockHash | None) -> _Node:
        above = None if parent is None else self._nodes.get(parent)
        node = _Node(parent, name if above is None else above.root)
        self._nodes[name] = node
        self._beneath[node.root] = self._beneath.get(node.root, 0) + 1
        if parent is not None:
            self._behind.add(parent, name)
        return node

    def _remove(self, name: BlockHash, node: _Node) -> None:
        del self._nodes[name]
        if node.parent is not None:
            self._behind.discard(node.parent, name)
        self._beneath[node.root] -= 1
        if not self._beneath[node.root]:
            del self._beneath[node.root]

    # ---------------------------------------------------------------------------------- window

    def _count(self, root: BlockHash, *, again: bool) -> None:
        assert self.second is not None
        if root not in self._totals and len(self._totals) >= _MOST_BLOCKS:
            self.left_out += 1
            return
        second = 0 if self._window_s is None else self.second
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, {}))
        counts = (
            self._seconds[-1][1].setdefault(root, [0, 0]),
            self._totals.setdefault(root, [0, 0]),
        )
        for count in counts:
            count[0] += 1
            count[1] += again

    def forget(self, now: int) -> None:
        """What was stored before the window does not count any more."""
        while self._window_s is not None and self._seconds:
            if self._seconds[0][0] > now - self._window_s:
                return
            for root, (stores, again) in self._seconds.popleft()[1].items():
                total = self._totals[root]
                total[0] -= stores
                total[1] -= again
                if not total[0]:
                    del self._totals[root]

    # --------------------------------------------------------------------------------- queries

    def hottest(self, count: int) -> list[Prefix]:
        """Those that were stored most, then those with most beneath; only such as are held, from the
        first block on, and were stored in the window.
        """
        held = (root for root in self._totals if root in self._nodes and root in self._beneath)
        most = heapq.nlargest(count, held, key=self._heat)
        return [self._prefix(root) for root in most]

    def _heat(self, root: BlockHash) -> tuple[int, int, BlockHash]:
        return self._totals[root][0], self._beneath[root], root

    def _prefix(self, root: BlockHash) -> Prefix:
        tip, length = root, 1
        while length < _LONGEST_WALK:
            following = self._behind.only(tip)
            if following is None or following == root:
                break
            tip, length = following, length + 1
        stores, again = self._totals[root]
        holders = list(_bits(self._nodes[tip].held))
        return Prefix(root, tip, length, self._beneath[root], holders, stores, again)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
