"""What the cache writes to a store, what it knows to be there, and what it stops believing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from units_rig import AB, AC, A, D, E, MemoryStore, Rig, keys, opened, stored_pages

from hicache import HiRadixCache, HostPool, KVShape, PagePool, Tier
from hicache.storage.backend import StoredPage
from kvevents import BASE, Namespace, pack_tokens
from kvevents.hashing import block_digests, namespace_seed, page_key


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sixteen device pages, sixteen host pages, and a store that takes everything at once."""
    with opened(store=MemoryStore()) as rig:
        yield rig


@pytest.fixture
def slow() -> Iterator[Rig]:
    """The same with a store whose writes end when the test says so."""
    store = MemoryStore()
    store.held_up = {"put"}
    with opened(store=store) as rig:
        yield rig


def written(rig: Rig) -> list[int]:
    """Pages of each write so far."""
    return [len(pages) for pages in rig.store.puts]


# ----------------------------------------------------------------------------------------- writing


def test_what_arrived_on_the_host_is_written_once(rig: Rig) -> None:
    """A backup that arrived is written whole, under the keys of its pages, and never again."""
    rig.backed_up(A)
    assert rig.store.puts == [keys(A)]
    rig.put(A)
    rig.cache.tick()
    assert written(rig) == [4]


def test_a_branch_is_written_below_what_is_stored(rig: Rig) -> None:
    """Of a prompt whose front is stored already, or on its way, only the rest is written."""
    rig.backed_up(A)
    rig.backed_up(AB)
    assert rig.store.puts[1] == keys(AB)[2:]
    assert rig.store.pages[keys(AB)[2]].parent == keys(A)[1]


def test_pages_are_written_with_all_that_names_them(rig: Rig) -> None:
    """The store gets each page's tokens, parent and namespace, parents first, and its bytes."""
    rig.backed_up(AB)
    assert rig.store.held() == stored_pages(AB)
    filled = MemoryStore(AB)
    assert rig.store.bytes_of == filled.bytes_of


def test_namespaces_do_not_share_pages(rig: Rig) -> None:
    """Equal tokens under adapter, salt and key are written under different keys."""
    for name in (BASE, Namespace("x"), Namespace(cache_salt="x"), Namespace(extra_key="x")):
        rig.put(A[:4], name)
    rig.land()
    rig.cache.tick()
    assert len(rig.store.pages) == 4


def test_a_write_holds_its_host_pages_and_not_the_device(slow: Rig) -> None:
    """While it is read the host copy stays; the device copy may go."""
    slow.backed_up(A)
    assert slow.cache.evict(4) == 4
    assert slow.heard() == ["R(GPU: a4 a3 a2 a1)"]
    assert slow.cache._tiered.num_evictable(Tier.HOST) == 0
    slow.store.call().end()
    slow.cache.tick()
    assert slow.cache._tiered.num_evictable(Tier.HOST) == 4
    assert slow.heard() == ["S(DISK: a1 a2 a3 a4 | None)"]


def test_pages_on_their_way_are_bounded() -> None:
    """With as many pages on their way as allowed nothing more is sent until some have arrived."""
    store = MemoryStore()
    store.held_up = {"put"}
    with opened(store=store, storage_queue_pages=3) as rig:
        rig.backed_up(A)
        rig.backed_up(D)
        assert written(rig) == [4]
        assert rig.cache.num_in_flight == 2
        rig.store.call().end()
        rig.cache.tick()
        assert written(rig) == [4, 3]


