"""Every transition of a page between tiers, and exactly what is told of it, in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from units_rig import AB, AC, A, D, MemoryStore, Rig, keys, opened

from hicache import Tier

F = list(range(500, 564))
"""Sixteen pages: as many as there are."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sixteen device pages, sixteen host pages, no storage."""
    with opened() as rig:
        yield rig


@pytest.fixture(params=[Tier.DISK, Tier.EXTERNAL], ids=["DISK", "EXT"])
def stored(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The same with a store, on either storage tier."""
    with opened(store=MemoryStore(tier=request.param)) as rig:
        yield rig


def medium(rig: Rig) -> str:
    """How the rig's storage tier is spelled here."""
    return {Tier.DISK: "DISK", Tier.EXTERNAL: "EXT"}[rig.store.tier]


# ---------------------------------------------------------------------------------------- inserts


def test_fresh_insert(rig: Rig) -> None:
    """What is new is stored on the GPU, and below a known prefix only what is new."""
    rig.put(A[:8])
    assert rig.heard() == ["S(GPU: a1 a2 | None)"]
    rig.put(A)
    assert rig.heard() == ["S(GPU: a3 a4 | a2)"]


def test_insert_over_the_host(rig: Rig) -> None:
    """Of what lives on the host alone, exactly the pages that are re-created are stored."""
    rig.on_host(A)
    rig.put(A[:12])
    assert rig.heard() == ["S(GPU: a1 a2 a3 | None)"]
    rig.put(A)
    assert rig.heard() == ["S(GPU: a4 | a3)"]


def test_insert_over_device_host_and_nothing(rig: Rig) -> None:
    """What is partly on the device, partly on the host and partly new is stored where it lacks."""
    rig.backed_up(A[:12])
    rig.cache.evict(2)
    assert rig.heard() == ["R(GPU: a3 a2)"]
    rig.put(A)
    assert rig.heard() == ["S(GPU: a2 a3 a4 | a1)"]


def test_insert_that_leaves_a_host_node_in_its_middle(rig: Rig) -> None:
    """A branch out of a node on the host re-creates the shared pages, and no more of the node."""
    rig.on_host(A)
    rig.put(AB)
    assert rig.heard() == ["S(GPU: a1 a2 b3 b4 | None)"]


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.EXTERNAL])
def test_insert_over_storage(tier: Tier) -> None:
    """What only the store has is stored on the GPU like anything else."""
    with opened(store=MemoryStore(A, tier=tier)) as rig:
        rig.heard()
        rig.put(AB)
        assert rig.heard() == ["S(GPU: a1 a2 b3 b4 | None)"]


# ---------------------------------------------------------------------------------------- backups


def test_backup_submitted(rig: Rig) -> None:
    """A copy that was asked for, and one that is under way, are no event."""
    rig.put(A)
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    rig.cache.tick()
    assert [copy.started for copy in rig.copies.under_way] == [True]
    assert rig.heard() == []


def test_backup_failed(rig: Rig) -> None:
    """A copy that failed is no event, and its host pages are free."""
    rig.put(A)
    rig.land(arrived=False)
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    assert rig.num_free == (12, 16)


def test_backup_never_acknowledged(rig: Rig) -> None:
    """A copy that never ends is no event, however long it is waited for."""
    rig.put(A)
    rig.heard()
    for rig.now in range(0, 100, 5):
        rig.cache.tick()
        assert rig.heard() == []
    assert rig.cache.stats().failed_flights == 1


def test_backup_acknowledged(rig: Rig) -> None:
    """A copy is stored on the CPU when the cache has seen that it arrived, and not before."""
    rig.put(A)
    rig.heard()
    rig.cache.tick()
    rig.copies.end()
    assert rig.heard() == []
    rig.cache.tick()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


@pytest.mark.parametrize("branches", [[AB], [AB, AC], [AC, AB]], ids=["2", "2 1", "1 2"])
def test_backup_acknowledged_after_splits(rig: Rig, branches: list[list[int]]) -> None:
    """However often its node was split meanwhile, every fragment is stored, prefix first."""
    rig.put(A)
    (copy,) = rig.copies.submitted
    for branch in branches:
        rig.put(branch)
    rig.heard()
    rig.copies.end(copy)
    rig.cache.tick()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


def test_backup_of_a_branch(rig: Rig) -> None:
    """Below what is on the host already, only the branch is copied and told."""
    rig.backed_up(A)
    rig.put(AB)
    rig.heard()
    rig.land()
    assert rig.heard() == ["S(CPU: b3 b4 | a2)"]


def test_backups_of_parent_and_child_arrive_in_one_tick(rig: Rig) -> None:
    """Copies that arrived out of order are told in order, as one chain."""
    rig.put(A[:8])
    rig.put(A)
    rig.heard()
    first, second = rig.copies.submitted
    rig.copies.end(second)
    rig.cache.tick()
    assert rig.heard() == []
    rig.copies.end(first)
    rig.cache.tick()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


