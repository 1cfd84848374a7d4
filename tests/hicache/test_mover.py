"""Backup, load back and eviction: what is copied, what is not, and what concurs with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from units_rig import AB, AC, A, D, E, MemoryStore, Rig, opened

from hicache import Tier
from kvevents import StorageMedium


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sixteen device pages, sixteen host pages, no storage."""
    with opened() as rig:
        yield rig


# ------------------------------------------------------------------------------------------ backup


def test_only_what_the_host_lacks_is_copied(rig: Rig) -> None:
    """Neither what is there nor what is under way is copied a second time."""
    rig.backed_up(A[:4])
    rig.put(A[:8])
    rig.put(A)
    rig.put(A)
    assert [len(copy.host_pages) for copy in rig.copies.submitted] == [1, 1, 2]


def test_copies_read_no_earlier_than_the_tick(rig: Rig) -> None:
    """What an insert submits begins with the next tick, so that the step's computing comes first."""
    rig.put(A)
    assert not rig.copies.submitted[0].started
    rig.cache.tick()
    assert rig.copies.submitted[0].started


def test_a_host_full_of_locked_pages_takes_no_backup() -> None:
    """Without room on the host there is no copy, no event and no harm; later there is."""
    with opened(host_pages=3) as rig:
        node = rig.backed_up(D)
        rig.cache.lock(node)
        rig.put(A)
        assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
        assert rig.cache.num_in_flight == 0
        rig.cache.unlock(node)
        assert rig.cache.evict(4) == 4
        rig.heard()
        rig.put(AC)
        assert rig.heard()[-1].startswith("R(CPU: d3")
        rig.land()
        assert rig.heard() == ["S(CPU: a1 c2 | None)"]


def test_a_host_full_of_pages_in_flight_takes_no_backup() -> None:
    """Pages that are being copied to are not there to be evicted."""
    with opened(host_pages=4) as rig:
        rig.put(A)
        rig.put(D)
        assert len(rig.copies.submitted) == 1
        rig.heard()
        rig.land()
        assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


def test_of_a_prompt_larger_than_the_host_the_leading_pages_are_backed_up() -> None:
    """As many as there are, and the others are counted."""
    with opened(host_pages=3) as rig:
        rig.backed_up(D)
        rig.put(A)
        assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)", "R(CPU: d3 d2 d1)"]
        rig.land()
        assert rig.heard() == ["S(CPU: a1 a2 a3 | None)"]
        assert rig.cache.stats().without_room == 1


def test_a_prompt_is_backed_up_as_far_as_locks_leave_room() -> None:
    """Also where its nodes have to be split for that, and only once."""
    with opened(host_pages=5) as rig:
        rig.cache.lock(rig.backed_up(D))
        rig.put(A)
        rig.put(A)
        rig.heard()
        rig.land()
        assert rig.heard() == ["S(CPU: a1 a2 | None)"]
        assert rig.cache.stats().without_room == 2 + 2  # each time it was tried


# --------------------------------------------------------------------------------------- load back


def test_two_requests_that_load_back_the_same_share_a_flight(rig: Rig) -> None:
    """The second asks for what is under way, and gets the same flight: nothing is copied twice."""
    node = rig.on_host(A)
    first, second = rig.load_back(node), rig.load_back(node)
    assert first is second
    assert len(rig.copies.under_way) == 1
    rig.land()
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    assert first.done
    assert rig.num_free == (12, 12)


def test_a_shorter_load_back_joins_one_under_way(rig: Rig) -> None:
    """A request that wants the front of what is being loaded waits for the same flight."""
    first = rig.load_back(rig.on_host(A))
    front = rig.cache.match_prefix(A[:8]).host_node
    assert rig.load_back(front) is first
    assert len(rig.copies.under_way) == 1
    rig.land()
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]


