"""publisher.stream.foreign: an engine's odd events, against a router that keeps sets of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
    encode_batch,
)
from kvevents.columns import Columns
from kvevents.hashing import BlockHash
from kvevents.index import Oddities
from kvevents.pieces import piece_of
from kvevents.tokens import pack_tokens
from publisher.stream.foreign import ForeignCounts, ForeignState, Groups, _Index

SIZE = 2
GPU, CPU, DISK, EXTERNAL = StorageMedium
NAMES = [-(2**63), -7, -1, 0, 1, 2, 3, 2**63 - 1]
"""The blocks there are, by their hashes as our stream has them."""

CLEARED = AllBlocksCleared()


def tokens_of(name: int) -> list[int]:
    """A block's tokens, which its hash stands for."""
    return [NAMES.index(name), 9]


def store(
    names: Iterable[int], parent: int | None = None, medium: StorageMedium | None = GPU, **more: Any
) -> BlockStored:
    """Blocks as an engine would tell of them; `more` replaces."""
    blocks = list(names)
    fields: dict[str, Any] = {
        "block_hashes": blocks,
        "parent_block_hash": parent,
        "token_ids": [token for name in blocks for token in tokens_of(name)],
        "block_size": SIZE,
        "medium": medium,
    }
    return BlockStored(**fields | more)


def remove(names: Iterable[int], medium: StorageMedium | None = GPU) -> BlockRemoved:
    return BlockRemoved(list(names), medium)


# ------------------------------------------------------------------------------------- any stream


def canonical(value: int | bytes) -> int:
    """As in the contract: the low 64 bits, signed."""
    raw = int.from_bytes(value, "big") if isinstance(value, bytes) else value
    return (raw + 2**63) % 2**64 - 2**63


class Tolerant:
    """A router that believes what it can place: whole blocks, of its size, after one that it holds and
    only while it does; and without tokens those that it holds already.
    """

    def __init__(self) -> None:
        self.held: dict[int, set[StorageMedium]] = {}
        self.parents: dict[int, int | None] = {}

    def apply(self, event: Event) -> None:
        match event:
            case AllBlocksCleared():
                self.held.clear()
            case BlockRemoved(block_hashes=hashes, medium=medium):
                for name in map(canonical, hashes):
                    left = self.held.get(name, set()) - ({medium} if medium else set(StorageMedium))
                    self.held.pop(name, None)
                    if left:
                        self.held[name] = left
                while lost := {name for name in self.held if not self._is_placed(name)}:
                    for name in lost:
                        del self.held[name]
            case BlockStored(block_hashes=hashes, parent_block_hash=parent):
                names = [canonical(value) for value in hashes]
                before = None if parent is None else canonical(parent)
                if not event.token_ids:
                    for name in names if event.block_size in (0, SIZE) else ():
                        if name in self.held:
                            self.held[name].add(event.medium or GPU)
                elif self._is_sound(event) and names[:1] != [before]:
                    for name in names:
                        if before is None or (before in self.held and before != name):
                            if name not in self.held:
                                self.parents[name] = before
                            self.held.setdefault(name, set()).add(event.medium or GPU)
                        before = name

    def _is_placed(self, name: int) -> bool:
        return self.parents[name] is None or self.parents[name] in self.held

    def _is_sound(self, event: BlockStored) -> bool:
        tokens = event.token_ids
        return (
            event.block_size == SIZE
            and len(tokens) == SIZE * len(event.block_hashes)
            and all(0 <= token < 2**32 for token in tokens)
        )

    @property
    def resident(self) -> dict[StorageMedium, set[int]]:
        return {
            medium: {name for name, media in self.held.items() if medium in media}
            for medium in StorageMedium
        }


