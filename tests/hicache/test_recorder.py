"""The recorder: what each change writes down, and how the state is told anew."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from random import Random

import pytest
from hicache_rig import NAMESPACES, new_cache, prompt_of, put
from units_rig import MemoryStore, opened

from hicache import HiRadixCache, Node
from hicache.recorder import NullRecorder, Recorder
from hicache.tier import Tier
from hicache.tree import RadixTree
from kvevents import BASE, BlockIndex, Materializer, Namespace, StorageMedium, pack_tokens
from kvevents.index import Oddities
from kvevents.records import BlockId, Clear, Record, Remove, StoreKnown, StoreNew

A = list(range(12))
"""Three pages of four."""
B = [20, 21, 22, 23]
SALTED = Namespace(cache_salt="a")


def device_node(tree: RadixTree, parent: Node, tokens: list[int], first_page: int) -> Node:
    """A new node below `parent`, with a device copy."""
    node = tree.add(parent, pack_tokens(tokens))
    node.copies[Tier.DEVICE] = array("q", range(first_page, first_page + node.num_pages))
    return node


def store(first_id: int, tokens: list[int], parent_id: int | None, namespace: Namespace) -> Record:
    """The record of new blocks of four."""
    return StoreNew(
        StorageMedium.GPU,
        BlockId(first_id),
        len(tokens) // 4,
        None if parent_id is None else BlockId(parent_id),
        namespace if parent_id is None else None,
        pack_tokens(tokens),
    )


def told(records: list[Record]) -> int:
    """Blocks that the records store."""
    return sum(record.count for record in records if isinstance(record, StoreNew))


def filled(seed: int, num_pages: int = 24) -> HiRadixCache:
    """A cache full of prompts that branch."""
    cache, random = new_cache(num_pages, page_size=2), Random(seed)
    for _ in range(30):
        symbols = [random.randrange(3) for _ in range(random.randint(1, 6))]
        put(cache, prompt_of(symbols, 0, 2), random.choice(NAMESPACES))
    cache.take_records()
    return cache


# --------------------------------------------------------------------------------------- changes


def test_a_store_names_its_parent_or_its_namespace() -> None:
    """At the start of a prompt the record has a namespace, elsewhere the id of the block before."""
    cache = new_cache(8)
    put(cache, A[:8], SALTED)
    put(cache, A, SALTED)
    first, second = cache.take_records()
    assert first == store(0, A[:8], None, SALTED)
    assert second == store(2, A[8:], 1, SALTED)


def test_a_store_in_the_middle_of_a_node_names_the_block_before_it() -> None:
    """A branch from inside a node has as parent the block where it leaves, whatever was split."""
    cache = new_cache(8)
    put(cache, A)
    put(cache, [*A[:4], *B])
    assert cache.take_records()[1:] == [store(3, B, 0, BASE)]


def test_removals_in_a_row_are_one_record() -> None:
    """Nodes that go one after another are ranges of one record, children before parents."""
    cache = new_cache(8)
    put(cache, A[:4])
    put(cache, A)
    put(cache, B)
    cache.take_records()
    cache.evict(4)
    gone = [(BlockId(1), 2), (BlockId(0), 1), (BlockId(3), 1)]
    assert cache.take_records() == [Remove(StorageMedium.GPU, gone)]


def test_records_taken_are_not_added_to() -> None:
    """A removal after `take` is a record of its own; the one that was taken does not grow."""
    cache = new_cache(8)
    put(cache, A)
    cache.take_records()
    cache.evict(1)
    (first,) = cache.take_records()
    cache.evict(1)
    (second,) = cache.take_records()
    assert first == Remove(StorageMedium.GPU, [(BlockId(2), 1)])
    assert second == Remove(StorageMedium.GPU, [(BlockId(1), 1)])


def test_a_second_copy_is_a_store_of_known_blocks() -> None:
    """A node told before that gains another copy is named by its ids alone."""
    tree = RadixTree(page_size=4)
    recorder = Recorder(tree)
    node = device_node(tree, tree.root(BASE), A, 0)
    recorder.stored(node, Tier.DEVICE, new=True)
    recorder.take()
    recorder.stored(node, Tier.DEVICE, new=False)
    assert recorder.take() == [StoreKnown(StorageMedium.GPU, BlockId(0), 3)]


def test_removals_from_two_media_are_two_records() -> None:
    """What goes from the host and then from the device is not joined."""
    with opened() as rig:
        rig.backed_up(A)
        rig.cache.evict(1)
        rig.cache._tiered.drop(rig.cache._tiered.next_victim(Tier.HOST, 1) or missing(), Tier.HOST)
        rig.cache.evict(1)
        assert rig.cache._recorder.take() == [
            Remove(StorageMedium.GPU, [(BlockId(2), 1)]),
            Remove(StorageMedium.CPU, [(BlockId(2), 1)]),
            Remove(StorageMedium.GPU, [(BlockId(1), 1)]),
        ]


def missing() -> Node:
    raise AssertionError("there is a host leaf to evict")


def test_the_null_recorder_records_nothing() -> None:
    """Whatever it is told, it has no records and is never re-telling."""
    tree, recorder = RadixTree(page_size=4), NullRecorder()
    node = device_node(tree, tree.root(BASE), A, 0)
    recorder.stored(node, Tier.DEVICE, new=True)
    recorder.dropped(node, Tier.DEVICE)
    recorder.cleared()
    recorder.begin_retell()
    recorder.retell(10)
    assert recorder.take() == []
    assert not recorder.retelling


# ------------------------------------------------------------------------------------ re-telling


def test_an_empty_cache_is_retold_by_a_clear() -> None:
    """With nothing to tell, a re-telling is over as it begins."""
    cache = new_cache(8)
    cache.begin_retell()
    assert not cache.retelling
    assert cache.take_records() == [Clear()]


def test_a_retelling_replaces_what_was_not_taken() -> None:
    """Records not taken when it begins are dropped: the state says it all."""
    cache = new_cache(8)
    put(cache, A)
    put(cache, B)
    cache.evict(1)
    cache.begin_retell()
    cache.retell(100)
    clear, *rest = cache.take_records()
    assert clear == Clear()
    assert sorted(map(repr, rest)) == sorted(
        map(repr, [store(0, A[:8], None, BASE), store(3, B, None, BASE)])
    )


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_step_of_a_retelling_is_bounded(seed: int, num_blocks: int) -> None:
    """Each call tells at most `num_blocks` blocks, splitting nodes to do so, and fewer only when it tells
    many nodes; only the last tells less than it may.
    """
    cache = filled(seed)
    resident = cache.num_resident
    cache.begin_retell()
    steps = []
    while cache.retelling:
        cache.retell(num_blocks)
        records = cache.take_records()
        steps.append((told(records), len(records)))
    assert sum(blocks for blocks, _ in steps) == resident
    assert all(blocks <= num_blocks for blocks, _ in steps)
    last = max(place for place, (blocks, _) in enumerate(steps) if blocks)
    assert all(blocks + 2 * nodes >= num_blocks for blocks, nodes in steps[:last])
    assert cache.violations() == []


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_step_of_nothing_tells_nothing(num_blocks: int) -> None:
    """No blocks are no records."""
    cache = filled(1)
    cache.begin_retell()
    cache.take_records()
    cache.retell(num_blocks)
    assert cache.take_records() == []
    assert cache.retelling


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parents_are_retold_before_their_children(seed: int) -> None:
    """Each block's parent was told earlier in the same re-telling, and each block once."""
    cache = filled(seed)
    cache.begin_retell()
    while cache.retelling:
        cache.retell(2)
    clear, *stores = cache.take_records()
    assert clear == Clear()
    known: set[int] = set()
    for record in stores:
        assert isinstance(record, StoreNew)
        assert record.parent_id is None or record.parent_id in known
        ids = range(record.first_id, record.first_id + record.count)
        assert known.isdisjoint(ids)
        known.update(ids)


