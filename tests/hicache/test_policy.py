"""The settings: their defaults, what is refused, and what each write policy does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from units_rig import AB, SHAPE, A, D, MemoryStore, opened

from hicache import HiCacheConfig, HiRadixCache, PagePool, PrefetchPolicy, WritePolicy

# ---------------------------------------------------------------------------------------- settings


def test_the_defaults_are_accepted() -> None:
    """Without arguments pages are written through, and a prefetch waits until a deadline."""
    config = HiCacheConfig()
    assert config.write_policy is WritePolicy.WRITE_THROUGH
    assert config.prefetch_policy is PrefetchPolicy.TIMEOUT


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_write_policy_may_be_given_by_its_name(policy: WritePolicy) -> None:
    """The name that SGLang's users know means the policy."""
    assert HiCacheConfig(write_policy=policy.value).write_policy is policy  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_a_prefetch_policy_may_be_given_by_its_name(policy: PrefetchPolicy) -> None:
    """The name that SGLang's users know means the policy."""
    named = HiCacheConfig(prefetch_policy=policy.value)  # type: ignore[arg-type]
    assert named.prefetch_policy is policy


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("write_policy", "write_never", "is none of write_through, write_through_selective"),
        ("prefetch_policy", "", "is none of best_effort, wait_complete, timeout"),
        ("write_through_threshold", 0, "0 is below 1"),
        ("load_back_threshold", -1, "-1 is below 0"),
        ("prefetch_threshold", -1, "-1 is below 0"),
        ("prefetch_timeout_base_s", -0.5, "-0.5 is below 0"),
        ("prefetch_timeout_base_s", math.nan, "nan is below 0"),
        ("prefetch_timeout_per_ki_token_s", -1.0, "-1.0 is below 0"),
        ("prefetch_max_pages", 0, "0 is below 1"),
        ("transfer_timeout_s", 0.0, "0.0 is not above 0"),
        ("storage_queue_pages", 0, "0 is below 1"),
    ],
)
def test_a_setting_out_of_bounds_is_refused(field: str, value: Any, bound: str) -> None:
    """A wrong value raises ValueError that names the field, the value and the bound."""
    with pytest.raises(ValueError, match=f"^{field}: .*{bound}"):
        HiCacheConfig(**{field: value})


def test_an_eviction_policy_that_is_none_is_refused() -> None:
    """A cache of an unknown eviction policy raises ValueError with the name and those there are."""
    pool = PagePool(4, 4, SHAPE)
    with pytest.raises(ValueError, match="eviction_policy: 'oldest' is none of lru, lfu"):
        HiRadixCache(pool, config=HiCacheConfig(eviction_policy="oldest"))


# ----------------------------------------------------------------------------------- write_through


def test_write_through_copies_what_was_just_inserted() -> None:
    """An insert is backed up at once, whole, in one copy."""
    with opened() as rig:
        rig.put(A)
        assert [len(copy.host_pages) for copy in rig.copies.submitted] == [4]
        rig.put(A)
        assert len(rig.copies.submitted) == 1


def test_write_through_tries_again_at_the_next_insert() -> None:
    """What could not be copied, for a failure or for want of room, is copied when used again."""
    with opened() as rig:
        rig.put(A)
        rig.land(arrived=False)
        rig.put(A)
        rig.heard()
        rig.land()
        assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


# ------------------------------------------------------------------------- write_through_selective


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_selective_writes_what_was_inserted_often_enough(threshold: int) -> None:
    """A page is backed up by the insert that makes its count, and by none before."""
    config = {"write_policy": "write_through_selective", "write_through_threshold": threshold}
    with opened(**config) as rig:
        for _ in range(threshold - 1):
            rig.put(A)
        assert rig.copies.submitted == []
        rig.put(A)
        assert [len(copy.host_pages) for copy in rig.copies.submitted] == [4]


