"""kvevents.materializer: from ids to hashes, against a model that knows only prompts and media."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import reference_hashes, trials

from kvevents import (
    BASE,
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    HashFormat,
    KVEventBatch,
    KVEventsError,
    Materializer,
    Namespace,
    StorageMedium,
    encode_batch,
    pack_tokens,
)
from kvevents.materializer import FrozenRuns, SavedRun
from kvevents.records import BlockId, Clear, Record, Remove, StoreKnown, StoreNew

GPU, CPU, DISK, EXT = StorageMedium
SIZE = 2
SPACES = [BASE, Namespace("ad"), Namespace(None, "salt"), Namespace("ad", "salt", "ek")]
Tokens = tuple[int, ...]


def hashes(tokens: Any, space: Namespace = BASE, *, dynamo: bool = False) -> list[int]:
    names = {name: getattr(space, name) for name in space.__struct_fields__}
    return reference_hashes(tokens, SIZE, dynamo=dynamo, **names)


def new(
    first: int,
    tokens: Any,
    parent: int | None = None,
    medium: StorageMedium = GPU,
    space: Namespace | None = None,
) -> StoreNew:
    """A store of new blocks; `tokens` are theirs alone."""
    parent_id = None if parent is None else BlockId(parent)
    packed = pack_tokens(tokens)
    return StoreNew(medium, BlockId(first), len(tokens) // SIZE, parent_id, space, packed)


def known(first: int, count: int = 1, medium: StorageMedium = CPU) -> StoreKnown:
    return StoreKnown(medium, BlockId(first), count)


def remove(*ranges: tuple[int, int], medium: StorageMedium = GPU) -> Remove:
    return Remove(medium, [(BlockId(first), count) for first, count in ranges])


def stored(
    names: list[int], parent: int | None, tokens: Any, medium: StorageMedium = GPU, **more: Any
) -> BlockStored:
    return BlockStored(list(names), parent, list(tokens), SIZE, medium=medium, **more)


def removed(*names: int, medium: StorageMedium = GPU) -> BlockRemoved:
    return BlockRemoved(list(names), medium)


# ----------------------------------------------------------------------------------------- model


@dataclass
class Known:
    """A block as the model knows it: the whole prompt up to its end."""

    prompt: Tokens
    space: Namespace
    parent: int | None
    media: set[StorageMedium] = field(default_factory=set)

    @property
    def name(self) -> int:
        return hashes(self.prompt, self.space)[-1]


Flat = tuple[str, StorageMedium | None, int | None]


class Model:
    """Which block is where, and what was said about it: one line per block, in order."""

    def __init__(self) -> None:
        self.blocks: dict[int, Known] = {}
        self.next_id = 0
        self.said: list[Flat] = []
        self.parents: dict[int, int | None] = {}
        """The parent's hash of every hash ever."""

    # what a cache may do; each returns a record, or None when there is nothing to do it to

    def store_new(self, data: st.DataObject) -> Record | None:
        medium = data.draw(st.sampled_from(StorageMedium))
        parent = data.draw(st.sampled_from([None, *self.blocks]))
        space = data.draw(st.sampled_from(SPACES)) if parent is None else self.blocks[parent].space
        prompt = () if parent is None else self.blocks[parent].prompt
        held = {(block.space, block.prompt) for block in self.blocks.values()}
        first, added = self.next_id, list[Known]()
        for choice in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)):
            before = parent if not added else first + len(added) - 1
            block = Known((*prompt, choice, 9), space, before)
            if (space, block.prompt) in held:
                break
            prompt = block.prompt
            added.append(block)
        if not added:
            return None
        self.next_id += len(added)
        self.tell_new(first, added, medium)
        start = len(added[0].prompt) - SIZE
        told = space if parent is None else None
        return new(first, added[-1].prompt[start:], parent, medium, told)

    def store_known(self, data: st.DataObject) -> Record | None:
        medium = data.draw(st.sampled_from(StorageMedium))
        found = self.stretch(data, lambda block: medium not in block.media, 4)
        if not found:
            return None
        for at in found:
            self.tell(at, medium)
        return known(found[0], len(found), medium)

    def remove(self, data: st.DataObject) -> Record | None:
        medium = data.draw(st.sampled_from(StorageMedium))
        ranges: list[list[int]] = []
        for _ in range(data.draw(st.integers(1, 3))):
            found = self.stretch(data, lambda block: medium in block.media, 6)
            for at in found:
                self.blocks[at].media.discard(medium)
            ranges.append(found)
        ranges = sorted((it for it in ranges if it), reverse=True)
        for found in ranges:
            self.said += [("R", medium, self.blocks[at].name) for at in reversed(found)]
        self.blocks = {at: block for at, block in self.blocks.items() if block.media}
        return remove(*[(it[0], len(it)) for it in ranges], medium=medium) if ranges else None

    def clear(self, data: st.DataObject) -> Record | None:
        self.blocks.clear()
        self.said.append(("C", None, None))
        return Clear()

    def retell(self, data: st.DataObject) -> list[Record]:
        """Start over with the same ids, block by block, parents first but otherwise in any order."""
        if any(
            it.parent is not None and it.parent not in self.blocks for it in self.blocks.values()
        ):
            return []  # a cache has no block without its parent
        old, records = self.blocks, list[Record]()
        self.blocks = {}
        self.clear(data)
        records.append(Clear())
        while len(self.blocks) < len(old):
            ready = [
                at
                for at, it in old.items()
                if at not in self.blocks and (it.parent is None or it.parent in self.blocks)
            ]
            at = data.draw(st.sampled_from(ready))
            block, media = old[at], sorted(old[at].media)
            block.media = set()
            self.tell_new(at, [block], media[0])
            told = block.space if block.parent is None else None
            records.append(new(at, block.prompt[-SIZE:], block.parent, media[0], told))
            for medium in media[1:]:
                self.tell(at, medium)
                records.append(known(at, 1, medium))
        return records

    # inside

    def tell_new(self, first: int, added: list[Known], medium: StorageMedium) -> None:
        for at, block in enumerate(added, first):
            self.blocks[at] = block
            names = [None, *hashes(block.prompt, block.space)]
            self.parents[block.name] = names[-2]
            self.tell(at, medium)

    def tell(self, at: int, medium: StorageMedium) -> None:
        self.blocks[at].media.add(medium)
        self.said.append(("S", medium, self.blocks[at].name))

    def stretch(
        self, data: st.DataObject, fits: Callable[[Known], bool], longest: int
    ) -> list[int]:
        """Consecutive ids of blocks that fit."""
        ids = [at for at, block in self.blocks.items() if fits(block)]
        if not ids:
            return []
        first = data.draw(st.sampled_from(ids))
        count = data.draw(st.integers(1, longest))
        found = [first]
        while len(found) < count and found[-1] + 1 in ids:
            found.append(found[-1] + 1)
        return found

    @property
    def resident(self) -> dict[StorageMedium, set[int]]:
        return {
            medium: {block.name for block in self.blocks.values() if medium in block.media}
            for medium in StorageMedium
        }


