"""Public reports as scenarios, named by their row in the list of cases."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from random import Random

import pytest
from hicache_rig import (
    Rig,
    feed_of_events,
    new_cache,
    over_the_wire,
    put,
    random_prompt,
    random_step,
)
from hypothesis import given
from hypothesis import strategies as st

from hicache import HiRadixCache
from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Namespace,
    StorageMedium,
    block_hashes,
)

A = list(range(12))
"""Three pages of four."""
H1, H2, H3 = block_hashes(A, 4)


def stored(events: list[Event]) -> list[int | bytes]:
    """The hashes of every BlockStored, in order."""
    return [one for event in events if isinstance(event, BlockStored) for one in event.block_hashes]


def removed(events: list[Event]) -> list[int | bytes]:
    """The hashes of every BlockRemoved, in order."""
    return [
        one for event in events if isinstance(event, BlockRemoved) for one in event.block_hashes
    ]


# ------------------------------------------------------------------------------------- one event


def test_case_15_a_flush_is_a_clear_and_the_same_may_be_stored_again() -> None:
    """A flush is AllBlocksCleared, nothing else; the same hash stored after it is a new store."""
    cache = new_cache(4)
    put(cache, A)
    cache.take_events()
    cache.flush()
    assert cache.take_events() == [AllBlocksCleared()]
    put(cache, A)
    assert stored(cache.take_events()) == [H1, H2, H3]


def test_case_23_equal_pages_in_different_places_have_different_hashes() -> None:
    """Tokens [7]*12 are three distinct blocks, none its own parent, none twice in the event."""
    cache = new_cache(4)
    put(cache, [7] * 12)
    (event,) = cache.take_events()
    assert isinstance(event, BlockStored)
    assert len(set(event.block_hashes)) == 3
    assert event.parent_block_hash is None


def test_case_25_blocks_of_an_event_are_a_chain() -> None:
    """S(h1,h2,h3), and a later block names h2, its parent: each block follows the one before it."""
    cache = new_cache(8)
    put(cache, A)
    put(cache, [*A[:8], 9, 9, 9, 9])
    first, second = over_the_wire(cache.take_events())
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.block_hashes) == (None, [H1, H2, H3])
    assert second.parent_block_hash == H2


def test_case_30_tokens_of_the_events_are_the_whole_pages_of_the_prompt() -> None:
    """Of 10 tokens in pages of 4, the events carry the first 8 in order, and not the tail."""
    cache = new_cache(4)
    put(cache, A[:10])
    (event,) = over_the_wire(cache.take_events())
    assert isinstance(event, BlockStored)
    assert event.block_size == 4
    assert list(event.token_ids) == A[:8]


def test_case_31_the_tail_is_neither_stored_nor_removed() -> None:
    """10 tokens in pages of 4: two blocks are stored, then two are removed, children first."""
    cache = new_cache(4)
    put(cache, A[:10])
    assert stored(cache.take_events()) == [H1, H2]
    assert cache.evict(100) == 2
    assert removed(cache.take_events()) == [H2, H1]


def test_case_39_a_prompt_below_a_page_is_silent() -> None:
    """A prompt shorter than a page stores nothing and says nothing."""
    cache = new_cache(4)
    assert put(cache, A[:3]).num_existing == 0
    assert cache.num_resident == 0
    assert cache.take_events() == []


# ------------------------------------------------------------------------------------ namespaces


def test_case_32_salts_keep_equal_tokens_apart() -> None:
    """The same tokens under salts a, b and none are three blocks; evicting a's removes it alone.

    The unsalted hash is that of the tokens and nothing else.
    """
    cache = new_cache(4)
    for namespace in (Namespace(cache_salt="a"), Namespace(cache_salt="b"), Namespace()):
        put(cache, A[:4], namespace)
    of_a, of_b, of_none = stored(cache.take_events())
    assert len({of_a, of_b, of_none}) == 3
    packed = b"".join(token.to_bytes(4, "little") for token in A[:4])
    assert of_none == int.from_bytes(sha256(packed).digest()[:8], "big", signed=True)
    cache.evict(1)
    assert removed(cache.take_events()) == [of_a]


def test_case_32_key_and_salt_do_not_run_together() -> None:
    """Extra key "ab" with salt "c" is not extra key "a" with salt "bc"."""
    cache = new_cache(4)
    put(cache, A[:4], Namespace(extra_key="ab", cache_salt="c"))
    put(cache, A[:4], Namespace(extra_key="a", cache_salt="bc"))
    assert len(set(stored(cache.take_events()))) == 2


def test_case_33_an_adapter_is_its_name() -> None:
    """Workers that load adapters X and Y in opposite order agree on each; base, X and Y differ."""
    names = [None, "X", "Y"]
    workers = []
    for order in (names, names[::-1]):
        cache = new_cache(4)
        for name in order:
            put(cache, A[:4], Namespace(lora_name=name))
        events = over_the_wire(cache.take_events())
        told = [event for event in events if isinstance(event, BlockStored)]
        workers.append({event.lora_name: event.block_hashes[0] for event in told})
    assert workers[0] == workers[1]
    assert len(set(workers[0].values())) == 3


# ------------------------------------------------------------------------------ order and silence


@given(num_pages=st.integers(2, 6), data=st.data())
def test_case_24_a_split_is_silent_and_loses_nothing(num_pages: int, data: st.DataObject) -> None:
    """Wherever a node is split, no event says so, and each hash is then removed exactly once.

    The halves have the hashes of the whole: the lower one goes first, with the last of them.
    """
    cut = data.draw(st.integers(1, num_pages - 1))
    tokens = list(range(4 * num_pages))
    hashes = block_hashes(tokens, 4)
    cache = new_cache(2 * num_pages)
    put(cache, tokens)
    cache.take_events()
    if data.draw(st.booleans()):
        cache.match_prefix(tokens[: 4 * cut])
        assert cache.take_events() == []
    else:
        put(cache, [*tokens[: 4 * cut], 9, 9, 9, 9])
        assert stored(cache.take_events()) == block_hashes([*tokens[: 4 * cut], 9, 9, 9, 9], 4)[-1:]
    cache.evict(num_pages - cut)
    assert removed(cache.take_events()) == hashes[cut:][::-1]
    cache.evict(num_pages + 1)
    assert Counter(removed(cache.take_events()))[hashes[0]] == 1
    assert cache.num_resident == 0


def test_case_46_lookups_are_silent() -> None:
    """A thousand lookups, of what is cached in whole, in part and not at all, are no event."""
    rig = Rig(new_cache(16, page_size=2), feed_of_events())
    random = Random(1)
    for _ in range(20):
        rig.request(*random_prompt(random, rig, longest=6))
    rig.listen()
    found = 0
    for _ in range(1000):
        found += rig.match(*random_prompt(random, rig, longest=6)).num_pages
    assert found > 100
    assert rig.cache.take_events() == []


def test_case_48_store_remove_store_is_three_events() -> None:
    """S(h1) R(h1) S(h1) within one step is three events, in this order."""
    cache = new_cache(4)
    for _ in range(2):
        put(cache, A[:4])
        cache.evict(1)
    events = cache.take_events()
    assert [stored([event]) for event in events] == [[H1], [], [H1], []]
    assert [removed([event]) for event in events] == [[], [H1], [], [H1]]


def test_case_48_chains_join_and_strangers_do_not() -> None:
    """S(h1) S(h2 | h1) S(h9) within one step is S(h1,h2), S(h9); two removals are one event."""
    cache = new_cache(4)
    put(cache, A[:4])
    put(cache, A[:8])
    put(cache, [9] * 4)
    (h9,) = block_hashes([9] * 4, 4)
    joined, alone = cache.take_events()
    assert stored([joined]) == [H1, H2]
    assert stored([alone]) == [h9]
    cache.evict(1)
    cache.evict(2)
    (event,) = cache.take_events()
    assert removed([event]) == [H2, H1, h9]


def test_case_49_a_large_eviction_is_few_events() -> None:
    """Ten thousand pages of a thousand prompts evicted in one call are one event."""
    cache = new_cache(10_000, page_size=1)
    for prompt in range(1000):
        put(cache, range(10 * prompt, 10 * prompt + 10))
    cache.take_events()
    assert cache.evict(10_000) == 10_000
    (event,) = cache.take_events()
    assert len(removed([event])) == 10_000


# --------------------------------------------------------------------------------- random traces


@pytest.fixture(scope="module", params=[1, 2, 3])
def trace(request: pytest.FixtureRequest) -> list[Event]:
    """Everything a router hears of a cache used at random, with flushes and re-tellings."""
    heard: list[Event] = []

    def feed(cache: HiRadixCache) -> list[Event]:
        events = cache.take_events()
        heard.extend(over_the_wire(events))
        return events

    rig, random = Rig(new_cache(8, page_size=2), feed, listen_every=2), Random(request.param)
    for _ in range(600):
        random_step(random, rig)
        rig.check()
    kinds = Counter(type(event) for event in heard)
    assert min(kinds[kind] for kind in (BlockStored, BlockRemoved, AllBlocksCleared)) > 10
    return heard


def test_case_5_only_what_is_there_is_removed(trace: list[Event]) -> None:
    """Every hash of a BlockRemoved is stored on that medium at the time."""
    for present, event in with_present(trace):
        if isinstance(event, BlockRemoved):
            assert event.medium is StorageMedium.GPU
            assert present.issuperset(event.block_hashes)


def test_case_27_every_parent_was_stored_since_the_last_clear(trace: list[Event]) -> None:
    """A parent that is not None was itself stored, and is still there."""
    parents = 0
    for present, event in with_present(trace):
        if isinstance(event, BlockStored) and event.parent_block_hash is not None:
            parents += 1
            assert event.parent_block_hash in present
    assert parents > 10


def test_case_29_tokens_and_blocks_agree(trace: list[Event]) -> None:
    """Each BlockStored has `block_size` tokens for each hash, of the one block size there is."""
    for event in trace:
        if isinstance(event, BlockStored):
            assert event.block_size == 2
            assert len(event.token_ids) == 2 * len(event.block_hashes)


def test_case_29_blocks_of_an_event_have_no_hole() -> None:
    """Two branches that are stored below one prefix in one step are two events, each dense."""
    cache = new_cache(8)
    put(cache, A[:4])
    cache.take_events()
    branches = [[*A[:4], 1, 1, 1, 1], [*A[:4], 2, 2, 2, 2]]
    for branch in branches:
        put(cache, branch)
    events = cache.take_events()
    assert [stored([event]) for event in events] == [block_hashes(one, 4)[1:] for one in branches]
    assert all(isinstance(one, BlockStored) and one.parent_block_hash == H1 for one in events)


def test_case_54_nothing_is_stored_twice(trace: list[Event]) -> None:
    """A hash that is present is not stored again; a re-telling begins with a clear."""
    for present, event in with_present(trace):
        if isinstance(event, BlockStored):
            assert present.isdisjoint(event.block_hashes)
            assert len(set(event.block_hashes)) == len(event.block_hashes)


def with_present(trace: list[Event]) -> list[tuple[set[int | bytes], Event]]:
    """Each event with the hashes that are present before it."""
    found: list[tuple[set[int | bytes], Event]] = []
    present: set[int | bytes] = set()
    for event in trace:
        found.append((set(present), event))
        match event:
            case BlockStored():
                present.update(event.block_hashes)
            case BlockRemoved():
                present.difference_update(event.block_hashes)
            case AllBlocksCleared():
                present.clear()
    return found