class Strict:
    """Checks a stream against the invariants 1, 2, 12 and 13, and that no block outlives its parent."""

    def __init__(self) -> None:
        self.on: set[tuple[StorageMedium, int]] = set()
        self.announced: set[int] = set()
        self.parents: dict[int, int | None] = {}

    def check(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.on, self.announced, self.parents = set(), set(), {}
            return
        assert event.block_hashes
        assert event.medium is not None
        if isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self.on.remove((event.medium, int(name)))  # 1
            held = {name for _, name in self.on}
            assert {self.parents[name] for name in held} <= held | {None}
            return
        tokens = [token for name in event.block_hashes for token in tokens_of(int(name))]
        assert list(event.token_ids) == tokens  # 13, and each block's own
        assert event.block_size == SIZE
        parent = event.parent_block_hash
        assert parent is None or parent in self.announced  # 12
        assert parent != event.block_hashes[0]
        for name in map(int, event.block_hashes):
            assert (event.medium, name) not in self.on  # 2
            if all(name != other for _, other in self.on):
                self.parents[name] = None if parent is None else int(parent)
            self.on.add((event.medium, name))
            self.announced.add(name)
            parent = name


def spelled(name: int) -> st.SearchStrategy[int | bytes]:
    """A hash in one of the forms that engines write."""
    unsigned = name % 2**64
    return st.sampled_from(
        [name, unsigned, unsigned.to_bytes(8, "big"), b"\xab" * 24 + unsigned.to_bytes(8, "big")]
    )


Names = st.sampled_from(NAMES)
Hashes = Names.flatmap(spelled)
Media = st.none() | st.sampled_from(StorageMedium)
Keys = st.none() | st.lists(st.sampled_from(["salt", b"digest", ["image", 0]]), max_size=2)


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    names = draw(st.lists(Names, max_size=5))
    event = store(names, medium=draw(Media))
    event.block_hashes = [draw(spelled(name)) for name in names]
    event.parent_block_hash = draw(st.none() | Hashes)
    oddity = draw(st.integers(0, 19))
    if oddity == 0:
        event.block_size = draw(st.sampled_from([0, 1, 4]))
    elif oddity == 1:
        event.token_ids = list(event.token_ids)[1:]
    elif oddity == 2 and names:
        event.token_ids = [2**32, *list(event.token_ids)[1:]]
    elif oddity < 6:
        event.token_ids, event.block_size = [], draw(st.sampled_from([0, SIZE, SIZE, 4]))
    elif oddity < 10:
        event.extra_keys = draw(st.lists(Keys, min_size=len(names), max_size=len(names)))
    return event


def in_group(event: Event, group: int, kind: str | None = None) -> Event:
    """The event as of a KV cache group."""
    match event:
        case BlockStored():
            return replace(event, group_idx=group, kv_cache_spec_kind=kind)
        case BlockRemoved():
            return replace(event, group_idx=group)
    return event


Events: st.SearchStrategy[Event] = st.one_of(
    stores(),
    stores(),
    st.builds(BlockRemoved, st.lists(Hashes, max_size=4), Media),
    st.just(CLEARED),
)


@given(st.lists(st.lists(Events, max_size=6), max_size=12))
def test_whatever_an_engine_says_what_comes_out_is_sound_and_complete(
    batches: list[list[Event]],
) -> None:
    """The invariants hold, nothing in it is odd to a router, and the router that hears it believes what
    one believes that hears the engine and skips what it cannot place.
    """
    state, strict, tolerant, router = ForeignState(SIZE), Strict(), Tolerant(), BlockIndex()
    for batch in batches:
        told = state.apply(batch)
        for event in told:
            strict.check(event)
        if told:
            encode_batch(KVEventBatch(1.0, list(told), 0))
        for event in batch:
            tolerant.apply(event)
        router.apply(told)
        assert router.resident == state.index.resident == tolerant.resident
    assert router.oddities == Oddities()


class Slow(_Index):
    """Nothing is done without a look at each block."""

    def store_plain(self, event: BlockStored) -> bool:
        return False

    def _store_new(self, event: BlockStored) -> bool:
        return False

    def remove_last(self, event: BlockRemoved) -> bool:
        return False


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(Events, max_size=6), max_size=12))
def test_what_is_done_at_once_is_what_is_done_one_by_one(batches: list[list[Event]]) -> None:
    """The same events, in the same order, and the same counts."""
    quick, slow = ForeignState(SIZE), ForeignState(SIZE)
    slow._index = Slow()
    for batch in batches:
        assert quick.apply(batch) == slow.apply(batch)
        assert quick.counts == slow.counts
    assert quick.index.resident == slow.index.resident