def flat(events: list[Event]) -> Iterator[Flat]:
    """Events as one line per block."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield "C", None, None
            continue
        kind = "S" if isinstance(event, BlockStored) else "R"
        for name in event.block_hashes:
            assert isinstance(name, int)
            yield kind, event.medium, name


def check_contract(events: list[Event], model: Model) -> None:
    """Each store is dense and chained (case 29, invariant 11); none and no removal could be joined."""
    for event in events:
        if isinstance(event, BlockStored):
            assert event.block_size == SIZE
            assert len(event.token_ids) == len(event.block_hashes) * SIZE
            parent = event.parent_block_hash
            for name in event.block_hashes:
                assert isinstance(name, int)
                assert model.parents[name] == parent
                parent = name
    for left, right in itertools.pairwise(events):
        match left, right:
            case BlockStored(), BlockStored():
                chained = right.parent_block_hash == left.block_hashes[-1]
                assert left.medium is not right.medium or not chained
            case BlockRemoved(), BlockRemoved():
                assert left.medium is not right.medium


@trials(150)
@given(st.data())
def test_events_say_exactly_what_the_records_say(data: st.DataObject) -> None:
    """After any valid records a router believes, medium by medium, what the cache holds.

    Hashes are recomputed from whole prompts; the events say one by one, in order, what was told.
    """
    model, materializer, index = Model(), Materializer(SIZE), BlockIndex()
    steps = ["store_new"] * 5 + ["store_known"] * 3 + ["remove"] * 4 + ["clear", "retell"]
    for _ in range(data.draw(st.integers(1, 6))):
        records: list[Record] = []
        for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=5)):
            told = getattr(model, step)(data)
            records += told if isinstance(told, list) else [told] if told else []
        events = materializer.apply(records)
        assert list(flat(events)) == model.said
        check_contract(events, model)
        encode_batch(KVEventBatch(0.0, events, 0))
        index.apply(events)
        assert index.resident == model.resident
        assert materializer.num_blocks == len(model.blocks) == len(index)
        for block in model.blocks.values():
            assert index.overlap(block.prompt, block.space).any_medium <= len(block.prompt) // SIZE
        model.said.clear()
    oddities = index.oddities
    assert (oddities.stored_again, oddities.removed_unknown, oddities.malformed) == (0, 0, 0)


# ------------------------------------------------------------------------------------ coalescing

A = list(range(8))  # blocks 0..3
H1, H2, H3, H4 = hashes(A)


def told(*records: Record) -> list[Event]:
    return Materializer(SIZE).apply(records)


def test_store_remove_store_keeps_its_order() -> None:
    """Case 48: S R S of one block are three events in that order."""
    assert told(new(0, A[:2]), known(0), remove((0, 1)), known(0, medium=GPU)) == [
        stored([H1], None, A[:2]),
        stored([H1], None, A[:2], CPU),
        removed(H1),
        stored([H1], None, A[:2]),
    ]
    assert told(new(0, A[:2]), remove((0, 1)), new(1, A[:2])) == [
        stored([H1], None, A[:2]),
        removed(H1),
        stored([H1], None, A[:2]),
    ]


def test_a_chain_is_one_event() -> None:
    """Case 48: S(h1|None) S(h2|h1) S(h9|None) are S(h1, h2) and S(h9)."""
    other = [7, 7]
    assert told(new(0, A[:2]), new(1, A[2:4], 0), new(2, other)) == [
        stored([H1, H2], None, A[:4]),
        stored(hashes(other), None, other),
    ]


def test_a_branch_is_an_event_of_its_own() -> None:
    """A second child of a block is no continuation of the first."""
    branch = [*A[:2], 7, 7]
    assert told(new(0, A[:4]), new(2, branch[2:], 0)) == [
        stored([H1, H2], None, A[:4]),
        stored(hashes(branch)[1:], H1, branch[2:]),
    ]


def test_stores_on_two_media_do_not_merge() -> None:
    """Blocks that continue a chain on another medium are another event."""
    assert told(new(0, A[:2]), new(1, A[2:4], 0, CPU)) == [
        stored([H1], None, A[:2]),
        stored([H2], H1, A[2:4], CPU),
    ]


def test_namespaces_do_not_merge() -> None:
    """Roots in different namespaces are different events, each with its names."""
    events = told(*[new(at, A[:2], space=space) for at, space in enumerate(SPACES)])
    assert events == [
        stored(
            hashes(A[:2], space),
            None,
            A[:2],
            lora_name=space.lora_name,
            cache_salt=space.cache_salt,
            extra_key=space.extra_key,
        )
        for space in SPACES
    ]


def test_removals_on_one_medium_merge() -> None:
    """Case 48: R R on one medium are one event; on two media they are two."""
    store = new(0, A), known(0, 4)
    told_before = 2
    assert told(*store, remove((3, 1)), remove((2, 1)), remove((1, 1), medium=CPU))[
        told_before:
    ] == [removed(H4, H3), removed(H2, medium=CPU)]
    assert told(*store, remove((3, 1)), remove((3, 1), medium=CPU), remove((2, 1)))[
        told_before:
    ] == [removed(H4), removed(H4, medium=CPU), removed(H3)]


def test_children_are_removed_before_parents() -> None:
    """A range of several runs is told from its end: every child before its parent."""
    store = new(0, A[:2]), new(1, A[2:6], 0), new(3, A[6:], 2)
    assert told(*store, remove((0, 4)))[-1] == removed(H4, H3, H2, H1)
    assert told(*store, remove((2, 2), (0, 2)))[-1] == removed(H4, H3, H2, H1)


def test_a_store_behind_a_removal_is_an_event_of_its_own() -> None:
    """A child of the block just removed from a medium is stored, not removed."""
    events = told(new(0, A[:2]), known(0), remove((0, 1)), new(1, A[2:4], 0))
    assert events[2:] == [removed(H1), stored([H2], H1, A[2:4])]


def test_a_clear_is_between_what_came_before_and_after() -> None:
    """Nothing is joined across a clear, and every clear is told."""
    assert told(new(0, A[:2]), Clear(), Clear(), new(0, A[:2]), new(1, A[2:4], 0)) == [
        stored([H1], None, A[:2]),
        AllBlocksCleared(),
        AllBlocksCleared(),
        stored([H1, H2], None, A[:4]),
    ]


def test_a_known_range_with_a_jump_is_dense_events() -> None:
    """Case 29: ids that follow each other but not in one chain are told as dense events."""
    other = [7, 7, 8, 8]
    events = told(new(0, A[:4]), new(2, other), known(0, 4))
    assert events[2:] == [
        stored([H1, H2], None, A[:4], CPU),
        stored(hashes(other), None, other, CPU),
    ]
    middle = told(new(0, A), known(1, 2))[1]
    assert middle == stored([H2, H3], H1, A[2:6], CPU)


def test_nothing_is_joined_across_calls() -> None:
    """What one call returns is complete; the next one starts a new event."""
    materializer = Materializer(SIZE)
    assert materializer.apply([new(0, A[:2])]) == [stored([H1], None, A[:2])]
    assert materializer.apply([new(1, A[2:4], 0)]) == [stored([H2], H1, A[2:4])]
    assert materializer.apply([]) == []


def test_a_child_is_in_its_parents_namespace() -> None:
    """The namespace is told once, at the root; children inherit it, also after a sweep of others."""
    space = Namespace("ad", "salt", "ek")
    (event,) = told(new(0, A[:2], space=space), new(1, A[2:], 0))
    assert event == stored(
        hashes(A, space), None, A, lora_name="ad", cache_salt="salt", extra_key="ek"
    )


def test_the_dynamo_format_is_passed_on() -> None:
    """The hash format is the constructor's."""
    space = Namespace(cache_salt="salt")
    (event,) = Materializer(SIZE, HashFormat.DYNAMO).apply([new(0, A, space=space)])
    assert event == stored(hashes(A, space, dynamo=True), None, A, cache_salt="salt")
    assert hashes(A, space, dynamo=True) != hashes(A, space)


