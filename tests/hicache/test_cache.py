"""What each verb of the cache does, and that a refused call changes nothing."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hicache_rig import NAMESPACES, SHAPE, new_cache, put

from hicache import HiRadixCache, HostPool, Node, PagePool
from hicache.policy import HiCacheConfig
from hicache.storage import FileStorage, PageFormat, StorageError
from kvevents import (
    BASE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    HashFormat,
    Namespace,
    StorageMedium,
    TokenIds,
    block_hashes,
    pack_tokens,
)

A = list(range(12))
"""Three pages of four."""
B = [20, 21, 22, 23]
C = [30, 31, 32, 33]


def pages_of(cache: HiRadixCache, tokens: list[int]) -> list[int]:
    """The pages a prompt matches."""
    return list(cache.match_prefix(tokens).page_indices)


def state_of(cache: HiRadixCache) -> tuple[object, ...]:
    """All that can be seen of a cache without using it."""
    counts = (cache.num_resident, cache.num_protected, cache.num_evictable)
    free = cache.device_pool.allocator.free_pages()
    return counts, free, cache.resident_blocks(), cache.take_records(), cache.violations()


def resident(cache: HiRadixCache) -> set[int]:
    """The hashes on the device."""
    return set(cache.resident_blocks()[StorageMedium.GPU])


def test_a_pool_is_one_caches_for_good(tmp_path: Path) -> None:
    """Of one that is closed too: its pages hold what nobody knows of any more. A cache that could not be
    made leaves pools as they were.
    """
    pool, host = PagePool(4, 4, SHAPE), HostPool(4, 4, SHAPE)
    other = FileStorage(tmp_path, PageFormat("m", SHAPE, 8), min_free_bytes=0)
    with contextlib.closing(other), pytest.raises(StorageError, match="page_size"):
        HiRadixCache(pool, host_pool=host, storage=other)
    with (
        HiRadixCache(pool, host_pool=host),
        pytest.raises(ValueError, match=r"^device_pool: it is another cache's"),
    ):
        HiRadixCache(pool)
    with pytest.raises(ValueError, match=r"^host_pool: it is another cache's"):
        HiRadixCache(PagePool(4, 4, SHAPE), host_pool=host)


# ------------------------------------------------------------------------------------ match_prefix


def test_an_empty_cache_matches_nothing() -> None:
    """A miss is a match of no pages, and its node may be locked like any other."""
    cache = new_cache(4)
    match = cache.match_prefix(A)
    assert (match.num_pages, match.prefix_len) == (0, 0)
    cache.lock(match.node)
    assert cache.num_protected == 0
    cache.unlock(match.node)


@pytest.mark.parametrize(
    ("length", "num_pages"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)]
)
def test_a_match_is_in_whole_pages(length: int, num_pages: int) -> None:
    """A prompt matches as many whole pages as it has itself, wherever that is in a node."""
    cache = new_cache(4)
    put(cache, A)
    whole = pages_of(cache, A)
    match = cache.match_prefix(A[:length])
    assert match.num_pages == num_pages
    assert match.prefix_len == 4 * num_pages
    assert list(match.page_indices) == whole[:num_pages]
    assert cache.violations() == []


@pytest.mark.parametrize(
    "between", ["nothing", "split", "grown", "evicted", "flushed", "another namespace", "inserted"]
)
def test_an_insert_may_go_on_where_its_match_ended(between: str) -> None:
    """A prompt that comes packed is not compared twice, and what is in the cache is nevertheless what it
    would be: whatever became of the matched prefix meanwhile.
    """
    cache, namespace = new_cache(12), BASE
    packed = pack_tokens([*A, *B])
    put(cache, A)
    match = cache.match_prefix(packed)
    assert match.num_pages == 3
    match between:
        case "split":
            put(cache, [*A[:4], *C])
        case "grown":
            put(cache, [*A, *B, *C])
        case "evicted":
            cache.evict(2)
        case "flushed":
            cache.flush()
        case "another namespace":
            namespace = NAMESPACES[1]
        case "inserted":
            put(cache, [*A, *C])
    before = resident(cache)
    held = len(cache.match_prefix(pack_tokens([*A, *B]), namespace).page_indices)
    pages = cache.allocate(4)
    assert pages is not None
    insertion = cache.insert(packed, pages, namespace)
    cache.free(pages[: insertion.num_existing])
    assert insertion.num_existing == held
    assert resident(cache) == before | set(block_hashes(packed, 4, namespace))
    assert cache.match_prefix(packed, namespace).num_pages == 4
    assert cache.violations() == []


def test_prompts_that_were_only_matched_are_let_go() -> None:
    """However many are matched and never inserted, the cache remembers few of them."""
    cache = new_cache(8)
    put(cache, A)
    for last in range(100, 400):
        cache.match_prefix(pack_tokens([*A, last]))
    assert len(cache._walked) <= 64


def test_a_match_ends_where_the_tokens_differ() -> None:
    """The page in which the prompt leaves what is cached is not matched."""
    cache = new_cache(4)
    put(cache, A)
    assert cache.match_prefix([*A[:6], 99, *A[7:]]).num_pages == 1


def test_matched_pages_are_a_copy() -> None:
    """Changing the indices a match returned does not change the cache."""
    cache = new_cache(4)
    put(cache, A)
    match = cache.match_prefix(A)
    match.page_indices[0] = -1
    assert cache.match_prefix(A).page_indices[0] >= 0


def test_namespaces_do_not_match_each_other() -> None:
    """Equal tokens are cached once for each namespace, and found only in it."""
    cache = new_cache(4)
    for count, namespace in enumerate(NAMESPACES):
        assert cache.match_prefix(A[:4], namespace).num_pages == 0
        put(cache, A[:4], namespace)
        assert cache.num_resident == count + 1
    assert len(resident(cache)) == len(NAMESPACES)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        pack_tokens,
        lambda tokens: array("I", tokens),
        lambda tokens: TokenIds(pack_tokens(tokens)),
        lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    ],
    ids=["list", "tuple", "bytes", "array", "TokenIds", "tensor"],
)
def test_tokens_come_in_any_form(form: Callable[[list[int]], Any]) -> None:
    """A prompt is the same prompt as list, tuple, packed bytes, array, TokenIds or tensor."""
    cache = new_cache(4)
    put(cache, A)
    assert cache.match_prefix(form(A)).num_pages == 3


# ---------------------------------------------------------------------------------------- allocate


def test_allocation_evicts_only_what_it_needs() -> None:
    """Pages come from the free ones first; what is missing is evicted, and no more."""
    cache = new_cache(4)
    put(cache, A)
    assert cache.allocate(1) is not None
    assert cache.num_resident == 3
    assert cache.allocate(2) is not None
    assert resident(cache) == set(block_hashes(A[:4], 4))


def test_allocation_that_cannot_be_had_evicts_nothing() -> None:
    """With two pages unlocked and one free, four are refused; three can be had."""
    cache = new_cache(4)
    put(cache, A)
    cache.lock(cache.match_prefix(A[:4]).node)
    before = resident(cache)
    assert cache.allocate(4) is None
    assert resident(cache) == before
    assert cache.allocate(3) is not None


def test_no_pages_can_always_be_allocated() -> None:
    """Zero pages are an empty array, also when none is free."""
    cache = new_cache(1)
    cache.allocate(1)
    assert cache.allocate(0) == array("q")
    assert cache.allocate(1) is None


# ------------------------------------------------------------------------------------------ insert


def test_an_insert_takes_the_pages_that_are_new() -> None:
    """Of pages brought for a prompt cached in part, the cache keeps its own and takes the rest."""
    cache = new_cache(8)
    put(cache, A[:8])
    own = pages_of(cache, A)
    brought = cache.allocate(3)
    assert brought is not None
    assert cache.insert(A, brought).num_existing == 2
    assert pages_of(cache, A) == [*own, brought[2]]
    cache.free(brought[:2])
    assert cache.device_pool.allocator.num_free == 5
    assert cache.violations() == []


def test_an_insert_can_leave_out_what_was_matched() -> None:
    """`page_indices` begin at `first_page`; the pages before it stay as they were."""
    cache = new_cache(8)
    put(cache, A[:4])
    own = pages_of(cache, A)
    rest = cache.allocate(2)
    assert rest is not None
    assert cache.insert(A, rest, first_page=1).num_existing == 1
    assert pages_of(cache, A) == [*own, *rest]


def test_what_another_request_inserted_first_is_a_duplicate() -> None:
    """Of two requests that computed the same pages, the second keeps its own to free."""
    cache = new_cache(8)
    put(cache, A[:4])
    first, second = cache.allocate(2), cache.allocate(2)
    assert first is not None and second is not None
    cache.insert(A, first, first_page=1)
    assert cache.insert(A, second, first_page=1).num_existing == 3
    assert pages_of(cache, A)[1:] == list(first)
    cache.free(second)
    assert cache.violations() == []


def test_the_node_of_an_insert_is_the_end_of_its_prompt() -> None:
    """Locking an insertion's node protects its whole pages, and no longer prompt's."""
    cache = new_cache(8)
    put(cache, A)
    cache.lock(put(cache, A[:8]).node)
    assert cache.num_protected == 2


def test_a_tail_is_not_cached() -> None:
    """Tokens that do not fill a page need no page and are not matched later."""
    cache = new_cache(4)
    put(cache, A[:10])
    assert cache.num_resident == 2
    assert cache.match_prefix(A).num_pages == 2


def test_inserting_again_changes_nothing() -> None:
    """A prompt that is cached already is all duplicates, and no record."""
    cache = new_cache(8)
    put(cache, A)
    cache.take_records()
    before = state_of(cache)
    assert put(cache, A).num_existing == 3
    after = state_of(cache)
    assert (before[0], before[2:]) == (after[0], after[2:])


@pytest.mark.parametrize(
    "form",
    [list, tuple, lambda pages: pages, torch.tensor, lambda pages: torch.tensor(pages).numpy()],
    ids=["list", "tuple", "array", "tensor", "numpy"],
)
def test_page_indices_come_in_any_form(form: Callable[[Any], Any]) -> None:
    """Page indices may be a list, tuple, tensor or array of any kind, and stay the caller's to change."""
    cache = new_cache(4)
    pages = cache.allocate(3)
    assert pages is not None
    wanted, brought = list(pages), form(pages)
    cache.insert(A, brought)
    if not isinstance(brought, tuple):
        brought[0] = 99
    assert pages_of(cache, A) == wanted


