"""What is on its way to another tier: when it lands, where, and whose its pages are until then."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from units_rig import AB, A, Copy, D, MemoryStore, Rig, opened

from hicache import Flight, Node, Tier
from hicache.flight import ABANDON, PENDING


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sixteen device pages, sixteen host pages, no storage; a copy is given ten seconds."""
    with opened() as rig:
        yield rig


def unheard(flight: Flight, nodes: list[Node], count: int) -> None:
    """A landing that nobody looks at."""


def flight_with(job: Copy | Future[int], deadline: float | None = None) -> Flight:
    """Three pages to the host."""
    pages = array("q", [0, 1, 2])
    node = Node(None, b"", 0, 0, None)  # type: ignore[arg-type]
    return Flight(Tier.HOST, node, pages, pages, job, unheard, deadline)


# ---------------------------------------------------------------------------------------- progress


def test_a_copy_is_pending_until_it_ends() -> None:
    """A copy arrives whole or not at all: 1 + its pages, or 1."""
    copy = Copy(Tier.HOST, array("q"), array("q"))
    flight = flight_with(copy)
    assert flight.progress(0) == PENDING
    copy.ended = True
    assert flight.progress(0) == 1 + 3
    copy.ended = False
    assert flight.progress(0) == 1


def test_a_copy_is_late_after_its_deadline_and_only_then() -> None:
    """After the deadline a copy that has not ended is to be abandoned, once; one that has is not late."""
    copy = Copy(Tier.HOST, array("q"), array("q"))
    flight = flight_with(copy, deadline=5.0)
    assert [flight.progress(now) for now in (0.0, 5.0, 5.1)] == [PENDING, PENDING, ABANDON]
    flight.abandoned = True
    assert flight.progress(6.0) == PENDING
    copy.ended = True
    assert flight.progress(6.0) == 1 + 3


@pytest.mark.parametrize("arrived", [0, 2, 3])
def test_a_write_arrives_as_far_as_it_says(arrived: int) -> None:
    """A write to storage may arrive in part; one that was cancelled did not at all."""
    job = Future[int]()
    flight = flight_with(job, deadline=5.0)
    assert flight.progress(9.0) == PENDING
    job.set_result(arrived)
    assert flight.progress(9.0) == 1 + arrived
    cancelled = Future[int]()
    cancelled.cancel()
    assert flight_with(cancelled).progress(0) == 1


# ----------------------------------------------------------------------------------------- landing


def test_what_flies_is_held_at_both_ends(rig: Rig) -> None:
    """Until a copy ends its source is not evicted and its target not handed out."""
    rig.put(A)
    assert rig.cache.num_protected == 4
    assert rig.cache.evict(4) == 0
    assert rig.num_free == (12, 12)
    rig.heard()
    rig.land()
    assert rig.cache.num_protected == 0
    assert rig.cache.evict(4) == 4


def test_a_child_waits_for_its_parent(rig: Rig) -> None:
    """What arrived before the pages it follows lands with them, not before."""
    rig.put(A[:8])
    parent = rig.copies.under_way[0]
    rig.put(A)
    child = rig.copies.under_way[1]
    assert len(child.host_pages) == 2
    rig.heard()
    rig.copies.end(child)
    rig.cache.tick()
    assert rig.heard() == []
    assert rig.cache.num_in_flight == 2
    rig.copies.end(parent)
    rig.cache.tick()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


@pytest.mark.parametrize("child_first", [True, False])
def test_a_child_does_not_land_when_its_parent_failed(rig: Rig, child_first: bool) -> None:
    """What followed pages that never came does not land; its host pages are free, and no lock stays."""
    rig.put(A[:8])
    rig.put(A)
    rig.heard()
    parent, child = rig.copies.under_way
    if child_first:
        rig.copies.end(child)
        rig.cache.tick()
        rig.copies.end(parent, arrived=False)
    else:
        rig.copies.end(parent, arrived=False)
        rig.cache.tick()
        rig.copies.end(child)
    rig.cache.tick()
    assert rig.heard() == []
    assert rig.num_free == (12, 16)
    assert (rig.cache.num_protected, rig.cache.num_in_flight) == (0, 0)
    assert rig.cache.stats().failed_flights == 2
    rig.put(A)
    rig.land()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