# -------------------------------------------------------------------------------------- breaches

SETUP: list[Record] = [
    new(0, A),  # 0..3 on the GPU
    known(0, 2),  # 0, 1 on the CPU as well
    remove((2, 1)),  # 2 is forgotten
    new(6, [5, 5, 6, 6]),
    remove((6, 2)),  # a whole run is forgotten
]
SHORT = StoreNew(GPU, BlockId(9), 2, None, None, pack_tokens([1, 2]))
BREACHES: dict[str, tuple[Record, str]] = {
    "M1 store of a known id": (new(1, [8, 8]), "store of id 1: it is known already"),
    "M1 store that begins in a known run": (new(3, [8, 8, 9, 9]), "id 3: it is known already"),
    "M1 child of an unknown id": (new(9, [8, 8], 8), "id 8 is unknown or forgotten"),
    "M1 child of an id to come": (new(9, [8, 8], 9), "id 9 is unknown or forgotten"),
    "M1 child of a forgotten id": (new(9, [8, 8], 2), "id 2 is forgotten"),
    "M1 child of a forgotten run": (new(9, [8, 8], 6), "id 6 is unknown or forgotten"),
    "M1 store of an unknown id": (known(8), "id 8 is unknown or forgotten"),
    "M1 store of a negative id": (known(-1), "id -1 is unknown or forgotten"),
    "M1 store of a forgotten id": (known(2), "store on CPU_PINNED: id 2 is forgotten"),
    "M1 store of a forgotten run": (known(6, 2), "id 6 is unknown or forgotten"),
    "M1 store of a range that ends beyond": (known(3, 2), "id 4 is unknown or forgotten"),
    "M1 removal of an unknown id": (remove((8, 1)), "id 8 is unknown or forgotten"),
    "M1 removal of a forgotten id": (remove((2, 1)), "remove from GPU: id 2 is not there"),
    "M1 removal of a range that ends beyond": (remove((3, 2)), "id 4 is unknown or forgotten"),
    "M2 store where it is": (known(0), "store on CPU_PINNED: id 0 is on it already"),
    "M2 store where some of it is": (known(1, 3), "store on CPU_PINNED: id 1 is on it already"),
    "M2 removal from elsewhere": (remove((3, 1), medium=CPU), "CPU_PINNED: id 3 is not there"),
    "M2 removal twice": (remove((3, 1), (3, 1)), "remove from GPU: id 3 is not there"),
    "no blocks": (new(9, []), "store of id 9: 0 token bytes are not 0 blocks of 2 tokens"),
    "few tokens": (SHORT, "store of id 9: 8 token bytes are not 2 blocks of 2 tokens"),
    "partial block": (new(9, [1, 2, 3]), "12 token bytes are not 1 blocks of 2 tokens"),
    "range of none": (known(0, 0), "range of ids 0+0: a range has at least one"),
    "removal of a range of none": (remove((0, -1)), "range of ids 0+-1: a range has at least one"),
}


