"""Prefetch: what is fetched, when a request stops waiting, and whose the host pages are meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from units_rig import AB, TIMEOUT_S, A, Call, D, E, MemoryStore, Rig, keys, opened

from hicache import Prefetch
from kvevents import Namespace


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A prefetch waits for its pages; the store has nothing yet, and answers at once."""
    with opened(store=MemoryStore()) as rig:
        yield rig


def slow(*held_up: str, **config: Any) -> Rig:
    """A rig whose store has A, unknown to the cache, and whose named calls wait for the test."""
    store = MemoryStore()
    rig = Rig(store=store, **config)
    store.fill(A)
    store.held_up = set(held_up)
    return rig


def reading(rig: Rig, prefetch: Prefetch) -> Call:
    """The look-up is over, and the store is being read: the call that reads."""
    rig.step(prefetch)
    return rig.store.call()


# ------------------------------------------------------------------------------------ what is fetched


def test_what_the_store_has_lands_on_the_host(rig: Rig) -> None:
    """As far as the store has the prompt, its pages are on the host, right to the byte, to load back."""
    rig.store.fill(A)
    prefetch = rig.fetched([*A, *E])
    assert (prefetch.num_pages, prefetch.num_landed) == (6, 4)
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]
    match = rig.cache.match_prefix([*A, *E])
    assert match.num_host_pages == 4
    rig.load_back(match.host_node)
    rig.land()
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]


def test_only_what_no_tier_has_is_asked_for(rig: Rig) -> None:
    """Pages on device or host are not fetched; a tail that fills no page is not either."""
    rig.backed_up(A)
    rig.cache.evict(2)
    rig.heard()
    rig.store.fill(A)
    prefetch = rig.prefetch([*A, *E, 1, 2])
    assert prefetch.num_pages == 2
    assert rig.cache.prefetch(A) is None
    assert rig.cache.prefetch(A[:3]) is None
    rig.cache.cancel_prefetch(prefetch)


def test_namespaces_are_fetched_apart(rig: Rig) -> None:
    """Pages stored under no namespace are not found under another."""
    rig.store.fill(A)
    prefetch = rig.cache.prefetch(A, Namespace(lora_name="x"))
    assert prefetch is not None
    for _ in range(3):
        rig.step(prefetch)
    assert prefetch.num_landed == 0


@pytest.mark.parametrize(("threshold", "asks"), [(16, True), (17, False)])
def test_too_few_tokens_are_not_asked_for(threshold: int, asks: bool) -> None:
    """Below the threshold the store is left alone."""
    with opened(store=MemoryStore(), prefetch_threshold=threshold) as rig:
        prefetch = rig.cache.prefetch(A)
        assert (prefetch is not None) is asks


def test_what_lands_below_an_insert_of_meanwhile_has_its_own_keys() -> None:
    """Only the end of what was fetched is a new node; its pages go by their names to the store, not by
    those of the front: others would be given their bytes.
    """
    rig = slow("get", write_policy="write_back")
    prefetch = rig.prefetch(A)
    call = reading(rig, prefetch)
    rig.put(A[:8])
    call.end()
    rig.step(prefetch)
    assert prefetch.num_landed == 4
    storage, nodes = rig.cache._storage, rig.cache._tree.nodes()
    assert storage is not None
    assert [key for node in nodes for key in storage.keys(node)] == keys(A)
    rig.close()


def test_a_prefix_on_the_device_alone_is_backed_up_first() -> None:
    """What is fetched lands below its prefix, once that is on the host too: parents first."""
    with opened(store=MemoryStore(), write_policy="write_back") as rig:
        rig.put(A[:8])
        rig.store.fill(A)
        rig.heard()
        prefetch = rig.prefetch(A)
        for _ in range(3):
            rig.step(prefetch)
        assert not rig.cache.prefetch_done(prefetch)
        assert rig.heard() == []
        rig.copies.end()
        rig.cache.tick()
        assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]
        assert rig.cache.prefetch_done(prefetch)
        assert prefetch.num_landed == 2