def test_changes_amid_a_retelling() -> None:
    """What was told is removed aloud; what was not goes silently; what is new is told once."""
    cache = new_cache(8)
    put(cache, A[:4])
    put(cache, B)
    cache.begin_retell()
    cache.retell(1)
    _, first = cache.take_records()
    cache.evict(2)
    assert isinstance(first, StoreNew)
    assert cache.take_records() == [Remove(StorageMedium.GPU, [(first.first_id, 1)])]
    put(cache, A)
    assert cache.take_records() == [store(2, A, None, BASE)]
    cache.retell(100)
    assert not cache.retelling
    assert cache.take_records() == []


def test_what_is_stored_below_the_untold_waits_for_it() -> None:
    """A new branch of a prefix that is still to be told is told after it."""
    cache = new_cache(8)
    put(cache, A)
    cache.begin_retell()
    cache.take_records()
    put(cache, [*A[:4], *B])
    assert cache.take_records() == []
    while cache.retelling:
        cache.retell(100)
    head, *branches = cache.take_records()
    assert head == store(0, A[:4], None, BASE)
    assert sorted(map(repr, branches)) == sorted(
        map(repr, [store(1, A[4:], 0, BASE), store(3, B, 0, BASE)])
    )


def test_a_flush_ends_a_retelling() -> None:
    """With everything gone there is nothing left to tell; what follows is told at once."""
    cache = filled(1)
    cache.begin_retell()
    cache.flush()
    assert not cache.retelling
    assert cache.take_records() == [Clear(), Clear()]