@pytest.mark.parametrize(("record", "message"), BREACHES.values(), ids=BREACHES)
def test_breaches_raise(record: Record, message: str) -> None:
    """M1, M2: a record of unknown, forgotten or misplaced blocks raises, naming id and fault.

    A clear makes the materializer good again.
    """
    materializer = Materializer(SIZE)
    materializer.apply(SETUP)
    with pytest.raises(KVEventsError) as error:
        materializer.apply([record])
    assert message in str(error.value)
    events = materializer.apply([Clear(), new(0, A)])
    assert events[-2:] == [AllBlocksCleared(), stored([H1, H2, H3, H4], None, A)]
    assert materializer.num_blocks == 4


def test_ids_are_unknown_after_a_clear() -> None:
    """M1: a clear forgets every id; the same ids may be told anew, in any order."""
    materializer = Materializer(SIZE)
    materializer.apply([*SETUP, Clear()])
    assert materializer.num_blocks == 0
    with pytest.raises(KVEventsError, match="id 0 is unknown"):
        materializer.apply([known(0)])
    materializer.apply([Clear(), new(5, A[:2]), new(0, A[2:4], 5)])
    assert materializer.apply([known(0), known(5)]) == [
        stored([H2], H1, A[2:4], CPU),
        stored([H1], None, A[:2], CPU),
    ]
    with pytest.raises(KVEventsError, match="id 4: it is known already"):
        materializer.apply([new(4, [1, 1, 2, 2])])


