"""kvevents.index: a router's belief against a model that only knows sets of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import reference_hashes, to_bytes, to_u64, trials
from msgspec.structs import replace

from kvevents import (
    BASE,
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    FleetIndex,
    KVEventBatch,
    Namespace,
    Overlap,
    StorageMedium,
    decode_batch,
    encode_batch,
)
from kvevents.block import Chain
from kvevents.index import Oddities

GPU, CPU, DISK, EXT = StorageMedium
SIZE = 2
SPACES = [BASE, Namespace("ad"), Namespace(None, "salt"), Namespace(None, None, "ek")]


class Prefix(NamedTuple):
    """A block, named by the prompt that ends with it: one choice per block."""

    space: Namespace
    path: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self.path for token in (choice, 9)]

    @property
    def hashes(self) -> list[int]:
        names = {name: getattr(self.space, name) for name in self.space.__struct_fields__}
        return reference_hashes(self.tokens, SIZE, **names)


def store(
    block: Prefix, start: int = 0, medium: StorageMedium | None = GPU, form: Any = int
) -> BlockStored:
    """The blocks of a prompt from number `start` on."""
    hashes = [form(value) for value in block.hashes]
    return BlockStored(
        block_hashes=hashes[start:],
        parent_block_hash=hashes[start - 1] if start else None,
        token_ids=block.tokens[start * SIZE :],
        block_size=SIZE,
        lora_id=7 if block.space.lora_name else None,
        medium=medium,
        lora_name=block.space.lora_name,
        cache_salt=block.space.cache_salt,
        extra_key=block.space.extra_key,
    )


def remove(
    blocks: Iterable[Prefix], medium: StorageMedium | None = GPU, form: Any = int
) -> BlockRemoved:
    return BlockRemoved([form(block.hashes[-1]) for block in blocks], medium)


Belief = dict[StorageMedium, set[Prefix]]
Media = st.none() | st.sampled_from(StorageMedium)
Forms = st.sampled_from([int, to_u64, to_bytes])
Paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
Prefixes = st.builds(Prefix, st.sampled_from([BASE] * 5 + SPACES), Paths)


@st.composite
def tellings(draw: st.DrawFn) -> tuple[Event, Any]:
    """An event, and what it does to a belief."""
    medium, form = draw(Media), draw(Forms)
    match draw(st.sampled_from(["store"] * 6 + ["remove"] * 4 + ["clear"])):
        case "store":
            block = draw(Prefixes)
            start = draw(st.integers(0, len(block.path) - 1))
            told = {Prefix(block.space, block.path[:end]) for end in range(start + 1, 5)}

            def add(belief: Belief) -> None:
                belief[medium or GPU] |= told

            return store(block, start, medium, form), add
        case "remove":
            blocks = draw(st.lists(Prefixes, min_size=1, max_size=4))

            def drop(belief: Belief) -> None:
                for each in StorageMedium if medium is None else [medium]:
                    belief[each] -= set(blocks)

            return remove(blocks, medium, form), drop
        case _:

            def forget(belief: Belief) -> None:
                for held in belief.values():
                    held.clear()

            return AllBlocksCleared(), forget


Tellings = st.lists(tellings(), max_size=12)


def indexed(events: Iterable[Event]) -> BlockIndex:
    index = BlockIndex()
    index.apply(events)
    return index


def hashes_of(belief: Belief) -> dict[StorageMedium, set[int]]:
    return {medium: {block.hashes[-1] for block in held} for medium, held in belief.items()}


def brute_force(belief: Belief, prompt: Prefix) -> Overlap:
    """The overlap by its definition."""

    def leading(held: set[Prefix]) -> int:
        count = 0
        while count < len(prompt.path) and Prefix(prompt.space, prompt.path[: count + 1]) in held:
            count += 1
        return count

    return Overlap(
        {medium: leading(held) for medium, held in belief.items()},
        leading(set().union(*belief.values())),
    )


def details(index: BlockIndex) -> dict[tuple[int | bytes, StorageMedium | None], Any]:
    """All an index says of each block on each medium."""
    found = {}
    for chain in index.snapshot(1):
        for event in chain:
            (name,) = event.block_hashes
            found[name, event.medium] = (
                event.parent_block_hash,
                list(event.token_ids),
                event.lora_id,
                event.lora_name,
                event.cache_salt,
                event.extra_key,
                event.extra_keys,
            )
    return found


# ------------------------------------------------------------------------------------ X1, X2, X3


@trials(200)
@given(Tellings, st.lists(Prefixes, min_size=1, max_size=3))
def test_belief_follows_events(told: list[tuple[Event, Any]], prompts: list[Prefix]) -> None:
    """X1, X2: after each event residency, counts and overlap are those of a model of prompts.

    Whether the index was asked before (and so keeps its table of children) makes no difference.
    """
    asked, silent = BlockIndex(), BlockIndex()
    belief: Belief = {medium: set() for medium in StorageMedium}
    for event, change in told:
        asked.apply([event])
        silent.apply([event])
        change(belief)
        assert asked.resident == hashes_of(belief)
        assert len(asked) == len(set().union(*belief.values()))
        assert [asked.count(medium) for medium in belief] == [len(it) for it in belief.values()]
        for prompt in prompts:
            tail = [*prompt.tokens, 5]  # a partial block counts for nothing
            assert asked.overlap(tail, prompt.space) == brute_force(belief, prompt)
    for prompt in prompts:
        assert silent.overlap(prompt.tokens, prompt.space) == brute_force(belief, prompt)


@trials(150)
@given(Tellings, st.data())
def test_replayed_events_change_nothing(told: list[tuple[Event, Any]], data: st.DataObject) -> None:
    """X3: applying a stretch up to now again, all of it or its end, leaves everything as it is."""
    events = [event for event, _ in told]
    index = indexed(events)
    before = index.resident, details(index), index.block_size
    index.apply(events[data.draw(st.integers(0, len(events))) :])
    assert (index.resident, details(index), index.block_size) == before


@trials(100)
@given(tellings())
def test_an_event_twice_is_an_event_once(told: tuple[Event, Any]) -> None:
    """X3: the second time changes nothing."""
    index, again = indexed([told[0]]), indexed([told[0], told[0]])
    assert details(index) == details(again)


A = Prefix(BASE, (0, 1, 0))


class OneByOne(BlockIndex):
    """Looks at each block, however new they all are."""

    def _store_new(self, event: BlockStored) -> bool:
        return False


@trials(300)
@given(Tellings)
def test_blocks_stored_at_once_are_as_those_stored_one_by_one(
    told: list[tuple[Event, Any]],
) -> None:
    """In all that an index says."""
    at_once, one_by_one = BlockIndex(), OneByOne()
    for event, _ in told:
        at_once.apply([event])
        one_by_one.apply([event])
        assert details(at_once) == details(one_by_one)
        assert at_once.oddities == one_by_one.oddities
        assert at_once.resident == one_by_one.resident
        for medium in StorageMedium:
            assert at_once.count(medium) == one_by_one.count(medium)


@trials(200)
@given(Tellings)
def test_tokens_that_are_gone_are_not_kept(told: list[tuple[Event, Any]]) -> None:
    """Blocks told at once share their event's tokens: at least half of what is shared is of blocks that
    are held, however they were removed.
    """
    index = BlockIndex()
    for event, _ in told:
        index.apply([event])
        blocks = index._blocks.values()
        left = Counter(block.text for block in blocks if isinstance(block.text, Chain))
        for chain, count in left.items():
            assert 2 <= len(chain.hashes) <= 2 * count
            assert len(chain.packed) == len(chain.hashes) * chain.step


def test_names_that_are_gone_are_not_kept() -> None:
    """A salt for each request, or a stranger's names on stores that are none: both are let go."""
    index = BlockIndex()
    for number in range(3000):
        salt = f"{number}"
        index.apply([BlockStored([number], None, [1, 2], 2, medium=GPU, cache_salt=salt)])
        index.apply([BlockRemoved([number]), BlockStored([1], None, [1], 2, cache_salt=f"-{salt}")])
    index.apply([BlockStored([1], None, [1, 2], 2, medium=GPU, cache_salt="kept")])
    assert len(index) == 1
    assert len(index._namespaces) < 1500
    assert index.overlap([1, 2], Namespace(cache_salt="kept")).any_medium == 1