@given(st.lists(st.lists(Events, max_size=6), max_size=8))
def test_its_own_output_goes_through_unchanged(batches: list[list[Event]]) -> None:
    """What one lets out another lets through, each event the same object, and counts nothing."""
    first, second = ForeignState(SIZE), ForeignState(SIZE)
    for batch in batches:
        told = first.apply(batch)
        again = second.apply(told)
        assert list(map(id, again)) == list(map(id, told))
    assert second.counts == ForeignCounts()


@given(
    st.lists(st.tuples(Events, st.booleans()), max_size=30),
    st.sampled_from(["full_attention", "mla_attention", "sink_full_attention"]),
    st.integers(0, 3),
)
def test_what_other_groups_do_touches_nothing(
    told: list[tuple[Event, bool]], kind: str, main: int
) -> None:
    """F5: of a hybrid model's events those of the main group come out as if it were the only one."""
    first = store([0])
    plain, hybrid = after(first), after(in_group(first, main, kind))
    for event, other in told:
        if not other:
            wanted = plain.apply([event])
            assert hybrid.apply([in_group(event, main, kind)]) == wanted
        elif event != CLEARED:
            assert hybrid.apply([in_group(event, main + 1, "sliding_window")]) == []
    assert hybrid.index.resident == plain.index.resident
    assert replace_count(hybrid) == plain.counts


def replace_count(state: ForeignState) -> ForeignCounts:
    return dataclasses.replace(state.counts, other_groups=0)


# ---------------------------------------------------------------------------------- one at a time


def after(*events: Event) -> ForeignState:
    state = ForeignState(SIZE)
    state.apply(events)
    return state


def test_a_sound_event_is_not_copied() -> None:
    """A store, a removal and a clear that need no change come out as the objects that went in."""
    events: list[Event] = [store([1, 2]), remove([2]), CLEARED]
    assert all(a is b for a, b in zip(ForeignState(SIZE).apply(events), events, strict=True))


def test_blocks_that_are_there_are_cut_out_of_a_store() -> None:
    """What is left is told in runs, each with its own parent and tokens; the event given is unchanged."""
    state = after(store([1, 2, 3]), remove([3]))
    names = [0, 1, 2, 3, 2, -1]
    given = store(names)
    assert state.apply([given]) == [store([0]), store([3], parent=2), store([-1], parent=2)]
    assert state.counts == ForeignCounts(stored_again=3)
    assert given == store(names)


def test_a_store_after_an_unknown_parent_is_dropped() -> None:
    """With all that hangs on it; a block that is there already is a parent again."""
    state = ForeignState(SIZE)
    assert state.apply([store([2, 3], parent=1)]) == []
    assert state.counts == ForeignCounts(orphans=2)
    state.apply([store([0])])
    assert state.apply([store([-1, 0, 3], parent=1)]) == [store([3], parent=0)]
    assert state.counts == ForeignCounts(orphans=3, stored_again=1)


def test_a_parent_may_be_on_another_medium() -> None:
    """A block whose parent has left the device for the host is stored."""
    state = after(store([1]), store([1], medium=CPU), remove([1]))
    told = store([2], parent=1)
    assert state.apply([told]) == [told]


def test_a_clear_makes_parents_unknown() -> None:
    """From the engine or by the caller: what was stored before is no parent after it."""
    state = after(store([1]), CLEARED)
    assert state.apply([store([2], parent=1)]) == []
    state.apply([store([1])])
    state.clear()
    assert state.apply([store([2], parent=1)]) == []
    assert len(state.index) == 0
    assert state.counts == ForeignCounts(orphans=2)