@pytest.mark.parametrize("size", [0, -1])
def test_block_size_has_a_bound(size: int) -> None:
    """A block size below 1 is the caller's error, named."""
    with pytest.raises(ValueError, match=f"block_size: {size} is below 1"):
        Materializer(size)


Ids = st.integers(-1, 8).map(BlockId)
Media = st.sampled_from([GPU, CPU])
AnyRecord: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        lambda first, count, parent, space, medium: StoreNew(
            medium, first, count, parent, space, pack_tokens(range(SIZE * max(count, 0)))
        ),
        Ids,
        st.integers(-1, 4),
        st.none() | Ids,
        st.none() | st.sampled_from(SPACES),
        Media,
    ),
    st.builds(
        StoreNew, Media, Ids, st.integers(-1, 3), st.none(), st.none(), st.binary(max_size=9)
    ),
    st.builds(StoreKnown, Media, Ids, st.integers(-1, 4)),
    st.builds(Remove, Media, st.lists(st.tuples(Ids, st.integers(-1, 4)), max_size=3)),
    st.builds(Clear),
)


@trials(300)
@given(st.lists(AnyRecord, max_size=20))
def test_arbitrary_records(records: list[Record]) -> None:
    """Any records raise KVEventsError or give events that may be sent; a clear mends everything."""
    materializer = Materializer(SIZE)
    for record in records:
        try:
            events = materializer.apply([record])
        except KVEventsError:
            events = materializer.apply([Clear()])
            assert events[-1] == AllBlocksCleared()
            assert materializer.num_blocks == 0
        encode_batch(KVEventBatch(0.0, events, 0))