# ---------------------------------------------------------------------------------- lock and unlock


def test_a_lock_protects_its_prefix_and_nothing_below() -> None:
    """Evicting everything leaves exactly the locked prefix."""
    cache = new_cache(8)
    put(cache, A)
    put(cache, B)
    node = cache.match_prefix(A[:8]).node
    cache.lock(node)
    assert (cache.num_protected, cache.num_evictable) == (2, 2)
    assert cache.evict(100) == 2
    assert resident(cache) == set(block_hashes(A[:8], 4))
    cache.unlock(node)
    assert cache.evict(100) == 2


def test_locks_are_counted() -> None:
    """A node locked twice is evicted only after two unlocks."""
    cache = new_cache(4)
    node = put(cache, A).node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(100) == 0
    cache.unlock(node)
    assert cache.evict(100) == 3


def test_locks_of_branches_share_their_prefix() -> None:
    """The common prefix of two locked prompts is protected until both are unlocked."""
    cache = new_cache(8)
    nodes = [put(cache, [*A[:4], *branch]).node for branch in (B, C)]
    for node in nodes:
        cache.lock(node)
    assert cache.num_protected == 3
    cache.unlock(nodes[0])
    assert cache.num_protected == 2
    cache.unlock(nodes[1])
    assert cache.num_protected == 0