# ---------------------------------------------------------------------------------------- dropping


def test_device_copy_dropped_and_host_copy_kept(rig: Rig) -> None:
    """An eviction of what the host has too is a removal from the GPU, children first."""
    rig.backed_up(A)
    rig.cache.evict(3)
    assert rig.heard() == ["R(GPU: a4 a3 a2)"]
    match = rig.cache.match_prefix(A)
    assert (match.num_pages, match.num_host_pages) == (1, 3)


def test_device_copy_dropped_and_no_other(rig: Rig) -> None:
    """An eviction of what nobody else has is a removal from the GPU, and the node is gone."""
    node = rig.put(A).node
    rig.land(arrived=False)
    rig.heard()
    rig.cache.evict(4)
    assert rig.heard() == ["R(GPU: a4 a3 a2 a1)"]
    assert node not in rig.cache._tree


def test_device_copies_dropped_of_branches(rig: Rig) -> None:
    """Eviction goes from the leaves inwards: a prefix is removed after all that follow it."""
    for prompt in (A, AB, AC):
        rig.backed_up(prompt)
    assert rig.cache.evict(7) == 7
    assert rig.heard() == ["R(GPU: a4 a3 b4 b3 a2 c2 a1)"]


def test_host_copy_dropped() -> None:
    """Room made on the host is a removal from the CPU; the device copy stays."""
    with opened(host_pages=4) as rig:
        rig.backed_up(A)
        rig.put(D)
        assert rig.heard() == ["S(GPU: d1 d2 d3 | None)", "R(CPU: a4 a3 a2)"]
        rig.land()
        assert rig.heard() == ["S(CPU: d1 d2 d3 | None)"]
        assert rig.cache.match_prefix(A).num_pages == 4


def test_host_copies_dropped_of_branches() -> None:
    """On the host too a prefix is removed after all that follow it, and nodes go with the last copy."""
    with opened(host_pages=7) as rig:
        for prompt in (A, AB, AC):
            rig.backed_up(prompt)
        rig.cache.evict(7)
        rig.heard()
        rig.put(F[: 7 * 4])
        assert rig.heard()[1:] == ["R(CPU: a4 a3 b4 b3 a2 c2 a1)"]
        assert len(rig.cache._tree) == 1


# --------------------------------------------------------------------------------------- load back


def test_load_back_acknowledged(rig: Rig) -> None:
    """Submitted it is silent; once it arrived the device copy is usable and stored on the GPU."""
    node = rig.on_host(A)
    rig.cache.lock(node)
    flight = rig.load_back(node)
    rig.cache.tick()
    assert (rig.heard(), flight.done) == ([], False)
    assert rig.cache.match_prefix(A).num_pages == 0
    rig.copies.end()
    rig.cache.tick()
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    assert (flight.done, flight.num_arrived) == (True, 4)
    assert rig.cache.match_prefix(A).num_pages == 4


def test_load_back_acknowledged_after_a_split(rig: Rig) -> None:
    """A node on its way to the device that was split meanwhile arrives in both parts, prefix first."""
    flight = rig.load_back(rig.on_host(A))
    rig.cache.match_prefix(A[:4])
    rig.land()
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    assert flight.num_arrived == 4


def test_load_back_failed(rig: Rig) -> None:
    """A copy to the device that failed is no event, and its pages are free."""
    flight = rig.load_back(rig.on_host(A))
    rig.land(arrived=False)
    assert rig.heard() == []
    assert (flight.done, flight.num_arrived) == (True, 0)
    assert rig.num_free == (16, 12)


def test_load_back_below_what_is_on_the_device(rig: Rig) -> None:
    """Only what the device lacks is copied and told."""
    node = rig.backed_up(A)
    rig.cache.evict(2)
    rig.heard()
    rig.load_back(node)
    rig.land()
    assert rig.heard() == ["S(GPU: a3 a4 | a2)"]


# ---------------------------------------------------------------------------------------- prefetch


def test_prefetch_landed(stored: Rig) -> None:
    """What was fetched is stored on the CPU: exactly the pages that landed."""
    stored.store.fill(A[:12])
    assert stored.fetched(A).num_landed == 3
    assert stored.heard() == ["S(CPU: a1 a2 a3 | None)"]


def test_prefetch_landed_below_a_prefix(stored: Rig) -> None:
    """Below what the host has, only what was fetched is told."""
    stored.backed_up(A[:4])
    stored.store.fill(A)
    assert stored.fetched(A).num_landed == 3
    assert stored.heard() == ["S(CPU: a2 a3 a4 | a1)"]


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.EXTERNAL])
def test_prefetch_of_what_is_known_to_be_stored(tier: Tier) -> None:
    """What the store was told to have is on the CPU too, then; it is not stored there anew."""
    with opened(store=MemoryStore(A, tier=tier)) as rig:
        rig.heard()
        rig.fetched(A)
        assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