# ---------------------------------------------------------------------------------------- memory


def held_bytes(materializer: Materializer) -> int:
    return sum(
        len(run.tokens) + len(run.digests) + 8 * len(run.hashes) + len(run.media)
        for run in materializer._runs
    )


@pytest.mark.parametrize("per_run", [1, 10, 500])
def test_memory_follows_what_is_resident(per_run: int) -> None:
    """M3: 50,000 blocks come and go, the newest few staying; ids, runs and namespaces are forgotten."""
    materializer = Materializer(SIZE)
    total, keep = 50_000, 1_000
    count = total // per_run
    for number in range(count):
        first = number * per_run
        tokens = [word for at in range(first, first + per_run) for word in (at, at)]
        materializer.apply([new(first, tokens, space=Namespace(cache_salt=str(number)))])
        if first >= keep:
            materializer.apply([remove((first - keep, per_run))])
    assert materializer.num_blocks == keep
    assert held_bytes(materializer) < 4 * (keep + 33 * per_run) * (SIZE * 4 + 32 + 8 + 1)
    materializer.apply([remove((total - keep, keep))])
    assert materializer.num_blocks == 0
    assert len(materializer._runs) <= 32
    assert len(materializer._spaces) <= 33


def test_memory_of_a_mostly_forgotten_run_is_given_back() -> None:
    """M3: a run of which one block in a hundred stays does not keep the others' tokens."""
    materializer = Materializer(SIZE)
    total = 10_000
    materializer.apply([new(0, [5, 6] * total)])
    for first in reversed(range(0, total, 100)):
        materializer.apply([remove((first + 1, 99))])
    assert materializer.num_blocks == 100
    assert held_bytes(materializer) <= 2 * 100 * (SIZE * 4 + 32 + 8 + 1)
    kept = hashes([5, 6] * 401)
    assert materializer.apply([known(400)]) == [stored(kept[-1:], kept[-2], [5, 6], CPU)]


def test_forgotten_runs_keep_nothing_however_large() -> None:
    """M3: many small runs that stay do not keep large ones that are gone."""
    materializer = Materializer(SIZE)
    materializer.apply([new(at, [at, 1]) for at in range(500)])
    before = held_bytes(materializer)
    for number in range(200):
        first = 500 + 100 * number
        materializer.apply([new(first, [first, 2] * 100), remove((first, 100))])
        assert held_bytes(materializer) == before
    assert materializer.num_blocks == 500