def test_a_removal_of_what_is_not_there_is_dropped() -> None:
    """Unknown blocks, those of another medium, and the same one twice; the rest of the event stays."""
    state = after(store([1, 2, 3]))
    assert state.apply([remove([0]), remove([1], CPU)]) == []
    assert state.apply([remove([3, 0, 3, 2])]) == [remove([3, 2])]
    assert state.counts == ForeignCounts(removed_unknown=4)


def removals(told: Iterable[Event]) -> list[tuple[StorageMedium | None, int]]:
    """In order, and nothing else."""
    assert all(isinstance(event, BlockRemoved) for event in told)
    return [
        (event.medium, int(name))
        for event in told
        if isinstance(event, BlockRemoved)
        for name in event.block_hashes
    ]


def test_a_block_takes_those_behind_it_along() -> None:
    """When it leaves its last medium, from every medium and before it: they could be reached no more, and
    a snapshot could not place them. When it comes back they do not.
    """
    state = after(store([1, 2, 3]), store([-1], parent=2), store([1, 2, 3], medium=CPU), store([0]))
    assert state.apply([remove([2])]) == [remove([2])]
    told = removals(state.apply([remove([2, 3], CPU)]))
    assert sorted(told) == sorted([(GPU, 3), (CPU, 3), (GPU, -1), (CPU, 2)])
    assert told[-1] == (CPU, 2)
    assert state.index.resident == {GPU: {1, 0}, CPU: {1}, DISK: set(), EXTERNAL: set()}
    assert state.counts == ForeignCounts(removed_with_parent=2)
    assert state.apply([remove([3]), store([2], parent=1)]) == [store([2], parent=1)]
    assert state.counts == ForeignCounts(removed_with_parent=2, removed_unknown=1)


def test_the_last_of_many_goes_with_the_first() -> None:
    """However long the chain and wherever it branches; what went before is not told again."""
    state = after(store([0, 1, 2, 3]), store([-1, -7], parent=1), remove([3]))
    told = removals(state.apply([remove([-7, 0])]))
    assert sorted(told) == [(GPU, name) for name in (-7, -1, 0, 1, 2)]
    assert told[-2:] == [(GPU, 1), (GPU, 0)]
    assert told.index((GPU, -7)) < told.index((GPU, -1))
    assert len(state.index) == 0


def test_what_goes_with_a_block_goes_in_one_order() -> None:
    """Whatever came when: a state that is built from another has the same told."""
    for again in ([], [8], [16], [8, 16], [16, 8]):
        state = ForeignState(SIZE)
        blocks = {h: store([1], 5, block_hashes=[h]) for h in (16, 8)}
        state.apply([store([1], block_hashes=[5]), *blocks.values()])
        for name in again:
            state.apply([remove([name]), blocks[name]])
        assert removals(state.apply([remove([5])])) == [(GPU, 8), (GPU, 16), (GPU, 5)]


def test_parents_outlive_their_children_whatever_media_a_removal_is_of() -> None:
    """A removal without a medium is told in an order in which no block is without its parent."""
    state = after(store([1, 2]), store([2], parent=1, medium=CPU))
    assert state.apply([remove([1, 2], None)]) == [remove([2]), remove([2], CPU), remove([1])]


def test_a_removal_without_a_medium_is_told_for_each() -> None:
    """One event a medium, with the blocks that are on it."""
    state = after(store([1, 2]), store([1], medium=DISK))
    assert state.apply([remove([2, 1, 0], None)]) == [remove([2, 1]), remove([1], DISK)]
    assert state.counts == ForeignCounts(removed_unknown=1)
    assert len(state.index) == 0