LONG = list(range(1, 201))
"""Tokens of a hundred blocks."""


@pytest.mark.parametrize("at", [0, 1, 2, 31, 32, 33, 63, 64, 65, 98, 99, 100])
def test_a_long_event_is_found_as_far_as_it_goes(at: int) -> None:
    """Wherever a prompt leaves it, wherever it has a hole, and wherever a block is gone from a medium."""
    names = [*range(1000, 1100)]
    event = BlockStored([*names], None, [*LONG], SIZE, medium=GPU)
    index = indexed([event])
    other = [*LONG[: at * SIZE], 0, *LONG[at * SIZE + 1 :]]
    assert index.overlap(other).any_medium == at
    assert index.overlap(LONG[: at * SIZE + 1]).any_medium == at
    gone: Event = BlockRemoved(names[at : at + 1], GPU)
    index.apply([gone])
    assert index.overlap(LONG).any_medium == at
    index = indexed([event, replace(event, medium=CPU), gone])
    assert index.overlap(LONG) == Overlap({GPU: at, CPU: 100, DISK: 0, EXT: 0}, 100)
    tail = BlockStored([5, 6], names[at - 1] if at else None, [7, 7, 8, 8], SIZE, medium=GPU)
    index = indexed([event, tail])
    assert index.overlap([*LONG[: at * SIZE], 7, 7, 8, 8, 9, 9]).any_medium == at + 2
    assert index.overlap(LONG).any_medium == 100