@pytest.mark.parametrize("late", [True, False])
def test_a_prefix_that_does_not_arrive_takes_the_prefetch_along(late: bool) -> None:
    """When the prefix cannot be copied, nothing lands, and every page comes back."""
    with opened(store=MemoryStore(), write_policy="write_back") as rig:
        rig.put(A[:8])
        rig.store.fill(A)
        rig.heard()
        prefetch = rig.prefetch(A)
        for _ in range(3):
            rig.step(prefetch)
        if late:
            rig.now = 100.0
        else:
            rig.copies.end(arrived=False)
        rig.cache.tick()
        rig.cache.tick()
        assert rig.cache.prefetch_done(prefetch)
        assert rig.heard() == []
        assert prefetch.num_landed == 0
        assert rig.num_free == (14, 14 if late else 16)


def test_pages_that_came_by_an_insert_meanwhile_stay() -> None:
    """What a request computed and backed up while it was fetched is not stored a second time."""
    rig = slow("get")
    prefetch = rig.prefetch(A)
    call = reading(rig, prefetch)
    rig.backed_up(A[:8])
    call.end()
    rig.step(prefetch)
    assert rig.heard() == ["S(CPU: a3 a4 | a2)"]
    assert prefetch.num_landed == 2
    assert rig.num_free == (14, 12)
    rig.close()


def test_pages_that_came_to_the_device_meanwhile_get_their_host_copy() -> None:
    """Device pages inserted meanwhile are split and given the fetched host copy; a backup of theirs that
    arrives later is a duplicate.
    """
    rig = slow("get")
    prefetch = rig.prefetch(A[:12])
    call = reading(rig, prefetch)
    rig.put(AB)
    rig.heard()
    call.end()
    rig.step(prefetch)
    assert rig.heard() == ["S(CPU: a1 a2 a3 | None)"]
    rig.land()
    assert rig.heard() == ["S(CPU: b3 b4 | a2)"]
    rig.cache.tick()
    assert rig.num_free == (12, 16 - 5)
    rig.close()


def test_two_prefetches_of_the_same_land_once() -> None:
    """The second finds what the first brought, and gives its own pages back."""
    rig = slow("get")
    first, second = rig.prefetch(A), rig.prefetch(A)
    for prefetch in (first, second):
        prefetch.job.result(TIMEOUT_S)
    rig.cache.tick()
    for prefetch in (first, second):
        rig.store.call().end()
        rig.step(prefetch)
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]
    assert (first.num_landed, second.num_landed) == (4, 0)
    assert rig.num_free == (16, 12)
    rig.close()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_read_that_falls_short_lands_what_it_read(count: int) -> None:
    """Pages that turned out to be gone are free, and what follows them does not land."""
    rig = slow("get")
    prefetch = rig.prefetch(A)
    reading(rig, prefetch).end(count)
    rig.step(prefetch)
    names = " ".join(f"a{i + 1}" for i in range(count))
    assert rig.heard() == [f"S(CPU: {names} | None)"] * bool(count)
    assert rig.num_free == (16, 16 - count)
    rig.close()


def test_what_a_read_finds_lost_is_retracted() -> None:
    """A store that finds out in `get` what it lost says so, and nobody believes in it any more."""
    with opened(store=MemoryStore(A)) as rig:
        rig.heard()
        rig.store.held_up = {"get"}
        prefetch = rig.prefetch(A)
        call = reading(rig, prefetch)
        rig.store.lose(*keys(A)[2:])
        call.end()
        rig.step(prefetch)
        assert rig.heard() == ["S(CPU: a1 a2 | None)", "R(DISK: a4 a3)"]


# ------------------------------------------------------------------------------------------ policies


def test_wait_complete_waits() -> None:
    """However long it takes, the request waits until all is there."""
    rig = slow("exists_prefix", "get")
    prefetch = rig.prefetch(A)
    for rig.now in (0.0, 1e9):
        assert not rig.cache.prefetch_done(prefetch)
    rig.store.call().end()
    rig.step(prefetch)
    assert not rig.cache.prefetch_done(prefetch)
    rig.store.call().end()
    rig.step(prefetch)
    assert rig.cache.prefetch_done(prefetch)
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]
    rig.close()