def test_a_store_without_a_medium_is_on_the_device() -> None:
    """As engines mean it that know no other."""
    assert ForeignState(SIZE).apply([store([1], medium=None)]) == [store([1])]


def test_hashes_become_signed() -> None:
    """Unsigned integers and bytes, in stores, parents and removals."""
    unsigned = [name % 2**64 for name in (-1, -7)]
    state = ForeignState(SIZE)
    given = store([-1, -7], block_hashes=[unsigned[0], unsigned[1].to_bytes(32, "big")])
    assert state.apply([given]) == [store([-1, -7])]
    assert state.apply([store([1], parent=unsigned[1])]) == [store([1], parent=-7)]
    assert state.apply([remove([1, unsigned[1], unsigned[0]])]) == [remove([1, -7, -1])]


def test_an_empty_name_is_none() -> None:
    """Of an adapter, a salt or an extra key, and an empty list of extra keys; as the state tells it."""
    nothing: dict[str, Any] = {"lora_name": "", "cache_salt": "", "extra_key": "", "extra_keys": []}
    for name, value in nothing.items():
        state = ForeignState(SIZE)
        assert state.apply([store([1], **{name: value})]) == [store([1])]
        assert [event for chain in state.index.snapshot(9) for event in chain] == [store([1])]


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (store([1, 2], token_ids=[1, 2, 3]), ForeignCounts(malformed=2)),
        (store([1], token_ids=[]), ForeignCounts(malformed=1)),
        (store([1], token_ids=[-1, 2]), ForeignCounts(malformed=1)),
        (store([1], token_ids=[1, 2**32]), ForeignCounts(malformed=1)),
        (store([1], parent=1), ForeignCounts(malformed=1)),
        (store([1], lora_name="a" * 2000), ForeignCounts(malformed=1)),
        (store([1], extra_keys=[["a"], None]), ForeignCounts(malformed=1)),
        (store([1], extra_keys=[[{}]]), ForeignCounts(malformed=1)),
        (store([1], block_size=1, token_ids=[1]), ForeignCounts(wrong_block_size=1)),
        (store([1], block_size=4, token_ids=[]), ForeignCounts(wrong_block_size=1)),
        (store([1, 2], locality="REMOTE"), ForeignCounts(remote=2)),
        (store([1, 2], locality=""), ForeignCounts(remote=2)),
        (BlockRemoved([1, 2], GPU, locality="REMOTE"), ForeignCounts(remote=2)),
        (store([1, 2], group_idx=1), ForeignCounts(other_groups=2)),
        (BlockRemoved([1, 2], GPU, 1), ForeignCounts(other_groups=2)),
        (store([]), ForeignCounts()),
        (remove([]), ForeignCounts()),
    ],
    ids=[
        *["count", "none", "negative", "large", "self", "name", "few keys", "bad key"],
        *["size", "other size", "remote", "nowhere", "removed remote"],
        *["group", "removed group", "empty", "nothing"],
    ],
)
def test_what_cannot_be_published_is_dropped_and_counted(
    event: Event, counts: ForeignCounts
) -> None:
    """It costs only itself, and leaves no trace in the index."""
    state = ForeignState(SIZE)
    assert state.apply([event, store([3])]) == [store([3])]
    assert state.counts == counts
    assert state.index.resident[GPU] == {3}


def test_a_namespace_stays_with_every_run() -> None:
    """Adapter, salt, extra key, session and number of a store that is cut are those of its runs."""
    names: dict[str, Any] = {
        "lora_id": 4,
        "lora_name": "a",
        "cache_salt": "s",
        "session_id": "x",
        "extra_key": "k",
    }
    state = after(store([2], **names))
    assert state.apply([store([1, 2, 3], **names)]) == [
        store([1], **names),
        store([3], parent=2, **names),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "s"},
        {"lora_name": "a"},
        {"lora_id": 4},
        {"extra_key": "k"},
        {"extra_keys": [["k"], ["k"], ["k"]]},
        {"token_ids": [9] * 6},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_held_block_is_told_as_it_is_held(change: dict[str, Any]) -> None:
    """F7: whatever the engine says of it on another medium. What is new is told as the engine says."""
    state = after(store([1, 2]))
    state.apply([remove([2])])
    told = state.apply([store([1, 2, 3], medium=CPU, **change)])
    new = store([1, 2, 3], medium=CPU, **change)
    assert told == [store([1], medium=CPU), piece_of(new, 1, 3)]
    again = after(store([1]), store([1], medium=CPU), piece_of(replace(new, medium=GPU), 1, 3))
    assert again.apply([store([1, 2], medium=CPU)]) == [piece_of(new, 1, 2)]


