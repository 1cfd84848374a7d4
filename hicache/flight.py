"""What is on its way to another tier.

F1  A flight's pages are a stretch of one path that ends with `node`, whatever was split since.
F2  Its destination's pages are its own until it lands or ends; they are in no node's copy and not free.
F3  It lands when every rank says that it arrived, and only below pages that are on the tier already.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeAlias

from hicache.node import Copy, Node, PageIndices
from hicache.tier import Tier
from hicache.tiered import TieredTree
from hicache.transfer import TransferJob

__all__ = ["ABANDON", "PENDING", "Flight", "Flights"]

_MOST_LOOKED_AT = 64
PENDING = 0
ABANDON = -1
"""Progress of a flight; 1 and more: it ended, and one less arrived, counted from the front."""

Land: TypeAlias = "Callable[[Flight, list[Node], int], None]"


def count_of(job: Future[int], most: int) -> int:
    """What an ended call of a store says, made sense of: it may be anybody's."""
    if job.cancelled() or job.exception() is not None:
        return 0
    count = job.result()
    return min(max(count, 0), most) if isinstance(count, int) else 0


class Flight:
    """`num_pages` pages that end with `node`, going to `tier`.

    `done`: nothing more will come. `num_arrived`: how many of the leading pages are there by it.
    """

    __slots__ = (
        "abandoned",
        "deadline",
        "done",
        "job",
        "land",
        "node",
        "num_arrived",
        "num_pages",
        "owned",
        "owned_tier",
        "source",
        "tier",
    )

    def __init__(
        self,
        tier: Tier,
        node: Node,
        source: PageIndices,
        target: Copy,
        job: TransferJob | Future[int],
        land: Land,
        deadline: float | None = None,
    ) -> None:
        self.tier, self.node, self.num_pages = tier, node, len(source)
        self.source = source
        self.owned: Copy = target
        self.owned_tier = tier
        self.job, self.land, self.deadline = job, land, deadline
        self.done = self.abandoned = False
        self.num_arrived = 0

    def progress(self, now: float) -> int:
        """PENDING, ABANDON after its deadline, or 1 + how many pages arrived."""
        if isinstance(self.job, Future):
            if not self.job.done():
                return PENDING
            return 1 + count_of(self.job, self.num_pages)
        arrived = self.job.poll()
        if arrived is None:
            late = self.deadline is not None and now > self.deadline and not self.abandoned
            return ABANDON if late else PENDING
        return 1 + (self.num_pages if arrived else 0)


class Flights:
    """All of them, in the order in which they left."""

    def __init__(self, tiered: TieredTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiered, self.clock = tiered, clock
        self._flights: list[Flight] = []
        self._looked_at: list[Flight] = []
        self.num_failed = self.num_abandoned = 0
        """Flights that arrived short; that ended too late for anybody to care."""

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    def leave(self, flight: Flight) -> None:
        """Its pages are on their way; no second flight brings them to the same tier meanwhile."""
        for node in self._stretch(flight):
            node.moving |= 1 << flight.tier
        self._flights.append(flight)

    def progress(self) -> list[int]:
        """Of those that left first, as this rank sees it: what was sent first arrives first, mostly.

        So many for each tier, and as many again that are abandoned: what hangs hides nothing else.
        """
        now = self.clock()
        places: Counter[tuple[Tier, bool]] = Counter()
        self._looked_at = []
        for flight in self._flights:
            kind = (flight.tier, flight.abandoned)
            if places[kind] < _MOST_LOOKED_AT:
                places[kind] += 1
                self._looked_at.append(flight)
        return [flight.progress(now) for flight in self._looked_at]

    def settle(self, progress: list[int]) -> None:
        """Land or end what the ranks agree has arrived; `progress` as agreed, of the same ones."""
        ended = {
            flight
            for flight, arrived in zip(self._looked_at, progress, strict=True)
            if self._settle(flight, arrived)
        }
        if ended:
            self._flights = [flight for flight in self._flights if flight not in ended]

    def settle_some(self, flights: list[Flight], progress: list[int]) -> None:
        """The same for some of them."""
        for flight, arrived in zip(flights, progress, strict=True):
            if self._settle(flight, arrived):
                self._flights.remove(flight)

    def abandon(self, flight: Flight) -> None:
        """Nothing waits for it any more. It keeps its pages until it ends: they are being written."""
        self._forget(flight, self._stretch(flight))
        flight.abandoned = flight.done = True
        flight.land(flight, [], 0)

    def _settle(self, flight: Flight, arrived: int) -> bool:
        """Whether it ended."""
        if arrived == PENDING:
            return False
        if flight.abandoned:
            self.num_abandoned += 1
            self._tiered.free(flight.owned_tier, flight.owned)
            flight.owned = array("q")
            return True
        if arrived == ABANDON:
            self.num_failed += 1
            self.abandon(flight)
            return False
        nodes = self._stretch(flight)
        count = arrived - 1
        parent = nodes[0].parent
        assert parent is not None, "F1: what flies is in the tree"
        if count and not parent.is_root and parent.copies[flight.tier] is None:
            if parent.moving & 1 << flight.tier:
                return False
            count = 0
        self.num_failed += count < flight.num_pages
        self._forget(flight, nodes)
        flight.land(flight, nodes, count)
        flight.owned = array("q")
        flight.done = True
        return True

    def _forget(self, flight: Flight, nodes: list[Node]) -> None:
        for node in nodes:
            node.moving &= ~(1 << flight.tier)

    def _stretch(self, flight: Flight) -> list[Node]:
        return self._tiered.tree.stretch(flight.node, flight.num_pages)

    def place(self, flight: Flight, nodes: list[Node], count: int) -> list[Node]:
        """Make the first `count` pages the nodes' copies; the rest is free. Returns nodes that gained.

        A node that has a copy meanwhile keeps that one.
        """
        gained, at, tier = [], 0, flight.tier
        for node in nodes:
            if at == count:
                break
            part = node
            if at + node.num_pages > count:
                part = self._tiered.tree.split(node, count - at)
            pages = flight.owned[at : at + part.num_pages]
            at += part.num_pages
            if part.copies[tier] is None:
                self._tiered.store(part, tier, pages)
                gained.append(part)
            else:
                self._tiered.free(tier, pages)
        flight.num_arrived = count
        self._tiered.free(tier, flight.owned[count:])
        return gained