def test_selective_counts_inserts_and_not_lookups() -> None:
    """However often it is matched, a prompt inserted once is not copied."""
    with opened(write_policy="write_through_selective") as rig:
        rig.put(A)
        for _ in range(10):
            rig.cache.match_prefix(A)
        assert rig.copies.submitted == []


def test_selective_writes_the_shared_prefix_alone() -> None:
    """A prefix that two prompts share is copied with the second; what follows it waits."""
    with opened(write_policy="write_through_selective") as rig:
        rig.put(A)
        rig.put(AB)
        rig.heard()
        rig.land()
        assert rig.heard() == ["S(CPU: a1 a2 | None)"]
        rig.put(A)
        rig.land()
        assert rig.heard() == ["S(CPU: a3 a4 | a2)"]


# -------------------------------------------------------------------------------------- write_back


def test_write_back_copies_at_the_eviction() -> None:
    """Nothing is copied at an insert; an eviction copies first, waits, and then drops the page."""
    with opened(write_policy="write_back") as rig:
        rig.put(A)
        rig.cache.tick()
        assert rig.copies.submitted == []
        rig.heard()
        assert rig.cache.evict(4) == 4
        assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)", "R(GPU: a4 a3 a2 a1)"]
        assert rig.copies.waited == [10.0]
        assert rig.num_free == (16, 12)


def test_write_back_copies_the_ancestors_first() -> None:
    """What an evicted page follows is copied with it, though it stays on the device."""
    with opened(write_policy="write_back") as rig:
        rig.put(A[:8])
        rig.put(A)
        rig.heard()
        assert rig.cache.evict(1) == 1
        assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)", "R(GPU: a4)"]


def test_write_back_evicts_what_could_not_be_copied() -> None:
    """A copy that fails costs the page, and nothing else: it is a plain removal."""
    with opened(write_policy="write_back") as rig:
        rig.copies.wait_ends = False
        rig.put(A)
        rig.heard()
        assert rig.cache.evict(4) == 4
        assert rig.heard() == ["R(GPU: a4 a3 a2 a1)"]
        assert rig.num_free == (16, 16)
        assert rig.cache.stats().failed_flights == 1


def test_write_back_does_not_wait_for_ever() -> None:
    """A copy that does not end in time counts as failed; its host pages come back when it ends."""
    with opened(write_policy="write_back") as rig:
        rig.copies.wait_ends = None
        rig.put(A)
        rig.heard()
        assert rig.cache.evict(4) == 4
        assert rig.heard() == ["R(GPU: a4 a3 a2 a1)"]
        assert rig.num_free == (16, 12)
        rig.put(D)
        rig.land()
        assert rig.heard() == ["S(GPU: d1 d2 d3 | None)"]
        assert rig.num_free == (13, 16)


def test_write_back_copies_once() -> None:
    """What was loaded back has its host copy still, and goes again without another."""
    with opened(write_policy="write_back") as rig:
        node = rig.put(A).node
        rig.cache.evict(4)
        rig.load_back(node)
        rig.land()
        rig.heard()
        rig.cache.evict(4)
        assert rig.heard() == ["R(GPU: a4 a3 a2 a1)"]
        assert len(rig.copies.submitted) == 2


def test_write_back_makes_room_for_an_allocation() -> None:
    """An allocation that evicts copies what it evicts, and gets its pages."""
    with opened(num_pages=4, write_policy="write_back") as rig:
        rig.put(A)
        rig.heard()
        rig.put(D)
        assert rig.heard() == [
            "S(CPU: a1 a2 a3 a4 | None)",
            "R(GPU: a4 a3 a2)",
            "S(GPU: d1 d2 d3 | None)",
        ]


def test_write_back_reaches_storage() -> None:
    """What was copied at an eviction goes on to the store."""
    with opened(store=MemoryStore(), write_policy="write_back") as rig:
        rig.put(A)
        rig.cache.evict(4)
        rig.heard()
        rig.cache.tick()
        rig.cache.tick()
        assert rig.heard() == ["S(DISK: a1 a2 a3 a4 | None)"]