def test_what_waits_for_a_store_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 25: the first to wait are given up, and counted; the next use asks again."""
    monkeypatch.setattr("hicache.storage_tier._MOST_WAITING", 2)
    store = MemoryStore()
    store.held_up = {"put"}
    with opened(store=store, storage_queue_pages=1) as rig:
        for first in range(0, 24, 4):
            rig.backed_up(range(first, first + 4))
        storage = rig.cache._storage
        assert storage is not None
        assert (storage.num_waiting, rig.cache.stats().missed_writes) == (2, 3)


def test_pages_on_their_way_are_a_quarter_of_the_host_by_default() -> None:
    """Without a setting a slow store holds at most a quarter of the host pool, but for one path."""
    store = MemoryStore()
    store.held_up = {"put"}
    with opened(store=store, storage_queue_pages=None) as rig:
        for prompt in (D, E, A):
            rig.backed_up(prompt)
        assert written(rig) == [3, 2]


def test_what_left_the_host_before_it_was_written_is_not() -> None:
    """Of a path that waits, what is evicted meanwhile is forgotten, and its prefix is written."""
    store = MemoryStore()
    store.held_up = {"put"}
    with opened(host_pages=7, store=store, storage_queue_pages=1) as rig:
        rig.backed_up(D)
        rig.backed_up(A)
        assert written(rig) == [3]
        rig.put(E)
        rig.land()
        rig.heard()
        rig.store.call().end()
        rig.cache.tick()
        assert rig.heard() == ["S(DISK: d1 d2 d3 | None)"]
        assert rig.store.puts[1:] == [keys(A)[:2]]


def test_a_child_written_before_its_parent_arrived_waits_for_it(slow: Rig) -> None:
    """Writes that end out of order are told in order."""
    slow.backed_up(A[:8])
    slow.backed_up(A)
    parent, child = slow.store.call(), slow.store.call()
    child.end()
    slow.cache.tick()
    assert slow.heard() == []
    parent.end()
    slow.cache.tick()
    assert slow.heard() == ["S(DISK: a1 a2 a3 a4 | None)"]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_write_that_was_persisted_in_part(slow: Rig, count: int) -> None:
    """Exactly the leading pages are known, whatever was split since, and nothing below the hole."""
    slow.backed_up(A)
    slow.put([*A, *E])
    slow.land()
    slow.cache.match_prefix(A[:8])
    slow.heard()
    first, second = slow.store.call(), slow.store.call()
    first.end(count)
    second.end()
    slow.cache.tick()
    names = " ".join(f"a{i + 1}" for i in range(count))
    assert slow.heard() == [f"S(DISK: {names} | None)"] * bool(count)
    assert slow.cache.stats().failed_flights == 2


def test_a_store_that_fails_is_given_a_rest(rig: Rig) -> None:
    """After a write that fell short none is sent for a while; what is used then is written after all."""
    rig.store.put_at_most = 2
    rig.backed_up(A)
    rig.store.put_at_most = None
    rig.put(A)
    for _ in range(98):
        rig.cache.tick()
    assert written(rig) == [4]
    assert rig.cache.num_in_flight == 0
    rig.cache.tick()
    rig.cache.tick()
    assert written(rig) == [4, 2]
    assert rig.heard() == ["S(DISK: a3 a4 | a2)"]


def test_a_closed_store_fails_its_writes(slow: Rig) -> None:
    """A write that the store's end cancelled did not arrive; the cache goes on, and nothing is stuck."""
    slow.backed_up(A)
    slow.cache.close()
    slow.cache.tick()
    slow.put(D)
    slow.land()
    slow.cache.tick()
    assert slow.heard()[-1] == "S(CPU: d1 d2 d3 | None)"
    assert slow.cache.num_in_flight == 0
    assert slow.cache._tiered.num_evictable(Tier.HOST) == 7


# ------------------------------------------------------------------------------------------ losing


def test_a_page_lost_while_its_write_is_in_flight_is_not_announced(slow: Rig) -> None:
    """What the store gave up again before the cache knew of it is never told, nor what follows it."""
    slow.backed_up(A)
    slow.store.call().end()
    slow.store.lose(keys(A)[2])
    slow.cache.tick()
    assert slow.heard() == ["S(DISK: a1 a2 | None)"]


def test_a_page_lost_before_its_write_has_ended_is_not_announced(slow: Rig) -> None:
    """The same when the loss is heard of some ticks before the write is over."""
    slow.backed_up(A)
    call = slow.store.call()
    slow.store.fill(A[:4])
    slow.store.lose(keys(A)[0])
    slow.cache.tick()
    slow.cache.tick()
    call.end()
    slow.cache.tick()
    assert slow.heard() == []


def test_a_loss_is_forgotten_when_nothing_is_in_flight(slow: Rig) -> None:
    """A page that was lost once and is written anew later is announced."""
    slow.backed_up(A)
    slow.store.call().end()
    slow.store.lose(*keys(A))
    slow.cache.tick()
    assert slow.heard() == []
    slow.put(A)
    slow.cache.tick()
    slow.store.call().end()
    slow.cache.tick()
    assert slow.heard() == ["S(DISK: a1 a2 a3 a4 | None)"]


def test_a_lost_page_takes_along_what_is_below_it(rig: Rig) -> None:
    """Inside a node the front stays; whatever follows the hole is retracted, on every branch."""
    for prompt in (A, AB, AC):
        rig.backed_up(prompt)
    rig.store.lose(keys(AB)[3])
    rig.cache.tick()
    assert rig.heard() == ["R(DISK: b4)"]
    rig.store.lose(keys(A)[0])
    rig.cache.tick()
    (told,) = rig.heard()
    assert told.startswith("R(DISK: ") and told.endswith(" a1)")
    assert sorted(told[8:-1].split()) == ["a1", "a2", "a3", "a4", "b3", "c2"]
    assert rig.cache.match_prefix(A).num_pages == 4