def test_tiers_are_independent() -> None:
    """Case 22: removed from the GPU, a block is still found on the CPU."""
    index = indexed([store(A), store(A, medium=CPU), remove([A], GPU)])
    overlap = index.overlap(A.tokens)
    assert overlap.blocks == {GPU: 2, CPU: 3, DISK: 0, EXT: 0}
    assert overlap.any_medium == 3


def test_a_removal_without_a_medium_is_from_all() -> None:
    """Case 22: an untagged removal takes the block from every tier."""
    index = indexed([store(A, medium=medium) for medium in StorageMedium])
    index.apply([remove([A], None)])
    assert {medium: len(held) for medium, held in index.resident.items()} == dict.fromkeys(
        StorageMedium, 2
    )


def test_no_medium_is_the_gpu() -> None:
    """Case 102: a store without a medium and a removal from "GPU" cancel out, in any spelling."""
    index = indexed([store(A, medium=None)])
    assert index.count(GPU) == 3
    hashes = list(reversed(A.hashes))
    for spelling in ("gpu", "GPU"):
        index.apply([BlockRemoved(list(hashes), StorageMedium(spelling))])
        assert len(index) == 0


@pytest.mark.parametrize("stored_as", [int, to_u64, to_bytes])
@pytest.mark.parametrize("removed_as", [int, to_u64, to_bytes])
def test_forms_of_a_hash_are_one_block(stored_as: Any, removed_as: Any) -> None:
    """Case 36: stored as i64, u64 or bytes and removed as any other, it is the same block."""
    index = indexed([store(A, form=stored_as), store(A, 1, CPU, removed_as)])
    assert index.resident[GPU] == set(A.hashes)
    assert index.resident[CPU] == set(A.hashes[1:])
    index.apply([BlockRemoved([removed_as(value) for value in A.hashes], GPU)])
    assert index.count(GPU) == 0