def test_a_held_block_keeps_its_parent() -> None:
    """F7: also where the engine puts another before it; the session is the engine's, not the block's."""
    state = after(store([1, 2]), store([3]))
    assert state.apply([store([3, 2], medium=CPU)]) == [
        store([3], medium=CPU),
        store([2], parent=1, medium=CPU),
    ]
    told = store([1], medium=DISK, session_id="x")
    assert state.apply([told]) == [told]


def test_extra_keys_stay_with_their_blocks() -> None:
    """In the runs of a store that is cut, and in what the state tells again."""
    keys = [["salt"], None, [["image", 0]]]
    state = after(store([2]))
    assert state.apply([store([1, 2, 3], extra_keys=keys)]) == [
        store([1], extra_keys=[["salt"]]),
        store([3], parent=2, extra_keys=[[["image", 0]]]),
    ]
    told = [event for chain in state.index.snapshot(9) for event in chain]
    assert {event.block_hashes[0]: event.extra_keys for event in told} == {
        1: [["salt"]],
        2: None,
        3: [[["image", 0]]],
    }
    assert ForeignState(SIZE).apply([store([1, 2], extra_keys=keys[:2])]) == [
        store([1, 2], extra_keys=keys[:2])
    ]


# ------------------------------------------------------------------------------- without tokens


def bare(names: Iterable[int], medium: StorageMedium = CPU, **more: Any) -> BlockStored:
    """As vLLM's offloading tells it."""
    return store(names, None, medium, **{"token_ids": [], **more})


def test_blocks_without_tokens_are_those_of_another_medium() -> None:
    """In any order: tokens, parent, adapter and extra keys are the ones known; neighbours are joined."""
    names: dict[str, Any] = {"lora_id": 4, "lora_name": "a"}
    keys = [["a", "salt"], ["a"], ["a"]]
    held = store([1, 2, 3], **names, extra_keys=keys)
    assert after(held).apply([bare([1, 2, 3])]) == [replace(held, medium=CPU)]
    state = after(held)
    assert state.apply([bare([3, 1, 2], block_size=0)]) == [
        store([3], 2, CPU, **names, extra_keys=keys[2:]),
        store([1, 2], None, CPU, **names, extra_keys=keys[:2]),
    ]
    assert state.apply([remove([3]), bare([3, 2], GPU)]) == [
        remove([3]),
        store([3], 2, GPU, **names, extra_keys=keys[2:]),
    ]
    assert state.counts == ForeignCounts(stored_again=1)


def test_blocks_without_tokens_that_are_nowhere_are_dropped() -> None:
    """And counted; so are those that are there already."""
    state = after(store([1]))
    assert state.apply([bare([0, 1, 1]), bare([1])]) == [store([1], None, CPU)]
    assert state.counts == ForeignCounts(malformed=1, stored_again=2)


# --------------------------------------------------------------------------------------- groups

FULL, WINDOW = "full_attention", "sliding_window"