def test_a_retelling_that_begins_again_starts_over() -> None:
    """A second `begin_retell` before the first has ended tells everything again."""
    cache = filled(1)
    cache.begin_retell()
    cache.retell(3)
    cache.begin_retell()
    cache.retell(1000)
    clear, *stores = cache.take_records()
    assert clear == Clear()
    assert told(stores) == cache.num_resident


def test_a_retelling_that_nobody_continues_keeps_no_more_than_the_cache() -> None:
    """Requests below an untold prefix come and go, and leave no nodes behind."""
    cache = new_cache(8)
    cache.lock(put(cache, A).node)
    cache.begin_retell()
    before = live_nodes()
    for token in range(100):
        put(cache, [*A, *[token] * 4])
        cache.evict(1)
        put(cache, [token] * 8, Namespace(cache_salt=str(token)))
        cache.take_records()
    assert live_nodes() - before < 10


def live_nodes() -> int:
    """Nodes that something in this process still refers to."""
    gc.collect()
    return sum(type(one) is Node for one in gc.get_objects())


def test_a_half_of_a_split_node_is_told_though_the_other_half_went() -> None:
    """Split and cut amid a re-telling, before its turn: what is left of it came to be meanwhile."""
    cache = new_cache(8)
    put(cache, A)
    cache.begin_retell()
    cache.match_prefix(A[:4])
    assert cache.evict(2) == 2
    cache.retell(100)
    assert cache.take_records() == [Clear(), store(0, A[:4], None, BASE)]
    assert not cache.retelling


def test_a_retelling_goes_by_age() -> None:
    """Nodes are told in the order in which they came to be, so that ids ascend: what takes them in
    keeps them sorted, and would move all it has for each that comes out of order.
    """
    cache = new_cache(500, 2)
    for number in range(500):
        put(cache, [number, number])
    cache.begin_retell()
    ids = []
    while cache.retelling:
        cache.retell(7)
        ids += [one.first_id for one in cache.take_records() if isinstance(one, StoreNew)]
    assert len(ids) == 500
    assert ids == sorted(ids)


# --------------------------------------------------------------------- re-telling the lower tiers


def known(first_id: int, count: int, medium: StorageMedium) -> Record:
    """The record of known blocks on another medium."""
    return StoreKnown(medium, BlockId(first_id), count)


def test_a_retelling_names_every_tier_of_a_block() -> None:
    """Each block is told with its tokens once, on its first tier, and by its id on the others."""
    with opened(store=MemoryStore()) as rig:
        rig.backed_up(A)
        rig.cache.evict(1)
        rig.put(B)
        rig.cache._recorder.take()
        rig.cache.begin_retell()
        rig.cache.retell(100)
        clear, *records = rig.cache._recorder.take()
        assert clear == Clear()
        upper = store(0, A[:8], None, BASE)
        lower = StoreNew(
            StorageMedium.CPU, BlockId(2), 1, BlockId(1), None, bytes(pack_tokens(A[8:]))
        )
        assert sorted(map(repr, records)) == sorted(
            map(
                repr,
                [
                    upper,
                    known(0, 2, StorageMedium.CPU),
                    known(0, 2, StorageMedium.DISK),
                    lower,
                    known(2, 1, StorageMedium.DISK),
                    store(3, B, None, BASE),
                ],
            )
        )


@pytest.mark.parametrize("num_blocks", [1, 2, 100])
def test_changes_of_the_lower_tiers_amid_a_retelling(num_blocks: int) -> None:
    """What lands on the host or in the store, and what leaves it, is told once, whenever it happens."""
    with opened(store=MemoryStore()) as rig:
        for prompt in (A, [*A[:4], *B], list(range(50, 62))):
            rig.backed_up(prompt)
        rig.cache.evict(4)
        rig.put(A)
        rig.heard()
        rig.cache.begin_retell()
        materializer, index = Materializer(4), BlockIndex()
        changes: list[Callable[[], object]] = [
            lambda: rig.put([*A, *B]),
            rig.land,
            rig.cache.tick,
            lambda: rig.cache.evict(3),
            lambda: rig.fetched(list(range(50, 70))),
            rig.cache.reset_device,
            lambda: rig.put(A),
        ]
        for change in changes:
            change()
            rig.cache.retell(num_blocks)
            index.apply(materializer.apply(rig.cache._recorder.take()))
        while rig.cache.retelling:
            rig.cache.retell(num_blocks)
        index.apply(materializer.apply(rig.cache._recorder.take()))
        assert index.resident == rig.cache.resident_blocks()
        assert index.oddities == Oddities()