def test_prefetch_of_nothing(stored: Rig) -> None:
    """When the store has none of it, nothing is told and nothing kept."""
    assert stored.fetched(A).num_landed == 0
    assert stored.heard() == []
    assert stored.num_free == (16, 16)


# ----------------------------------------------------------------------------------------- storage


def test_write_acknowledged(stored: Rig) -> None:
    """A write to storage is told when the cache has seen that it is over, prefix first."""
    stored.store.held_up = {"put"}
    stored.backed_up(A)
    stored.put(AB)
    stored.heard()
    call = stored.store.call()
    stored.cache.tick()
    assert stored.heard() == []
    call.end()
    assert stored.heard() == []
    stored.cache.tick()
    assert stored.heard() == [f"S({medium(stored)}: a1 a2 a3 a4 | None)"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_write_of_a_prefix_acknowledged(stored: Rig, count: int) -> None:
    """When the store took only some leading pages, exactly those are told."""
    stored.store.put_at_most = count
    stored.put(A)
    stored.land()
    stored.heard()
    stored.cache.tick()
    names = " ".join(f"a{i + 1}" for i in range(count))
    assert stored.heard() == [f"S({medium(stored)}: {names} | None)"] * bool(count)


def test_storage_lost_pages(stored: Rig) -> None:
    """Pages that the store lost are removed, with what is known below them, children first."""
    for prompt in (AC, A, AB):
        stored.backed_up(prompt)
    stored.store.lose(keys(A)[1])
    stored.cache.tick()
    assert stored.heard() == [f"R({medium(stored)}: a4 a3 b4 b3 a2)"]
    stored.store.lose(keys(A)[0], keys(AC)[1])
    stored.cache.tick()
    assert stored.heard() == [f"R({medium(stored)}: c2 a1)"]


def test_storage_lost_the_last_copy(stored: Rig) -> None:
    """What was nowhere else is gone with what the store lost."""
    stored.store.fill(A)
    with opened(store=stored.store) as rig:
        rig.heard()
        rig.store.lose(*keys(A)[2:])
        rig.cache.tick()
        assert rig.heard() == [f"R({medium(rig)}: a4 a3)"]
        rig.store.lose(*keys(A)[:2])
        rig.cache.tick()
        assert rig.heard() == [f"R({medium(rig)}: a2 a1)"]
        assert len(rig.cache._tree) == 0


# ------------------------------------------------------------------------------- start, flush, reset


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.EXTERNAL])
def test_start_with_a_store_that_is_not_empty(tier: Tier) -> None:
    """A clear, then what the store has, parents before children."""
    store = MemoryStore(A, AB, D, tier=tier)
    with opened(store=store) as rig:
        name = medium(rig)
        clear, *stores = rig.heard()
        assert clear == "C"
        either = [f"S({name}: a3 a4 | a2)", f"S({name}: b3 b4 | a2)"]
        first, branch = (told for told in stores if "d1" not in told)
        assert branch in either
        assert first in (f"S({name}: a1 a2 a3 a4 | None)", f"S({name}: a1 a2 b3 b4 | None)")
        assert f"S({name}: d1 d2 d3 | None)" in stores


def test_start_with_an_empty_store(stored: Rig) -> None:
    """There is nothing to tell, and nothing to clear."""
    assert stored.heard() == []


def test_flush(stored: Rig) -> None:
    """A flush of everything, on every tier, is one clear; an external store, which others use too,
    keeps its pages all the same.
    """
    stored.backed_up(A)
    stored.cache.evict(2)
    stored.heard()
    stored.cache.flush()
    assert stored.heard() == ["C"]
    assert stored.num_free == (16, 16)
    kept = set(keys(A)) if stored.store.tier is Tier.EXTERNAL else set()
    assert set(stored.store.pages) == kept


def test_reset_of_the_device(stored: Rig) -> None:
    """A reset of the device alone removes all of it from the GPU, children first, and no more."""
    for prompt in (A, AB, D):
        stored.backed_up(prompt)
    stored.cache.reset_device()
    (told,) = stored.heard()
    assert told.startswith("R(GPU: ") and told.endswith(")")
    order = told[7:-1].split()
    assert sorted(order) == ["a1", "a2", "a3", "a4", "b3", "b4", "d1", "d2", "d3"]
    for child, parent in (("a4", "a3"), ("a3", "a2"), ("b4", "b3"), ("b3", "a2"), ("a2", "a1")):
        assert order.index(child) < order.index(parent)
    assert stored.cache.match_prefix(AB).num_host_pages == 4


# --------------------------------------------------------------------------------------------- none


def test_split_match_touch_lock_and_priority(stored: Rig) -> None:
    """None of these changes what is where, on any tier, and none is told."""
    node = stored.backed_up(A)
    stored.cache.match_prefix(A[:8])
    stored.cache.match_prefix(AB)
    stored.cache.lock(node)
    stored.cache.unlock(node)
    stored.put(A, priority=3)
    stored.cache.load_back(node)
    stored.cache.tick()
    assert stored.heard() == []
    assert node.priority == 3 and node.num_pages == 2
