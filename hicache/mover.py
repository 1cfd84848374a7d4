"""Moves pages between device and host: backup, load back, and eviction from the device."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from hicache.agreement import Agreement
from hicache.flight import ABANDON, Flight, Flights
from hicache.node import Node, PageIndices
from hicache.policy import HiCacheConfig, WritePolicy
from hicache.tier import DEVICE, HOST, Tier
from hicache.tiered import TieredTree
from hicache.transfer import Transfers

__all__ = ["Mover"]


class Mover:
    """`transfers`: None when there is no host tier; then there is nothing to back up to."""

    def __init__(
        self,
        tiered: TieredTree,
        flights: Flights,
        transfers: Transfers | None,
        agreement: Agreement,
        config: HiCacheConfig,
    ) -> None:
        self._tiered, self._flights, self._transfers = tiered, flights, transfers
        self._agreement, self._config = agreement, config
        self.on_backup: Callable[[Node], None] | None = None
        """Called with the end of a path that arrived on the host."""
        self.num_without_room = 0
        """Pages that were to be copied to the host, which was full of what is locked."""
        self._writes_back = transfers is not None and config.write_policy is WritePolicy.WRITE_BACK

    def after_insert(self, path: list[Node]) -> None:
        """What the write policy wants done with a path that was just used."""
        if self._transfers is None or self._writes_back:
            return
        selective = self._config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        needed = self._config.write_through_threshold if selective else 0
        for node in reversed(path):
            if node.copies[HOST] is not None:
                break
            if node.hits >= needed:
                self._back_up_what_fits(node)
                break

    def _back_up_what_fits(self, node: Node) -> None:
        """As `backup`; of a path that is too long for the host its leading pages."""
        if self.backup(node):
            return
        lacking = self._lacking(node, HOST)
        self._tiered.hold(node)
        room = self._tiered.allocators[HOST].num_free + self._tiered.num_evictable(HOST)
        self._tiered.release(node)
        self.num_without_room += sum(one.num_pages for one in lacking) - room
        for one in lacking:
            if one.num_pages > room:
                if room:
                    self.backup(self._tiered.tree.split(one, room))
                elif one.parent is not None:
                    self.backup(one.parent)
                return
            room -= one.num_pages

    def backup(self, node: Node) -> bool:
        """Copy the path to `node` to the host, as far as it is neither there nor under way.

        Whether all of it is there or under way now: there may be no room.
        """
        stretch = self._lacking(node, HOST)
        if not stretch:
            return True
        assert self._transfers is not None, "without a host tier there is nothing to copy to"
        self._tiered.hold(node)
        source = _pages(stretch, DEVICE)
        target = self._tiered.take_host(len(source))
        if target is None:
            self._tiered.release(node)
            return False
        job = self._transfers.submit(HOST, source, target)
        self._leave(Flight(HOST, node, source, target, job, self._land))
        return True

    def load_back(self, node: Node) -> Flight | None:
        """Copy the path to `node` from the host to the device, as far as it is not there or under way.

        The last flight that brings some of it; None when there is no room for it.
        """
        stretch = self._lacking(node, DEVICE)
        if not stretch:
            return self._flight_of(node)
        assert self._transfers is not None, "what is on the host can be copied from it"
        self._tiered.hold(node)
        source = _pages(stretch, HOST)
        target = self.take_device(len(source))
        if target is None:
            self._tiered.release(node)
            return None
        job = self._transfers.submit(DEVICE, target, source)
        flight = Flight(DEVICE, node, source, target, job, self._land)
        self._leave(flight)
        self._transfers.start()
        return flight

    def make_room(self, num_pages: int) -> bool:
        """Whether that many device pages are free now, evicting as needed; nothing is, if it cannot."""
        short = num_pages - self._tiered.allocators[DEVICE].num_free
        if short > self._tiered.num_evictable(DEVICE):
            return False
        return short <= 0 or self.evict(short) == short

    def take_device(self, num_pages: int) -> PageIndices | None:
        """Device pages for the cache itself, evicting as needed."""
        if not self.make_room(num_pages):
            return None
        return self._tiered.allocators[DEVICE].take(num_pages)

    def evict(self, num_pages: int) -> int:
        """Drop device copies, leaves first; how many pages. Under write_back they are copied first."""
        left = num_pages
        while left > 0:
            node = self._tiered.next_victim(DEVICE, left)
            if node is None:
                break
            if self._writes_back and node.copies[HOST] is None:
                if self.backup(node):
                    self._await_backups()
                else:
                    self.num_without_room += node.num_pages
            left -= node.num_pages
            self._tiered.drop(node, DEVICE)
        return num_pages - left

    def _await_backups(self) -> None:
        """Wait for every copy to the host, and land them."""
        assert self._transfers is not None
        flights = [one for one in self._flights if one.tier is HOST and not one.abandoned]
        jobs = [flight.job for flight in flights if not hasattr(flight.job, "result")]
        self._transfers.wait(jobs, self._config.transfer_timeout_s)
        now = self._flights.clock()
        progress = [flight.progress(now) or ABANDON for flight in flights]
        self._flights.settle_some(flights, self._agreement.least(progress))

    def _leave(self, flight: Flight) -> None:
        flight.deadline = self._flights.clock() + self._config.transfer_timeout_s
        self._flights.leave(flight)

    def _land(self, flight: Flight, nodes: list[Node], count: int) -> None:
        if not flight.abandoned:
            self._flights.place(flight, nodes, count)
        self._tiered.release(flight.node)
        if count and flight.tier is HOST and self.on_backup is not None:
            self.on_backup(flight.node)

    def _lacking(self, node: Node, tier: Tier) -> list[Node]:
        """The end of the path to `node` that is neither on `tier` nor on its way there, from the top."""
        found = []
        at = node
        while not at.is_root and at.copies[tier] is None and not at.moving & 1 << tier:
            found.append(at)
            assert at.parent is not None
            at = at.parent
        found.reverse()
        return found

    def _flight_of(self, node: Node) -> Flight | None:
        """The flight that brings `node` to the device."""
        for flight in self._flights:
            if flight.tier is DEVICE and not flight.abandoned:
                stretch = self._tiered.tree.stretch(flight.node, flight.num_pages)
                if node in stretch:
                    return flight
        return None


def _pages(nodes: list[Node], tier: Tier) -> PageIndices:
    pages = array("q")
    for node in nodes:
        copy = node.copies[tier]
        assert isinstance(copy, array), "R2: the other tier has them all"
        pages += copy
    return pages