def test_blocks_of_an_event_are_a_chain() -> None:
    """Case 25: the parent belongs to the first block only; each other one's is the block before."""
    index = indexed([store(A)])
    parents = {name: found[0] for (name, _), found in details(index).items()}
    first, second, third = A.hashes
    assert parents == {first: None, second: first, third: second}


def test_namespaces_keep_equal_tokens_apart() -> None:
    """Equal tokens are found in the namespace they were stored in and in no other."""
    for held in SPACES:
        index = indexed([store(Prefix(held, A.path))])
        for asked in SPACES:
            assert index.overlap(A.tokens, asked).any_medium == (3 if asked == held else 0)


def test_a_hole_in_a_prefix_ends_it() -> None:
    """Blocks behind one that is gone are no prefix; told again, the one joins them up."""
    index = indexed([store(A)])
    index.apply([remove([Prefix(BASE, (0, 1))])])
    assert index.overlap(A.tokens).any_medium == 1
    index.apply([store(Prefix(BASE, (0, 1)), 1)])
    assert index.overlap(A.tokens).any_medium == 3


def test_overlap_on_a_medium_needs_every_block_there() -> None:
    """A block that is only on another tier ends the prefix on this one, and not on any."""
    index = indexed([store(A), store(A, medium=CPU), remove([Prefix(BASE, (0, 1))])])
    overlap = index.overlap(A.tokens)
    assert overlap.blocks == {GPU: 1, CPU: 3, DISK: 0, EXT: 0}
    assert overlap.any_medium == 3


def test_an_empty_index_has_nothing_of_anything() -> None:
    """Before the first store, and after a clear, the overlap is zero on each medium."""
    none = Overlap(dict.fromkeys(StorageMedium, 0), 0)
    assert BlockIndex().overlap([1, 2, 3]) == none
    index = indexed([store(A), AllBlocksCleared()])
    assert index.overlap(A.tokens) == none
    assert index.block_size is None


def test_a_clear_allows_another_block_size() -> None:
    """After a clear the engine may come back with another block size."""
    index = indexed([store(A), AllBlocksCleared()])
    (name,) = reference_hashes([1, 2, 3], 3)
    index.apply([BlockStored([name], None, [1, 2, 3], 3)])
    assert index.block_size == 3
    assert index.overlap([1, 2, 3]).any_medium == 1


# -------------------------------------------------------------------------------------- snapshot


@trials(200)
@given(Tellings, st.integers(1, 5))
def test_a_snapshot_rebuilds_the_index(told: list[tuple[Event, Any]], longest: int) -> None:
    """X4: in bounded chains, each block once on each medium, parents first; the same index comes out."""
    index = indexed([event for event, _ in told])
    resident, told_on = index.resident, {medium: set[int | bytes]() for medium in StorageMedium}
    rebuilt = BlockIndex()
    for chain in index.snapshot(longest):
        for event in chain:
            assert 1 <= len(event.block_hashes) <= longest
            assert event.medium is not None
            parent = event.parent_block_hash
            for name in event.block_hashes:
                assert parent not in resident[event.medium] or parent in told_on[event.medium]
                assert name not in told_on[event.medium]
                told_on[event.medium].add(name)
                parent = name
        rebuilt.apply(chain)
    assert told_on == resident == rebuilt.resident
    assert details(rebuilt) == details(index)
    assert rebuilt.oddities.stored_again == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_name": "x"},
        {"cache_salt": "x"},
        {"extra_key": "x"},
        {"lora_id": 7},
        {"medium": CPU},
        {"token_ids": []},
        {"parent_block_hash": None},
    ],
)
def test_blocks_that_differ_are_told_by_events_of_their_own(changed: dict[str, Any]) -> None:
    """X4: a chain is told by one event as far as its blocks are alike; engines need not have them so."""
    first = BlockStored([1], None, [1] * SIZE, SIZE, medium=GPU)
    second = replace(BlockStored([2], 1, [2] * SIZE, SIZE, medium=GPU), **changed)
    index = indexed([first, second])
    assert [event for chain in index.snapshot(100) for event in chain] == [first, second]