def test_a_window_that_moves_on_does_not_cost_the_block() -> None:
    """Case: evicting only the sliding window's part of a page removes nothing."""
    state = ForeignState(SIZE)
    batch: list[Event] = [in_group(store([1, 2]), 0, FULL), in_group(store([1, 2]), 1, WINDOW)]
    assert state.apply(batch) == [store([1, 2])]
    assert state.apply([BlockRemoved([1], GPU, 1)]) == []
    assert state.index.resident[GPU] == {1, 2}
    assert state.counts == ForeignCounts(other_groups=3)
    assert state.apply([BlockRemoved([2, 1], GPU, 0)]) == [remove([2, 1])]


def test_the_first_group_of_full_attention_is_the_main_one() -> None:
    """Later ones are not; events that name no group always are."""
    state = ForeignState(SIZE)
    assert state.apply([in_group(store([1]), 2, FULL), in_group(store([2]), 0, FULL)]) == [
        store([1])
    ]
    assert state.groups == Groups(2)
    assert state.apply([store([3]), BlockRemoved([1], GPU, 0), remove([1])]) == [
        store([3]),
        remove([1]),
    ]
    assert state.counts == ForeignCounts(other_groups=2)


def test_what_was_taken_for_the_main_group_is_cleared() -> None:
    """Group 0 comes out while no other is known to be the main one, and is believed no longer then."""
    state = ForeignState(SIZE)
    assert state.apply([in_group(store([1, 2]), 0, WINDOW)]) == [store([1, 2])]
    assert state.apply([in_group(store([1]), 1, FULL)]) == [CLEARED, store([1])]
    assert state.apply([BlockRemoved([1, 2], GPU, 0)]) == []
    assert state.index.resident[GPU] == {1}
    for cleared in ([CLEARED], []):
        state = after(in_group(store([1]), 0, WINDOW), *cleared)
        if not cleared:
            state.clear()
        assert state.apply([in_group(store([1]), 1, FULL)]) == [store([1])]


def test_a_new_run_may_have_other_groups() -> None:
    """The main group is forgotten with what was held, but not by the engine's own clear."""
    state = after(in_group(store([1]), 1, FULL), CLEARED)
    assert state.groups == Groups(1)
    state.clear()
    assert state.groups == Groups()
    assert state.apply([in_group(store([1]), 0, FULL)]) == [store([1])]


@pytest.mark.parametrize("group", [-1, 2**31])
def test_an_odd_number_is_no_main_group(group: int) -> None:
    """Whatever its kind: it could not be told on."""
    assert ForeignState(SIZE).apply([in_group(store([1]), group, FULL)]) == []


def test_a_block_size_is_positive() -> None:
    """Anything below 1 is refused."""
    with pytest.raises(ValueError, match="block_size: 0 is below 1"):
        ForeignState(0)


def test_what_is_local_is_ours() -> None:
    """F6: an engine that says so of its own blocks is believed; the word is not passed on."""
    state = ForeignState(SIZE)
    (told,) = state.apply([store([1, 2], locality="LOCAL")])
    assert told == store([1, 2])
    assert state.apply([BlockRemoved([2, 1], GPU, locality="REMOTE")]) == []
    assert state.apply([BlockRemoved([2, 1], GPU, locality="LOCAL")]) == [BlockRemoved([2, 1], GPU)]


def test_a_block_that_stays_elsewhere_goes_with_its_parent() -> None:
    """F2: both leave the device, and only the parent is on nothing else: it takes the other along."""
    state = after(store([1, 2]), store([2], parent=1, medium=CPU))
    told = state.apply([remove([2, 1])])
    left = Strict()
    for event in [store([1, 2]), store([2], parent=1, medium=CPU), *told]:
        left.check(event)
    assert left.on == set()
    assert state.index.resident == {medium: set() for medium in StorageMedium}


def test_columns_of_another_block_size_are_left_out() -> None:
    """As their events would be, and the size is there to be said."""
    state = ForeignState(SIZE)
    columns = Columns([BlockHash(1)], [None], [1], pack_tokens([1, 2, 3, 4]), 4, GPU)
    assert list(state.apply(columns)) == []
    assert state.counts == ForeignCounts(wrong_block_size=1)
    assert state.other_block_size == 4