def test_a_lock_survives_a_split() -> None:
    """A locked node split by another prompt stays locked whole, and one unlock frees both halves."""
    cache = new_cache(8)
    node = put(cache, A).node
    cache.lock(node)
    put(cache, [*A[:4], *B])
    assert cache.num_protected == 3
    assert cache.evict(100) == 1
    cache.unlock(node)
    assert cache.num_protected == 0
    assert cache.evict(100) == 3
    assert cache.violations() == []


# ------------------------------------------------------------------------------------------- evict


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Prompts go in the order of their last match or insert, not of their first."""
    cache = new_cache(4)
    put(cache, A[:4])
    put(cache, B)
    put(cache, C)
    cache.match_prefix(A[:4])
    put(cache, B)
    order: list[int] = []
    while left := resident(cache):
        cache.evict(1)
        order += left - resident(cache)
    assert order == [block_hashes(prompt, 4)[0] for prompt in (C, A[:4], B)]


def test_an_entry_is_ranked_again_as_often_as_its_node_is_used() -> None:
    """A leaf used many times since it was queued goes after one that was used between its uses."""
    cache = new_cache(4)
    put(cache, A[:4])
    put(cache, B)
    for _ in range(3):
        cache.match_prefix(B)
        cache.match_prefix(A[:4])
        cache.lock(cache.match_prefix(B).node)
        assert cache.evict(0) == 0
        cache.unlock(cache.match_prefix(B).node)
    cache.evict(1)
    assert resident(cache) == set(block_hashes(B, 4))


def test_an_inner_node_goes_after_its_children() -> None:
    """A prefix outlives its branches, though one of them was used after other prompts."""
    cache = new_cache(8)
    prefix, x, y = A[:4], [*A[:4], *B], [*A[:4], *C]
    put(cache, x)
    put(cache, y)
    put(cache, B)
    cache.match_prefix(x)
    order: list[int] = []
    while left := resident(cache):
        cache.evict(1)
        order += left - resident(cache)
    last = [block_hashes(prompt, 4)[-1] for prompt in (y, B, x, prefix)]
    assert order == last


@pytest.mark.parametrize("num_pages", [0, 1, 2, 3, 4, 5])
def test_a_large_leaf_loses_its_last_pages_only(num_pages: int) -> None:
    """Evicting part of a leaf frees exactly as many pages, from its end, and says so."""
    cache = new_cache(5)
    tokens = list(range(20))
    hashes = block_hashes(tokens, 4)
    put(cache, tokens)
    kept = pages_of(cache, tokens)[: 5 - num_pages]
    cache.take_events()
    assert cache.evict(num_pages) == num_pages
    assert cache.device_pool.allocator.num_free == num_pages
    assert pages_of(cache, tokens) == kept
    removed = list(reversed(hashes[5 - num_pages :]))
    events = [BlockRemoved(list[int | bytes](removed), StorageMedium.GPU)] if removed else []
    assert cache.take_events() == events
    assert cache.violations() == []


def test_eviction_returns_what_it_freed() -> None:
    """Asked for more than there is, it frees all there is."""
    cache = new_cache(8)
    put(cache, A)
    assert cache.evict(100) == 3
    assert cache.evict(100) == 0


# ------------------------------------------------------------------------------------------- flush


def test_a_flush_frees_every_page() -> None:
    """After a flush no page is cached, all are free, and the nodes from before are refused."""
    cache = new_cache(8)
    node = put(cache, A).node
    put(cache, B, Namespace(cache_salt="a"))
    cache.flush()
    assert cache.device_pool.allocator.num_free == 8
    assert cache.num_resident == 0
    assert cache.match_prefix(A).num_pages == 0
    assert cache.violations() == []
    with pytest.raises(ValueError, match="not in the cache any more"):
        cache.lock(node)


def test_what_follows_a_flush_is_told_after_the_clear() -> None:
    """What was taken away and put back within a step is told as a clear and a store."""
    cache = new_cache(8)
    put(cache, A)
    cache.flush()
    put(cache, A)
    kinds = [type(event) for event in cache.take_events()]
    assert kinds == [BlockStored, AllBlocksCleared, BlockStored]


def test_a_locked_root_hinders_a_flush() -> None:
    """A lock that holds no page yet is a request under way all the same; a flush waits for it."""
    cache = new_cache(8)
    put(cache, A)
    node = cache.match_prefix(B).node
    cache.lock(node)
    with pytest.raises(ValueError, match="flush: 1 locks are held"):
        cache.flush()
    cache.unlock(node)
    cache.flush()
    assert cache.num_resident == 0


# ------------------------------------------------------------------------------------ reset_device


def test_without_lower_tiers_a_reset_of_the_device_is_an_eviction_of_all() -> None:
    """Everything goes, children first, and is told as removed; no clear."""
    cache = new_cache(8)
    put(cache, A)
    put(cache, [*A[:4], *B])
    cache.take_events()
    cache.reset_device()
    (event,) = cache.take_events()
    assert isinstance(event, BlockRemoved)
    assert set(event.block_hashes) == {*block_hashes(A, 4), *block_hashes([*A[:4], *B], 4)}
    assert event.block_hashes[-1] == block_hashes(A, 4)[0]
    assert (cache.num_resident, cache.device_pool.allocator.num_free) == (0, 8)
    assert cache.violations() == []


# ---------------------------------------------------------------------------- without lower tiers


def test_a_cache_of_one_tier_has_nothing_to_do_below_it() -> None:
    """Without host and storage a tick, a load back and a prefetch are nothing, and tell nothing."""
    cache = new_cache(8)
    node = put(cache, A).node
    cache.take_events()
    cache.tick()
    assert cache.load_back(node) is None
    assert cache.prefetch(A) is None
    assert cache.num_in_flight == 0
    assert cache.settle(0)
    assert cache.take_events() == []
    cache.close()
    cache.close()


# ------------------------------------------------------------------------------------------ events


def test_events_can_be_turned_off() -> None:
    """Without events the cache works the same, and neither records nor re-tells anything."""
    cache = HiRadixCache(PagePool(4, 4, SHAPE), events=False)
    put(cache, A)
    cache.evict(1)
    cache.begin_retell()
    assert not cache.retelling
    cache.retell(10)
    assert cache.take_records() == []
    assert cache.num_resident == 2


def test_changes_are_taken_one_way() -> None:
    """A cache whose records are taken does not make events, and the other way round: each would miss
    what the other took.
    """
    cache, other = new_cache(4), new_cache(4)
    cache.take_records()
    with pytest.raises(ValueError, match=r"take_events: .* as records"):
        cache.take_events()
    other.take_events()
    with pytest.raises(ValueError, match=r"take_records: .* as events"):
        other.take_records()


@pytest.mark.parametrize("call", ["lock", "unlock", "load_back"])
def test_what_is_no_node_is_named(call: str) -> None:
    """A match, say, where its node belongs."""
    cache = new_cache(4)
    with pytest.raises(TypeError, match="node: a Match is not a Node"):
        getattr(cache, call)(cache.match_prefix(A))


def test_a_priority_that_is_none_changes_nothing() -> None:
    """It is refused before a page changes hands."""
    cache = new_cache(4)
    pages = cache.allocate(3)
    with pytest.raises(TypeError):
        cache.insert(A, pages, priority=cast("int", "high"))
    cache.free(pages)
    assert cache.violations() == [] and cache.take_events() == []


def test_prompts_that_fill_no_page_are_counted() -> None:
    """Case 39: nothing is told of them, and the count says why."""
    cache = new_cache(4)
    cache.insert(A[:3], [])
    cache.insert([], [])
    assert (cache.stats().short_prompts, cache.take_events()) == (2, [])
    put(cache, A[:5])
    assert cache.stats().short_prompts == 2
    assert len(cache.take_events()) == 1


def test_a_priority_may_be_below_the_usual_one() -> None:
    """What was only ever given a negative priority goes first, however late its last use."""
    config = HiCacheConfig(eviction_policy="priority")
    cache = HiRadixCache(PagePool(4, 4, SHAPE), config=config)
    cache.insert(B, cache.allocate(1), priority=-1)
    cache.insert(C, cache.allocate(1))
    cache.match_prefix(B)
    cache.evict(1)
    assert (pages_of(cache, B), len(pages_of(cache, C))) == ([], 1)
    pages = cache.allocate(2)
    assert pages is not None
    cache.insert(B, pages[:1], priority=-1)
    cache.insert(B, pages[1:], priority=2)  # the highest wins
    cache.free(pages[1:])
    cache.insert(A[:4], cache.allocate(1), priority=1)
    cache.evict(2)
    assert len(pages_of(cache, B)) == 1


def test_the_hash_format_is_that_of_the_events_and_of_the_check() -> None:
    """Salted blocks are named alike by `take_events` and `resident_blocks`, in either format."""
    salted, names = Namespace(cache_salt="a"), set()
    for hash_format in HashFormat:
        cache = new_cache(4, hash_format=hash_format)
        put(cache, A, salted)
        (event,) = cache.take_events()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == block_hashes(A, 4, salted, hash_format)
        assert resident(cache) == set(event.block_hashes)
        names.update(event.block_hashes)
    assert len(names) == 6


def test_a_retelling_is_a_clear_and_all_that_is_resident() -> None:
    """A router that knows nothing, or something false, knows the state after a re-telling."""
    cache = new_cache(8)
    put(cache, A)
    put(cache, [*A[:4], *B])
    cache.begin_retell()
    under_way = cache.retelling
    cache.retell(100)
    assert (under_way, cache.retelling) == (True, False)
    clear, *stores = cache.take_events()
    assert clear == AllBlocksCleared()
    assert {one for event in stores for one in hashes_of(event)} == resident(cache)


def hashes_of(event: object) -> list[int | bytes]:
    """The hashes of a BlockStored."""
    assert isinstance(event, BlockStored)
    return event.block_hashes


# -------------------------------------------------------------------------------------- the refused


def gone(cache: HiRadixCache) -> Node:
    """A node that is evicted again."""
    node = put(cache, C).node
    cache.match_prefix(A)
    cache.evict(1)
    return node


REFUSED: dict[str, tuple[Callable[[HiRadixCache, Node], object], str]] = {
    "too few indices": (
        lambda cache, node: cache.insert(B, []),
        "page_indices: 0 indices for the 1 pages from page 0 on",
    ),
    "too many indices": (
        lambda cache, node: cache.insert(B, [3, 4]),
        "page_indices: 2 indices for the 1 pages from page 0 on",
    ),
    "indices of pages before the first": (
        lambda cache, node: cache.insert(A, [0, 1, 2], first_page=1),
        "page_indices: 3 indices for the 2 pages from page 1 on",
    ),
    "index above the pool": (lambda cache, node: cache.insert(B, [6]), "page index: 6 .* 0..5"),
    "negative index": (lambda cache, node: cache.insert(B, [-1]), "page index: -1 .* 0..5"),
    "index beyond 64 bits": (
        lambda cache, node: cache.insert(B, [2**63]),
        f"page index: {2**63} is not in 0..{2**63 - 1}",
    ),
    "first page behind the prompt": (
        lambda cache, node: cache.insert(B, [], first_page=2),
        "first_page: 2 is not in 0..1",
    ),
    "negative first page": (
        lambda cache, node: cache.insert(B, [3, 4], first_page=-1),
        "first_page: -1 is not in 0..1",
    ),
    "first page not cached": (
        lambda cache, node: cache.insert([*A[:8], *B], [], first_page=3),
        "first_page: 3, but the device has only 2 pages",
    ),
    "negative token": (
        lambda cache, node: cache.insert([*B[:3], -1], [3]),
        r"tokens\[3\]: -1 is not in 0..4294967295",
    ),
    "token over 32 bits": (
        lambda cache, node: cache.match_prefix([2**32]),
        r"tokens\[0\]: 4294967296 is not in 0..4294967295",
    ),
    "packed bytes of half a token": (
        lambda cache, node: cache.match_prefix(b"\0" * 6),
        "tokens: 6 packed bytes",
    ),
    "unlock without lock": (
        lambda cache, node: cache.unlock(node),
        "unlock: <Node ids 2.1 .* is not locked",
    ),
    "flush while locked": (lambda cache, node: cache.flush(), "flush: 1 locks are held"),
    "reset while locked": (
        lambda cache, node: cache.reset_device(),
        "reset_device: 1 locks are held",
    ),
    "page never allocated": (
        lambda cache, node: cache.insert(B, [5]),
        "page index: 5 is not the caller's: not allocated, or given up",
    ),
    "page freed again": (
        lambda cache, node: cache.insert(B, [4]),
        "page index: 4 is not the caller's: not allocated, or given up",
    ),
    "page of the cache": (
        lambda cache, node: cache.insert(B, [1]),
        "page index: 1 is not the caller's: not allocated, or given up",
    ),
    "page twice": (
        lambda cache, node: cache.insert([*B, *C], [3, 3]),
        "page index: 3 comes twice",
    ),
    "page twice across a known prefix": (
        lambda cache, node: cache.insert([*A, *B, *C], [3, 3], first_page=3),
        "page index: 3 comes twice",
    ),
    "fewer pages than a partial match needs": (
        lambda cache, node: cache.insert([*A[:4], *B], [3]),
        "page_indices: 1 indices for the 2 pages from page 0 on",
    ),
    "negative eviction": (lambda cache, node: cache.evict(-1), "num_pages: -1 is negative"),
    "negative allocation": (lambda cache, node: cache.allocate(-1), "num_pages: -1 is negative"),
    "free of a foreign page": (lambda cache, node: cache.free([3, 6]), "page index: 6 .* 0..5"),
    "free of a page beyond 64 bits": (
        lambda cache, node: cache.free([2**63]),
        f"page index: {2**63} is not in 0..{2**63 - 1}",
    ),
    "free of pages of the cache": (
        lambda cache, node: cache.free([3, 1]),
        "page index: 1 is not the caller's: not allocated, or given up",
    ),
    "free of a page twice": (lambda cache, node: cache.free([3, 3]), "page index: 3 comes twice"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_call_names_value_and_bound_and_changes_nothing(
    call: Callable[[HiRadixCache, Node], object], message: str
) -> None:
    """A wrong argument is a ValueError that says what is wrong; the cache is as it was before.

    Pages 0 to 2 are the cache's, 3 is the caller's, 4 was, and 5 was never allocated.
    """
    cache = new_cache(6)
    node = put(cache, A).node
    cache.lock(cache.match_prefix(A[:8]).node)
    assert cache.allocate(2) == array("q", [4, 3])
    cache.free([4])
    cache.take_records()
    before = state_of(cache)
    with pytest.raises(ValueError, match=message):
        call(cache, node)
    assert state_of(cache) == before
    assert cache.match_prefix(A).num_pages == 3


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (HiRadixCache.lock, "is not in the cache any more"),
        (HiRadixCache.load_back, "is not in the cache any more"),
        (HiRadixCache.unlock, "unlock: .* is not locked"),
    ],
)
def test_an_evicted_node_is_refused(
    verb: Callable[[HiRadixCache, Node], object], message: str
) -> None:
    """A node that is not in the cache any more is neither locked nor loaded back; nothing changes."""
    cache = new_cache(4)
    put(cache, A)
    node = gone(cache)
    cache.take_records()
    before = state_of(cache)
    with pytest.raises(ValueError, match=message):
        verb(cache, node)
    assert state_of(cache) == before


@pytest.mark.parametrize("indices", ["0", 0, None, {0}, [0.5], torch.tensor([0.5])])
def test_indices_that_are_none_are_a_type_error(indices: object) -> None:
    """Page indices that are no sequence of ints are refused, and nothing is inserted."""
    cache = new_cache(4)
    with pytest.raises(TypeError):
        cache.insert(B, indices)
    assert cache.num_resident == 0


def test_tokens_that_are_none_are_a_type_error() -> None:
    """A prompt that is no sequence of ints is refused."""
    cache = new_cache(4)
    for tokens in ("text", [0.5], None):
        with pytest.raises(TypeError, match="tokens"):
            cache.match_prefix(tokens, BASE)


@pytest.mark.parametrize("wrong", ["lora", None, ("a", None, None)])
def test_a_namespace_is_a_namespace(wrong: object) -> None:
    """A plain string, None or tuple raises TypeError with the value, and nothing is cached."""
    cache = new_cache(8)
    pages = cache.allocate(1)
    for call in (
        lambda: cache.match_prefix([1, 2, 3, 4], wrong),  # type: ignore[arg-type]
        lambda: cache.insert([1, 2, 3, 4], pages, wrong),  # type: ignore[arg-type]
        lambda: cache.prefetch([1, 2, 3, 4], wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="namespace"):
            call()
    assert cache.num_resident == 0


def test_numbers_of_pages_are_whole() -> None:
    """A fraction raises TypeError before anything is evicted."""
    cache = new_cache(8)
    put(cache, list(range(16)))
    for call in (cache.evict, cache.allocate):
        with pytest.raises(TypeError):
            call(1.5)  # type: ignore[arg-type]
    assert cache.num_resident == 4
    assert cache.violations() == []


def test_a_packed_prompt_is_looked_for_in_each_namespace() -> None:
    """How far it was known in one says nothing of another, though it is the same object."""
    cache, packed, adapter = new_cache(8), pack_tokens(A), Namespace(lora_name="adapter")
    put(cache, A)
    put(cache, B, adapter)
    assert cache.match_prefix(packed).num_pages == 3
    assert cache.match_prefix(packed, adapter).num_pages == 0
    assert cache.match_prefix(packed).num_pages == 3
    pages = cache.allocate(3)
    assert cache.insert(packed, pages, adapter).num_existing == 0