def test_snapshots_are_long_chains() -> None:
    """A prompt on two media is one event on each, not one a block; a branch starts another."""
    other = Prefix(BASE, (0, 1, 1))
    index = indexed([store(A), store(A, medium=CPU), store(other, 2)])
    chains = list(index.snapshot(100))
    assert [[(it.medium, len(it.block_hashes)) for it in chain] for chain in chains] == [
        [(GPU, 3), (CPU, 3)],
        [(GPU, 1)],
    ]
    assert [len(chain[0].block_hashes) for chain in index.snapshot(2)] == [2, 1, 1]


def test_snapshots_tell_parents_first_whatever_came_first() -> None:
    """X4: blocks that came before their parents are told after them."""
    index = indexed([store(A, 2), store(A, 1), store(A, medium=CPU), store(A)])
    names = [name for chain in index.snapshot(1) for it in chain for name in it.block_hashes]
    assert names == [name for name in A.hashes for _ in (GPU, CPU)]


@trials(60)
@given(Tellings, Tellings)
def test_a_fork_is_independent(
    told: list[tuple[Event, Any]], later: list[tuple[Event, Any]]
) -> None:
    """Neither the copy nor the original sees what is applied to the other."""
    index = indexed([event for event, _ in told])
    index.overlap([0, 9])
    before = details(index)
    fork = index.fork()
    assert details(fork) == before
    fork.apply([event for event, _ in later])
    assert details(index) == before
    expected = indexed([event for event, _ in told + later])
    assert details(fork) == details(expected)
    assert [fork.count(m) for m in StorageMedium] == [expected.count(m) for m in StorageMedium]
    assert fork.overlap(A.tokens) == expected.overlap(A.tokens)


# ------------------------------------------------------------------------- tokens left out


def redacted(event: Event) -> Event:
    return replace(event, token_ids=[]) if isinstance(event, BlockStored) else event


@trials(150)
@given(Tellings)
def test_without_tokens_all_but_the_overlap_is_known(told: list[tuple[Event, Any]]) -> None:
    """A publisher may leave the tokens out: residency, parents and counts are the same, and the snapshot
    after it rebuilds the index; no prompt is found.
    """
    events = [event for event, _ in told]
    plain, index = indexed(events), indexed([redacted(event) for event in events])
    assert index.resident == plain.resident
    assert [index.count(medium) for medium in StorageMedium] == [
        plain.count(medium) for medium in StorageMedium
    ]
    assert (index.oddities, index.block_size) == (plain.oddities, plain.block_size)
    assert index.overlap(A.tokens) == Overlap(dict.fromkeys(StorageMedium, 0), 0)
    assert details(index) == {
        key: (parent, [], *rest) for key, (parent, _, *rest) in details(plain).items()
    }
    rebuilt = indexed(event for chain in index.snapshot(3) for event in chain)
    assert details(rebuilt) == details(index)


@trials(150)
@given(Tellings, st.lists(st.booleans(), min_size=12, max_size=12), st.integers(1, 4))
def test_some_with_and_some_without_tokens(
    told: list[tuple[Event, Any]], out: list[bool], longest: int
) -> None:
    """A chain of which some blocks were told with tokens and some without is told again as events that
    may be sent, and rebuilds the index; what was told with tokens is found as far as it goes.
    """
    events = [
        redacted(event) if bare else event for (event, _), bare in zip(told, out, strict=False)
    ]
    index = indexed(events)
    chains = [list[Event](chain) for chain in index.snapshot(longest)]
    for chain in chains:
        encode_batch(KVEventBatch(0.0, chain, 0))
    rebuilt = indexed(event for chain in chains for event in chain)
    assert details(rebuilt) == details(index)
    assert rebuilt.oddities.malformed == 0
    for prompt in (A, Prefix(BASE, (0, 0, 1))):
        assert rebuilt.overlap(prompt.tokens) == index.overlap(prompt.tokens)