def test_a_child_does_not_land_when_its_parent_was_abandoned(rig: Rig) -> None:
    """A parent that is given up for lateness takes along a child that arrived in time."""
    rig.put(A[:8])
    rig.put(A)
    rig.heard()
    parent, child = rig.copies.under_way
    rig.copies.end(child)
    rig.now = 10.5
    rig.cache.tick()
    assert rig.heard() == []
    assert rig.num_free == (12, 14)
    rig.copies.end(parent)
    rig.cache.tick()
    assert rig.heard() == []
    assert rig.num_free == (12, 16)


def test_nodes_split_in_flight_are_marked_in_both_parts(rig: Rig) -> None:
    """After a split both parts are on their way, and neither is sent a second time."""
    node = rig.put(A).node
    rig.put(AB)
    assert node.parent is not None and node.parent.moving == node.moving == 1 << Tier.HOST
    rig.put(A)
    assert [len(copy.host_pages) for copy in rig.copies.submitted] == [4, 2]
    rig.heard()
    rig.land()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)", "S(CPU: b3 b4 | a2)"]
    assert node.parent.moving == node.moving == 0


# ---------------------------------------------------------------------------------------- lateness


def test_an_abandoned_backup_keeps_its_host_pages_until_it_ends(rig: Rig) -> None:
    """At the timeout the locks are released; the pages that are still written to come back later."""
    rig.put(A)
    rig.heard()
    rig.now = 10.5
    rig.cache.tick()
    stats = rig.cache.stats()
    assert (stats.failed_flights, stats.abandoned_flights) == (1, 0)
    assert (rig.cache.num_protected, rig.num_free) == (0, (12, 12))
    assert rig.cache.evict(4) == 4
    rig.put(D)
    rig.heard()
    rig.copies.end(rig.copies.submitted[0])
    rig.cache.tick()
    assert rig.heard() == []
    stats = rig.cache.stats()
    assert (stats.failed_flights, stats.abandoned_flights) == (1, 1)
    assert rig.num_free == (13, 13)


def test_an_abandoned_load_back_keeps_its_device_pages_until_it_ends(rig: Rig) -> None:
    """Device pages that a late copy still writes to are given to nobody before it has ended."""
    flight = rig.load_back(rig.on_host(A))
    rig.now = 10.5
    rig.cache.tick()
    assert (flight.done, flight.num_arrived) == (True, 0)
    assert rig.num_free == (12, 12)
    assert rig.cache.allocate(13) is None
    assert rig.heard() == []
    rig.copies.end()
    rig.cache.tick()
    assert rig.num_free == (16, 12)
    assert rig.heard() == []


def test_what_was_abandoned_may_be_sent_again(rig: Rig) -> None:
    """A second copy of the same pages lands, whether the first ends before it or after."""
    rig.put(A)
    rig.now = 10.5
    rig.cache.tick()
    rig.put(A)
    first, second = rig.copies.submitted
    rig.heard()
    rig.copies.end(second)
    rig.cache.tick()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]
    rig.copies.end(first)
    rig.cache.tick()
    assert rig.heard() == []
    assert rig.num_free == (12, 12)


def test_a_copy_in_time_is_not_late(rig: Rig) -> None:
    """A copy that ended before anybody looked lands, however late the tick."""
    rig.put(A)
    rig.copies.end()
    rig.now = 100.0
    rig.cache.tick()
    assert rig.heard()[-1] == "S(CPU: a1 a2 a3 a4 | None)"


# ------------------------------------------------------------------------------------------- many


def test_writes_that_hang_hold_up_no_copies() -> None:
    """However many writes a dead store has under way, copies land, and late ones are given up."""
    store = MemoryStore()
    store.held_up = {"put"}
    with opened(num_pages=400, host_pages=400, store=store, storage_queue_pages=None) as rig:
        rig.copies.prompt = True
        for token in range(1000, 1070):
            rig.put([token] * 4)
            rig.cache.tick()
            rig.cache.tick()
        rig.put(A)
        for _ in range(3):
            rig.cache.tick()
        assert rig.heard()[-1] == "S(CPU: a1 a2 a3 a4 | None)"


def test_many_flights_land_in_order() -> None:
    """More copies than are looked at in one tick arrive within a few, each told once."""
    with opened(num_pages=200, host_pages=200) as rig:
        for token in range(1000, 1150):
            rig.put([token] * 4)
        rig.heard()
        rig.copies.end()
        told = []
        while rig.cache.num_in_flight:
            rig.cache.tick()
            told += rig.heard()
        assert len(told) == 150