def test_what_follows_a_lost_page_is_written_again(rig: Rig) -> None:
    """The next use writes the lost page, and what the store still has below it counts as stored."""
    rig.backed_up(A)
    rig.store.lose(keys(A)[1])
    rig.cache.tick()
    assert rig.heard() == ["R(DISK: a4 a3 a2)"]
    rig.put(A)
    rig.cache.tick()
    rig.cache.tick()
    assert rig.heard() == ["S(DISK: a2 a3 a4 | a1)"]


def test_a_parent_lost_while_its_child_is_being_written(slow: Rig) -> None:
    """A child that arrives below a page lost meanwhile is not announced."""
    slow.backed_up(A[:8])
    slow.store.call().end()
    slow.cache.tick()
    slow.backed_up(A)
    child = slow.store.call()
    slow.store.lose(keys(A)[0])
    slow.cache.tick()
    assert slow.heard() == ["R(DISK: a2 a1)"]
    child.end()
    slow.cache.tick()
    assert slow.heard() == []


def test_keys_that_nobody_knows_may_be_lost(rig: Rig) -> None:
    """A loss of what the cache never believed in is nothing."""
    rig.backed_up(A)
    rig.store.fill(D)
    rig.store.lose(*keys(D))
    rig.cache.tick()
    assert rig.heard() == []


# ------------------------------------------------------------------------------------------ audits


def test_a_store_that_wants_it_is_audited_at_its_interval() -> None:
    """All that is believed stored is looked at, again and again, no sooner than asked for."""
    store = MemoryStore(A)
    store.audit_interval_s = 5.0
    with opened(store=store) as rig:
        rig.heard()
        for rig.now in range(31):
            rig.cache.tick()
        assert store.audited == keys(A) * 6


def test_an_audit_leaves_out_no_page() -> None:
    """A store of more pages than are looked at in one go is looked at in full."""
    store = MemoryStore(range(4 * 600))
    store.audit_interval_s = 1.0
    with opened(store=store) as rig:
        for rig.now in range(4):
            rig.cache.tick()
        assert set(store.audited) == set(store.pages)
        assert len(store.audited) == 600


def test_what_an_audit_misses_is_retracted() -> None:
    """A page that went without a word is found out by looking, and removed with what follows it."""
    store = MemoryStore(A)
    store.audit_interval_s = 1.0
    with opened(store=store) as rig:
        rig.heard()
        store.lose(keys(A)[2], silently=True)
        for rig.now in range(4):
            rig.cache.tick()
        assert rig.heard() == ["R(DISK: a4 a3)"]


def test_a_store_that_does_not_want_it_is_not_audited(rig: Rig) -> None:
    """Without an interval nobody looks."""
    rig.backed_up(A)
    for rig.now in range(0, 1000, 100):
        rig.cache.tick()
    assert rig.store.audited == []


# ------------------------------------------------------------------------------------------- start


def test_a_store_restores_branches_and_namespaces() -> None:
    """What is restored is found by its tokens on the storage tier, in as few nodes as there can be."""
    with opened(store=MemoryStore(A, AB, D)) as rig:
        assert rig.heard()[0] == "C"
        assert sorted(node.num_pages for node in rig.cache._tree.nodes()) == [2, 2, 2, 3]
        match = rig.cache.match_prefix(A)
        assert (match.num_pages, match.num_host_pages) == (0, 0)


def wrong_tokens(page: StoredPage) -> StoredPage:
    return page._replace(tokens=b"\1" * 16)


def short_tokens(page: StoredPage) -> StoredPage:
    return page._replace(tokens=page.tokens[:8])


def no_tokens(page: StoredPage) -> StoredPage:
    return page._replace(tokens=b"")


@pytest.mark.parametrize("spoil", [wrong_tokens, short_tokens, no_tokens])
def test_a_page_whose_key_is_not_that_of_its_tokens_is_deleted(spoil: Any) -> None:
    """A foreign page is not believed in, nor is what follows it, and the store is rid of it."""
    store = MemoryStore(AC, D)
    key = keys(AC)[1]
    store.pages[key] = spoil(store.pages[key])
    with opened(store=store) as rig:
        assert sorted(rig.heard()) == ["C", "S(DISK: a1 | None)", "S(DISK: d1 d2 d3 | None)"]
        assert key not in store.pages
        assert {keys(AC)[0], *keys(D)} <= set(store.pages)