def test_best_effort_does_not_wait() -> None:
    """Asked before anything is there the request goes on without; what comes later does not land."""
    rig = slow("exists_prefix", prefetch_policy="best_effort")
    prefetch = rig.prefetch(A)
    call = rig.store.call()
    assert rig.cache.prefetch_done(prefetch)
    assert rig.cache.num_in_flight == 1
    call.end()
    rig.step(prefetch)
    assert rig.cache.num_in_flight == 0
    assert rig.heard() == []
    assert rig.num_free == (16, 16)
    rig.close()


def test_best_effort_takes_what_is_there() -> None:
    """The pages read so far land when the request asks; the rest come back when nobody writes them."""
    tokens = list(range(4 * 70))
    store = MemoryStore()
    with opened(host_pages=140, store=store, prefetch_policy="best_effort") as rig:
        store.fill(tokens)
        store.held_up = {"get"}
        prefetch = rig.prefetch(tokens)
        rig.step(prefetch)
        store.call().end()
        second = store.call()
        assert rig.cache.prefetch_done(prefetch)
        assert prefetch.num_landed == 64
        assert [told[:6] for told in rig.heard()] == ["S(CPU:"]
        assert rig.num_free[1] == 140 - 70
        second.end()
        rig.step(prefetch)
        assert rig.num_free[1] == 140 - 64
        assert rig.heard() == []


def test_timeout_waits_until_its_deadline() -> None:
    """The request waits longer for more tokens, and then goes on with what is there."""
    config = {"prefetch_timeout_base_s": 2.0, "prefetch_timeout_per_ki_token_s": 64.0}
    rig = slow("get", prefetch_policy="timeout", **config)
    prefetch = rig.prefetch(A)
    call = reading(rig, prefetch)
    for rig.now in (0.0, 2.0, 3.0):
        assert not rig.cache.prefetch_done(prefetch)
    rig.now = 3.01
    assert rig.cache.prefetch_done(prefetch)
    call.end()
    rig.step(prefetch)
    assert rig.heard() == []
    assert rig.num_free == (16, 16)
    rig.close()


# ------------------------------------------------------------------------------------------- cancel


STAGES = ["looking", "found", "reading", "read", "landed"]


def brought_to(stage: str, rig: Rig, prefetch: Prefetch) -> Call | None:
    """Go on up to `stage`; the call that the prefetch then waits for, if any."""
    place = STAGES.index(stage)
    call = rig.store.call()
    if place > 0:
        call.end()
        prefetch.job.result(TIMEOUT_S)
    if place > 1:
        rig.cache.tick()
        call = rig.store.call()
    if place > 2:
        call.end()
        prefetch.job.result(TIMEOUT_S)
    if place > 3:
        rig.cache.tick()
    return call if stage in ("looking", "reading") else None