def test_the_overlap_ends_where_tokens_were_left_out() -> None:
    """What is behind a block without tokens cannot be found by tokens, before or after a first query."""
    for asked in (False, True):
        index = BlockIndex()
        if asked:
            index.overlap(A.tokens)
        for event in (
            redacted(store(Prefix(BASE, A.path[:2]), 1)),
            store(A, 2),
            store(Prefix(BASE, A.path[:1])),
        ):
            index.apply([event])
        assert index.overlap(A.tokens).any_medium == 1
        index.apply([remove([A])])
        assert len(index) == 2


# ------------------------------------------------------------------------------ vLLM's extra keys


@pytest.mark.parametrize("asked", [False, True])
def test_a_block_with_extra_keys_is_of_no_plain_prompt(asked: bool) -> None:
    """It and what is behind it are held and not found by tokens; a block of the same tokens without them
    is, and its removal leaves the other.
    """
    index = BlockIndex()
    if asked:
        index.overlap(A.tokens)
    image = replace(store(A), block_hashes=[71, 72, 73], extra_keys=[None, [["image-1", 0]], None])
    index.apply([image])
    assert index.resident[GPU] == {71, 72, 73}
    assert index.overlap(A.tokens).any_medium == 1
    index.apply([store(A), BlockRemoved([71, 72, 73], GPU)])
    assert index.overlap(A.tokens).any_medium == 3


@pytest.mark.parametrize("asked", [False, True])
def test_a_block_of_an_adapter_without_a_name_is_of_no_plain_prompt(asked: bool) -> None:
    """It has other KV than the base model's, which it neither stands for nor takes along."""
    tokens = [1, 2, 3, 4]
    index = BlockIndex()
    if asked:
        index.overlap(tokens)
    index.apply([BlockStored([1, 2], None, tokens, 2, lora_id=7, medium=GPU)])
    index.apply([BlockStored([3], None, tokens[:2], 2, lora_id=8, medium=GPU)])
    assert (len(index), index.overlap(tokens).any_medium) == (3, 0)
    index.apply([BlockStored([4], None, tokens[:2], 2, medium=GPU)])
    index.apply([BlockStored([5], 4, tokens[2:], 2, lora_id=7, medium=GPU)])
    assert index.overlap(tokens).any_medium == 1
    index.apply([BlockRemoved([1, 3, 5], GPU)])
    assert index.overlap(tokens).any_medium == 1


def test_an_adapters_name_among_the_extra_keys_says_nothing_new() -> None:
    """vLLM tells it there too: the blocks are found in the adapter's namespace, and in no other."""
    adapter = Prefix(Namespace("ad"), A.path)
    index = indexed([replace(store(adapter), extra_keys=[["ad"], ["ad"], ["ad", "salt"]])])
    assert index.overlap(A.tokens, Namespace("ad")).any_medium == 2
    assert index.overlap(A.tokens).any_medium == 0


def test_extra_keys_stay_with_their_blocks() -> None:
    """In chains of any length, on every medium; events without any are told without."""
    keys = [["salt"], None, [["image-1", 0], b"\x01"]]
    index = indexed([replace(store(A), extra_keys=keys), store(A, medium=CPU)])
    for longest, wanted in (
        (9, [keys]),
        (2, [keys[:2], keys[2:]]),
        (1, [keys[:1], None, keys[2:]]),
    ):
        chains = list(index.snapshot(longest))
        assert [[event.extra_keys for event in chain] for chain in chains] == [
            [each, each] for each in wanted
        ]
    assert [event.extra_keys for event in next(indexed([store(A)]).snapshot(9))] == [None]