def test_a_page_below_one_of_another_namespace_is_deleted() -> None:
    """Its key is that of its tokens, but in the tree an adapter's page would be the base model's."""
    store, adapter = MemoryStore(A[:4]), Namespace(lora_name="adapter")
    digests = list(block_digests(b"", pack_tokens(A[:8]), 4))
    key = page_key(digests[1], namespace_seed(adapter))
    store.pages[key] = StoredPage(key, keys(A[:4])[0], adapter, bytes(pack_tokens(A[4:8])))
    with opened(store=store) as rig:
        assert rig.heard() == ["C", "S(DISK: a1 | None)"]
        assert list(store.pages) == keys(A[:4])


def test_a_page_without_its_parent_is_not_restored() -> None:
    """What follows a hole is of no use to anybody, and not told."""
    store = MemoryStore(A, D)
    del store.pages[keys(A)[1]]
    with opened(store=store) as rig:
        assert sorted(rig.heard()) == ["C", "S(DISK: a1 | None)", "S(DISK: d1 d2 d3 | None)"]


# ------------------------------------------------------------------------------------------- flush


def test_a_flush_deletes_what_is_known_and_what_may_be_there(slow: Rig) -> None:
    """The store is left with nothing of this cache, not even of writes that were under way."""
    slow.backed_up(D)
    slow.store.call().end()
    slow.cache.tick()
    slow.backed_up(A)
    slow.heard()
    slow.cache.flush()
    assert slow.store.pages == {}
    assert slow.heard() == ["C"]
    slow.cache.tick()
    assert slow.heard() == []
    assert slow.num_free == (16, 16)


def test_a_flush_does_not_give_away_host_pages_that_are_being_read() -> None:
    """Until a write has ended its host pages hold what it reads; then they are free."""
    store = MemoryStore()
    store.held_up = {"put"}
    with opened(store=store) as rig:
        rig.backed_up(A)
        call = rig.store.call()
        rig.cache.flush()
        assert rig.num_free == (16, 12)
        rig.backed_up(range(500, 548))
        assert rig.num_free == (4, 0)
        call.end()
        assert store.bytes_of == MemoryStore(A).bytes_of
        rig.cache.tick()
        assert rig.num_free == (4, 4)
        assert rig.heard() == []


def test_pages_of_a_write_that_fell_short_are_deleted_with_a_flush(slow: Rig) -> None:
    """Pages that were stored below a hole are not known to be there, and go all the same."""
    slow.backed_up(A[:8])
    slow.backed_up(A)
    parent, child = slow.store.call(), slow.store.call()
    parent.end(0)
    child.end()
    slow.cache.tick()
    assert set(slow.store.pages) == set(keys(A)[2:])
    slow.cache.flush()
    assert slow.store.pages == {}


def test_what_an_external_store_keeps_over_a_flush_is_told_when_it_is_written_again() -> None:
    """After the clear nobody believes in it, and its loss is nothing, until it is put again."""
    with opened(store=MemoryStore(tier=Tier.EXTERNAL)) as rig:
        rig.backed_up(A)
        rig.cache.flush()
        assert rig.heard() == ["C"]
        rig.store.lose(keys(A)[3])
        rig.cache.tick()
        assert rig.heard() == []
        rig.put(A)
        rig.land()
        rig.heard()
        rig.cache.tick()
        assert rig.heard() == ["S(EXT: a1 a2 a3 a4 | None)"]


def test_after_a_flush_everything_is_written_anew(rig: Rig) -> None:
    """What the flush deleted is stored again, and told again."""
    rig.backed_up(A)
    rig.cache.flush()
    assert rig.heard() == ["C"]
    rig.put(A)
    rig.land()
    rig.heard()
    rig.cache.tick()
    assert rig.heard() == ["S(DISK: a1 a2 a3 a4 | None)"]


# ----------------------------------------------------------------------------------- what is refused


def test_storage_needs_a_host_pool() -> None:
    """A store without a host tier to read from raises ValueError naming what is missing."""
    with pytest.raises(ValueError, match="storage: needs a host_pool to read from and write to"):
        HiRadixCache(PagePool(4, 4, KVShape(1, 1, 1)), storage=MemoryStore())


@pytest.mark.parametrize(
    ("page_size", "shape", "message"),
    [
        (8, KVShape(1, 1, 1), "host_pool: page_size 8, the device pool has 4"),
        (4, KVShape(1, 2, 1), "host_pool: shape KVShape.*, the device pool has KVShape"),
    ],
)
def test_pools_must_fit_each_other(page_size: int, shape: KVShape, message: str) -> None:
    """A host pool of another page size or shape raises ValueError with both."""
    with pytest.raises(ValueError, match=message):
        HiRadixCache(PagePool(4, 4, KVShape(1, 1, 1)), host_pool=HostPool(4, page_size, shape))