def test_a_longer_load_back_brings_the_rest(rig: Rig) -> None:
    """A request that wants more than what is being loaded brings what is missing, in its own flight."""
    end = rig.on_host(A)
    front = rig.cache.match_prefix(A[:8]).host_node
    first, second = rig.load_back(front), rig.load_back(end)
    assert [len(copy.device_pages) for copy in rig.copies.under_way] == [2, 2]
    rig.copies.end(rig.copies.under_way[1])
    rig.cache.tick()
    assert [one.done for one in (first, second)] == [False, False]
    rig.land()
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    assert first.done and second.done


def test_a_longer_load_back_fails_with_the_front(rig: Rig) -> None:
    """When the front did not arrive, what follows it is given up: the device has no hole."""
    end = rig.on_host(A)
    front = rig.cache.match_prefix(A[:8]).host_node
    rig.load_back(front)
    second = rig.load_back(end)
    rig.copies.end(rig.copies.under_way[0], arrived=False)
    rig.land()
    assert rig.heard() == []
    assert (second.done, second.num_arrived) == (True, 0)
    assert rig.num_free == (16, 12)


@pytest.mark.parametrize("prompt", [A, AB, A[:8], [*A, *E]], ids=["all", "branch", "front", "more"])
def test_an_insert_overtakes_a_load_back(rig: Rig, prompt: list[int]) -> None:
    """Pages inserted while they are being loaded stay; the loaded duplicates are free, nothing is told
    twice, and what was not inserted arrives.
    """
    flight = rig.load_back(rig.on_host(A))
    shared = sum(a == b for a, b in zip(A, prompt, strict=False)) // 4
    insertion = rig.put(prompt)
    assert insertion.num_existing == 0
    told = rig.heard()
    assert len(told) == 1 and told[0].startswith("S(GPU: a1 a2")
    own = rig.cache.match_prefix(A).page_indices[:shared]
    free = rig.num_free[0]
    rig.copies.end(rig.copies.submitted[1])
    rig.cache.tick()
    rest = {4: [], 2: ["S(GPU: a3 a4 | a2)"]}[shared]
    assert rig.heard() == rest
    assert (flight.done, flight.num_arrived) == (True, 4)
    match = rig.cache.match_prefix(A)
    assert (match.page_indices[:shared], match.num_pages) == (own, 4)
    assert rig.num_free[0] == free + shared


@pytest.mark.parametrize(
    ("threshold", "num_tokens", "loads"), [(10, 8, False), (10, 12, True), (8, 8, True)]
)
def test_too_few_tokens_are_computed_anew(threshold: int, num_tokens: int, loads: bool) -> None:
    """Below the threshold nothing is copied, reserved or told."""
    with opened(load_back_threshold=threshold) as rig:
        node = rig.on_host(A[:num_tokens])
        assert (rig.cache.load_back(node) is not None) is loads
        assert (rig.num_free[0] == 16) is not loads
        assert rig.heard() == []


def test_too_many_pages_are_refused(rig: Rig) -> None:
    """A request's quota is a bound on the pages that would be copied, those on the device not among
    them.
    """
    node = rig.on_host(A)
    assert rig.cache.load_back(node, max_pages=3) is None
    assert rig.num_free == (16, 12)
    rig.load_back(rig.cache.match_prefix(A[:4]).host_node, max_pages=1)
    rig.land()
    rig.load_back(node, max_pages=3)


def test_what_is_on_the_device_is_not_loaded(rig: Rig) -> None:
    """There is nothing to copy, and nothing to wait for."""
    node = rig.backed_up(A)
    assert rig.cache.load_back(node) is None
    assert rig.cache.load_back(rig.cache.match_prefix(E).node) is None
    assert rig.cache.num_in_flight == 0


def test_a_load_back_makes_room() -> None:
    """It evicts unlocked pages, never those it is about, and not more than it needs."""
    with opened(num_pages=8) as rig:
        node = rig.on_host(A)
        rig.backed_up(D)
        rig.backed_up(E)
        rig.cache.match_prefix(D)
        rig.load_back(node)
        assert rig.heard() == ["R(GPU: e2)"]
        rig.land()
        assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]