def test_empty_extra_keys_are_none() -> None:
    """A block with an empty list is the same as one without, and so is an event."""
    empties: list[Any] = [[], [[], [], []], [None, [], None]]
    for empty in empties:
        index = indexed([replace(store(A), extra_keys=empty)])
        assert index.overlap(A.tokens).any_medium == 3
        assert details(index) == details(indexed([store(A)]))


# ------------------------------------------------------------------------------------ bad events

H1, H2, H3 = A.hashes
MALFORMED: dict[str, BlockStored] = {
    "block size 0": BlockStored([H1], None, [], 0),
    "negative block size": BlockStored([H1], None, [], -2),
    "another block size": BlockStored([H1], None, [1, 2, 3], 3),
    "few tokens": BlockStored([H1, H2], None, [1, 2, 3], SIZE),
    "many tokens": BlockStored([H1], None, [1, 2, 3], SIZE),
    "negative token": BlockStored([H1], None, [1, -1], SIZE),
    "large token": BlockStored([H1], None, [1, 2**32], SIZE),
    "few extra keys": BlockStored([H1, H2], None, [1, 2, 3, 4], SIZE, extra_keys=[["a"]]),
    "extra keys that are no list": BlockStored([H1], None, [1, 2], SIZE, extra_keys=["a"]),
    "extra keys that cannot be sent": BlockStored([H1], None, [1, 2], SIZE, extra_keys=[[{}]]),
    "own parent": BlockStored([H1], H1, [1, 2], SIZE),
    "own parent in another form": BlockStored([to_u64(H1)], to_bytes(H1), [1, 2], SIZE),
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_store_costs_only_itself(bad: BlockStored) -> None:
    """Case 53: skipped and counted by block, wherever it comes; the rest is as if it had not come."""
    good = store(Prefix(BASE, (1, 1)))
    for events in ([good, bad], [bad, good]) if bad.block_size != 3 else ([good, bad],):
        index = indexed(events)
        assert details(index) == details(indexed([good]))
        assert index.block_size == SIZE
        assert index.oddities == Oddities(malformed=len(bad.block_hashes))
        assert index.overlap([1, 9, 1, 9]).any_medium == 2


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_first_store_settles_nothing(bad: BlockStored) -> None:
    """An index that has only heard nonsense is empty, and can be asked."""
    if bad.block_size == 3:  # sound when it comes first
        return
    index = indexed([bad])
    assert index.overlap([1, 2, 3]) == Overlap(dict.fromkeys(StorageMedium, 0), 0)
    assert index.block_size is None
    assert list(index.snapshot(9)) == []


def test_a_store_of_no_blocks_settles_nothing() -> None:
    """An event without blocks says nothing, not even how large they are."""
    index = indexed([BlockStored([], None, [], 99), store(A)])
    assert index.block_size == SIZE
    assert len(index) == 3


def test_oddities_are_counted() -> None:
    """What a sound publisher would not say is counted by block and changes nothing."""
    index = indexed([store(A), store(A), remove([A], CPU), store(Prefix(BASE, (1, 1)), 1)])
    assert index.oddities == Oddities(stored_again=3, removed_unknown=1, unknown_parent=1)
    index.clear()
    assert index.oddities.stored_again == 3


Numbers = st.integers(-2, 3) | st.sampled_from([-(2**63), 2**63, 2**64 - 1])
Hashes = Numbers | st.binary(max_size=9)
AnyStore = st.builds(
    BlockStored,
    st.lists(Hashes, max_size=3),
    st.none() | Hashes,
    st.lists(st.integers(-1, 2) | st.just(2**32), max_size=4),
    st.integers(-1, 2),
    st.none() | Numbers,
    Media,
    *[st.none() | st.text(max_size=2)] * 4,
    st.none() | st.lists(st.none() | st.lists(Hashes | st.just({}), max_size=2), max_size=3),
)
AnyEvent = st.one_of(
    AnyStore,
    AnyStore,
    st.builds(BlockRemoved, st.lists(Hashes, max_size=3), Media),
    st.just(AllBlocksCleared()),
)


@trials(300)
@given(st.lists(AnyEvent, max_size=8), st.integers(1, 3))
def test_whatever_was_said_can_be_told_again(events: list[Event], longest: int) -> None:
    """Any events that can be decoded are survived, and the snapshot after them is a valid batch.

    A sidecar keeps a foreign engine's state in an index: nonsense from the engine must not stop it.
    """
    index = BlockIndex()
    for event in events:
        index.apply([event])
        index.overlap([0, 1, 2, 1])
    chains = [list[Event](chain) for chain in index.snapshot(longest)]
    told = KVEventBatch(0.0, [event for chain in chains for event in chain], 0)
    read = decode_batch(encode_batch(told)).batch
    assert details(indexed(read.events)) == details(index)
    assert indexed(read.events).resident == index.resident


# ----------------------------------------------------------------------------------------- fleet


def test_ranks_are_apart() -> None:
    """Case 68: state is kept by worker and rank; a clear or a forgotten worker leaves the others."""
    fleet = FleetIndex()
    for worker in ("w0", "w1"):
        for rank in (0, 1):
            fleet.rank(worker, rank).apply([store(A)])
    fleet.rank("w0", 1).apply([AllBlocksCleared()])
    found = {key: overlap.any_medium for key, overlap in fleet.overlap(A.tokens).items()}
    assert found == {("w0", 0): 3, ("w0", 1): 0, ("w1", 0): 3, ("w1", 1): 3}
    fleet.forget("w1")
    assert fleet.overlap(A.tokens).keys() == {("w0", 0), ("w0", 1)}
    assert len(fleet.rank("w1", 0)) == 0


def test_what_came_before_its_parent_is_found_behind_it() -> None:
    """Also where its parent comes in the middle of a chain that goes on elsewhere."""
    early, chain = Prefix(BASE, (1, 2, 3)), Prefix(BASE, (1, 2, 4, 5))
    index = indexed([store(early, 2)])
    assert index.overlap(early.tokens).any_medium == 0
    index.apply([store(chain)])
    assert index.overlap(early.tokens).any_medium == 3
    assert index.overlap(chain.tokens).any_medium == 4


@pytest.mark.parametrize("at", [1, 4])
def test_a_block_that_came_back_with_other_tokens_ends_the_prefix(at: int) -> None:
    """It is in the place that it had in its chain, and what the chain says is no more what it is."""
    whole = Prefix(BASE, (0, 1, 0, 1, 0, 1, 0, 1))
    index = indexed([store(whole)])
    assert index.overlap(whole.tokens).any_medium == 8
    index.apply([BlockRemoved([whole.hashes[at]], GPU)])
    assert index.overlap(whole.tokens).any_medium == at
    before, name = whole.hashes[at - 1 : at + 1]
    index.apply([BlockStored([name], before, [5, 5], SIZE, medium=GPU)])
    assert index.overlap(whole.tokens).any_medium == at
    assert index.overlap([*whole.tokens[: at * SIZE], 5, 5]).any_medium == at + 1


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
def test_a_block_that_goes_leaves_those_beside_it(gone: int) -> None:
    """Behind one parent: the first of them, the others, and one with the tokens of another."""
    children = [(101, [1, 1]), (102, [2, 2]), (103, [3, 3]), (104, [3, 3])]
    index = indexed([BlockStored([100], None, [0, 0], SIZE, medium=GPU)])
    assert index.overlap([0, 0]).any_medium == 1
    for name, tokens in children:
        index.apply([BlockStored([name], 100, tokens, SIZE, medium=GPU)])
    index.apply([BlockRemoved([children[gone][0]], GPU)])
    for at, (_, tokens) in enumerate(children):
        if at != gone and (gone, at) != (3, 2):  # of two alike the one that came last is found
            assert index.overlap([0, 0, *tokens]).any_medium == 2