# --------------------------------------------------------------------------- freeze, save, load

STEPS = ["store_new"] * 5 + ["store_known"] * 3 + ["remove"] * 3 + ["clear", "retell"]


def some_records(data: st.DataObject, model: Model, most: int) -> list[Record]:
    records: list[Record] = []
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=most)):
        told = getattr(model, step)(data)
        records += told if isinstance(told, list) else [told] if told else []
    return records


def through_a_file(frozen: FrozenRuns, hash_format: HashFormat = HashFormat.SGLANG) -> Materializer:
    """A new materializer that loads what was saved, as bytes."""
    pieces = [msgspec.msgpack.encode(run) for run in frozen.saved()]
    loaded = Materializer(SIZE, hash_format)
    loaded.load(msgspec.msgpack.decode(piece, type=SavedRun) for piece in pieces)
    return loaded


def snapshot(frozen: FrozenRuns, longest: int = 100) -> list[Event]:
    return [event for events in frozen.snapshot(longest) for event in events]


def believed(events: list[Event]) -> BlockIndex:
    index = BlockIndex()
    index.apply(events)
    return index


@trials(100)
@given(st.data())
def test_a_loaded_one_goes_on_the_same(data: st.DataObject) -> None:
    """From any moment, saved and loaded, it gives the same events for the same records ever after."""
    model, materializer = Model(), Materializer(SIZE)
    materializer.apply(some_records(data, model, 8))
    loaded = through_a_file(materializer.freeze())
    for _ in range(data.draw(st.integers(1, 3))):
        records = some_records(data, model, 4)
        assert loaded.apply(records) == materializer.apply(records)
        assert loaded.num_blocks == materializer.num_blocks
    again = through_a_file(loaded.freeze())
    assert snapshot(again.freeze()) == snapshot(materializer.freeze())


@trials(100)
@given(st.data(), st.integers(1, 5))
def test_a_snapshot_tells_all_of_it(data: st.DataObject, longest: int) -> None:
    """A router that reads it believes what the cache holds; each block once on each medium, in events of
    at most so many blocks; where the cache has no block without its parent, parents come first.
    """
    model, materializer = Model(), Materializer(SIZE)
    materializer.apply(some_records(data, model, 10))
    lists = list(materializer.freeze().snapshot(longest))
    index = BlockIndex()
    for events in lists:
        assert 1 <= len(events) <= len(StorageMedium)
        assert len({event.medium for event in events if isinstance(event, BlockStored)}) == len(
            events
        )
        for event in events:
            assert isinstance(event, BlockStored)
            assert event.block_hashes == lists_first(events).block_hashes
            assert len(event.block_hashes) <= longest
        encode_batch(KVEventBatch(0.0, events, 0))
        index.apply(events)
    assert index.resident == model.resident
    assert index.oddities.stored_again == 0
    whole = all(it.parent is None or it.parent in model.blocks for it in model.blocks.values())
    if whole:
        assert index.oddities.unknown_parent == 0
    for block in model.blocks.values():
        found = index.overlap(block.prompt, block.space)
        assert not whole or found.any_medium == len(block.prompt) // SIZE


def lists_first(events: list[Event]) -> BlockStored:
    assert isinstance(events[0], BlockStored)
    return events[0]


@trials(100)
@given(st.data())
def test_what_is_frozen_stays(data: st.DataObject) -> None:
    """Later records, and what they make the materializer forget and shrink, do not reach it."""
    model, materializer = Model(), Materializer(SIZE)
    materializer.apply(some_records(data, model, 8))
    frozen = materializer.freeze()
    before = snapshot(frozen), list(frozen.saved())
    resident = model.resident
    materializer.apply(some_records(data, model, 8))
    materializer.apply([Clear()])
    assert (snapshot(frozen), list(frozen.saved())) == before
    assert believed(before[0]).resident == resident