def test_a_load_back_without_room_is_refused(rig: Rig) -> None:
    """When the device is locked full nothing is copied, locked, evicted or told."""
    node = rig.on_host(A)
    lent = rig.cache.allocate(13)
    assert rig.cache.load_back(node) is None
    assert rig.heard() == []
    assert rig.cache.num_in_flight == 0
    assert lent is not None
    rig.cache.free(lent)
    rig.load_back(node)


def test_a_node_that_left_device_and_host_cannot_be_held() -> None:
    """Lock and load back refuse what only the store has; nothing changes and nothing is told."""
    with opened(store=MemoryStore(A)) as rig:
        rig.heard()
        (node,) = rig.cache._tree.nodes()
        for verb in (rig.cache.lock, rig.cache.load_back):
            with pytest.raises(ValueError, match="is on neither device nor host any more"):
                verb(node)
        assert rig.heard() == []
        assert rig.cache.match_prefix(A).num_host_pages == 0


def test_a_lock_protects_the_host_copy() -> None:
    """A request that is to load a prefix back keeps it on the host by locking its host node."""
    with opened(host_pages=6) as rig:
        node = rig.on_host(A)
        rig.cache.lock(node)
        rig.put(D)
        assert rig.heard() == ["S(GPU: d1 d2 d3 | None)"]
        rig.cache.unlock(node)
        rig.put(D)
        assert rig.heard() == ["R(CPU: a4)"]


# ---------------------------------------------------------------------------------- flush and reset


def test_a_flush_with_copies_in_flight_loses_nothing_and_tells_nothing_more(rig: Rig) -> None:
    """A clear, and then nothing of what was under way; its pages come back when it ends."""
    host_only = rig.on_host(A)
    rig.load_back(host_only)
    rig.put(D)
    to_device, to_host = rig.copies.under_way
    rig.heard()
    rig.cache.flush()
    assert rig.heard() == ["C"]
    assert rig.num_free == (12, 13)
    rig.copies.end(to_host)
    rig.cache.tick()
    assert rig.num_free == (12, 16)
    rig.put(A)
    rig.copies.end(to_device)
    rig.cache.tick()
    assert rig.num_free[0] == 12
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]


@pytest.mark.parametrize("arrived", [True, False])
def test_a_reset_of_the_device_with_copies_in_flight(rig: Rig, arrived: bool) -> None:
    """Copies to and from the device come to nothing; what the host had stays, and is told nothing of."""
    flight = rig.load_back(rig.on_host(A))
    rig.put(D)
    rig.heard()
    rig.cache.reset_device()
    assert rig.heard() == ["R(GPU: d3 d2 d1)"]
    assert flight.done
    rig.land(arrived=arrived)
    assert rig.heard() == []
    assert rig.num_free == (16, 12)
    assert rig.cache.match_prefix(A).num_host_pages == 4


# ------------------------------------------------------------------------------------------ counts


def test_failed_flights_are_counted(rig: Rig) -> None:
    """Copies that did not arrive count, once each; those that did do not."""
    rig.put(A)
    rig.land(arrived=False)
    rig.put(A)
    rig.land()
    stats = rig.cache.stats()
    assert (stats.failed_flights, stats.abandoned_flights) == (1, 0)
    assert (stats.resident[StorageMedium.CPU], stats.stored[StorageMedium.CPU]) == (4, 4)
    assert stats.dropped[StorageMedium.GPU] == 0
    assert stats.storage is None


def test_settling_lands_all_that_is_under_way(rig: Rig) -> None:
    """It ticks until nothing flies, and says so when that takes too long."""
    rig.put(A)
    assert not rig.cache.settle(0.0)
    rig.copies.prompt = True
    assert rig.cache.settle(30.0)
    assert rig.heard()[-1] == "S(CPU: a1 a2 a3 a4 | None)"


def test_pages_of_each_tier_can_be_looked_up(rig: Rig) -> None:
    """Device and host name the page of each block they have."""
    rig.backed_up(A)
    rig.cache.evict(1)
    device, host = (rig.cache.resident_pages(tier) for tier in (Tier.DEVICE, Tier.HOST))
    assert (len(device), len(host)) == (3, 4)
    assert list(device) == list(host)[:3]