@pytest.mark.parametrize("flush", [True, False], ids=["flush", "cancel"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_prefetch_is_cancelled_at_any_time(stage: str, flush: bool) -> None:
    """Whatever it is doing, nothing lands any more, its pages come back when nobody writes to them, and
    to cancel it again is nothing.
    """
    rig = slow("exists_prefix", "get")
    prefetch = rig.prefetch(A)
    call = brought_to(stage, rig, prefetch)
    landed = stage == "landed"
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"] * landed
    if flush:
        rig.cache.flush()
    else:
        rig.cache.cancel_prefetch(prefetch)
    rig.cache.cancel_prefetch(prefetch)
    assert rig.cache.prefetch_done(prefetch)
    assert rig.heard() == ["C"] * flush
    if call is not None:
        call.end()
    rig.step(prefetch)
    assert rig.heard() == []
    assert rig.cache.num_in_flight == 0
    assert rig.num_free == (16, 12 if landed and not flush else 16)
    rig.close()


def test_pages_of_a_cancelled_prefetch_are_not_reused_while_they_are_written() -> None:
    """Until its read has ended the pages are nobody's; a backup meanwhile gets others."""
    rig = slow("get")
    prefetch = rig.prefetch(A)
    call = reading(rig, prefetch)
    rig.cache.cancel_prefetch(prefetch)
    assert rig.num_free == (16, 12)
    rig.backed_up(range(500, 548))
    assert rig.num_free == (4, 0)
    call.end()
    assert rig.heard() == []
    rig.step(prefetch)
    assert rig.num_free == (4, 4)
    assert rig.heard() == []
    rig.close()


def test_a_reset_of_the_device_cancels_prefetches() -> None:
    """Their prefix goes; nothing lands, and nothing is kept."""
    with opened(store=MemoryStore(), write_policy="write_back") as rig:
        rig.put(A[:8])
        rig.store.fill(A)
        rig.store.held_up = {"get"}
        prefetch = rig.prefetch(A)
        call = reading(rig, prefetch)
        rig.heard()
        rig.cache.reset_device()
        assert rig.heard() == ["R(GPU: a2 a1)"]
        call.end()
        rig.step(prefetch)
        rig.land()
        assert rig.heard() == []
        assert rig.num_free == (16, 16)


def test_a_prefetch_holds_its_prefix() -> None:
    """Until it is over the prefix that it follows is not evicted; then it may be."""
    rig = slow("get")
    rig.backed_up(A[:8])
    prefetch = rig.prefetch(A)
    call = reading(rig, prefetch)
    assert rig.cache.evict(2) == 0
    rig.cache.cancel_prefetch(prefetch)
    assert rig.cache.evict(2) == 2
    call.end()
    rig.close()


# ------------------------------------------------------------------------------------------- limits


def test_prefetches_together_are_bounded() -> None:
    """While others want or have as many pages as allowed, another is refused; later it is not."""
    rig = slow("exists_prefix", prefetch_max_pages=6)
    first = rig.prefetch(A)
    call = rig.store.call()
    assert rig.cache.prefetch(D) is None
    second = rig.prefetch(E)
    rig.cache.cancel_prefetch(first)
    assert rig.cache.prefetch(D) is None
    call.end()
    rig.step(first)
    rig.prefetch(D)
    rig.cache.cancel_prefetch(second)
    rig.close()


def test_a_prompt_over_the_limit_is_fetched_up_to_it() -> None:
    """Alone, a prompt of more pages than allowed brings as many as are."""
    rig = slow(prefetch_max_pages=3)
    assert rig.fetched(A).num_landed == 3
    assert rig.heard() == ["S(CPU: a1 a2 a3 | None)"]
    assert rig.fetched(A).num_landed == 1
    rig.close()


def test_prefetches_take_half_of_the_host_by_default() -> None:
    """Without a setting half of the host's pages are the limit."""
    with opened(host_pages=6, store=MemoryStore()) as rig:
        rig.store.fill(A)
        assert rig.fetched(A).num_landed == 3


def test_a_host_without_room_fetches_nothing() -> None:
    """When every host page is held, nothing is read, and nothing breaks."""
    with opened(host_pages=4, store=MemoryStore()) as rig:
        rig.cache.lock(rig.backed_up(D))
        rig.store.fill(A)
        assert rig.fetched(A).num_landed == 0
        assert rig.heard() == []
        assert rig.num_free == (13, 1)


def test_a_prefetch_makes_room_on_the_host() -> None:
    """Unlocked host pages give way to what is fetched, and are told as removed first."""
    with opened(host_pages=4, store=MemoryStore()) as rig:
        rig.backed_up(D)
        rig.store.fill(A[:8])
        assert rig.fetched(A[:8]).num_landed == 2
        assert rig.heard() == ["R(CPU: d3)", "S(CPU: a1 a2 | None)"]


# --------------------------------------------------------------------------------- without and after


def test_without_storage_there_is_nothing_to_fetch() -> None:
    """A prefetch is None, whatever the prompt, and a wrong prompt is refused all the same."""
    with opened() as rig:
        assert rig.cache.prefetch(A) is None
        with pytest.raises(ValueError, match=r"tokens\[0\]: -1 is not in"):
            rig.cache.prefetch([-1])
        assert rig.heard() == []
        assert rig.cache.num_in_flight == 0


def test_a_closed_cache_ends_its_prefetches() -> None:
    """After `close` nothing lands, nothing hangs, and every page is accounted for."""
    rig = slow("exists_prefix")
    prefetch = rig.prefetch(A)
    rig.store.call().end()
    prefetch.job.result(TIMEOUT_S)
    rig.cache.close()
    rig.cache.tick()
    assert rig.cache.prefetch_done(prefetch)
    assert rig.cache.num_in_flight == 0
    assert rig.heard() == []
    assert rig.num_free == (16, 16)
    rig.cache.close()