@trials(100)
@given(st.data())
def test_counts_are_those_of_a_recount(data: st.DataObject) -> None:
    """By medium, after every record, and after a load."""
    model, materializer = Model(), Materializer(SIZE)
    for _ in range(data.draw(st.integers(1, 6))):
        materializer.apply(some_records(data, model, 2))
        expected = {medium: len(held) for medium, held in model.resident.items()}
        assert {medium: materializer.count(medium) for medium in StorageMedium} == expected
    loaded = through_a_file(materializer.freeze())
    assert {medium: loaded.count(medium) for medium in StorageMedium} == expected
    assert loaded.num_blocks == len(model.blocks)


def test_a_load_replaces_what_is_held() -> None:
    """What was held before is forgotten; nothing saved is nothing held."""
    materializer = Materializer(SIZE)
    materializer.apply(SETUP)
    materializer.load(Materializer(SIZE).freeze().saved())
    assert materializer.num_blocks == 0
    assert [materializer.count(medium) for medium in StorageMedium] == [0] * 4
    assert snapshot(materializer.freeze()) == []
    assert materializer.apply([new(0, A)]) == [stored([H1, H2, H3, H4], None, A)]


def test_the_holes_of_a_run_are_kept() -> None:
    """Forgotten blocks in the middle are not told, and their ids stay unknown, also after a load."""
    materializer = Materializer(SIZE)
    materializer.apply([new(0, A), remove((1, 1))])
    for one in (materializer, through_a_file(materializer.freeze())):
        assert snapshot(one.freeze()) == [stored([H1], None, A[:2]), stored([H3, H4], H2, A[4:])]
        with pytest.raises(KVEventsError, match="id 1 is forgotten"):
            one.apply([known(1)])


def test_children_of_a_loaded_block_hash_as_before() -> None:
    """A namespace, its folding and the digests outlive the file, in either hash format."""
    space = Namespace("ad", "salt", "ek")
    for hash_format in HashFormat:
        materializer = Materializer(SIZE, hash_format)
        materializer.apply([new(0, A[:4], space=space)])
        loaded = through_a_file(materializer.freeze(), hash_format)
        child = new(2, A[4:], 1)
        assert loaded.apply([child]) == materializer.apply([child])


RUN = SavedRun(BlockId(5), None, BASE, bytes(16), bytes(64), bytes([1] * 8 + [2] * 8), b"\1\3")
NOT_RUNS: dict[str, dict[str, Any]] = {
    "no blocks": {"media": b""},
    "few tokens": {"tokens": bytes(15)},
    "many tokens": {"tokens": bytes(24)},
    "few digests": {"digests": bytes(63)},
    "few hashes": {"hashes": bytes(8)},
    "many blocks": {"media": b"\1\1\1"},
    "an unknown medium": {"media": b"\1\x10"},
    "all forgotten": {"media": b"\0\0"},
    "a parent above": {"parent_hash": 2**63},
    "a parent below": {"parent_hash": -(2**63) - 1},
    "its own parent": {"parent_hash": int.from_bytes(bytes([1] * 8), "little")},
}


@pytest.mark.parametrize("fields", NOT_RUNS.values(), ids=NOT_RUNS)
def test_runs_that_cannot_be(fields: dict[str, Any]) -> None:
    """Sizes that do not fit, media that are none, parents that are none: KVEventsError names the run."""
    materializer = Materializer(SIZE)
    materializer.load([RUN])
    assert materializer.num_blocks == 2
    with pytest.raises(KVEventsError, match="run of id 5"):
        materializer.load([msgspec.structs.replace(RUN, **fields)])


def test_runs_that_overlap() -> None:
    """Two runs with one id between them are refused, in either order."""
    for first in (4, 5, 6):
        other = msgspec.structs.replace(RUN, first_id=BlockId(first))
        for runs in ([RUN, other], [other, RUN]):
            with pytest.raises(KVEventsError, match="it is known already"):
                Materializer(SIZE).load(runs)
